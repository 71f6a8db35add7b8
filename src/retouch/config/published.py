"""The files that come with the package: run files, files of accelerate, launchers, and the versions of the tests.

A wheel has them under `retouch/published`, in the folders of the repository; in a clone they are the repository's own.
`example:NAME` stands for one of them wherever a command takes a file.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from retouch.config.errors import nearest
from retouch.errors import ConfigError

PREFIX = "example:"
CONFIGS = "configs"

TREES = (CONFIGS, "scripts", "examples/cluster", "examples/demo.py", "examples/python_api.py", "constraints.txt")
"""Folders and files of the repository that a wheel has as well."""

_OTHERS = {
    "cluster/slurm": "examples/cluster/slurm.sbatch",
    "constraints": "constraints.txt",
    "demo": "examples/demo.py",
    "python_api": "examples/python_api.py",
}
"""Name -> file that is not under configs/."""


def root() -> Path:
    """The folder that has `TREES`."""
    package = Path(__file__).parents[1]
    inside = package / "published"
    return inside if inside.is_dir() else package.parents[1]


@cache
def published_files() -> Mapping[str, Path]:
    """Name -> file; run files are named by their path under configs/ without its suffix."""
    top = root()
    files = {file.relative_to(top / CONFIGS).with_suffix("").as_posix(): file for file in top.glob("configs/**/*.yaml")}
    others = {name: top / file for name, file in _OTHERS.items() if (top / file).is_file()}
    return dict(sorted((files | others).items()))


def published_file(name: str, given: str) -> Path:
    """The file of a name.

    Args:
        given: start of the message, "KEY: given VALUE".

    Raises:
        ConfigError: there is none.
    """
    files = published_files()
    if name not in files:
        close = nearest(name, files) if files else f"{root()} has no {CONFIGS}"
        if close.startswith("known: "):
            close = "`retouch init --example list` prints the names"
        raise ConfigError(f"{given}; no such example; {close}")
    return files[name]


def resolved(path: Path | str, given: str = "") -> Path:
    """The file that `example:NAME` stands for; another path as it is.

    Args:
        given: start of the message, "KEY: given VALUE"; the name itself if empty.

    Raises:
        ConfigError: no such example.
    """
    name = str(path).removeprefix(PREFIX)
    return published_file(name, given or str(path)) if str(path).startswith(PREFIX) else Path(path)


def is_run_file(word: str) -> bool:
    """Whether a word names a run file and no folder, list or key=value."""
    return word.startswith(PREFIX) or word.lower().endswith((".yaml", ".yml"))


def example_of(path: Path) -> str | None:
    """`example:NAME` of a path like configs/NAME.yaml, or of a file that is in a wheel under that name alone."""
    name = path.as_posix().rpartition(f"{CONFIGS}/")[2].removesuffix(".yaml")
    return f"{PREFIX}{name}" if name in published_files() else None


def write_example(name: str, out: Path | None) -> list[str]:
    """Write a published file, or with the name "all" every one in the folders of the repository, but those that are
    there -> lines for the terminal.

    Args:
        out: file, for "all" the folder; None: the name of the file in the working directory, for "all" that directory.

    Raises:
        ConfigError: no such name, or the file exists; of "all", none has been written where one exists that differs.
    """
    if name == "list":
        return [f"{one:42} {_title(file)}" for one, file in published_files().items()]
    if name == "all":
        return _written_trees(out or Path())
    file = published_file(name, f"--example: given {name!r}")
    target = out or Path(file.name)
    if target.exists():
        raise _taken(target, "exists")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_standing_alone(file), encoding="utf-8")
    if file.is_relative_to(root() / CONFIGS) and not name.startswith(("accelerate/", "reproduce/evaluation/")):
        return [f"{target}: written", f"next: retouch check {target}; retouch train {target}"]
    return [f"{target}: written"]


def _written_trees(folder: Path) -> list[str]:
    top = root()
    files = [file for tree in TREES for file in (top / tree).rglob("*")] + [top / tree for tree in TREES]
    copies = {folder / file.relative_to(top): file for file in files if file.is_file() and file.suffix != ".pyc"}
    for target, file in copies.items():
        _require_free(target, file)
    new = {target: file for target, file in copies.items() if not target.exists()}
    for target, file in new.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    written = {tree: any(target.is_relative_to(folder / tree) for target in new) for tree in TREES}
    return [f"{folder / tree}: {'written' if is_new else 'there already'}" for tree, is_new in written.items()]


def _require_free(target: Path, file: Path) -> None:
    """Reject a copy of a file in the place of another one, or below one."""
    place = next(one for one in (target, *target.parents) if one.exists())
    if place != target and not place.is_dir():
        raise _taken(place, "is no folder")
    if place == target and not (target.is_file() and target.read_bytes() == file.read_bytes()):
        raise _taken(target, "exists and differs from the published one")


def _taken(place: Path, reason: str) -> ConfigError:
    return ConfigError(f"--out: {place} {reason}; set --out to another path, or delete it")


def _standing_alone(file: Path) -> str:
    """The text of a file; one that extends another file of its folder extends that example."""
    text = file.read_text(encoding="utf-8")
    base = root() / CONFIGS
    if not file.is_relative_to(base):
        return text
    folder = file.parent.relative_to(base)
    return re.sub(
        r"^extends: (\S+)\.yaml", lambda line: f"extends: {PREFIX}{(folder / line[1]).as_posix()}", text, flags=re.M
    )


def _title(file: Path) -> str:
    """The start of the comment or docstring at the top of a file."""
    lines = [line.replace('"""', "# ") for line in file.read_text(encoding="utf-8").splitlines()[:5]]
    parts = [line for line in lines if line.startswith("# ") and line[2:3] != "%"]
    comment = " ".join(line.lstrip("# ") + ":" * line.startswith("# # ") for line in parts)  # of a notebook: a heading
    return textwrap.shorten(comment.partition(". ")[0].rstrip("."), 110, placeholder=" …")
