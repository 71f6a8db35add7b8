"""What is wrong with a data set, item by item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retouch.config import load_run
from retouch.config.schema import ManifestData, SelfBenchData
from retouch.data.dataset import DataError, ItemError, check_item, list_items, read_item
from retouch.imaging import ImageProblem

if TYPE_CHECKING:
    from retouch.config.schema import Data


@dataclass(frozen=True)
class Finding:
    """One item: where it stands, and what is wrong with it or how it was read."""

    section: str
    item: str
    problem: str | None
    note: str = ""


def validate(path: Path, size: tuple[int, int]) -> list[Finding]:
    """Check a self_bench folder, a manifest, or every data section of a run file (at the sizes it names).

    Raises:
        DataError, ConfigError: the path is none of them, or cannot be listed.
    """
    if path.suffix in (".yaml", ".yml"):
        run = load_run(path)
        sections = {"data": run.data, "warmup_data": run.warmup_data, "evaluation.data": run.evaluation.data}
        return [f for name, data in sections.items() if data is not None for f in validate_section(name, data)]
    return validate_section("data", data_at(path, size))


def data_at(path: Path, size: tuple[int, int]) -> Data:
    """The data section that a path means.

    Raises:
        DataError: neither a folder nor a manifest.
    """
    if path.is_dir():
        return SelfBenchData(path=str(path), resolution=size)
    if path.suffix in (".json", ".jsonl"):
        return ManifestData(path=str(path), resolution=size)
    raise DataError(f"{path}: give a self_bench folder, a .json or .jsonl manifest, or a run file")


def validate_section(section: str, data: Data) -> list[Finding]:
    """Check every item of one section."""
    findings: list[Finding] = []
    for item in list_items(data):
        if isinstance(item, ItemError):
            findings.append(Finding(section, item.where, item.problem))
            continue
        problem = check_item(item, data)
        note = ""
        if problem is None:
            try:
                example, notes = read_item(item, data)
            except ImageProblem as error:  # the file changed between the two reads
                problem = ItemError(f"item {item.id}", str(error))
            else:
                roles = [
                    name for name in ("source", "mask", "target", "reference") if getattr(example, name) is not None
                ]
                note = f"{', '.join(roles)}; mask in {notes['mask_channel']}"
        findings.append(Finding(section, f"item {item.id}", problem.problem if problem else None, note))
    return findings


def validation_table(findings: list[Finding]) -> str:
    """Every problem on a line of its own, and a count."""
    bad = [f for f in findings if f.problem]
    lines = [f"{f.section:16} {f.item:24} {f.problem}" for f in bad]
    if not bad:
        lines += [f"{f.section:16} {f.item:24} ok: {f.note}" for f in findings[:5]]
        lines += [f"... and {len(findings) - 5} more" for _ in range(1) if len(findings) > 5]
    return "\n".join([*lines, f"{len(findings) - len(bad)} of {len(findings)} items can be used"])
