"""A file of votes: what was given is in it, whatever ends the process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from retouch.errors import DataError
from retouch.taste.votes import Vote, VotedImage, VoteFile, read_votes
from tests.taste.voters import images_of


@pytest.fixture
def pair() -> list[VotedImage]:
    return images_of(1, 2)


def test_votes_are_read_as_they_were_given(tmp_path: Path, pair: list[VotedImage]) -> None:
    left, right = (
        replace(image, image=tmp_path / image.image.name, mask=Path("/elsewhere/mask.png")) for image in pair
    )
    file = VoteFile(tmp_path / "votes.jsonl")
    given = [
        file.add(Vote(0, "ann", "left", left, right, choice="active")),
        file.add(Vote(0, 'bob"\n<b>', "both_bad", right, left, repeats=1)),
        file.add(Vote(0, "ann", "good", replace(left, text="한글 “quote”", seed=7, weights="base"))),
    ]
    assert [vote.number for vote in given] == [1, 2, 3]
    assert read_votes(tmp_path / "votes.jsonl") == given == VoteFile(tmp_path / "votes.jsonl").all()
    moved = tmp_path / "moved"
    moved.mkdir()
    (tmp_path / "votes.jsonl").rename(moved / "votes.jsonl")
    assert read_votes(moved / "votes.jsonl")[0].left.image == moved / left.image.name  # relative to the file


def test_a_vote_that_was_taken_back_is_gone_and_its_number_is_not_given_again(
    tmp_path: Path, pair: list[VotedImage]
) -> None:
    file = VoteFile(tmp_path / "votes.jsonl")
    first, other = (file.add(Vote(0, name, "tie", *pair)) for name in ("ann", "bob"))
    assert file.undo("ann") == first and file.undo("ann") is None
    again = VoteFile(tmp_path / "votes.jsonl")
    assert again.all() == [other]
    assert again.undo("bob") == other
    assert VoteFile(tmp_path / "votes.jsonl").add(Vote(0, "ann", "tie", *pair)).number == 3


@pytest.mark.parametrize("kept", [0, 1, 30])
def test_a_line_that_a_crash_cut_off_is_dropped_by_the_next_writer(
    tmp_path: Path, pair: list[VotedImage], kept: int
) -> None:
    path = tmp_path / "votes.jsonl"
    given = VoteFile(path).add(Vote(0, "ann", "left", *pair))
    line = path.read_bytes()
    path.write_bytes(line + line.replace(b'"vote": 1', b'"vote": 2')[:kept])
    file = VoteFile(path)
    assert file.all() == [given]
    assert file.add(Vote(0, "ann", "right", *pair)).number == 2
    assert [vote.answer for vote in read_votes(path)] == ["left", "right"]


@pytest.mark.parametrize(
    "content",
    ["notes without an end", '{"prompt": "a sign"}', '{"vote": 1, "voter": "ann", "answer": "up", "left": {}}\n'],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "votes.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="jsonl"):
        VoteFile(path)
    assert path.read_text() == content


def test_a_vote_that_a_full_disk_cuts_off_is_no_part_of_the_next_one(
    tmp_path: Path, pair: list[VotedImage], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write = VoteFile(tmp_path / "votes.jsonl"), os.write
    given = [file.add(Vote(0, "ann", "left", *pair))]
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:30]))
        with pytest.raises(OSError, match="full disk"):
            file.add(Vote(0, "ann", "right", *pair))
    given.append(file.add(Vote(0, "ann", "tie", *pair)))
    assert read_votes(tmp_path / "votes.jsonl") == given == file.all()


def test_files_of_two_voters_can_be_joined_and_those_of_one_are_refused(tmp_path: Path, pair: list[VotedImage]) -> None:
    for name in ("ann", "bob"):
        file = VoteFile(tmp_path / f"{name}.jsonl")
        file.add(Vote(0, name, "left", *pair))
        file.add(Vote(0, name, "right", *pair))
    file.undo("bob")
    ann, bob = ((tmp_path / f"{name}.jsonl").read_text() for name in ("ann", "bob"))
    joined = tmp_path / "joined.jsonl"
    joined.write_text(ann + bob)
    assert [(v.voter, v.answer) for v in read_votes(joined)] == [("ann", "left"), ("ann", "right"), ("bob", "left")]
    assert VoteFile(joined).undo("ann") == read_votes(tmp_path / "ann.jsonl")[1]
    joined.write_text(ann + ann)
    with pytest.raises(DataError, match="a second vote 1 of 'ann'"):
        read_votes(joined)
