"""Which runs read an option, declared on its field. From the declaration `unread` makes the message about an option
that is given where nothing reads it, and `tools/config_reference.py` prints what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from pydantic import BaseModel

if TYPE_CHECKING:
    from retouch.config.base import Section
    from retouch.config.run import RunConfig

Reading = Literal["diffusion", "step_rule", "solver", "presets", "parts", "warm_up", "rollouts", "epochs", "gradients"]
"""Purposes of an algorithm's reading of other sections: training the diffusion model, a stochastic step rule, a solver
of the ODE, `rollout.preset`, rows in parts (`AlgorithmSection.parts_of_row`), a supervised warm-up, samples to train
on, epochs of them whose rewards this package compares (`training.experience`), gradients of rewards."""

EARLIER_DEFAULTS: Mapping[str, object] = {"optimizer.steps_per_forward": None, "rollout.shared_first_step": False}
"""Dotted key -> its default in earlier versions. Stored run files have it where nothing reads the key, and a resumed
run keeps it where its run file leaves the key out."""


@dataclass(frozen=True)
class ReadBy:
    """Annotation of an option that some algorithms read: those whose `READS` has `what`. The algorithm gives the reason
    and the remedy (`AlgorithmSection.unread`), so a new one needs no edit here.

        step_rule: Annotated[str | None, ReadBy("step_rule")] = None
    """

    what: Reading
    warns: bool = False
    """Whether an option that nothing reads is a warning and no error."""
    anew: bool = False
    """Whether it is an error only where a run begins (`require_trainable`) and a warning elsewhere: runs of earlier
    versions have it, and are opened and resumed."""


@dataclass(frozen=True)
class ReadIf:
    """Annotation of an option that is read only beside some values of others of its section.

        rank: Annotated[Count, ReadIf("with `weights: kv_lora`", lambda own: own.weights == "kv_lora", "but …; …")] = 32

    Attributes:
        where: where it is read, for the reference: what follows "Read".
        holds: whether a section with this option reads it.
        because: end of the message "KEY: given VALUE, …", with `{own}` (the section), `{run}` and `{name}`; or a
            function of the section and the run.
        warns: whether an option that nothing reads is a warning and no error.
    """

    where: str
    holds: Callable[[Any], object]
    because: str | Callable[[Any, Any], str]
    warns: bool = False


@dataclass(frozen=True)
class ReadIn:
    """Annotation of an option that is read only in some runs: `ReadIf`, where `holds` takes the section and the run."""

    where: str
    holds: Callable[[Any, Any], object]
    because: str | Callable[[Any, Any], str]
    warns: bool = False


Read = ReadBy | ReadIf | ReadIn


class Unread(NamedTuple):
    """An option that is given and that nothing reads."""

    message: str
    warns: bool
    anew: bool = False
    """Whether it is no warning where a run begins."""


@cache
def reads_of(kind: type[BaseModel]) -> Mapping[str, tuple[Read, ...]]:
    """Declarations of the options of a section that have one. A class that repeats an option, with another default or
    type, keeps the declaration of its base. One that is read beside some values alone is still read only by the
    algorithms that read its section."""
    found = dict[str, tuple[Read, ...]]()
    for part in reversed(kind.__mro__):
        for name, info in cast("Mapping[str, Any]", getattr(part, "model_fields", {})).items():
            marks = tuple(mark for mark in info.metadata if isinstance(mark, Read))
            if marks or name not in found:
                by_algorithm = any(isinstance(mark, ReadBy) for mark in marks)
                found[name] = marks if by_algorithm else (*_of_section(part, name), *marks)
    return {name: marks for name, marks in found.items() if marks}


def _of_section(kind: Any, name: str) -> tuple[Read, ...]:
    return () if kind.READ_BY is None or name in kind.READ_BY_ALL else (ReadBy(kind.READ_BY),)


def require_read_beside(section: Section) -> None:
    """Reject an option that nothing reads beside the others of its section.

    Raises:
        ValueError: "NAME: given VALUE, but ...; set ...".
    """
    for name, marks in reads_of(type(section)).items():
        for mark in marks:
            if isinstance(mark, ReadIf) and not mark.warns and not mark.holds(section) and is_given(section, name):
                raise ValueError(_message(name, section, name, _because(mark, section, None, name)))


def unread(run: RunConfig, section: Section, key: str) -> Iterator[Unread]:
    """The options of a section of a run that are given and that nothing reads.

    Args:
        key: dotted key of the section; empty for the run itself.
    """
    # An option may have several declarations. The first one that finds no reader makes the message: a second one would
    # give another remedy for the same key.
    for name, marks in reads_of(type(section)).items():
        dotted = f"{key}.{name}".lstrip(".")
        if not is_given(section, name, dotted):
            continue
        for mark in marks:
            if isinstance(mark, ReadBy):
                if run.algorithm.reads(run, mark.what):
                    continue
                because = f"but {run.algorithm.unread(run, dotted, mark.what)}"
                warns = mark.warns or mark.anew or run.algorithm.WARNS_UNREAD
            elif mark.holds(section) if isinstance(mark, ReadIf) else mark.holds(section, run):
                continue
            else:
                because, warns = _because(mark, section, run, name), mark.warns
            anew = isinstance(mark, ReadBy) and mark.anew and not run.algorithm.WARNS_UNREAD
            yield Unread(_message(dotted, section, name, because), warns, anew)
            break


def is_given(section: Section, name: str, dotted: str = "") -> bool:
    """Whether an option differs from its default, and from that of earlier versions. Values are compared, because a
    stored run file has every key."""
    info, value = type(section).model_fields[name], getattr(section, name)
    beside = dict(section) if info.default_factory_takes_validated_data else None
    default = info.get_default(call_default_factory=True, validated_data=beside)
    return value not in (default, EARLIER_DEFAULTS.get(dotted, default))


def _because(mark: ReadIf | ReadIn, section: Section, run: RunConfig | None, name: str) -> str:
    if isinstance(mark.because, str):
        return mark.because.format(own=section, run=run, name=name)
    return mark.because(section, run)


def _message(key: str, section: Section, name: str, because: str) -> str:
    return f"{key}: given{_shown(getattr(section, name))}, {because}"


def _shown(value: object) -> str:
    """A value as a run file has it; nothing for a section or a list."""
    if isinstance(value, bool):
        return f" {str(value).lower()}"
    if isinstance(value, float):
        return f" {value:.12g}"
    return f" {value!r}" if isinstance(value, int | str) else ""
