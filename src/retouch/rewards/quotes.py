"""The target texts of a prompt: what stands in quotation marks. No torch.

Marks pair as in the scripts that use them. A mark after a digit (inches), inside a word (an apostrophe) or without its
partner opens nothing. A text within another text is a part of it. Double marks go first wherever they stand; without
one, single marks; without these, marks of titles.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_LETTERS = r"\dA-Za-z_\u00c0-\u052f\u1e00-\u1fff"
"""Digits, combining marks, and letters of the scripts that write an apostrophe within words (Latin, Greek, Cyrillic):
next to one, a mark may be an apostrophe or inches."""

_LETTER = rf"[{_LETTERS}\u05d0-\u05ea]"
"""The same with Hebrew letters, among which a single mark is a geresh; a double mark may stand behind a prefix."""

_DOUBLE_CLOSERS = {
    '"': '"', "＂": "＂", "״": "״", "“": "”", "„": "”“", "‟": "”", "”": "”“", "«": "»", "»": "«»",
    "「": "」", "『": "』", "﹁": "﹂", "﹃": "﹄", "｢": "｣", "〝": "〞〟",
}  # fmt: skip
_ANGLE_CLOSERS = {"‹": "›", "›": "‹›"}
_TITLE_CLOSERS = {"《": "》", "〈": "〉"}
_SINGLE_CLOSERS = {"'": "'", "＇": "＇", "׳": "׳", "‘": "’", "‚": "‘’", "‛": "’", "’": "’"}

_CLOSERS = _DOUBLE_CLOSERS | _ANGLE_CLOSERS | _TITLE_CLOSERS
"""Opening mark -> marks that close it, of all marks that are no apostrophe; the first one closes it wherever it stands,
unless it is the same mark."""

_OPENERS = {mark: [o for o, closers in _CLOSERS.items() if mark in closers] for mark in "".join(_CLOSERS.values())}
"""Closing mark -> marks that it closes."""

CLOSERS = _CLOSERS | _SINGLE_CLOSERS
"""Opening mark -> marks that close it, of all quotation marks."""

_RANK = dict.fromkeys(_DOUBLE_CLOSERS, 0) | dict.fromkeys([*_SINGLE_CLOSERS, *_ANGLE_CLOSERS], 1)
"""Opening mark -> 0 for double and 1 for single marks; marks of titles have 2."""

_MARK = re.compile(f"[{''.join(_CLOSERS.keys() | _OPENERS.keys())}]")
_ABBREVIATION = re.compile(r"(?<=[\u05d0-\u05ea])[\"״”“](?=[\u05d0-\u05ea](?![\u05d0-\u05ea]))")
"""The mark before the last letter of a Hebrew abbreviation."""

_BEHIND_LETTER = re.compile(f"[{_LETTERS}]")
_STRAIGHT = '"＂״'
_ENDS = ".,;:!?)]}…"
_NOTHING = "\0"
"""Stands for a character of a text that was read already: no mark, no letter, no white space."""

_SINGLE_OPENING = re.compile(rf"(?<!{_LETTER})(?:['＇׳‘‚‛]|’(?!\s))")
_SINGLE_CLOSING = {opener: re.compile(rf"[{closers}](?!{_LETTER})") for opener, closers in _SINGLE_CLOSERS.items()}
_AND = re.compile(rf"(?<={_LETTER}\s)['‘’]n['’]?(?=\s{_LETTER})", re.IGNORECASE)
"""The "and" of rock 'n' roll."""

_SHORTENED = re.compile(rf"['‘’](?:\d\ds?|em|til|tis|twas|cause|cuz|round)(?!{_LETTER}|['’])", re.IGNORECASE)
"""A word that starts with an apostrophe, like the decade '90s."""

_NEXT_TEXT = re.compile(f"{_SINGLE_OPENING.pattern}|{_NOTHING}")

_SHOWN = 24
"""Characters of a prompt that are quoted from a mark on that opens nothing."""


@dataclass(frozen=True)
class Quotes:
    """The marks of a prompt.

    Attributes:
        texts: what is read, in order.
        others: parts that look like a text but are not read: a pair of a lower rank, or the prompt from a mark on that
            has no partner.
    """

    texts: tuple[str, ...]
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Span:
    """A pair of marks: their places."""

    first: int
    last: int
    rank: int


def quoted_text(prompt: str) -> str | None:
    """The first text of `quoted_texts`; None without one."""
    return next(iter(quoted_texts(prompt)), None)


def quoted_texts(prompt: str) -> list[str]:
    """Every text in double quotation marks of a prompt that holds more than white space, without white space around it;
    without one, those in single marks; without these, those in marks of titles."""
    return list(read_quotes(prompt).texts)


def read_quotes(prompt: str) -> Quotes:
    """The texts of a prompt, and what looks like one."""
    spans, alone = _paired(prompt)
    doubles = _outermost(spans)
    singles, apostrophes = _single_spans(_without(prompt, doubles))
    outermost = _outermost([*doubles, *singles])
    rank = min((span.rank for span in outermost), default=0)
    left = _without(prompt, outermost)
    others = {span.first: prompt[span.first : span.last + 1] for span in outermost if span.rank != rank}
    end = 0
    for place in sorted(place for place in (*alone, *apostrophes) if left[place] != _NOTHING):
        if place >= end:  # not shown with the mark before it
            others[place], end = _shown(prompt, place), place + _SHOWN
    texts = (prompt[span.first + 1 : span.last].strip() for span in outermost if span.rank == rank)
    return Quotes(tuple(texts), tuple(others[place] for place in sorted(others)))


def _shown(prompt: str, place: int) -> str:
    end = place + _SHOWN
    return prompt[place:] if len(prompt) <= end else f"{prompt[place:end]}…"


def _outermost(spans: Sequence[_Span]) -> list[_Span]:
    """The spans that lie in no other, in order."""
    kept: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.first):
        if not kept or span.first > kept[-1].last:
            kept.append(span)
    return kept


def _without(prompt: str, spans: Sequence[_Span]) -> str:
    """The prompt with `_NOTHING` in place of each character of the spans."""
    parts, at = list[str](), 0
    for span in spans:
        parts += [prompt[at : span.first], _NOTHING * (span.last + 1 - span.first)]
        at = span.last + 1
    return "".join([*parts, prompt[at:]])


def _paired(prompt: str) -> tuple[list[_Span], list[int]]:
    """Pairs of all marks that are no apostrophe and hold a text, and the places of marks without a partner that follow
    no digit.

    Every opening mark has its own stack, and a pair drops what it encloses: each mark is put on a stack and taken off
    it once, and the time grows with the length alone.
    """
    stacks: dict[str, list[int]] = {opener: [] for opener in _CLOSERS}
    spans, alone = list[_Span](), list[int]()
    for found in _MARK.finditer(prompt):
        mark, place = found[0], found.start()
        if _ABBREVIATION.match(prompt, place):
            continue
        # The same straight mark may open and close. It closes the newest pair that it can close, unless it can also
        # open another one within that pair; a mark that can do neither and follows no digit (24") stands alone.
        first = max((stacks[opener][-1] for opener in _OPENERS.get(mark, ()) if stacks[opener]), default=-1)
        opens = mark in _CLOSERS and _may_open(prompt, place)
        if first >= 0 and not (opens and _opens_another(prompt, first, place)):
            alone += [inner for stack in stacks.values() for inner in _dropped(stack, first) if inner != first]
            if prompt[first + 1 : place].strip():
                spans.append(_Span(first, place, _RANK.get(prompt[first], 2)))
        elif opens:
            stacks[mark].append(place)
        elif not prompt[max(place - 2, 0) : place].strip()[-1:].isdigit():
            alone.append(place)
    return spans, alone + [place for stack in stacks.values() for place in stack]


def _dropped(stack: list[int], first: int) -> Iterator[int]:
    """The places from `first` on, which are taken off the stack."""
    while stack and stack[-1] >= first:
        yield stack.pop()


def _may_open(prompt: str, place: int) -> bool:
    """Whether a mark can open a text: most have a direction, and the others open before their text only."""
    mark, before, after = prompt[place], prompt[max(place - 1, 0) : place], prompt[place + 1 : place + 2]
    behind_letter = _BEHIND_LETTER.match(before) is not None
    if mark in _STRAIGHT:
        inches = after.isspace() and before.isspace() and prompt[place - 2 : place - 1].isdigit()
        return not behind_letter and not inches
    if mark in "”»›":
        return not behind_letter and bool(after.strip())
    if mark == "“":  # also closes „, and follows inches in German
        return not behind_letter or after.isalnum()
    return True


def _opens_another(prompt: str, first: int, place: int) -> bool:
    """Whether a mark that could close the text from `first` on stands where a text within that text begins."""
    mark, opener = prompt[place], prompt[first]
    if mark != opener and mark == _CLOSERS[opener][0]:
        return False
    return _stands_before_text(prompt, place)


def _stands_before_text(prompt: str, place: int) -> bool:
    before, after = prompt[max(place - 1, 0) : place], prompt[place + 1 : place + 2]
    return (not before or before.isspace() or before in "([{") and bool(after.strip()) and after not in _ENDS


def _single_spans(prompt: str) -> tuple[list[_Span], list[int]]:
    """Pairs of single marks that hold a text, from the first opening mark to the first that closes it, and the places
    of opening marks that nothing closes."""
    prompt = _AND.sub(lambda found: "n" * len(found[0]), prompt)
    spans, alone, at = list[_Span](), list[int](), 0
    closing: dict[str, int] = {}
    while opening := _SINGLE_OPENING.search(prompt, at):
        first, at = opening.start(), opening.end()
        last = _closing_place(prompt, prompt[first], at, closing)
        shortened = _SHORTENED.match(prompt, first) is not None
        if last < 0:
            alone += [first] if _stands_before_text(prompt, first) and not shortened else []
        elif not (shortened and _NEXT_TEXT.search(prompt, at, last)):
            if prompt[at:last].strip():
                spans.append(_Span(first, last, 1))
            at = last + 1
    return spans, alone


def _closing_place(prompt: str, opener: str, start: int, known: dict[str, int]) -> int:
    """Place of the first mark from `start` on that closes a text; -1 without one.

    Args:
        known: the last result of each opener, which is kept: nothing is searched twice.
    """
    if opener not in known or 0 <= known[opener] < start:
        found = _SINGLE_CLOSING[opener].search(prompt, start)
        known[opener] = found.start() if found else -1
    return known[opener]
