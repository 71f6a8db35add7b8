"""Compare weights on the same examples and seeds: a run's with its base, or those of several runs.

torch is imported once the arguments are checked.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL.Image import Image

from retouch.config import ConfigError, RunConfig
from retouch.config.base import MOST_IMAGES
from retouch.config.needs import takes_references
from retouch.data.base import ItemFiles
from retouch.data.dataset import Dataset, all_embedded
from retouch.files.disk import write_whole
from retouch.imaging.png import write_png
from retouch.observe.comparison import BASE, Sampled, write_comparison
from retouch.observe.conflicts import Column
from retouch.observe.log import repeated_names
from retouch.observe.report import change_of
from retouch.observe.settings import sampling_differences, scoring_differences
from retouch.observe.transfer import Transfer, transfers
from retouch.process.plain_text import count_of
from retouch.rewards.base import Reward, RewardEntry
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.devices import own_device
from retouch.rewards.scorers.judge_budget import spending_of
from retouch.types import Example
from retouch.use.duels import pair_judges, win_rate_lines, win_rates
from retouch.use.items import examples_of, like, make_folder, require_count
from retouch.use.overlap import seen_in_training
from retouch.use.trained import Trained

if TYPE_CHECKING:
    from retouch.rewards.table import RewardTable
    from retouch.training.evaluation import Evaluation

logger = logging.getLogger(__name__)


def compare(
    trained: Trained, data: Path | None, images: int | None, out: Path | None, reference: Path | Image | None = None
) -> dict[str, Any]:
    """Evaluate the base and the weights of a run on the same examples and seeds.

    Args:
        reference: style reference for every example, instead of its own.

    Returns:
        {"examples", "images", "means": {name: {measure: value}}, "gains": {name: {measure: [mean, low, high]}}}: gains
        are paired differences from the evaluation before, with 95 % intervals. "against": name of the weights that
        the last gains compare with. "transfer": sentences on clear gains of a trained reader, by the names of "gains",
        if gold rewards read. "facets": `Evaluation.by_facet` by name, if the examples have facets. "win_rates":
        of `duels.win_rates`, if a reward compares two images.

    Raises:
        ConfigError: examples or a style reference that do not fit the run.
    """
    require_count("--images", images, MOST_IMAGES)
    config = trained.config
    dataset = _examples(config, data, reference)
    if out is not None:
        make_folder(out)
    with _scoring(config.rewards, config.reward_client, trained.run) as rewards:
        results = _evaluated(config, {"base": None, **trained.weights}, dataset, images, data, rewards)
    examples = dataset[: config.evaluation.num_examples]
    if out is not None:
        _write(results, examples, out, config)
    pairs = list(itertools.pairwise(results))
    return _result(results, examples, config.rewards, pairs, trained.after_rl, trained.run)


def compare_runs(
    runs: Mapping[str, Trained],
    folders: Mapping[str, Path],
    data: Path | None,
    images: int | None,
    out: Path | None,
    reference: Path | None = None,
) -> dict[str, Any]:
    """Evaluate the newest weights of several runs on the same examples and seeds, with the sampling settings of the
    first and the rewards of all of them, and their base if they have the same.

    Args:
        folders: run directories by the names of `runs`.
        out: folder for the files of `compare`, and compare.html.

    Returns:
        As `compare`, with gains over the first run.

    Raises:
        ConfigError: different evaluation examples, or a reward that two runs define differently.
    """
    entries = _common_rewards(runs)
    first, *others = runs
    evaluation = runs[first].config.evaluation
    configs = {
        name: _sampled_as(first, runs[first].config, name, trained.config).model_copy(update={"rewards": entries})
        for name, trained in runs.items()
    }
    datasets = {name: _examples(config, data, reference) for name, config in configs.items()}
    for other in others:
        _require_same(first, datasets[first], other, datasets[other])
        if reference is None and all(takes_references(configs[name], scored=True) for name in (first, other)):
            _require_same_references(first, datasets[first], other, datasets[other])
    if out is not None:
        make_folder(out)
    results: dict[str, Evaluation] = {}
    with _scoring(entries, configs[first].reward_client, runs[first].run) as rewards:
        for name, config in configs.items():
            # runs on one base share its evaluation; gains over different ones would not mean the same
            base = {BASE: None} if not results and one_base(list(configs.values())) else {}
            weights = {**base, name: runs[name].newest}
            images = images or evaluation.images_per_example
            results |= _evaluated(config, weights, datasets[name], images, data, rewards)
    examples = datasets[first][: evaluation.num_examples]
    if out is not None:
        image = _write(results, examples, out, configs[first])
        columns = {name: Column(name, found.means(), found.rows) for name, found in results.items()}
        write_comparison(folders, out / "compare.html", Sampled(columns, image))
    base_pair = [(BASE, first)] if BASE in results else []
    after_rl = {name for name, trained in runs.items() if [*trained.weights][-1:] == [*trained.after_rl]}
    pairs = [*base_pair, *((first, other) for other in others)]
    return _result(results, examples, entries, pairs, after_rl, runs[first].run)


def _sampled_as(first: str, model: RunConfig, name: str, config: RunConfig) -> RunConfig:
    """The run file of `name` with the sampling settings of the run `first`, and a warning that names what it changes:
    only the weights should differ."""
    keys = sampling_differences(model.model_dump(mode="json"), config.model_dump(mode="json"))
    if keys:
        shown = ", ".join(f"{key} {ours} instead of {own}" for key, (ours, own) in keys.items())
        logger.warning("%s is sampled with the settings of %s: %s", name, first, shown)
    steps = model.evaluation.num_steps or model.rollout.num_steps
    data = model.evaluation.data or model.data
    read = ("resolution", "fit", "invert_mask")
    images = {key: getattr(data, key) for key in read if key in keys and hasattr(data, key)}
    own = config.evaluation.data
    evaluation = {
        "num_examples": model.evaluation.num_examples,
        "num_steps": steps,
        "data": own and own.model_copy(update=images),
    }
    guidance = {"guidance_scale": model.rollout.guidance_scale} if "rollout.guidance_scale" in keys else {}
    return config.model_copy(
        update={
            "data": config.data.model_copy(update=images),
            "evaluation": config.evaluation.model_copy(update=evaluation),
            "rollout": config.rollout.model_copy(update=guidance),
        }
    )


def _source(config: RunConfig, data: Path | None) -> str:
    """The name of what `_examples` reads, for messages."""
    return "--data" if data else "evaluation.data" if config.evaluation.data else "data"


def _examples(config: RunConfig, data: Path | None, reference: Path | Image | None) -> Dataset:
    """The evaluation examples: those of `data`, or those that the run evaluated on, which without `evaluation.data` are
    its training examples."""
    section = like(config, data) if data else config.evaluation.data or config.data
    source = _source(config, data)
    if source == "data" and "${" in (path := str(getattr(section, "path", ""))):
        raise ConfigError(
            f"evaluation.data: not set in the run file, and neither is the variable of data.path, {path}; give --data, "
            "or export it"
        )
    dataset = examples_of(config, section, source, reference, scored=True)
    if source == "--data":
        seen_in_training(config, dataset, source)
    elif source == "data":
        logger.warning(
            "data: %s has no evaluation.data: its training examples are evaluated, which were not held out", config.name
        )
    return dataset


def _common_rewards(runs: Mapping[str, Trained]) -> dict[str, Reward]:
    """The rewards of all runs; two of one name must be defined the same."""
    found: dict[str, tuple[str, Reward]] = {}
    for run, trained in runs.items():
        for name, entry in trained.config.rewards.items():
            earlier, before = found.setdefault(name, (run, entry))
            # with what they have from the section `judge`, which a dump leaves there
            one, other = ({**each.model_dump(mode="json"), **each.scorer_options()} for each in (before, entry))
            keys = scoring_differences(one, other)
            if keys:
                raise ConfigError(
                    f"rewards.{name}: {earlier} and {run} define it differently ({', '.join(keys)}); rename the "
                    "reward in the config.yaml of one run, or make the sections equal"
                )
    return {name: entry for name, (_, entry) in found.items()}


def _require_same(name: str, one: Dataset, other_name: str, other: Dataset) -> None:
    """Raises ConfigError if two runs evaluate on different examples."""

    def shown(item: ItemFiles) -> tuple[Any, ...]:
        prompt = item.prompt if item.source_path is None else None  # the templates of runs may differ
        return item.id, item.source_path, item.mask_path, item.metadata.get("text"), prompt

    if list(map(shown, one.items)) != list(map(shown, other.items)):
        raise ConfigError(
            f"evaluation.data: {name} ({one.config.path}, {len(one)} examples) and {other_name} ({other.config.path}, "
            f"{len(other)} examples) evaluate on different examples; give both the same with --data"
        )


def _require_same_references(name: str, one: Dataset, other_name: str, other: Dataset) -> None:
    """Raises ConfigError if two runs have different references: a difference of their images could be that of these."""
    roles = [dataset.config.image_options.reference for dataset in (one, other)]
    if roles[0] != roles[1] or [i.reference_path for i in one.items] != [i.reference_path for i in other.items]:
        raise ConfigError(
            f"evaluation.data.reference: {name} ({roles[0]}) and {other_name} ({roles[1]}) have different style "
            "references; give both the same with --reference"
        )


def one_base(configs: Sequence[RunConfig]) -> bool:
    """Whether all runs started from the same model, with the same initial LoRA or adapter; if not, a log line gives
    this reason for the missing base."""
    models = [
        config.model.model_dump(exclude={"train"}) | {"initial": getattr(config.model.train, "initial_adapter", None)}
        for config in configs
    ]
    if all(model == models[0] for model in models):
        return True
    logger.info("no column %s: the runs started from different models", BASE)
    return False


@contextmanager
def _scoring(entries: Mapping[str, Reward], client: RewardClientConfig, run: Path | None) -> Iterator[RewardTable]:
    """Rewards that are ready; scorers for which a run would start servers are in this process. Judges count in the
    directory of the run."""
    from retouch.rewards.table import RewardTable

    here = {name: scored_here(entry) for name, entry in entries.items()}
    rewards = RewardTable(here, client, device=own_device(), spending=spending_of(run))
    rewards.start()
    try:
        rewards.wait_loaded()  # before a network is loaded
        yield rewards
    finally:
        rewards.close()


def _evaluated(
    config: RunConfig,
    weights: Mapping[str, Path | None],
    dataset: Dataset,
    images: int | None,
    data: Path | None,
    rewards: RewardTable,
) -> dict[str, Evaluation]:
    """The evaluation of each set of weights of one run; None is the base, which comes first."""
    if config.algorithm.trains_text_encoder:
        from retouch.algorithms.vlm_grpo.use import evaluate_trained

        return evaluate_trained(config, dataset, weights, images, rewards)
    from retouch.data.rules import require_one_batch
    from retouch.observe import Stopwatch
    from retouch.training.evaluation import evaluate
    from retouch.use.loaded import Loaded, for_items, free_memory

    require_one_batch(config, _source(config, data), dataset)
    free_memory()  # of the run before
    evaluated = dataset[: config.evaluation.num_examples]
    loaded = Loaded(
        for_items(config, dataset.items[: len(evaluated)], dataset.config), embedded=all_embedded(dataset.items)
    )
    found: dict[str, Evaluation] = {}
    for name, folder in weights.items():
        loaded.load(folder)
        found[name] = evaluate(
            loaded.model,
            loaded.network,
            evaluated,
            images or config.evaluation.images_per_example,
            config.evaluation.num_steps or config.rollout.num_steps,
            loaded.guidance_scale,
            config.rollout.batch_size_per_device,
            rewards,
            Stopwatch(),
        )
    return found


def _write(results: Mapping[str, Evaluation], examples: list[Example], out: Path, config: RunConfig) -> Image:
    """Write the measures of each image as JSONL, and a grid -> the grid."""
    from retouch.training.evaluation import evaluation_grid

    for name, result in results.items():
        lines = "".join(json.dumps(row) + "\n" for row in result.rows)
        write_whole(out / f"{as_file_name(name)}.jsonl", lines)
    image = evaluation_grid(examples, dict(results), config.evaluation.grid_examples or 8)
    write_png(image, out / "grid.png")
    return image


def as_file_name(weights: str) -> str:
    """Name of the files of some weights."""
    return weights.replace(" ", "-").replace("/", "-")


def _result(
    results: Mapping[str, Evaluation],
    examples: list[Example],
    rewards: Mapping[str, RewardEntry],
    pairs: Sequence[tuple[str, str]],
    after_rl: Set[str],
    run: Path | None,
) -> dict[str, Any]:
    judges = pair_judges({name: scored_here(entry) for name, entry in rewards.items()})
    rates = win_rates(judges, results, examples, pairs, spending_of(run))
    facets = {name: told for name, result in results.items() if (told := result.by_facet())}
    found = {f"{b} - {a}": confirmed(results[b], results[a], rewards) for a, b in pairs if b in after_rl}
    told = {label: [one.text() for one in each] for label, each in found.items() if each}
    return {
        **({"facets": facets} if facets else {}),
        "examples": len(examples),
        "images": len(next(iter(results.values())).rows),
        "rewards": list(rewards),
        "means": {name: result.means() for name, result in results.items()},
        "gains": {f"{b} - {a}": gains(results[b], results[a]) for a, b in pairs},
        "against": pairs[-1][0] if pairs else None,
        **({"win_rates": rates} if rates else {}),
        **({"transfer": told} if told else {}),
    }


def scored_here(entry: RewardEntry) -> RewardEntry:
    """The entry for this process: instead of on the run's own server, a scorer runs here, on this machine's GPU if it
    ran on one."""
    if entry.url not in (None, "auto"):
        return entry
    return entry.model_copy(update={"url": None, "device": "cpu" if entry.device == "cpu" else "auto"})


def gains(after: Evaluation, before: Evaluation) -> dict[str, list[float]]:
    """Paired difference of every measure with its interval, over the images that both have (at least two)."""
    changes = {measure: change_of(before.rows, after.rows, measure) for measure in after.means()}
    return {measure: list(change) for measure, change in changes.items() if change is not None}


def confirmed(after: Evaluation, before: Evaluation, rewards: Mapping[str, RewardEntry]) -> list[Transfer]:
    """The part of the gain of each trained reader that gold readers confirm."""
    gold = [name for name, entry in rewards.items() if entry.role == "gold"]
    trained = [n for n, entry in rewards.items() if n not in gold and (entry.weight or entry.gradient_weight)]
    return transfers(before.rows, after.rows, trained, gold)


def comparison_table(result: dict[str, Any]) -> str:
    """A table of measures by weights, then the gains over `against` with their intervals."""
    means = result["means"]
    again = repeated_names(*means.values())
    measures = dict.fromkeys(measure for values in means.values() for measure in values if measure not in again)
    shown = {label: of for label, of in result["gains"].items() if label.endswith(f" - {result['against']}")}
    width = max(12, *(len(name) + 2 for name in means))
    wide = {label: max(30, len(f"{label} [95 %]") + 3) for label in shown}
    head = "".join(f"{name:>{width}}" for name in means)
    lines = [f"{'':28}{head}" + "".join(f"   {f'{label} [95 %]':{wide[label] - 3}}" for label in shown)]
    for measure in measures:
        row = f"{measure:28}"
        for values in means.values():
            row += f"{values[measure]:{width}.4f}" if values.get(measure) is not None else f"{'–':>{width}}"
        for label, of in shown.items():
            gain = of.get(measure)
            told = f"{gain[0]:+.4f} [{gain[1]:+.4f}, {gain[2]:+.4f}]" if gain else ""
            row += f"   {told:{wide[label] - 3}}"
        lines.append(row)
    lines += [*_facet_lines(result, width), *win_rate_lines(result.get("win_rates", {}))]
    lines += [f"{label}: {text}" for label, texts in result.get("transfer", {}).items() for text in texts]
    counted = f"{count_of(result['images'], 'image')} of {count_of(result['examples'], 'example')}"
    return "\n".join([*(line.rstrip() for line in lines), f"{counted}, plain ODE, fixed seeds"])


def _facet_lines(result: dict[str, Any], width: int) -> list[str]:
    """One line for each value of a facet and each reward, weights as columns of a width."""
    facets: dict[str, Any] = result.get("facets", {})
    rewards = [name for name in next(iter(result["means"].values())) if name in result.get("rewards", [])]
    lines: list[str] = []
    for facet in dict.fromkeys(name for told in facets.values() for name in told):
        for value in next(iter(facets.values())).get(facet, {}):
            for reward in rewards:
                found = [told[facet][value].get(reward) for told in facets.values()]
                label = f"{facet} {value}" + (f" {reward}" if len(rewards) > 1 else "")
                lines.append(
                    f"{label:28}" + "".join(f"{'–':>{width}}" if v is None else f"{v:{width}.4f}" for v in found)
                )
    return lines
