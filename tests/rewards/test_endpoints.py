"""The endpoints file: addresses as given or from files, and several commands that share one."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retouch.config import ConfigError
from retouch.rewards.client.endpoints import (
    remove_endpoints,
    resolve_urls,
    write_endpoints,
)
from tests.command_line import retouch
from tests.rewards.fakes import closed_port


def test_addresses_as_given_or_from_files(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "endpoints.json"
    write_endpoints(file, [{"url": "http://a:1/", "rewards": ["r", "s"]}, {"url": "http://b:2", "rewards": ["s"]}])
    assert resolve_urls("http://c:3/", "r") == ["http://c:3"]
    assert resolve_urls(str(file), "r") == ["http://a:1"]
    assert resolve_urls(["http://c:3", str(file)], "s") == ["http://c:3", "http://a:1", "http://b:2"]
    assert [path.name for path in file.parent.glob("[!.]*")] == ["endpoints.json"]  # no half-written one beside it


def test_commands_share_an_endpoints_file(tmp_path: Path) -> None:
    """Servers of others stay while they listen; an address is in the file once."""
    file = tmp_path / "endpoints.json"
    with socket.create_server(("127.0.0.1", 0)) as other:
        listening = f"http://127.0.0.1:{other.getsockname()[1]}"
        gone = f"http://127.0.0.1:{closed_port()}"
        write_endpoints(file, [{"url": listening, "rewards": ["ocr"], "pid": 7}, {"url": gone, "rewards": ["ocr"]}])
        write_endpoints(file, [{"url": "http://127.0.0.1:1", "rewards": ["vlm"]}])
        assert resolve_urls(str(file), "ocr") == [listening]
        assert resolve_urls(str(file), "vlm") == ["http://127.0.0.1:1"]
        assert json.loads(file.read_text())["endpoints"][0]["pid"] == 7
        write_endpoints(file, [{"url": listening, "rewards": ["vlm"]}])
    assert resolve_urls(str(file), "vlm") == [listening]
    with pytest.raises(ConfigError, match="has ocr, but vlm"):
        resolve_urls(str(file), "ocr")


def test_a_command_that_ends_removes_its_own_servers(tmp_path: Path) -> None:
    """Of one address, whichever process wrote it last; of one pid, which two containers may have, those of the command;
    without any of its own the file is left as it is."""
    file = tmp_path / "endpoints.json"
    urls = ["http://one:1", "http://two:1", "http://one:2"]
    entries = [{"url": url, "rewards": ["ocr"], "pid": pid} for url, pid in zip(urls, (7, 7, 8), strict=True)]
    write_endpoints(file, entries)
    before = file.stat().st_ino
    remove_endpoints(file, [{**entries[0], "pid": 9}])
    assert resolve_urls(str(file), "ocr") == urls and file.stat().st_ino == before
    remove_endpoints(file, entries[:1])
    assert resolve_urls(str(file), "ocr") == urls[1:]


def test_commands_that_start_at_once_lose_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "endpoints.json"
    monkeypatch.setattr("retouch.rewards.client.endpoints._listens", lambda url: time.sleep(0.02) or True)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType]
    entries = [{"url": f"http://127.0.0.1:{port}", "rewards": ["ocr"]} for port in range(1, 9)]
    with ThreadPoolExecutor(len(entries)) as pool:
        list(pool.map(lambda entry: write_endpoints(file, [entry]), entries))
    assert sorted(resolve_urls(str(file), "ocr")) == [entry["url"] for entry in entries]


def test_a_link_beside_the_file_is_not_followed(tmp_path: Path) -> None:
    """It had the name of the half-written file, whose content then replaced that of its target."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "endpoints.json.tmp").symlink_to(tmp_path / "precious")
    write_endpoints(tmp_path / "endpoints.json", [{"url": "http://a:1", "rewards": ["r"]}])
    assert (tmp_path / "precious").read_text() == "mine"
    assert resolve_urls(str(tmp_path / "endpoints.json"), "r") == ["http://a:1"]


def test_serve_overwrites_nothing_but_an_endpoints_file(tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text("name: signs\n")
    outcome = retouch("reward", "serve", "preservation", "--port", 0, "--endpoints", run_file, "--log-dir", tmp_path)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "run.yaml is not an endpoints file" in outcome.err and "give another file" in outcome.err
    assert run_file.read_text() == "name: signs\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory"),
        ("{", "is not an endpoints file"),
        ('{"endpoints": 1}', "is not an endpoints file"),
        ('{"endpoints": [{"rewards": ["r"]}]}', "is not an endpoints file"),
        ('{"endpoints": []}', "no server in .* has r; start one with `retouch reward serve r`"),
        (
            '{"endpoints": [{"url": "http://a", "rewards": ["s"]}, {"url": "http://b", "rewards": ["q", "s"]}]}',
            r"""has r, but q, s; start one with .* \(a name .* needs --options '{"r": {"scorer": \.\.\.}}'\), or""",
        ),
        ('{"endpoints": [{"url": "http://u:pw@a", "rewards": ["r"]}]}', "holds a user, a password or a query"),
    ],
    ids=str,
)
def test_an_endpoints_file_that_does_not_help(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "endpoints.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"rewards\.r\.url: .*{message}") as refused:
        resolve_urls(str(file), "r")
    assert "pw" not in str(refused.value)
