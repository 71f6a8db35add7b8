"""Environments of rewards: the data files, the commands, and that the releases of each fit together."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from retouch.cli import app
from retouch.config import ConfigError
from retouch.files.disk import only_writer
from retouch.rewards import REWARDS
from retouch.rewards import environments as module
from retouch.rewards.environments import (
    Environment,
    environment_of,
    environments,
    make,
    own_dependencies,
    own_requirement,
    resolve,
    run_until_stopped,
)
from tests.command_line import retouch
from tests.rewards.fakes import until

NAMES = sorted(environments())

RESOLVER = "RETOUCH_TEST_RESOLVER"
"""Variable with a command that reads requirements and prints the releases that fit together."""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that are run; each is recorded, and a virtual environment appears where one is asked for."""
    commands: list[list[str]] = []

    def run(command: Sequence[str], problem: str) -> None:
        commands.append(list(command))
        if "--report" in command:
            found = [{"metadata": {"name": "torch", "version": "2.15.0"}}]
            Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": found}))

    monkeypatch.setattr(module, "_run", run)
    return commands


@pytest.mark.parametrize("name", NAMES)
def test_a_data_file_is_consistent(name: str) -> None:
    """Known rewards, and pins that satisfy the requirements and pin each package once."""
    environment = environments()[name]
    assert {*environment.rewards} <= {*REWARDS} and {*environment.start} - {"default"} <= {*environment.rewards}
    wanted = {one.name: one for one in map(Requirement, environment.requirements)}
    for pin in map(Requirement, environment.constraints):
        [release] = pin.specifier
        assert release.operator == "==" and wanted.get(pin.name, Requirement("x")).specifier.contains(release.version)
    assert "torchvision" not in wanted or {"torch", "torchvision"} <= {*environment.paired}
    for reward in environment.rewards:
        for words in environment.commands(reward, Path("e")):
            assert Path(words[0]).parent == Path.cwd() / "e" / "bin" and "{" not in "".join(words).replace('{"', "")


def test_the_commands_name_the_reward_and_the_devices() -> None:
    [words] = environments()["imscore"].commands("aesthetic", Path("/e"), "0,1", Path("ends.json"))
    told = "/e/bin/retouch reward serve aesthetic --port 8100 --devices 0,1 --endpoints ends.json"
    assert words == told.split()
    [words] = environments()["paddleocr"].commands("ocr", Path("/e"))
    assert json.loads(words[words.index("--options") + 1]) == {"ocr": {"engine": "paddleocr"}}
    assert words[-1] == "endpoints.json"


@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("paddleocr", "--devices=0", "--devices: given 0, but the server of ocr reads none; omit it; CUDA_VISIBLE"),
        ("openai_judge", "--endpoints=e.json", "--endpoints: given e.json, but the server of openai_judge reads none"),
        ("imscore", "--dry-run --start", "--start: given with --dry-run, which makes no environment"),
        ("imscore", "--dry-run --torch-index=x", "--torch-index: given with --dry-run"),
        ("imscore", "--dry-run --devices=1", "--devices: given with --dry-run"),
        ("imscore", "--dry-run --endpoints=e.json", "--endpoints: given with --dry-run"),
    ],
)
def test_an_option_that_nothing_reads(ran: list[list[str]], name: str, option: str, said: str) -> None:
    outcome = retouch("reward", "env", name, *option.split())
    assert outcome.code == 2 and said in outcome.err and not ran


def test_a_server_that_is_stopped_ends_in_its_own_time(tmp_path: Path) -> None:
    """It was killed a quarter of a second after the signal to the command."""
    server = "import signal, sys, time; from pathlib import Path; there = Path(sys.argv[1])\n"
    server += "signal.signal(15, lambda *_: (time.sleep(.6), there.with_name('ended').touch(), sys.exit()))\n"
    server += "there.touch(); time.sleep(60)"
    command = [sys.executable, "-c", server, str(tmp_path / "started")]

    def interrupt() -> None:
        until((tmp_path / "started").exists)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(command)
    waiting.join()
    assert (tmp_path / "ended").exists()


def test_a_reward_names_its_environment() -> None:
    assert environment_of("editscore")[0].name == "vllm" and environment_of("editscore")[1] == "editscore"
    assert environment_of("imscore")[1] == "imagereward"
    with pytest.raises(ConfigError, match="'seam', which needs no environment of its own; serve it with"):
        environment_of("seam")
    with pytest.raises(ConfigError, match="did you mean 'imscore'"):
        environment_of("imscor")


def test_an_environment_is_made_by_venv_and_pip(ran: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "e"
    make(environments()["imscore"], folder, "https://torch.example/cpu")
    venv, paired, rest = ran
    assert venv == [sys.executable, "-P", "-m", "venv", str(folder)]
    python = [str(folder / "bin" / "python"), "-P", "-m", "pip"]
    assert paired[:4] == rest[:4] == python
    assert paired[-4:] == ["--index-url", "https://torch.example/cpu", "torch>=2.6", "torchvision"]
    assert rest[-1] == own_requirement(["serve"]) and "-c" in rest and "imscore>=0.0.11,<0.1" in rest


def test_a_judge_server_has_no_retouch(ran: list[list[str]], tmp_path: Path) -> None:
    make(environments()["vllm"], tmp_path / "e")
    assert len(ran) == 2 and ran[1][-2:] == ["vllm>=0.12", "peft>=0.17"]


def test_a_folder_with_other_files_is_kept(ran: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match="exists and is no virtual environment; set --path"):
            make(environments()["imscore"], folder)
    assert not ran


def test_one_process_makes_an_environment_at_a_time(ran: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "e"
    folder.mkdir()
    with only_writer(folder), pytest.raises(ConfigError, match=r"another process .* choose another --path"):
        make(environments()["imscore"], folder)
    assert not ran
    make(environments()["imscore"], folder)  # an empty folder, as of one that was killed early
    assert ran


def test_a_dry_run_installs_nothing(ran: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_PIP", (1, 0))
    done = CliRunner().invoke(app, ["reward", "env", "imagereward", "--dry-run"])
    assert done.exit_code == 0, done.output
    assert "torch==2.15.0" in done.output and "1 packages fit together; nothing was installed" in done.output
    assert not any(tmp_path.iterdir()) and all("--dry-run" in command for command in ran)
    [command] = ran
    assert {"--ignore-installed", "transformers>=4.53,<5", "fastapi>=0.115"} <= {*command}


def test_an_old_pip_which_would_download_is_replaced(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIP", (99, 0))
    resolve(environments()["imscore"])
    venv, update, dry = ran
    assert venv[1:4] == ["-P", "-m", "venv"] and update[-1] == "pip>=24.1" and dry[0] == update[0] != sys.executable


def test_the_commands_are_printed(ran: list[list[str]], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reward", "env", "unified_reward", "--path", str(tmp_path / "e")])
    assert done.exit_code == 0 and f"{tmp_path}/e/bin/vllm serve CodeGoat24/UnifiedReward" in done.output
    assert "address" in done.output


def test_requirements_of_this_package_come_from_its_metadata() -> None:
    found = own_dependencies(["serve"])
    assert any(one.startswith("uvicorn") for one in found) and any(one.startswith("numpy") for one in found)
    assert not any(one.startswith("torch") for one in found)


def test_a_failure_has_the_last_error_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('ERROR: no matching distribution\\nmore')"
    with pytest.raises(ConfigError, match="it failed: no matching distribution"):
        module._run([sys.executable, "-c", code], "it failed")


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_the_releases_of_an_environment_fit_together(name: str) -> None:
    """pip resolves it from the metadata of the configured index; no package is downloaded (8 to 18 s of CPU time)."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    asked = [sys.executable, "-m", "pip", "index", "versions", "packaging", "--retries", "0", "--timeout", "10"]
    if subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    require_fit(environments()[name])


@pytest.mark.skipif(RESOLVER not in os.environ, reason=f"{RESOLVER} is not set, as .ci/run does")
@pytest.mark.parametrize("name", NAMES)
def test_they_fit_together_by_the_resolver_of_ci(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv needs a thirtieth of pip's CPU time for the same requirements and limits."""

    def run(command: Sequence[str], problem: str) -> None:
        limits, wanted = command.index("-c") + 1, command[command.index("-c") + 2 :]
        words = [*shlex.split(os.environ[RESOLVER]), "--no-header", "--no-annotate", "-c", command[limits], "-"]
        done = subprocess.run(words, input="\n".join(wanted), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = [Requirement(line) for line in done.stdout.splitlines()]
        report = [{"metadata": {"name": one.name, "version": str(one.specifier)[2:]}} for one in found]
        Path(command[command.index("--report") + 1]).write_text(json.dumps({"install": report}))

    monkeypatch.setattr(module, "_PIP", (0, 0))
    monkeypatch.setattr(module, "_run", run)
    require_fit(environments()[name])


def require_fit(environment: Environment) -> None:
    found = resolve(environment)
    pins = [Requirement(one) for one in environment.constraints]
    assert all(pin.specifier.contains(found[pin.name]) for pin in pins if pin.name in found)
    assert {one.name for one in map(Requirement, environment.requirements)} <= {*found}


def test_pip_resolves_without_an_index_what_a_folder_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as it is, and its report."""
    for name, release, needs in (("one", "1.0", "two<3"), ("two", "2.5", ""), ("two", "3.0", "")):
        with zipfile.ZipFile(tmp_path / f"{name}-{release}-py3-none-any.whl", "w") as wheel:
            about = f"{name}-{release}.dist-info"
            needed = f"Requires-Dist: {needs}\n" if needs else ""
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n{needed}")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    environment = Environment("e", "", [], [], ["one"], ["one==1.0"], [], {})
    assert resolve(environment) == {"one": "1.0", "two": "2.5"}


def test_programs_of_the_working_directory_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("venv", "pip"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(3)\n")
    real, ran = module._run, list[Sequence[str]]()

    def run(command: Sequence[str], problem: str) -> None:
        """The real interpreter and module, asked for its help."""
        ran.append(command)
        real([sys.executable, *command[1 : command.index("-m") + 2], "--help"], problem)

    monkeypatch.setattr(module, "_run", run)
    make(environments()["vllm"], Path("--help"))
    assert len(ran) == 2 and not (tmp_path / "ran").exists()
    assert ran[0][-1] == str(tmp_path / "--help")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["sh", "-c", r"printf '\377bad\n' >&2; exit 3"], "what: \ufffdbad"),
        (["sh", "-c", "yes out | head -c 50000000 >&2; echo 'ERROR: no such package' >&2; exit 3"],
         "what: no such package"),
        (["sh", "-c", "kill -9 $$"], "what: exit code -9"),
        (["/nothing/python"], "what: /nothing/python: no such file or directory"),
        (["/"], "what: /: permission denied"),
    ],
)  # fmt: skip
def test_a_program_that_fails_is_one_line(command: list[str], told: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as raised:
            module._run(command, "what")
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert str(raised.value) == told
