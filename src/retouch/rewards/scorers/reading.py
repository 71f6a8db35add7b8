"""Reading text in images: the base of the scorers that read, on rapidocr (PP-OCR on onnxruntime; its weights are in the
wheel) or PaddleOCR."""

from __future__ import annotations

import copy
import importlib
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from retouch.config.base import Text
from retouch.config.errors import nearest
from retouch.errors import ConfigError, installed
from retouch.imaging.lines import Bounds, folded, joined
from retouch.imaging.masks import MASK_THRESHOLD, Box, mask_box, widen
from retouch.process.machine import installed_version, threads_sleep
from retouch.process.plain_text import some_of
from retouch.rewards.base import PackageScorer, RewardEntry
from retouch.rewards.protocol import Pixels, RewardItem
from retouch.rewards.scorers import line_readers, paddle
from retouch.rewards.scorers.paddle import bgr
from retouch.types import Failure

_HEIGHT = 48  # pixels to which the recogniser scales the height of a line
_BUCKET = 32  # line widths are padded to a multiple of this: a score then does not depend on its batch
_BATCH = 16
_LONGEST = 32  # ratio of the sides of a crop: detection scales the short side up to 736 px, and a sliver takes minutes


SECONDS_A_PAGE = 0.54
"""Seconds in which an instance with one core finds and reads the lines of an image of 512 x 512, by
benchmarks/results/reading_time.json: the mean of one line and six. An image of 1024 x 1024 takes twice as long."""

_LANGUAGES = {
    "CYRILLIC": "cyrillic", "HANGUL": "korean", "ARABIC": "arabic", "DEVANAGARI": "devanagari", "THAI": "th",
    "GREEK": "el", "TAMIL": "ta", "TELUGU": "te", "KANNADA": "ka",
}  # fmt: skip
"""Script, as names of characters begin -> language of rapidocr that reads it."""


@dataclass(frozen=True)
class FoundLine:
    """A box of text that the detector found.

    Attributes:
        polygon: four corners (x, y) in pixels of the crop.
    """

    text: str
    confidence: float
    polygon: tuple[tuple[float, float], ...]

    @property
    def bounds(self) -> Bounds:
        """The smallest upright box around the polygon."""
        xs, ys = zip(*self.polygon, strict=True)
        return min(xs), min(ys), max(xs), max(ys)


class ReadingEntry(RewardEntry):
    """Options of the rewards that read text."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of the recogniser; 0 uses all cores."""
    engine: Literal["rapidocr", "paddleocr"] = "rapidocr"
    """Library that reads. PaddleOCR 3 or newer must be installed separately, and downloads its models."""
    language: Text | None = None
    """Language of the recogniser by the engine's name for it, like "korean", "cyrillic" or "arabic"; the model is
    downloaded on first use. Null is the engine's default, which reads Chinese, Japanese and most languages with Latin
    letters."""

    @property
    def cpu_only(self) -> str | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.engine == "paddleocr":
            return None
        return f"{self.engine} reads on the CPU; leave device out, or set engine: paddleocr"

    def reads_text(self) -> bool:
        return True

    def extras(self) -> frozenset[str]:
        return frozenset({"ocr"} if self.engine == "rapidocr" else ())

    def finds_lines(self) -> bool:
        """Whether the scorer finds the lines of whole images, instead of reading crops of one line."""
        return True

    def seconds_an_image(self) -> float:
        return SECONDS_A_PAGE if self.finds_lines() and self.engine == "rapidocr" else 0.0

    def reader(self) -> str:
        """The engine, its version and language, for revisions."""
        # 2: texts beyond its dictionary fail
        version = installed_version("rapidocr") if self.engine == "rapidocr" else f"{paddle.version()} 2"
        return f"{self.engine} {version}" + (f" {self.language}" if self.language else "")

    def lacking(self, text: str) -> list[str]:
        """Those that rapidocr's default model, or a reader of English lines, cannot return; none of PaddleOCR or of
        another language, whose model may not be here."""
        if self.engine in line_readers.PACKAGES:
            return missing_characters(text, _comparable(line_readers.CHARACTERS)) if self.is_made_here else []
        default = self.is_made_here and self.engine == "rapidocr" and self.language is None
        if not default or text.isascii() or installed_version("rapidocr") == "missing":
            return []
        return missing_characters(text, packaged_characters())

    def remedy_for(self, characters: Sequence[str], name: str) -> str:
        """The language of rapidocr that has the scripts of the characters; of PaddleOCR's, whose names depend on
        `detect`, none is proposed."""
        key = f"rewards.{name}." if name else ""
        if self.engine in line_readers.PACKAGES:
            return f"set {key}engine=rapidocr, or use another text"
        if self.engine == "paddleocr":
            return f"set {key}language to one of PaddleOCR's that has them, or use another text"
        return remedy_for(characters, key)


Reads = TypeVar("Reads", bound=ReadingEntry)


class ReadingScorer(PackageScorer[Reads]):
    """Base of the scorers that read text."""

    def __init__(self, options: Reads, settings: str = "") -> None:
        super().__init__(options, f"{options.reader()} {settings or options.scorer}")
        self._engine: Any = None
        self._paddle: paddle.PaddleReader | None = None
        self._lines: line_readers.LineReader | None = None
        self._known: frozenset[str] | None = None

    def load(self, device: str) -> None:
        """Build the engine; rapidocr always runs on the CPU.

        Raises:
            ConfigError: the engine is not installed, or has no such language.
        """
        if self.options.engine == "paddleocr":
            self._paddle = paddle.PaddleReader(device, self.options.threads, self.options.language)
            self._paddle.load(find=self.options.finds_lines())
            return
        if self.options.engine in line_readers.PACKAGES:
            self._lines = line_readers.open_reader(self.options.engine, self.options.threads)
            return
        with installed(f"the {self.options.scorer} reward", "ocr"):
            from rapidocr import RapidOCR
        _let_sessions_sleep()
        language = {} if self.options.language is None else _rapid_language(self.options.language)
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,  # keep unsure readings: a wrong letter is a lower score, not an empty one
                "Global.use_cls": False,  # the angle classifier turns short words upside down
                "EngineConfig.onnxruntime.intra_op_num_threads": self.options.threads or -1,
                **language,
            }
        )

    @property
    def engine(self) -> Any:
        """The loaded `rapidocr.RapidOCR`; None with PaddleOCR."""
        return self._engine

    def beyond_reader(self, *asked: str) -> Failure | None:
        """A failure for texts that no image can score: one without a visible character, or texts of which more than
        half of the characters are missing in the reader's dictionary: it reads others in their place.

        Args:
            asked: in their normal form.
        """
        if not all(asked):
            return Failure("bad_item", "the text to read has no visible character; set another one, or leave it out")
        written = "".join(asked).replace(" ", "")
        lacking = missing_characters(written, self._characters())
        if 2 * sum(map(written.count, lacking)) <= len(written):
            return None
        return Failure(
            "bad_item",
            f"the reader of {self.options.scorer} has no {some_of(lacking)} in its dictionary, for the text "
            f"{' / '.join(asked)!r}; "
            f"{self.options.remedy_for(lacking, '')}",
        )

    def _characters(self) -> frozenset[str] | None:
        """The characters that the loaded engine can return; None if it does not list them."""
        if self._known is None and self._engine is not None and hasattr(self._engine, "cfg"):
            self._known = _characters_of(self._engine)
        if self._known is None and self._paddle is not None and (entries := self._paddle.characters()):
            self._known = _comparable(entries)
        if self._known is None and self._lines is not None:
            self._known = _comparable(line_readers.CHARACTERS)
        return self._known

    def find_lines(self, crops: Sequence[Pixels]) -> list[list[FoundLine]]:
        """The lines of each RGB crop, in the engine's order: from top to bottom, then from left to right."""
        if self._paddle is not None:
            return [[FoundLine(*line) for line in lines] for lines in self._paddle.find(crops)]
        return [self._find(crop) for crop in crops]

    def read_texts(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """The text of all lines of each RGB crop, `joined`, and its mean confidence; ("", 0.0) without lines."""
        found = [in_reading_order(lines) for lines in self.find_lines(crops)]
        sure = [float(np.mean([line.confidence for line in lines])) if lines else 0.0 for lines in found]
        return [(joined(line.text for line in lines), one) for lines, one in zip(found, sure, strict=True)]

    def read_lines(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """Text and confidence of each RGB crop, which holds one line."""
        if self._lines is not None:
            return [self._lines.read(crop) for crop in crops]
        return self._paddle.read_lines(crops) if self._paddle is not None else self._read_as_line(crops)

    def _output(self, crop: Pixels) -> Any:
        # rapidocr keeps these three flags between calls: always pass all of them
        return self._engine(bgr(crop), use_det=True, use_cls=False, use_rec=True)

    def _find(self, crop: Pixels) -> list[FoundLine]:
        output = self._output(crop)
        if not output.txts:  # None where nothing was found
            return []
        return [
            FoundLine(str(text), float(confidence), tuple((float(x), float(y)) for x, y in box))
            for text, confidence, box in zip(output.txts, output.scores, output.boxes, strict=True)
        ]

    def _read_as_line(self, crops: Sequence[Pixels]) -> list[tuple[str, float]]:
        """The recogniser alone, on batches of one padded width."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        # the public call takes one image at a time; a copy shares the network, and the engine keeps its own settings
        recognizer = copy.copy(self._engine._load_rec_model())
        recognizer.rec_batch_num = _BATCH
        results: list[tuple[str, float]] = [("", 0.0)] * len(crops)
        buckets: dict[int, list[int]] = {}
        for i, crop in enumerate(crops):
            width = math.ceil(_HEIGHT * crop.shape[1] / crop.shape[0])
            buckets.setdefault(math.ceil(width / _BUCKET) * _BUCKET, []).append(i)
        for width, members in buckets.items():
            recognizer.rec_image_shape = [3, _HEIGHT, width]
            output = recognizer(TextRecInput(img=[bgr(crops[i]) for i in members], return_word_box=False))
            for i, text, confidence in zip(members, output.txts, output.scores, strict=True):
                results[i] = (text, float(confidence))
        return results


def rows_of(lines: Sequence[FoundLine]) -> list[list[FoundLine]]:
    """The lines in reading order: rows of lines that overlap vertically by at least half of the lower one's height,
    from top to bottom, each from left to right, or from right to left if most of its letters are written so."""
    rows: list[list[FoundLine]] = []
    for line in sorted(lines, key=lambda found: found.bounds[1] + found.bounds[3]):
        if rows and any(_beside(line, other) for other in rows[-1]):
            rows[-1].append(line)
        else:
            rows.append([line])
    return [sorted(row, key=lambda found: found.bounds[0], reverse=_is_from_right(row)) for row in rows]


def in_reading_order(lines: Sequence[FoundLine]) -> Sequence[FoundLine]:
    """The lines in the engine's order, in which those of a row follow from left to right; by `rows_of` if any row is
    written from right to left."""
    rows = rows_of(lines)
    return [line for row in rows for line in row] if any(map(_is_from_right, rows)) else lines


def _beside(one: FoundLine, other: FoundLine) -> bool:
    (_, top, _, bottom), (_, upper, _, lower) = one.bounds, other.bounds
    return min(bottom, lower) - max(top, upper) >= min(bottom - top, lower - upper) / 2


def _is_from_right(lines: Sequence[FoundLine]) -> bool:
    ways = [unicodedata.bidirectional(character) for line in lines for character in line.text]
    return ways.count("R") + ways.count("AL") > ways.count("L")


@cache
def _let_sessions_sleep() -> None:
    """From here on, threads of rapidocr's sessions sleep while they wait, as those of torch do (`let_threads_sleep`).
    By default they spin, and rapidocr has no parameter for the option of a session that changes this."""
    if not threads_sleep():
        return
    try:
        sessions: Any = importlib.import_module("rapidocr.inference_engine.onnxruntime.main")
    except ImportError:  # another release: readings are the same
        return
    made = sessions.SessionOptions

    def options() -> Any:
        session = made()
        for pool in ("intra_op", "inter_op"):
            session.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
        return session

    sessions.SessionOptions = options


def _rapid_language(language: str) -> dict[str, Any]:
    """Parameters of rapidocr for a language: of its newest models that read it, which are not always the default ones.

    Raises:
        ConfigError: no model reads it.
    """
    from rapidocr.utils.model_resolver import list_supported_langs
    from rapidocr.utils.typings import LangRec, ModelType, OCRVersion, TaskType

    known = {one.value: one for one in LangRec}
    if language not in known:
        raise ConfigError(f"language: given {language!r}, which rapidocr does not read; {nearest(language, known)}")
    for version, kind in (("PP-OCRv6", "small"), ("PP-OCRv5", "mobile"), ("PP-OCRv4", "mobile")):
        if language in list_supported_langs(TaskType.REC, OCRVersion(version), ModelType(kind)):
            versions = {"Rec.ocr_version": OCRVersion(version), "Rec.model_type": ModelType(kind)}
            return {"Rec.lang_type": known[language], **versions}
    raise ConfigError(f"language: given {language!r}, for which rapidocr has no small model; set another one")


@cache
def packaged_characters() -> frozenset[str]:
    """The characters of rapidocr's default recogniser, which is in its wheel."""
    from rapidocr import RapidOCR

    return _characters_of(RapidOCR(params={"Global.log_level": "error"}))


def _characters_of(engine: Any) -> frozenset[str]:
    """The characters that the recogniser of a `rapidocr.RapidOCR` can return."""
    return _comparable(engine._load_rec_model().postprocess_op.character)


def _comparable(entries: Sequence[str]) -> frozenset[str]:
    """The characters of a dictionary in the normal form of comparisons, and their small letters."""
    characters = folded(" ".join(entry for entry in entries if entry != "blank"))
    return frozenset(characters + characters.casefold())


def missing_characters(text: str, known: frozenset[str] | None) -> list[str]:
    """The characters of a text, once each and in order, that a reader cannot return; none if `known` is None."""
    if known is None:
        return []
    return [character for character in dict.fromkeys(folded(text)) if character != " " and character not in known]


def remedy_for(characters: Sequence[str], key: str = "") -> str:
    """How to read characters that are missing in the dictionary of the default recogniser.

    Args:
        key: of the reward, with a point behind it.
    """
    scripts = {character: unicodedata.name(character, "").partition(" ")[0] for character in characters}
    languages = list(dict.fromkeys(_LANGUAGES[script] for script in scripts.values() if script in _LANGUAGES))
    if not languages:
        return f"set {key}engine=paddleocr and a language that has them, or use another text"
    # rapidocr puts lines of Arabic in order with a package of its extra rtl
    needs = " (pip install 'rapidocr[rtl]')" if "arabic" in languages else ""
    unread = [one for one, script in scripts.items() if script not in _LANGUAGES and one.isalpha()]
    others = f"; use other texts for {some_of(unread)}" if unread else ""
    return f"set {key}language={' or '.join(languages)}{needs}{others}"


def unusable_mask(item: RewardItem) -> Failure | None:
    """A failure if the item has an empty mask or one of another size; the whole image is not read instead."""
    if item.mask is None:
        return None
    if item.mask.shape != item.image.shape[:2]:
        return Failure("bad_item", f"image {item.image.shape[:2]} and mask {item.mask.shape} must have one size")
    if not (item.mask >= MASK_THRESHOLD).any():
        return Failure("bad_item", "the mask is empty: there is nothing in it to read; leave it out to read the image")
    return None


def unreadable(item: RewardItem, margin: float) -> Failure | None:
    """A failure if the crop of an item cannot hold text."""
    wrong = unusable_mask(item)
    if wrong is not None:
        return wrong
    height, width = crop_for(item, margin).shape[:2]
    if max(height, width) > _LONGEST * min(height, width):
        return Failure("bad_item", f"no text fits in {width} x {height} pixels; use a less narrow mask")
    return None


def crop_for(item: RewardItem, margin: float) -> Pixels:
    """The mask box of the image, widened; the whole image without a mask. Check `unusable_mask` first."""
    left, top, right, bottom = crop_box(item, margin)
    return item.image[top:bottom, left:right]


def crop_box(item: RewardItem, margin: float) -> Box:
    """The box of `crop_for` in the image."""
    height, width = item.image.shape[:2]
    return (0, 0, width, height) if item.mask is None else widen(mask_box(item.mask), margin, width, height)
