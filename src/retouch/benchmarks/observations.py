"""Outcomes of the rewards on the outputs of a benchmark, as lines of JSON that a later start completes. No torch.

A line holds one output and ends with its checksum: a line that was changed counts as missing. An outcome counts only
for what the scorer received, pixel by pixel, and for the same reward and revision: whatever option changes either,
the output is scored again. A failure is on record and is tried again by the next start.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from retouch.errors import ConfigError
from retouch.files import plain_json
from retouch.files.disk import append_to
from retouch.rewards.base import UNSCORED, RewardEntry
from retouch.rewards.client.revisions import without_fingerprints
from retouch.rewards.protocol import PICTURES, Pixels, RewardItem
from retouch.types import Failure, Outcome, Score

_SEAL = re.compile(rb', "check": "([0-9a-f]{16})"}$')


def reward_digest(entry: RewardEntry, revision: str, gate: str = "") -> str:
    """Hash of everything that a reward's scores depend on. It has the retired options with today's values, as versions
    that had them: outcomes on record stay those of the same reward.

    Args:
        gate: hash of the reward that gates it, whose value is a factor of its own; "" if none does.
    """
    unscored = {*UNSCORED, *entry.unscored}
    options = {**entry.retired(), **entry.model_dump(mode="json")}
    keys = {name: value for name, value in options.items() if name not in unscored}
    told = [keys, without_fingerprints(revision), *([gate] if gate else [])]
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=12).hexdigest()


def reward_digests(entries: Mapping[str, RewardEntry], revisions: Mapping[str, str]) -> dict[str, str]:
    """`reward_digest` of every reward; a gate is not gated itself."""
    alone = {name: reward_digest(entry, revisions[name]) for name, entry in entries.items()}
    return {
        name: alone[name] if entry.gated_by is None else reward_digest(entry, revisions[name], alone[entry.gated_by])
        for name, entry in entries.items()
    }


@dataclass(frozen=True)
class OutputIdentity:
    """Identity of one output's outcome: its official name, and hashes of what a scorer receives.

    Attributes:
        image: hash of the pixels; of a file that cannot be read, of its bytes.
        item: hash of prompt and metadata; beside such a file, of the whole item.
    """

    file: str
    image: str
    item: str


def asked_of(file: str, item: RewardItem) -> OutputIdentity:
    """The identity of an output, from the item that a scorer receives: an option of the benchmark, of its data or of
    the preparation of images counts exactly if it changes that."""
    image = hashlib.blake2b(digest_size=16)
    for name in PICTURES:
        pixels: Pixels | None = getattr(item, name)
        image.update(b"-" if pixels is None else repr((name, pixels.shape)).encode() + pixels.tobytes())
    text = json.dumps([item.prompt, dict(item.metadata)], sort_keys=True, default=str)
    return OutputIdentity(
        file, image.hexdigest(), hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    )


class Observations:
    """The outcomes of one set of weights: all files `NAME.jsonl` and `NAME.*.jsonl` of a folder, one of which is
    appended to."""

    def __init__(self, folder: Path, name: str, part: str = "") -> None:
        """Args:
        part: name of the share that this process writes; "" writes NAME.jsonl.

        Raises:
            ConfigError: one of them is a pipe, a device or a folder.
        """
        self.path = folder / (f"{name}.{part}.jsonl" if part else f"{name}.jsonl")
        self._known: dict[tuple[OutputIdentity, str, str], Outcome] = {}
        self._revisions: dict[tuple[OutputIdentity, str, str], str] = {}
        files = sorted(folder.glob("*.jsonl"))
        for path in (path for path in files if path.name == f"{name}.jsonl" or path.name.startswith(f"{name}.")):
            if not path.is_file():
                raise ConfigError(f"--out: {path} is not a file; delete it")
            for line in path.read_bytes().split(b"\n")[:-1]:  # the last one is empty, or was cut off
                self._read(line)
        self._cut_off = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")

    def outcome(self, asked: OutputIdentity, reward: str, digest: str) -> Outcome | None:
        """The outcome of a reward (see `reward_digest`) on an output; None if there is none."""
        return self._known.get((asked, reward, digest))

    def outdated(self, asked: Iterable[OutputIdentity], digests: Mapping[str, str]) -> int:
        """The number of outcomes on some outputs that are on record for the same reward and file, but for other pixels,
        options or another revision alone.

        Args:
            digests: see `reward_digest`.
        """
        earlier = {(asked.file, name) for asked, name, _ in self._known}
        return sum(
            (one.file, name) in earlier and (one, name, digest) not in self._known
            for one in asked
            for name, digest in digests.items()
        )

    def revision(self, asked: OutputIdentity, reward: str, digest: str) -> str:
        """The revision that gave the outcome on record, fingerprints included; "" if it is not known."""
        return self._revisions.get((asked, reward, digest), "")

    def add(
        self,
        scored: Iterable[tuple[OutputIdentity, Mapping[str, Outcome]]],
        digests: Mapping[str, str],
        revisions: Mapping[str, str] | None = None,
    ) -> None:
        """Append outcomes, each output in one line, and flush them.

        Args:
            digests: see `reward_digest`.
            revisions: of the rewards at this moment.
        """
        lines: list[str] = []
        by = {name: {"by": digest} for name, digest in digests.items()}
        for name, revision in (revisions or {}).items():
            by[name]["revision"] = revision
        for asked, outcomes in scored:
            told = {name: {**by[name], **_told(outcome)} for name, outcome in outcomes.items()}
            lines.append(_sealed(json.dumps({**asdict(asked), "outcomes": told})))
            for name, outcome in outcomes.items():
                self._note((asked, name, digests[name]), outcome, by[name].get("revision", ""))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(append_to(self.path), "a", encoding="utf-8") as stream:
            stream.write(("\n" if self._cut_off else "") + "".join(f"{line}\n" for line in lines))
        self._cut_off = False

    def _read(self, line: bytes) -> None:
        """Take in a line; one that a kill cut off, that was changed, or that is not of this layout, counts as
        missing."""
        try:
            told = cast("dict[str, Any]", plain_json.loads(_opened(line), finite=True))
            asked = OutputIdentity(*(_text(told[name]) for name in ("file", "image", "item")))
            found = {
                name: (_text(one["by"]), _outcome(one), _text(one.get("revision", "")))
                for name, one in told["outcomes"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        for name, (digest, outcome, revision) in found.items():
            before = self._known.get((asked, name, digest))
            if not (isinstance(before, Score) and isinstance(outcome, Failure)):  # files of shards have no order
                self._note((asked, name, digest), outcome, revision)

    def _note(self, key: tuple[OutputIdentity, str, str], outcome: Outcome, revision: str) -> None:
        self._known[key] = outcome
        self._revisions[key] = revision


def _check(line: bytes) -> str:
    return hashlib.blake2b(line, digest_size=8).hexdigest()


def _sealed(line: str) -> str:
    """A JSON object with the checksum of its text as its last member."""
    return f'{line[:-1]}, "check": "{_check(line.encode())}"}}'


def _opened(line: bytes) -> bytes:
    """The JSON object of a line; of an earlier version, which wrote no checksum, as it is.

    Raises:
        ValueError: it was changed.
    """
    seal = _SEAL.search(line)
    if seal is None:
        return line
    text = line[: seal.start()] + b"}"
    if _check(text) != seal[1].decode():
        raise ValueError("the line was changed")
    return text


def _told(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Score):
        return {"value": outcome.value, "detail": dict(outcome.detail)}
    return {"failure": asdict(outcome)}


def _outcome(told: Mapping[str, Any]) -> Outcome:
    if "failure" in told:
        code, message, retryable = (told["failure"][name] for name in ("code", "message", "retryable"))
        if not isinstance(retryable, bool):
            raise TypeError("retryable must be true or false")
        return Failure(_text(code), _text(message), retryable)
    value, detail = told["value"], told["detail"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no score")
    if not isinstance(detail, dict):
        raise TypeError("detail must be an object")
    return Score(float(value), cast("dict[str, Any]", detail))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
