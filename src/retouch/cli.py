"""The command line. Every command imports what it needs when it runs: `check` must not wait for torch.

Exit codes: 0 done, 1 the run failed, 2 wrong usage or config, 3 stopped on purpose and resumable.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from retouch import __version__
from retouch.config import ConfigError, load_run, numbers
from retouch.config.advice import warnings_of
from retouch.config.errors import nearest
from retouch.config.needs import DATA_SECTIONS
from retouch.config.presets import preset_lines, preset_values
from retouch.disk import file_problem, writing

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
reward_app = typer.Typer(no_args_is_help=True, help="Serve rewards, or score one picture.")
data_app = typer.Typer(no_args_is_help=True, help="Check data, or make synthetic data.")
tiny_app = typer.Typer(no_args_is_help=True, help="Tiny bases that run on a CPU.")
app.add_typer(reward_app, name="reward")
app.add_typer(data_app, name="data")
app.add_typer(tiny_app, name="tiny")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"retouch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """RL post-training for image inpainting, editing and generation models."""


RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Dotted keys to override.")]
ScorerOptions = Annotated[str, typer.Option(help='Options by scorer, as JSON: {"ocr": {"score": "confidence"}}.')]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log debug messages.")]
Raw = Annotated[
    bool | None,
    typer.Option("--raw/--ema", help="Weights as trained or averaged; default: those that the run evaluates."),
]


@app.command()
def train(run: RunFile, overrides: Overrides = None, verbose: Verbose = False) -> None:
    """Train what RUN.yaml says; also under accelerate launch or torchrun."""
    config = load_run(run, overrides or [])
    _logging(verbose)
    from retouch.algorithms import train as recipes

    with writing(Path(config.logging.dir) / config.name):
        typer.echo(f"done: {recipes.train(config)}")


@app.command()
def check(
    run: RunFile,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None,
        typer.Option(help="Number of processes to compute for; default: that of --accelerate, or 1."),
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Count memory as well; of a hub id, this downloads configs alone.")
    ] = False,
    accelerate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of --memory: the configuration that vlm_grpo is launched with."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Validate RUN.yaml and print what it amounts to, without loading anything."""
    config = load_run(run, overrides or [])
    if accelerate is not None and not memory:
        raise ConfigError("--accelerate: given without --memory, which is what it changes; add --memory")
    _require_texts(config)
    launch = None if accelerate is None else _launch(accelerate)
    launched: int = 1 if launch is None else launch.processes
    processes = launched if world_size is None else world_size
    derived = numbers(config, processes).as_dict()
    counted = _memory(config, processes, launch) if memory else None
    advice = warnings_of(config)
    if as_json:
        more: dict[str, Any] = {"warnings": advice} if counted is None else {"warnings": advice, "memory": counted}
        if config.rollout.preset is not None:
            more["preset"] = {key: has for key, (has, _) in preset_values(config).items()}
        typer.echo(json.dumps({"config": config.model_dump(mode="json"), "derived": derived, **more}, indent=2))
        return
    kind = config.algorithm.trained_kind(config)
    typer.echo(f"{run}: ok ({config.name}: {config.model.family}, {kind}, {config.algorithm.name})")
    for name, value in derived.items():
        typer.echo(f"  {name.replace('_', ' '):32} {value:g}")
    for line in preset_lines(config):
        typer.echo(f"  {line}")
    if counted is not None:
        from retouch.doctor.memory import memory_table

        typer.echo("\n".join(memory_table(counted)))
    for line in advice:
        typer.echo(f"warning: {line}", err=True)


def _require_texts(config: Any) -> None:
    from retouch.texts import check_texts

    check_texts(config)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of images, or a list of them.")] = Path(),
    out: Annotated[Path, typer.Option(help="Run file to write.")] = Path("run.yaml"),
    family: Annotated[str, typer.Option(help="flux_fill | sd_inpaint | qwen_image_edit.")] = "flux_fill",
    algorithm: Annotated[str, typer.Option(help="sft | grpo | ppo | dpo | nft.")] = "grpo",
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the base, or tiny; default: $MODEL_PATH, or the released one."),
    ] = None,
) -> None:
    """Write a commented run file for a folder of images, and a manifest where it has none."""
    from retouch.use.starting import start

    with writing(out.parent, "--out"):
        typer.echo("\n".join(start(folder, out, family, algorithm, model).lines))


def _launch(accelerate: Path) -> Any:
    from retouch.doctor.launch import read_launch

    return read_launch(accelerate)


def _memory(config: Any, world_size: int, launch: Any) -> dict[str, Any]:
    import torch  # noqa: F401  # its absence gets the message of the extra

    from retouch.doctor.memory import report_memory

    return report_memory(config, world_size, launch)


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN.yaml]", help="Run file to look at as well.")] = None,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(help="Number of processes it is to run on.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine lacks, for RUN.yaml or at all; exit 1 if something must be fixed."""
    config = load_run(run, overrides or []) if run else None
    if config:
        numbers(config, world_size)  # refuses what no machine could run
    from retouch.doctor import diagnose, table

    lines = diagnose(config, world_size)
    typer.echo(json.dumps([asdict(line) for line in lines], indent=2) if as_json else table(lines))
    if any(line.status == "fix" for line in lines):
        raise typer.Exit(1)


@app.command()
def sample(
    out: Annotated[
        Path, typer.Option(help="Folder for the images, named after their sources; existing files are kept.")
    ],
    run: Annotated[Path | None, typer.Option(help="Run directory; its newest checkpoint is used.")] = None,
    config: Annotated[Path | None, typer.Option(help="Run file, instead of --run.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint or weights folder; none samples the base.")] = None,
    raw: Raw = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of self_bench or BrushBench, or manifest to repaint.")
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="One image, with --mask or --box (none to edit all of it) and --text or --prompt."),
    ] = None,
    mask: Annotated[Path | None, typer.Option(help="Its mask, white where to repaint.")] = None,
    box: Annotated[
        str | None,
        typer.Option(metavar="LEFT,TOP,RIGHT,BOTTOM", help="Box to repaint in pixels of the image, instead of --mask."),
    ] = None,
    invert_mask: Annotated[
        bool | None,
        typer.Option(help="Repaint where masks are black or transparent; default: the run's data.invert_mask."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Text to write; the prompt is made from it.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The whole prompt.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Picture whose style to take, for a run that trained a style adapter.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Pictures of each item.")] = 1,
    steps: Annotated[int | None, typer.Option(min=1, help="Solver steps; default: the run's.")] = None,
    resolution: Annotated[
        str | None, typer.Option(help="Side, or HEIGHTxWIDTH, to repaint at; default: the run's.")
    ] = None,
    fit: Annotated[
        str | None, typer.Option(help="crop | stretch, how a picture of another shape fits; default: the run's.")
    ] = None,
    crop: Annotated[
        str,
        typer.Option(
            help="auto | mask | none: what the model sees. auto: a box around the mask in images larger than the "
            "resolution; mask: always such a box, enlarged if it is small; none: what --fit shows."
        ),
    ] = "auto",
    context: Annotated[
        float, typer.Option(min=0, help="Margin around the mask in that box, as a share of the mask's longer side.")
    ] = 0.25,
    feather: Annotated[float, typer.Option(min=0, help="Soft edge of the paste-back in pixels.")] = 0.0,
) -> None:
    """Repaint images with trained weights; outside the mask they stay as they are."""
    _logging(False)
    _require_weights(run, config, weights, DATA_SECTIONS)
    from retouch.use import SampleRequest, sample_to_folder

    request = SampleRequest(
        data=data,
        image=image,
        mask=mask,
        text=text,
        prompt=prompt,
        reference=reference,
        seed=seed,
        count=count,
        steps=steps,
        size=_size(resolution, "--resolution") if resolution else None,
        fit=fit,
        feather=feather,
        box=_box(box) if box else None,
        invert_mask=invert_mask,
        crop=crop,
        context=context,
    )
    with writing(out):
        for path in sample_to_folder(_trained(run, config, weights, raw, unread=DATA_SECTIONS), request, out):
            typer.echo(str(path))


@app.command("demo-ui")
def demo_ui(
    run: Annotated[Path | None, typer.Option(help="Run directory; its newest checkpoint is used.")] = None,
    config: Annotated[Path | None, typer.Option(help="Run file, instead of --run.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint or weights folder; none shows the base.")] = None,
    raw: Raw = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of the page, on loopback.")] = 7860,
) -> None:
    """Open a local page to paint over pictures, and see base and trained weights repaint them."""
    _logging(False)
    _require_weights(run, config, weights, DATA_SECTIONS)
    from retouch.use.page import serve

    serve(_trained(run, config, weights, raw, unread=DATA_SECTIONS), port)


@app.command("eval")
def evaluate_command(
    run: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run directory; base, warmed-up and newest weights are compared. Given several times: the newest "
            "weights of these runs are."
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Run file, instead of --run.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Checkpoint or weights folder to compare with the base.")] = None,
    raw: Raw = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of self_bench or BrushBench, or manifest; default: the run's evaluation.data."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Picture whose style every example takes, instead of its own reference.")
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images per example; default: the run's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for a grid, a row for each image and, of several runs, compare.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare weights with the base, or runs with each other, on fixed seeds: rewards, exact match, drift outside the
    mask."""
    _logging(False)
    unread = DATA_SECTIONS if data else ("data", "warmup_data")
    runs = run or []
    if len(runs) > 1 and (config or weights):
        raise ConfigError(
            "--run: given several times, which takes the newest weights; leave --config and --weights out"
        )
    for one in runs or [None]:
        _require_weights(one, config, weights, unread)
    from retouch.observe.comparison import run_names
    from retouch.use import Trained, compare, compare_runs, comparison_table

    with writing(out or "--out"):
        if len(runs) > 1:
            folders = run_names(runs)
            trained = {name: Trained.find(folder, None, None, raw) for name, folder in folders.items()}
            result = compare_runs(trained, folders, data, images, out, reference)
        else:
            alone = _trained(runs[0] if runs else None, config, weights, raw, unread)
            result = compare(alone, data, images, out, reference)
    typer.echo(json.dumps(result, indent=2) if as_json else comparison_table(result))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder of a run, or the run: its newest one.")],
    to: Annotated[
        str, typer.Option(help="comfyui | diffusers | diffusers-ip-adapter | diffusers-lora | ip-adapter | safetensors")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: exports/ of the run.")] = None,
    raw: Annotated[bool, typer.Option(help="Raw weights although the run averaged.")] = False,
) -> None:
    """Write trained weights in the files of other programs, and print where."""
    _logging(False)
    from retouch.use import export_weights

    typer.echo(str(export_weights(checkpoint, to, out, raw=raw)))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Write RUN/report.html: one file that needs no network."""
    from retouch.observe.report import write_report

    with writing(run):
        path = write_report(run)
    typer.echo(str(path))
    if open_it:
        typer.launch(str(path))


@app.command("compare")
def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN [RUN ...]", help="Run directories.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("compare.html"),
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Compare what runs logged in one offline HTML file: last evaluations, paired by example, samples, and curves."""
    from retouch.observe.comparison import run_names, write_comparison

    with writing(out):
        found = write_comparison(run_names(runs), out)
    for problem in found.problems:
        typer.echo(f"warning: {problem}", err=True)
    for verdict in found.verdicts:
        typer.echo(verdict)
    typer.echo(str(found.path))
    if open_it:
        typer.launch(str(found.path))


@reward_app.command("serve")
def reward_serve(
    names: Annotated[str, typer.Argument(metavar="NAME[,NAME]", help="Scorers; every instance holds all of them.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the first instance; the others count up. 0 takes free ones.")
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address; another than loopback needs a token in RETOUCH_REWARD_TOKEN.")
    ] = "127.0.0.1",
    devices: Annotated[str, typer.Option(help="cpu, or numbers of GPUs like 0,1,2: an instance for each.")] = "cpu",
    replicas: Annotated[int, typer.Option(min=1, help="Instances of each device.")] = 1,
    endpoints: Annotated[Path, typer.Option(help="File to write the addresses to; give it to training as url.")] = Path(
        "endpoints.json"
    ),
    options: ScorerOptions = "{}",
    log_dir: Annotated[Path, typer.Option(help="Folder for a log of each instance.")] = Path("reward-logs"),
    max_batch: Annotated[int, typer.Option(min=1, help="Pictures that are scored together.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long a picture waits for company.")] = 4.0,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
) -> None:
    """Serve rewards over HTTP until stopped; what dies is started again."""
    _logging(False)
    from retouch.rewards.server.launch import (
        ServeOptions,
        parse_devices,
        requested,
        serve,
    )

    limits = {"max_batch": max_batch, "max_wait_ms": max_wait_ms}
    where = ServeOptions(
        host, port, parse_devices(devices), replicas, endpoints, log_dir, with_parent=with_parent, limits=limits
    )
    asked = requested(names, options)
    with writing(endpoints.parent, "--endpoints and --log-dir"):
        serve(asked, where)


@reward_app.command("score")
def reward_score(
    reward: Annotated[str, typer.Option(help="Scorer name.")],
    image: Annotated[Path, typer.Option(help="Picture to score.")],
    prompt: Annotated[str, typer.Option(help="Its prompt; text to read stands in quotes.")],
    mask: Annotated[Path | None, typer.Option(help="Mask, white where repainted.")] = None,
    source: Annotated[Path | None, typer.Option(help="Picture before repainting.")] = None,
    url: Annotated[str | None, typer.Option(help="Server or endpoints file; default: this process.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that the server may take to be ready.")] = 0.0,
    reference: Annotated[Path | None, typer.Option(help="Picture whose style is asked for.")] = None,
    options: ScorerOptions = "{}",
    device: Annotated[str, typer.Option(help="Device of a scorer of this process: cpu, or cuda:0.")] = "cpu",
) -> None:
    """Score one picture and print the outcome as JSON."""
    from retouch.rewards.score_one import score_one
    from retouch.rewards.server.launch import requested_one

    given = requested_one(reward, options)
    outcome, failed = score_one(reward, image, prompt, mask, source, url, wait, reference, given, device)
    typer.echo(json.dumps(outcome, indent=2, ensure_ascii=False))
    if failed:
        raise typer.Exit(1)


@reward_app.command("probe")
def reward_probe(
    reward: Annotated[str, typer.Option(help="Scorer name.")],
    image: Annotated[Path, typer.Option(help="Picture to score.")],
    prompt: Annotated[str, typer.Option(help="Its prompt; text to read stands in quotes.")],
    mask: Annotated[Path | None, typer.Option(help="Mask, white where repainted.")] = None,
    source: Annotated[Path | None, typer.Option(help="Picture before repainting.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Picture whose style is asked for.")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="JSONL of pictures with prompt and label, to measure agreement.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Times that the picture is scored.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Pictures that are scored together.")] = 8,
    url: Annotated[str | None, typer.Option(help="Server or endpoints file; default: this process.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds that the server may take to be ready.")] = 0.0,
    options: ScorerOptions = "{}",
    device: Annotated[str, typer.Option(help="Device of a scorer of this process: cpu, or cuda:0.")] = "cpu",
) -> None:
    """Measure a scorer: latency, repeatability, whether a batch changes scores, agreement with labels."""
    from retouch.rewards.probe import agreement, probe, read_labels
    from retouch.rewards.score_one import asking, item_of
    from retouch.rewards.server.launch import requested_one

    item = item_of(image, prompt, mask, source, reference)
    labelled = read_labels(labels) if labels else None
    with asking(reward, url, wait, requested_one(reward, options), device) as ask:
        found = probe(ask, item, repeats, batch)
        if labelled:
            found["agreement"] = agreement(ask, labelled, batch)
    typer.echo(json.dumps({"reward": reward, **found}, indent=2, ensure_ascii=False))
    if found["failures"]:
        raise typer.Exit(1)


@data_app.command("validate")
def data_validate(
    path: Annotated[
        Path,
        typer.Argument(
            help="Folder of self_bench or BrushBench, manifest file, or RUN.yaml (all of its data sections)."
        ),
    ],
    resolution: Annotated[str, typer.Option(help="Side, or HEIGHTxWIDTH, to check at.")] = "512",
) -> None:
    """Open every item and print a table of what is wrong; exit 2 if anything is."""
    _logging(False)
    from retouch.data.validate import validate, validation_table

    findings = validate(path, _size(resolution, "--resolution"))
    typer.echo(validation_table(findings))
    if any(finding.problem for finding in findings):
        raise typer.Exit(2)


@data_app.command("split")
def data_split(
    path: Annotated[Path, typer.Argument(help="self_bench folder, manifest, or file of prompts.")],
    share: Annotated[float, typer.Option(help="What is held out, between 0 and 1; of few items only roughly.")] = 0.1,
    by: Annotated[str, typer.Option(help="picture | text: what the halves do not have in common.")] = "picture",
    seed: Annotated[int, typer.Option(help="Another one divides otherwise.")] = 0,
) -> None:
    """Write a train and a held-out list beside the given one; no picture is copied."""
    from retouch.data.split import split

    with writing(path):
        halves = split(path, share, by, seed)
    for written, count in halves.items():
        typer.echo(f"{written}: {count} items")
    items, held_out = sum(halves.values()), list(halves.values())[1]
    if abs(held_out - share * items) > share * items / 2:
        typer.echo(
            f"--share: {share:g} of {items} items is {share * items:g}, and {held_out} are held out: each goes where "
            "its picture (or text) and the seed say; another --seed divides otherwise",
            err=True,
        )


@data_app.command("precompute")
def data_precompute(
    run: RunFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the embeddings; what is in it already stays.")] = Path(
        "embeddings"
    ),
) -> None:
    """Encode all prompts, references and pictures of RUN.yaml; model.embeddings=OUT then trains without encoders."""
    config = load_run(run, overrides or [])
    from retouch.use.precompute import precompute

    with writing(out):
        counts = precompute(config, out)
    typer.echo(f"{out}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))


@data_app.command("synth")
def data_synth(
    out: Annotated[Path, typer.Option(help="Folder to write, in the self_bench layout.")],
    count: Annotated[int, typer.Option(min=1, help="Number of words.")],
    half: Annotated[str, typer.Option(help="train | held_out: halves of the language that share no word.")] = "train",
    seed: Annotated[int, typer.Option(help="Of words and signs.")] = 0,
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH in pixels.")] = "32x64",
    length: Annotated[int, typer.Option(min=1, help="Letters of a word.")] = 4,
    targets: Annotated[
        bool, typer.Option(help="--no-targets writes bare grounds: prompts without any target picture.")
    ] = True,
    exclude: Annotated[Path | None, typer.Option(help="A self_bench folder whose words are left out.")] = None,
    caption_noise: Annotated[
        float, typer.Option(help="Share of letters that the list gets wrong, as lists of scraped pictures do.")
    ] = 0.0,
    styled: Annotated[
        bool, typer.Option("--styled", help="References are other words in the font and colour of each sign.")
    ] = False,
) -> None:
    """Write signs with words in several fonts and colours, and their masks."""
    from retouch.tiny.signs import synthesize

    with writing(out):
        written = synthesize(
            out, count, half, seed, _size(size, "--size"), length, targets, exclude, caption_noise, styled
        )
    typer.echo(f"{out}: {written} items")


@data_app.command("edits")
def data_edits(
    out: Annotated[Path, typer.Option(help="Folder to write: manifest.json and its pictures.")],
    count: Annotated[int, typer.Option(min=1, help="Number of tasks.")],
    half: Annotated[str, typer.Option(help="train | held_out: halves of the instructions that share none.")] = "train",
    seed: Annotated[int, typer.Option(help="Of shapes and instructions.")] = 0,
) -> None:
    """Write tiny editing tasks whose result a program can judge: recolour the shape as an instruction hints."""
    from retouch.tiny.edits import write_edits

    if half not in ("train", "held_out"):
        raise ConfigError(f"--half: given {half!r}; write train or held_out")
    with writing(out):
        typer.echo(f"{out}: {write_edits(out, count, half, seed)} tasks")


@tiny_app.command("build")
def tiny_build(
    family: Annotated[str, typer.Argument(help="Model family; or image_encoder, of the references of tiny runs.")],
    out: Annotated[Path, typer.Option(help="Folder to write, in the hub's layout.")],
    seed: Annotated[int, typer.Option(help="Of data and weights.")] = 0,
) -> None:
    """Train a tiny base from nothing on a CPU, and measure it on words (or instructions) it never saw."""
    _logging(False)
    from retouch.tiny.editing import build_edit
    from retouch.tiny.image_encoder import build_encoder
    from retouch.tiny.inpainting import (
        SCHEDULES,
        build_and_measure,
    )

    builders = {name: partial(build_and_measure, name) for name in SCHEDULES}
    builders |= {"image_encoder": build_encoder, "qwen_image_edit": build_edit}
    if family not in builders:
        raise ConfigError(f"FAMILY: given {family!r}; {nearest(family, builders)}")
    with writing(out):
        result = builders[family](out, seed)
    typer.echo(json.dumps(result, indent=2))


def main() -> None:
    """Run, and add the exit code to the file that RETOUCH_EXIT_CODES names: launchers of several processes turn all but
    0 into 1, and a supervisor must know what may be started again."""
    file = os.environ.pop("RETOUCH_EXIT_CODES", None)  # not for the reward server that a run starts
    code: int | str | None = 1
    try:
        _main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
        raise
    finally:
        if file:
            with Path(file).open("a", encoding="utf-8") as stream:
                stream.write(f"{code}\n")


def _main() -> None:
    """Turn errors that people can act on into one message and an exit code."""
    try:
        code = app(standalone_mode=False)  # else typer prints usage errors itself, in a box of several lines
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        outcome = _outcome(error)
        if outcome is None:
            raise
        code, message = outcome
        typer.echo(f"{'stopped' if code in (0, 3) else 'error'}: {message}", err=True)
        sys.exit(code)
    if code == _INTERRUPTED:
        typer.echo("stopped: interrupted; continue with resume=auto", err=True)
        sys.exit(3)
    sys.exit(code if isinstance(code, int) else 0)


_INTERRUPTED = 130
"""What typer returns after Ctrl-C (newer versions; older ones raise Abort)."""

EXTRAS = {
    "train": ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "huggingface_hub"),
    "serve": ("fastapi", "uvicorn", "starlette"),
    "ocr": ("rapidocr", "onnxruntime"),
    "vlm": ("trl", "datasets"),
    "deepspeed": ("deepspeed",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "ui": ("gradio",),
}
"""Extra of the package -> modules that come with it."""


def _outcome(error: Exception) -> tuple[int, str] | None:
    """Exit code and message of an error whose message says all; None for one that needs a traceback."""
    codes = {
        "ConfigError": 2,
        "DataError": 2,
        "ImageProblem": 2,
        "ModelFilesError": 2,
        "CheckpointError": 2,
        "FontsMissing": 2,
        "RewardOutage": 3,
        "FailureRateExceeded": 3,
        "ResponseTooLong": 2,
        "Diverged": 1,
        "OutOfMemory": 1,
    }
    if type(error).__name__ == "Stopped":
        return error.code, str(error)  # type: ignore[attr-defined]
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("retouch"):
        return 2, _missing_module(error.name.partition(".")[0])
    if hasattr(error, "format_message"):  # usage errors of click, whichever copy of it typer brings
        message = error.format_message().strip().rstrip(".")  # type: ignore[attr-defined]
        return 2, f"{message}; see --help"
    if isinstance(error, OSError) and (problem := file_problem(error)):
        return 1, problem
    if not type(error).__module__.startswith("retouch") or type(error).__name__ not in codes:
        return None
    return codes[type(error).__name__], str(error)


def _missing_module(module: str) -> str:
    extras = [extra for extra, modules in EXTRAS.items() if module in modules] or ["train"]
    return f'{module} is not installed: pip install "retouch[{extras[0]}]"'


def _logging(verbose: bool) -> None:
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S", markup=False)
    handler.addFilter(lambda record: not getattr(record, "in_bar", False))  # the bar shows it
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("retouch").setLevel(logging.DEBUG if verbose else logging.INFO)


def _size(text: str, option: str) -> tuple[int, int]:
    """(height, width) of "512" or "32x64"."""
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option}: given {text!r}; write a side like 512, or HEIGHTxWIDTH like 32x64")
    return int(parts[0]), int(parts[-1])


def _box(text: str) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of "100,100,700,400"."""
    try:
        left, top, right, bottom = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--box: given {text!r}; write LEFT,TOP,RIGHT,BOTTOM in pixels, like 100,100,700,400"
        ) from None
    return left, top, right, bottom


def _require_weights(run: Path | None, config: Path | None, weights: Path | None, unread: Collection[str]) -> None:
    """Refuse --run, --config and --weights that name nothing, and a model that is missing, before torch is imported."""
    if (run is None) == (config is None):
        raise ConfigError("give either --run RUN_DIR or --config RUN.yaml")
    for option, path in {"--run": run, "--config": config, "--weights": weights}.items():
        if path is not None and not path.exists():
            raise ConfigError(f"{option}: given {path}; no such file or folder")
    file = run / "config.yaml" if run is not None else config
    if file is not None and file.is_file():
        from retouch.training.files import require_model

        require_model(load_run(file, unread=unread))


def _trained(
    run: Path | None, config: Path | None, weights: Path | None, raw: bool | None, unread: Collection[str]
) -> Any:
    """The --run / --config / --weights options as one object."""
    from retouch.use import Trained

    return Trained.find(run, config, weights, raw, unread)
