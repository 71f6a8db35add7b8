"""The budget of a judge, over all processes and starts of a run.

Every process writes its own count into a folder of the run directory and reads those of the others. No lock is needed,
because a count is written by one process only; the file of a process that was killed still counts.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from retouch.files import plain_json
from retouch.files.disk import read_bounded, write_whole

logger = logging.getLogger(__name__)

SPENDING_VARIABLE = "RETOUCH_JUDGE_SPENDING"
"""Folder in which the workers of a server share their counts: for `url: auto` the run sets it, else the server."""

_MOST_TOKENS = 10**9  # of one reply: more would be a false number, and end the budget
_MOST_BYTES = 4096  # of the file of a process
_SHARED_EVERY_S = 1.0  # seconds between two looks at the folder: a process asks many questions at once
_KEYS = ("requests", "tokens_in", "tokens_out")

Spent = tuple[int, int, int]
"""Answered requests, tokens of questions, tokens of answers."""


class BudgetSpent(Exception):
    """The limit of requests, tokens or money is reached, or the account at the endpoint has no quota left."""


class Ledger:
    """The counts of all processes that share a folder, over all their starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with suppress(OSError):  # `exchange` warns where it cannot write
            folder.mkdir(parents=True, exist_ok=True)
        self._own = folder / f"{uuid.uuid4().hex}.json"
        self._written: Spent = (0, 0, 0)
        self._next_look = 0.0
        self._is_written = True
        self._ignored = set[Path]()
        self.others = self._read()

    def exchange(self, own: Spent, *, now: bool = False) -> None:
        """Write the count of this process and read those of the others, at most once a second unless `now`."""
        if not now and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _SHARED_EVERY_S
        if own != self._written:
            try:
                write_whole(self._own, json.dumps(dict(zip(_KEYS, own, strict=True))))
                self._written, self._is_written = own, True
            except OSError as error:
                if self._is_written:  # once, until it can be written again: every batch tries
                    logger.warning(
                        "%s: the requests of the judge cannot be counted there (%s); other processes, and a resumed "
                        "run, count less than was spent",
                        self.folder,
                        error.strerror or error,
                    )
                self._is_written = False
        self.others = self._read()

    def _read(self) -> Spent:
        total = (0, 0, 0)
        for file in self.folder.glob("*.json"):
            count = _count_in(file) if file != self._own else (0, 0, 0)
            if count is not None:
                total = (total[0] + count[0], total[1] + count[1], total[2] + count[2])
            elif file not in self._ignored:
                self._ignored.add(file)
                logger.warning("%s: not a count of requests; it is ignored", file)
        return total


def _count_in(file: Path) -> Spent | None:
    """The count in a file of another process; None for a file that holds none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = plain_json.loads(read_bounded(file, _MOST_BYTES))
        requests, tokens_in, tokens_out = (found[key] for key in _KEYS)
        if all(type(count) is int and count >= 0 for count in (requests, tokens_in, tokens_out)):
            return requests, tokens_in, tokens_out
    return None


@dataclass
class Budget:
    """Total limits; None is no limit. Prices are in dollars per million tokens.

    Attributes:
        spent_requests, spent_in, spent_out: of this process.
        ledger: counts of the other processes and of earlier starts; None counts this process alone.
    """

    requests: int | None = None
    tokens: int | None = None
    dollars: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    spent_requests: int = 0
    spent_in: int = 0
    spent_out: int = 0
    ledger: Ledger | None = field(default=None, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def spent(self) -> Spent:
        """Requests and tokens of this process so far."""
        return self.spent_requests, self.spent_in, self.spent_out

    @property
    def cost(self) -> float:
        """Dollars of this process so far."""
        return self._dollars(self.spent)

    def share(self, folder: Path) -> None:
        """Count what other processes and earlier starts with the same folder spent as well."""
        with self._lock:
            self.ledger = Ledger(folder)

    def total(self) -> Spent:
        """Requests and tokens of all processes and starts, as far as they are known."""
        requests, tokens_in, tokens_out = self.ledger.others if self.ledger else (0, 0, 0)
        return self.spent_requests + requests, self.spent_in + tokens_in, self.spent_out + tokens_out

    def exchange(self) -> None:
        """Write the count of this process for the others, after a batch."""
        with self._lock:
            if self.ledger:
                self.ledger.exchange(self.spent, now=True)

    def undo(self) -> None:
        """Do not count a request that was not answered."""
        with self._lock:
            self.spent_requests -= 1

    def begin(self) -> None:
        """Count a request.

        Raises:
            BudgetSpent: a limit is reached.
        """
        with self._lock:
            if self.ledger:
                self.ledger.exchange(self.spent)
            total = self.total()
            requests, tokens_in, tokens_out = total
            for name, spent, limit in (
                ("requests", requests, self.requests),
                ("tokens", tokens_in + tokens_out, self.tokens),
                ("dollars", self._dollars(total), self.dollars),
            ):
                if limit is not None and spent >= limit:
                    raise BudgetSpent(
                        f"the judge's budget of {limit:g} {name} is spent; to go on, resume with a larger budget_{name}"
                    )
            self.spent_requests += 1

    def used(self, usage: Mapping[str, Any]) -> int:
        """Count the tokens of a reply -> how many.

        Raises:
            ValueError: a number that is none of tokens.
        """
        tokens_in, tokens_out = (_tokens(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
        with self._lock:
            self.spent_in += tokens_in
            self.spent_out += tokens_out
        return tokens_in + tokens_out

    def _dollars(self, spent: Spent) -> float:
        return (spent[1] * self.price_in + spent[2] * self.price_out) / 1e6


def spending_of(run: Path | None) -> Path | None:
    """The folder of a run directory in which its judges count."""
    return run and run / "judge-spending"


def share_budgets(scorers: Mapping[str, object], folder: Path | None, common: Budget | None = None) -> Budget | None:
    """Let the judges among scorers count in folders of their names what all processes of a run spend; those of the
    section `judge` count together -> their budget.

    Args:
        folder: None is that of the run that started this process; without one every process counts alone.
        common: budget of the section in scorers of an earlier call.
    """
    given = os.environ.get(SPENDING_VARIABLE)
    folder = folder or (Path(given) if given else None)
    for name, scorer in scorers.items():
        judge: Any = scorer
        if not isinstance(getattr(scorer, "budget", None), Budget):
            continue
        shares = getattr(getattr(scorer, "options", None), "shares_budget", False)
        if shares and common is not None:
            judge.budget = judge.judge.budget = common
            continue
        if folder is not None:
            # a name may be "..", and none is "judge%" once it is quoted
            judge.budget.share(folder / ("judge%.d" if shares else f"{quote(name, safe='')[:100]}.d"))
        common = judge.budget if shares else common
    return common


@contextmanager
def sharing_among_workers() -> Iterator[None]:
    """Inside, processes that this one starts count together in a temporary folder, unless a run has given one."""
    if os.environ.get(SPENDING_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="retouch-judge-spending-") as folder:
        os.environ[SPENDING_VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[SPENDING_VARIABLE]


def _tokens(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= _MOST_TOKENS:
        raise ValueError(f"{number!r} is no number of tokens")
    return math.ceil(number)
