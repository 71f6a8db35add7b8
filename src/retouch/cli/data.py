"""Commands of data and of tiny bases."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from retouch.cli.options import Json, Overrides, RunFile, Trust, note_loading, parse_size, start_logging
from retouch.config import load_run
from retouch.config.errors import nearest
from retouch.config.needs import require_usable_embeddings
from retouch.config.published import is_run_file
from retouch.errors import ConfigError
from retouch.files.disk import writing
from retouch.process.plain_text import count_of
from retouch.tiny import BUILDERS

app = typer.Typer(no_args_is_help=True, help="Validate, split, precompute or synthesise data.")
tiny = typer.Typer(no_args_is_help=True, help="Train tiny bases that run on a CPU.")

Half = Annotated[str, typer.Option(help="train | held_out: vocabulary split; the two are disjoint.")]


@app.command()
def validate(
    path: Annotated[
        Path, typer.Argument(help="self_bench or BrushBench folder, manifest, or RUN.yaml for all its data sections.")
    ],
    resolution: Annotated[
        str | None,
        typer.Option(help="Side or HEIGHTxWIDTH in pixels to check at; default: 512, or that of RUN.yaml."),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Open every item and print a table of problems; exit 2 if there are any."""
    start_logging()
    from retouch.data.validate import validate as find_problems
    from retouch.data.validate import validation_table
    from retouch.families.prompts import PromptCheck

    prompts_of = partial(PromptCheck, local=True)
    size = parse_size(resolution or "512", "--resolution")
    if is_run_file(str(path)):  # tens of seconds
        if resolution is not None:
            raise ConfigError(f"--resolution: given with {path}, whose sections have their own; omit it")
        logging.getLogger(__name__).info("loading the tokenizers of the model that %s names", path)
    findings = find_problems(path, size, trust=trust, prompts_of=prompts_of)
    typer.echo(json.dumps([asdict(one) for one in findings], indent=2) if as_json else validation_table(findings))
    if any(finding.problem for finding in findings):
        raise typer.Exit(2)


@app.command()
def split(
    path: Annotated[Path, typer.Argument(help="self_bench folder, manifest, file of prompts, or votes.")],
    share: Annotated[float, typer.Option(help="Held-out share, between 0 and 1; approximate for few items.")] = 0.1,
    by: Annotated[str, typer.Option(help="image | text: content that the two lists must not share.")] = "image",
    seed: Annotated[int, typer.Option(help="Random seed of the split.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a training list and a held-out list next to the given one; images are not copied."""
    from retouch.data.split import split as divide

    with writing(path, "PATH"):
        halves = divide(path, share, by, seed)
    lines = [f"{written}: {count_of(count, 'item')}" for written, count in halves.items()]
    typer.echo(json.dumps({str(written): count for written, count in halves.items()}) if as_json else "\n".join(lines))
    items, held_out = sum(halves.values()), list(halves.values())[1]
    if abs(held_out - share * items) > share * items / 2:
        typer.echo(
            f"--share: given {share:g}, but {held_out} of {items} items are held out, because items that share an "
            "image (or text) stay together; set another --seed",
            err=True,
        )


@app.command()
def precompute(
    run: RunFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Folder of the embeddings; existing ones are kept.")] = Path("embeddings"),
    trust: Trust = False,
) -> None:
    """Encode all prompts, references and images of RUN.yaml; with model.embeddings=OUT a run needs no encoders."""
    start_logging()
    config = load_run(run, overrides or [], trust=trust or None)
    require_usable_embeddings(config)
    note_loading(config.model.family)
    from retouch.use.precompute import precompute as encode

    with writing(out):
        counts = encode(config, out)
    typer.echo(f"{out}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="Folder to write: self_bench, or a manifest for several texts.")],
    count: Annotated[int, typer.Option(min=1, help="Number of signs.")],
    half: Half = "train",
    seed: Annotated[int, typer.Option(help="Random seed of texts and signs.")] = 0,
    size: Annotated[str, typer.Option(help="HEIGHTxWIDTH in pixels.")] = "32x64",
    length: Annotated[int, typer.Option(min=1, max=64, help="Number of letters of a text.")] = 4,
    targets: Annotated[bool, typer.Option(help="Target images; --no-targets writes backgrounds and prompts.")] = True,
    exclude: Annotated[Path | None, typer.Option(help="self_bench folder whose texts are left out.")] = None,
    caption_noise: Annotated[
        float, typer.Option(help="Share of letters that differ between list and image, as in scraped data.")
    ] = 0.0,
    styled: Annotated[
        bool, typer.Option("--styled", help="References: other texts in the font and colour of each sign.")
    ] = False,
    texts: Annotated[int, typer.Option(min=1, max=8, help="Number of texts of a sign, one below the other.")] = 1,
) -> None:
    """Write signs with texts in several fonts and colours, and their masks."""
    from retouch.tiny.signs import synthesize

    with writing(out):
        written = synthesize(
            out, count, half, seed, parse_size(size, "--size"), length, targets, exclude, caption_noise, styled, texts
        )
    typer.echo(f"{out}: {count_of(written, 'item')}")


@app.command()
def edits(
    out: Annotated[Path, typer.Option(help="Folder to write: manifest.json and its images.")],
    count: Annotated[int, typer.Option(min=1, help="Number of tasks.")],
    half: Half = "train",
    seed: Annotated[int, typer.Option(help="Random seed of shapes and instructions.")] = 0,
) -> None:
    """Write tiny editing tasks that a program can judge: recolour the shape that the instruction describes.

    The halves share no instruction. They may share images, which vlm_grpo does not train on; a run that trains the
    diffusion model on the half `train` sets evaluation.allow_overlap=true.
    """
    from retouch.tiny.edits import write_edits

    if half not in ("train", "held_out"):
        raise ConfigError(f"--half: given {half!r}; write train or held_out")
    with writing(out):
        typer.echo(f"{out}: {write_edits(out, count, half, seed)} tasks")


@tiny.command()
def build(
    family: Annotated[
        str,
        typer.Argument(
            help="Model family, image_encoder for the references of tiny runs, or a network of a reward: "
            f"{', '.join(sorted(BUILDERS))}."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, in the hub's layout.")],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed of data and weights.")] = 0,
) -> None:
    """Train a tiny base from scratch on a CPU, and measure it on held-out texts (or instructions, or fonts)."""
    start_logging()
    if family not in BUILDERS:
        raise ConfigError(f"FAMILY: given {family!r}; {nearest(family, BUILDERS)}")
    note_loading(family)
    from retouch.tiny.training import empty_folder

    with writing(out), empty_folder(out):
        result = BUILDERS[family](out, seed)
    typer.echo(json.dumps(result, indent=2))
