"""Votes of people on images: an append-only JSONL file, one object in each line.

    {"vote": 7, "voter": "ann", "answer": "left", "left": {...}, "right": {...}, "repeats": null, "choice": "active",
     "time": "2026-11-29T10:00:00+00:00"}
    {"undo": 7, "voter": "ann", "time": ...}

`left` and `right` are images: `image` (relative to the file's folder, like `source` and `mask`), `sha256` of its file,
`example`, `prompt`, and where it is known `text`, `seed` and `weights`. An image alone is `left`, and `right` is null.
A line is written at once and to the disk before the next question; one that a crash has cut off was never
confirmed, and is dropped by the next writer.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from retouch.data.base import DataError
from retouch.data.identity import digest
from retouch.data.lists import entries_of
from retouch.files.disk import append_to, is_file
from retouch.taste.likelihood import PAIR_ANSWERS, SINGLE_ANSWERS, Answer

MIRRORED: Mapping[Answer, Answer] = {"left": "right", "right": "left"}
"""The answers that change when the two images change places."""


def date() -> str:
    """Date and time of a vote, for people; nothing is measured by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class VotedImage:
    """An image that is voted on.

    Attributes:
        image, source, mask: files.
        sha256: of the image's file.
        example: what two images must share to be a pair.
        weights: which weights made it, in words.
        original: as of `ItemFiles`.
    """

    image: Path
    sha256: str
    example: str
    prompt: str = ""
    text: str | None = None
    source: Path | None = None
    mask: Path | None = None
    seed: int | None = None
    weights: str = ""
    original: str = ""

    @property
    def key(self) -> str:
        """Equal images of one example are one."""
        return f"{self.example} {self.sha256}"


def groups_of(votes: Sequence[Vote]) -> list[str]:
    """The group of each vote, which no division of votes may cut: the content of the photograph that its images edit,
    because several masks of one are several examples; the example of images without a photograph."""
    digests: dict[Path, str] = {}

    def group(image: VotedImage) -> str:
        if image.original or image.source is None or not is_file(image.source):
            return image.original or image.example
        if image.source not in digests:
            digests[image.source] = digest(image.source)
        return digests[image.source]

    return [group(vote.left) for vote in votes]


def image_digest(image: Path) -> str:
    """`VotedImage.sha256` of a file."""
    return hashlib.sha256(image.read_bytes()).hexdigest()[:16]


def replaced(images: Iterable[VotedImage]) -> set[VotedImage]:
    """Those in whose place another image is than the one that was voted on."""
    return {image for image in {*images} if is_file(image.image) and image_digest(image.image) != image.sha256}


REPLACED = "another image than the one that was voted on; put that one back"


@dataclass(frozen=True)
class Vote:
    """An answer of a voter.

    Attributes:
        number: unique among the voter's.
        right: None for an image alone.
        repeats: number of the vote whose pair is shown again, mirrored.
        choice: how the pair was chosen: uniform or active.
    """

    number: int
    voter: str
    answer: Answer
    left: VotedImage
    right: VotedImage | None = None
    repeats: int | None = None
    choice: str = "uniform"
    time: str = field(default_factory=date)

    @property
    def images(self) -> tuple[VotedImage, ...]:
        return (self.left,) if self.right is None else (self.left, self.right)


class VoteFile:
    """The votes of a file, in memory and on the disk. Safe for threads; a second process is kept out by the caller.

    Raises:
        DataError: a file of something else.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._changing = threading.Lock()
        _drop_cut_line(path)
        self._votes = {(vote.voter, vote.number): vote for vote in read_votes(path)} if path.exists() else {}
        self._next = _last_number(path) + 1

    def of(self, voter: str) -> list[Vote]:
        """Votes of a voter that were not taken back, first ones first."""
        with self._changing:
            return [vote for vote in self._votes.values() if vote.voter == voter]

    def all(self) -> list[Vote]:
        """Votes of everybody."""
        with self._changing:
            return [*self._votes.values()]

    def add(self, vote: Vote) -> Vote:
        """Append a vote -> it, with its number."""
        with self._changing:
            vote = replace(vote, number=self._next)
            self._append(line_of(vote, self.path.parent))
            self._next += 1
            self._votes[vote.voter, vote.number] = vote
            return vote

    def undo(self, voter: str) -> Vote | None:
        """Take back the last vote of a voter -> it; None if there is none."""
        with self._changing:
            last = next((vote for vote in reversed(self._votes.values()) if vote.voter == voter), None)
            if last is not None:
                self._append({"undo": last.number, "voter": voter, "time": date()})
                del self._votes[last.voter, last.number]
            return last

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode()
        descriptor = append_to(self.path)
        before = os.fstat(descriptor).st_size
        try:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, "the vote was cut off, as on a full disk", str(self.path))
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, before)  # else the next vote would follow the fragment in one line
            raise
        finally:
            os.close(descriptor)


def read_votes(path: Path) -> list[Vote]:
    """The votes of a file that were not taken back, in the order of the file.

    Raises:
        DataError: a file without votes, or with something else.
    """
    votes: dict[tuple[str, int], Vote] = {}
    for line, entry in enumerate(entries_of(path), 1):
        try:
            if "undo" in entry:
                votes.pop((entry["voter"], entry["undo"]), None)
            else:
                vote = _vote_of(entry, path.parent)
                if (key := (vote.voter, vote.number)) in votes:
                    raise ValueError(f"a second vote {vote.number} of {vote.voter!r}; were files of one voter joined?")
                votes[key] = vote
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} line {line}: no vote of `retouch label` ({error})") from None
    return list(votes.values())


def _vote_of(entry: Mapping[str, Any], root: Path) -> Vote:
    answer, right = entry["answer"], entry["right"]
    if answer not in (SINGLE_ANSWERS if right is None else PAIR_ANSWERS):
        raise ValueError(f"answer {answer!r}")
    if type(entry["vote"]) is not int or not isinstance(entry["voter"], str):
        raise ValueError(f"vote {entry['vote']!r} of {entry['voter']!r}")
    left, right = _image_of(entry["left"], root), None if right is None else _image_of(right, root)
    more = {name: entry[name] for name in ("repeats", "choice", "time") if name in entry}
    return Vote(entry["vote"], entry["voter"], cast("Answer", answer), left, right, **more)


def _image_of(entry: Mapping[str, Any], root: Path) -> VotedImage:
    files = {name: root / entry[name] for name in ("image", "source", "mask") if entry.get(name)}
    texts = {name: str(entry[name]) for name in ("sha256", "example", "prompt", "weights", "original") if name in entry}
    return VotedImage(**files, **texts, text=entry.get("text"), seed=entry.get("seed"))  # pyright: ignore


def line_of(vote: Vote, root: Path) -> dict[str, Any]:
    """The entry of a vote in a file of the folder `root`."""

    def image(one: VotedImage | None) -> dict[str, Any] | None:
        if one is None:
            return None
        known = {k: v for k, v in asdict(one).items() if v is not None and (v or k != "original")}
        return {k: _relative(v, root) if isinstance(v, Path) else v for k, v in known.items()}

    about = {"repeats": vote.repeats, "choice": vote.choice, "time": vote.time}
    sides = {"left": image(vote.left), "right": image(vote.right)}
    return {"vote": vote.number, "voter": vote.voter, "answer": vote.answer, **sides, **about}


def _relative(path: Path, root: Path) -> str:
    """The path from the folder of the votes, which can be moved together; the whole path of a file elsewhere."""
    return os.path.relpath(path, root) if path.resolve().is_relative_to(root.resolve()) else str(path.resolve())


def _last_number(path: Path) -> int:
    """The highest number of a file: one that was taken back is not given again."""
    entries: Sequence[Any] = entries_of(path) if path.exists() else ()
    return max((entry["vote"] for entry in entries if "vote" in entry), default=0)


def _drop_cut_line(path: Path) -> None:
    """Remove a last line without its end, of a file that holds votes and nothing else before it."""
    content = path.read_bytes() if path.is_file() else b""
    whole, end, rest = content.rpartition(b"\n")
    begins = b'{"vote": '
    if not rest or not all(line.startswith((begins, b'{"undo": ')) for line in whole.splitlines()):
        return  # `read_votes` names what is wrong with it
    if not end and not rest.startswith(begins) and not begins.startswith(rest):
        return
    with path.open("r+b") as file:
        file.truncate(len(whole) + len(end))
