"""Commands of trained weights: sample, demo-ui, eval, export."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retouch.cli.options import Json, Trust, is_count, note_loading, parse_size, start_logging
from retouch.config import load_run
from retouch.config.base import MOST_IMAGES, MOST_STEPS
from retouch.config.needs import DATA_SECTIONS
from retouch.config.published import resolved
from retouch.errors import ConfigError
from retouch.files.disk import writing
from retouch.process.plain_text import printable

if TYPE_CHECKING:
    from retouch.use.trained import Trained

app = typer.Typer()

RunDir = Annotated[Path | None, typer.Option(help="Run directory; its newest checkpoint is used.")]
Config = Annotated[Path | None, typer.Option(help="Run file, instead of --run.")]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint or weights folder; default with --config: the base.")]
Raw = Annotated[
    bool | None, typer.Option("--raw/--ema", help="Raw or EMA weights; default: the run's evaluation.weights.")
]


@app.command()
def sample(
    out: Annotated[Path, typer.Option(help="Folder for the images, named after their sources; no file is replaced.")],
    run: RunDir = None,
    config: Config = None,
    weights: Weights = None,
    raw: Raw = None,
    data: Annotated[Path | None, typer.Option(help="self_bench or BrushBench folder, or manifest.")] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            help="One image, with --mask or --box (optional for editing families) and --text or --prompt.",
        ),
    ] = None,
    more_image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="IMAGE", help="Another source image beside --image, for a model that reads several; repeatable."
        ),
    ] = None,
    mask: Annotated[
        list[Path] | None,
        typer.Option(metavar="MASK", help="Mask of --image, white = repaint; repeat it for several regions."),
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LEFT,TOP,RIGHT,BOTTOM",
            help="Box to repaint in pixels, instead of --mask; repeat it for several regions.",
        ),
    ] = None,
    invert_mask: Annotated[
        bool | None,
        typer.Option(help="Repaint black or transparent mask pixels; default: the run's data.invert_mask."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Target text, inserted into the run's prompt template; repeat it for several texts, with one --box or "
            "--mask for all, or one for each in the same order.",
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Whole prompt, instead of --text.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Style reference, for a run that trained a style adapter.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the noise.")] = 0,
    count: Annotated[int, typer.Option(min=1, max=MOST_IMAGES, help="Number of images per item.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST_STEPS, help="Number of solver steps; default: the run's.")
    ] = None,
    resolution: Annotated[
        str | None, typer.Option(help="Side or HEIGHTxWIDTH in pixels to sample at; default: the run's.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option(help="crop | stretch, for an image of another aspect ratio; default: the run's.")
    ] = None,
    crop: Annotated[
        str,
        typer.Option(
            help="auto | mask | none: part of the image passed to the model. auto: a box around the mask in images "
            "larger than the resolution, but not with --for-votes; mask: always such a box, enlarged if it is small; "
            "none: what --fit shows."
        ),
    ] = "auto",
    context: Annotated[
        float, typer.Option(min=0, help="Margin of that box, as a share of the mask's longer side.")
    ] = 0.25,
    feather: Annotated[float, typer.Option(min=0, help="Width of the composite's soft edge in pixels.")] = 0.0,
    for_votes: Annotated[
        bool, typer.Option("--for-votes", help="Also list the images in OUT/samples.jsonl, for retouch label.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Sample images with trained weights; pixels outside the mask stay unchanged."""
    start_logging()
    trained = find_trained(run, config, weights, raw, DATA_SECTIONS, trust)
    from retouch.use.items import SampleRequest, items_to_sample, make_folder, require_options

    request = SampleRequest(
        data=data,
        image=image,
        masks=tuple(mask or ()),
        texts=tuple(text or ()),
        prompt=prompt,
        reference=reference,
        seed=seed,
        count=count,
        steps=steps,
        size=parse_size(resolution, "--resolution") if resolution else None,
        fit=fit,
        feather=feather,
        boxes=tuple(map(parse_box, box or ())),
        invert_mask=invert_mask,
        crop=crop,
        context=context,
        more_images=tuple(more_image or ()),
        for_votes=for_votes,
    )
    require_options(trained.config, request)
    note_loading(trained.config.model.family)  # tokenizers, which count tokens of prompts, import torch
    chosen = items_to_sample(trained.config, request)
    with writing(out):
        make_folder(out)
        from retouch.use.sampling import sample_to_folder

        for path in sample_to_folder(trained, request, chosen, out):
            typer.echo(str(path))


@app.command("demo-ui")
def demo_ui(
    run: RunDir = None,
    config: Config = None,
    weights: Weights = None,
    raw: Raw = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the page on loopback.")] = 7860,
    trust: Trust = False,
) -> None:
    """Serve a local page to mask an image and compare samples of the base and the trained weights."""
    start_logging()
    trained = find_trained(run, config, weights, raw, DATA_SECTIONS, trust)
    note_loading(trained.config.model.family)
    from retouch.use.page import serve

    serve(trained, port)


@app.command("eval")
def evaluate(
    run: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Run directory; compares the base, the weights after the supervised warm-up, and the newest. Repeat "
            "the option to compare the newest weights of several runs.",
        ),
    ] = None,
    config: Config = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint or weights folder to compare with the base.")] = None,
    raw: Raw = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="self_bench or BrushBench folder, or manifest; default: the run's evaluation.data, else its data."
        ),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Style reference for every example, instead of its own.")
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COUNT|FOLDER",
            help="Number of images per example; default: the run's. With --benchmark also a folder of images that "
            "another program made, under the official names, which is scored beside the run, or without a run; "
            "repeatable.",
        ),
    ] = None,
    benchmark: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.yaml", help="Published benchmark to run, or a file with its settings."),
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Published data of --benchmark.")] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N",
            help="Share of the work of --benchmark, like 1/4; the last process writes the result. Default: all, or the "
            "rank under torchrun.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for a grid, the measures of each image and, for several runs, compare.html; with --benchmark "
            "for images, scores and result.json, by default RUN/benchmarks/NAME."
        ),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Compare weights with the base, or runs with each other, on fixed seeds: rewards, exact match, change outside the
    mask. With --benchmark: the official measures of a published benchmark."""
    # One command with two bodies: a benchmark has its own data, count and result, and an option of the other body would
    # be passed over in silence. Such errors come before torch is imported, which takes ten seconds.
    start_logging()
    runs = run or []
    count, folders = parse_images(images or [])
    if len(runs) > 1 and (config or weights):
        raise ConfigError(
            "--run: given several times, which compares the newest weights; leave --config and --weights out"
        )
    if benchmark is not None:
        unused = {"--data": data, "--reference": reference}
        if given := [option for option, value in unused.items() if value is not None]:
            raise ConfigError(f"{given[0]}: given with --benchmark, which has its own data; leave it out")
        result = _benchmark(benchmark, path, runs, config, weights, raw, count, folders, shard, out, trust)
        if result is not None:
            from retouch.benchmarks.result import benchmark_table

            typer.echo(json.dumps(result, indent=2) if as_json else printable(benchmark_table(result)))
        return
    if misplaced := [o for o, value in {"--path": path, "--shard": shard}.items() if value is not None]:
        raise ConfigError(f"{misplaced[0]}: given without --benchmark; add --benchmark NAME, or leave it out")
    if folders:
        raise ConfigError(
            f"--images: given {folders[0]}; expected a number of images, or a folder with --benchmark NAME"
        )
    unread = DATA_SECTIONS if data else ("data", "warmup_data")
    found = [find_trained(one, config, weights, raw, unread, trust) for one in runs or [None]]
    from retouch.observe.comparison import run_names
    from retouch.use.comparison import compare, compare_runs, comparison_table

    note_loading(found[0].config.model.family)
    with writing(out or "--out"):
        if len(runs) > 1:
            places = run_names(runs)
            result = compare_runs(dict(zip(places, found, strict=True)), places, data, count, out, reference)
        else:
            result = compare(found[0], data, count, out, reference)
    typer.echo(json.dumps(result, indent=2) if as_json else comparison_table(result))
    if out is not None and not as_json:
        pages = ["compare.html"] * (len(runs) > 1)
        typer.echo("\n".join(str(out / name) for name in ("grid.png", *pages)))


def _benchmark(
    given: str,
    path: Path | None,
    runs: list[Path],
    config: Path | None,
    weights: Path | None,
    raw: bool | None,
    count: int | None,
    folders: list[Path],
    shard: str | None,
    out: Path | None,
    trust: bool,
) -> dict[str, Any] | None:
    """`retouch eval --benchmark` -> its result; None if other shards have not ended."""
    from retouch.benchmarks.load import load_benchmark
    from retouch.benchmarks.outputs import Shard
    from retouch.use.benchmark import launcher_shard, run_benchmark

    chosen = load_benchmark(given, path)
    if count is not None:
        chosen = chosen.model_copy(update={"images_per_item": count})
    share = launcher_shard() if shard is None else Shard.parse(shard)
    trained = {}
    if runs or config:
        from retouch.observe.comparison import run_names

        named = run_names(runs) if len(runs) > 1 else {"": runs[0] if runs else None}
        trained = {name: find_trained(one, config, weights, raw, DATA_SECTIONS, trust) for name, one in named.items()}
    elif not folders:
        raise ConfigError("--benchmark: give --run RUN_DIR or --config RUN.yaml to sample, or --images FOLDER to score")
    elif weights is not None or raw is not None:
        option = "--raw/--ema" if weights is None else "--weights"
        raise ConfigError(f"{option}: given without --run or --config, whose weights it chooses; add one, or omit it")
    if out is None and len(runs) != 1:
        raise ConfigError("--out: not set; give a folder for images, scores and the result of the benchmark")
    folder = out or runs[0] / "benchmarks" / chosen.name
    with writing(folder):
        return run_benchmark(chosen, trained, folders, folder, share)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder, or run directory for its newest one.")],
    to: Annotated[
        str, typer.Option(help="comfyui | diffusers | diffusers-ip-adapter | diffusers-lora | ip-adapter | safetensors")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: exports/ of the run.")] = None,
    raw: Raw = None,
    trust: Trust = False,
) -> None:
    """Export trained weights in the format of another program, and print the path."""
    start_logging()
    from retouch.use.exporting import export_weights

    typer.echo(str(export_weights(checkpoint, to, out, raw=raw, trust=trust)))


def find_trained(
    run: Path | None,
    config: Path | None,
    weights: Path | None,
    raw: bool | None,
    unread: Collection[str],
    trust: bool,
) -> Trained:
    """The weights that --run, --config and --weights name. No torch: a mistake is reported within a second.

    Args:
        unread: sections of the run file that the command does not need.
        trust: use the code and the hosts that a run file in a run directory names.

    Raises:
        ConfigError, ModelFilesError, CheckpointError: missing files, or code or hosts without consent.
    """
    if (run is None) == (config is None):
        raise ConfigError("give either --run RUN_DIR or --config RUN.yaml")
    places = {"--run": run, "--config": config and resolved(config), "--weights": weights}  # one takes a run file
    for option, path in places.items():
        if path is not None and not path.exists():
            raise ConfigError(f"{option}: given {path}; no such file or folder")
    file = run / "config.yaml" if run is not None else config
    if file is not None and resolved(file).is_file():
        from retouch.training.files import require_model

        require_model(load_run(file, unread=unread, trust=trust if config is None else trust or None))
    from retouch.use.trained import Trained

    return Trained.find(run, config, weights, raw, unread, trust)


def parse_box(text: str) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of "100,100,700,400".

    Raises:
        ConfigError: not four integers.
    """
    try:
        left, top, right, bottom = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--box: given {text!r}; write LEFT,TOP,RIGHT,BOTTOM in pixels, like 100,100,700,400"
        ) from None
    return left, top, right, bottom


def parse_images(given: Sequence[str]) -> tuple[int | None, list[Path]]:
    """The values of `--images`: at most one number of images, and folders.

    Raises:
        ConfigError: two numbers, or one that is not in 1 to `MOST_IMAGES`.
    """
    numbers = [text for text in given if text.lstrip("-").isdecimal()]
    if len(numbers) > 1 or not all(is_count(number, MOST_IMAGES) for number in numbers):
        shown = " and ".join(number[:20] for number in numbers)
        raise ConfigError(f"--images: given {shown}; expected one number of 1 to {MOST_IMAGES}, or folders")
    return (int(numbers[0]) if numbers else None), [Path(text) for text in given if text not in numbers]
