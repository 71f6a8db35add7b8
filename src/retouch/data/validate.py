"""What is wrong with a data set, item by item."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch.config import load_run
from retouch.config.needs import data_sections, needed_pictures
from retouch.data.checking import in_threads, progress
from retouch.data.dataset import DataError, ItemError, ItemFiles, examine, list_items, repeated_ids
from retouch.data.formats.brushbench import MAPPING
from retouch.data.formats.manifest import IMAGE_KEYS, SUFFIXES, json_entries, manifest_file
from retouch.data.sections import (
    BrushBenchData,
    CrossBenchData,
    ManifestData,
    PromptsData,
    SelfBenchData,
)

if TYPE_CHECKING:
    from retouch.data.sections import Data


MAY_BE_INVERTED = (
    "opaque pixels are repainted, but the border of this mask is opaque, as where the region to repaint was erased; if "
    "transparent pixels mark it, set data.invert_mask=true"
)


@dataclass(frozen=True)
class Finding:
    """One item or list: where it stands, and what is wrong with it (None: nothing) or how it was read."""

    section: str
    item: str
    problem: str | None
    note: str = ""


def validate(path: Path, size: tuple[int, int]) -> list[Finding]:
    """Check a folder of self_bench, BrushBench or imagefolder, a manifest, or every data section of a run file (at its
    own sizes).

    Raises:
        DataError, ConfigError: the path is none of them, or cannot be listed.
    """
    if path.suffix in (".yaml", ".yml"):
        run = load_run(path)
        sections = data_sections(run)
        needs = {name: needed_pictures(run, training=name == "data") for name in sections}
        return [f for name, data in sections.items() for f in validate_section(name, data, needs[name])]
    return validate_section("data", data_at(path, size))


def data_at(path: Path, size: tuple[int, int]) -> Data:
    """The data section that a path means.

    Raises:
        DataError: neither a folder nor a manifest.
    """
    if path.is_dir() and (path / MAPPING).is_file():
        return BrushBenchData(path=str(path), resolution=size)
    if path.is_dir() and manifest_file(path) and not (path / "self_bench.txt").is_file():
        return ManifestData(path=str(path), resolution=size)
    if path.is_dir():
        crosses = (path / "cross_bench.txt").is_file() and not (path / "self_bench.txt").is_file()
        return (CrossBenchData if crosses else SelfBenchData)(path=str(path), resolution=size)
    if path.suffix in SUFFIXES:
        return (PromptsData if _has_no_pictures(path) else ManifestData)(path=str(path), resolution=size)
    if path.suffix == ".txt":
        return PromptsData(path=str(path), resolution=size)
    raise DataError(
        f"{path}: give a folder (self_bench, BrushBench, imagefolder), a manifest (.json, .jsonl, .csv), a .txt of "
        "prompts, or a run file"
    )


def _has_no_pictures(path: Path) -> bool:
    """Whether a JSON file lists prompts alone: no entry of it names a picture."""
    entries = json_entries(path) if path.is_file() and path.suffix != ".csv" else []
    objects = [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]
    return bool(objects) and all("prompt" in o and o.keys().isdisjoint(IMAGE_KEYS) for o in objects)


def validate_section(section: str, data: Data, needs: Collection[str] = ()) -> list[Finding]:
    """Read every item of one section, whatever was read before."""
    listed = list_items(data)
    repeated = repeated_ids([item for item in listed if isinstance(item, ItemFiles)])
    twins = [isinstance(item, ItemFiles) and item.id in repeated for item in listed]  # none of them can be used
    findings_of = in_threads(lambda item: _finding(section, item, data, needs), listed)
    found = list(progress(findings_of, len(listed), section))
    findings = [finding for finding, twin in zip(found, twins, strict=True) if finding.problem or not twin]
    for twice in repeated:
        findings.append(Finding(section, f"item {twice}", "the id appears more than once; ids must differ"))
    if not listed:
        findings.append(Finding(section, data.path, "lists no items"))
    return findings


def _finding(section: str, item: ItemFiles | ItemError, data: Data, needs: Collection[str]) -> Finding:
    read = item if isinstance(item, ItemError) else examine(item, data, needs)
    if isinstance(read, ItemError):
        return Finding(section, read.where, read.problem)
    assert isinstance(item, ItemFiles)
    example, reading = read
    pictures = ("source", "mask", "target", "reference", "win", "lose")
    roles = [name for name in pictures if getattr(example, name) is not None]
    channel = [f"mask in {reading.mask_channel}"] if reading.mask_channel else []
    inverted = [MAY_BE_INVERTED] if reading.mask_may_be_inverted else []
    return Finding(section, f"item {item.id}", None, "; ".join([", ".join(roles), *channel, *inverted]))


def validation_table(findings: list[Finding]) -> str:
    """Every problem on a line of its own, and a count."""
    bad = [f for f in findings if f.problem]
    good = [f for f in findings if not f.problem]
    lines = [f"{f.section:16} {f.item:24} {f.problem}" for f in bad]
    if not bad:
        lines += [f"{f.section:16} {f.item:24} ok: {f.note}" for f in good[:5]]
        lines += [f"... and {len(good) - 5} more"] if len(good) > 5 else []
    verdict = f"; {len(bad)} problem{'s' if len(bad) > 1 else ''}" if bad else ""
    return "\n".join([*lines, f"{len(good)} items can be used{verdict}"])
