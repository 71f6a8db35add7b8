"""Check a run's data, its run directory and its logins: lines of `retouch doctor`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from retouch.config import ConfigError, RunConfig, derive
from retouch.config.needs import data_sections, needed_pictures
from retouch.data.base import DataError, DataSection, ItemError, ItemFiles
from retouch.data.dataset import CheckPrompts, Dataset, all_embedded, doubts_of, load_dataset
from retouch.data.formats import Data
from retouch.data.texts import has_text, reading_rewards, require_texts, scored_sections, unknown_characters
from retouch.doctor.line import Line
from retouch.errors import InputError
from retouch.process.plain_text import count_of

if TYPE_CHECKING:
    from retouch.observe import RunDir


def data_lines(run: RunConfig, world_size: int, check_prompts: CheckPrompts | None = None) -> Iterator[Line]:
    """Read every section as the run would, and check that it has the examples, texts and targets that the run needs.

    Args:
        check_prompts: of `load_dataset`; None where the model is not on this machine.
    """
    # A section that cannot be read must not hide the problems of the others: only comparisons with it are left out.
    read: dict[str, Dataset] = {}
    for name, section in data_sections(run).items():
        warnings: list[str] = []
        try:
            read[name] = _load(run, name, section, check_prompts and partial(_collected, check_prompts, warnings))
        except (DataError, ConfigError, OSError) as error:
            yield Line("fix", name, str(error))
            continue
        yield _readable(name, section, read[name])
        yield from (Line("warning", name, warning) for warning in warnings)
        if name in scored_sections(run):
            yield from _texts(run, name, read[name])
            for message in unknown_characters(run, read[name].items):
                yield Line("warning", name, message)
    if run.evaluation.data is None:
        yield Line("warning", "evaluation.data", "none: the run evaluates on training examples; set evaluation.data")
    if "data" in read:
        warmup = read.get("warmup_data", read["data"])
        yield from _checked("examples", partial(_enough, run, world_size, read["data"], warmup), "warning")
    if "data" in read and "evaluation.data" in read:
        training = [data for name, data in read.items() if name != "evaluation.data"]
        yield from _checked("evaluation.data", partial(_held_out, run, read["evaluation.data"], *training))


def needs_no_t5(run: RunConfig) -> bool:
    """Whether every text of the run has a file of embeddings; False if a list cannot be read."""
    if run.model.spec.embedded_encoder is None or run.model.doubles_for_guidance:  # no file has the negative prompt
        return False
    try:
        listed = [item for section in data_sections(run).values() for item in section.items()]
    except (DataError, ConfigError, OSError):
        return False
    return all_embedded(item for item in listed if isinstance(item, ItemFiles))


def _load(run: RunConfig, name: str, section: Data, check_prompts: CheckPrompts | None) -> Dataset:
    with _without_warnings():
        needs = needed_pictures(run, training=name == "data")
        return load_dataset(section, name, needs, check_prompts=check_prompts)


def _collected(
    check: CheckPrompts, warnings: list[str], section: DataSection, items: Sequence[ItemFiles]
) -> tuple[Sequence[str], Mapping[int, ItemError]]:
    """The result of a check; its warnings, which have lines, are added to `warnings`."""
    found, problems = check(section, items)
    warnings.extend(found)
    return found, problems


def _readable(name: str, section: Data, data: Dataset) -> Line:
    found = list[str]()
    skipped = len(section.items()) - len(data)
    if skipped:
        found.append(f", {skipped} more are broken and left out; `retouch data validate` lists them")
    if data.doubts:
        found.append(f"; {doubts_of(data.doubts, len(data), name)}")
    says = "".join(found) or ", all checked, now or since their files last changed"
    return Line("warning" if found else "ok", name, f"{section.path}: {count_of(len(data), 'item')}{says}")


def _texts(run: RunConfig, name: str, data: Dataset) -> Iterator[Line]:
    """Check that every example has a text for the rewards that read one."""
    readers, without = reading_rewards(run), sum(not has_text(item) for item in data.items)
    if not readers or not without:
        return
    try:
        require_texts(run, name, data.config.path, data.items)
    except ConfigError as error:
        yield Line("fix", name, str(error))
    else:
        yield Line(
            "warning",
            name,
            f"{without} of {len(data)} examples have no text to read (`text`, or quotes in the prompt): rewards."
            f"{readers[0]} fails on their samples; give them one, or leave them out",
        )


def _checked(what: str, check: Callable[[], str | None], result: Literal["ok", "warning"] = "ok") -> Iterator[Line]:
    """The result of a check in a line: an InputError must be fixed; None needs no line, as a package that is missing,
    which the line of its extra reports.

    Args:
        result: what the text of a check is.
    """
    try:
        found = check()
    except ImportError:
        return
    except InputError as error:
        yield Line("fix", what, str(error))
    else:
        if found is not None:
            yield Line(result, what, found)


def _enough(run: RunConfig, world_size: int, data: Dataset, warmup: Dataset) -> str | None:
    """Check for the labels of KTO, for targets of supervised steps, and for enough examples of an epoch -> warnings,
    or None."""
    from retouch.data.rules import require_groups, require_targets, shape_warnings

    if run.algorithm.trains_text_encoder:  # a generation may repeat a prompt
        return None
    run.algorithm.check_items(data.items)
    require_targets(run, warmup)
    derived = derive(run, world_size)
    left_out = require_groups(run, derived, data)
    return "; ".join(filter(None, (left_out, *shape_warnings(run, derived, data, warmup)))) or None


def _held_out(run: RunConfig, held_out: Dataset, *training: Dataset) -> None:
    from retouch.data.rules import require_held_out

    require_held_out(run, held_out, *training)


def start_lines(run: RunConfig) -> Iterator[Line]:
    """Check that the run directory is new, or can be continued."""

    def check() -> str:
        from retouch.observe import RunDir
        from retouch.training.beginning import require_can_begin

        directory = RunDir(run)
        require_can_begin(run, directory)
        return f"{directory.path}: {_beginning(run, directory)}"

    return _checked("run directory", check)


def login_lines(run: RunConfig) -> Iterator[Line]:
    """Check the login of wandb, if it is installed."""

    def check() -> str:
        from retouch.observe.sinks import require_login

        require_login()
        return "logged in, or offline"

    return _checked("wandb", check) if "wandb" in run.logging.sinks else iter(())


def _beginning(run: RunConfig, directory: RunDir) -> str:
    from retouch.engine.saved import complete_checkpoints

    if run.resume == "auto" and not complete_checkpoints(directory.checkpoints):
        if (origin := directory.begun_from()) is not None:
            return f"holds no checkpoint; the run begins from {origin} again"
        return "holds no checkpoint; the run starts from step 0" if directory.holds_run() else "new"
    return f"resumes (resume={run.resume})" if run.resume else "new"


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence warnings about broken items, which have their own line."""
    logger = logging.getLogger("retouch.data.dataset")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
