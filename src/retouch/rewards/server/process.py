"""The process side of a worker, which loads the scorers and scores batches: `python -m
retouch.rewards.server.process FD`. `worker.py` starts it."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from retouch.errors import ConfigError, InputError, RetouchError, RewardOutage
from retouch.process.signals import leave_to_parent
from retouch.rewards.base import problem_of
from retouch.rewards.foreign import questions_end
from retouch.rewards.protocol import CheckedScorer, RewardItem, Scorer
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judge_budget import share_budgets
from retouch.rewards.server.frames import (
    HEAD_BYTES,
    LATE,
    NO_BATCH,
    PULSE,
    BatchCost,
    BrokenFrame,
    Scored,
    pack,
    pack_outcome,
    read_head,
    read_message,
    unpack_items,
)
from retouch.rewards.server.output import begin_process
from retouch.types import Failure, Outcome

logger = logging.getLogger(__name__)

_AGAIN_S = 5.0
"""Seconds until a scorer is loaded again after an outage."""


def main() -> None:
    """Load the scorers that the front names, and answer its batches until the socket closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the front, which drains first
    leave_to_parent(signal.SIGTERM)  # as is the end of a job; the socket then ends this process
    begin_process()
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # programs that a scorer starts do not need it
    channel = _Channel(connection)
    batches: queue.SimpleQueue[tuple[int, dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, batches), daemon=True, name="frames").start()
    _, start, _ = batches.get()
    made: dict[str, Scorer] = {}
    try:
        for name, options in start["scorers"].items():
            scorer = options.pop("scorer", name)
            made[name] = make_scorer(scorer, options)
        share_budgets(made, None)
        channel.send({"specs": _specs(made), "ready": False})
        load_all(made, start["device"])
    except Exception as error:  # the server reports it and does not try again
        logger.exception("loading the scorers failed")
        problem = str(error) if isinstance(error, RetouchError) else f"{type(error).__name__}: {error}"
        channel.send({"problem": problem})
        return
    specs = _specs(made)
    channel.send({"specs": specs, "ready": True})
    scorers = {name: CheckedScorer(scorer) for name, scorer in made.items()}
    while True:
        number, batch, pixels = batches.get()
        items = unpack_items(batch["items"], pixels)
        outcomes, work = score_rewards(scorers, batch["rewards"], items, batch["deadlines"])
        if (found := _specs(made)) != specs:  # before the outcomes, which are the first of the new revision
            specs = found
            channel.send({"specs": specs, "ready": True})
        rows = {name: [pack_outcome(outcome) for outcome in column] for name, column in outcomes.items()}
        channel.send({"outcomes": rows, **asdict(work)}, number)


def load_all(scorers: Mapping[str, Scorer], device: str) -> None:
    """Load every scorer and log the seconds of each; an outage, like that of a judge, is waited for.

    Raises:
        ConfigError: one of them cannot be loaded as it is set; the message begins with its name.
    """
    for name, scorer in scorers.items():
        started = time.monotonic()
        try:
            while not _loaded(name, scorer, device):
                time.sleep(_AGAIN_S)
        except InputError as error:
            raise ConfigError(problem_of(name, scorer, error)) from None
        options = getattr(scorer, "options", None)
        place = "cpu" if getattr(options, "cpu_only", None) else device
        logger.info("%s loaded on %s in %.1f s", name, place, time.monotonic() - started)


def _loaded(name: str, scorer: Scorer, device: str) -> bool:
    """Load a scorer -> whether it could be loaded; an outage is logged.

    Raises:
        ConfigError: it cannot be loaded as it is set.
    """
    try:
        scorer.load(device)
    except RewardOutage as outage:
        logger.warning("%s; it is loaded again in %g s", problem_of(name, scorer, outage), _AGAIN_S)
        return False
    return True


def score_rewards(
    scorers: Mapping[str, CheckedScorer],
    names: Sequence[str],
    items: Sequence[RewardItem],
    deadlines: Sequence[float],
) -> Scored:
    """Score one batch by each reward in turn.

    Args:
        deadlines: one per item, on the clock of `time.monotonic`; an item that is late at its turn is not scored.
    """
    outcomes: dict[str, list[Outcome]] = {}
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    raising: list[str] = []
    for name in names:
        if name not in scorers:
            known = ", ".join(scorers)
            outcomes[name] = [Failure("unknown_reward", f"no reward {name!r} here; there are: {known}")] * len(items)
            continue
        scorer, started = scorers[name], time.monotonic()
        calls_before, returned_before = scorer.calls, scorer.returned
        timely = [i for i, deadline in enumerate(deadlines) if started <= deadline]
        with questions_end(max(deadlines)):
            scored = dict(zip(timely, scorer.score([items[i] for i in timely]), strict=True)) if timely else {}
        outcomes[name] = [scored.get(i, LATE) for i in range(len(items))]
        calls[name], seconds[name] = scorer.calls - calls_before, time.monotonic() - started
        raising += [name] if calls[name] and scorer.returned == returned_before else []
    return outcomes, BatchCost(calls, seconds, raising)


def _specs(scorers: Mapping[str, Scorer]) -> dict[str, dict[str, Any]]:
    return {name: {**asdict(s.spec), "needs": sorted(s.spec.needs)} for name, s in scorers.items()}


class _Channel:
    """The socket to the front; frames of several threads do not interleave."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], number: int = NO_BATCH) -> None:
        with self._lock:
            self.connection.sendall(pack(number, message))


def _read(channel: _Channel, batches: queue.SimpleQueue[tuple[int, dict[str, Any], bytes]]) -> None:
    """Queue frames as they come and answer pulses at once. The end of the socket ends this process, also in the middle
    of a batch."""
    try:
        with channel.connection.makefile("rb") as stream:
            while len(start := stream.read(HEAD_BYTES)) == HEAD_BYTES:
                head = read_head(start)
                text, pixels = stream.read(head.text), stream.read(head.pixels)
                message = read_message(head, text, pixels)
                if message == PULSE:
                    channel.send(PULSE)
                else:
                    batches.put((head.number, message, pixels))
    except (BrokenFrame, MemoryError, OSError) as error:
        logger.error("the front cannot be read (%s: %s); this worker ends", type(error).__name__, error)
    finally:  # also after a reset or half a frame
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # this process, and those that its scorers started
        os._exit(0)


if __name__ == "__main__":
    main()
