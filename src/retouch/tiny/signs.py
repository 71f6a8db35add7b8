"""Synthetic text inpainting: pronounceable words in several fonts and colours, on plain signs, with their masks.

Written in the self_bench layout; signs with several texts as a manifest with the place of each. A hash divides the
vocabulary: "train" and "held_out" are disjoint for every seed and count.
"""

from __future__ import annotations

import colorsys
import itertools
import json
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from retouch.data.base import DataError
from retouch.data.sampler import derive_seed
from retouch.files import plain_json
from retouch.files.disk import only_writer, write_whole
from retouch.imaging.glyphs import FONTS, write_spaced
from retouch.imaging.masks import Box, mask_box
from retouch.imaging.png import write_png

Half = Literal["train", "held_out"]

_CONSONANTS, _VOWELS = "BCDFGHJKLMNPRSTVWXYZ", "AEIOU"
_HELD_OUT_SHARE = 8  # one word in 8
MANIFEST = "manifest.json"
"""List of a folder of signs with several texts."""

WORDS = "words.txt"
"""The words that the images show, in a folder whose list has other ones."""

TEXTS_PROMPT = "The text is '{}'"
"""Prompt of a sign with several texts: two words of four letters are as long as the tiny bases read."""

_SMALLEST = (8, 16)  # height, width in pixels: below, the mask touches the border
_AVOIDED = frozenset({"RAPE", "PEDO", "NUDE", "HOMO", "NAZI", "SODO", "LOLI", "PORN"})


@dataclass(frozen=True)
class Sign:
    """One synthetic item.

    Attributes:
        picture: RGB image with the word.
        ground: the image without the word.
        mask: "L", 255 over the place of the word, whatever its length.
        face: font of the word, of `retouch.imaging.glyphs.FONTS`.
        ink: colour of the word.
    """

    word: str
    picture: Image.Image
    ground: Image.Image
    mask: Image.Image
    face: str
    ink: tuple[int, int, int]


def half_of(word: str) -> Half:
    """The part of the vocabulary that a word belongs to."""
    return "held_out" if derive_seed("half", word) % _HELD_OUT_SHARE == 0 else "train"


def draw_words(
    count: int, half: Half, seed: int, length: int = 4, excluded: Collection[str] = frozenset()
) -> list[str]:
    """`count` different words of alternating consonants and vowels. Excluded words change neither the others nor their
    order.

    Raises:
        DataError: the part has fewer words of this length.
    """
    if length < 1:
        raise DataError(f"--length: given {length}; a word has at least 1 letter")
    draw = Random(derive_seed("words", seed, half))
    left_out = _AVOIDED.union(excluded)
    most = _words_to_find(half, length, left_out)
    if count > most:
        raise DataError(
            f"--count: given {count}; there are {most} {half} words of {length} letters to draw from; lower it, or set "
            "another --length"
        )
    words: dict[str, None] = {}
    while len(words) < count:
        word = "".join(draw.choice(letters) for letters in _alphabets(length))
        if half_of(word) == half and word not in left_out:
            words[word] = None
    return list(words)


def misheard(word: str, share: float, seed: int) -> str:
    """The word with each letter wrong with probability `share`, vowels for vowels and consonants for consonants, like a
    scraped caption.

    Wrong letters are uniform: the right letter is the likeliest for share < 19 / 20 (consonants) or < 4 / 5 (vowels).
    """
    draw = Random(derive_seed("caption", seed, word))
    letters = ""
    for letter, alphabet in zip(word, _alphabets(len(word)), strict=True):
        wrong = draw.random() < share
        letters += draw.choice(alphabet.replace(letter, "")) if wrong else letter
    return letters


def _alphabets(length: int) -> list[str]:
    return [_VOWELS if i % 2 else _CONSONANTS for i in range(length)]


def _words_to_find(half: Half, length: int, left_out: Collection[str]) -> int:
    """Number of words that random sampling finds in short time: all of a small vocabulary, 90 % of a large one."""
    if length <= 4:
        words = map("".join, itertools.product(*_alphabets(length)))
        return sum(half_of(word) == half and word not in left_out for word in words)
    language = math.prod(map(len, _alphabets(length)))
    shares = 1 if half == "held_out" else _HELD_OUT_SHARE - 1
    return language * shares * 9 // (_HELD_OUT_SHARE * 10) - len(left_out)


def draw_sign(
    word: str,
    size: tuple[int, int],
    seed: int,
    face: str | None = None,
    ink: tuple[int, int, int] | None = None,
) -> Sign:
    """A sign of `size` (height, width) in pixels.

    Letters are evenly spaced across the mask; the ground is light, the ink dark, both of any hue.

    Args:
        face: a font of `retouch.imaging.glyphs.FONTS`; None: a random one.
        ink: a colour; None: a random dark one.
    """
    draw = Random(derive_seed("sign", seed, word))
    height, width = size
    ground = Image.fromarray(_ground(draw, height, width))
    box_width, box_height = round(width * 0.875), round(height * 0.75)
    left = (width - box_width) // 2 + draw.randint(-1, 1)
    top = (height - box_height) // 2 + draw.randint(-1, 1)
    mask = np.zeros((height, width), np.uint8)
    mask[top : top + box_height, left : left + box_width] = 255
    picture = ground.copy()
    name = face or draw.choice(list(FONTS))
    colour = ink or draw_ink(draw)
    write_spaced(picture, word, name, (left, top, left + box_width, top + box_height), colour)
    return Sign(word, picture, ground, Image.fromarray(mask, "L"), name, colour)


def write_signs(
    out: Path,
    words: list[str],
    size: tuple[int, int],
    seed: int,
    *,
    with_targets: bool = True,
    first_id: int = 0,
    caption_noise: float = 0.0,
    styled: bool = False,
) -> None:
    """Write a self_bench folder.

    Args:
        caption_noise: share of wrong letters in the list; the images show the words.
        styled: the reference is a crop of another word in the font and colour of this sign, from which style can be
            learned but no letters. Also without targets.
        with_targets: False writes the bare ground as source and no reference: examples without a target image, for RL
            (`data.target: none`).

    Raises:
        DataError: the folder already holds a list file, or is a file itself.
    """
    listing = out / "self_bench.txt"
    with new_data(out, listing):
        for n, word in enumerate(words, first_id):
            sign = draw_sign(word, size, seed)
            write_png(sign.picture if with_targets else sign.ground, out / f"test{n}_source.png")
            write_png(sign.mask, out / f"test{n}_mask.png")
            shown = _other_word(sign, words[n - first_id - 1], seed) if styled else sign
            if with_targets or styled:
                write_png(shown.picture.crop(mask_box(shown.mask)), out / f"test{n}_ref.png")
        _keep_words(out, words, caption_noise)
        # the list comes last: an incomplete folder has none, and cannot be read
        captions = [misheard(word, caption_noise, seed) for word in words]
        write_whole(listing, "".join(f"{n}-{text}\n" for n, text in enumerate(captions, first_id)))


def _other_word(sign: Sign, word: str, seed: int) -> Sign:
    """A sign of another ground with `word` (if it is the same, reversed or with all letters wrong) in the font and
    colour of `sign`."""
    other = next(other for other in (word, word[::-1], misheard(word, 1.0, seed)) if other != sign.word)
    size = (sign.picture.height, sign.picture.width)
    return draw_sign(other, size, derive_seed("reference", seed, sign.word), sign.face, sign.ink)


@dataclass(frozen=True)
class Texts:
    """One synthetic item with several texts, each in a box of its own, from top to bottom.

    Attributes:
        picture: RGB image with the words.
        ground: the image without them.
    """

    words: tuple[str, ...]
    picture: Image.Image
    ground: Image.Image
    boxes: tuple[Box, ...]


def draw_texts(words: Sequence[str], size: tuple[int, int], seed: int) -> Texts:
    """A sign of `size` (height, width) in pixels with a word in each of its equally high rows, each word in a font and
    colour of its own."""
    draw = Random(derive_seed("texts", seed, *words))
    height, width = size
    ground = Image.fromarray(_ground(draw, height, width))
    picture, row, boxes = ground.copy(), height // len(words), list[Box]()
    for number, word in enumerate(words):
        box_width, box_height = round(width * 0.875), round(row * 0.75)
        left = (width - box_width) // 2 + draw.randint(-1, 1)
        top = number * row + (row - box_height) // 2 + draw.randint(-1, 1)
        boxes.append((left, top, left + box_width, top + box_height))
        write_spaced(picture, word, draw.choice(list(FONTS)), boxes[-1], draw_ink(draw))
    return Texts(tuple(words), picture, ground, tuple(boxes))


def write_texts(
    out: Path,
    groups: Sequence[Sequence[str]],
    size: tuple[int, int],
    seed: int,
    *,
    with_targets: bool = True,
    caption_noise: float = 0.0,
) -> None:
    """Write a folder with manifest.json: a sign for each group of words, with the box of each word under `lines`. The
    boxes are the mask.

    Args:
        with_targets, caption_noise: as in `write_signs`.

    Raises:
        DataError: the folder already holds a manifest, or is a file itself.
    """
    manifest = out / MANIFEST
    with new_data(out, manifest):
        entries: list[dict[str, Any]] = []
        for n, words in enumerate(groups):
            sign = draw_texts(words, size, seed)
            write_png(sign.picture if with_targets else sign.ground, out / f"sign{n}.png")
            told = [misheard(word, caption_noise, seed) for word in words]
            lines = [{"text": text, "box": list(box)} for text, box in zip(told, sign.boxes, strict=True)]
            entry = {
                "id": n,
                "prompt": TEXTS_PROMPT.format(" ".join(told)),
                "image_path": f"sign{n}.png",
                "lines": lines,
            }
            entries.append(entry)
        _keep_words(out, [word for words in groups for word in words], caption_noise)
        # the list comes last: an incomplete folder has none, and cannot be read
        write_whole(manifest, json.dumps(entries, indent=1) + "\n")


def _keep_words(out: Path, words: Sequence[str], caption_noise: float) -> None:
    if caption_noise:
        write_whole(out / WORDS, "".join(f"{word}\n" for word in words))


@contextmanager
def new_data(out: Path, listing: Path) -> Iterator[None]:
    """Make a folder, and hold it while its files are written, the list last.

    Raises:
        DataError: it already holds a list, another process writes there, or it is a file itself.
    """
    if out.is_file():
        raise DataError(f"{out} is a file; give a folder as --out")
    out.mkdir(parents=True, exist_ok=True)
    with only_writer(out):
        if listing.exists():
            raise DataError(f"{out} already holds a data set; choose another --out, or delete it")
        yield


def _ground(draw: Random, height: int, width: int) -> NDArray[np.uint8]:
    """A light colour with a gradient across the sign."""
    colour = np.array(colorsys.hsv_to_rgb(draw.random(), draw.uniform(0.05, 0.35), draw.uniform(0.85, 1.0)))
    angle = draw.uniform(0, 2 * np.pi)
    y, x = np.mgrid[0:height, 0:width]
    ramp = (np.cos(angle) * x / width + np.sin(angle) * y / height + 1.5) / 3
    shade = 1 - (1 - draw.uniform(0.88, 1.0)) * ramp[..., None]
    return np.rint(colour * shade * 255).astype(np.uint8)


def draw_ink(draw: Random) -> tuple[int, int, int]:
    """A dark colour."""
    r, g, b = colorsys.hsv_to_rgb(draw.random(), draw.uniform(0.3, 1.0), draw.uniform(0.05, 0.4))
    return round(r * 255), round(g * 255), round(b * 255)


def synthesize(
    out: Path,
    count: int,
    half: str,
    seed: int,
    size: tuple[int, int],
    length: int,
    targets: bool,
    exclude: Path | None,
    caption_noise: float,
    styled: bool = False,
    texts: int = 1,
) -> int:
    """`retouch data synth` -> the number of items written.

    Raises:
        DataError: an unknown half, too many words, too small a size, a folder in use, an unreadable exclusion, wrong
            captions of images without a word, or references of signs with several texts.
    """
    if styled and texts > 1:
        raise DataError(
            f"--texts: given {texts} with --styled; references are of signs with one text; drop one of them"
        )
    if not 0 <= caption_noise <= 1:
        raise DataError(f"--caption-noise: given {caption_noise}; a share of letters lies in [0, 1]")
    if caption_noise and not targets:
        raise DataError("--caption-noise with --no-targets: no image shows the word, so no caption can be wrong")
    if half not in ("train", "held_out"):
        raise DataError(f"--half: given {half!r}; allowed: train, held_out")
    least = (_SMALLEST[0] * texts, _SMALLEST[1])
    if size[0] < least[0] or size[1] < least[1]:
        raise DataError(f"--size: given {size[0]}x{size[1]}; a sign has at least {least[0]}x{least[1]} pixels")
    words = draw_words(count * texts, half, seed, length, words_of(exclude) if exclude else ())
    if texts > 1:
        groups = [words[i : i + texts] for i in range(0, len(words), texts)]
        write_texts(out, groups, size, seed, with_targets=targets, caption_noise=caption_noise)
        return len(groups)
    options: dict[str, Any] = {"with_targets": targets, "caption_noise": caption_noise, "styled": styled}
    write_signs(out, words, size, seed, **options)
    return len(words)


def words_of(folder: Path) -> set[str]:
    """The words that the images of a folder show, which `write_signs` or `write_texts` wrote; of a folder with wrong
    captions that has no `WORDS`, those of its list.

    Raises:
        DataError: it has no list file, or another one.
    """
    listing, manifest, shown = folder / "self_bench.txt", folder / MANIFEST, folder / WORDS
    if shown.is_file():
        return set(shown.read_text(encoding="utf-8").split())
    if manifest.is_file():
        try:
            entries = plain_json.loads(manifest.read_text(encoding="utf-8"))
            return {str(line["text"]) for entry in entries for line in entry["lines"]}
        except (ValueError, KeyError, TypeError):
            raise DataError(f"--exclude: {manifest} is no list of signs with `lines`; give a folder of synth") from None
    if not listing.is_file():
        raise DataError(f"--exclude: {folder} has no self_bench.txt")
    return {line.partition("-")[2].strip() for line in listing.read_text(encoding="utf-8").splitlines() if line.strip()}
