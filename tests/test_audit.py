"""tools/hashes.txt is of the versions that constraints.txt pins."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LEFT_OUT = {"torch", "bitsandbytes", "deepspeed", "font-roboto"}


def pinned(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if "==" in line and line[0] != "#"]
    return dict(line.split(" ")[0].split("==", 1) for line in lines)


def test_every_pinned_wheel_has_its_hash() -> None:
    """Run `pip install --dry-run --ignore-installed --no-deps -r constraints.txt --report FILE` after a change."""
    hashes, versions = pinned(REPOSITORY / "tools/hashes.txt"), pinned(REPOSITORY / "constraints.txt")
    assert hashes == {name: version for name, version in versions.items() if name not in LEFT_OUT}


def test_a_hash_is_a_sha_256() -> None:
    text = (REPOSITORY / "tools/hashes.txt").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert rows and all(re.fullmatch(r"[a-z0-9.-]+==\S+ --hash=sha256:[0-9a-f]{64}", row) for row in rows)
