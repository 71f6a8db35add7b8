"""Every documented extra can be installed: pip resolves it here, and downloads what is not installed, but installs
nothing.

One resolution covers all extras that fit constraints.txt together: if pip finds versions for all of them, there are
versions for each. The others are resolved as their documentation says.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from retouch.cli import _silence_libraries

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

APART = {"imscore", "deepspeed"}
"""Extras of an environment of their own, or with a build step that needs torch."""

PADDLE = ["paddleocr>=3", "paddlepaddle"]
"""Of the remedy that `ocr` with engine paddleocr prints; no extra, because it pins numpy and opencv."""


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def index() -> None:
    """Skip where pip or an index is missing: a package that every index has is looked up first."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip (uv venv makes none); install it to check the extras")
    if pip("index", "versions", "packaging", "--retries", "0", "--timeout", "10").returncode:
        pytest.skip("no package index can be reached")


def requirements(*extras: str) -> list[str]:
    """What pip is asked for by `retouch[EXTRAS]`, without building the package."""
    return [*PROJECT["dependencies"], *(one for extra in extras for one in EXTRAS[extra])]


def dry_run(*arguments: str) -> None:
    done = pip("install", "--dry-run", "--quiet", "--prefer-binary", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_documented_extra_is_one() -> None:
    """`pip install "retouch[...]"` of the pages, messages and scripts."""
    named: set[str] = set()
    for folder, pattern in (("docs", "*.md"), ("src", "*.py"), ("scripts", "*.sh"), (".", "README.md")):
        for path in (ROOT / folder).rglob(pattern) if folder != "." else [ROOT / pattern]:
            text = path.read_text(encoding="utf-8")
            for start in ('install "retouch[', 'install -U "retouch[', '-e ".['):
                named |= {e for part in text.split(start)[1:] for e in part.partition("]")[0].split(",")}
    assert {extra for extra in named if extra.isidentifier()} <= {*EXTRAS}


@pytest.mark.full
@pytest.mark.usefixtures("index")
def test_the_extras_that_share_an_environment() -> None:
    """With constraints.txt. Gradio (ui) and trackio lower Pillow, which the constraints allow."""
    dry_run("-c", "constraints.txt", *requirements(*sorted({*EXTRAS} - APART)))


@pytest.mark.full
@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_every_python_has_wheels_of_the_same_versions(version: str, tmp_path: Path) -> None:
    """All but font-roboto (fonts), which is a source release of files alone."""
    wanted = requirements(*sorted({*EXTRAS} - APART - {"fonts"}))
    wheels = ["--ignore-installed", "--only-binary", ":all:", "--python-version", version, "--target", str(tmp_path)]
    dry_run("-c", "constraints.txt", *wheels, *wanted)


def test_no_extra_is_empty() -> None:
    assert all(EXTRAS.values())


@pytest.mark.full
@pytest.mark.usefixtures("index")
def test_imscore_in_an_environment_without_train() -> None:
    """Without constraints.txt, whose transformers is newer than it takes; with the torch that is installed."""
    dry_run(*requirements("serve", "imscore"), f"torch=={importlib.metadata.version('torch').partition('+')[0]}")


def test_transformers_has_image_processors_by_their_backend() -> None:
    """5.4 is the first that takes `backend`: earlier ones ignore it, and use torchvision where it is installed."""
    (wanted,) = (one for one in map(Requirement, EXTRAS["train"]) if one.name == "transformers")
    assert "5.3.99" not in wanted.specifier and "5.4.0" in wanted.specifier


@pytest.mark.full
@pytest.mark.usefixtures("index")
def test_paddleocr_without_its_dependencies() -> None:
    dry_run("--no-deps", *PADDLE)


@pytest.mark.full
@pytest.mark.usefixtures("index")
def test_deepspeed_has_the_release_that_is_asked_for() -> None:
    """Its build imports torch and setuptools, so that pip is only asked which releases there are."""
    (wanted,) = (Requirement(one) for one in EXTRAS["deepspeed"])
    told = pip("index", "versions", wanted.name)
    assert told.returncode == 0, told.stderr
    releases = told.stdout.partition("Available versions:")[2].splitlines()[0].split(",")
    pinned = next(
        Requirement(line.partition("#")[0])
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"{wanted.name}==")
    )
    found = {Version(one.strip()) for one in releases}
    assert any(one in wanted.specifier and one in pinned.specifier for one in found)


def test_no_command_asks_for_torchvision() -> None:
    """transformers warns where it takes the image processors of Pillow, which this package wants."""
    _silence_libraries()
    _silence_libraries()
    logger = logging.getLogger("transformers.utils.import_utils")
    assert len(logger.filters) == 1
    for message, shown in (("`CLIPImageProcessor` requires torchvision (not installed); falling back", False),
                           ("another warning", True)):  # fmt: skip
        assert bool(logger.filter(logger.makeRecord(logger.name, logging.WARNING, "", 0, message, (), None))) is shown


@pytest.mark.parametrize("method", ["gradient_checkpointing", "gradient_checkpointing_enable"])
def test_deprecations_that_only_trl_can_answer_are_not_shown(method: str) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        _silence_libraries()
        warnings.warn(f"`{method}` is deprecated and will be removed in v6.", FutureWarning, stacklevel=1)
        warnings.warn("`another` is deprecated", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["`another` is deprecated"]
