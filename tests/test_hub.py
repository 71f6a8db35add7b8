"""A path that is not there, and a hub that cannot be reached: one message, in less than two seconds."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

import retouch
from retouch.config import ConfigError
from retouch.data.tables import hub_table
from retouch.files import hub
from retouch.files.hub import _probe, folder_offline, require_hub
from tests.command_line import retouch as retouch_here

CLOSED = "http://127.0.0.1:9"
"""Nothing listens there."""


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a hub, with an empty cache; afterwards whatever there was before."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "_probe", _probe)  # which conftest.py replaces for all other tests
    monkeypatch.setenv("HF_ENDPOINT", CLOSED)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that what the probe sets is undone
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "_hub", hub._Hub())


def command(*arguments: object) -> tuple[int, str, float]:
    """Exit code, standard error, and seconds of processor time of `retouch ...`: what it takes on an idle machine."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "retouch", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    after = os.times()
    seconds = after.children_user - before.children_user + after.children_system - before.children_system
    return done.returncode, done.stderr, seconds


def here(*arguments: object) -> tuple[int, str, float]:
    """The same of `retouch ...` in this process."""
    before = time.process_time()
    outcome = retouch_here(*arguments)
    return outcome.code, outcome.err, time.process_time() - before


STARTED = ("model.path=some/thing", "data.path=data/self_bench")
"""Overrides that are tried in a new process, which shows that nothing heavy is imported before they are found."""

NO_HUB = (
    rf"KEY: given 'some/thing'; no such folder, and the hub cannot be reached \({CLOSED}: .*refused\); "
    "set KEY to a local folder, or give this machine access to the hub"
)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.path=/nowhere", r"model\.path: /nowhere: no such folder; give a folder .*"),
        ("data.path=nowhere", r"data\.path: nowhere: no such folder"),
        ("data.path=data/self_bench", r"data\.path: data/self_bench: no such folder"),
        ("data={format: manifest, path: data/missing.json}", r"data\.path: .*data/missing\.json.*"),
        (
            "model.train={kind: ip_adapter, image_encoder: tiny, initial_adapter: some/file.bin}",
            r"model\.train\.initial_adapter: given 'some/file.bin'; no such file or folder; set .*",
        ),
        (
            "model={family: qwen_image_edit, path: tiny, distillation_lora: {path: some/thing}}",
            NO_HUB.replace("KEY", r"model\.distillation_lora\.path"),
        ),
        (
            "model={family: qwen_image_edit, path: tiny, distillation_lora: {path: some/thing/of.safetensors}}",
            r"model\.distillation_lora\.path: given 'some/thing/of.safetensors'; no such file or folder; set .*",
        ),
        ("model.path=some/thing", NO_HUB.replace("KEY", r"model\.path")),
        (
            "model.train={kind: ip_adapter, image_encoder: some/thing}",
            NO_HUB.replace("KEY", r"model\.train\.image_encoder"),
        ),
        ("rewards.clip={url: auto, path: some/thing}", NO_HUB.replace("KEY", r"rewards\.clip\.path")),
    ],
)
def test_training_ends_at_once_and_reports_it_once(
    run_file: Callable[..., dict[str, Any]], tmp_path: Path, override: str, message: str
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_file()), encoding="utf-8")
    code, err, seconds = (command if override in STARTED else here)("train", tmp_path / "run.yaml", override)
    assert code == 2
    assert re.fullmatch(rf"error: {message}\n", err)
    assert seconds < 2


def test_a_data_set_of_the_hub() -> None:
    with pytest.raises(ConfigError, match=re.escape("data.path: given 'some/thing'; no such folder, and the hub")):
        hub_table("some/thing", "test")


def test_a_run_directory_that_is_not_there(tmp_path: Path) -> None:
    code, err, seconds = command("sample", "--run", tmp_path / "no", "--out", tmp_path / "out")
    assert (code, err) == (2, f"error: --run: given {tmp_path}/no; no such file or folder\n")
    assert seconds < 2


def test_sampling_with_a_model_that_is_not_there(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_file(model__path="some/thing")), encoding="utf-8")
    code, err, seconds = command("sample", "--config", tmp_path / "run.yaml", "--out", tmp_path / "out")
    assert code == 2
    assert re.fullmatch("error: " + NO_HUB.replace("KEY", r"model\.path") + "\n", err)
    assert seconds < 2


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes the connection, and nothing more
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        given: list[float] = []
        monkeypatch.setattr(hub, "_probe", lambda endpoint, timeout_s: given.append(timeout_s) or _probe(endpoint, 0.2))
        with pytest.raises(ConfigError, match="cannot be reached"):
            require_hub("model.path", "some/model")
        assert given == [0.2]


def test_downloaded_files_are_used_without_the_hub(tmp_path: Path) -> None:
    """And the libraries no longer try to reach it, nor do the processes that are started."""
    (tmp_path / "hub" / "models--some--model" / "snapshots" / "abc").mkdir(parents=True)
    require_hub("model.path", "some/model")
    assert huggingface_hub.constants.HF_HUB_OFFLINE is True
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ConfigError, match=r"^rewards\.clip\.path: given 'some/other'; no such folder, and the hub"):
        require_hub("rewards.clip.path", "some/other")


def test_without_the_hub_a_model_is_its_folder_in_the_cache(tmp_path: Path) -> None:
    made = tmp_path / "hub/models--some--model"
    (made / "snapshots/abc").mkdir(parents=True)
    (made / "refs").mkdir()
    (made / "refs/main").write_text("abc", encoding="utf-8")
    assert folder_offline("some/model") == str(made / "snapshots/abc")
    assert [folder_offline(path) for path in ("some/other", str(made))] == ["some/other", str(made)]


@contextmanager
def gated_hub(monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0) -> Iterator[list[str]]:
    """A hub that refuses every request -> the requests."""
    asked: list[str] = []

    class Gated(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            time.sleep(delay_s)
            self.send_error(401)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Gated)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()


def test_a_hub_that_answers_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answer will do: whether an id exists is for the libraries to find out."""
    with gated_hub(monkeypatch) as asked:
        for name in ("some/model", "some/other"):
            require_hub("model.path", name)
    assert len(asked) == 1
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_a_slow_hub_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process of a run must not go offline while the others download."""
    with gated_hub(monkeypatch, delay_s=1.4):
        require_hub("model.path", "some/model")
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_a_hub_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt() -> None:
        with pytest.raises(ConfigError, match="cannot be reached"):
            require_hub("model.path", "some/model")

    attempt()
    with gated_hub(monkeypatch) as asked:
        attempt()
        assert not asked  # the failure holds for a minute
        hub._hub.retry_at = time.monotonic()
        require_hub("model.path", "some/model")
        assert len(asked) == 1
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False
    assert os.environ["HF_HUB_OFFLINE"] == "0"


def test_offline_on_purpose_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "_probe", lambda *given: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        require_hub("model.path", "some/model")


def test_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "retouch", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"retouch {retouch.__version__}\n")
