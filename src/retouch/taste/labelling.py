"""`retouch label`: a page on which people vote on images, with the keyboard first.

Sides and order follow a seed. A vote is on the disk before the next question is sent. A question is answered once: a
key that is pressed twice, or another tab of the same voter, adds no vote.
"""

from __future__ import annotations

import io
import json
import secrets
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs

import numpy as np
from filelock import FileLock, Timeout
from PIL import Image, ImageFilter

from retouch.data.lists import suffix_of
from retouch.errors import ConfigError, ImageProblem
from retouch.imaging.masks import read_mask
from retouch.imaging.reading import open_image, to_rgb
from retouch.observe.loopback import LoopbackHandler, LoopbackServer, open_on
from retouch.process.plain_text import count_of
from retouch.taste.choosing import Ballot, Chooser, Informative
from retouch.taste.fitting import MIN_EXAMPLES
from retouch.taste.images import images_to_vote_on, is_run
from retouch.taste.likelihood import PAIR_ANSWERS, SINGLE_ANSWERS, Answer
from retouch.taste.votes import Vote, VotedImage, VoteFile, groups_of

_FILES = Path(__file__).parent / "page"
_KINDS = {"label.html": "text/html", "label.js": "text/javascript", "label.css": "text/css"}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
_LONGEST_NAME = 64
_OUTLINE = (255, 0, 170, 255)


@dataclass
class Labelling:
    """Votes, and the open question of each voter.

    Attributes:
        goal: number of votes of a voter that the page counts towards.
        of_run: whether the images are of a run's evaluations, whose examples are held out.
    """

    images: Sequence[VotedImage]
    votes: VoteFile
    chooser: Chooser
    alone: bool
    goal: int
    of_run: bool = False
    _open: dict[str, tuple[str, Ballot]] = field(default_factory=dict[str, tuple[str, Ballot]])
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.by_number = {str(number): image for number, image in enumerate(self.images)}
        self._numbers = {image.key: number for number, image in self.by_number.items()}

    def state(self, voter: str) -> dict[str, Any]:
        """State of the page of a voter: the open question, or none after the last one."""
        with self._changing:
            votes = self.votes.of(voter)
            if voter not in self._open and (question := self.chooser.next(voter, votes)) is not None:
                self._open[voter] = secrets.token_urlsafe(8), question
            answered = self.chooser.answered(votes)  # the file may hold votes on other images
            repeated = sum(vote.repeats is not None for vote in answered)
            goal = min(self.goal, self.chooser.total() + repeated)
            told = {"votes": len(answered), "goal": goal, "alone": self.alone}
            if voter not in self._open:
                return {**told, "question": None}
            name, question = self._open[voter]
            sides = [question.left] if question.right is None else [question.left, question.right]
            return {**told, "question": name, "images": [self._told(image) for image in sides]}

    def answer(self, voter: str, question: str, answer: object) -> dict[str, Any]:
        """Take an answer to the open question of a voter; one to another question changes nothing."""
        with self._changing:
            name, asked = self._open.get(voter, ("", None))
            if asked is not None and name == question:
                if answer not in (SINGLE_ANSWERS if asked.right is None else PAIR_ANSWERS):
                    raise ValueError(f"no such answer: {answer!r}")
                said = cast("Answer", answer)
                self.votes.add(Vote(0, voter, said, asked.left, asked.right, asked.repeats, asked.choice))
                del self._open[voter]
        return self.state(voter)

    def undo(self, voter: str) -> dict[str, Any]:
        """Take back the last vote of a voter and ask it again; not one on other images, or of the other kind."""
        with self._changing:
            last = self.votes.of(voter)[-1:]
            if self.chooser.answered(last) == last and (vote := self.votes.undo(voter)) is not None:
                again = Ballot(vote.left, vote.right, vote.repeats, vote.choice)
                self._open[voter] = secrets.token_urlsafe(8), again
        return self.state(voter)

    def _told(self, image: VotedImage) -> Mapping[str, Any]:
        return {
            "number": self._numbers[image.key],
            "prompt": image.prompt,
            "text": image.text or "",
            "masked": image.mask is not None,
            "source": image.source is not None,
        }


@contextmanager
def open_labelling(
    images: Path, votes: Path, *, alone: bool, active: str | None, goal: int, seed: int, trust: bool = False
) -> Iterator[Labelling]:
    """A labelling, with a lock on its votes.

    Args:
        images: see `images_to_vote_on`.
        active: image encoder by whose features the questions are chosen; None: at random.

    Raises:
        ConfigError: nothing to ask, no JSONL file, options that exclude each other, or another process has these votes
            open.
        DataError: no images, or a file of something else.
    """
    if alone and active is not None:
        raise ConfigError("--active: given with --alone, which asks about each image once; leave one of them out")
    if suffix_of(votes) != ".jsonl":
        raise ConfigError(f"--votes: given {votes}; expected a name that ends in .jsonl, by which it is read")
    votes.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(votes.with_name(f"{votes.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"--votes: given {votes}, which another process has open; several voters share one page"
        ) from None
    try:
        found, file = images_to_vote_on(images, votes.parent, trust=trust), VoteFile(votes)
        informative = None if active is None else _informative(found, file, active)
        chooser = Chooser(found, seed, alone=alone, informative=informative)
        if not chooser.total():
            raise ConfigError(
                f"{images}: {len(found)} images, and no two of one example; vote on single ones with --alone, or add "
                "images of other seeds or weights"
            )
        yield Labelling(found, file, chooser, alone, goal, is_run(images))
    finally:
        lock.release()


def _informative(images: Sequence[VotedImage], file: VoteFile, extractor: str) -> Informative:
    from retouch.taste.extractor import Extractor
    from retouch.taste.information import Information
    from retouch.taste.reward import features_of

    return Information(features_of(images, Extractor(extractor))[0], file)


def progress(labelling: Labelling) -> list[str]:
    """Lines on the number of votes in the file, and of the questions that each voter has left."""
    votes, chooser = labelling.votes.all(), labelling.chooser
    voters = {vote.voter: labelling.votes.of(vote.voter) for vote in votes} or {"each voter": []}
    kind = "images" if labelling.alone else "pairs"
    left = [f"{name}: {chooser.left(own):,} of {chooser.total():,} {kind} left" for name, own in voters.items()]
    examples = {vote.left.example for vote in votes}
    return [f"{labelling.votes.path}: {count_of(len(votes), 'vote')} on {count_of(len(examples), 'example')}", *left]


def what_next(labelling: Labelling) -> list[str]:
    """The commands that the votes are for."""
    path, votes = shlex.quote(str(labelling.votes.path)), labelling.votes.all()
    if not votes:
        return []
    told = [f"retouch reward fit {path} --config RUN.yaml"]
    if (examples := len({*groups_of(votes)})) < MIN_EXAMPLES:
        told = [f"a reward needs votes on {MIN_EXAMPLES} examples or photographs, and these are on {examples}"]
    if labelling.of_run:
        return [*told, "DPO and KTO train on images of `retouch sample --for-votes`; those of evaluations are held out"]
    images = [image for vote in votes for image in vote.images]
    if not all(image.prompt and (image.source or not image.mask) for image in images):
        return [*told, "DPO and KTO need the prompt of each image, and a source with each mask; vote on a list of them"]
    data = f"data.format=votes data.path={path}"
    if any(vote.answer in ("left", "right") for vote in votes):
        told.append(f"retouch train RUN.yaml algorithm.name=dpo algorithm.pairs=offline {data}")
    return [*told, f"retouch train RUN.yaml algorithm.name=kto data.votes_as=labels {data}"]


class LabelServer(LoopbackServer):
    """Serves the page of a labelling."""

    def __init__(self, labelling: Labelling, port: int = 0) -> None:
        self.labelling = labelling
        super().__init__(port, _LabelHandler)


def open_server(labelling: Labelling, port: int) -> LabelServer:
    """Raises: ConfigError: a port that is taken."""
    return open_on(port, lambda: LabelServer(labelling, port))


class _LabelHandler(LoopbackHandler):
    server: LabelServer

    def get(self, place: str, query: str) -> None:
        part, _, number = place.partition("/")
        image = self.server.labelling.by_number.get(number)
        voter = _voter(parse_qs(query).get("voter", [""])[0])
        if (place or "label.html") in _KINDS:
            name = place or "label.html"
            kind = f"{_KINDS[name]}; charset=utf-8"
            self.answer(HTTPStatus.OK, (_FILES / name).read_bytes(), kind, **{"Content-Security-Policy": _POLICY})
        elif place == "state" and voter:
            self._tell(self.server.labelling.state(voter))
        elif image is not None and part in ("image", "source", "outline"):
            self._image(image, part)
        else:
            self.answer(HTTPStatus.NOT_FOUND, "no such page")

    def post(self, place: str, told: Any) -> None:
        voter = _voter(told.get("voter")) if isinstance(told, dict) else ""
        if not voter or place not in ("answer", "undo"):
            self.answer(HTTPStatus.BAD_REQUEST, "expected a voter, and an answer or an undo")
            return
        try:
            if place == "undo":
                state = self.server.labelling.undo(voter)
            else:
                state = self.server.labelling.answer(voter, str(told.get("question")), told.get("answer"))
        except ValueError as error:
            self.answer(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:  # a full disk: the page shows the error, and the question stays open
            self.answer(HTTPStatus.INSUFFICIENT_STORAGE, str(error))
        else:
            self._tell(state)

    def _tell(self, state: Mapping[str, Any]) -> None:
        self.answer(HTTPStatus.OK, json.dumps(state), "application/json")

    def _image(self, image: VotedImage, part: str) -> None:
        try:
            content = outline(image) if part == "outline" else _shown(image.source if part == "source" else image.image)
        except (ImageProblem, OSError) as error:
            self.answer(HTTPStatus.NOT_FOUND, str(error))
            return
        self.answer(HTTPStatus.OK, content, "image/png")


def _voter(name: object) -> str:
    """A name in one line; "" if it is none."""
    return " ".join(name.split())[:_LONGEST_NAME] if isinstance(name, str) else ""


def _shown(file: Path | None) -> bytes:
    """The image as it is encoded and trained on: upright, transparent pixels over white."""
    if file is None:
        raise ImageProblem("no such image")
    return _png(to_rgb(open_image(file)))


def outline(image: VotedImage) -> bytes:
    """The edge of a mask, on nothing."""
    if image.mask is None:
        raise ImageProblem("no mask")
    mask = read_mask(open_image(image.mask), str(image.mask)).mask
    wide = 2 * max(1, round(max(mask.size) / 400)) + 1
    edge = np.asarray(mask.filter(ImageFilter.MaxFilter(wide))) > np.asarray(mask)
    drawn = np.zeros((*edge.shape, 4), np.uint8)
    drawn[edge] = _OUTLINE
    return _png(Image.fromarray(drawn))


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
