"""Reward servers as processes of their own: started, found, asked, stopped, and gone with who started them."""

from __future__ import annotations

import base64
import errno
import importlib.util
import json
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from PIL import Image

from retouch import errors
from retouch.config import ConfigError
from retouch.rewards.addresses import reward_token
from retouch.rewards.client.endpoints import (
    resolve_urls,
    write_endpoints,
)
from retouch.rewards.client.servers import ServerStatus, readiness
from retouch.rewards.devices import gpu_count
from retouch.rewards.server import FINISH_S
from retouch.rewards.server.launch import LocalServer, ServeOptions, requested, serve
from retouch.rewards.server.supervisor import DRAIN_S, Instance, Supervisor
from retouch.rewards.server.worker import _END_S
from retouch.rewards.sharing import MachineShare
from retouch.tiny.signs import draw_sign
from tests.command_line import retouch
from tests.rewards.fakes import HANG_S, Brightness, closed_port, free_port, get, item, serving, unhurried, until
from tests.rewards.test_server import as_json, outcomes

TOKEN = "RETOUCH_REWARD_TOKEN"
SERVE = (sys.executable, "-m", "retouch", "reward", "serve")
PYTHONPATH = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
START_S = 60.0  # an interpreter, fastapi and onnxruntime on a busy machine


@dataclass(frozen=True)
class Served:
    """`retouch reward serve` as a process."""

    process: subprocess.Popen[str]
    endpoints: Path

    @property
    def url(self) -> str:
        return str(json.loads(self.endpoints.read_text())["endpoints"][0]["url"])

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, trust_env=False, **options)

    def score(self, message: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/score", json=message, timeout=60, trust_env=False, **options)


@contextmanager
def served(folder: Path, *arguments: str, wait: bool = True, **environment: str) -> Iterator[Served]:
    """A server in a folder, by default once it is ready; killed at the end if it still runs."""
    one = Served(
        subprocess.Popen(
            [*SERVE, *arguments, "--port", "0"],
            cwd=folder,
            env={**os.environ, TOKEN: "", "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ),
        folder / "endpoints.json",
    )
    try:
        until(lambda: one.endpoints.exists() or one.process.poll() is not None, START_S)
        assert one.process.poll() is None, one.process.communicate()[0]
        headers = {"Authorization": f"Bearer {environment[TOKEN]}"} if TOKEN in environment else {}
        if wait:
            until(lambda: answers(one.url) and one.get("/readyz", headers=headers).status_code == 200, START_S)
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/livez", timeout=30, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def ready(url: str) -> bool:
    return answers(url) and httpx.get(f"{url}/readyz", timeout=30, trust_env=False).status_code == 200


def alive(pid: int) -> bool:
    """Whether a process runs; a dead one whose parent has not asked yet does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture(autouse=True)
def _no_logs_on_stderr(_all_logs: None, caplog: pytest.LogCaptureFixture) -> None:
    """Its lines are counted here, and the command line leaves a log handler behind in this process."""
    caplog.set_level(logging.ERROR)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = json.dumps({"ocr": {"detect": False, "threads": 1}})
    with served(tmp_path_factory.mktemp("served"), "ocr,preservation", "--options", options) as one:
        yield one


@pytest.fixture(scope="module")
def sign(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Files of a sign that says MOKA: `image`, `mask`, and `source`, the sign without its word."""
    drawn, folder = draw_sign("MOKA", (64, 128), 0), tmp_path_factory.mktemp("sign")
    pictures: dict[str, Image.Image] = {"image": drawn.picture, "mask": drawn.mask, "source": drawn.ground}
    for name, picture in pictures.items():
        picture.save(folder / f"{name}.png")
    return {name: folder / f"{name}.png" for name in pictures}


# --- serve ---


def test_the_endpoints_file_says_where_who_and_what(server: Served) -> None:
    (found,) = json.loads(server.endpoints.read_text())["endpoints"]
    log = f"reward-logs/port-{server.url.rpartition(':')[2]}.log"
    assert found == {
        "url": server.url, "rewards": ["ocr", "preservation"], "device": "cpu", "pid": server.process.pid, "log": log
    }  # fmt: skip
    written = (server.endpoints.parent / log).read_text()
    assert "ocr loaded on cpu" in written and f"serving ocr, preservation on {server.url} (pid " in written
    assert server.url.startswith("http://127.0.0.1:")
    assert resolve_urls(str(server.endpoints), "preservation") == [server.url]


def test_a_served_scorer_is_alive_ready_and_has_its_options(server: Served) -> None:
    assert [server.get(path).status_code for path in ("/livez", "/readyz", "/info")] == [200] * 3
    info = server.get("/info").json()
    assert alive(info["pid"]) and alive(info["worker_pid"]) and list(info["scorers"]) == ["ocr", "preservation"]
    assert "detect=False" in info["scorers"]["ocr"]["revision"]
    for pid in (info["pid"], info["worker_pid"]):
        assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{pid}/environ").read_bytes()


def test_json_as_one_would_write_it_for_curl(server: Served, sign: Mapping[str, Path]) -> None:
    pictures = {name: base64.b64encode(path.read_bytes()).decode() for name, path in sign.items()}
    rest = {"protocol": 1, "request_id": "by hand", "deadline_ms": 60000, "rewards": ["ocr", "preservation"]}
    wanted = [{"id": "right", "prompt": "a sign 'MOKA'"}, {"id": "wrong", "prompt": "a sign 'MOTO'"}]
    response = server.score({**rest, "items": [{**one, **pictures} for one in wanted]})
    assert outcomes(response, "ocr") == [1.0, 0.5]
    right = response.json()["items"][0]
    assert (right["id"], right["errors"], right["scores"]["ocr"]["detail"]["text"]) == ("right", {}, "MOKA")
    assert outcomes(response, "preservation") == [1.0, 1.0]
    assert set(response.json()["scorers"]) == {"ocr", "preservation"}


PREFERRED = ("uvloop", "httptools", "websockets", "wsproto")
"""Packages that uvicorn takes by itself where they are installed, as they are beside vLLM."""


def test_it_serves_beside_packages_that_uvicorn_prefers_until_sigterm(tmp_path: Path) -> None:
    """With uvloop it never became ready, because the worker could not be started. Ended, it is in the file no more."""
    for name in PREFERRED:
        (tmp_path / f"{name}.py").write_text("def __getattr__(name):\n    raise RuntimeError(f'{__name__}.{name}')\n")
    with served(tmp_path, "preservation", PYTHONPATH=os.pathsep.join([str(tmp_path), PYTHONPATH])) as one:
        url = one.url
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(30) in (0, -signal.SIGTERM)
        assert not answers(url)
        with pytest.raises(ConfigError, match=r"no server in .*endpoints.json has preservation; start one"):
            resolve_urls(str(one.endpoints), "preservation")


@pytest.mark.full
def test_it_outlasts_its_reader_and_a_notice_of_the_scheduler(tmp_path: Path) -> None:
    """SLURM sends SIGUSR1 to every process of a job; the one that was started by hand decides what follows."""
    with served(tmp_path, "preservation") as one:
        assert one.process.stdout is not None
        one.process.stdout.close()
        one.process.stdout = None
        before = one.get("/info").json()
        for name in ("pid", "worker_pid"):
            os.kill(before[name], signal.SIGUSR1)
        time.sleep(1)
        assert one.get("/info").json() == before
        os.kill(before["pid"], signal.SIGKILL)  # the supervisor logs it, and starts another
        url = one.url
        until(lambda: ready(url), START_S)
        one.process.send_signal(signal.SIGUSR1)
        assert one.process.wait(60) == 0
        assert not answers(url)


def test_an_open_address_needs_the_token_and_checks_it(tmp_path: Path) -> None:
    refused = retouch("reward", "serve", "preservation", "--host", "0.0.0.0")
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert f"set {TOKEN} to a secret, or stay on 127.0.0.1" in refused.err
    with served(tmp_path, "preservation", "--host", "0.0.0.0", **{TOKEN: "s3cret"}) as one:
        message = as_json([item(0)], ["preservation"])
        good = {"Authorization": "Bearer s3cret"}
        assert [one.get("/info").status_code, one.score(message).status_code] == [401, 401]
        assert outcomes(one.score(message, headers=good), "preservation") == ["bad_item"]
        one.process.terminate()
        logs = [file.read_text() for file in tmp_path.rglob("*.log")]
        assert len(logs) == 1 and "s3cret" not in one.process.communicate(timeout=30)[0] + logs[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["orc"], "reward 'orc': no such scorer; did you mean 'ocr'?"),
        ([","], "NAME: given ',', which names no scorer"),
        (["preservation", "--options", "{"], "--options: not valid JSON"),
        (["ocr", "--options", '{"ocr": {"detct": false}}'], "no such option 'detct'; did you mean 'detect'?"),
        (["ocr", "--options", '{"preservation": {}}'], "--options: 'preservation' is no scorer of this command"),
        (["ocr", "--options", '{"ocr": 1}'], '--options: given {"ocr": 1}; write it as'),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_served_is_one_line_and_exit_2(arguments: list[str], message: str) -> None:
    outcome = retouch("reward", "serve", *arguments, "--port", free_port())
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert message in outcome.err


def test_scorers_that_cannot_be_loaded_end_the_server(tmp_path: Path) -> None:
    """The only instances: it would never score, and a script that started it would wait."""
    options = json.dumps({"mine": {"scorer": "fn", "fn": "nowhere:score"}})
    command = [*SERVE, "mine", "--options", options, "--replicas", "2", "--port", "0"]
    environment = {**os.environ, TOKEN: "", "PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: the scorers cannot be loaded: rewards.mine.fn: ") and "no module nowhere" in line
    assert "the log is reward-logs/port-" in line


@pytest.mark.skipif(gpu_count() > 0, reason="this machine has the GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    outcome = retouch("reward", "serve", "ocr", "--devices", "0", "--endpoints", tmp_path / "e.json")
    assert outcome.code == 2
    assert outcome.err.startswith("error: --devices: given 0, but this machine has no GPU; set a device that it has")


def test_gpus_are_not_counted_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plug-in's scorer may compute without it; the server then fails later, here at its port."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(port=taken.getsockname()[1], devices=["9"])
        with pytest.raises(ConfigError, match=r"^--port: cannot listen"):
            serve({"preservation": {}}, options)


def test_a_scorer_that_compares_a_group_is_not_served() -> None:
    """Its batches would mix groups of several requests."""
    judge = {"model": "judge", "address": "http://127.0.0.1:1/v1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:  # where another scorer ends
        options = ServeOptions(port=taken.getsockname()[1])
        with pytest.raises(
            ConfigError, match=r"^reward 'pairwise': compares .* parts of groups; set against=reference"
        ):
            serve({"pairwise": judge}, options)
        with pytest.raises(ConfigError, match=r"^--port: cannot listen"):
            serve({"pairwise": {**judge, "against": "reference"}}, options)


def test_a_server_tells_when_it_is_ready(tmp_path: Path) -> None:
    """It asks itself on loopback: a proxy of the environment would get the token."""
    proxy = f"http://127.0.0.1:{closed_port()}"
    given = {TOKEN: "secret", "HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": "", "no_proxy": ""}
    with served(tmp_path, "preservation", "--host", "0.0.0.0", wait=False, **given) as one:
        lines: list[str] = []
        assert one.process.stdout is not None
        threading.Thread(target=lines.extend, args=[iter(one.process.stdout.readline, "")], daemon=True).start()
        until(lambda: any(f"ready: {one.url}" in line for line in list(lines)), START_S)


def test_the_address_of_another_network_card_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"status": "failed", "problem": "no weights"}')

        def log_message(self, format: str, *args: Any) -> None: ...

    proxy = f"http://127.0.0.1:{closed_port()}"
    for name, value in {"HTTP_PROXY": proxy, "http_proxy": proxy, "NO_PROXY": "", "no_proxy": ""}.items():
        monkeypatch.setenv(name, value)
    with ThreadingHTTPServer(("127.0.0.2", 0), Failed) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.2:{server.server_address[1]}"
        assert readiness(url, 5.0, direct=True) == ServerStatus("failed", "no weights")
        with pytest.raises(httpx.ConnectError):
            readiness(url, 5.0)
        server.shutdown()


def test_the_server_ends_where_no_instance_loads_its_scorers() -> None:
    """One that was started again may load them."""
    with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
        instances = [Instance(one, "127.0.0.1", "cpu", None) for one in (a, b)]
        supervisor = Supervisor(instances, {}, watch_loading=True)
        instances[0].status = ServerStatus("failed", "rewards.x.path: no weights")
        supervisor._require_one_loads()
        instances[1].status = ServerStatus("ready")
        supervisor._require_one_loads()
        instances[1].status = ServerStatus("failed", "another")
        with pytest.raises(ConfigError, match=r"^the scorers cannot be loaded: rewards\.x\.path: no weights$"):
            supervisor._require_one_loads()
        instances[1].start({})
        supervisor._require_one_loads()
        assert instances[1].process is not None
        instances[1].process.kill()
        instances[1].process.wait()


def test_a_taken_port(server: Served) -> None:
    outcome = retouch("reward", "serve", "preservation", "--port", server.url.rpartition(":")[2])
    assert outcome.code == 2 and "choose another, or 0 for a free one" in outcome.err


def test_a_port_that_another_process_takes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its binding and its listening."""

    def taken(*_: Any) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(socket.socket, "listen", taken)
    with pytest.raises(ConfigError, match=r"^--port: cannot listen on 127\.0\.0\.1:\d+ \(Address already in use\)"):
        serve({"preservation": {}}, ServeOptions(port=int(free_port())))


@pytest.mark.parametrize(("port", "at_most"), [(65535, 65534), (65534, 65533)])
def test_ports_that_count_up_past_the_last(port: int, at_most: int) -> None:
    count = 65536 - at_most
    outcome = retouch("reward", "serve", "preservation", "--replicas", count, "--port", port)
    assert outcome.code == 2
    assert outcome.err == (
        f"error: --port: given {port}, from which {count} instances count up past 65535; set at most {at_most}, or 0 "
        "for free ones\n"
    )


def test_a_function_is_served_under_a_name_of_its_own(tmp_path: Path) -> None:
    """As docs/rewards.md says, and asked for by an entry of that name."""
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    command = next(line for line in page.splitlines() if line.startswith("$ retouch reward serve light "))
    (tmp_path / "my_rewards.py").write_text("def score(items):\n    return [0.25 for item in items]\n")
    with served(tmp_path, *shlex.split(command)[4:]) as one:
        assert resolve_urls(str(one.endpoints), "light") == [one.url]
        assert outcomes(one.score(as_json([item(0)], ["light"])), "light") == [0.25]
        with pytest.raises(ConfigError, match=r"has fn, but light; start one with"):
            resolve_urls(str(one.endpoints), "fn")


def test_requested_scorers() -> None:
    assert requested(" ocr, preservation ,", '{"ocr": {"threads": 1}}') == {"ocr": {"threads": 1}, "preservation": {}}


# --- score ---


def test_score_here_and_on_a_server_is_the_same(server: Served, sign: Mapping[str, Path]) -> None:
    """The sign is read in the process with detection, on the server without: the text is the same."""
    arguments = ["reward", "score", "--reward", "ocr", "--image", sign["image"], "--mask", sign["mask"]]
    arguments += ["--prompt", "a sign 'MOKI'"]
    here = retouch(*arguments)
    for url in (server.url, server.endpoints):
        there = retouch(*arguments, "--url", url)
        assert (here.code, there.code) == (0, 0)
        for outcome in (here, there):
            found = json.loads(outcome.out)
            assert (found["value"], found["detail"]["text"]) == (0.75, "MOKA")


def test_score_needs_what_its_reward_needs(sign: Mapping[str, Path]) -> None:
    arguments = ["reward", "score", "--reward", "preservation", "--image", sign["image"], "--prompt", "p"]
    failed = retouch(*arguments)
    assert failed.code == 1
    assert json.loads(failed.out)["error"] == {
        "code": "bad_item", "message": "preservation needs mask, source", "retryable": False
    }  # fmt: skip
    scored = retouch(*arguments, "--mask", sign["mask"], "--source", sign["source"])
    assert scored.code == 0 and json.loads(scored.out)["value"] == 1.0


def test_a_score_waits_for_a_server_only_where_asked_to(
    server: Served, sign: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a list of servers one that answers is enough."""
    unhurried(monkeypatch)
    dead = f"http://127.0.0.1:{closed_port()}"
    arguments = ["reward", "score", "--reward", "ocr", "--image", sign["image"], "--prompt", "'MOKA'", "--url"]
    for wait, least in ((0, 0), (1, 1)):
        started = time.monotonic()
        outcome = retouch(*arguments, dead, "--wait", wait)
        assert least <= time.monotonic() - started < HANG_S  # a request alone has 60 s
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        assert outcome.err.startswith(f"error: --url: {dead}: ConnectError")
        assert outcome.err.endswith(
            "start a server with `retouch reward serve ocr`, or give --wait SECONDS for one that is starting\n"
        )
    entries = [{"url": url, "rewards": ["ocr"], "device": "cpu", "pid": 1} for url in (dead, server.url)]
    write_endpoints(tmp_path / "both.json", entries)
    for wait in (0, 60):
        assert retouch(*arguments, tmp_path / "both.json", "--mask", sign["mask"], "--wait", wait).code == 0


class Unloadable(Brightness):
    def load(self, device: str) -> None:
        raise ConfigError("path: no weights")


def test_a_server_whose_scorers_failed_is_not_waited_for(sign: Mapping[str, Path]) -> None:
    arguments = ["reward", "score", "--reward", "ocr", "--image", sign["image"], "--prompt", "'MOKA'", "--url"]
    with serving({"ocr": Unloadable()}, wait=False) as url:
        until(lambda: b'"failed"' in get(url, "/readyz"))
        started = time.monotonic()
        outcome = retouch(*arguments, url)
        assert time.monotonic() - started < HANG_S  # a request alone has 60 s
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith(f"error: --url: {url}: ") and "rewards.ocr: path: no weights" in outcome.err
    assert "path: no weights (correct that first); start a server with `retouch reward serve ocr`" in outcome.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--reward": "orc"}, "no such scorer; did you mean 'ocr'?"),
        ({"--image": "nowhere.png"}, "nowhere.png: no such file"),
        ({"--mask": __file__}, "not an image that Pillow can read"),
        (
            {"--url": "nowhere.json"},
            "error: --url: given 'nowhere.json': no such file or directory; give http://host:port",
        ),
        ({"--url": "127.0.0.1:8000"}, "give http://host:port"),
    ],
    ids=str,
)
def test_wrong_arguments_of_score_are_one_line_and_exit_2(
    sign: Mapping[str, Path], changes: dict[str, str], message: str
) -> None:
    options = {"--reward": "ocr", "--image": sign["image"], "--prompt": "'MOKA'", **changes}
    outcome = retouch("reward", "score", *(part for pair in options.items() for part in pair))
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err and "auto" not in outcome.err


# --- url: auto ---


@pytest.mark.full
def test_a_server_of_a_run_is_closed_with_it(tmp_path: Path) -> None:
    """Two entries of one scorer, each with its own name."""
    log = tmp_path / "run" / "server.log"
    one = LocalServer({"kept": {"scorer": "preservation"}, "kept_too": {"scorer": "preservation"}}, log)
    [url] = one.urls()
    until(lambda: ready(url), START_S)  # the address is known before anybody listens
    assert list(httpx.get(f"{url}/info", timeout=30, trust_env=False).json()["scorers"]) == ["kept", "kept_too"]
    assert f"serving kept, kept_too on {url}" in " ".join(log.read_text().split())
    info = httpx.get(f"{url}/info", timeout=30, trust_env=False).json()
    one.close()
    assert not any(alive(pid) for pid in (one.pid, info["pid"], info["worker_pid"])) and not answers(url)
    assert "kept_too loaded on cpu" in log.read_text() and not list(tmp_path.rglob("port-*.log"))


def test_each_part_of_a_server_may_end_within_the_time_of_the_one_that_ends_it() -> None:
    """A run ended its server after 35 s, which gave its fronts 40, and those their requests 30 and their worker 10."""
    waited: list[float] = []
    _stopped_server(SimpleNamespace(terminate=lambda: None, wait=lambda timeout: waited.append(timeout))).close()
    (of_run,) = waited
    assert of_run > DRAIN_S > FINISH_S + 2 * _END_S


def test_servers_of_a_run_end_together() -> None:
    """One was terminated when the one before it had ended: 50 s each."""
    calls: list[str] = []
    process = SimpleNamespace(terminate=lambda: calls.append("terminate"), wait=lambda timeout: calls.append("wait"))
    servers = [_stopped_server(process) for _ in range(2)]
    MachineShare({}, "cpu", None, False, None, _servers=servers).close()
    assert calls == ["terminate"] * 2 + ["wait"] * 2


def _stopped_server(process: Any) -> LocalServer:
    server = LocalServer.__new__(LocalServer)
    parts: Any = {
        "_closing": threading.Event(),
        "_watch": SimpleNamespace(join=lambda: None),
        "_listeners": [],
        "_process": process,
        "_folder": SimpleNamespace(cleanup=lambda: None),
        "_killed_at": None,
    }
    vars(server).update(parts)
    return server


def test_a_server_of_a_run_that_is_killed_is_started_again_on_its_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run went on without rewards, and stopped; also if memory was short for the load that followed."""
    told = tmp_path / "fails"
    monkeypatch.setenv("FAILS_WHILE", str(told))
    one = LocalServer({"fn": {"fn": "tests.rewards.user_scorers:FailsWhile"}}, tmp_path / "server.log")
    try:
        [url] = one.urls()
        until(lambda: ready(url), START_S)
        before, front = one.pid, httpx.get(f"{url}/info", timeout=30, trust_env=False).json()["pid"]
        until(one._endpoints.with_name("ready").exists)
        told.write_text("raises")
        os.kill(before, signal.SIGKILL)
        until(lambda: one.pid != before and not alive(front), 30)
        until(lambda: "the scorers cannot be loaded again: " in one.log.read_text(), START_S)
        told.unlink()
        until(
            lambda: ready(url), START_S
        )  # a request to the port waits meanwhile, or fails as one that may be repeated
        assert httpx.get(f"{url}/info", timeout=30, trust_env=False).json()["pid"] != front
        one._command = [sys.executable, "-c", "raise SystemExit(2)"]  # a GPU or a file that is away
        os.kill(one.pid, signal.SIGKILL)
        until(lambda: "the reward server ended (exit code 2); it is restarted" in caplog.text, 30)
        assert one.has_failed
        assert one._watch.is_alive()
        one._endpoints.with_name("ready").unlink()  # as of options that never worked
        until(lambda: not answers(url), 30)
    finally:
        one.close()
    assert not alive(one.pid)


def test_a_server_of_a_run_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    """A run ended with exit code 2, as of a wrong option, which no supervisor repeats."""
    one = LocalServer({"kept": {"scorer": "preservation"}}, tmp_path / "server.log")
    try:
        assert not one._endpoints.exists()
        os.kill(one.pid, signal.SIGKILL)
        [url] = one.urls()
        until(lambda: ready(url), START_S)
    finally:
        one.close()


def test_a_server_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that takes longer than a moment is logged."""
    monkeypatch.setattr(errors, "LONG_S", 0.0)
    caplog.set_level(logging.INFO)
    one = LocalServer({"orc": {}}, tmp_path / "server.log")
    with pytest.raises(ConfigError, match=r"did not start \(log: .*server.log\): .*no such scorer; did you mean 'ocr'"):
        one.urls()
    one.close()
    assert f"waiting up to 60 s for the reward server (log: {tmp_path / 'server.log'})" in caplog.messages


def test_a_killed_run_leaves_no_server_behind(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from retouch.rewards.server.launch import LocalServer\n"
        f"server = LocalServer({{'preservation': {{}}}}, Path({str(tmp_path / 'server.log')!r}))\n"
        "print(server.pid, *server.urls(), flush=True); time.sleep(600)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid, url = run.stdout.readline().split()
    until(lambda: ready(url), START_S)
    info = httpx.get(f"{url}/info", timeout=30, trust_env=False).json()
    pids = [int(pid), info["pid"], info["worker_pid"]]
    assert len(set(pids)) == 3 and all(alive(one) for one in pids)
    run.kill()
    run.wait()
    run.stdout.close()
    until(lambda: not any(alive(one) for one in pids), 30)
    assert not answers(url)


# --- secrets ---


def test_the_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, token in ((" s3cret\n", "s3cret"), ("", None), ("  ", None)):
        monkeypatch.setenv(TOKEN, given)
        assert reward_token() == token
    monkeypatch.setenv(TOKEN, "two words")
    with pytest.raises(ConfigError, match=TOKEN) as refused:
        reward_token()
    assert "two" not in str(refused.value)
