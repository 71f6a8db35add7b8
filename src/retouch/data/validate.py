"""Every problem of a data set, item by item: `retouch data validate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retouch.config import RunConfig, load_run
from retouch.config.needs import data_sections, needed_pictures
from retouch.config.published import is_run_file
from retouch.data.base import DataSection, ItemError, ItemFiles, listed_in
from retouch.data.checking import in_threads, progress
from retouch.data.dataset import CheckPrompts, repeated_ids
from retouch.data.discover import data_at
from retouch.data.item import examine
from retouch.data.texts import reading_rewards, scored_sections, text_warnings
from retouch.imaging.lines import shown_text
from retouch.process.plain_text import count_of, printable
from retouch.rewards.base import RewardEntry
from retouch.rewards.quotes import quoted_texts

_SHOWN = 5
"""Items, and warnings, that the table lists one by one."""


@dataclass(frozen=True)
class Finding:
    """One item or list: its place, and its problem or, without one (None), how it was read.

    Attributes:
        doubtful: the mask may not be one; `note` has the reason.
        text: a phrase on the text to write; "" without one.
        warnings: what its author may not have meant; the item can be used.
        whole: warnings on the whole list, and no item.
    """

    section: str
    item: str
    problem: str | None
    note: str = ""
    doubtful: bool = False
    text: str = ""
    warnings: tuple[str, ...] = ()
    whole: bool = False


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
    if is_run_file(str(path)):
        run = load_run(path, trust=trust or None)
        sections = data_sections(run)
        needs = {name: needed_pictures(run, training=name == "data") for name in sections}
        readers = {name: run.rewards[name] for name in reading_rewards(run)}
        read = dict.fromkeys(scored_sections(run), readers) if readers else {}
        check = prompts_of and prompts_of(run)
        return [
            finding
            for name, data in sections.items()
            for finding in validate_section(name, data, needs[name], read.get(name), check)
        ]
    return validate_section("data", data_at(path, size, ", or a run file"), readers={})


def validate_section(
    section: str,
    data: DataSection,
    needs: Collection[str] = (),
    readers: Mapping[str, RewardEntry] | None = None,
    check_prompts: CheckPrompts | None = None,
) -> list[Finding]:
    """Read every item of one section, whatever was read before.

    Args:
        readers: the rewards that read the texts of the items, by name, which are none for a list alone; None:
            nothing reads them.
        check_prompts: finds prompts that the text encoders cut.
    """
    listed = listed_in(data, section)
    repeated = repeated_ids([item for item in listed if isinstance(item, ItemFiles)])
    twins = [isinstance(item, ItemFiles) and item.id in repeated for item in listed]  # none of them can be used
    findings_of = in_threads(lambda item: _finding(section, item, data, needs, readers), listed)
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
    return [Finding(section, "prompts", None, warnings=(warning,), whole=True) for warning in warnings]


def _finding(
    section: str,
    item: ItemFiles | ItemError,
    data: DataSection,
    needs: Collection[str],
    readers: Mapping[str, RewardEntry] | None,
) -> Finding:
    read = item if isinstance(item, ItemError) else examine(item, data, needs)
    if isinstance(read, ItemError):
        return Finding(section, read.where, read.problem)
    assert isinstance(item, ItemFiles)
    example, reading = read
    roles = ("source", "mask", "target", "reference", "win", "lose")
    notes = [", ".join(role for role in roles if getattr(example, role) is not None)]
    notes += [f"mask in {reading.mask_channel}"] if reading.mask_channel else []
    notes += [reading.mask_doubt] if reading.mask_doubt else []
    found = Finding(section, item.where, None, "; ".join(notes), reading.mask_doubt is not None)
    if readers is None:
        return found
    return replace(found, text=_texts_read(item), warnings=tuple(text_warnings(item, readers)))


def _texts_read(item: ItemFiles) -> str:
    """The text of an item, or those of its prompt; "" without one."""
    text = shown_text(item.metadata)
    texts = [text] if text and text.strip() else quoted_texts(item.prompt)
    listed = ", ".join(map(repr, texts))
    if len(texts) > 1:
        return f"texts {listed}, of which ocr reads the first"
    return f"text {listed}" if texts else ""


def validation_table(findings: list[Finding]) -> str:
    """A line for every problem and every doubtful mask, the first warnings, and a count."""
    # All problems and doubts are listed, as the list is what a user works through. Sound items and their warnings are
    # examples of how the data was read: the first few are enough.
    bad = [f for f in findings if f.problem]
    good = [f for f in findings if not f.problem and not f.whole]
    doubtful = [f for f in good if f.doubtful]
    lines = [f"{f.section:16} {f.item:24} warning: {one}" for f in findings if f.whole for one in f.warnings]
    lines += [f"{f.section:16} {f.item:24} {f.problem}" for f in bad]
    lines += [f"{f.section:16} {f.item:24} check: {f.note}" for f in doubtful]
    if not bad and not doubtful:
        lines += [f"{f.section:16} {f.item:24} ok: {'; '.join(filter(None, (f.note, f.text)))}" for f in good[:_SHOWN]]
        lines += [f"... and {len(good) - _SHOWN} more"] if len(good) > _SHOWN else []
    warned = [f"{f.section:16} {f.item:24} warning: {one}" for f in good for one in f.warnings]
    lines += warned[:_SHOWN]
    lines += [f"... and {len(warned) - _SHOWN} more warnings"] if len(warned) > _SHOWN else []
    verdict = f"; {len(bad)} problem{'s' if len(bad) > 1 else ''}" if bad else ""
    verdict += f"; {len(doubtful)} of the masks to check" if doubtful else ""
    return printable("\n".join([*lines, f"{count_of(len(good), 'item')} can be used{verdict}"]))
