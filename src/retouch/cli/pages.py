"""Commands that write or serve a page about runs or their images: report, watch, label, compare."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from retouch.cli.options import Json, Trust, start_logging
from retouch.errors import ConfigError
from retouch.files.disk import writing

app = typer.Typer()

Open = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
SingleFile = Annotated[
    bool, typer.Option("--single-file", help="Keep images inside the file, even if it gets larger than 10 MB.")
]


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    single_file: SingleFile = False,
    open_it: Open = False,
) -> None:
    """Write RUN/report.html: one offline file."""
    from retouch.observe.report import write_report

    with writing(run, "RUN"):
        path = write_report(run, single_file)
    typer.echo(str(path))
    if open_it:
        typer.launch(str(path))


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: a free one.")] = 0,
    open_it: Open = False,
) -> None:
    """Serve the report of a run on loopback, updated while the run goes, until interrupted. Waits for a run that is
    about to begin."""
    from retouch.observe.watch import open_server, wait_for

    wait_for(run, partial(typer.echo, err=True))
    with open_server(run, port) as server:
        typer.echo(server.address)
        if open_it:
            typer.launch(server.address)
        server.serve_forever()


@app.command()
def label(
    images: Annotated[
        Path, typer.Argument(help="Run directory, folder of images, or list of retouch sample --for-votes.")
    ],
    votes: Annotated[Path, typer.Option(help="File that votes are appended to.")] = Path("votes.jsonl"),
    alone: Annotated[bool, typer.Option("--alone", help="One image, good or bad, instead of two.")] = False,
    active: Annotated[
        bool,
        typer.Option(
            "--active",
            help="Ask the most informative pairs, for a fit; without it, pairs at random.",
        ),
    ] = False,
    extractor: Annotated[
        str | None, typer.Option(help="Image encoder for --active, as of retouch reward fit; default: tiny.")
    ] = None,
    goal: Annotated[int, typer.Option(min=1, help="Votes of a voter that the page counts towards.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of order and sides.")] = 0,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: a free one.")] = 0,
    open_it: Open = False,
    trust: Trust = False,
) -> None:
    """Serve a page on loopback to vote on images, until interrupted, and print what the votes can train."""
    start_logging()
    if extractor is not None and not active:
        raise ConfigError(f"--extractor: given {extractor!r} without --active, which alone reads it; add --active")
    from retouch.taste.labelling import open_labelling, open_server, progress, what_next

    with (
        writing(votes, "--votes"),
        open_labelling(
            images,
            votes,
            alone=alone,
            active=(extractor or "tiny") if active else None,
            goal=goal,
            seed=seed,
            trust=trust,
        ) as labelling,
        open_server(labelling, port) as server,
    ):
        typer.echo("\n".join([server.address, *progress(labelling)]))
        typer.echo("Ctrl-C stops and prints the commands that the votes are for; the same command goes on")
        if open_it:
            typer.launch(server.address)
        try:
            server.serve_forever()
        finally:
            typer.echo("\n".join([*progress(labelling), *what_next(labelling)]))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN [RUN ...]", help="Run directories.")],
    as_json: Json = False,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("compare.html"),
    single_file: SingleFile = False,
    open_it: Open = False,
) -> None:
    """Compare logged runs in one offline HTML file: last evaluations paired by example, samples and curves."""
    from retouch.observe.comparison import run_names, write_comparison

    with writing(out):
        found = write_comparison(run_names(runs), out, single_file=single_file)
    for problem in found.problems:
        typer.echo(f"warning: {problem}", err=True)
    told = {"page": str(found.path), "verdicts": [*found.verdicts], "problems": [*found.problems]}
    typer.echo(json.dumps(told, indent=2) if as_json else "\n".join([*found.verdicts, str(found.path)]))
    if open_it:
        typer.launch(str(found.path))
