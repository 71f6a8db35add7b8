"""Commands of a run file: train, check, init, doctor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from retouch.algorithms.base import Objective
from retouch.cli.options import Json, Overrides, Quiet, RunFile, Trust, start_logging
from retouch.config import RunConfig, load_run, numbers
from retouch.config.check import require_trainable, warnings_of
from retouch.config.derived import rows_per_forward
from retouch.config.needs import DATA_SECTIONS
from retouch.config.presets import preset_lines, preset_values
from retouch.config.published import write_example
from retouch.config.variables import variables_in
from retouch.errors import ConfigError, Stopped
from retouch.files.disk import writing
from retouch.process.plain_text import count_of, printable

if TYPE_CHECKING:
    from retouch.config.cost import Cost

app = typer.Typer()


@app.command(
    epilog="Keys are in docs/configuration.md, and those of the flags of other scripts in docs/coming-from.md."
)
def train(
    run: RunFile,
    overrides: Overrides = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Debug messages in the log.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train from a run file; also under accelerate launch and torchrun."""
    config = load_run(run, overrides or [], trust=True)
    start_logging(verbose, quiet)
    from retouch.algorithms import train as recipes

    path = Path(config.logging.dir).expanduser() / config.name
    with writing(path, "logging.dir"):
        try:
            recipes.train(config)
        except Stopped as stopped:
            if stopped.code == 0:  # as the run file asks: a message with the reason follows
                _print_end(config, path, quiet=quiet, as_json=as_json)
            raise
    _print_end(config, path, quiet=quiet, as_json=as_json)
    if not as_json:
        typer.echo(f"done: {path}")


def _print_end(config: RunConfig, path: Path, *, quiet: bool, as_json: bool) -> None:
    """Print the end of a run, once: for people on standard error, or as JSON on standard output."""
    if os.environ.get("RANK", "0") != "0":
        return
    from retouch.use.ending import ending

    end = ending(config, path)
    if as_json:
        typer.echo(json.dumps(end.as_dict(), indent=2))
    for line in [] if quiet else end.lines():
        typer.echo(printable(line), err=True)


@app.command()
def check(
    run: RunFile,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(help="Number of processes; default: that of --accelerate, or 1.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Memory estimate; downloads the configs of a model on the hub.")
    ] = False,
    accelerate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Accelerate configuration of a vlm_grpo run, for --memory.")
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU of the cost: h100, h200, a100, l40s, b200 or 4090.")] = "h200",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="All derived numbers.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a run file and print its size, its memory and its cost, without loading models."""
    from retouch.config.cost import cost

    # Everything is known before the first line is printed: a problem found late, as of a model on the hub, would stand
    # below numbers that look like a verdict. An import waits for the option that needs it, for `check` is quick.
    config = load_run(run, overrides or [], unread=UNREAD, trust=trust or None)
    require_trainable(config)
    if accelerate is not None and not memory:
        raise ConfigError("--accelerate: given without --memory, which is what it changes; add --memory")
    from retouch.data.texts import check_texts
    from retouch.training.files import missing_files

    check_texts(config)
    launch = None
    if accelerate is not None:
        from retouch.doctor.launch import read_launch

        launch = read_launch(accelerate)
    launched: int = 1 if launch is None else launch.processes
    processes = launched if world_size is None else world_size
    derived, price = numbers(config, processes).as_dict(), cost(config, processes, gpu)
    counted = None
    if memory:
        from retouch.doctor.memory import report_memory

        counted = report_memory(config, processes, launch)
    advice = [*unset_variables(config), *missing_files(config), *warnings_of(config, processes)]
    if as_json:
        more: dict[str, Any] = {"cost": price.as_dict(), "warnings": advice}
        if counted is not None:
            more["memory"] = counted
        if isinstance(config.algorithm, Objective):
            more["rows_per_forward"] = {device: rows_per_forward(config, device) for device in ("cpu", "gpu")}
        if config.rollout.preset is not None:
            more["preset"] = {key: has for key, (has, _) in preset_values(config).items()}
        typer.echo(json.dumps({"config": config.model_dump(mode="json"), "derived": derived, **more}, indent=2))
        return
    kind = config.algorithm.trained_kind(config)
    typer.echo(f"{run}: ok ({config.name}: {config.model.family}, {kind}, {config.algorithm.name})")
    for name, told in _summary(config, derived, price):
        typer.echo(f"  {name:14} {told}")
    for line in _details(config, derived, price) if verbose else ():
        typer.echo(f"  {line}")
    if counted is not None:
        from retouch.doctor.memory import memory_table

        typer.echo("\n".join(memory_table(counted)))
    for line in advice:
        typer.echo(f"warning: {line}", err=True)


UNREAD = (*DATA_SECTIONS, "model")
"""Sections whose files `check` does not need: variables of the environment in them may be unset."""

_UNREAD_PARTS = [name.partition(".")[0] for name in UNREAD]


def unset_variables(config: RunConfig) -> list[str]:
    """A warning for each key with a variable of the environment that `train` will require."""
    return [
        f"{'.'.join(key)}: {text} is not set in the environment; `retouch train` requires it"
        for key, texts in variables_in({name: value for name, value in config if name in _UNREAD_PARTS})
        for text in texts
    ]


def _summary(config: RunConfig, derived: Mapping[str, float], price: Cost) -> Iterator[tuple[str, str]]:
    """The numbers by which a person decides whether to start a run, each with its name."""
    from retouch.config.cost import told_of

    steps = f"{config.training.max_steps:,}"
    steps += f", the first {derived['warmup_steps']:,} supervised" if derived.get("warmup_steps") else ""
    if derived.get("epochs"):
        steps += f"; {count_of(int(derived['epochs']), 'epoch')} of {derived['optimizer_steps_per_epoch']:,}"
    yield "steps", steps
    if (held := _released_bytes(config, price.world_size)) is not None:
        yield "memory", f"{held} a process, and activations; --memory lists it"
    yield from told_of(config, price)


def _released_bytes(config: RunConfig, world_size: int) -> str | None:
    """Memory of a process before activations, where the counts that come with the package suffice."""
    if not config.model.has_released_sizes:
        return None
    from retouch.doctor.line import size
    from retouch.doctor.memory import count_released, device_bytes

    weights = count_released(config)
    return None if weights is None else size(device_bytes(config, weights, world_size))


def _details(config: RunConfig, derived: Mapping[str, float], price: Cost) -> list[str]:
    """Every derived number, the keys of a preset, and the cost of a forward."""
    from retouch.config.cost import details_of

    numbered = [f"{name.replace('_', ' '):32} {value:g}" for name, value in derived.items() if value]  # 0: has none
    return [*numbered, *preset_lines(config), *(f"{name:32} {told}" for name, told in details_of(config, price))]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder of images, a list of them, or a file of prompts.")] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: run.yaml, or the name of the example.")
    ] = None,
    family: Annotated[str, typer.Option(help="Model family, such as flux_fill, qwen_image_edit or sd3.")] = "flux_fill",
    algorithm: Annotated[str, typer.Option(help="sft | grpo | ppo | dpo | nft.")] = "grpo",
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub id of the base, or tiny; default: $MODEL_PATH, or the released model."),
    ] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME|list|all", help="Write a file that comes with the package instead.")
    ] = None,
) -> None:
    """Write a commented run file for a folder of images or a file of prompts, and a manifest if it has none; or a
    published file (--example)."""
    if example is not None:
        with writing(out or Path(), "--out"):
            typer.echo("\n".join(write_example(example, out)))
        return
    from retouch.use.starting import start

    out = out or Path("run.yaml")
    with writing(out.parent, "--out"):
        typer.echo("\n".join(start(folder, out, family, algorithm, model)))


@app.command()
def doctor(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN.yaml]", help="Run file to check as well.")] = None,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(help="Number of processes of the run.")] = 1,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check the environment, and optionally whether it can run RUN.yaml; exit 1 if something must be fixed."""
    config = load_run(run, overrides or [], trust=trust or None) if run else None
    if config:
        numbers(config, world_size)  # rejects a number of processes that no machine could run
    from retouch.doctor.diagnosis import diagnose, table

    lines = diagnose(config, world_size)
    typer.echo(json.dumps([asdict(line) for line in lines], indent=2) if as_json else table(lines))
    if any(line.status == "fix" for line in lines):
        raise typer.Exit(1)
