"""Reject combinations of options that cannot work, and warn of those that are probably not intended.

The rules stand with the components that read the options: `Section.check`, `check_trainable` and `warnings`, and the
declarations of `retouch.config.reads`. Here they are called, in the order in which they are reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retouch.config.advice import advice
from retouch.config.base import Section, sections
from retouch.config.reads import Unread, unread
from retouch.errors import ConfigError

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

FIRST = ("model", "rewards", "optimizer", "algorithm")
"""Sections whose rules those of the others presume."""


def check(run: RunConfig) -> None:
    """Reject options that cannot work in this run, and options that nothing reads in it.

    Raises:
        ValueError: "key: given ...; expected ...; set ...".
    """
    for key, section in _sections(run):
        section.check(run, key)
    for option in _unread(run):
        if not option.warns:
            raise ValueError(option.message)


def require_trainable(run: RunConfig) -> None:
    """Reject what a run shall not be trained with, but may have been: earlier versions did, and such a run is opened.
    One that is resumed goes on under options that nothing reads, as it began.

    Raises:
        ConfigError: "key: given ...; expected ...; set ...".
    """
    try:
        for key, section in _sections(run):
            section.check_trainable(run, key)
        for option in _unread(run) if run.resume is None else ():
            if option.anew:
                raise ValueError(option.message)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def warnings_of(run: RunConfig, world_size: int = 1) -> list[str]:
    """One line for each warning: the key, the value given, its effect, and the option to set."""
    lines = [line for _, section in _sections(run) for line in section.warnings(run)]
    lines += [option.message for option in _unread(run) if option.warns]
    lines += [line for name, entry in run.rewards.items() for line in entry.advice(name)]
    return [*lines, *advice(run, world_size).values()]


def _sections(run: RunConfig) -> list[tuple[str, Section]]:
    order = {name: place for place, name in enumerate(FIRST)}
    return sorted(sections(run), key=lambda found: order.get(found[0].partition(".")[0], len(FIRST)))


def _unread(run: RunConfig) -> list[Unread]:
    return [option for key, section in _sections(run) for option in unread(run, section, key)]
