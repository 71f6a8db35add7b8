"""Instances, their workers and their logs: what dies is started again, and what it had is a typed failure."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

from retouch.config import ConfigError
from retouch.rewards.addresses import name_of
from retouch.rewards.client.client import RewardClient
from retouch.rewards.scorers import make_scorer
from retouch.rewards.scorers.judge_budget import SPENDING_VARIABLE
from retouch.rewards.server import worker as worker_module
from retouch.rewards.server.launch import ServeOptions, parse_devices, serve
from retouch.rewards.server.supervisor import Supervisor
from retouch.types import Failure, Score
from tests.rewards import test_launch
from tests.rewards.fakes import HANG_S, brightness, freeze, item, items, until, values
from tests.rewards.test_launch import START_S, Served, alive, answers, ready, served

BRIGHTNESS = json.dumps({"fn": {"fn": "tests.rewards.user_scorers:brightness"}})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two replicas of a user's scorer."""
    folder = tmp_path_factory.mktemp("pair")
    arguments = ["fn", "--options", BRIGHTNESS, "--replicas", "2", "--log-dir", str(folder / "logs")]
    with served(folder, *arguments) as one:
        for url in urls(one):
            until(lambda url=url: ready(url), START_S)
        yield one


def urls(one: Served) -> list[str]:
    return [entry["url"] for entry in json.loads(one.endpoints.read_text())["endpoints"]]


def info(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/info", timeout=30, trust_env=False).json()


def test_every_instance_has_its_port_its_processes_and_its_log(pair: Served) -> None:
    found = json.loads(pair.endpoints.read_text())["endpoints"]
    assert [one["rewards"] for one in found] == [["fn"], ["fn"]] and len({one["url"] for one in found}) == 2
    pids = [info(one["url"])[pid] for one in found for pid in ("pid", "worker_pid")]
    assert len(set(pids)) == 4 and all(alive(pid) for pid in pids)
    for one in found:
        assert Path(one["log"]).name == f"port-{one['url'].rpartition(':')[2]}.log"
        until(lambda one=one: "fn loaded on cpu" in Path(one["log"]).read_text())
    with RewardClient(urls(pair), ["fn"], batch_size=1) as client:
        assert values(client.score(items(6))["fn"]) == [brightness(one) for one in items(6)]


def test_a_killed_worker_costs_a_typed_failure_and_is_started_again(pair: Served, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    url = urls(pair)[0]
    before = info(url)
    # one attempt: a client that may ask again would hide the failure
    with RewardClient([url], ["fn"], timeout_s=30) as client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.score, [item(0, metadata={"sleep": 600, "begun": str(begun)})])
        until(begun.exists)
        os.kill(before["worker_pid"], signal.SIGKILL)
        (failure,) = slow.result(60)["fn"]
        assert isinstance(failure, Failure) and (failure.code, failure.retryable) == ("worker_lost", True)
        assert httpx.get(f"{url}/livez", trust_env=False).status_code == 200
        assert client.wait_ready(START_S) == []
        assert values(client.score(items(3))["fn"]) == [brightness(one) for one in items(3)]
    after = info(url)
    assert after["pid"] == before["pid"] and after["worker_pid"] != before["worker_pid"]


def test_a_killed_front_takes_its_worker_along_and_is_started_again_on_its_port(pair: Served) -> None:
    url = urls(pair)[1]
    before = info(url)
    os.kill(before["pid"], signal.SIGKILL)
    with RewardClient([url], ["fn"], timeout_s=START_S) as client:  # retries bridge the gap
        assert values(client.score(items(3))["fn"]) == [brightness(one) for one in items(3)]
    after = info(url)
    assert before["pid"] != after["pid"] and before["worker_pid"] != after["worker_pid"]
    until(lambda: not alive(before["worker_pid"]))


def test_sigterm_finishes_what_is_under_way(tmp_path: Path) -> None:
    with served(tmp_path, "fn", "--options", BRIGHTNESS) as one, ThreadPoolExecutor(1) as pool:
        with RewardClient([one.url], ["fn"], timeout_s=30) as client:
            slow = pool.submit(client.score, [item(0, metadata={"sleep": 2})])
            until(lambda: b"retouch_requests_waiting 1" in httpx.get(f"{one.url}/metrics", trust_env=False).content)
            one.process.terminate()
            until(lambda: not answers(one.url))
            assert values(slow.result(60)["fn"]) == [brightness(item(0))]
        assert one.process.wait(60) == 0


@pytest.mark.full
def test_a_worker_that_cannot_load_is_given_up(tmp_path: Path) -> None:
    dies = json.dumps({"fn": {"fn": "tests.rewards.user_scorers:DiesLoading"}})
    with served(tmp_path, "fn", "--options", dies, wait=False) as one:
        until(lambda: answers(one.url) and one.get("/readyz").json()["status"] == "failed", START_S)
        assert "ended 3 times while it loaded (exit code 9)" in one.get("/readyz").json()["problem"]


def test_a_front_that_cannot_start_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("retouch.rewards.server.supervisor.sys.executable", "/bin/false")
    monkeypatch.setattr("retouch.rewards.server.supervisor.WATCH_S", 0.01)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(ConfigError, match=r"ends as soon as it is started \(exit code 1\)"):
        serve({"preservation": {}}, ServeOptions(port=0, log_dir=tmp_path))


def test_workers_of_a_server_share_the_budget_of_their_judges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder that ends with the server; a run that started it has given its own."""
    seen: list[str] = []
    monkeypatch.setattr(Supervisor, "start", lambda own: None)
    monkeypatch.setattr(Supervisor, "run", lambda own: seen.append(os.environ[SPENDING_VARIABLE]))
    monkeypatch.delenv(SPENDING_VARIABLE, raising=False)
    options = ServeOptions(port=0, log_dir=tmp_path)
    serve({"preservation": {}}, options)
    assert Path(seen[0]).is_absolute() and not Path(seen[0]).exists() and SPENDING_VARIABLE not in os.environ
    monkeypatch.setenv(SPENDING_VARIABLE, str(tmp_path))
    serve({"preservation": {}}, options)
    assert seen[1] == str(tmp_path) and tmp_path.is_dir()


@pytest.mark.parametrize(("given", "devices"), [("cpu", ["cpu"]), ("0,1, 2", ["0", "1", "2"]), ("cpu,0", ["cpu", "0"])])
def test_devices(given: str, devices: list[str]) -> None:
    assert parse_devices(given) == devices


@pytest.mark.parametrize("given", ["", "cuda:0", "0;1", "-1"])
def test_devices_that_are_none(given: str) -> None:
    with pytest.raises(ConfigError, match="write cpu, or numbers of GPUs"):
        parse_devices(given)


# --- a scorer of one's own ---


def test_a_function_and_a_class_of_ones_own() -> None:
    function = make_scorer("fn", {"fn": "tests.rewards.user_scorers:brightness", "needs": ["mask"]})
    made = make_scorer("fn", {"fn": "tests.rewards.user_scorers:Loaded"})
    before = function.spec.revision
    function.load("cpu")
    made.load("cpu")
    assert values(function.score(items(2))) == [brightness(one) for one in items(2)]
    name, _, options = before.partition(" options ")
    named = function.spec.revision.removeprefix(f"{name} ").split()
    assert function.spec.needs == {"mask"} and named[1:] == ["options", options] and len(named[0]) == 12  # of its file
    dark = item(1, image=item(1).image * 0)
    assert made.score([item(0), dark]) == [Score(0.25), Failure("bad_item", "too dark")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "write module:function"),
        ({"fn": "score"}, "write module:function"),
        ({"fn": "a:b", "needs": ["depth"]}, "needs: given 'depth'"),
        ({"fn": "no_such_module:score"}, "no module no_such_module; it is looked for in"),
        ({"fn": "tests.rewards.user_scorers:nothing"}, "tests.rewards.user_scorers has no nothing"),
    ],
    ids=str,
)
def test_a_scorer_of_ones_own_that_is_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scorer("fn", options).load("cpu")


def test_a_worker_ends_with_its_socket_whatever_is_left_in_it() -> None:
    """A reply that nobody read makes the end a reset, not an end of file."""
    ours, theirs = socket.socketpair()
    code = (
        "import queue, socket, sys, threading, time\n"
        "from retouch.rewards.server.process import _Channel, _read\n"
        "connection = socket.socket(fileno=int(sys.argv[1]))\n"
        "connection.sendall(b'unread')\n"
        "threading.Thread(target=_read, args=(_Channel(connection), queue.SimpleQueue()), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        assert select.select([ours], [], [], 30)[0]  # it has written
        ours.close()
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()


def test_a_batch_packed_for_a_worker_that_ended_is_not_given_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replies would answer other batches."""
    worker = worker_module.ProcessWorker({}, "cpu")
    written: list[bytes] = []
    worker.ready, worker._writer = True, cast("Any", SimpleNamespace(write=written.append))

    def pack(*_: Any) -> bytes:
        worker._writer = cast("Any", SimpleNamespace(write=written.append))  # another process took its place
        return b"batch"

    monkeypatch.setattr(worker_module, "_pack_batch", pack)
    with pytest.raises(worker_module.WorkerLost, match="before it had the batch"):
        asyncio.run(worker.score(["r"], [], [time.monotonic() + 1]))
    assert not written


def test_programs_of_the_working_directory_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In front and worker: a `uvicorn.py` or `json.py` there would stand before the installed one."""
    monkeypatch.setattr(test_launch, "SERVE", (sys.executable, "-P", *test_launch.SERVE[1:]))  # as `retouch` is
    for name in ("uvicorn", "numpy", "json", "PIL"):
        (tmp_path / f"{name}.py").write_text("import pathlib; pathlib.Path('ran').touch(); raise SystemExit(9)\n")
    with served(tmp_path, "preservation", "--log-dir", str(tmp_path / "logs"), PYTHONPATH="") as one:
        assert one.get("/readyz").status_code == 200
    assert not (tmp_path / "ran").exists()


# --- half a frame, a reply to another batch, silence ---


async def came_true(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def working(worker: worker_module.ProcessWorker) -> None:
    """Until it is loaded, for the first time or again."""
    async with asyncio.timeout(START_S):
        while not worker.ready:
            await asyncio.sleep(0.02)


async def scored(worker: worker_module.ProcessWorker, ids: range) -> list[float]:
    await working(worker)
    outcomes, _ = await worker.score(["fn"], [item(i) for i in ids], [time.monotonic() + 30] * len(ids))
    return values(outcomes["fn"])


def test_a_batch_that_was_written_in_part_ends_the_worker() -> None:
    """Found in use: the next batch was read as the rest of it, and its scores went to other items."""
    faults = [(1, MemoryError), (40, OSError), (5000, MemoryError)]  # in the head, in the text, in the pixels
    large = item(0, image=np.zeros((64, 64, 3), np.uint8))

    async def trial() -> None:
        worker = worker_module.ProcessWorker(json.loads(BRIGHTNESS), "cpu")
        await worker.start()
        try:
            for count, (written, error) in enumerate(faults):
                await working(worker)
                write_in_part(worker, written, error)
                with pytest.raises(worker_module.WorkerLost, match=rf"did not reach the worker \({error.__name__}\)"):
                    await worker.score(["fn"], [large], [time.monotonic() + 30])
                assert not worker.ready
                assert await scored(worker, range(1, 4)) == [brightness(item(i)) for i in range(1, 4)]
                assert worker.restarts == count + 1
        finally:
            await worker.stop()

    asyncio.run(trial())


def write_in_part(worker: worker_module.ProcessWorker, count: int, error: type[Exception]) -> None:
    """The next frame breaks off after so many bytes."""
    assert worker._writer is not None
    write, left = worker._writer.write, count

    def half(part: bytes) -> None:
        nonlocal left
        write(part[:left])
        if left <= len(part):
            raise error("broken off")
        left -= len(part)

    worker._writer.write = half  # type: ignore[method-assign]


def test_a_reply_to_another_batch_is_no_score() -> None:
    async def trial() -> None:
        worker = worker_module.ProcessWorker(json.loads(BRIGHTNESS), "cpu")
        await worker.start()
        try:
            await working(worker)
            worker._replies.put_nowait((7, {"outcomes": {"fn": [[0.5, {}]]}, "calls": {}, "seconds": {}}))
            with pytest.raises(worker_module.WorkerLost, match="answered another batch"):
                await worker.score(["fn"], [item(0)], [time.monotonic() + 30])
            assert await scored(worker, range(3)) == [brightness(item(i)) for i in range(3)]
        finally:
            await worker.stop()

    asyncio.run(trial())


def test_a_scorer_that_holds_the_interpreters_lock_is_not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of C code answers no pulse, and takes CPU time."""
    monkeypatch.setattr(worker_module, "_PULSE_S", 0.1)
    monkeypatch.setattr(worker_module, "_SILENT_PULSES", 100)  # a busy machine stops it for seconds

    async def trial() -> None:
        worker = worker_module.ProcessWorker(json.loads(BRIGHTNESS), "cpu")
        await worker.start()
        try:
            await working(worker)
            busy = item(0, metadata={"digits": 250_000})
            scoring = asyncio.create_task(worker.score(["fn"], [busy], [time.monotonic() + 60]))
            silent = list[int]()
            while not scoring.done():
                await asyncio.sleep(0.1)
                silent.append(worker._unanswered)
            outcomes, _ = await scoring
            assert values(outcomes["fn"]) == [brightness(busy)] and worker.restarts == 0
            assert sorted(silent)[len(silent) // 2] <= 3  # none is answered, and a busy machine stops it at times
        finally:
            await worker.stop()

    asyncio.run(trial())


def test_a_frozen_worker_is_replaced_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped while it scores a batch that is larger than the socket's buffers."""
    monkeypatch.setattr(worker_module, "_PULSE_S", 0.1)
    monkeypatch.setattr(worker_module, "_SILENT_PULSES", 100)  # a busy machine stops it for seconds

    async def trial() -> None:
        worker = worker_module.ProcessWorker(json.loads(BRIGHTNESS), "cpu")
        await worker.start()
        try:
            await working(worker)
            await asyncio.sleep(1.0)  # ten pulses: it answers them
            await came_true(lambda: worker._unanswered == 0)
            slow = item(0, metadata={"sleep": 1.5})
            scoring = asyncio.create_task(worker.score(["fn"], [slow], [time.monotonic() + 60]))
            await asyncio.sleep(1.0)  # while it works, too
            await came_true(lambda: worker._unanswered == 0)
            await scoring
            assert worker.ready and worker.restarts == 0
            monkeypatch.setattr(worker_module, "_SILENT_PULSES", 6)
            freeze(worker.pid)
            large = item(0, image=np.zeros((2048, 2048, 3), np.uint8))
            started = time.monotonic()
            with pytest.raises(worker_module.WorkerLost):
                await worker.score(["fn"], [large], [time.monotonic() + 300])
            assert time.monotonic() - started < HANG_S
            monkeypatch.setattr(worker_module, "_SILENT_PULSES", 100)
            assert await scored(worker, range(3)) == [brightness(item(i)) for i in range(3)]
        finally:
            await worker.stop()

    asyncio.run(trial())


def test_no_pulse_comes_between_the_slices_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker reads slowly: it is stopped and continued while a batch of megabytes is sent."""
    monkeypatch.setattr(worker_module, "_PULSE_S", 0.02)
    monkeypatch.setattr(worker_module, "_SILENT_PULSES", 10_000)

    async def trial() -> None:
        worker = worker_module.ProcessWorker(json.loads(BRIGHTNESS), "cpu")
        await worker.start()
        try:
            await working(worker)
            large = item(0, image=np.full((2048, 2048, 3), 51, np.uint8))
            freeze(worker.pid)
            scoring = asyncio.create_task(worker.score(["fn"], [large], [time.monotonic() + 60]))
            await asyncio.sleep(0.5)
            os.kill(worker.pid, signal.SIGCONT)
            outcomes, _ = await scoring
            assert values(outcomes["fn"]) == [brightness(large)] and worker.restarts == 0
        finally:
            await worker.stop()

    asyncio.run(trial())


@pytest.mark.parametrize(
    ("host", "name"),
    [("0.0.0.0", socket.gethostname()), ("::", socket.gethostname()), ("::1", "[::1]"), ("10.0.0.7", "10.0.0.7")],
)
def test_a_server_on_every_address_is_found_by_the_machines_name(host: str, name: str) -> None:
    assert name_of(host) == name
