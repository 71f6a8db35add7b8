"""`example:NAME` and `retouch init --example`: the published files, in a clone and in a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from retouch.config import ConfigError, load_run, published
from retouch.config.load import read_yaml
from retouch.config.published import TREES, published_files, resolved
from tests.command_line import retouch
from tests.docs.pages import REPOSITORY

RUN_FILES = {
    name: file
    for name, file in published_files().items()
    if not name.startswith(("accelerate/", "reproduce/evaluation/", "cluster/", "constraints", "demo", "python_api"))
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, in which the paths of the repository lead nowhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL_PATH", "DATA_PATH"):
        monkeypatch.setenv(name, "somewhere")


def test_a_wheel_has_the_files_in_the_folders_of_the_repository() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["force-include"] == {tree: f"retouch/published/{tree}" for tree in TREES}
    assert all((REPOSITORY / tree).exists() for tree in TREES)
    about = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert about["license-files"] == ["LICENSE", "NOTICE"]  # section 4 d of the license: NOTICE goes with every copy
    assert {tree.partition("/")[0] for tree in TREES} <= {*build["targets"]["sdist"]["include"]}


def test_a_run_file_has_the_same_name_everywhere() -> None:
    assert load_run("example:sd_inpaint_grpo") == load_run(REPOSITORY / "configs/sd_inpaint_grpo.yaml")
    assert resolved("configs/sd_inpaint_grpo.yaml") == Path("configs/sd_inpaint_grpo.yaml")
    checked = retouch("check", "example:tiny/flux_fill_grpo_lora")
    assert checked.code == 0 and checked.out.startswith("example:tiny/flux_fill_grpo_lora: ok"), checked.err


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("check example:flux_fil_grpo", "example:flux_fil_grpo; no such example; did you mean 'flux_fill_grpo'?"),
        ("train example:a", "example:a; no such example; `retouch init --example list` prints the names"),
        ("check configs/flux_fill_grpo.yaml", "no such run file; example:flux_fill_grpo is published"),
        ("sample --config example:no --out a", "example:no; no such example; `retouch init --example list`"),
        ("eval --config example:sd3_grpo --weights example:no", "--weights: given example:no; no such file or folder"),
        ("sample --run example:sd3_grpo --out a", "--run: given example:sd3_grpo; no such file or folder"),
        ("eval --benchmark example:no --config example:sd3_grpo --path .", "example:no; no such example"),
        ("check example:sd3_grpo --memory --accelerate example:no", "example:no; no such example"),
        ("data validate example:no", "example:no; no such example"),
        ("data precompute example:no --out a", "example:no; no such example"),
        ("doctor example:no", "example:no; no such example"),
        ("init --example no", "--example: given 'no'; no such example"),
    ],
)
def test_every_command_that_takes_a_file_takes_an_example(command: str, told: str) -> None:
    outcome = retouch(*command.split())
    assert outcome.code == 2 and told in outcome.err, outcome.err


def test_every_example_is_listed_with_its_title() -> None:
    lines = retouch("init", "--example", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == [*published_files()]
    assert all(len(line) > 50 or line.startswith("accelerate/gpu1 ") for line in lines)
    assert any("retouch from Python: Trains a tiny FLUX.1-Fill to write text" in line for line in lines)
    assert {"flux_fill_grpo", "tiny/flux_fill_grpo", "accelerate/gpu8", "constraints", "cluster/slurm"} <= {
        *published_files()
    }


def test_a_written_example_is_the_same_run() -> None:
    """Also where it extends a file of its folder or of another, which is not beside the copy."""
    extending = [name for name, file in RUN_FILES.items() if "\nextends: " in file.read_text(encoding="utf-8")]
    assert {"flux2_klein_grpo", "tiny/flux_fill_grpo_lora", "sd3_nft"} <= {*extending}
    for name in ("sd_inpaint_grpo", *extending):
        copy = Path("copies") / f"{name}.yaml"
        written = published.write_example(name, copy)
        assert written == [f"{copy}: written", f"next: retouch check {copy}; retouch train {copy}"]
        assert read_yaml(copy) == read_yaml(RUN_FILES[name]), name


def test_an_example_is_written_beside_nothing_of_its_name(tmp_path: Path) -> None:
    written = retouch("init", "--example", "tiny/flux_fill_grpo_lora")
    assert written.code == 0 and [file.name for file in tmp_path.iterdir()] == ["flux_fill_grpo_lora.yaml"], written.err
    assert "extends: example:tiny/flux_fill_grpo\n" in Path("flux_fill_grpo_lora.yaml").read_text(encoding="utf-8")
    again = retouch("init", "--example", "tiny/flux_fill_grpo_lora")
    assert again.code == 2 and "--out: flux_fill_grpo_lora.yaml exists; set --out to another path" in again.err


def test_the_versions_of_the_tests_are_written() -> None:
    assert retouch("init", "--example", "constraints", "--out", "versions.txt").code == 0
    assert Path("versions.txt").read_text() == (REPOSITORY / "constraints.txt").read_text()


def test_all_of_them_are_the_folders_that_the_pages_name(tmp_path: Path) -> None:
    assert retouch("init", "--example", "all", "--out", "own").code == 0
    assert load_run("own/configs/flux2_klein_grpo.yaml") == load_run("example:flux2_klein_grpo")
    launcher = subprocess.run(["own/scripts/train_grpo.sh", "--dry-run"], capture_output=True, text=True, timeout=60)
    assert launcher.returncode == 0 and launcher.stdout.startswith("retouch train configs/flux_fill"), launcher.stderr
    assert (tmp_path / "own/configs/accelerate/gpu8.yaml").is_file()


def test_all_of_them_are_written_around_those_that_are_there(tmp_path: Path) -> None:
    """The sequence of the tutorial: the versions first, then all; and again, or after one was deleted."""
    assert retouch("init", "--example", "constraints").code == 0
    first = retouch("init", "--example", "all")
    assert first.code == 0 and "constraints.txt: there already\n" in first.out and "configs: written" in first.out
    again = retouch("init", "--example", "all")
    assert (again.code, again.out) == (0, "".join(f"{tree}: there already\n" for tree in TREES)), again.err
    (tmp_path / "configs/sd3_grpo.yaml").unlink()
    (tmp_path / "constraints.txt").write_text("torch==2.0\n", encoding="utf-8")
    refused = retouch("init", "--example", "all")
    assert refused.code == 2 and "--out: constraints.txt exists and differs from the published one; set" in refused.err
    assert not (tmp_path / "configs/sd3_grpo.yaml").exists()  # nothing is written before all can be
    Path("other").mkdir()
    Path("other/scripts").write_text("", encoding="utf-8")
    assert "--out: other/scripts is no folder" in retouch("init", "--example", "all", "--out", "other").err
    assert [file.name for file in Path("other").iterdir()] == ["scripts"]


def test_own_run_files_extend_an_example() -> None:
    Path("mine.yaml").write_text("extends: example:sd_inpaint_grpo\nname: mine\n", encoding="utf-8")
    assert load_run("mine.yaml").optimizer == load_run("example:sd_inpaint_grpo").optimizer
    Path("mine.yaml").write_text("extends: example:sd3_grp\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"^mine\.yaml: extends: given 'example:sd3_grp'; no such example; did you mean"
    ):
        load_run("mine.yaml")


@pytest.mark.full
def test_the_built_wheel_has_them(tmp_path: Path) -> None:
    """And finds them in its own folder: nothing of the repository is on the path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    [wheel] = (tmp_path / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    listed = subprocess.run(
        [sys.executable, "-m", "retouch", "init", "--example", "list"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [*published_files()], listed.stderr
