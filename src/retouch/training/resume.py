"""Whether a run may resume from a checkpoint: compare its run file with the current one and, for a mid-epoch
checkpoint, the files that its rollouts were sampled with. All but the rows of an epoch is looked at without torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic_core import to_jsonable_python

from retouch.config import ConfigError, RunConfig, dump_run, yaml12
from retouch.config.base import Section
from retouch.config.load import with_new_names
from retouch.config.optimizer import DEFAULT_ACCUMULATION
from retouch.config.reads import EARLIER_DEFAULTS
from retouch.data.dataset import Dataset
from retouch.data.identity import item_key
from retouch.engine import CheckpointError
from retouch.engine.saved import saved_run_file, sound_state
from retouch.files.complete import COMPLETE, complete_checkpoints, damaged
from retouch.files.model_files import is_same_model
from retouch.observe import RunDir
from retouch.rewards.base import RewardEntry, trained_on
from retouch.rewards.table import RewardTable

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.training.build import Run

logger = logging.getLogger(__name__)

Base = Mapping[str, str | None]
"""Result of `models.embeddings.base_files`."""

BASE = {
    "network_files": ("network", "path"),
    "text_files": ("text encoder", "path"),
    "processor_files": ("processor", "path"),
    "vae_files": ("autoencoder", "path"),
    "image_encoder_files": ("image encoder", "train.image_encoder"),
    "distillation_lora_files": ("few-step LoRA", "distillation_lora.path"),
}
"""Part of the files of a model -> its name in messages, and the option with its path."""

NEW_RUN = "or start a new run under another name=..."
INSIDE = "or resume from a checkpoint without rollouts.safetensors"
KEYS = "example"
"""Name of the tensor beside an epoch's rows with the `item_key` of each row's example."""


def resume_folder(config: RunConfig, run_dir: RunDir, *, quiet: bool = False) -> Path | None:
    """The checkpoint that `resume` names; None for a new run. "auto" is the newest of the run; a run that was begun
    from another run's checkpoint and stopped before its first own one begins from it again, and not from the base.

    Args:
        quiet: do not warn of that.

    Raises:
        CheckpointError: that one is gone, or which it is cannot be read: the base would be another run's beginning.
    """
    if config.resume is None:
        return None
    if config.resume != "auto":
        return Path(config.resume).expanduser()
    if found := complete_checkpoints(run_dir.checkpoints):
        return found[-1]
    try:
        origin = run_dir.begun_from()
    except ConfigError as error:
        raise CheckpointError(
            f"{run_dir.path}: has no checkpoint of its own, and what it was begun from cannot be read ({error}); "
            "restore that file, set resume to a checkpoint, or start a new run under another name=..."
        ) from None
    if origin is None:
        return None
    if not (origin / COMPLETE).is_file():
        raise CheckpointError(
            f"{run_dir.path}: was begun from {origin}, which is no complete checkpoint any more, and has none of its "
            "own; set resume to a checkpoint, or start a new run under another name=..."
        )
    if not quiet:
        logger.warning("%s has no checkpoint of its own yet: it begins from %s again", run_dir.path, origin)
    return origin


def resumed_run_file(config: RunConfig) -> Mapping[str, Any] | None:
    """The run file that the checkpoint to resume from was written under; None without one, or if it cannot be read,
    which is reported where it is loaded."""
    try:
        folder = resume_folder(config, RunDir(config, main=False), quiet=True)
        return None if folder is None else with_new_names(saved_run_file(sound_state(folder), folder))
    except CheckpointError:
        return None


def with_kept_defaults(config: RunConfig) -> RunConfig:
    """The run file of a run that may be resumed. A key that it leaves out, and whose default has changed, keeps its
    earlier default if the checkpoint was written under it: sums of forwards of other sizes round differently."""
    before = resumed_run_file(config)
    if before is None:
        return config
    for key, default in EARLIER_DEFAULTS.items():
        name, _, option = key.partition(".")
        section, kept = getattr(config, name), cast("dict[str, dict[str, object]]", before).get(name, {})
        if option not in section.model_fields_set and kept.get(option, default) == default:
            config = config.model_copy(update={name: section.model_copy(update={option: default})})
    return config


def has_finished(config: RunConfig, step: int, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run that is resumed at a step has nothing left to do, by the records of its metrics."""
    over = step >= config.training.max_steps
    return over and any((record["step"], record.get("event")) == (step, "finished") for record in records)


def evaluation_stands(records: Sequence[Mapping[str, Any]], step: int, rewards: RewardTable) -> bool:
    """Whether no evaluation of a step has to be repeated because each of its rewards failed, by the records. One in
    which none failed may have other rewards than the run has now."""
    found = [record for record in records if (record["kind"], record["step"]) == ("eval", step)]
    if not found or not rewards.evaluated or "failed" not in found[-1]:
        return True
    return any(name in found[-1] for name in rewards.evaluated)


def same_kind(folder: Path, state: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a checkpoint of another algorithm or family; log every other change of the run file.

    Raises:
        CheckpointError: with the option that must be set back.
    """
    _require_same_kind(folder, state, config)
    with _reading_run_file(folder):
        _warn_of_changes(saved_run_file(state, folder), config)


def require_it_fits(config: RunConfig, run_dir: RunDir) -> None:
    """Refuse what `may_go_on` and `same_kind` would, but for the files of the model: before torch is imported and a
    model is loaded. A checkpoint that cannot be read is reported where it is loaded.

    Raises:
        CheckpointError: with the first option that must be set back.
    """
    folder = resume_folder(config, run_dir, quiet=True)
    if folder is None:
        return
    try:
        state = sound_state(folder)
    except CheckpointError:
        return
    kept = with_kept_defaults(config)
    _require_same_kind(folder, state, kept)
    if not config.algorithm.trains_text_encoder:
        with _reading_run_file(folder):
            _may_go_on(folder, state, kept, None)


def _require_same_kind(folder: Path, state: Mapping[str, Any], config: RunConfig) -> None:
    before, now = saved_run_file(state, folder), yaml12.parse(dump_run(config))
    with _reading_run_file(folder):
        for section, name in (("model", "family"), ("algorithm", "name")):
            _same(folder, "was written under", section, name, before, now, NEW_RUN)


def may_go_on(folder: Path, state: Mapping[str, Any], config: RunConfig, base: Base) -> None:
    """Refuse a checkpoint of another algorithm or family, and one whose rollouts do not fit the run file; warn of what
    else was changed.

    Args:
        state: of the checkpoint.
        base: the files of the model, as they are today.

    Raises:
        CheckpointError: with the first option that must be set back.
    """
    same_kind(folder, state, config)
    with _reading_run_file(folder):
        _may_go_on(folder, state, config, base)


@contextmanager
def _reading_run_file(folder: Path) -> Iterator[None]:
    """Within it, a run file of a checkpoint without the sections of one is an error of the checkpoint.

    Raises:
        CheckpointError: naming the first that is missing.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(folder, f"state.json: config is no whole run file ({type(error).__name__}: {error})") from error


def _may_go_on(folder: Path, state: Mapping[str, Any], config: RunConfig, base: Base | None) -> None:
    """The comparison of `may_go_on`; `base` None leaves out the files of the model."""
    before, now = with_new_names(saved_run_file(state, folder)), yaml12.parse(dump_run(config))
    for section in ("optimizer", "algorithm"):  # an option that is missing in the checkpoint did not exist yet
        own: Section = getattr(config, section)
        before[section] = {**_defaults(type(own), dict(own)), **before[section]}
    for name in ("state", "factory"):
        _same(folder, "was written under", "optimizer", name, before, now, NEW_RUN)
    after_warmup = state["progress"]["phase"] == "rl"
    if after_warmup and now["algorithm"].get("kl_weight", 0) and before["algorithm"].get("kl_weight", 1) == 0:
        raise CheckpointError(
            f"{folder}: was written with algorithm.kl_weight=0, which keeps no reference, but the run file has a KL; "
            "set algorithm.kl_weight=0, or start a new run under another name=..."
        )
    _require_same_warm_up(folder, state["progress"], before, now)
    if after_warmup and "reference" in config.algorithm.snapshots:
        _same(folder, "keeps the reference of", "algorithm", "kl_reference", before, now, NEW_RUN)
    if (folder / "rollouts.safetensors").exists():
        for key, then, given, is_retired in changes(RunConfig, config, before, now):
            if is_retired:
                raise CheckpointError(
                    f"{folder}: lies inside an epoch of {key}={then}, an option of earlier versions; every run has "
                    f"{given}; {INSIDE.removeprefix('or ')}, or with the version that wrote it"
                )
            raise _refused(folder, "lies inside an epoch of", key, then, given, INSIDE)
        _same_rows(folder, before, now)
        if base is not None and "base" in state:  # missing in older checkpoints
            _same_base(folder, before, now, state["base"], base)


def _require_same_warm_up(
    folder: Path, progress: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Learning rates of RL, the decay of an old policy and the refreshes of a reference count from the end of the
    warm-up, by `algorithm.sft_steps`: one that ended elsewhere would have them begin in the middle, or below 0."""
    if progress["phase"] == "rl":
        _same(folder, "was written after a warm-up of", "algorithm", "sft_steps", before, now, NEW_RUN)
    elif progress["phase"] == "warmup" and now["algorithm"]["sft_steps"] < progress["step"]:
        raise CheckpointError(
            f"{folder}: lies at step {progress['step']} of the warm-up, beyond algorithm.sft_steps="
            f"{now['algorithm']['sft_steps']} of the run file; set it to {progress['step']} or more, {NEW_RUN}"
        )


def _warn_of_changes(saved: Mapping[str, Any], config: RunConfig) -> None:
    """Log every option that differs from the run file of a checkpoint. One that did not exist yet had its default, or
    that of before there was its key."""
    before = with_new_names(saved)
    for key, default in EARLIER_DEFAULTS.items():
        section, _, option = key.partition(".")
        before[section] = {option: default, **before[section]}
    for key, then, given, _ in changes(RunConfig, config, before, yaml12.parse(dump_run(config)), every=True):
        if key != "resume":
            moved = key == "training.max_steps" and config.data.stages > 1
            effect = "; the stages of data.curriculum are shares of it, and move" * moved
            told = f"{key}: {json.dumps(given)} (was {json.dumps(then)}){effect}"
            logger.warning("changed since the checkpoint: %s", told)


def changes(
    kind: type[Section],
    section: Section | None,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    key: str = "",
    *,
    every: bool = False,
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Every option that what an epoch has recorded depends on and that differs -> (key, value then, value now, whether
    the option is retired).

    Args:
        section: of class `kind`; None where only the checkpoint has it.
        before: that of the checkpoint, under names of today. An option that is missing in it had its default.
        now: that of the run file.
        every: options that are free in an epoch as well.
    """
    retired = kind.retired()
    defaults = {**retired, **_defaults(kind, dict(now if section is None else section))}
    for name in [*kind.model_fields, *retired]:
        then, given = before.get(name, defaults.get(name)), now.get(name, defaults.get(name))
        if then == given or (not every and kind.is_free_in_epoch(name, then, given)):
            continue
        # A section is compared option by option, each by the rule of its own class. `rewards` is no section but a
        # mapping of them; an entry that is gone is compared by the base of all.
        inside = getattr(section, name, None)
        if isinstance(inside, Section) and isinstance(then, dict):
            parts = cast("dict[str, Any]", then), given
            yield from changes(type(inside), inside, *parts, f"{key}{name}.", every=every)
        elif name == "rewards" and isinstance(then, dict):
            earlier = cast("dict[str, Any]", then)
            counts = trained_on(cast("Mapping[str, RewardEntry]", inside or {}))
            for entry in {**earlier, **given}:
                own = cast("Mapping[str, Section]", inside or {}).get(entry)
                parts = earlier.get(entry, {}), given.get(entry, {})
                if every and not all(parts):
                    yield f"{key}{name}.{entry}", *(part.get("scorer") for part in parts), False
                    continue
                of_entry = RewardEntry if own is None else type(own)
                found = changes(of_entry, own, *parts, f"{key}{name}.{entry}.", every=every)
                yield from (change for change in found if every or not change[-1] or entry in counts)
        else:
            yield f"{key}{name}", then, given, name in retired


def with_keys(run: Run, rollouts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of an epoch for a checkpoint, with the keys of their examples."""
    return {**rollouts, KEYS: _keys(run.data, rollouts["position"])}


def without_keys(run: Run, folder: Path, rollouts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of an epoch from a checkpoint, of the examples that the data has today; older ones are taken as they are.

    Raises:
        CheckpointError: on every process, where an example of any is another one now.
    """
    rows = dict(rollouts)
    kept, position = rows.pop(KEYS, None), rows["position"]
    others = [] if kept is None else position[kept != _keys(run.data, position)].unique().tolist()
    if run.engine.any(bool(others)):
        first, *more = others or [-1]
        item = run.data.items[first].id if 0 <= first < len(run.data) else None
        which = f"example {item} (and {len(more)} more)" if item is not None else "one of its examples"
        raise CheckpointError(
            f"{folder}: lies inside an epoch of other data than data.path={run.data.config.path} holds now, where "
            f"{which} is not what was sampled; set the data back, {INSIDE}"
        )
    return rows


def _keys(data: Dataset, positions: Tensor) -> Tensor:
    import torch

    known = {p: item_key(data.items[p]) if p < len(data) else -1 for p in positions.unique().tolist()}
    return torch.tensor([known[p] for p in positions.tolist()], dtype=torch.int64)


def _same_rows(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """The rows of an epoch are dealt to its steps by their number; how many are in a forward does not matter."""
    if now["optimizer"]["global_batch_size"]:
        return  # which has not changed
    rows = [
        one["optimizer"]["batch_size_per_device"] * (one["optimizer"]["gradient_accumulation"] or DEFAULT_ACCUMULATION)
        for one in (before, now)
    ]
    if rows[0] != rows[1]:
        raise CheckpointError(
            f"{folder}: lies inside an epoch of optimizer steps on {rows[0]} rows per device, the run file makes them "
            f"{rows[1]}; set optimizer.batch_size_per_device x gradient_accumulation back, {INSIDE}"
        )


def _same_base(folder: Path, before: dict[str, Any], now: dict[str, Any], then: Base, today: Base) -> None:
    """By a sample of the files; by their paths where they are not here, then or now. Text encoders may be gone, when
    `model.embeddings` has what they made, and earlier versions did not record their processor."""
    for part, (name, option) in BASE.items():
        if part == "network_files" and now["model"].get("transformer"):
            option = "transformer"
        kept, found = then.get(part), today.get(part)
        section, _, name_in_it = option.rpartition(".")
        paths = [
            (one["model"].get(section) or {} if section else one["model"]).get(name_in_it) for one in (before, now)
        ]
        # Files that are here, then and now, are compared by content, wherever they lie. Where they are not, their paths
        # stand for them.
        may_be_gone = part in ("text_files", "processor_files")
        differs = not is_same_model(kept, found) if kept and found else not may_be_gone and paths[0] != paths[1]
        if differs:
            raise CheckpointError(
                f"{folder}: lies inside an epoch of another {name} than model.{option}={paths[1]} has (it was "
                f"{paths[0]}); set it back, {INSIDE}"
            )


def _same(
    folder: Path, what: str, section: str, name: str, before: Mapping[str, Any], now: Mapping[str, Any], remedy: str
) -> None:
    given, kept = (run[section].get(name) for run in (now, before))
    if given != kept:
        raise _refused(folder, what, f"{section}.{name}", kept, given, remedy)


def _refused(folder: Path, what: str, key: str, kept: object, given: object, remedy: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {what} {key}={kept}, the run file has {given}; set it back, {remedy}")


def _defaults(kind: type[Section], given: dict[str, Any]) -> dict[str, Any]:
    """Option -> its default as JSON, of those that have one.

    Args:
        given: values of the section, which some defaults follow.
    """
    return {
        name: to_jsonable_python(field.get_default(call_default_factory=True, validated_data=given))
        for name, field in kind.model_fields.items()
        if not field.is_required()
    }
