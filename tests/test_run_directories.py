"""Somebody else's run directory is data: nothing that its run file names is imported, asked or read without consent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import retouch as package
from retouch.cli import app
from retouch.config import ConfigError, dump_run, load_run, parse_run
from retouch.config.trust import consent, consented, in_run_directory, named
from retouch.engine.saved import declare_complete
from retouch.observe.watch import open_server
from retouch.process.machine import process_mark
from retouch.registry import import_from_here
from retouch.rewards.client.cache import ScoreCache
from retouch.rewards.server import launch
from retouch.rewards.server.launch import LocalServer
from tests import forked
from tests.command_line import Outcome, retouch
from tests.conftest import small_run
from tests.rewards.openai_server import KEY, OpenAIServer
from tests.test_commands import leaves

Finished = Callable[[str], Path]

ELSEWHERE = "127.0.0.2"
"""An address that is not one of the loopback's names, and is on this machine."""

SECRETS = {"RETOUCH_REWARD_TOKEN": "rt-planted-51c2", "OPENAI_API_KEY": KEY, "HF_TOKEN": "hf_planted51c2"}

MODULE = """
from pathlib import Path
Path({marker!r}).write_text("imported")
def score(items): return [0.5 for _ in items]
"""


@contextmanager
def recorder() -> Iterator[tuple[str, list[str]]]:
    """A server elsewhere -> its address, and every request with its headers."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.command} {self.path} {dict(self.headers)}")
            self.send_error(404)

        do_POST = do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer((ELSEWHERE, 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://{ELSEWHERE}:{server.server_port}", seen
    server.shutdown()
    server.server_close()


class Copy:
    """A run directory that came from somebody, with a module in it."""

    def __init__(self, path: Path, address: str, seen: list[str]) -> None:
        self.path, self.address, self.seen = path, address, seen
        self.marker = path / "it-was-imported"
        (path / "evil_of_the_run.py").write_text(MODULE.format(marker=str(self.marker)), encoding="utf-8")

    @property
    def config(self) -> dict[str, Any]:
        return yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))

    def change(self, **sections: Any) -> None:
        (self.path / "config.yaml").write_text(yaml.safe_dump({**self.config, **sections}), encoding="utf-8")

    def untouched(self) -> bool:
        return not self.marker.exists() and self.seen == []


@pytest.fixture
def copied(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    """The copy of a run, in which the command is started with secrets in the environment."""
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = Path(shutil.copytree(finished("lora"), tmp_path / "theirs"))
    monkeypatch.chdir(path)
    with recorder() as (address, seen):
        yield Copy(path, address, seen)


def everything(copied: Copy) -> dict[str, Any]:
    """Sections with every kind of option that names code or a host."""
    served = {"endpoints": [{"url": copied.address, "rewards": ["seam"]}]}
    (copied.path / "endpoints.json").write_text(json.dumps(served), encoding="utf-8")
    judge = {"scorer": "openai_judge", "model": "judge"}
    return {
        "plugins": ["evil_of_the_run"],
        "rewards": {
            "own": {"scorer": "fn", "fn": "evil_of_the_run:score"},
            "preservation": {"url": [copied.address, "http://127.0.0.1:9"]},
            "seam": {"url": str(copied.path / "endpoints.json")},
            "judge": {**judge, "address": f"{copied.address}/v1"},
            "paid": judge,
            "spying": {"url": f"{copied.address}/${{OPENAI_API_KEY}}", "scorer": "jpeg_size"},
            "geneval": {"detector_url": copied.address},
            "mmmg": {"model": "judge", "address": "http://127.0.0.1:9/v1", "readability": "evil_of_the_run:score"},
        },
    }


NAMED = (
    "plugins", "rewards.own.fn", "rewards.preservation.url", "rewards.seam.url", "rewards.judge.address",
    "rewards.paid.address", "rewards.spying.url", "rewards.geneval.detector_url", "rewards.mmmg.readability",
)  # fmt: skip

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "sample": ("sample", "--run", "{run}", "--data", "{data}", "--out", "{out}"),
    "sample with its file": ("sample", "--config", "{run}/config.yaml", "--data", "{data}", "--out", "{out}"),
    "demo-ui": ("demo-ui", "--run", "{run}"),
    "eval": ("eval", "--run", "{run}"),
    "eval of two": ("eval", "--run", "{finished}", "--run", "{run}"),
    "eval with its file": ("eval", "--config", "config.yaml"),
    "eval --benchmark": ("eval", "--run", "{run}", "--benchmark", "calligrapher_self", "--path", "{data}"),
    "check": ("check", "{run}/config.yaml"),
    "doctor": ("doctor", "{run}/config.yaml"),
    "data validate": ("data", "validate", "{run}/config.yaml"),
    "data precompute": ("data", "precompute", "{run}/config.yaml", "--out", "{out}"),
    "label": ("label", "{run}", "--votes", "{votes}"),
    "reward fit": ("reward", "fit", "{votes}", "--config", "{run}/config.yaml"),
}

WITHOUT_CONSENT = {
    "the user's own run file": ("train",),
    "nothing of what a run names": ("report", "watch", "compare", "export"),
    "no run": (
        "init", "reward serve", "reward score", "reward probe", "reward env", "data split", "data synth", "data edits",
        "tiny build",
    ),
}  # fmt: skip
"""What the other commands use -> these."""


def test_every_command_that_takes_a_run_is_tried() -> None:
    """And has the option that the message names."""
    every = dict(leaves(typer.main.get_command(app)))
    without = [name for names in WITHOUT_CONSENT.values() for name in names]
    tried = {
        name for name in every for line in COMMANDS.values() if f"{name} " in f"{' '.join(line)} "[: len(name) + 1]
    }
    assert sorted([*tried, *without]) == sorted(every)
    trusting = {name for name, one in every.items() if any("--trust" in option.opts for option in one.params)}
    assert trusting - {"export"} == tried  # an export has plug-ins of a family alone


def refusal(outcome: Outcome) -> str:
    assert outcome.code == 2 and "Traceback" not in outcome.err, outcome.err
    return outcome.err.splitlines()[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_uses_what_a_copied_run_names(
    command: str, copied: Copy, signs: Path, finished: Finished, tmp_path: Path
) -> None:
    copied.change(**everything(copied))
    places = {"run": copied.path, "data": signs / "held_out", "out": tmp_path / "out", "finished": finished("lora")}
    places["votes"] = tmp_path / "votes.jsonl"
    line = refusal(retouch(*(part.format(**places) for part in COMMANDS[command])))
    assert all(f"{key}: " in line for key in NAMED), line
    assert line.endswith("; add --trust (Python: trust=True) if you trust whoever wrote it")
    assert not [secret for secret in SECRETS.values() if secret in line]
    assert copied.untouched() and not (tmp_path / "out").exists()


def test_neither_does_the_python_interface(copied: Copy) -> None:
    copied.change(**everything(copied))
    with pytest.raises(ConfigError, match="add --trust"):
        package.load(copied.path)
    assert copied.untouched()


@pytest.mark.parametrize("key", NAMED)
def test_each_option_alone_is_refused(key: str, copied: Copy) -> None:
    sections = everything(copied)
    name = key.split(".")[1] if "." in key else None
    rewards = {name: sections["rewards"][name]} if name else {"seam": {}}
    copied.change(rewards=rewards, **({} if name else {"plugins": sections["plugins"]}))
    line = refusal(retouch("check", "config.yaml"))
    assert f"{key}: " in line and sum(f"{other}: " in line for other in NAMED) == 1, line
    assert copied.untouched()


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"name": "${HOME}"}, "name: '${HOME}'"),
        ({"rewards": {"openai_judge": {"model": "x"}}}, "rewards.openai_judge.address: 'https://api.openai.com/v1'"),
        ({"rewards": {"seam": {"url": "http://localhost@evil.example"}}}, "'http://localhost@evil.example'"),
        ({"rewards": {"seam": {"url": "http://localhost.evil.example"}}}, "'http://localhost.evil.example'"),
        ({"rewards": {"fn": {"fn": "os:system"}}}, "rewards.fn.fn: 'os:system'"),
        ({"algorithm": {"name": "grpo", "advantages": "os:system"}}, "algorithm.advantages: 'os:system'"),
        ({"rewards": {"fn": {"fn": "retouch.tiny.edits:other"}}}, "rewards.fn.fn: 'retouch.tiny.edits:other'"),
        ({"plugins": ["a", "b"], "rewards": {"own_of_b": {}}}, "plugins: 'a'; plugins: 'b'; expected"),
    ],
)
def test_what_looks_harmless_is_refused(sections: dict[str, Any], told: str, copied: Copy) -> None:
    """A variable of the environment, a default, a host that begins as this machine's, and a component that only the
    plug-in knows."""
    copied.change(**sections)
    assert told in refusal(retouch("check", "config.yaml"))


def test_what_stays_on_this_machine_needs_no_consent(copied: Copy, run_file: Callable[..., dict[str, Any]]) -> None:
    (copied.path / "here.json").write_text(
        json.dumps({"endpoints": [{"url": "http://localhost:9", "rewards": ["ocr"]}]}), encoding="utf-8"
    )
    rewards = {
        "seam": {"url": "http://127.0.0.1:9"},
        "preservation": {"url": "auto"},
        "ocr": {"url": "here.json"},
        "jpeg_size": {"url": "gone.json"},
        "served": {"scorer": "openai_judge", "url": "http://[::1]:9"},
        "judge": {"scorer": "openai_judge", "model": "judge", "address": "http://localhost:9/v1"},
        "colour": {"scorer": "fn", "fn": "retouch.tiny.edits:recoloured"},
    }
    assert set(parse_run(run_file(rewards=rewards), trust=False).rewards) == set(rewards)


def test_a_value_that_the_user_names_needs_no_consent(copied: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the command line, or in the variable of its kind; not below a key that only looks like it."""
    copied.change(rewards={"judge": {"scorer": "openai_judge", "model": "x", "address": "http://judge.lan/v1"}})
    address = "rewards.judge.address=http://judge.lan/v1"
    assert retouch("check", "config.yaml").code == 2
    assert retouch("check", "config.yaml", address).code == 0
    monkeypatch.setenv("JUDGE_URL", "http://judge.lan/v1")
    assert retouch("check", "config.yaml").code == 0
    copied.change(rewards={"ocr": {}, "ocr.evil": {"scorer": "seam", "url": "http://judge.lan"}})
    assert "rewards.ocr.evil.url" in refusal(retouch("check", "config.yaml", "rewards.ocr={weight: 0.5}"))


def test_plug_ins_of_the_environment_are_taken(copied: Copy, tmp_path: Path) -> None:
    (copied.path / "harmless_of_the_run.py").write_text("", encoding="utf-8")
    copied.change(plugins=["harmless_of_the_run"])
    command = [sys.executable, "-m", "retouch", "check", str(copied.path / "config.yaml")]
    assert forked.run(command, cwd=copied.path).returncode == 2
    done = forked.run(command, cwd=copied.path, env={**os.environ, "RETOUCH_PLUGINS": "harmless_of_the_run"})
    assert done.returncode == 0, done.stderr


def test_a_run_file_of_the_user_is_the_users(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Also under the name config.yaml, until there is a run beside it."""
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(run_file(rewards={"seam": {"url": "http://gpu.lan:8000"}})), encoding="utf-8")
    assert not in_run_directory(file) and retouch("check", file).code == 0
    (tmp_path / "metrics.jsonl").touch()
    assert in_run_directory(file) and retouch("check", file).code == 2
    (tmp_path / "run.yaml").symlink_to(file)
    assert retouch("check", tmp_path / "run.yaml").code == 2
    assert retouch("check", file, "--trust").code == 0
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/run.yaml").symlink_to(file)
    assert retouch("check", tmp_path / "elsewhere/run.yaml").code == 2
    (tmp_path / "hidden").mkdir()  # a directory given as a run is one, whatever it holds
    shutil.copy(file, tmp_path / "hidden/other.yaml")
    (tmp_path / "hidden/config.yaml").symlink_to("other.yaml")
    assert "gpu.lan" in refusal(retouch("eval", "--run", tmp_path / "hidden", "--weights", tmp_path))


# --- consent ---


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State folder of the user who trains."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def judged(signs: Path, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, OpenAIServer]]:
    """A run that was trained with a function of the user and a judge elsewhere, and the judge."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "mine_of_the_user.py").write_text(MODULE.format(marker=str(folder / "imported")), encoding="utf-8")
    with OpenAIServer(host=ELSEWHERE) as judge:
        run = small_run(
            signs,
            folder / "runs",
            training__max_steps=1,
            rewards={
                "mine": {"scorer": "fn", "fn": "mine_of_the_user:score"},
                "judge": {"scorer": "openai_judge", "model": "judge", "address": judge.url},
            },
        )
        (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
        done = command(home, folder, "train", "run.yaml")
        assert done.returncode == 0, done.stderr
        yield folder / "runs/t", judge


def command(home: Path, cwd: Path, *arguments: object) -> Any:
    """A process of the user, started in the folder of the module."""
    environment = {**os.environ, **SECRETS, "XDG_STATE_HOME": str(home)}
    environment.pop("RETOUCH_PLUGINS", None)
    return forked.run([sys.executable, "-m", "retouch", *map(str, arguments)], env=environment, cwd=cwd, timeout=300)


def test_training_consents_to_its_own_directory_and_to_no_copy(
    judged: tuple[Path, OpenAIServer], home: Path, tmp_path: Path
) -> None:
    """In place without a flag; a copy, a moved and a changed run are refused, and used with --trust."""
    run, judge = judged
    folder = run.parents[1]
    asked = len(judge.asked)
    done = command(home, folder, "eval", "--run", run, "--json")
    assert done.returncode == 0 and len(judge.asked) > asked, done.stderr
    assert json.loads(done.stdout)["means"]["after RL"]["mine"] == 0.5
    link = tmp_path / "link"
    link.symlink_to(run)
    assert command(home, folder, "check", link / "config.yaml").returncode == 0

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    changed = Path(shutil.copytree(run.parents[0], tmp_path / "changed")) / "t"
    for place in (copy, changed):
        asked, marker = len(judge.asked), folder / "imported"
        marker.unlink(missing_ok=True)
        done = command(home, folder, "eval", "--run", place)
        assert done.returncode == 2 and "rewards.mine.fn: 'mine_of_the_user:score'" in done.stderr, done.stderr
        assert len(judge.asked) == asked and not marker.exists()
    done = command(home, folder, "eval", "--run", copy, "--trust", "--json")
    assert done.returncode == 0 and len(judge.asked) > asked and marker.exists(), done.stderr
    assert command(home, folder, "check", copy / "config.yaml").returncode == 2  # --trust is of one command
    assert command(home, folder, "check", copy / "config.yaml", "--trust").returncode == 0
    assert command(tmp_path / "another user", folder, "check", run / "config.yaml").returncode == 2


def test_consent_is_bound_to_the_content(judged: tuple[Path, OpenAIServer], home: Path) -> None:
    run, _ = judged
    file = run / "config.yaml"
    before = file.read_bytes()
    try:
        file.write_bytes(before + b"# changed\n")
        assert command(home, run.parents[1], "check", file).returncode == 2
    finally:
        file.write_bytes(before)
    assert command(home, run.parents[1], "check", file).returncode == 0


def test_consent_is_kept_for_the_user_alone(
    judged: tuple[Path, OpenAIServer], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = judged
    content = (run / "config.yaml").read_bytes()
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    [record] = (home / "retouch/trusted").iterdir()
    assert record.stat().st_mode & 0o777 == 0o600 and record.parent.stat().st_mode & 0o077 == 0
    assert consented(run, content) and consented(run / "../t", content)
    record.chmod(0o666)  # somebody else may have made it
    assert not consented(run, content)
    record.chmod(0o600)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert not consented(run, content)


def test_consent_is_kept_of_what_the_environment_names_while_training(
    run_file: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later commands may run without the variable."""
    monkeypatch.setenv("RETOUCH_PLUGINS", "colorsys")
    run = parse_run(run_file(plugins=["colorsys"]))
    assert not named(run)
    consent(tmp_path, b"its run file", run)
    monkeypatch.delenv("RETOUCH_PLUGINS")
    assert named(run) and consented(tmp_path, b"its run file")


def test_where_consent_cannot_be_kept_a_run_trains_and_says_so(
    run_file: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Python interface opens the run that it trained all the same."""
    (tmp_path / "no-folder").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "no-folder"))
    with OpenAIServer(host=ELSEWHERE) as judge:
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        rewards = {"openai_judge": {"model": "judge", "address": judge.url}}
        trained = package.train(run_file(rewards=rewards, training__max_steps=1))
        assert trained.evaluate()["means"]["after RL"]["openai_judge"] >= 0
    told = (trained.path / "log.txt").read_text(encoding="utf-8")
    assert told.count("names code or hosts (rewards.openai_judge.address), and the consent to use them") == 1
    with pytest.raises(ConfigError, match="add --trust"):
        package.load(trained.path)
    assert package.load(trained.path, trust=True).config.rewards


# --- commands that import nothing ---


def test_logs_are_compared_and_weights_exported_without_the_code_of_the_run(copied: Copy, tmp_path: Path) -> None:
    """Rewards, a data format and an algorithm that only the plug-in knows."""
    config = copied.config
    copied.change(
        plugins=["evil_of_the_run"],
        rewards={**everything(copied)["rewards"], "theirs": {"scorer": "theirs", "strange": 1}},
        data={"format": "theirs", "path": "${HOME}"},
        algorithm={**config["algorithm"], "name": "theirs"},
    )
    other = shutil.copytree(copied.path, tmp_path / "other")
    for arguments in (("report", copied.path), ("compare", copied.path, other, "--out", tmp_path / "c.html")):
        outcome = retouch(*arguments)
        assert outcome.code == 0, outcome.err
    open_server(copied.path, 0).server_close()  # it has made the page of `watch`
    assert os.environ["HOME"] not in (tmp_path / "c.html").read_text(encoding="utf-8")
    folder = copied.path / "checkpoints/step-000004"
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    state["config"] = (copied.path / "config.yaml").read_text(encoding="utf-8")
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    declare_complete(folder, 4, pinned=True)
    outcome = retouch("export", copied.path, "--to", "diffusers-lora", "--out", tmp_path / "exported")
    assert outcome.code == 0 and list((tmp_path / "exported").iterdir()), outcome.err
    assert copied.untouched()


def test_an_export_names_the_variable_for_the_family_of_a_plug_in(copied: Copy) -> None:
    folder = copied.path / "checkpoints/step-000004"
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    state["config"] = state["config"].replace("family: flux_fill", "family: theirs")
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    declare_complete(folder, 4, pinned=True)
    line = refusal(retouch("export", copied.path, "--to", "diffusers-lora"))
    assert "model.family: given 'theirs'; known: " in line and "to RETOUCH_PLUGINS" in line


def test_an_export_imports_the_plug_ins_of_the_users_own_run_for_its_family(copied: Copy, tmp_path: Path) -> None:
    """They are in the run file already, which the message would have the user do."""
    folder, marker = copied.path / "checkpoints/step-000004", tmp_path / "imported"
    (tmp_path / "family_of_the_user.py").write_text(MODULE.format(marker=str(marker)), encoding="utf-8")
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    text = state["config"].replace("family: flux_fill", "family: theirs")
    text = text.replace("plugins: []", "plugins: [family_of_the_user]")
    (folder / "state.json").write_text(json.dumps({**state, "config": text}), encoding="utf-8")
    declare_complete(folder, 4, pinned=True)
    command = [sys.executable, "-m", "retouch", "export", str(copied.path), "--to", "diffusers-lora"]
    refused = forked.run(command, cwd=tmp_path).stderr
    assert "given 'theirs'" in refused and not marker.exists()
    assert "the run names plug-ins (['family_of_the_user']): add --trust (Python: trust=True)" in refused
    assert "given 'theirs'" in forked.run([*command, "--trust"], cwd=tmp_path).stderr and marker.exists()
    marker.unlink()
    consent(copied.path, text.encode(), parse_run(copied.config))
    assert "given 'theirs'" in forked.run(command, cwd=tmp_path).stderr and marker.exists()  # it registers none


def test_the_run_directory_is_not_searched_for_what_is_installed(
    copied: Copy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in of the user, or a function of this package: what is imported later would be found there, too."""
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "plug_in_of_the_user.py").write_text("", encoding="utf-8")
    (copied.path / "plug_in_of_the_user.py").write_text(MODULE.format(marker=str(copied.marker)), encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(installed), *(place for place in sys.path if place)])
    for module in ("plug_in_of_the_user", "retouch.tiny.edits"):
        import_from_here(module)
    del sys.modules["plug_in_of_the_user"]
    assert str(copied.path) not in sys.path and copied.untouched()


@pytest.mark.full
def test_modules_in_a_run_directory_are_not_found_by_libraries(copied: Copy, signs: Path, tmp_path: Path) -> None:
    """A library that looks for an optional package does not find a file of the working directory, neither where the
    scorer is a function of this package; and an installed plug-in is the installed one."""
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "plug_in_of_the_user.py").write_text("", encoding="utf-8")
    looked_for = ("bitsandbytes", "sentencepiece", "xformers", "torchvision", "flash_attn", "gguf", "wandb")
    for name in (*looked_for, "plug_in_of_the_user"):
        (copied.path / f"{name}.py").write_text(MODULE.format(marker=str(copied.marker)), encoding="utf-8")
    colour = {"scorer": "fn", "fn": "retouch.tiny.edits:recoloured", "role": "gold"}
    copied.change(rewards={"preservation": {}, "colour": colour})
    code = "import atexit, os, sys; from retouch.cli import main; "
    code += "atexit.register(lambda: print('searched', os.getcwd() in sys.path)); main()"
    path = os.pathsep.join([str(Path(package.__file__).parents[1]), str(installed)])
    environment = {**os.environ, "RETOUCH_PLUGINS": "plug_in_of_the_user", "PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", code, "eval", "--run", ".", "--data", str(signs / "held_out")]
    done = subprocess.run(command, env=environment, cwd=copied.path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("searched False\n") and copied.untouched(), done.stdout


# --- links ---

WRITTEN = (
    "config.yaml", "config-000004.yaml", "begun_from", "environment.json", "metrics.jsonl", "log.txt", "run_id",
    "report.html", ".lock",
)  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_is_written_through_a_link(name: str, copied: Copy, tmp_path: Path) -> None:
    """A run that goes on in a copied directory names the link; the file that it leads to stays as it is."""
    target = tmp_path / "of-the-user"
    place = copied.path / name
    target.write_bytes(place.read_bytes() if place.is_file() else b"precious\n")
    before = target.read_bytes()
    run = tmp_path / "run.yaml"
    run.write_text(dump_run(load_run(place.parent / "config.yaml", ["training.max_steps=5"])), encoding="utf-8")
    place.unlink(missing_ok=True)
    place.symlink_to(target)
    overrides = [f"logging.dir={tmp_path}", "name=theirs", "resume=auto"]
    line = refusal(retouch("train", run, *overrides))
    assert f"{place} is not a file; delete it" in line, line
    assert target.read_bytes() == before


def files(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


def test_every_other_file_of_a_run_replaces_a_link(copied: Copy, tmp_path: Path) -> None:
    """Of each file that a run writes when it goes on, those that are not there yet included."""
    before = Path(shutil.copytree(copied.path, tmp_path / "before"))
    run = tmp_path / "run.yaml"
    overrides = ["training.max_steps=5", "training.eval_every=5"]
    run.write_text(dump_run(load_run(copied.path / "config.yaml", overrides)), encoding="utf-8")

    def go_on(folder: Path) -> None:
        assert retouch("train", run, f"logging.dir={folder.parent}", f"name={folder.name}", "resume=auto").code == 0

    go_on(copied.path)
    complete = "checkpoints/step-000005/complete.json"  # that of somebody makes a damaged checkpoint, which is refused
    assert {complete, "images/step-000005/evaluation.png"} <= files(copied.path)
    targets: dict[Path, bytes] = {}
    for number, name in enumerate(sorted(files(copied.path) - {*WRITTEN, complete})):
        place, target = before / name, tmp_path / "of-the-user" / str(number)
        place.parent.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(place.read_bytes() if place.is_file() else b"precious")
        targets[target] = target.read_bytes()
        place.unlink(missing_ok=True)
        place.symlink_to(target)
    go_on(before)
    assert len(targets) > 20 and [path for path, content in targets.items() if path.read_bytes() != content] == []


@pytest.mark.parametrize("name", ["rewards.sqlite", "rewards.sqlite-wal", "reward-server.log"])
def test_what_rewards_write_into_a_run_refuses_a_link(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of scores, and the log of the server that a run starts."""
    monkeypatch.setattr(launch, "_listen", lambda *_: sys.stdout)  # a handle
    (tmp_path / name).symlink_to(tmp_path / "of-the-user")
    with pytest.raises(ConfigError, match=f"{name} is not a file; delete it"):
        LocalServer({}, tmp_path / name) if name.endswith(".log") else ScoreCache(tmp_path / "rewards.sqlite")
    assert not (tmp_path / "of-the-user").exists()


def test_reports_replace_links(copied: Copy, tmp_path: Path) -> None:
    target = tmp_path / "of-the-user"
    target.write_text("precious")
    for name in ("report.html", f".report.html.{process_mark()}.tmp"):
        (copied.path / name).unlink(missing_ok=True)
        (copied.path / name).symlink_to(target)
    assert retouch("report", copied.path).code == 0
    assert target.read_text() == "precious" and not (copied.path / "report.html").is_symlink()
