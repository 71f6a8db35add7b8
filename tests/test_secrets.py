"""No secret of the environment is in anything that a run, a server or a command leaves: every file and every line of
a run that is scored by a judge and a server, fails in a step, and is reported and looked at."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests import forked
from tests.conftest import small_run
from tests.rewards.fakes import until
from tests.rewards.openai_server import KEY, OpenAIServer
from tests.tiny_models import shallow_flux

SECRETS = {
    "RETOUCH_REWARD_TOKEN": "rt-planted-7c1f0e5d92ab",
    "OPENAI_API_KEY": KEY,
    "HF_TOKEN": "hf_plantedQx8Zr2LmVbNc",
    "WANDB_API_KEY": "0123456789abcdefplanted0123456789abcdef0",
}

WITH_A_HUB = """
import importlib
import huggingface_hub.constants
importlib.reload(huggingface_hub.constants)
from retouch.cli import main
main()
"""
"""`retouch` where HF_ENDPOINT is set: huggingface_hub reads it when it is imported, and a fork has imported it."""


@contextmanager
def echoing_hub() -> Iterator[tuple[str, list[str]]]:
    """A hub that answers every request with 401 and the headers that it was sent -> (address, tokens that it saw)."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            body = json.dumps({"error": str(dict(self.headers))}).encode()
            self.send_response(401)
            self.send_header("X-Error-Message", str(dict(self.headers)))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", seen
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def left(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """(folder with everything on the disk, what each command printed)."""
    folder = tmp_path_factory.mktemp("secrets")
    environment = {
        **os.environ, **SECRETS, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "hub"), "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "0",
    }  # fmt: skip
    printed: dict[str, str] = {}

    def command(name: str, code: int, *arguments: object) -> None:
        full = [sys.executable, "-m", "retouch", *map(str, arguments)]
        done = forked.run(full, env=environment, cwd=folder, timeout=300)
        printed[name] = done.stdout + done.stderr
        assert done.returncode == code, printed[name]

    with OpenAIServer() as judge, echoing_hub() as (hub, seen):
        numbers = itertools.count()
        judge.breaks = lambda _: {9: 500, 11: 400}.get(next(numbers), 0)  # its errors echo the key
        rewards = {"jpeg_size": {"url": "auto"}, "openai_judge": {"model": "judge", "address": judge.url}}
        run = small_run(
            signs,
            folder / "runs",
            model__path=shallow_flux(),
            rewards=rewards,
            algorithm__inner_epochs=3,
            optimizer__lr=1e30,
            training__checkpoint_every=1,
            reward_client={"max_failure_rate": 0.9},
            logging__rollout_images_every=1,
            logging__sinks=["tensorboard"],
        )
        file, where = folder / "run.yaml", folder / "runs" / "t"
        file.write_text(yaml.safe_dump(run), encoding="utf-8")
        command("check", 0, "check", file, "--json")
        command("train", 1, "train", file, "--verbose")
        command("report", 0, "report", where)
        shutil.copytree(where, folder / "runs" / "u")
        command("compare", 0, "compare", where, folder / "runs" / "u")
        command("doctor", 0, "doctor", file, "name=other")
        full = [sys.executable, "-c", WITH_A_HUB, "train", str(file), "name=other", "model.path=some/thing"]
        done = forked.run(full, env={**environment, "HF_ENDPOINT": hub}, cwd=folder, timeout=300)
        printed["hub"] = done.stdout + done.stderr
        assert done.returncode == 2 and "some/thing" in printed["hub"], printed["hub"]
        assert any(SECRETS["HF_TOKEN"] in one for one in seen)  # it was sent
        printed["server"] = _served(folder, environment)
    return folder, printed


def _served(folder: Path, environment: dict[str, str]) -> str:
    """Everything that a reward server prints and answers: with the token, without it, and to broken requests."""
    command = [sys.executable, "-m", "retouch", "reward", "serve", "jpeg_size", "--port", "0"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    endpoints = folder / "endpoints.json"
    token, shown = SECRETS["RETOUCH_REWARD_TOKEN"], ""
    try:
        until(endpoints.exists, 60)
        [entry] = json.loads(endpoints.read_text())["endpoints"]
        with httpx.Client(base_url=entry["url"], timeout=30, trust_env=False) as client:
            until(lambda: _answers(client), 60)
            for headers in ({}, {"Authorization": f"Bearer {token}"}, {"Authorization": f"Bearer x{token}"}):
                for path in ("/livez", "/readyz", "/info", "/metrics", "/nothing"):
                    reply = client.get(path, headers=headers)
                    shown += str(dict(reply.headers)) + reply.text
                for body in (b"{", b'{"protocol": 99}', token.encode()[:0] + b"\xff" * 40):
                    reply = client.post("/score", content=body, headers=headers)
                    shown += str(dict(reply.headers)) + reply.text
    finally:
        process.send_signal(signal.SIGTERM)
        shown += process.communicate(timeout=60)[0]
    return shown


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/livez").status_code == 200
    except httpx.TransportError:
        return False


def found_in(data: bytes) -> set[str]:
    """The secrets in it."""
    return {name for name, secret in SECRETS.items() if secret.encode() in data}


def test_a_secret_is_in_no_file(left: tuple[Path, dict[str, str]]) -> None:
    folder, _ = left
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "environment.json", "metrics.jsonl", "log.txt", "state.json", "report.html"} <= names
    assert any(path.suffix == ".log" for path in files) and any("tfevents" in path.name for path in files)
    assert {str(path): found for path in files if (found := found_in(path.read_bytes()))} == {}


def test_a_secret_is_in_no_output(left: tuple[Path, dict[str, str]]) -> None:
    _, printed = left
    assert set(printed) == {"check", "train", "report", "compare", "doctor", "hub", "server"}
    assert all(printed.values())
    assert {command: found for command, text in printed.items() if (found := found_in(text.encode()))} == {}


def test_the_search_would_find_them(tmp_path: Path) -> None:
    """A text within a database or an event file is found by its bytes."""
    database = tmp_path / "scores.db"
    connection = sqlite3.connect(database)
    with connection:
        connection.execute("CREATE TABLE t (text TEXT)")
        connection.execute("INSERT INTO t VALUES (?)", (KEY,))
    connection.close()
    assert KEY.encode() in database.read_bytes()
