"""Commands of rewards: serve, score, probe, env."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from retouch.cli.options import Json, Trust, start_logging
from retouch.errors import ConfigError
from retouch.files.disk import writing

app = typer.Typer(no_args_is_help=True, help="Serve reward models, or score one image.")

Scorer = Annotated[str, typer.Option(help="Scorer name.")]
ScorerOptions = Annotated[str, typer.Option(help='Options by scorer, as JSON: {"ocr": {"score": "confidence"}}.')]
ScoredImage = Annotated[Path, typer.Option(help="Image to score.")]
ScoredPrompt = Annotated[str, typer.Option(help="Prompt of the image; the target text stands in quotes.")]
ScoredMask = Annotated[Path | None, typer.Option(help="Mask, white = repainted.")]
ScoredSource = Annotated[Path | None, typer.Option(help="Source image before repainting.")]
ScoredReference = Annotated[Path | None, typer.Option(help="Style reference.")]
Url = Annotated[str | None, typer.Option(help="URL of a server, or endpoints file; default: score in this process.")]
Wait = Annotated[float, typer.Option(min=0, help="Maximum wait for the server to be ready, in seconds.")]
Device = Annotated[str, typer.Option(help="Device of a scorer in this process: cpu, or cuda:0.")]


@app.command()
def serve(
    names: Annotated[str, typer.Argument(metavar="NAME[,NAME]", help="Scorers; every instance holds all of them.")],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the first instance, counted up for the others; 0: free ones.")
    ] = 8000,
    host: Annotated[
        str, typer.Option(help="Address; any but loopback requires a token in RETOUCH_REWARD_TOKEN.")
    ] = "127.0.0.1",
    devices: Annotated[str, typer.Option(help="cpu, or GPU numbers like 0,1,2: one instance for each.")] = "cpu",
    replicas: Annotated[int, typer.Option(min=1, help="Number of instances per device.")] = 1,
    endpoints: Annotated[
        Path, typer.Option(help="File for the addresses, which a run file names as a reward's url.")
    ] = Path("endpoints.json"),
    options: ScorerOptions = "{}",
    log_dir: Annotated[Path, typer.Option(help="Folder for the log of each instance.")] = Path("reward-logs"),
    max_batch: Annotated[int, typer.Option(min=1, help="Maximum number of images scored together.")] = 32,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="Maximum batching delay in milliseconds.")] = 4.0,
    with_parent: Annotated[int | None, typer.Option("--with-parent", hidden=True)] = None,
    listeners: Annotated[str, typer.Option("--listeners", hidden=True)] = "",
) -> None:
    """Serve reward models over HTTP until stopped; an instance that dies is restarted."""
    start_logging()
    from retouch.rewards.server.launch import ServeOptions, parse_devices, requested
    from retouch.rewards.server.launch import serve as serve_scorers

    limits = {"max_batch": max_batch, "max_wait_ms": max_wait_ms}
    where = ServeOptions(
        host,
        port,
        parse_devices(devices),
        replicas,
        endpoints,
        log_dir,
        with_parent=with_parent,
        listeners=[int(number) for number in listeners.split(",") if number.isdecimal()],
        limits=limits,
    )
    asked = requested(names, options)
    with writing(endpoints.parent, "--endpoints and --log-dir"):
        serve_scorers(asked, where)


@app.command()
def score(
    reward: Scorer,
    image: ScoredImage,
    prompt: ScoredPrompt,
    mask: ScoredMask = None,
    source: ScoredSource = None,
    url: Url = None,
    wait: Wait = 0.0,
    reference: ScoredReference = None,
    options: ScorerOptions = "{}",
    device: Device = "cpu",
) -> None:
    """Score one image and print the result as JSON."""
    from retouch.rewards.probe import asking, item_of
    from retouch.rewards.server.launch import requested_one
    from retouch.types import Failure

    given = requested_one(reward, options)
    item = item_of(image, prompt, mask, source, reference)
    with asking(reward, url, wait, given, device) as ask:
        (outcome,) = ask([item])
    failed = isinstance(outcome, Failure)
    typer.echo(json.dumps({"error": asdict(outcome)} if failed else asdict(outcome), indent=2, ensure_ascii=False))
    if failed:
        raise typer.Exit(1)


@app.command()
def probe(
    reward: Scorer,
    image: ScoredImage,
    prompt: ScoredPrompt,
    mask: ScoredMask = None,
    source: ScoredSource = None,
    reference: ScoredReference = None,
    labels: Annotated[
        Path | None, typer.Option(help="JSONL of images with prompt and label, to measure agreement.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=2, help="Number of times to score the image.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Number of images scored together.")] = 8,
    url: Url = None,
    wait: Wait = 0.0,
    options: ScorerOptions = "{}",
    device: Device = "cpu",
) -> None:
    """Measure a scorer: latency, repeatability, dependence of scores on the batch, agreement with labels."""
    from retouch.rewards.probe import agreement, asking, item_of, read_labels
    from retouch.rewards.probe import probe as measure
    from retouch.rewards.server.launch import requested_one

    item = item_of(image, prompt, mask, source, reference)
    labelled = read_labels(labels) if labels else None
    with asking(reward, url, wait, requested_one(reward, options), device) as ask:
        found = measure(ask, item, repeats, batch)
        if labelled:
            found["agreement"] = agreement(ask, labelled, batch)
    typer.echo(json.dumps({"reward": reward, **found}, indent=2, ensure_ascii=False))
    if found["failures"]:
        raise typer.Exit(1)


@app.command()
def env(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Environment or reward, such as imscore or editscore.")],
    path: Annotated[
        Path | None, typer.Option(help="Folder of the virtual environment; default: reward-envs/ENVIRONMENT.")
    ] = None,
    torch_index: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Package index of torch and torchvision, such as https://download.pytorch.org/whl/cpu; default: the "
            "configured index, whose builds are for CUDA.",
        ),
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="cpu, or GPU numbers like 0,1, for the server of imscore; default: 0.")
    ] = None,
    endpoints: Annotated[
        Path | None,
        typer.Option(
            help="File for the addresses of the server, which a run file names as a reward's url; default: "
            "endpoints.json."
        ),
    ] = None,
    start: Annotated[bool, typer.Option("--start", help="Start the server too, until stopped.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Resolve the packages by their metadata, and install nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run, packages and releases as JSON.")] = False,
) -> None:
    """Make a virtual environment for a reward with conflicting dependencies, and print the commands of its server."""
    from retouch.rewards.environments import environment_of, make, resolve, run_until_stopped

    start_logging()
    if as_json and not dry_run:
        raise ConfigError("--json: given without --dry-run; add it, or leave --json out")
    making = {"--path": path, "--torch-index": torch_index, "--start": start or None}
    making |= {"--devices": devices, "--endpoints": endpoints}
    if dry_run and (given := [option for option, value in making.items() if value is not None]):
        raise ConfigError(f"{given[0]}: given with --dry-run, which makes no environment; leave one of them out")
    environment, reward = environment_of(name)
    folder = path or Path("reward-envs") / environment.name
    commands = environment.commands(reward, folder, devices, endpoints)
    if as_json:
        typer.echo(json.dumps(resolve(environment), indent=2))
        return
    typer.echo(f"{environment.title}; rewards: {', '.join(environment.rewards)}")
    if dry_run:
        found = resolve(environment)
        for package, release in sorted(found.items(), key=lambda one: one[0].lower()):
            typer.echo(f"{package}=={release}")
        typer.echo(f"{len(found)} packages fit together; nothing was installed")
        return
    with writing(folder, "--path"):
        make(environment, folder, torch_index)
    for words in commands:
        typer.echo(shlex.join(words))
    for words in commands if start else ():
        if code := run_until_stopped(words):
            raise typer.Exit(code)


@app.command()
def fit(
    votes: Annotated[Path, typer.Argument(help="Votes of `retouch label`.")],
    out: Annotated[Path, typer.Option(help="File of the reward.")] = Path("taste.safetensors"),
    extractor: Annotated[
        str,
        typer.Option(help='Image encoder: hub id or folder of a SigLIP, CLIP or DINOv2; "tiny": the package\'s own.'),
    ] = "google/siglip-so400m-patch14-384",
    config: Annotated[
        Path | None,
        typer.Option(
            help="Run file to train with: its data section gives size and window of the images; default: as they are."
        ),
    ] = None,
    voter: Annotated[str | None, typer.Option(help="Whose votes; default: everybody's.")] = None,
    half: Annotated[
        str | None, typer.Option(help="first or second half of the examples, for a second, gold reward.")
    ] = None,
    device: Device = "cpu",
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Fit a reward to votes, and measure it on held-out examples."""
    start_logging()
    if half not in (None, "first", "second"):
        raise ConfigError(f"--half: given {half!r}; allowed: first, second")
    from retouch.config import load_run
    from retouch.taste.reward import fit_reward, lines_of

    run = None if config is None else load_run(config, trust=trust or None)
    with writing(out):
        taste, quality = fit_reward(votes, out, extractor, run=run, voter=voter, half=cast("Any", half), device=device)
    entry = f"rewards.taste={{path: {out}, min_group_std: {taste.noise:.3g}}}"
    if half == "second":
        entry = f"rewards.gold={{scorer: taste, path: {out}, role: gold, cautious: true}}"
    if as_json:
        told = {"out": str(out), "min_group_std": taste.noise, "entry": entry}
        typer.echo(json.dumps({**told, **taste.about}, indent=2))
        return
    typer.echo("\n".join([*lines_of(quality, taste.about["votes"]), f"{out}: train with {shlex.quote(entry)}"]))
