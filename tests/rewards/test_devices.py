"""`rewards.NAME.device`: which device a scorer computes on, in this process and on the server of a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from retouch.config import ConfigError
from retouch.rewards import devices, sharing
from retouch.rewards.base import RewardEntry
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.devices import (
    CPU,
    TRAINED_ON,
    devices_of,
    instances,
    own_device,
    serve_argument,
    visible_gpus,
)
from retouch.rewards.scorers.clip import ClipReward
from retouch.rewards.scorers.complex_edit import ComplexEditReward
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.scorers.seam import SeamReward
from retouch.rewards.scorers.style import StyleReward
from retouch.rewards.server.launch import LocalServer
from retouch.rewards.table import RewardTable
from retouch.use.comparison import scored_here
from tests.rewards.fakes import Brightness, brightness, items, make_with, serving

CLIENT = RewardClientConfig()


class Placed(Brightness):
    """Remembers the device it was loaded on."""

    loaded: list[str] = []  # noqa: RUF012

    def load(self, device: str) -> None:
        self.loaded.append(device)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs, as far as it is asked for their number."""
    monkeypatch.setattr(devices, "gpu_count", lambda: 4)


# --- the key ---


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        (ClipReward, {"device": "gpu"}, "given 'gpu'; set cpu, cuda, cuda:N or auto, or with url: auto a list of"),
        (ClipReward, {"device": [], "url": "auto"}, r"given \[\]; set cpu"),
        (ClipReward, {"device": ["cuda:1", "cuda:1"], "url": "auto"}, "list of different devices"),
        (ClipReward, {"device": ["cuda"], "url": "auto"}, "set cpu, cuda"),
        (ClipReward, {"device": 0}, "given 0; set cpu"),
        (ClipReward, {"device": ["cuda:0", "cuda:1"]}, "set url: auto for a server with one instance per device"),
        (
            ClipReward,
            {"device": "cuda", "url": "http://127.0.0.1:8000"},
            "drop device here and start it with `retouch reward serve clip --devices 0`, or set url: auto",
        ),
        (OcrReward, {"device": "cuda"}, "rapidocr reads on the CPU; leave device out, or set engine: paddleocr"),
        (SeamReward, {"device": "cuda:0"}, "no network and runs on the CPU; leave device out"),
        (ComplexEditReward, {"device": "cuda", "model": "m"}, "runs at the endpoint of `address`; leave device out"),
    ],
)
def test_where_a_device_cannot_apply_the_message_has_the_remedy(
    entry: type[RewardEntry], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        entry(**options)


def test_the_cpu_is_the_default_everywhere() -> None:
    assert OcrReward().device == "cpu" == SeamReward(url="http://127.0.0.1:8000").device
    assert OcrReward(engine="paddleocr", device="cuda").device == "cuda"


# --- which device it is ---


@pytest.mark.parametrize(
    ("given", "url", "own", "found"),
    [
        ("cpu", None, "cuda:3", ("cpu",)),
        ("cuda", None, "cuda:3", ("cuda:3",)),
        ("cuda", None, "cuda", ("cuda:0",)),
        ("auto", None, "cuda:3", ("cuda:3",)),
        ("auto", None, "cpu", ("cpu",)),
        ("auto", "auto", "mps", ("cpu",)),
        ("cuda:2", None, "cpu", ("cuda:2",)),
        ("cuda", "auto", "cuda:3", ("cuda",)),
        (["cuda:2", "cuda:3"], "auto", "cuda:0", ("cuda:2", "cuda:3")),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_devices_of_an_entry(given: Any, url: Any, own: str, found: tuple[str, ...]) -> None:
    assert devices_of("clip", ClipReward(device=given, url=url), own) == found


@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rewards\.r\.device: given 'cuda', but the run trains on cpu; set rewards\.r\.device=cpu, or auto",
    ):
        devices_of("r", ClipReward(device="cuda"), "cpu")
    with pytest.raises(ConfigError, match=r"\['cuda:1', 'cuda:4'\], but this machine has cuda:0 to cuda:3"):
        devices_of("r", ClipReward(device=["cuda:1", "cuda:4"], url="auto"), "cuda:0")


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_count", lambda: 0)
    with pytest.raises(ConfigError, match="but this machine has no GPU"):
        devices_of("r", ClipReward(device="cuda:0"), "cpu")
    assert own_device() == "cpu"


@pytest.mark.usefixtures("gpus")
def test_a_process_without_an_engine_takes_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert own_device() == "cuda:2"


def test_cuda_on_a_server_is_every_gpu_that_its_machine_trains_on() -> None:
    assert instances(("cuda",), ["cuda:1", "cuda:0", "cuda:1"]) == ("cuda:0", "cuda:1")
    assert instances(("cuda:7",), ["cuda:1", "cuda:0"]) == ("cuda:7",)
    assert [serve_argument(d) for d in (("cpu",), ("cuda:0", "cuda:2"))] == ["cpu", "0,2"]


# --- the table ---


@pytest.mark.usefixtures("gpus")
def test_scorers_of_a_process_load_on_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes, cuda is for each its own GPU; scores come back whatever thread made them."""
    make_with(monkeypatch, lambda name, options: Placed())
    Placed.loaded.clear()
    entries = {"own": ClipReward(device="cuda"), "cpu": OcrReward(), "named": StyleReward(device="cuda:3")}
    for own in ("cuda:0", "cuda:1"):
        table = RewardTable(entries, CLIENT, device=own)
        table.start()
        assert table.wait_ready(10) == []
        scores = table.submit(items(2)).result()
        assert scores.values("own") == scores.values("named") == [brightness(one) for one in items(2)]
        table.close()
    assert sorted(Placed.loaded) == ["cpu", "cpu", "cuda:0", "cuda:1", "cuda:3", "cuda:3"]


@pytest.mark.usefixtures("gpus")
def test_a_server_for_each_set_of_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: dict[str, tuple[list[str], tuple[str, ...]]] = {}
    with serving({"read": Brightness(), "like": Brightness(), "fit": Brightness()}) as url:

        class Server:
            def __init__(self, scorers: Mapping[str, Any], log: Path, one_each: Sequence[str], spending: Path) -> None:
                assert spending == tmp_path / "judge-spending"
                started[log.name] = (list(scorers), tuple(one_each))

            def urls(self) -> list[str]:
                return [url]

            def terminate(self) -> None: ...
            def close(self) -> None: ...

        monkeypatch.setattr(sharing, "LocalServer", Server)
        monkeypatch.setattr(sharing, "visible_gpus", lambda: ("a", "b"))
        entries = {
            "read": OcrReward(url="auto"),
            "like": StyleReward(url="auto", device="auto"),
            "fit": ClipReward(url="auto", device=["cuda:2", "cuda:3"]),
        }
        table = RewardTable(entries, CLIENT, tmp_path, "cuda:1")
        table.start(
            lambda told: [
                *told,
                *([(told[0][0], "other", "cuda:0", told[0][3])] if len(told[0]) == 4 else []),
            ]
        )
        assert [table.submit(items(1)).result().values(name) for name in entries] == [[brightness(items(1)[0])]] * 3
        table.close()
    assert started == {
        "reward-server.log": (["read"], ("cpu",)),
        "reward-server-gpu-0-1.log": (["like"], ("cuda:0", "cuda:1")),
        "reward-server-gpu-2-3.log": (["fit"], ("cuda:2", "cuda:3")),
    }


def test_gpus_are_told_apart_by_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU that a process sees may be any, or a slice of one; without a GPU nothing is looked at."""
    properties = [SimpleNamespace(uuid="c", name="NVIDIA H100"), SimpleNamespace(uuid="a", name="NVIDIA H100")]
    monkeypatch.setattr("torch.cuda.get_device_properties", properties.__getitem__)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    for count, visible in ((0, ()), (1, ("c",)), (2, ("c", "a"))):
        monkeypatch.setattr(devices, "gpu_count", lambda count=count: count)
        assert visible_gpus() == visible
    properties[1].name += " MIG 1g.10gb"
    assert visible_gpus() == ("c", "a", "MIG-1")


def test_processes_that_see_a_gpu_each_have_an_instance_on_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As SLURM and some launchers show them: each GPU is cuda:0 for its process, and none sees another's. Only the
    first had an instance, which all of them waited for."""
    started: list[tuple[str, str, tuple[str, ...]]] = []

    class Server:
        def __init__(self, scorers: Mapping[str, Any], log: Path, one_each: Sequence[str], spending: Path) -> None:
            started.append((threading.current_thread().name, log.name, tuple(one_each)))
            self._url = f"http://{threading.current_thread().name}/{one_each[0]}"

        def urls(self) -> list[str]:
            return [self._url]

        def terminate(self) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(sharing, "LocalServer", Server)
    gpus = {"a": ("GPU-1",), "b": ("GPU-2",), "c": ("GPU-2",)}
    monkeypatch.setattr(sharing, "visible_gpus", lambda: gpus[threading.current_thread().name])
    together, said = threading.Barrier(len(gpus)), dict[str, list[Any]]()

    def process(name: str) -> Mapping[Any, list[str]]:
        threading.current_thread().name = name

        def gather(values: Sequence[Any]) -> list[Any]:
            said[name] = list(values)
            together.wait(60)
            everyone = [one for other in gpus for one in said[other]]
            together.wait(60)
            return everyone

        share = sharing.MachineShare({CPU: {"ocr": {}}, TRAINED_ON: {"clip": {}}}, "cuda:0", tmp_path, False, None)
        share.start(gather)
        share.close()
        return share.urls

    with ThreadPoolExecutor(len(gpus)) as pool:
        urls = list(pool.map(process, gpus))
    assert urls == [{CPU: ["http://a/cpu"], TRAINED_ON: ["http://a/cuda:0", "http://b/cuda:0"]}] * 3
    assert sorted(started) == [
        ("a", "reward-server-gpu-0.log", ("cuda:0",)),
        ("a", "reward-server.log", ("cpu",)),
        ("b", "reward-server-gpu-0-part-2.log", ("cuda:0",)),
    ]


def test_without_a_folder_nothing_is_left_in_the_working_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Scores of an evaluation, or of a program's own table, were kept in a database there, and logs of servers."""
    monkeypatch.chdir(tmp_path)
    logs: list[Path] = []

    class Server:
        has_failed = False

        def __init__(self, scorers: Mapping[str, Any], log: Path, one_each: Sequence[str], spending: Any) -> None:
            assert log.parent.is_dir()
            logs.append(log)

        def urls(self) -> list[str]:
            return [url]

        def terminate(self) -> None: ...
        def close(self) -> None: ...

    with serving({"r": Brightness()}) as url:
        monkeypatch.setattr(sharing, "LocalServer", Server)
        for place in ("auto", url):
            client = RewardClientConfig(timeout_s=60.0, cache=True)
            table = RewardTable({"r": SeamReward(url=place)}, client)
            table.start()
            assert table.submit(items(1)).result().values("r") == [brightness(items(1)[0])]
            table.close()
    assert not list(tmp_path.iterdir()) and not logs[0].parent.exists()


@pytest.mark.full
def test_a_server_of_a_run_has_an_instance_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started as a run starts it: two addresses, each with its GPU. Preservation needs no GPU; the server's process
    counts three, because it rejects a device that its machine does not have."""
    counted = "from retouch.rewards import devices\n\ndevices.gpu_count = lambda: 3\n"
    (tmp_path / "sitecustomize.py").write_text(counted, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = LocalServer({"kept": {"scorer": "preservation"}}, tmp_path / "server.log", ("cuda:0", "cuda:2"))
    try:
        urls = server.urls()
        told = [httpx.get(f"{url}/info", timeout=60, trust_env=False).json()["device"] for url in urls]
    finally:
        server.close()
    assert told == ["0", "2"]


def test_an_evaluation_scores_on_its_own_machine() -> None:
    trained = {
        "cpu": OcrReward(url="auto"),
        "gpu": ClipReward(url="auto", device=["cuda:6", "cuda:7"]),
        "own": ClipReward(device="cuda:5"),
        "server": OcrReward(url="http://127.0.0.1:8000"),
    }
    found = {name: scored_here(entry) for name, entry in trained.items()}
    assert {name: (e.url, e.device) for name, e in found.items()} == {
        "cpu": (None, "cpu"),
        "gpu": (None, "auto"),
        "own": (None, "auto"),
        "server": ("http://127.0.0.1:8000", "cpu"),
    }
