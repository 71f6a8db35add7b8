"""Where scorers run: a thread of this process, or a process of its own that may die without taking the server along.

The process (`python -m retouch.rewards.server.worker FD`) speaks `frames` over an inherited socket: it is told its
scorers, says what they are, loads them, and then answers batches one at a time, before an answer what its scorers are
where that has changed. It ends when the socket does. No torch here.

A frame that was written in part ends the process: whatever came after it would be read as its rest. A reply carries
the number of its batch, and one of another number ends the process too, so that no score can reach another item. The
process answers a pulse every few seconds from a thread of its own, while it scores too; one that falls silent and takes
no CPU time either (stopped, frozen) is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from retouch.rewards.protocol import CheckedScorer, RewardItem, Scorer, ScorerSpec
from retouch.rewards.scorers import make_scorer
from retouch.rewards.server.frames import (
    HEAD_BYTES,
    NO_BATCH,
    BrokenFrame,
    pack,
    pack_items,
    pack_outcome,
    read_head,
    read_message,
    unpack_items,
    unpack_outcome,
)
from retouch.types import Failure, Outcome

logger = logging.getLogger(__name__)

_HANG_S = 60.0  # a worker that works so long past every deadline of its batch is stuck
_RESTART_S = 0.2
_UNLOADED_DEATHS = 3  # in a row: what dies so often while it loads will not load

_PULSE_S = 2.0
_SILENT_PULSES = 6  # unanswered in a row, without CPU time meanwhile: a ready worker is frozen
_LOADING_PULSES = 150  # an import may hold the interpreter's lock for minutes, from a slow disk
_PULSE = {"pulse": True}

LATE = Failure("deadline", "the deadline passed before the item was scored", retryable=True)


class WorkerLost(Exception):
    """The worker process ended. `scoring`: while it scored the batch, which may be why."""

    def __init__(self, message: str, scoring: bool = False) -> None:
        super().__init__(message)
        self.scoring = scoring


@dataclass(frozen=True)
class Work:
    """What a batch took: reward -> calls of its scorer, and their seconds."""

    calls: Mapping[str, int]
    seconds: Mapping[str, float]


Scored = tuple[dict[str, list[Outcome]], Work]

Reply = tuple[int, dict[str, Any]]
"""Number of the batch, and the message about it."""


class Worker(Protocol):
    """Scores one batch at a time.

    Attributes:
        ready: whether a batch would be scored now.
        problem: why it never will be; None while there is hope.
        specs: what the scorers say of themselves.
        restarts: times it was started again.
    """

    ready: bool
    problem: str | None
    specs: Mapping[str, ScorerSpec]
    restarts: int

    @property
    def pid(self) -> int: ...

    async def start(self) -> None:
        """Begin to load, without waiting for it."""
        ...

    async def stop(self) -> None: ...

    async def score(self, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> Scored:
        """Outcomes by reward, in the order of the items.

        Args:
            deadlines: on the clock of `time.monotonic`, one an item; what is late when its turn comes is not scored.

        Raises:
            WorkerLost: it ended meanwhile.
        """
        ...


def score_rewards(
    scorers: Mapping[str, CheckedScorer],
    names: Sequence[str],
    items: Sequence[RewardItem],
    deadlines: Sequence[float],
) -> Scored:
    """One batch by each reward in turn."""
    outcomes: dict[str, list[Outcome]] = {}
    calls: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for name in names:
        if name not in scorers:
            known = ", ".join(scorers)
            outcomes[name] = [Failure("unknown_reward", f"no reward {name!r} here; there are: {known}")] * len(items)
            continue
        scorer, started = scorers[name], time.monotonic()
        before, timely = scorer.calls, [i for i, deadline in enumerate(deadlines) if started <= deadline]
        scored = dict(zip(timely, scorer.score([items[i] for i in timely]), strict=True)) if timely else {}
        outcomes[name] = [scored.get(i, LATE) for i in range(len(items))]
        calls[name], seconds[name] = scorer.calls - before, time.monotonic() - started
    return outcomes, Work(calls, seconds)


class ThreadWorker:
    """Scorers in one thread of this process."""

    def __init__(self, scorers: Mapping[str, Scorer], device: str) -> None:
        self.scorers = {name: CheckedScorer(scorer) for name, scorer in scorers.items()}
        self.device = device
        self.ready = False
        self.problem: str | None = None
        self.specs: Mapping[str, ScorerSpec] = {name: scorer.spec for name, scorer in scorers.items()}
        self.restarts = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")

    @property
    def pid(self) -> int:
        return os.getpid()

    async def start(self) -> None:
        self._thread.submit(self._load)

    async def stop(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)

    async def score(self, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> Scored:
        loop = asyncio.get_running_loop()
        scored = await loop.run_in_executor(self._thread, score_rewards, self.scorers, names, items, deadlines)
        self._describe()
        return scored

    def _load(self) -> None:
        try:
            load_all({name: checked.scorer for name, checked in self.scorers.items()}, self.device)
        except Exception as error:  # shown by /readyz and in the log: a server that cannot load must say why
            logger.exception("loading the scorers failed")
            self.problem = f"{type(error).__name__}: {error}"
        else:
            self._describe()
            self.ready = True

    def _describe(self) -> None:
        self.specs = {name: checked.scorer.spec for name, checked in self.scorers.items()}


def load_all(scorers: Mapping[str, Scorer], device: str) -> None:
    """Load every scorer, and log how long each took."""
    for name, scorer in scorers.items():
        started = time.monotonic()
        scorer.load(device)
        logger.info("%s loaded on %s in %.1f s", name, device, time.monotonic() - started)


class ProcessWorker:
    """Scorers in a process of their own, which is started again whenever it ends.

    Args:
        scorers: name -> options, `scorer` among them where the name is another.
        device: as `--devices` names it: "cpu", or the number of a GPU.
    """

    def __init__(self, scorers: Mapping[str, Mapping[str, Any]], device: str) -> None:
        self.scorers = {name: dict(options) for name, options in scorers.items()}
        self.device = device
        self.ready = False
        self.problem: str | None = None
        self.specs: Mapping[str, ScorerSpec] = {}
        self.restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._numbers = itertools.count(NO_BATCH + 1)
        self._unanswered = 0
        self._ticks: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        if self._supervisor:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._end()

    async def score(self, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> Scored:
        if not self.ready or self._writer is None:
            raise WorkerLost("the worker is being started")
        # of one process: while the batch is packed it may end, and another may take its place
        writer, replies, number = self._writer, self._replies, next(self._numbers)
        frame = await asyncio.to_thread(_pack_batch, number, names, items, deadlines)  # copies megabytes
        if writer is not self._writer:
            raise WorkerLost("the worker ended before it had the batch of the item")
        try:
            async with asyncio.timeout(max(0.0, max(deadlines) - time.monotonic()) + _HANG_S):
                writer.write(frame)
                await writer.drain()
                reply = await replies.get()
        except TimeoutError:
            self._kill()
            raise WorkerLost("the worker hung and was ended", scoring=True) from None
        except BaseException as error:  # half a frame may be on its way, or a reply that nobody would wait for
            self._kill()
            if not isinstance(error, Exception):
                raise
            raise WorkerLost(f"the batch did not reach the worker ({type(error).__name__})") from None
        if reply is None:
            raise WorkerLost("the worker ended while it scored the batch of the item", scoring=True)
        answered, message = reply
        if answered != number:
            logger.error("the worker answered batch %d instead of %d; it is ended", answered, number)
            self._kill()
            raise WorkerLost("the worker answered another batch")
        outcomes = {name: [unpack_outcome(row) for row in column] for name, column in message["outcomes"].items()}
        return outcomes, Work(message["calls"], message["seconds"])

    # --- the process ---

    async def _supervise(self) -> None:
        """Start it, read what it says until it ends, start it again."""
        deaths = 0
        while self.problem is None:
            self._replies = replies = asyncio.Queue[Reply | None]()
            try:
                await self._spawn()
            except OSError as error:  # no memory or no process to be had, for now
                logger.error("the worker cannot be started: %s", error)
                loaded = False
            else:
                pulse = asyncio.create_task(self._keep_pulse())
                try:
                    loaded = await self._listen(replies)
                finally:
                    pulse.cancel()
            self.ready = False
            replies.put_nowait(None)
            code = self._end()
            if self.problem is not None:
                return
            deaths = 0 if loaded else deaths + 1
            if deaths >= _UNLOADED_DEATHS:
                self.problem = f"the worker ended {deaths} times while it loaded (exit code {code}); see the log"
                logger.error("%s", self.problem)
                return
            logger.error("the worker ended (exit code %s); it is started again", code)
            self.restarts += 1
            await asyncio.sleep(_RESTART_S * 2**deaths)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "retouch.rewards.server.worker", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=worker_environment(self.device)
        )
        theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(pack(NO_BATCH, {"scorers": self.scorers, "device": torch_device(self.device)}))
        self._unanswered = 0

    async def _keep_pulse(self) -> None:
        """Ask the process for a sign of life, and end it once it has given none for too long.

        Unanswered pulses are counted, not seconds: after a front that was stopped goes on, its worker is not to blame.
        CPU time is a sign, too: a scorer may hold the interpreter's lock while it computes. Such a one is bounded by
        the deadline of its batch.
        """
        while True:
            await asyncio.sleep(_PULSE_S)
            assert self._writer is not None
            if self._unanswered >= (_SILENT_PULSES if self.ready else _LOADING_PULSES):
                logger.error("the worker has been silent for %.0f s; it is ended", self._unanswered * _PULSE_S)
                self._kill()
                return
            before, self._ticks = self._ticks, _cpu_ticks(self.pid)
            self._unanswered = self._unanswered + 1 if self._ticks == before else 0
            self._writer.write(pack(NO_BATCH, _PULSE))

    async def _listen(self, replies: asyncio.Queue[Reply | None]) -> bool:
        """Until the process ends -> whether it had loaded."""
        assert self._reader is not None
        loaded = False
        while True:
            try:
                head = read_head(await self._reader.readexactly(HEAD_BYTES))
                text, pixels = await self._reader.readexactly(head.text), await self._reader.readexactly(head.pixels)
                message = read_message(head, text, pixels)
            except (asyncio.IncompleteReadError, ConnectionError):
                return loaded
            except (BrokenFrame, MemoryError) as error:
                logger.error("the worker's reply cannot be read (%s: %s); it is ended", type(error).__name__, error)
                self._kill()
                return loaded
            self._unanswered = 0
            if message == _PULSE:
                continue
            if "specs" in message:
                self.specs = {name: _spec(fields) for name, fields in message["specs"].items()}
                self.ready = loaded = message["ready"]
            elif "problem" in message:
                self.problem = message["problem"]
            else:
                replies.put_nowait((head.number, message))

    def _kill(self) -> None:
        self.ready = False
        if self._process:
            self._process.kill()

    def _end(self) -> int | None:
        """Close the socket, at which the process ends, and see that it does."""
        if self._writer:
            self._writer.close()
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _cpu_ticks(pid: int) -> int | None:
    """CPU time of a process in clock ticks; None where the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


def worker_environment(device: str) -> dict[str, str]:
    """A worker sees its GPU alone: libraries that take the first one they find take the right one."""
    environment = dict(os.environ)
    if device.isdecimal():
        seen = [one for one in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
        number = int(device)
        environment["CUDA_VISIBLE_DEVICES"] = seen[number].strip() if number < len(seen) else device
    return environment


def torch_device(device: str) -> str:
    """What the scorers of a worker are loaded on: the one GPU that it sees, or what was asked for."""
    return "cuda" if device.isdecimal() else device


def _pack_batch(number: int, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> bytes:
    rows, pixels = pack_items(items)
    return pack(number, {"rewards": list(names), "items": rows, "deadlines": list(deadlines)}, pixels)


def _spec(fields: Mapping[str, Any]) -> ScorerSpec:
    low, high = fields["range"]
    return replace(ScorerSpec(**fields), range=(low, high), needs=frozenset(fields["needs"]))


# --- inside the process ---


def main() -> None:
    """The worker process: `python -m retouch.rewards.server.worker FD`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front, which drains first
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("retouch").setLevel(logging.INFO)
    channel = _Channel(socket.socket(fileno=int(sys.argv[1])))
    batches: queue.SimpleQueue[tuple[int, dict[str, Any], bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, batches), daemon=True, name="frames").start()
    _, told, _ = batches.get()
    made: dict[str, Scorer] = {}
    try:
        for name, options in told["scorers"].items():
            scorer = options.pop("scorer", name)
            made[name] = make_scorer(scorer, options)
        channel.send({"specs": _specs(made), "ready": False})
        load_all(made, told["device"])
    except Exception as error:  # the server says why, and does not try again
        logger.exception("loading the scorers failed")
        channel.send({"problem": f"{type(error).__name__}: {error}"})
        return
    specs = _specs(made)
    channel.send({"specs": specs, "ready": True})
    scorers = {name: CheckedScorer(scorer) for name, scorer in made.items()}
    while True:
        number, batch, pixels = batches.get()
        items = unpack_items(batch["items"], pixels)
        outcomes, work = score_rewards(scorers, batch["rewards"], items, batch["deadlines"])
        if (found := _specs(made)) != specs:  # before the outcomes, which are the first of another revision
            specs = found
            channel.send({"specs": specs, "ready": True})
        rows = {name: [pack_outcome(outcome) for outcome in column] for name, column in outcomes.items()}
        channel.send({"outcomes": rows, "calls": dict(work.calls), "seconds": dict(work.seconds)}, number)


def _specs(scorers: Mapping[str, Scorer]) -> dict[str, dict[str, Any]]:
    return {name: {**asdict(s.spec), "needs": sorted(s.spec.needs)} for name, s in scorers.items()}


class _Channel:
    """The socket to the front; frames of several threads do not mix."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, message: Mapping[str, Any], number: int = NO_BATCH) -> None:
        with self._lock:
            self.connection.sendall(pack(number, message))


def _read(channel: _Channel, batches: queue.SimpleQueue[tuple[int, dict[str, Any], bytes]]) -> None:
    """Frames as they come, pulses answered at once. The end of the socket is the end of this process, in the middle of
    a batch too."""
    try:
        with channel.connection.makefile("rb") as stream:
            while len(start := stream.read(HEAD_BYTES)) == HEAD_BYTES:
                head = read_head(start)
                text, pixels = stream.read(head.text), stream.read(head.pixels)
                message = read_message(head, text, pixels)
                if message == _PULSE:
                    channel.send(_PULSE)
                else:
                    batches.put((head.number, message, pixels))
    except (BrokenFrame, MemoryError, OSError) as error:
        logger.error("the front cannot be read (%s: %s); this worker ends", type(error).__name__, error)
    finally:  # a reset or half a frame is an end, too
        os._exit(0)


if __name__ == "__main__":
    from retouch.rewards.server.worker import main as run

    run()
