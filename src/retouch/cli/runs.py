"""Commands of a run file: train, check, init, doctor."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from retouch.algorithms.base import Objective
from retouch.cli.options import Json, Overrides, RunFile, Trust, start_logging
from retouch.config import load_run, numbers
from retouch.config.check import require_trainable, warnings_of
from retouch.config.derived import rows_per_forward
from retouch.config.presets import preset_lines, preset_values
from retouch.config.published import write_example
from retouch.errors import ConfigError
from retouch.files.disk import writing

app = typer.Typer()


@app.command(
    epilog="Keys are in docs/configuration.md, and those of the flags of other scripts in docs/coming-from.md."
)
def train(
    run: RunFile,
    overrides: Overrides = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Debug messages in the log.")] = False,
) -> None:
    """Train from a run file; also under accelerate launch and torchrun."""
    config = load_run(run, overrides or [], trust=True)
    start_logging(verbose)
    from retouch.algorithms import train as recipes

    with writing(Path(config.logging.dir) / config.name):
        typer.echo(f"done: {recipes.train(config)}")


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
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Check a run file and print its derived numbers and its cost, without loading models."""
    from retouch.config.cost import cost, cost_lines

    config = load_run(run, overrides or [], trust=trust or None)
    require_trainable(config)
    if accelerate is not None and not memory:
        raise ConfigError("--accelerate: given without --memory, which is what it changes; add --memory")
    from retouch.data.texts import check_texts

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
    advice = warnings_of(config, processes)
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
    for name, value in derived.items():
        if value:  # 0: the run has none of these
            typer.echo(f"  {name.replace('_', ' '):32} {value:g}")
    for line in (*preset_lines(config), *cost_lines(config, price)):
        typer.echo(f"  {line}")
    if counted is not None:
        from retouch.doctor.memory import memory_table

        typer.echo("\n".join(memory_table(counted)))
    for line in advice:
        typer.echo(f"warning: {line}", err=True)


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
    from retouch.doctor import diagnose, table

    lines = diagnose(config, world_size)
    typer.echo(json.dumps([asdict(line) for line in lines], indent=2) if as_json else table(lines))
    if any(line.status == "fix" for line in lines):
        raise typer.Exit(1)
