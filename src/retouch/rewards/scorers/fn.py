"""A scorer of your own: a function, or a class, named as "module:name"."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retouch.config.errors import ConfigError
from retouch.rewards.protocol import PICTURES, RewardItem, ScorerSpec
from retouch.types import Failure, Outcome, Score


class FnScorer:
    """What `fn` names: a function of a list of `RewardItem` that returns a number, `Score` or `Failure` for each, or a
    class without arguments that has such a method `score`, and `load(device)` where it has something to load.

    Args:
        fn: "module:name"; the module is found from the working directory, too.
        needs: pictures that an item must have: mask, source, reference.
    """

    def __init__(self, fn: str = "", needs: list[str] | None = None) -> None:
        module, _, name = fn.partition(":")
        if not module or not name:
            raise ConfigError(f"reward 'fn': fn: given {fn!r}; write module:function, like my_rewards:score")
        unknown = [need for need in needs or () if need not in PICTURES]
        if unknown:
            raise ConfigError(f"reward 'fn': needs: given {unknown[0]!r}; an item may have {', '.join(PICTURES[1:])}")
        self.fn = fn
        self.spec = ScorerSpec(fn, (-1e9, 1e9), frozenset(needs or ()), f"fn {fn}", "yours")
        self._score: Callable[[Sequence[RewardItem]], Sequence[Any]] | None = None

    def load(self, device: str) -> None:
        """Import it. Its file becomes part of the revision: another code may give another score.

        Raises:
            ConfigError: no such module, or no such name in it.
        """
        found = find_function(self.fn, "reward 'fn': fn")
        if isinstance(found, type):
            made: Any = found()
            if hasattr(made, "load"):
                made.load(device)
            self._score = made.score
        else:
            self._score = found
        source = Path(inspect.getfile(found)).read_bytes()
        digest = hashlib.blake2b(source, digest_size=6).hexdigest()
        self.spec = ScorerSpec(self.fn, self.spec.range, self.spec.needs, f"fn {self.fn} {digest}", "yours")

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        assert self._score is not None
        return [_outcome(one) for one in self._score(items)]


def find_function(fn: str, where: str) -> Any:
    """What "module:name" names; `where` begins the message.

    Raises:
        ConfigError: no such module, or no such name in it.
    """
    module, _, name = fn.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # an installed command does not look beside the run file
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{where}: given {fn!r}: no module {error.name}; it is looked for in {here}") from None
    except AttributeError:
        raise ConfigError(f"{where}: given {fn!r}: {module} has no {name}") from None


def _outcome(value: Any) -> Outcome:
    """A number of whatever library as a score; anything odd is left for the check of outcomes to refuse."""
    if isinstance(value, Score | Failure):
        return value
    return Score(value.item() if hasattr(value, "item") else value)
