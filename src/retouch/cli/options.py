"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retouch.config import load_run
from retouch.errors import ConfigError

if TYPE_CHECKING:
    from retouch.use.trained import Trained

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="Values by dotted key.")]
Json = Annotated[bool, typer.Option("--json", help="JSON output.")]
Open = Annotated[bool, typer.Option("--open", help="Open the file in a browser.")]

RunDir = Annotated[Path | None, typer.Option(help="Run directory; its newest checkpoint is used.")]
Config = Annotated[Path | None, typer.Option(help="Run file, instead of --run.")]
Weights = Annotated[Path | None, typer.Option(help="Checkpoint or weights folder; default with --config: the base.")]
Raw = Annotated[
    bool | None, typer.Option("--raw/--ema", help="Raw or EMA weights; default: the run's evaluation.weights.")
]

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


def start_logging(verbose: bool = False) -> None:
    """Send log lines to standard error."""
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%H:%M:%S", markup=False)
    handler.addFilter(lambda record: not getattr(record, "in_bar", False))  # the progress bar shows these
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("retouch").setLevel(logging.DEBUG if verbose else logging.INFO)


def parse_size(text: str, option: str) -> tuple[int, int]:
    """(height, width) of "512" or "32x64".

    Raises:
        ConfigError: neither form.
    """
    parts = text.lower().split("x")
    if len(parts) not in (1, 2) or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{option}: given {text!r}; write a side like 512, or HEIGHTxWIDTH like 32x64")
    return int(parts[0]), int(parts[-1])


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
        ConfigError: two numbers, or 0.
    """
    numbers = [text for text in given if text.lstrip("-").isdecimal()]
    if len(numbers) > 1 or any(int(number) < 1 for number in numbers):
        raise ConfigError(f"--images: given {' and '.join(numbers)}; expected one number of 1 or more, or folders")
    return (int(numbers[0]) if numbers else None), [Path(text) for text in given if text not in numbers]


def find_trained(
    run: Path | None, config: Path | None, weights: Path | None, raw: bool | None, unread: Collection[str]
) -> Trained:
    """The weights that --run, --config and --weights name. No torch: a mistake is reported within a second.

    Args:
        unread: sections of the run file that the command does not need.

    Raises:
        ConfigError, ModelFilesError, CheckpointError: missing files.
    """
    if (run is None) == (config is None):
        raise ConfigError("give either --run RUN_DIR or --config RUN.yaml")
    for option, path in {"--run": run, "--config": config, "--weights": weights}.items():
        if path is not None and not path.exists():
            raise ConfigError(f"{option}: given {path}; no such file or folder")
    file = run / "config.yaml" if run is not None else config
    if file is not None and file.is_file():
        from retouch.training.files import require_model

        require_model(load_run(file, unread=unread))
    from retouch.use.trained import Trained

    return Trained.find(run, config, weights, raw, unread)
