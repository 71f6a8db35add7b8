"""`retouch watch`: the report over HTTP, for those with its address alone, and as the run is now."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retouch.errors import ConfigError
from retouch.observe import watch
from retouch.observe.run_lock import RunLock
from retouch.observe.watch import WatchServer, open_server
from tests.command_line import retouch


@pytest.fixture
def run(finished: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a finished run, to change."""
    return shutil.copytree(finished("full"), tmp_path / "full", ignore=shutil.ignore_patterns("checkpoints"))


@pytest.fixture
def server(run: Path) -> Iterator[WatchServer]:
    with open_server(run, 0) as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.01,))
        thread.start()
        yield opened
        opened.shutdown()
        thread.join()


def get(server: WatchServer, path: str, host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def news(server: WatchServer, since: str = "") -> dict[str, Any]:
    status, body, _ = get(server, f"/{server.token}/data?since={since}")
    assert status == 200
    return dict(json.loads(body))


def test_only_the_address_with_its_token_and_own_host_is_answered(server: WatchServer) -> None:
    status, page, headers = get(server, f"/{server.token}/")
    assert status == 200 and b"<h1>full</h1>" in page and b"connect-src &#39;self&#39;" in page
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    for host in (f"localhost:{server.server_port}", "127.0.0.1", "localhost:6006"):  # the last one through a tunnel
        assert get(server, f"/{server.token}/", host)[0] == 200, host
    status, body, headers = get(server, f"/{server.token}")  # as somebody types it; relative addresses need the slash
    assert (status, body, headers["Location"]) == (307, b"", f"/{server.token}/")
    for path in (
        "/",
        "/data",
        "/x/",
        f"/{server.token[:-1]}/",
        f"/{server.token}x/data",
        "//",
        "/%00/",
        "/%C3%A9/",
    ):
        assert get(server, path)[0] == 403, path
    for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example", ""):
        status, body, _ = get(server, f"/{server.token}/", host)
        assert status == 421 and b"full" not in body, host


def test_images_of_the_run_are_served_and_no_other_file(server: WatchServer, run: Path, tmp_path: Path) -> None:
    image = "evaluations/step-000004/00000.png"
    status, body, headers = get(server, f"/{server.token}/{image}")
    assert (status, body, headers["Content-Type"]) == (200, (run / image).read_bytes(), "image/png")
    (run / "evaluations/step-000004/00009.png").symlink_to(run / image)
    (run / "evaluations/step-000004/00008.png").write_text("secret")
    for place in (
        *("config.yaml", "metrics.jsonl", "evaluations/step-000004/rows.jsonl", "evaluations/step-000004", "../full"),
        *(
            "evaluations/step-000004/00009.png",
            "evaluations/step-000004/00008.png",
            "evaluations/step-000004/00007.png",
        ),
        *("evaluations/../evaluations/step-000004/00000.png", "evaluations/step-000004/../step-000004/00000.png"),
        *("%2e%2e/full/evaluations/step-000004/00000.png", "/etc/passwd", "images/step-000004/other.png"),
    ):
        assert get(server, f"/{server.token}/{place}")[0] == 404, place


def test_the_page_follows_the_run(server: WatchServer, run: Path) -> None:
    first = news(server)
    version = first["page"]["version"]
    assert "Finished" in first["parts"]["status"] and first["images"][0].startswith("evaluations/step-")
    assert get(server, f"/{server.token}/data?since={version}")[:2] == (204, b"")
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            json.dumps({"step": 5, "kind": "train", "phase": "rl", "loss": 0.5, "time": {"step": 2.0}}) + "\n"
        )
    second = news(server, version)
    [loss] = [chart for chart in second["page"]["charts"] if chart["key"] == "train/loss"]
    assert (loss["lines"][0]["x"][-1], loss["lines"][0]["y"][-1]) == (5, 0.5)
    assert "Killed" in second["parts"]["status"] and second["page"]["version"] != version
    lock = RunLock(run)
    lock.take()  # without a new record
    try:
        assert "Running" in news(server, second["page"]["version"])["parts"]["status"]
    finally:
        lock.release()
    shutil.rmtree(run)
    status, body, _ = get(server, f"/{server.token}/data?since=")
    assert status == 503 and b"is not a run directory" in body


def test_a_run_that_begins_is_waited_for(
    finished: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train` makes the directory once its model is loaded; its first file is the run file."""
    run, waited = tmp_path / "soon", []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            run.mkdir()
            shutil.copy(finished("full") / "config.yaml", run)

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(WatchServer, "serve_forever", lambda server: server.watched.page())
    outcome = retouch("watch", run)
    assert (outcome.code, len(waited)) == (0, 3) and outcome.out.startswith("http://127.0.0.1:")
    assert outcome.err.startswith(f"waiting up to 120 s for {run}/config.yaml")


def test_what_cannot_be_watched_is_reported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "WAIT_S", 0.0)
    (tmp_path / "notes.txt").touch()  # a folder of something else
    for place in (tmp_path, tmp_path / "none", run / "config.yaml"):
        outcome = retouch("watch", place)
        assert outcome.code == 2 and "is not a run directory" in outcome.err
        assert ("waiting" in outcome.err) == (place == tmp_path / "none")
    with (
        open_server(run, 0) as server,
        pytest.raises(ConfigError, match=f"--port: given {server.server_port}, which is"),
    ):
        open_server(run, server.server_port)


def test_neither_watch_nor_report_nor_compare_imports_torch(run: Path) -> None:
    """They start in a moment, also on a laptop without torch."""
    code = (
        "import sys; from pathlib import Path; run = Path(sys.argv[1])\n"
        "from retouch.observe.comparison import write_comparison\n"
        "from retouch.observe.watch import open_server\n"
        "open_server(run, 0).server_close(); write_comparison({'a': run, 'b': run}, run / 'compare.html')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(run)], check=False).returncode == 0
