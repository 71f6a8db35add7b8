"""Weights compared on the same examples and seeds: the base and what it was trained to, or several runs."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL.Image import Image

from retouch.algorithms.vlm_grpo.use import evaluate_trained
from retouch.config import ConfigError, RunConfig
from retouch.data.base import DataError, ItemFiles
from retouch.data.dataset import Dataset, all_embedded
from retouch.data.identity import images_of, paths, trained_on
from retouch.observe import Stopwatch
from retouch.observe.comparison import BASE, Column, Sampled, scoring_differences, write_comparison
from retouch.observe.statistics import paired_difference
from retouch.rewards.devices import own_device
from retouch.rewards.sections import (
    Reward,
    RewardClientConfig,
    RewardEntry,
)
from retouch.rewards.table import RewardTable
from retouch.training.build import fit_one_batch
from retouch.training.evaluation import (
    Evaluation,
    evaluate,
    evaluation_grid,
)
from retouch.types import Example
from retouch.use.items import examples_of, like, make_folder
from retouch.use.trained import Loaded, Trained, free_memory

logger = logging.getLogger(__name__)


def compare(
    trained: Trained, data: Path | None, images: int | None, out: Path | None, reference: Path | Image | None = None
) -> dict[str, Any]:
    """Evaluate base and weights on the same examples and seeds.

    Args:
        reference: style reference of every example, instead of its own.

    Returns:
        {"examples", "images", "means": {name: {measure: value}}, "gains": {name: {measure: [mean, low, high]}}}, gains
        over the evaluation before it, paired, with 95 % intervals. "against": name of the weights that the last gains
        are over. "facets" as of `Evaluation.by_facet`, by name, where the examples have any.

    Raises:
        ConfigError: no evaluation data.
    """
    config = trained.config
    dataset = _examples(config, data, reference)
    if out is not None:
        make_folder(out)
    with _scoring(config.rewards, config.reward_client) as rewards:
        results = _evaluated(config, {"base": None, **trained.weights}, dataset, images, data, rewards)
    examples = dataset[: config.evaluation.num_examples]
    if out is not None:
        _write(results, examples, out, config)
    pairs = list(itertools.pairwise(results))
    return _result(results, examples, list(config.rewards), pairs)


def compare_runs(
    runs: Mapping[str, Trained],
    folders: Mapping[str, Path],
    data: Path | None,
    images: int | None,
    out: Path | None,
    reference: Path | None = None,
) -> dict[str, Any]:
    """Evaluate the newest weights of several runs on the same examples and seeds, by the rewards of all of them; also
    their base, where they have one in common.

    Args:
        folders: run directories by the names of `runs`.
        out: folder for what `compare` writes there, and compare.html.

    Returns:
        As of `compare`, with gains over the first run.

    Raises:
        ConfigError: no evaluation data, runs whose evaluation data hold different examples, or a reward that two of
            them define differently.
    """
    entries = _common_rewards(runs)
    first, *others = runs
    evaluation = runs[first].config.evaluation
    count = {"num_examples": evaluation.num_examples}
    configs = {
        name: trained.config.model_copy(
            update={"rewards": entries, "evaluation": trained.config.evaluation.model_copy(update=count)}
        )
        for name, trained in runs.items()
    }
    datasets = {name: _examples(config, data, reference) for name, config in configs.items()}
    for other in others:
        _require_same(first, datasets[first], other, datasets[other])
    if out is not None:
        make_folder(out)
    results: dict[str, Evaluation] = {}
    with _scoring(entries, configs[first].reward_client) as rewards:
        for name, config in configs.items():
            base = {BASE: None} if not results and _one_base(list(configs.values())) else {}
            weights = {**base, name: runs[name].newest}
            images = images or evaluation.images_per_example
            results |= _evaluated(config, weights, datasets[name], images, data, rewards)
    examples = datasets[first][: evaluation.num_examples]
    if out is not None:
        image = _write(results, examples, out, configs[first])
        columns = {name: Column(name, found.means(), found.rows) for name, found in results.items()}
        write_comparison(folders, out / "compare.html", Sampled(columns, image))
    base_pair = [(BASE, first)] if BASE in results else []
    return _result(results, examples, list(entries), [*base_pair, *((first, other) for other in others)])


def _examples(config: RunConfig, data: Path | None, reference: Path | Image | None) -> Dataset:
    """The examples to evaluate a run on, from `data` or its own section.

    Raises:
        ConfigError: neither.
    """
    section = like(config, data) if data else config.evaluation.data
    if section is None:
        raise ConfigError("the run names no evaluation.data; give --data")
    dataset = examples_of(config, section, "--data" if data else "evaluation.data", reference, scored=True)
    if data:
        _warn_of_overlap(config, dataset)
    return dataset


def _warn_of_overlap(config: RunConfig, dataset: Dataset) -> None:
    """Warn where examples of --data are trained on, or where that cannot be found out."""
    training: list[Dataset] = []
    for key, section in (("data", config.data), ("warmup_data", config.warmup_data)):
        if section is None:
            continue
        try:
            listed = [item for item in section.items() if isinstance(item, ItemFiles)] if _is_here(section) else []
        except DataError:
            listed = []
        items = [item for item in listed if all(path.is_file() for path in paths(images_of(item)))]
        if not items:
            logger.warning(
                "--data: whether %s trained on its examples is unknown, because %s.path holds no images here: %s",
                config.name,
                key,
                section.path,
            )
        training.append(Dataset(section, items))
    seen = trained_on(dataset, *training)
    if seen:
        logger.warning(
            "--data: %d of %d examples (the first: %d) are trained on by %s: its data or warmup_data hold the same "
            "image (or, without images, the same prompt), so that the scores are not those of held-out examples; "
            "divide the data with `retouch data split`",
            len(seen),
            len(dataset),
            seen[0].id,
            config.name,
        )


def _is_here(section: Any) -> bool:
    """Whether the path is one of this machine: ids of the hub are not fetched for a warning."""
    return Path(section.path).expanduser().exists()


def _common_rewards(runs: Mapping[str, Trained]) -> dict[str, Reward]:
    """The rewards of all runs.

    Raises:
        ConfigError: two runs define one of them differently.
    """
    found: dict[str, tuple[str, Reward]] = {}
    for run, trained in runs.items():
        for name, entry in trained.config.rewards.items():
            earlier, before = found.setdefault(name, (run, entry))
            keys = scoring_differences(before.model_dump(mode="json"), entry.model_dump(mode="json"))
            if keys:
                raise ConfigError(
                    f"rewards.{name}: {earlier} and {run} define it differently ({', '.join(keys)}), so that their "
                    "scores cannot be compared; rename the reward in the config.yaml of one run, or make the "
                    "sections equal"
                )
    return {name: entry for name, (_, entry) in found.items()}


def _require_same(name: str, one: Dataset, other_name: str, other: Dataset) -> None:
    """Refuse to pair examples that are not the same.

    Raises:
        ConfigError: they differ.
    """

    def shown(item: ItemFiles) -> tuple[Any, ...]:
        prompt = item.prompt if item.source_path is None else None  # else templates of the runs may differ
        return item.id, item.source_path, item.mask_path, item.metadata.get("text"), prompt

    if list(map(shown, one.items)) != list(map(shown, other.items)):
        raise ConfigError(
            f"evaluation.data: {name} ({one.config.path}, {len(one)} examples) and {other_name} ({other.config.path}, "
            f"{len(other)} examples) evaluate on different examples; give both the same with --data"
        )


def _one_base(configs: Sequence[RunConfig]) -> bool:
    """Whether all runs started from the same model."""
    models = [config.model.model_dump(exclude={"train"}) for config in configs]
    return all(model == models[0] for model in models)


@contextmanager
def _scoring(entries: Mapping[str, Reward], client: RewardClientConfig) -> Iterator[RewardTable]:
    """Rewards that are ready, in this process where a run would start servers for itself."""
    rewards = RewardTable({name: _scored_here(entry) for name, entry in entries.items()}, client, device=own_device())
    rewards.start()
    try:
        rewards.settle()  # before a network is loaded beside them
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
    """Every set of weights of one run; None stands for its base, which comes first."""
    if config.algorithm.trains_text_encoder:
        return evaluate_trained(config, dataset, weights, images, rewards)
    fit_one_batch(config, "--data" if data else "evaluation.data", dataset)
    free_memory()  # that of the run before
    loaded = Loaded(config, embedded=all_embedded(dataset.items))
    examples = dataset[: config.evaluation.num_examples]
    return {name: _evaluate(loaded, folder, examples, images, rewards) for name, folder in weights.items()}


def _write(results: Mapping[str, Evaluation], examples: list[Example], out: Path, config: RunConfig) -> Image:
    """Rows as JSONL, and a grid -> the grid."""
    for name, result in results.items():
        lines = "".join(json.dumps(row) + "\n" for row in result.rows)
        (out / f"{name.replace(' ', '-').replace('/', '-')}.jsonl").write_text(lines, encoding="utf-8")
    image = evaluation_grid(examples, dict(results), config.evaluation.grid_examples or 8)
    image.save(out / "grid.png")
    return image


def _result(
    results: Mapping[str, Evaluation], examples: list[Example], rewards: list[str], pairs: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    facets = {name: told for name, result in results.items() if (told := result.by_facet())}
    return {
        **({"facets": facets} if facets else {}),
        "examples": len(examples),
        "images": len(next(iter(results.values())).rows),
        "rewards": rewards,
        "means": {name: result.means() for name, result in results.items()},
        "gains": {f"{b} - {a}": gains(results[b], results[a]) for a, b in pairs},
        "against": pairs[-1][0] if pairs else None,
    }


def _scored_here(entry: RewardEntry) -> RewardEntry:
    """The entry of an evaluation: a scorer of the run's own server runs in this process, and one that a GPU computed on
    the GPU of this machine, if it has one, whatever its number was where the run trained."""
    if entry.url not in (None, "auto"):
        return entry
    return entry.model_copy(update={"url": None, "device": "cpu" if entry.device == "cpu" else "auto"})


def gains(after: Evaluation, before: Evaluation) -> dict[str, list[float]]:
    """Paired differences of every measure with their intervals, over the images that both have (two at least)."""
    found: dict[str, list[float]] = {}
    for measure in after.means():
        pairs = [(a.get(measure), b.get(measure)) for a, b in zip(after.rows, before.rows, strict=True)]
        valid = [(float(a), float(b)) for a, b in pairs if a is not None and b is not None]
        if len(valid) > 1:
            found[measure] = list(paired_difference([a for a, _ in valid], [b for _, b in valid]))
    return found


def comparison_table(result: dict[str, Any]) -> str:
    """Measures as rows, weights as columns, then the gains over `against` with their intervals."""
    means = result["means"]
    measures = dict.fromkeys(measure for values in means.values() for measure in values)
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
    lines += _facet_lines(result)
    counted = f"{result['images']} images of {result['examples']} example{'s' if result['examples'] > 1 else ''}"
    return "\n".join([*(line.rstrip() for line in lines), f"{counted}, plain ODE, fixed seeds"])


def _facet_lines(result: dict[str, Any]) -> list[str]:
    """The rewards by facet: one line for each value of it and each reward, weights as columns."""
    facets: dict[str, Any] = result.get("facets", {})
    rewards = [name for name in next(iter(result["means"].values())) if name in result.get("rewards", [])]
    lines: list[str] = []
    for facet in dict.fromkeys(name for told in facets.values() for name in told):
        for value in next(iter(facets.values())).get(facet, {}):
            for reward in rewards:
                found = [told[facet][value].get(reward) for told in facets.values()]
                label = f"{facet} {value}" + (f" {reward}" if len(rewards) > 1 else "")
                lines.append(f"{label:28}" + "".join(f"{'–':>12}" if v is None else f"{v:12.4f}" for v in found))
    return lines


def _evaluate(
    loaded: Loaded, weights: Path | None, examples: list[Example], images: int | None, rewards: RewardTable
) -> Evaluation:
    c = loaded.config
    loaded.load(weights)
    return evaluate(
        loaded.model,
        loaded.network,
        examples,
        images or c.evaluation.images_per_example,
        c.evaluation.num_steps or c.rollout.num_steps,
        loaded.guidance_scale,
        c.rollout.batch_size_per_device,
        rewards,
        Stopwatch(),
    )
