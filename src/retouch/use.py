"""Using trained weights: sample, compare with the base, export. The same for every family."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from retouch.adapters.export import FORMATS, Base, export
from retouch.adapters.train_ip_adapter import initial_adapter
from retouch.adapters.trainee import Trainee, make_trainable
from retouch.build import fit_one_batch
from retouch.config import ConfigError, RunConfig, load_run, parse_run
from retouch.config.algorithm_sections import RlConfig
from retouch.config.data_sections import DEFAULT_TEMPLATE, FITS, DataSection, ManifestData, PictureSection, ProtocolData
from retouch.config.errors import nearest
from retouch.config.families import FACTS
from retouch.config.needs import needed_pictures, takes_references
from retouch.data import DataError, Dataset, ItemFiles, derive_seed, load_dataset
from retouch.data.dataset import check_item, read_item
from retouch.data.validate import data_at
from retouch.disk import file_problem, writing
from retouch.engine import CheckpointError, Engine, Policy
from retouch.engine.checkpoint import complete_checkpoints, read_state
from retouch.evaluate import Evaluation, evaluate, evaluation_grid
from retouch.imaging import open_image, paste_back, read_mask, to_rgb
from retouch.models import family_class, load_model
from retouch.models.loading import DTYPES, component_path
from retouch.observe import Stopwatch
from retouch.observe.statistics import paired_difference
from retouch.rewards.compose import RewardTable
from retouch.rollout import broken_rows, ode_plan, require_drawn, sample, to_uint8, without_strip
from retouch.types import DiffusionModel, Example
from retouch.vlm.use import evaluate_trained, sample_trained

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A run file and where weights for it are, by name, oldest first ("base" has none)."""

    config: RunConfig
    weights: Mapping[str, Path]

    @property
    def newest(self) -> Path | None:
        """The weights to use; None: the base."""
        return next(reversed(list(self.weights.values())), None)

    @classmethod
    def find(cls, run: Path | None, config: Path | None, weights: Path | None, raw: bool) -> Trained:
        """From a run directory (its warmed-up and newest checkpoints), or a run file and a weights folder.

        Raises:
            ConfigError, CheckpointError: nothing there.
        """
        if config is not None:
            found = {} if weights is None else {"trained": weights_folder(weights, raw=raw)}
            return cls(load_run(config), found)
        assert run is not None
        if not (run / "config.yaml").is_file():
            raise ConfigError(f"--run: {run} is not a run directory (no config.yaml)")
        loaded = load_run(run / "config.yaml")
        folders = complete_checkpoints(run / "checkpoints")
        if weights is not None:
            return cls(loaded, {"trained": weights_folder(weights, raw=raw)})
        if not folders:
            raise CheckpointError(f"{run} has no complete checkpoint yet")
        named = {_stage(f, loaded): f for f in folders[:-1]}  # of each stage the newest
        chosen = {"warmed up": named["warmed up"]} if "warmed up" in named else {}
        chosen[_stage(folders[-1], loaded)] = folders[-1]
        return cls(loaded, {name: weights_folder(folder, raw=raw) for name, folder in chosen.items()})


@dataclass(frozen=True)
class SampleRequest:
    """What to repaint: a data set, or one picture.

    Attributes:
        reference: picture whose style to take, instead of the items' own; for a run that trained a style adapter.
        size: (height, width) to repaint at; None: the run's.
        fit: as `data.fit`; None: the run's.
        feather: radius in pixels of a soft edge inside the mask.
    """

    data: Path | None
    image: Path | None
    mask: Path | None
    text: str | None
    prompt: str | None
    reference: Path | None
    seed: int
    count: int
    steps: int | None
    size: tuple[int, int] | None
    fit: str | None
    feather: float


class Loaded:
    """A model ready to sample with any of several weights."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.engine = Engine(config.training, config.optimizer, config.seed)
        initial_adapter(config.model.train, config.model.family)
        self.model: DiffusionModel = load_model(config.model, self.engine.device)
        self.trainee: Trainee = make_trainable(self.model.network, config.model.train, self.model.spec, config.seed)
        self.network: nn.Module = self.engine.prepare(self.model.network, gradient_checkpointing=False)
        self.policy = Policy(self.model.network)
        self.base: dict[str, Tensor] = {n: t.clone() for n, t in self.policy.state().items()}

    @property
    def guidance_scale(self) -> float:
        given = self.config.rollout.guidance_scale
        return self.model.spec.guidance_scale if given is None else given

    def load(self, weights: Path | None) -> None:
        """Use the weights of a folder; None: the base.

        Raises:
            CheckpointError: weights of another model.
        """
        try:
            self.policy.load(self.base if weights is None else self.trainee.load(weights))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{weights}: {error}") from None


def sample_to_folder(trained: Trained, request: SampleRequest, out: Path) -> list[Path]:
    """Repaint and write PNGs of the sources' own size -> their paths. Outside the mask every pixel stays."""
    section, items = items_to_sample(trained.config, request)
    _make_folder(out)
    if trained.config.algorithm.name == "vlm_grpo":
        data = Dataset(section, items)
        return sample_trained(trained.config, data, trained.newest, request.seed, request.count, request.steps, out)
    loaded = Loaded(trained.config)
    _fits(section.size, loaded.model)
    loaded.load(trained.newest)
    steps = request.steps or trained.config.evaluation.num_steps or trained.config.rollout.num_steps
    written: list[Path] = []
    for item in items:
        example, notes = read_item(item, section)
        condition = loaded.model.encode([example], loaded.guidance_scale)
        plan = ode_plan(loaded.model.schedule(steps, condition.size))
        for k in range(request.count):
            seed = derive_seed("sample", request.seed, example.id, k)
            final = sample(loaded.model, loaded.network, plan, condition, [seed]).final
            decoded = loaded.model.decode(final)
            require_drawn(broken_rows(decoded), example.id)
            image = Image.fromarray(without_strip(to_uint8(decoded), [example])[0].numpy())
            path = out / f"{example.id:05d}-{k}.png"
            into_source(item, image, notes, section, request.feather).save(path)
            written.append(path)
    return written


def into_source(
    item: ItemFiles, image: Image.Image, notes: dict[str, Any], section: DataSection, feather: float
) -> Image.Image:
    """Put a generated crop back to where it was cut from, at the size of the source, inside the mask only."""
    if item.source_path is None or item.mask_path is None or not isinstance(section, PictureSection):
        return image
    source = to_rgb(open_image(item.source_path))
    mask, _ = read_mask(open_image(item.mask_path), str(item.mask_path), invert=section.invert_mask)
    x, y = source.width / notes["scaled"][0], source.height / notes["scaled"][1]
    left, top, right, bottom = notes["window"]
    box = (round(left * x), round(top * y), round(right * x), round(bottom * y))
    page = source.copy()
    page.paste(image.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.LANCZOS), box[:2])
    return Image.fromarray(paste_back(np.asarray(source), np.asarray(page), np.asarray(mask), feather))


def items_to_sample(config: RunConfig, request: SampleRequest) -> tuple[DataSection, list[ItemFiles]]:
    """The items of a request, checked, and the section that says how to read them.

    Raises:
        ConfigError: neither or both of a data set and a picture, a picture without mask (but for a model that changes
            whole pictures) and text, or no such fit.
        DataError: a broken picture or mask, or more broken items than the run allows.
    """
    if (request.data is None) == (request.image is None):
        raise ConfigError("give either --data, or --image with --mask and --text (or --prompt)")
    if request.fit not in (None, *FITS):
        raise ConfigError(f"--fit: given {request.fit!r}; {nearest(request.fit, FITS)}")
    given = {"resolution": request.size, "fit": request.fit}
    update = {name: value for name, value in given.items() if value is not None}
    if request.data is not None:
        section = _like(config, request.data).model_copy(update=update)
        return section, _examples_of(config, section, "--data", request.reference, scored=False).items
    edits = FACTS[config.model.family].edits
    if (request.mask is None and not edits) or (request.text is None and request.prompt is None):
        raise ConfigError(f"--image needs {'' if edits else '--mask and '}--text (or --prompt)")
    if request.text is not None and not request.text.strip():
        raise ConfigError("--text: empty; say what the mask shall read")
    section = ManifestData(path="").model_copy(
        update={**_shared(config.data, ManifestData), "reference": "given", **update}
    )
    template = getattr(config.data, "prompt_template", DEFAULT_TEMPLATE)
    prompt = request.prompt if request.prompt is not None else template.replace("{text}", request.text or "")
    if takes_references(config, scored=False) and request.reference is None:
        raise ConfigError(
            "--image needs --reference: the run trained with style pictures (an adapter or reference_strip); give one"
        )
    _takes_references(config, request.reference, scored=False)
    item = ItemFiles(0, prompt, request.image, request.mask, request.reference)
    problem = check_item(item, section, needed_pictures(config, training=False, scored=False))
    if problem:
        raise DataError(problem.problem)
    return section, [item]


def compare(
    trained: Trained, data: Path | None, images: int | None, out: Path | None, reference: Path | None = None
) -> dict[str, Any]:
    """Evaluate base and weights on the same examples and seeds.

    Args:
        reference: picture whose style every example takes, instead of its own.

    Returns:
        {"examples", "images", "means": {name: {measure: value}}, "gains": {name: {measure: [mean, low, high]}}}, gains
        over the evaluation before it, paired, with 95 % intervals. "facets" as of `Evaluation.by_facet`, by name, where
        the examples have any.

    Raises:
        ConfigError: no evaluation data.
    """
    config = trained.config
    section = _like(config, data) if data else config.evaluation.data
    if section is None:
        raise ConfigError("the run names no evaluation.data; give --data")
    dataset = _examples_of(config, section, "--data" if data else "evaluation.data", reference, scored=True)
    examples = dataset[: config.evaluation.num_examples]
    if out is not None:
        _make_folder(out)
    rewards = RewardTable(
        {name: e.model_copy(update={"url": None}) if e.url == "auto" else e for name, e in config.rewards.items()},
        config.reward_client,
    )
    rewards.start()
    try:
        rewards.settle()  # before a network is loaded beside them
        if config.algorithm.name == "vlm_grpo":
            results = evaluate_trained(config, dataset, {"base": None, **trained.weights}, images, rewards)
        else:
            fit_one_batch(config, "--data" if data else "evaluation.data", dataset)
            loaded = Loaded(config)
            results = {"base": _evaluate(loaded, None, examples, images, rewards)}
            for name, folder in trained.weights.items():
                results[name] = _evaluate(loaded, folder, examples, images, rewards)
    finally:
        rewards.close()
    if out is not None:
        evaluation_grid(examples, results, config.evaluation.grid_examples or 8).save(out / "grid.png")
        for name, result in results.items():
            lines = "".join(json.dumps(row) + "\n" for row in result.rows)
            (out / f"{name.replace(' ', '-')}.jsonl").write_text(lines, encoding="utf-8")
    names = list(results)
    facets = {name: told for name, result in results.items() if (told := result.by_facet())}
    return {
        **({"facets": facets} if facets else {}),
        "examples": len(examples),
        "images": len(results["base"].rows),
        "rewards": list(config.rewards),
        "means": {name: result.means() for name, result in results.items()},
        "gains": {f"{b} - {a}": gains(results[b], results[a]) for a, b in itertools.pairwise(names)},
    }


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
    """Measures as rows, weights as columns, the last gain with its interval."""
    means = result["means"]
    measures = dict.fromkeys(measure for values in means.values() for measure in values)
    label, last = next(reversed(result["gains"].items()), ("", {}))
    lines = [f"{'':28}" + "".join(f"{name:>12}" for name in means) + (f"   {label} [95 %]" if label else "")]
    for measure in measures:
        values = "".join(
            f"{v:12.4f}" if (v := row.get(measure)) is not None else f"{'–':>12}" for row in means.values()
        )
        gain = last.get(measure)
        lines.append(f"{measure:28}{values}" + (f"   {gain[0]:+.4f} [{gain[1]:+.4f}, {gain[2]:+.4f}]" if gain else ""))
    lines += _facet_lines(result)
    counted = f"{result['images']} images of {result['examples']} example{'s' if result['examples'] > 1 else ''}"
    return "\n".join([*lines, f"{counted}, plain ODE, fixed seeds"])


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


def export_weights(checkpoint: Path, to: str, out: Path | None, *, raw: bool) -> Path:
    """Write the weights of a checkpoint (of a run directory, its newest one) in another program's files -> the path
    written, by default below `exports` of the run.

    Raises:
        ConfigError: a format that does not exist or does not fit what was trained, or an `out` that holds files.
        CheckpointError: weights that are missing or damaged.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to: given {to!r}; {nearest(to, FORMATS)}")
    if (checkpoint / "config.yaml").is_file() and not (checkpoint / "complete.json").is_file():
        found = complete_checkpoints(checkpoint / "checkpoints")
        if not found:
            raise CheckpointError(f"{checkpoint} has no complete checkpoint yet")
        checkpoint = found[-1]
    folder = weights_folder(checkpoint, raw=raw)
    if out is None:
        out = _export_folder(folder.parent, f"{to}-raw" if raw else to)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} is not an empty folder; choose another")
    config = parse_run(yaml.safe_load(read_state(folder.parent)["config"]), source=str(checkpoint)).model
    name = family_class(config.family).network_name
    base = Base(component_path(config.path, config.family), name, config.train.kind, DTYPES[config.dtype])
    try:
        with writing(out):
            written = export(base, folder, to, out)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, ConfigError) or (isinstance(error, OSError) and file_problem(error)):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{checkpoint}: cannot be exported: {reason}") from None
    logger.info("exported %s", folder)
    return written


def _export_folder(checkpoint: Path, name: str) -> Path:
    """Below the run of a checkpoint, or beside one that stands alone; never inside it."""
    checkpoint = checkpoint.resolve()  # of "." as well
    in_a_run = checkpoint.parent.name == "checkpoints"
    root = checkpoint.parents[1] / "exports" if in_a_run else checkpoint.parent
    return root / f"{checkpoint.name}-{name}"


def weights_folder(path: Path, *, raw: bool) -> Path:
    """The weights inside a checkpoint (averaged ones where it has them, unless `raw`), or the folder itself.

    Raises:
        CheckpointError: nothing of the kind.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint or weights folder")
    if (path / "weights").is_dir():
        if not (path / "complete.json").is_file():
            raise CheckpointError(f"{path} is not complete; give another checkpoint")
        return path / "ema" if (path / "ema").is_dir() and not raw else path / "weights"
    if not list(path.glob("*.safetensors")):
        raise CheckpointError(f"{path}: holds neither a checkpoint nor weights")
    return path


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


def _stage(folder: Path, config: RunConfig) -> str:
    """What the weights of a checkpoint went through: "warmed up", "after RL", or "trained"."""
    progress = read_state(folder)["progress"]
    if config.algorithm.name == "sft" or progress["phase"] != "rl":
        return "trained"
    warmup = config.algorithm.warmup_steps if isinstance(config.algorithm, RlConfig) else 0
    return "warmed up" if progress["step"] == warmup > 0 else "after RL"


def _examples_of(config: RunConfig, section: Any, purpose: str, reference: Path | None, *, scored: bool) -> Dataset:
    """The usable examples of a section, with one reference for all where one is given.

    Raises:
        ConfigError: a reference that the run cannot take.
        DataError: more broken items than the section allows, or a broken reference.
    """
    _takes_references(config, reference, scored=scored)
    needs = needed_pictures(config, training=False, scored=scored)
    if reference is None:
        return load_dataset(section, purpose, needs)
    to_rgb(open_image(reference))  # one message, not one an item
    found = load_dataset(section, purpose, needs - {"reference"})
    return Dataset(section, [replace(item, reference_path=reference) for item in found.items])


def _takes_references(config: RunConfig, reference: Path | None, *, scored: bool) -> None:
    if reference is not None and not takes_references(config, scored=scored):
        unjudged = ", and no reward does" if scored else ""
        raise ConfigError(
            f"--reference: given {reference}, but the run trained {config.model.train.kind} weights, which see no "
            f"reference{unjudged}; leave it out"
        )


def _make_folder(out: Path) -> None:
    """Before minutes go into what is to be written there."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out: {out} is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)


def _fits(size: tuple[int, int], model: DiffusionModel) -> None:
    multiple = model.spec.size_multiple
    if any(side % multiple for side in size):
        near = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in size)
        raise ConfigError(
            f"resolution: given {size[0]}x{size[1]}; {model.spec.family} needs multiples of {multiple}; set {near}"
        )


def _like(config: RunConfig, path: Path) -> Any:
    """A data section for `path` that reads as the run's evaluation data (or training data) does."""
    model = config.evaluation.data or config.data
    if isinstance(model, ProtocolData):  # nothing in a path tells these apart
        return model.model_copy(update={"path": str(path), "limit": None, "part": "all", "curriculum": 1})
    section = data_at(path, config.data.size)
    same = _shared(model, type(section))
    same |= {"reference": "mask_box"} if same.get("reference") == "half_box" else {}  # which is to train on
    return section.model_copy(update={k: v for k, v in same.items() if k not in ("format", "limit")})


def _shared(model: DataSection, kind: type[DataSection]) -> dict[str, Any]:
    """What a section says that one of another format can say, too."""
    return {
        name: getattr(model, name)
        for name in kind.model_fields
        if name not in ("path", "format", "limit", "image_root", "list_file") and hasattr(model, name)
    }
