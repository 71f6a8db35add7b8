"""Export trained weights to the files of other programs. torch is imported once the arguments are checked."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.adapters import FORMATS, FORMATS_OF
from retouch.config.errors import nearest
from retouch.config.load import take_in_plugins
from retouch.config.parts import model_of, trains_text_encoder
from retouch.config.presets import section_of
from retouch.config.trust import consented
from retouch.engine.saved import saved_run_file, sound_state
from retouch.errors import CheckpointError, ConfigError, InputError, first_line, shown
from retouch.files.complete import complete_checkpoints
from retouch.files.disk import file_problem, real_place, writing
from retouch.process.machine import process_mark
from retouch.use.trained import chosen_weights

if TYPE_CHECKING:
    from retouch.adapters.about import About
    from retouch.families.base import ModelSection

logger = logging.getLogger(__name__)


def export_weights(
    checkpoint: Path, to: str, out: Path | None, *, raw: bool | None = None, trust: bool = False
) -> Path:
    """Write the weights of a checkpoint (of a run directory: its newest) in the format `to` -> the path written, by
    default below `exports` of the run.

    Args:
        raw: the raw weights (True) or the EMA weights (False); None: those that `evaluation.weights` of the run names.
        trust: import the plug-ins of the run for the family of its model, whoever wrote the run directory.

    Raises:
        ConfigError: an unknown format, one that does not fit the weights, or an `out` that holds files.
        CheckpointError: weights that are missing or damaged.
        ModelFilesError: a base that is missing or incomplete, of `diffusers`.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to: given {to!r}; {nearest(to, FORMATS)}")
    if (checkpoint / "config.yaml").is_file() and not (checkpoint / "complete.json").is_file():
        found = complete_checkpoints(checkpoint / "checkpoints")
        if not found:
            raise CheckpointError(f"{checkpoint} has no complete checkpoint yet")
        checkpoint = found[-1]
    checkpoint = real_place(checkpoint)
    folder = chosen_weights(checkpoint, raw, evaluated_raw=raw is None and _evaluates_raw(checkpoint))
    instead_of_ema = folder.name == "weights" and (folder.parent / "ema").is_dir()
    if out is None:
        out = _export_folder(folder.parent, f"{to}-raw" if raw or instead_of_ema else to)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: given {out}; expected a new or empty folder; choose another")
    state = sound_state(folder.parent)
    run = saved_run_file(state, folder.parent)
    config = _model(run, state["config"], folder.parent, trust)
    if trains_text_encoder(run):
        kind = "a PEFT adapter" if (folder / "adapter_config.json").is_file() else "a model of transformers"
        raise ConfigError(
            f"--to: given {to!r}, but the run trained its text encoder, and {folder} is {kind} already; load that "
            "folder"
        )
    if to not in FORMATS_OF[kind := config.train.kind]:
        other = next(other for other, formats in FORMATS_OF.items() if to in formats)
        raise ConfigError(
            f"--to: given {to!r}, but the run trained {kind} weights; use --to {', '.join(FORMATS_OF[kind])}, or train "
            f"with model.train.kind={other}"
        )

    # All errors of the command line and of the records are raised above, before torch is imported and a base is read.
    logger.info("loading torch, then %s", folder)
    from safetensors import SafetensorError

    from retouch.adapters.export import export

    about = _about(run, folder.parent, raw=instead_of_ema)
    try:
        with writing(out), _appearing(out) as made:
            written = out / export(config, folder, to, made, about).relative_to(made)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, InputError) or (isinstance(error, OSError) and file_problem(error)):
            raise
        raise CheckpointError(f"{checkpoint}: cannot be exported: {first_line(error)}") from None
    logger.info("exported %s", folder)
    return written


def _evaluates_raw(checkpoint: Path) -> bool:
    """Whether the run of a checkpoint with both evaluates its raw weights and not those of the EMA."""
    if not all((checkpoint / part).is_dir() for part in ("weights", "ema")):
        return False
    run = saved_run_file(sound_state(checkpoint), checkpoint)
    return section_of(run, "evaluation").get("weights") == "raw"


def _about(run: Mapping[str, Any], checkpoint: Path, *, raw: bool) -> About:
    """Facts of the run for the metadata of exported files.

    Args:
        raw: raw weights of a checkpoint that has EMA weights too.
    """
    from retouch.adapters.about import About

    step = checkpoint.name
    name = "-".join(filter(None, (str(run.get("name") or ""), step, "raw" * raw)))
    trained = f"{section_of(run, 'algorithm').get('name')} with retouch, {step}"
    trigger = section_of(run, "data").get("prompt_template")
    return About(name, trained, None if trigger is None else str(trigger))


def _model(run: Mapping[str, Any], run_file: str, checkpoint: Path, trust: bool) -> ModelSection:
    """The model of a checkpoint. Its family may be one of the plug-ins of the run, which are imported with consent: by
    `trust`, or where `train` wrote the run file to the directory of the run.

    Raises:
        ConfigError: no such section, or no such family.
    """
    source = f"{checkpoint}: state.json"
    try:
        return model_of(run, source)
    except ConfigError as error:
        if not run.get("plugins"):
            raise
        if not trust and not consented(checkpoint.parent.parent, run_file.encode()):
            raise ConfigError(
                f"{error}; the run names plug-ins ({shown(run['plugins'], 200)}): add --trust (Python: trust=True) to "
                "import them, if you trust whoever wrote it"
            ) from None
    take_in_plugins(run["plugins"], source)
    return model_of(run, source)


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A folder whose content is moved to `out` at the end, and deleted after an error: a program that reads `out`
    finds all files of an export or none.

    Raises:
        ConfigError: `out` got files meanwhile.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    place = out if out.is_dir() else out.parent  # where a disk is mounted, a folder beside it lies on another one
    made = place / f".{out.name[:48]}.{process_mark()}.tmp"
    try:
        yield made
        if not out.exists():
            made.rename(out)
        elif any(path != made for path in out.iterdir()):
            raise ConfigError(f"--out: given {out}; another process wrote there; choose another")
        else:
            for path in made.iterdir():
                path.rename(out / path.name)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _export_folder(checkpoint: Path, name: str) -> Path:
    """Below the run of a checkpoint, or beside a checkpoint outside a run."""
    in_a_run = checkpoint.parent.name == "checkpoints"
    root = checkpoint.parents[1] / "exports" if in_a_run else checkpoint.parent
    return root / f"{checkpoint.name}-{name}"
