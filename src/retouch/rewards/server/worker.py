"""The front's side of the scorers: a separate process, whose crash does not end the front.

The process (`process.py`) exchanges `frames` over an inherited socket: it receives its scorers, reports their specs,
loads them, and answers one batch at a time; before an answer it reports specs that changed. It ends with the socket.

A frame that was written in part ends the process, because the next bytes would be read as its rest. A reply carries the
number of its batch, and one with another number ends the process too: no score can reach another item. The process
answers a pulse every few seconds from a thread of its own, also while it scores; a process that is silent and
takes no CPU time (stopped, frozen), also while a batch is being sent to it, is replaced. So is one in which a scorer
raises in every batch, as after an error that spoils the state of a GPU.

The process leads a process group, which ends with it: a helper that a scorer forked holds the socket and the memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from retouch.process.machine import TF32_VARIABLE
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.server.frames import (
    HEAD_BYTES,
    NO_BATCH,
    PULSE,
    BatchCost,
    BrokenFrame,
    Scored,
    pack,
    pack_items,
    parts_of,
    read_head,
    read_message,
    unpack_outcome,
)
from retouch.rewards.server.output import Allowance, pass_on

logger = logging.getLogger(__name__)

_HANG_S = 60.0  # a worker that works this long past every deadline of its batch is stuck
_RESTART_S = 0.2
_RESTART_MAX_S = 30.0
_UNLOADED_DEATHS = 3  # in a row: scorers that never were loaded, and at which it dies this often, cannot be
_LAST_WORDS_S = 0.5  # to read what a process wrote before it ended
_END_S = 5.0

_RAISING_BATCHES = 5  # of a reward, in a row: the process is replaced
_RAISING_S = 60.0  # between two such replacements, doubled each time until the reward is scored

_SLICE = 1024 * 1024  # bytes

_PULSE_S = 2.0
_SILENT_PULSES = 6  # unanswered in a row, without CPU time meanwhile: a ready worker is frozen
_LOADING_PULSES = 150  # an import from a slow disk may hold the interpreter's lock for minutes

Reply = tuple[int, dict[str, Any]]
"""Number of the batch, and the message about it."""


class WorkerLost(Exception):
    """The worker process ended. `scoring`: while it scored the batch, which may be the cause."""

    def __init__(self, message: str, scoring: bool = False) -> None:
        super().__init__(message)
        self.scoring = scoring


class ProcessWorker:
    """Scorers in a process of their own, which is restarted whenever it ends; it scores one batch at a time.

    Attributes:
        ready: whether a batch would be scored now.
        problem: reason why it will never be ready; None while it may recover.
        specs: of the scorers.
        restarts: number of restarts.

    Args:
        scorers: name -> options, with `scorer` if the name is another.
        device: as in `--devices`: "cpu", or the number of a GPU.
        was_ready: the scorers are known to be loadable; a process that fails is started again for ever.
    """

    def __init__(self, scorers: Mapping[str, Mapping[str, Any]], device: str, was_ready: bool = False) -> None:
        self.scorers = {name: dict(options) for name, options in scorers.items()}
        self.device = device
        self.ready = False
        self.problem: str | None = None
        self.specs: Mapping[str, ScorerSpec] = {}
        self.restarts = 0
        self._was_ready = was_ready
        self._process: asyncio.subprocess.Process | None = None
        self._output = Allowance()
        self._raising = defaultdict[str, Raising](Raising)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._replies: asyncio.Queue[Reply | None] = asyncio.Queue()
        self._numbers = itertools.count(NO_BATCH + 1)
        self._unanswered = 0
        self._ticks: int | None = None
        self._sending = self._loaded = False

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start to load without waiting for it."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        if self._supervisor:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def score(self, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]) -> Scored:
        """Outcomes by reward, in the order of the items.

        Args:
            deadlines: one per item, on the clock of `time.monotonic`; an item that is late at its turn is not scored.

        Raises:
            WorkerLost: it ended meanwhile.
        """
        if not self.ready or self._writer is None:
            raise WorkerLost("the worker is being started")
        # of one process: while the batch is packed, another process may take its place
        writer, replies, number = self._writer, self._replies, next(self._numbers)
        frame = await asyncio.to_thread(_pack_batch, number, names, items, deadlines)  # reads megabytes
        if writer is not self._writer:
            raise WorkerLost("the worker ended before it had the batch of the item")
        try:
            async with asyncio.timeout(max(0.0, max(deadlines) - time.monotonic()) + _HANG_S):
                await self._send(writer, frame)
                reply = await replies.get()
        except TimeoutError:
            self._kill()
            raise WorkerLost("the worker hung and was ended", scoring=True) from None
        except BaseException as error:  # half a frame may be written, or a reply that nobody waits for may come
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
        work = BatchCost(message["calls"], message["seconds"], message["raising"])
        called = [name for name, calls in work.calls.items() if calls]
        if often := [name for name in called if self._raising[name].too_often(name in work.raising)]:
            logger.error("%s raised in %d batches in a row; the worker is replaced", ", ".join(often), _RAISING_BATCHES)
            self._kill()
        return outcomes, work

    async def _send(self, writer: asyncio.StreamWriter, frame: Sequence[memoryview]) -> None:
        """Write a frame in slices, of which the stream buffers one at a time; no pulse may come between them."""
        self._sending = True
        try:
            for part in frame:
                for start in range(0, len(part), _SLICE):
                    writer.write(part[start : start + _SLICE])
                    await writer.drain()
        finally:
            self._sending = False

    # --- the process ---

    async def _supervise(self) -> None:
        """Start it, read its messages until it ends, start it again."""
        attempts = deaths = 0
        while self.problem is None:
            self._replies = replies = asyncio.Queue[Reply | None]()
            started, loaded, code = await self._live(replies)
            if self.problem is not None:
                return
            attempts = 0 if loaded else attempts + 1
            deaths += started and not loaded
            if deaths >= _UNLOADED_DEATHS and not self._was_ready:
                self.problem = f"the worker ended {deaths} times while it loaded (exit code {code}); see the log"
                logger.error("%s", self.problem)
                return
            if started:
                logger.error("the worker ended (exit code %s); it is restarted", code)
                self.restarts += 1
            await asyncio.sleep(min(_RESTART_MAX_S, _RESTART_S * 2 ** min(attempts, 10)))

    async def _live(self, replies: asyncio.Queue[Reply | None]) -> tuple[bool, bool, int | None]:
        """One process, from its start to its end -> whether it started, whether it loaded, and its exit code."""
        self._loaded = started = False
        code: int | None = None
        tasks: list[asyncio.Task[Any]] = []
        try:
            process = await self._spawn()
            started = True
            listening, ended = asyncio.create_task(self._listen(replies)), asyncio.create_task(process.wait())
            tasks += [listening, ended, asyncio.create_task(self._keep_pulse())]
            await asyncio.wait({listening, ended}, return_when=asyncio.FIRST_COMPLETED)
            self.ready = False
            # the end of the process counts, not that of the socket, which a helper of a scorer may hold open
            await asyncio.wait({listening}, timeout=_LAST_WORDS_S)
            if listening.done() and (error := listening.exception()) is not None:
                logger.error("the worker's messages cannot be read (%s: %s)", type(error).__name__, error)
        except (OSError, MemoryError, RuntimeError) as error:  # no handle, thread or process available at the moment
            logger.error("the worker cannot be started: %s", error)
        except Exception as error:  # nothing that passes
            self.problem = f"the worker cannot be started: {type(error).__name__}: {error}"
            logger.exception("%s", self.problem)
        finally:
            self.ready = False
            for task in tasks:
                task.cancel()
            replies.put_nowait(None)
            code = await self._end()
        return started, self._loaded, code

    async def _spawn(self) -> asyncio.subprocess.Process:
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        command = [sys.executable, "-P", "-m", "retouch.rewards.server.process", str(theirs.fileno())]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                env=worker_environment(self.device),
                process_group=0,
            )
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            pass_on(reading, self._output)
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        self._writer.write(pack(NO_BATCH, {"scorers": self.scorers, "device": torch_device(self.device)}))
        self._unanswered = 0
        return self._process

    async def _keep_pulse(self) -> None:
        """Send pulses, and end the process after too many without an answer.

        Unanswered pulses are counted instead of seconds, because the front itself may have been stopped. CPU time
        counts as an answer: a scorer may hold the interpreter's lock while it computes; the deadline of its batch
        bounds it.
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
            if not self._sending:
                self._writer.write(pack(NO_BATCH, PULSE))

    async def _listen(self, replies: asyncio.Queue[Reply | None]) -> None:
        """Read messages until the socket ends."""
        assert self._reader is not None
        while True:
            try:
                head = read_head(await self._reader.readexactly(HEAD_BYTES))
                text, pixels = await self._reader.readexactly(head.text), await self._reader.readexactly(head.pixels)
                message = read_message(head, text, pixels)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            except (BrokenFrame, MemoryError) as error:
                logger.error("the worker's reply cannot be read (%s: %s); it is ended", type(error).__name__, error)
                self._kill()
                return
            self._unanswered = 0
            if message == PULSE:
                continue
            if "specs" in message:
                if message["ready"] or not self.specs:  # before it has loaded, a revision names no weights
                    self.specs = {name: _spec(fields) for name, fields in message["specs"].items()}
                self.ready = self._loaded = message["ready"]
                self._was_ready |= self.ready
            elif "problem" not in message:
                replies.put_nowait((head.number, message))
            elif self._was_ready:  # they were loaded before: memory, files or the network are missing at the moment
                logger.error("the scorers cannot be loaded again: %s", message["problem"])
                self._kill()  # a thread that a scorer started could keep the process, which scores nothing
            else:
                self.problem = message["problem"]

    def _kill(self) -> None:
        self.ready = False
        if self._process:
            _kill_group(self._process.pid)

    async def _end(self) -> int | None:
        """Close the socket, which ends the process, and make sure of it and of all that it started."""
        process, writer = self._process, self._writer
        self._process = self._writer = None
        if writer:
            writer.close()
        if process is None:
            return None
        for _ in range(2):
            with suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.wait()
            _kill_group(process.pid)
        if process.returncode is None:  # within the driver of a GPU, for example
            logger.error("the worker (pid %d) cannot be ended", process.pid)
        return process.returncode


class Raising:
    """Counts batches in which the scorer of a reward raised for every item: a process that scores nothing is replaced,
    but not again and again where that does not help."""

    def __init__(self) -> None:
        self._batches = 0
        self._pause_s = 0.0
        self._not_before = 0.0

    def too_often(self, raised: bool) -> bool:
        """Count a batch that reached the scorer -> whether the process is to be replaced now."""
        now = time.monotonic()
        if not raised:
            self._batches, self._pause_s = 0, 0.0
            return False
        self._batches += 1
        if self._batches < _RAISING_BATCHES or now < self._not_before:
            return False
        self._batches = 0
        self._pause_s = max(_RAISING_S, 2 * self._pause_s)
        self._not_before = now + self._pause_s
        return True


def _kill_group(pid: int) -> None:
    """End a process and those that it started, if they are left."""
    with suppress(ProcessLookupError, PermissionError):  # macOS: of a group that has ended
        os.killpg(pid, signal.SIGKILL)


def _cpu_ticks(pid: int) -> int | None:
    """CPU time of a process in clock ticks; None if the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[11]) + int(fields[12])


def worker_environment(device: str) -> dict[str, str]:
    """Environment that shows a worker only its GPU: libraries that use the first GPU then use the right one. It has no
    variable of NVIDIA's images by which torch rounds products of fp32 to TF32, and scores differ."""
    environment = dict(os.environ)
    environment.pop(TF32_VARIABLE, None)
    if device.isdecimal():
        visible = environment.get("CUDA_VISIBLE_DEVICES")  # "" hides every GPU
        gpu = device if visible is None else "".join(visible.split(",")[int(device) :][:1])
        environment["CUDA_VISIBLE_DEVICES"] = gpu.strip()
    return environment


def torch_device(device: str) -> str:
    """Device that the scorers of a worker are loaded on: its one visible GPU, or the one given."""
    return "cuda" if device.isdecimal() else device


def _pack_batch(
    number: int, names: Sequence[str], items: Sequence[RewardItem], deadlines: Sequence[float]
) -> list[memoryview]:
    rows, pixels = pack_items(items)
    return parts_of(number, {"rewards": list(names), "items": rows, "deadlines": list(deadlines)}, pixels)


def _spec(fields: Mapping[str, Any]) -> ScorerSpec:
    low, high = fields["range"]
    return replace(ScorerSpec(**fields), range=(low, high), needs=frozenset(fields["needs"]))
