"""What the processes of a run share: one server of `url: auto` and one cache on each machine."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from retouch.config import ConfigError
from retouch.process import machine
from retouch.process.machine import Machine, this_machine
from retouch.rewards import sharing
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.devices import CPU, TRAINED_ON
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.server.launch import LocalServer
from retouch.rewards.table import RewardTable, statistics_of_all
from tests.rewards.fakes import Brightness, item, serving

WAIT_S = 30.0
START_S = 60.0  # an interpreter and fastapi on a busy machine


def in_processes(
    machines: Sequence[str], started: Callable[[RewardTable], Any], log_dir: Path, **client: Any
) -> list[Any]:
    """What `started` makes of a table, or the error of its start, for each process; threads stand for processes."""
    barrier, said = threading.Barrier(len(machines)), [list[Any]() for _ in machines]
    done = threading.Barrier(len(machines))

    def process(rank: int) -> Any:
        threading.current_thread().name = machines[rank]

        def gather(values: Sequence[Any]) -> list[Any]:
            said[rank] = list(values)
            barrier.wait(START_S)
            everyone = [one for values in said for one in values]
            barrier.wait(START_S)
            return everyone

        entries = {"r": PreservationReward(url="auto")}
        table = RewardTable(entries, RewardClientConfig(timeout_s=60.0, **client), log_dir)
        try:
            table.start(gather)
            return started(table)
        except ConfigError as error:
            return error
        finally:
            done.wait(START_S)  # as long as one of a run scores, its server is there
            table.close()

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(process, range(len(machines))))


def score(table: RewardTable) -> float | None:
    return table.submit([item(0)]).result().values("r")[0]


def test_the_processes_of_a_machine_share_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[LocalServer] = []

    class Counted(LocalServer):
        def __init__(
            self, scorers: Mapping[str, Mapping[str, Any]], log: Path, devices: Sequence[str], spending: Path | None
        ) -> None:
            super().__init__(scorers, log, devices)
            made.append(self)

    monkeypatch.setattr(sharing, "LocalServer", Counted)

    def ready(table: RewardTable) -> Any:
        return table.wait_ready(START_S), score(table)

    (first, one), (second, other) = in_processes(["here"] * 2, ready, tmp_path)
    assert first == second == [] and one == other
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["reward-server.log"]


def test_a_server_that_does_not_start_stops_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that only wait for its address."""

    class Broken:
        def __init__(self, scorers: Any, log: Path, devices: Any, spending: Any) -> None:
            raise ConfigError("the reward server did not start")

    monkeypatch.setattr(sharing, "LocalServer", Broken)
    errors = in_processes(["here"] * 3, lambda table: "started", tmp_path)
    assert [str(error) for error in errors] == ["the reward server did not start"] * 3


def test_a_part_that_does_not_start_stops_the_processes_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process sees a GPU of its own, and starts its server; that of one is up, and ends with it."""
    ended: list[str] = []

    class Part:
        def __init__(self, scorers: Any, log: Path, devices: Any, spending: Any) -> None:
            self.gpu = threading.current_thread().name
            if self.gpu == "second":
                raise ConfigError("the reward server did not start")

        def urls(self) -> list[str]:
            return [f"http://{self.gpu}"]

        def terminate(self) -> None: ...
        def close(self) -> None:
            ended.append(self.gpu)

    monkeypatch.setattr(sharing, "LocalServer", Part)
    monkeypatch.setattr(sharing, "visible_gpus", lambda: (threading.current_thread().name,))
    parts, together = ["first", "second"], threading.Barrier(2)
    said = dict[str, list[Any]]()

    def problem_of(part: str) -> str:
        threading.current_thread().name = part

        def gather(values: Sequence[Any]) -> list[Any]:
            said[part] = list(values)
            together.wait(WAIT_S)
            everyone = [value for other in parts for value in said[other]]
            together.wait(WAIT_S)
            return everyone

        share = sharing.MachineShare({TRAINED_ON: {"clip": {}}}, "cuda:0", tmp_path, False, None)
        with pytest.raises(ConfigError) as raised:
            share.start(gather)
        share.close()
        return str(raised.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(problem_of, parts)) == ["the reward server did not start"] * 2
    assert ended == ["first"]


@pytest.mark.parametrize("ends", ["before it starts", "later", None])
def test_a_temporary_log_that_a_message_names_is_kept(monkeypatch: pytest.MonkeyPatch, ends: str | None) -> None:
    logs = list[Path]()

    class Server:
        has_failed = ends == "later"

        def __init__(self, _: Any, log: Path, *__: Any) -> None:
            logs.append(log)
            log.write_text("why")
            if ends == "before it starts":
                raise ConfigError(str(log))

        def urls(self) -> list[str]:
            return []

        def terminate(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(sharing, "LocalServer", Server)
    share = sharing.MachineShare({CPU: {"ocr": {}}}, "cpu", None, False, None)
    with suppress(ConfigError):
        share.start(list)
    share.close()
    assert logs[0].parent.exists() == logs[0].exists() == (ends is not None)
    shutil.rmtree(logs[0].parent, ignore_errors=True)


MACHINES = {
    "a 1": ("a", "11111111-0"),
    "b 1": ("b", "11111111-0"),  # as containers of one machine
    "b 2": ("b", "22222222-0"),  # as clones
}


def test_each_machine_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback does not reach another, nor does the write-ahead log of a cache whose folder both see."""
    monkeypatch.setattr(sharing, "this_machine", lambda: Machine(*MACHINES[threading.current_thread().name]))
    with ExitStack() as stack:
        urls = {name: stack.enter_context(serving({"r": Brightness()})) for name in MACHINES}
        logs: list[str] = []

        class Placed:
            def __init__(self, scorers: Any, log: Path, devices: Any, spending: Any) -> None:
                self.place = threading.current_thread().name
                logs.append(log.name)

            def urls(self) -> list[str]:
                return [urls[self.place]]

            def terminate(self) -> None: ...
            def close(self) -> None: ...

        monkeypatch.setattr(sharing, "LocalServer", Placed)
        places = [name for name in MACHINES for _ in range(2)]
        used = in_processes(places, lambda table: (score(table), table._shared.urls[CPU])[1], tmp_path, cache=True)  # pyright: ignore[reportPrivateUsage]
    assert used == [[urls[name]] for name in places]
    assert sorted(logs) == [f"reward-server-{name}.log" for name in ("a", "b-11111111", "b-22222222")]
    assert sorted(path.name for path in tmp_path.glob("*.sqlite")) == [
        f"rewards-{name}.sqlite" for name in ("a", "b-11111111", "b-22222222")
    ]


def test_a_machine_is_known_by_its_name_and_the_start_of_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel does not say, by its name alone."""
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    monkeypatch.setattr(machine, "_BOOT_ID", tmp_path / "boot_id")
    assert this_machine() == Machine("a", "")
    (tmp_path / "boot_id").write_text("11111111-0\n", encoding="ascii")
    assert this_machine() == Machine("a", "11111111-0")
    assert pickle.loads(pickle.dumps(this_machine())) == this_machine()  # processes tell each other


def test_counts_of_clients_are_those_of_all_processes() -> None:
    one = {"reward_client/ocr/retries": 2.0, "reward_client/ocr/latency_p95": 0.5}
    other = {"reward_client/ocr/retries": 1.0, "reward_client/ocr/latency_p95": 4.0, "reward_failures/ocr/timeout": 3.0}
    changes = {"reward_client/ocr/revision_changes": 1.0}  # of one server, which both see
    assert statistics_of_all([one | changes, other | changes]) == {
        "reward_client/ocr/retries": 3.0, "reward_client/ocr/latency_p95": 4.0, "reward_failures/ocr/timeout": 3.0,
        "reward_client/ocr/revision_changes": 1.0,
    }  # fmt: skip
