"""Every problem of a data set, item by item: `retouch data validate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from retouch.config import RunConfig, load_run
from retouch.config.needs import data_sections, needed_pictures
from retouch.data.base import DataSection, ItemError, ItemFiles
from retouch.data.checking import in_threads, progress
from retouch.data.dataset import CheckPrompts, examine, listed_in, repeated_ids
from retouch.data.discover import data_at
from retouch.plain_text import printable

MAY_BE_INVERTED = (
    "opaque pixels are repainted, but the border of this mask is opaque, as in an image with an erased region; if "
    "transparent pixels mark the region to repaint, set data.invert_mask=true"
)


@dataclass(frozen=True)
class Finding:
    """One item or list: its place, and its problem or, without one (None), how it was read.

    Attributes:
        warning: something about the whole list.
    """

    section: str
    item: str
    problem: str | None
    note: str = ""
    warning: bool = False


def validate(
    path: Path,
    size: tuple[int, int],
    *,
    trust: bool = False,
    prompts_of: Callable[[RunConfig], CheckPrompts] | None = None,
) -> list[Finding]:
    """Check a path that a format recognises, or every data section of a run file (at its own sizes).

    Args:
        trust: use the code and the hosts that a run file in a run directory names.
        prompts_of: returns the check of a run's prompts; None: prompts are not checked.

    Raises:
        DataError, ConfigError: the path is neither, or cannot be listed.
    """
    if path.suffix in (".yaml", ".yml"):
        run = load_run(path, trust=trust or None)
        sections = data_sections(run)
        needs = {name: needed_pictures(run, training=name == "data") for name in sections}
        check = prompts_of and prompts_of(run)
        return [f for name, data in sections.items() for f in validate_section(name, data, needs[name], check)]
    return validate_section("data", data_at(path, size, ", or a run file"))


def validate_section(
    section: str, data: DataSection, needs: Collection[str] = (), check_prompts: CheckPrompts | None = None
) -> list[Finding]:
    """Read every item of one section, whatever was read before."""
    listed = listed_in(data, section)
    repeated = repeated_ids([item for item in listed if isinstance(item, ItemFiles)])
    twins = [isinstance(item, ItemFiles) and item.id in repeated for item in listed]  # none of them can be used
    findings_of = in_threads(lambda item: _finding(section, item, data, needs), listed)
    found = list(progress(findings_of, len(listed), section))
    warnings = _check_prompts(check_prompts, section, data, listed, found)
    findings = [finding for finding, twin in zip(found, twins, strict=True) if finding.problem or not twin]
    for twice in repeated:
        findings.append(Finding(section, f"item {twice}", "the id appears more than once; ids must differ"))
    if not listed:
        findings.append(Finding(section, data.path, "lists no items"))
    return [*warnings, *findings]


def _check_prompts(
    check: CheckPrompts | None,
    section: str,
    data: DataSection,
    listed: Sequence[ItemFiles | ItemError],
    found: list[Finding],
) -> list[Finding]:
    """Warnings about the prompts of the usable items; the problems of prompts replace findings."""
    usable = [p for p, f in enumerate(found) if not f.problem]
    items = [item for p in usable if isinstance(item := listed[p], ItemFiles)]
    if check is None or not items:
        return []
    warnings, problems = check(data, items)
    for position, error in problems.items():
        found[usable[position]] = Finding(section, error.where, error.problem)
    return [Finding(section, "prompts", None, warning, warning=True) for warning in warnings]


def _finding(section: str, item: ItemFiles | ItemError, data: DataSection, needs: Collection[str]) -> Finding:
    read = item if isinstance(item, ItemError) else examine(item, data, needs)
    if isinstance(read, ItemError):
        return Finding(section, read.where, read.problem)
    assert isinstance(item, ItemFiles)
    example, reading = read
    roles = ("source", "mask", "target", "reference", "win", "lose")
    notes = [", ".join(role for role in roles if getattr(example, role) is not None)]
    notes += [f"mask in {reading.mask_channel}"] if reading.mask_channel else []
    notes += [MAY_BE_INVERTED] if reading.mask_may_be_inverted else []
    return Finding(section, f"item {item.id}", None, "; ".join(notes))


def validation_table(findings: list[Finding]) -> str:
    """A line for every problem, and a count."""
    bad = [f for f in findings if f.problem]
    good = [f for f in findings if not f.problem and not f.warning]
    lines = [f"{f.section:16} {f.item:24} warning: {f.note}" for f in findings if f.warning]
    lines += [f"{f.section:16} {f.item:24} {f.problem}" for f in bad]
    if not bad:
        lines += [f"{f.section:16} {f.item:24} ok: {f.note}" for f in good[:5]]
        lines += [f"... and {len(good) - 5} more"] if len(good) > 5 else []
    verdict = f"; {len(bad)} problem{'s' if len(bad) > 1 else ''}" if bad else ""
    return printable("\n".join([*lines, f"{len(good)} items can be used{verdict}"]))
