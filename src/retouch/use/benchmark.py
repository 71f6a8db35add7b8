"""`retouch eval --benchmark`: sample what is missing, score what is missing, summarise.

Everything is under one folder: images/WEIGHTS/NAME.png, observations/WEIGHTS.jsonl, result.json and grid.png. A start
after a kill continues there. Several processes may share the work (`Shard`): each samples and scores its share, and
the last one to end writes the result.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from retouch.benchmarks.base import Benchmark
from retouch.benchmarks.observations import Observations
from retouch.benchmarks.outputs import Output, Shard, find_file, item_digest, outputs_of, own, unused_files
from retouch.benchmarks.result import ResultColumn, result_of
from retouch.config import ConfigError
from retouch.config.needs import takes_references
from retouch.data.dataset import Dataset, load_dataset
from retouch.errors import ImageProblem
from retouch.families.prompts import PromptCheck
from retouch.files import plain_json
from retouch.files.disk import read_bounded, write_whole
from retouch.imaging.png import write_png
from retouch.imaging.reading import open_image, to_rgb
from retouch.observe.comparison import BASE
from retouch.observe.grids import grid
from retouch.process.plain_text import count_of
from retouch.use import benchmark_distances
from retouch.use.benchmark_images import about_weights, as_trained, chunks_of, claim, sample_outputs, with_settings
from retouch.use.items import make_folder
from retouch.use.overlap import seen_in_training
from retouch.use.trained import Trained

logger = logging.getLogger(__name__)

_BATCH = 16  # images of another program by which shards divide the scoring
_GRID_ROWS = 8
_MOST_RESULT = 1 << 28  # bytes


@dataclass(frozen=True)
class SampledWeights:
    """A set of weights to sample with.

    Attributes:
        run: name of its run in `runs`.
        folder: of the weights; None: the base.
    """

    run: str
    folder: Path | None


def run_benchmark(
    benchmark: Benchmark,
    runs: Mapping[str, Trained],
    folders: Sequence[Path],
    out: Path,
    shard: Shard | None = None,
) -> dict[str, Any] | None:
    """Sample, score and summarise -> the content of result.json; None if other shards have not ended.

    Args:
        runs: runs by name; of several, the newest weights of each, and their base if they have the same.
        folders: of images that another program made, under the official names.
        shard: share of this process; None: all that is missing.

    Raises:
        ConfigError, DataError, CheckpointError: settings, data or weights that cannot work.
        RewardOutage: scorers stayed away; start again.
    """
    benchmark.check_rewards()
    make_folder(out)
    share = shard or Shard()
    configs = {name: with_settings(trained.config, benchmark) for name, trained in runs.items()}
    data = _items(benchmark, list(configs.values()))
    outputs = outputs_of(benchmark, data.items)
    _claim(out, benchmark)
    external = _external(folders, outputs)
    weights = _weights(runs)
    if clash := external.keys() & weights.keys():
        raise ConfigError(f"--images: given a folder named {min(clash)!r}, as weights of the run are; rename it")
    benchmark_distances.check_distances(benchmark, outputs)
    from retouch.use import benchmark_scores

    with benchmark_scores.scorers_of(benchmark, out) as scorers:
        abouts = _sample(benchmark, runs, configs, weights, data, outputs, out, share)
        abouts |= {name: {"images_of": str(folder)} for name, folder in external.items()}
        places = {**{name: out / "images" / name for name in weights}, **external}
        reader = benchmark_scores.OutputReader(benchmark, data.config)
        columns: dict[str, ResultColumn] = {}
        waiting = 0
        # Two passes. In the first this process scores its share of the images that are there; in the second it reads
        # what all shards have left on record. The last one to end finds nothing waiting and writes the result.
        for name, folder in places.items():
            chunks = (
                chunks_of(configs[weights[name].run], data.config, outputs, share, benchmark)
                if name in weights
                else own(outputs, share, _BATCH)
            )
            mine = [output for chunk in chunks for output in chunk]
            found, _ = reader.found(folder, mine)
            part = f"{share.index + 1}-of-{share.count}" if share.count > 1 else ""
            record = Observations(out / "observations", name, part)
            benchmark_scores.score(benchmark, found, reader, scorers, record)
        for name, folder in places.items():
            found, missing = reader.found(folder, outputs)
            rows, untried = benchmark_scores.rows_of(found, scorers, Observations(out / "observations", name))
            waiting += len(untried) + (len(missing) if name in weights else 0)
            resized = _resized(benchmark, [one.path for one in found]) if name in external else 0
            columns[name] = ResultColumn(rows, missing, abouts[name], resized)
        if waiting and share.count > 1:
            logger.info("shard %s is done; other shards have not scored %s yet", share, count_of(waiting, "image"))
            return None
        provenance = {
            "path": benchmark.path,
            "items": len(data),
            "unusable_items": len(data.config.items()) - len(data),
            "digest": hashlib.sha256("\n".join(map(item_digest, data.items)).encode()).hexdigest(),
        }
        result = result_of(benchmark, columns, provenance, scorers.provenance())
    # The result is written before the distances as well: they need a network of their own, and if that fails the scores
    # of hours are there.
    write_png(_grid(outputs, places, columns), out / "grid.png")
    _write_result(result, out)
    if benchmark.distances:
        result["distances"] = benchmark_distances.distances_of(benchmark, outputs, places, reader.images)
        _write_result(result, out)
    return result


def _write_result(result: Mapping[str, Any], out: Path) -> None:
    """Write result.json, with escapes of what UTF-8 cannot hold: names of files need not be UTF-8."""
    text = json.dumps(result, indent=2, ensure_ascii=False)
    write_whole(out / "result.json", text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n")


def _claim(out: Path, benchmark: Benchmark) -> None:
    """Check that a folder holds no result of another benchmark.

    Raises:
        ConfigError: it does.
    """
    try:
        result: Any = plain_json.loads(read_bounded(out / "result.json", _MOST_RESULT))
        name = result["benchmark"]["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if name != benchmark.name:
        raise ConfigError(
            f"--out: {out} holds the result of {name}, given the benchmark {benchmark.name}; give another --out"
        )


def _resized(benchmark: Benchmark, files: Sequence[Path]) -> int:
    """Number of images that have not the official size, where the protocol sets one."""
    if benchmark.official.resolution is None:
        return 0
    sizes: list[tuple[int, int]] = []
    for file in files:
        with suppress(ImageProblem):
            width, height = open_image(file).size
            sizes.append((height, width))
    return sum(size != benchmark.official_size for size in sizes)


def launcher_shard() -> Shard | None:
    """The share of a process that torchrun started; None without it. The processes do not talk to each other: the
    variables of the launcher are dropped, and its local rank chooses the GPU."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return None
    shard = Shard(int(os.environ["RANK"]), count)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else None
    if visible != "":
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local % len(devices)] if devices else str(local)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return shard


def _items(benchmark: Benchmark, configs: Sequence[Any]) -> Dataset:
    """The usable items, read as the benchmark reads them, if every model can sample them."""
    section = benchmark.data()
    needs = {name for entry in benchmark.rewards.values() for name in entry.example_images()}
    sections = [as_trained(section, benchmark, config) for config in configs]
    if any(other != sections[0] for other in sections):
        raise ConfigError("--run: the runs trained with different sizes or reference strips; evaluate them one by one")
    section = sections[0] if sections else section
    for config in configs:
        if config.model.needs and not section.has_images:
            raise ConfigError(
                f"--run: {config.model.family} needs {', '.join(sorted(config.model.needs))} of each item, but "
                f"{type(benchmark).title} has prompts alone; give a run of a family that generates from prompts"
            )
        needs |= config.model.needs
        needs |= {"reference"} if takes_references(config, scored=False) else set()
    data = load_dataset(section, benchmark.path_key, needs)
    for config in configs:
        from retouch.data.rules import require_one_batch

        multiple = config.model.size_multiple
        if any(side % multiple for size in section.sizes for side in size):
            raise ConfigError(
                f"resolution: given {list(section.size)}; {config.model.family} needs multiples of {multiple}; set "
                "resolution in the benchmark file"
            )
        require_one_batch(config, benchmark.path_key, data)
        warnings, problems = PromptCheck(config)(section, data.items)  # a benchmark keeps its items
        for warning in (*warnings, *map(str, problems.values())):
            logger.warning("%s: %s", benchmark.path_key, warning)
    return data


def _weights(runs: Mapping[str, Trained]) -> dict[str, SampledWeights]:
    """The weights to sample with, by the name of their folder; the base first."""
    from retouch.use.comparison import as_file_name, one_base

    if not runs:
        return {}
    first = next(iter(runs))
    base = {BASE: SampledWeights(first, None)} if one_base([trained.config for trained in runs.values()]) else {}
    one = [(name, SampledWeights(first, folder)) for name, folder in runs[first].weights.items()]
    several = [(name, SampledWeights(name, trained.newest)) for name, trained in runs.items()]
    for name, sampled in several if len(runs) > 1 else one:
        if as_file_name(name) in base:
            raise ConfigError(
                f"--run: the images of {name!r} would be in the folder {as_file_name(name)!r}, as those of other "
                "weights are; rename its run directory"
            )
        base[as_file_name(name)] = sampled
    return base


def _sample(
    benchmark: Benchmark,
    runs: Mapping[str, Trained],
    configs: Mapping[str, Any],
    weights: Mapping[str, SampledWeights],
    data: Dataset,
    outputs: Sequence[Output],
    out: Path,
    shard: Shard,
) -> dict[str, dict[str, Any]]:
    """Sample the missing outputs of every set of weights -> their provenance."""
    abouts: dict[str, dict[str, Any]] = {}
    seen = {run: len(seen_in_training(configs[run], data, "--path")) for run in runs}
    for name, sampled in weights.items():
        abouts[name] = about_weights(configs[sampled.run], sampled.folder, benchmark, data.config)
        claim(out / "images" / name, {**abouts[name], "benchmark": benchmark.name})
        # resolved: records of folders have the key as it was given
        abouts[name]["sampling"]["guidance_scale"] = configs[sampled.run].guidance_scale
        _warn_of_other_sampling(abouts, name)
        abouts[name]["trained_on"] = 0 if sampled.folder is None else seen[sampled.run]
    for run in runs:
        folders = {name: sampled.folder for name, sampled in weights.items() if sampled.run == run}
        sample_outputs(configs[run], folders, data.config, outputs, out / "images", shard, benchmark)
    return abouts


def _warn_of_other_sampling(abouts: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Warn of weights that are sampled with other settings than the first: differences of their measures are not those
    of the weights alone."""
    first = next(iter(abouts))
    own, before = abouts[name]["sampling"], abouts[first]["sampling"]
    if keys := [key for key in own if own[key] != before[key]]:
        shown = ", ".join(f"{key} {own[key]} instead of {before[key]}" for key in keys)
        logger.warning(
            "--run: %s is sampled with %s, as %s is; set num_steps and guidance_scale in the benchmark file",
            name,
            shown,
            first,
        )


def _external(folders: Sequence[Path], outputs: Sequence[Output]) -> dict[str, Path]:
    """Folders of images by their name; each has some of the outputs."""
    named: dict[str, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--images: given {folder}; expected a folder of images, or a number of images")
        name = folder.resolve().name
        if name in named:
            raise ConfigError(f"--images: two folders are named {name!r}; rename one")
        present = sum(find_file(folder, output.file) is not None for output in outputs)
        if not present:
            raise ConfigError(
                f"--images: {folder} has none of the {count_of(len(outputs), 'image')}; the first would be "
                f"{outputs[0].file}"
            )
        if present < len(outputs):
            logger.warning("%s: %d of %s missing", folder, len(outputs) - present, count_of(len(outputs), "image"))
        if unused := unused_files(folder, outputs):
            logger.warning(
                "%s: not scored, because it is no output of the benchmark: %s; the first: %s",
                folder,
                count_of(len(unused), "image"),
                unused[0].relative_to(folder),
            )
        named[name] = folder
    return named


def _grid(outputs: Sequence[Output], places: Mapping[str, Path], columns: Mapping[str, ResultColumn]) -> Image.Image:
    """The first items: the source or the prompt, and the first output of each column."""
    rows: list[list[tuple[Any, str]]] = []
    for output in [output for output in outputs if output.index == 0][:_GRID_ROWS]:
        item = output.item
        files = [item.source_path, *(find_file(folder, output.file) for folder in places.values())]
        labels = [str(item.metadata.get("text") or item.prompt), *("" for _ in places)]
        rows.append([(_shown(file), label) for file, label in zip(files, labels, strict=True)])
    return grid(rows, ["input", *columns])


def _shown(file: Any) -> Image.Image:
    """An image; white where there is none, or where it cannot be read."""
    with suppress(ImageProblem):
        if file is not None:
            return to_rgb(open_image(file))
    return Image.new("RGB", (96, 96), "white")
