"""A server that was ready once becomes ready again: after helpers that outlive a worker, while handles, memory or a
device are missing, and after an error that spoils its process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from retouch.config import ConfigError
from retouch.errors import log_once
from retouch.rewards.client.servers import ServerStatus
from retouch.rewards.protocol import CheckedScorer, RewardItem, ScorerSpec
from retouch.rewards.server import launch
from retouch.rewards.server import supervisor as supervisor_module
from retouch.rewards.server import worker as worker_module
from retouch.rewards.server.frames import NO_BATCH, pack
from retouch.rewards.server.output import Allowance, FewRepeats, pass_on
from retouch.rewards.server.process import score_rewards
from retouch.rewards.server.supervisor import Instance, Supervisor, backoff_s
from retouch.types import Failure, Outcome
from tests.rewards.fakes import HANG_S, freeze, item, items, until, values
from tests.rewards.test_launch import alive
from tests.rewards.test_supervision import came_true, working
from tests.selection import default

Trial = Callable[[worker_module.ProcessWorker], Awaitable[None]]


def with_worker(name: str, trial: Trial) -> None:
    """Run a trial of a worker with a scorer of `user_scorers`."""

    async def run() -> None:
        worker = worker_module.ProcessWorker({"fn": {"fn": f"tests.rewards.user_scorers:{name}"}}, "cpu")
        await worker.start()
        try:
            await trial(worker)
        finally:
            await worker.stop()

    asyncio.run(run())


async def scores(worker: worker_module.ProcessWorker, *batch: Any) -> list[Any]:
    outcomes, _ = await worker.score(["fn"], list(batch), [time.monotonic() + 30] * len(batch))
    return outcomes["fn"]


def open_handles() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_RESTART_S", 0.01)


# --- the worker ---


def test_a_helper_that_a_scorer_forked_keeps_no_worker_from_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the socket, whose end never comes; and it ends with the worker, long before pulses without an answer
    would end both. SIGTERM, which a scheduler sends to all processes of a job, ends the helper alone: the server
    decides when its worker ends."""
    monkeypatch.setattr(worker_module, "_SILENT_PULSES", 1000)

    async def trial(worker: worker_module.ProcessWorker) -> None:
        await working(worker)
        (score,) = await scores(worker, item(0))
        helper, before = int(score.detail["pid"]), worker.pid

        def is_ended() -> bool:
            os.killpg(before, signal.SIGTERM)  # again and again: Python forgets one that arrives while it forks
            return not alive(helper)

        await came_true(is_ended)
        (score,) = await scores(worker, item(0))
        assert (worker.pid, worker.restarts) == (before, 0)
        helper = int(score.detail["pid"])
        assert alive(helper)
        os.kill(before, signal.SIGKILL)
        await came_true(lambda: worker.ready and worker.pid != before, 2 * HANG_S)
        await came_true(lambda: not alive(helper))
        (score,) = await scores(worker, item(0))
        await worker.stop()
        await came_true(lambda: not alive(int(score.detail["pid"])))

    with_worker("forks", trial)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), BlockingIOError(11, "fork"), RuntimeError("thread")]
)
@pytest.mark.usefixtures("_soon")
def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Three attempts in 1.4 s ended the server, before it was ever ready."""
    spawn, failed = asyncio.create_subprocess_exec, 0

    async def short(*arguments: Any, **options: Any) -> Any:
        nonlocal failed
        failed += 1
        if failed <= 5:
            raise error
        return await spawn(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", short)

    async def trial(worker: worker_module.ProcessWorker) -> None:
        handles = open_handles()
        await came_true(lambda: failed == 5)
        assert open_handles() <= handles + 4  # those of the attempt, and none of the others
        await working(worker)
        assert worker.problem is None and values(await scores(worker, item(0))) == [0.5]

    with_worker("spoilt", trial)


def test_a_worker_that_never_can_be_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried for ever, and whoever waited for the server was not told why."""
    tries: list[Any] = []

    async def unable(*_: Any, **options: Any) -> Any:
        tries.append(options)
        raise TypeError("unexpected kwargs: process_group")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", unable)

    async def trial(worker: worker_module.ProcessWorker) -> None:
        await came_true(lambda: worker.problem is not None)
        assert worker.problem == "the worker cannot be started: TypeError: unexpected kwargs: process_group"

    with_worker("spoilt", trial)
    assert len(tries) == 1


@pytest.mark.parametrize("how", default(["dies", "raises"], "dies".__eq__))
@pytest.mark.usefixtures("_soon")
def test_a_server_that_was_ready_is_not_given_up(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four deaths in 2.7 s ended it: one, and three while it was loading again."""
    told = tmp_path / "fails"
    monkeypatch.setenv("FAILS_WHILE", str(told))
    monkeypatch.setattr(worker_module, "_RESTART_MAX_S", 0.02)

    async def trial(worker: worker_module.ProcessWorker) -> None:
        await working(worker)
        told.write_text(how)
        os.kill(worker.pid, signal.SIGKILL)
        await came_true(lambda: worker.restarts >= 5)
        assert worker.problem is None and not worker.ready
        told.unlink()
        await working(worker)
        assert values(await scores(worker, item(0))) == [0.5]

    with_worker("FailsWhile", trial)


@pytest.mark.parametrize("was_ready", [True, False])
@pytest.mark.usefixtures("_soon")
def test_only_scorers_that_never_were_loaded_are_given_up(was_ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three processes that died while they loaded."""
    monkeypatch.setattr(worker_module, "_RESTART_MAX_S", 0.01)
    worker = worker_module.ProcessWorker({}, "cpu", was_ready)
    lives: list[int] = []

    async def live(_: Any) -> tuple[bool, bool, int | None]:
        lives.append(9)
        if len(lives) == 5:
            worker.problem = "stopped by the test"
        return True, False, lives[-1]

    monkeypatch.setattr(worker, "_live", live)
    asyncio.run(worker._supervise())
    assert len(lives) == (5 if was_ready else 3)


def test_the_end_of_a_worker_does_not_hold_the_loop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, and does not notice that its socket ends. Time is up for it after 20 turns of the loop; when it is
    killed, it ends whenever it does."""
    ends, turns = list[asyncio.Timeout](), 0

    def timeout(seconds: float) -> asyncio.Timeout:
        ends.append(asyncio.Timeout(None))
        return ends[-1]

    async def tick() -> None:
        nonlocal turns
        for turns in itertools.count(1):
            await asyncio.sleep(0.001)
            if turns >= 20 and ends:
                with suppress(RuntimeError):  # it is over already
                    ends[0].reschedule(0.0)

    async def trial(worker: worker_module.ProcessWorker) -> None:
        await working(worker)
        pid = worker.pid
        freeze(pid)
        ticking = asyncio.create_task(tick())
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "timeout", timeout)
            await worker.stop()
        ticking.cancel()
        assert not alive(pid)

    with_worker("spoilt", trial)
    assert turns >= 20


def test_a_worker_whose_batches_all_raise_is_replaced() -> None:
    async def trial(worker: worker_module.ProcessWorker) -> None:
        await working(worker)
        before = worker.pid
        assert values(await scores(worker, item(0))) == [0.5]
        for batch in range(worker_module._RAISING_BATCHES):
            assert worker.pid == before
            found = await scores(worker, item(0, metadata={"spoils": batch == 0}))
            assert values(found) == ["scorer_error"]
        await came_true(lambda: worker.ready and worker.pid != before)
        assert values(await scores(worker, *items(3))) == [0.5] * 3

    with_worker("spoilt", trial)


def test_a_worker_that_raises_again_is_replaced_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its scorers may be wrong: loading takes minutes, and helps nothing."""
    clock = 1000.0
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: clock)
    raising, replaced = worker_module.Raising(), list[float]()
    for _ in range(600):
        clock += 1.0
        if raising.too_often(True):
            replaced.append(clock - 1000.0)
    assert replaced == [5.0, 65.0, 185.0, 425.0]
    assert not raising.too_often(False) and not any(raising.too_often(True) for _ in range(4))


def test_batches_of_one_reward_do_not_hide_that_another_always_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of which no item reached its scorer."""
    worker, ended = worker_module.ProcessWorker({}, "cpu"), list[int]()
    batches = [("a", 1, ["a"]), ("b", 1, []), ("a", 0, [])] * 5
    worker.ready, worker._writer = True, cast("Any", SimpleNamespace())
    monkeypatch.setattr(worker, "_send", lambda *_: asyncio.sleep(0))

    async def trial() -> None:
        for number, (name, calls, raising) in enumerate(batches, 1):
            monkeypatch.setattr(worker, "_kill", lambda number=number: ended.append(number))
            message = {"outcomes": {}, "calls": {name: calls}, "seconds": {}, "raising": raising}
            worker._replies.put_nowait((number, message))
            await worker.score([name], [], [time.monotonic() + 30])

    asyncio.run(trial())
    assert ended == [13]  # the fifth of reward a


def test_specs_of_scorers_that_are_not_loaded_replace_none() -> None:
    """A reply to a request that came before the worker ended names the weights that scored it."""
    worker = worker_module.ProcessWorker({}, "cpu")

    async def revision_after(revision: str, ready: bool) -> str:
        worker._reader = asyncio.StreamReader()
        fields = {**asdict(ScorerSpec("a", (0, 1), frozenset(), revision, "-")), "needs": []}
        worker._reader.feed_data(pack(NO_BATCH, {"specs": {"a": fields}, "ready": ready}))
        worker._reader.feed_eof()
        await worker._listen(asyncio.Queue())
        return worker.specs["a"].revision

    async def trial() -> list[str]:
        told = [("plain", False), ("weights 1", True), ("plain", False), ("weights 2", True)]
        return [await revision_after(revision, ready) for revision, ready in told]

    assert asyncio.run(trial()) == ["plain", "weights 1", "weights 1", "weights 2"]


def test_a_scorer_without_answers_raises_nothing() -> None:
    """A judge that refuses, or has no key: another process would get no answer either, and would count its budget of
    requests from 0 again."""

    class Judge:
        spec = ScorerSpec("judge", (0, 1), frozenset(), "1", "-")

        def load(self, device: str) -> None: ...

        def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
            if items[0].metadata.get("raises"):
                raise RuntimeError("broken")
            return [Failure("scorer_error", "the judge refused")] * len(items)

    made = {"judge": CheckedScorer(Judge())}
    raising: list[Sequence[str]] = []
    for metadata in ({}, {"raises": True}, {}):
        outcomes, work = score_rewards(made, ["judge"], [item(0, metadata=metadata)] * 3, [math.inf] * 3)
        assert values(outcomes["judge"]) == ["scorer_error"] * 3
        raising.append(work.raising)
    assert raising == [[], ["judge"], []]
    # an item that no scorer gets does not hide it
    cut = item(0, image=item(0).image[..., 0])
    assert score_rewards(made, ["judge"], [cut, item(0, metadata={"raises": True})], [math.inf] * 2)[1].raising
    assert not score_rewards(made, ["judge"], [cut], [math.inf])[1].raising


# --- instances ---


@pytest.fixture
def instances() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        made = [Instance(one, "127.0.0.1", "cpu", None) for one in (a, b)]
        yield made
        for one in made:
            if one.process is not None:
                one.process.kill()
                one.process.wait()


def test_attempts_become_rarer() -> None:
    assert [backoff_s(n) for n in (0, 1, 2, 3, 7, 8, 5000)] == [0.0, 0.0, 0.8, 1.6, 25.6, 30.0, 30.0]


def test_an_instance_that_was_ready_is_started_for_ever(
    instances: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was not is given up after five early deaths."""
    monkeypatch.setattr(supervisor_module.sys, "executable", "/bin/false")
    monkeypatch.setattr(supervisor_module, "_BACKOFF_S", 0.0)
    supervisor = Supervisor(instances[:1], {}, watch_loading=False)
    one = instances[0]
    for was_ready in (True, False):
        one.was_ready, one.early_deaths = was_ready, 0
        one.start({})
        for death in range(1, 9):
            assert one.process is not None
            one.process.wait()
            assert one.died() and not one.died()
            if not was_ready and death == 5:
                with pytest.raises(ConfigError, match="ends as soon as it is started"):
                    supervisor._report(one)
                break
            supervisor._report(one)
            until(lambda: one.start_if_due({}) or one.process is None or one._start_at is None)
        assert was_ready or death == 5


def no_memory(*_: Any, **__: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


def test_no_memory_for_a_front_is_no_end(instances: list[Instance], monkeypatch: pytest.MonkeyPatch) -> None:
    one = instances[0]
    monkeypatch.setattr(supervisor_module.sys, "executable", "/bin/true")
    one.start({})
    assert one.process is not None
    one.process.wait()
    assert one.died()
    with monkeypatch.context() as short:
        short.setattr(
            supervisor_module.subprocess, "Popen", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "no memory"))
        )
        one.start_if_due({})
        assert one._start_at is not None and one._start_at > time.monotonic()
    one._start_at = 0.0
    one.start_if_due({})
    assert one._start_at is None


def test_an_instance_that_failed_to_load_what_another_has_loaded_is_started_again(instances: list[Instance]) -> None:
    failed, sound = instances
    failed.start({"scorers": {}, "token": None, "limits": {}})
    supervisor = Supervisor(instances, {}, watch_loading=True)
    failed.status = ServerStatus("failed", "no memory on the device")
    supervisor._retry_failed()
    assert failed.process is not None and failed.process.poll() is None  # nobody knows whether they can be loaded
    sound.was_ready = True
    supervisor._retry_failed()
    failed.process.wait(30)
    assert failed.was_ready and failed.status is None


def test_a_command_ends_when_no_instance_loads_its_scorers(
    instances: list[Instance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "WATCH_S", 0.001)
    supervisor = Supervisor(instances[:1], {}, watch_loading=True)
    instances[0].status = ServerStatus("failed", "no weights")
    end = threading.Timer(10.0, supervisor._stop.set)
    end.start()
    try:
        with pytest.raises(ConfigError, match="the scorers cannot be loaded: no weights"):
            supervisor.run()
    finally:
        end.cancel()
        supervisor._stop.set()


@pytest.mark.parametrize("of_a_run", [True, False])
def test_a_supervisor_in_the_place_of_a_killed_one_knows_that_scorers_could_be_loaded(
    of_a_run: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server of `url: auto` was given up if its first load after that failed; that of a command may have others."""
    known: list[bool] = []

    def start(own: Supervisor) -> None:
        known.extend(one.was_ready for one in own.instances)
        for one in own.instances:
            one.ask()

    monkeypatch.setattr(Supervisor, "start", start)
    monkeypatch.setattr(Supervisor, "run", lambda own: None)
    monkeypatch.setattr(supervisor_module, "readiness", lambda *_, **__: ServerStatus("ready", ""))
    for name in ("exit_with_parent", "ignore_notices"):
        monkeypatch.setattr(launch, name, lambda *_: None)
    options = launch.ServeOptions(port=0, endpoints=tmp_path / "endpoints.json", log_dir=tmp_path)
    for _ in range(2):
        launch.serve({"preservation": {}}, replace(options, with_parent=1 if of_a_run else None))
    assert known == [False, of_a_run]


# --- what is written ---


def test_lines_that_repeat_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("retouch.rewards.server.output.time.monotonic", lambda: clock)
    few, passed = FewRepeats(), list[str]()

    def line(number: int, message: str, *values: Any) -> None:
        record = logging.LogRecord("x", logging.ERROR, "module.py", number, message, values, None)
        if few.filter(record):
            passed.append(record.getMessage())

    for count in range(1000):
        line(1, "socket %d failed", count)
        line(2, f"another {count % 2}") if count < 4 else None
    assert len(passed) == 10 + 4
    clock = 61.0
    line(1, "socket %d failed", 7)
    assert passed[-1] == "socket 7 failed (990 more such lines were left out)"
    for number in range(5000):
        line(number + 10, "peers cannot fill the memory")
    assert len(few._kinds) <= 1000


def test_warnings_that_are_logged_once_are_counted_by_their_callers(caplog: pytest.LogCaptureFixture) -> None:
    """All of them had one place, and the eleventh was left out."""
    log_once.cache_clear()
    log, few = logging.getLogger("retouch.test"), FewRepeats()
    for number in range(11):
        log_once(log, "first of %s", number)
    log_once(log, "another")
    log_once(log, "another")
    assert [few.filter(record) for record in caplog.records] == [True] * 10 + [False, True]


def test_the_output_of_scorers_is_bounded_and_its_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """21 MB went to a log."""

    async def trial(worker: worker_module.ProcessWorker) -> None:
        await working(worker)
        await scores(worker, *items(8))
        with pytest.raises(worker_module.WorkerLost):
            await scores(worker, item(0, metadata={"last": True}))
        await came_true(lambda: "the reason of the end" in read())
        await asyncio.sleep(0.1)

    written = ""

    def read() -> str:
        nonlocal written
        written += capfd.readouterr().err
        return written

    with_worker("prints", trial)
    until(lambda: not any(thread.name == "worker-output" for thread in threading.enumerate()))
    assert "bytes of the scorers' output were left out]" in read() and 500_000 < len(written) < 1_300_000


def test_an_allowance_is_refilled(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("retouch.rewards.server.output.time.monotonic", lambda: clock)
    allowance = Allowance()
    assert allowance.take(1024 * 1024) and not allowance.take(1)
    clock = 10.0
    assert allowance.take(40 * 1024) and not allowance.take(4096)
    clock = 1e6
    assert allowance.take(1024 * 1024) and not allowance.take(1)


def test_output_that_nobody_takes_stops_no_scorer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of the server's own output is gone."""
    monkeypatch.setattr("retouch.rewards.server.output.os.write", lambda *_: (_ for _ in ()).throw(BrokenPipeError()))
    reading, writing = os.pipe()
    pass_on(reading, Allowance())
    with os.fdopen(writing, "wb") as stream:
        stream.write(b"x" * 500_000)  # more than a pipe holds
