"""Votes of `retouch label` as examples: pairs for offline DPO, labelled images for KTO."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from retouch.data.base import DataError, ImageSection, ItemError, ItemFiles, item_or_error
from retouch.data.identity import digest, paths
from retouch.data.lists import entries_of, suffix_of
from retouch.data.remote import local_path
from retouch.data.sampler import derive_seed
from retouch.taste.votes import REPLACED, Vote, VotedImage, line_of, read_votes, replaced


class VotesData(ImageSection):
    """A file of votes of `retouch label`."""

    format: Literal["votes"] = "votes"
    votes_as: Literal["pairs", "labels"] = "pairs"
    """"pairs": the preferred and the other image of each decided vote (dpo with `pairs: offline`). "labels": good and
    bad images (kto): single images as they were called, preferred ones as good, the other ones and both of "both bad"
    as bad."""
    source_is_rejected: bool = False
    """For "pairs": a second pair of each preferred image and its source, against edits that change nothing."""

    expects: ClassVar[str] = "votes of `retouch label`"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        entries = entries_of(path) if path.is_file() and suffix_of(path) == ".jsonl" else []
        return bool(entries) and isinstance(entries[0], dict) and {"vote", "voter", "answer"} <= {*entries[0]}

    def listing(self) -> Path | None:
        return local_path(self.path)

    def given_images(self) -> frozenset[str]:
        return frozenset({"win", "lose"} if self.votes_as == "pairs" else {"target"})

    def divisible(self) -> list[tuple[Mapping[str, Any], ItemFiles]]:
        """The votes that were not taken back; those on one photograph, or without one on one example, stay together."""
        path = local_path(self.path)
        votes = read_votes(path)
        first: dict[str, VotedImage] = {}
        for vote in votes:
            first.setdefault(vote.left.example, vote.left)
        items = (
            ItemFiles(
                number, vote.left.prompt, vote.left.source,
                target_path=first[vote.left.example].image if vote.left.source is None else None,
                metadata={} if vote.left.text is None else {"text": vote.left.text}, name=_name(vote),
                original=vote.left.original,
            )
            for number, vote in enumerate(votes)
        )  # fmt: skip
        return [(line_of(vote, path.parent), item) for vote, item in zip(votes, items, strict=True)]

    def list_items(self) -> list[ItemFiles | ItemError]:
        path = local_path(self.path)
        if not path.is_file():
            raise DataError(f"data.path: {path}: no such file of votes")
        parts = _labels if self.votes_as == "labels" else self._pairs
        votes = read_votes(path)
        wrong = replaced(image for vote in votes for image in vote.images)
        found = [(vote, k, *part) for vote in votes for k, part in enumerate(parts(vote))]
        return [
            item_or_error(name := _name(vote), _item, name, image, id_of(vote, k), more, {*vote.images} & wrong)
            for vote, k, image, more in found
        ]

    def each_once(self, items: Sequence[ItemFiles]) -> list[ItemFiles]:
        """Each prompt, text, source and mask once, whatever the number of votes on its samples. Its id follows from
        them: evaluations before and after more votes have the same examples."""
        digests, first = dict[Path, str](), dict[int, ItemFiles]()
        for item in items:
            files = paths([item.source_path, item.mask_path])
            digests |= {path: digest(path) for path in files if path not in digests}
            told = [item.prompt, item.metadata.get("text"), *(digests[path] for path in files)]
            number = _id("voted", json.dumps(told))
            first.setdefault(number, replace(item, id=number))
        return [*first.values()]

    def _pairs(self, vote: Vote) -> Iterator[tuple[VotedImage, dict[str, Any]]]:
        if (sides := _decided(vote)) is None:
            return
        win, lose = sides
        yield win, {"win_path": win.image, "lose_path": lose.image}
        if self.source_is_rejected and win.source is not None:
            yield win, {"win_path": win.image, "lose_path": win.source}


def _name(vote: Vote) -> str:
    return f"vote {vote.number} of {vote.voter}"


def id_of(vote: Vote, part: int) -> int:
    """Id of an example that a vote gives: it does not change when other votes are added or taken back."""
    return _id("vote", vote.voter, vote.number, part)


def _id(*parts: int | str) -> int:
    return derive_seed(*parts) >> 11  # a number that JSON keeps everywhere


def _decided(vote: Vote) -> tuple[VotedImage, VotedImage] | None:
    """The preferred and the other image; None without a preference."""
    if vote.right is None or vote.answer not in ("left", "right"):
        return None
    return (vote.left, vote.right) if vote.answer == "left" else (vote.right, vote.left)


def _labels(vote: Vote) -> Iterator[tuple[VotedImage, dict[str, Any]]]:
    if vote.answer in ("good", "bad"):
        labelled = [(vote.left, vote.answer)]
    elif vote.answer == "both_bad":
        labelled = [(image, "bad") for image in vote.images]
    else:
        win, lose = _decided(vote) or (None, None)
        labelled = [] if win is None or lose is None else [(win, "good"), (lose, "bad")]
    for image, label in labelled:
        yield image, {"target_path": image.image, "target": "file", "metadata": {"label": label}}


def _item(name: str, image: VotedImage, number: int, more: dict[str, Any], wrong: set[VotedImage]) -> ItemFiles:
    for other in wrong:
        raise DataError(f"{other.image}: {REPLACED}")
    if not image.prompt:
        raise DataError(f"{image.image} has no prompt, which a model is trained with; add it to the list of images")
    text = {} if image.text is None else {"text": image.text}
    metadata = {**text, **more.pop("metadata", {})}
    # its mask is white where to repaint, as the reward reads it, whatever the data were that it comes from
    about = {"metadata": metadata, "mask_is_made": image.mask is not None, "name": name, "original": image.original}
    return ItemFiles(number, image.prompt, image.source, image.mask, **about, **more)
