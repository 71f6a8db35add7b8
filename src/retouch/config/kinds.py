"""Sections whose kind an override changes: `algorithm.name=ppo` over a file of GRPO replaces the section, as in a file
that `extends` that one, except for the keys of `Section.KEPT`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from retouch.algorithms import ALGORITHMS
from retouch.config.errors import ConfigError
from retouch.config.optimizer import OptimizerConfig
from retouch.config.reads import ReadBy, reads_of
from retouch.config.rollout import RolloutConfig
from retouch.config.variables import with_variables
from retouch.data.formats import FORMATS
from retouch.families import DEFAULT_FAMILY, FAMILIES
from retouch.registry import Registry
from retouch.rewards import REWARDS

if TYPE_CHECKING:
    from retouch.algorithms.base import AlgorithmSection

Key = tuple[str, ...]

_TAGS: Mapping[str, Registry[Any] | None] = {
    "family": FAMILIES,
    "kind": None,
    "format": FORMATS,
    "scorer": REWARDS,
}
"""Keys that select the kind of a section, and the registry of its classes, if there is one. `name` is one only under
`algorithm`."""


def is_reward(key: Sequence[str]) -> bool:
    """Whether a path is that of an entry under `rewards`."""
    return len(key) == 2 and key[0] == "rewards"


def changed_tag(below: Mapping[str, Any], above: Mapping[str, Any], key: Key) -> str | None:
    """The key by which `above` names another kind than `below`; None where it does not.

    Args:
        key: where the two sections stand in the file.
    """
    tags = (*_TAGS, "name") if key == ("algorithm",) else _TAGS
    unsaid = {"family": DEFAULT_FAMILY} if key == ("model",) else {"scorer": key[-1]} if is_reward(key) else {}
    kind = {**unsaid, **below}
    return next((tag for tag in tags if tag in above and tag in kind and _differ(kind[tag], above[tag])), None)


def _differ(then: object, now: object) -> bool:
    """Whether two kinds are different ones, variables filled in. A variable that is not set drops no key, because
    nothing is known of it; the validation reports it."""
    try:
        return with_variables(now) != with_variables(then)
    except ConfigError:
        return False


class Replaced(NamedTuple):
    """A section that overrides replaced, with dotted keys."""

    tag: str
    """Key that names the kind."""
    then: object
    now: object
    kept: list[str]
    dropped: list[str]

    def __str__(self) -> str:
        kept = f"; kept {', '.join(self.kept)}" if self.kept else ""
        return (
            f"{self.tag}: given {self.now!r} over {self.then!r}, which replaces the section: dropped "
            f"{', '.join(self.dropped)}{kept}; to use a dropped key, set it in the same command"
        )


def replace_kinds(below: Mapping[str, Any], run: dict[str, Any], typed: Collection[Key]) -> list[Replaced]:
    """Remove from a run the keys of kinds that overrides replaced, and return the sections that lost some.

    Args:
        below: the run before the overrides.
        run: the run with them; it is changed.
        typed: keys that the overrides set; they stay.
    """
    replaced = list(_replaced(below, run, typed, ()))
    for section in replaced:
        if section.tag == "algorithm.name":
            section.dropped.extend(_drop_unread(run, section.now, typed))
    return [section for section in replaced if section.dropped]


def _replaced(
    below: Mapping[str, Any], section: dict[str, Any], typed: Collection[Key], key: Key
) -> Iterator[Replaced]:
    tag = changed_tag(below, section, key)
    if tag is None:
        for name, value in section.items():
            old = below.get(name)
            if isinstance(value, dict) and isinstance(old, dict):
                yield from _replaced(cast("dict[str, Any]", old), cast("dict[str, Any]", value), typed, (*key, name))
        return
    registry, now = ALGORITHMS if tag == "name" else _TAGS[tag], with_variables(section[tag])
    kept = _kept(registry.find(now) if registry else None)
    dropped = _drop_untyped(section, typed, key, kept)
    left = [".".join((*key, name)) for name in section if name in kept and not is_set((*key, name), typed)]
    yield Replaced(".".join((*key, tag)), below.get(tag, key[-1]), now, left, dropped)


def _kept(kind: type[Any] | None) -> frozenset[str]:
    """The options that a class takes over from another kind."""
    bases: Sequence[type[Any]] = kind.__mro__ if kind is not None else ()
    return frozenset(name for base in bases for name in cast("frozenset[str]", vars(base).get("KEPT", frozenset())))


def _drop_untyped(section: dict[str, Any], typed: Collection[Key], key: Key, kept: Collection[str]) -> list[str]:
    """Leave the keys of a section that overrides set, and those of `kept`; return the others."""
    dropped = list[str]()
    for name in list(section):
        path = (*key, name)
        if name in kept or is_set(path, typed):
            continue
        if any(one[: len(path)] == path for one in typed):
            dropped += _drop_untyped(section[name], typed, path, ())
        else:
            del section[name]
            dropped.append(".".join(path))
    return dropped


def is_set(path: Key, typed: Collection[Key]) -> bool:
    """Whether an override sets a key, or a section that it is in."""
    return any(path[: len(one)] == one for one in typed)


def _drop_unread(run: Mapping[str, Any], algorithm: object, typed: Collection[Key]) -> Iterator[str]:
    """Drop the keys of `rollout` and `optimizer` that an algorithm refuses."""
    kind = cast("type[AlgorithmSection] | None", ALGORITHMS.find(algorithm))
    if kind is None or kind.WARNS_UNREAD:
        return
    for name, of in (("optimizer", OptimizerConfig), ("rollout", RolloutConfig)):
        section: Any = run.get(name)
        if not isinstance(section, dict):
            continue
        for key, marks in sorted(reads_of(of).items()):
            # A key that is set in this command stays, and `check` rejects it with a message: without it the run would
            # silently be another one than the command describes.
            refused = any(isinstance(mark, ReadBy) and mark.what not in kind.READS for mark in marks)
            set_here = is_set((name, key), typed) or any(one[:2] == (name, key) for one in typed)
            if refused and key in section and not set_here:
                del section[key]
                yield f"{name}.{key}"
