"""Synthetic signs: words of two halves that never meet, the same bytes from the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from PIL import Image

from retouch.data.base import DataError
from retouch.data.dataset import load_dataset
from retouch.data.formats.calligrapher import SelfBenchData
from retouch.data.formats.manifest import ManifestData
from retouch.data.sampler import derive_seed
from retouch.files.disk import only_writer
from retouch.imaging.glyphs import glyph_correlation, ink_of
from retouch.imaging.lines import parse_lines, polygon_mask
from retouch.imaging.masks import mask_box
from retouch.tiny import signs as synth
from retouch.tiny.signs import (
    MANIFEST,
    TEXTS_PROMPT,
    Half,
    draw_sign,
    draw_words,
    half_of,
    misheard,
    synthesize,
    words_of,
    write_signs,
)
from tests.command_line import retouch

SIZE = (32, 64)  # height, width
HALVES: tuple[Half, ...] = get_args(Half)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --- words ---


def test_the_halves_share_no_word_whatever_the_seed() -> None:
    train = {word for seed in range(4) for word in draw_words(400, "train", seed)}
    held_out = {word for seed in range(4) for word in draw_words(100, "held_out", seed)}
    assert len(train) > 1000 and len(held_out) > 300
    assert not train & held_out
    assert {half_of(word) for word in train} == {"train"}
    assert {half_of(word) for word in held_out} == {"held_out"}


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_words_alternate_consonants_and_vowels(length: int) -> None:
    words = draw_words(3, "train", 0, length)
    assert len(set(words)) == 3
    for word in words:
        assert len(word) == length
        assert all((letter in "AEIOU") == bool(i % 2) for i, letter in enumerate(word))
        assert word.isupper()


def test_words_follow_from_the_seed_and_more_words_begin_with_the_fewer() -> None:
    assert draw_words(3, "train", 0) == ["KIGE", "TAHI", "GUZA"]  # a change would change every published data set
    assert draw_words(20, "train", 0)[:5] == draw_words(5, "train", 0)
    assert not set(draw_words(5, "train", 0)) & set(draw_words(5, "train", 1))


def test_excluded_words_leave_the_others_in_order() -> None:
    words = draw_words(8, "train", 0)
    assert draw_words(5, "train", 0, excluded=words[:3]) == words[3:8]
    assert draw_words(6, "train", 0, excluded=[words[1], words[4], "OTHER"]) == [words[i] for i in (0, 2, 3, 5, 6, 7)]


@pytest.mark.parametrize(("length", "train", "held_out"), [(1, 16, 4), (2, 83, 17), (3, 1746, 254)])
def test_a_small_language_gives_all_its_words_and_no_more(length: int, train: int, held_out: int) -> None:
    # counted once; the hash never changes
    for half, count in zip(HALVES, (train, held_out), strict=True):
        assert len(set(draw_words(count, half, 0, length))) == count
        with pytest.raises(DataError) as caught:
            draw_words(count + 1, half, 0, length)
        assert str(caught.value) == (
            f"--count: given {count + 1}; there are {count} {half} words of {length} letters to draw from; lower it, "
            "or set another --length"
        )
    assert train + held_out == 20 ** -(-length // 2) * 5 ** (length // 2)


def test_excluded_words_are_not_there_to_draw() -> None:
    words = draw_words(4, "held_out", 0, 1)
    assert draw_words(2, "held_out", 0, 1, excluded=words[:2]) == words[2:]
    with pytest.raises(DataError, match="there are 2 held_out words of 1 letters"):
        draw_words(3, "held_out", 0, 1, excluded=words[:2])


def test_some_words_are_never_drawn() -> None:
    # 2 of the 1289 held-out words of four letters; the others can be drawn to the last
    words = set(draw_words(1287, "held_out", 0))
    assert len(words) == 1287
    assert not words & synth._AVOIDED


def test_a_word_has_letters() -> None:
    with pytest.raises(DataError) as caught:
        draw_words(1, "train", 0, 0)
    assert str(caught.value) == "--length: given 0; a word has at least 1 letter"


def test_captions_get_the_share_of_letters_wrong_evenly() -> None:
    words = draw_words(2000, "train", 0)
    pairs = [pair for i, word in enumerate(words) for pair in zip(word, misheard(word, 0.3, i), strict=True)]
    wrong = [(right, heard) for right, heard in pairs if right != heard]
    assert len(wrong) / len(pairs) == pytest.approx(0.3, abs=0.015)  # 8000 letters: 3 sigma
    assert all((right in "AEIOU") == (heard in "AEIOU") for right, heard in wrong)
    assert len({heard for right, heard in wrong if right == "A"}) == 4
    assert [misheard(word, 0.0, 0) for word in words] == words
    assert misheard("MOVE", 0.3, 5) == misheard("MOVE", 0.3, 5)


# --- signs ---


@pytest.mark.parametrize("word", ["MOON", "KIGE", "TA", "BATOMU"])
def test_a_sign_has_its_word_inside_the_mask_and_nothing_else(word: str) -> None:
    sign = draw_sign(word, SIZE, seed=3)
    picture, ground, mask = np.asarray(sign.picture), np.asarray(sign.ground), np.asarray(sign.mask)
    assert picture.shape == ground.shape == (*SIZE, 3)
    assert np.unique(mask).tolist() == [0, 255]
    inside = mask == 255
    assert np.array_equal(picture[~inside], ground[~inside])
    assert 0.02 < (picture != ground).any(2)[inside].mean() < 0.5  # ink
    left, top, right, bottom = mask_box(sign.mask)
    assert (right - left, bottom - top) == (56, 24)  # 7/8 and 3/4, whatever the word: it does not tell the length
    assert inside[top:bottom, left:right].all()
    assert ground.mean() > 150 > picture[(picture != ground).any(2)].min()  # light ground, dark ink


def test_signs_read_as_their_word_and_grounds_as_nothing() -> None:
    for word in draw_words(12, "train", 0):
        sign = draw_sign(word, SIZE, seed=0)
        mask = np.asarray(sign.mask)
        left, top, right, bottom = mask_box(sign.mask)
        assert glyph_correlation(np.asarray(sign.picture), mask, word) > 0.7
        assert glyph_correlation(np.asarray(sign.ground), mask, word) == 0.0
        assert ink_of(np.asarray(sign.ground)[top:bottom, left:right]) is None


def test_signs_follow_from_seed_and_word() -> None:
    first = draw_sign("MOON", SIZE, seed=3)
    assert draw_sign("MOON", SIZE, seed=3).picture.tobytes() == first.picture.tobytes()
    assert draw_sign("MOON", SIZE, seed=4).ground.tobytes() != first.ground.tobytes()
    assert draw_sign("NOOM", SIZE, seed=3).ground.tobytes() != first.ground.tobytes()


@pytest.mark.parametrize("size", [(8, 16), (9, 17), (16, 16), (31, 200), (64, 64)])
def test_the_mask_leaves_a_border_at_every_size(size: tuple[int, int]) -> None:
    for seed in range(20):
        left, top, right, bottom = mask_box(draw_sign("A", size, seed).mask)
        assert left >= 0 and top >= 0 and right <= size[1] and bottom <= size[0]
        assert (right - left, bottom - top) == (round(size[1] * 0.875), round(size[0] * 0.75))


# --- folders ---


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    words = draw_words(3, "train", 0)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_signs(tmp_path / name, words, SIZE, seed)
    first = bytes_of(tmp_path / "a")
    assert first == bytes_of(tmp_path / "b")
    assert len(first) == 3 * 3 + 1
    other = bytes_of(tmp_path / "c")
    assert [name for name in first if first[name] == other[name]] == ["self_bench.txt"]


def test_a_folder_with_targets_loads(tmp_path: Path) -> None:
    words = draw_words(3, "train", 0)
    write_signs(tmp_path / "x", words, SIZE, 0, first_id=7)
    data = load_dataset(SelfBenchData(path=str(tmp_path / "x"), resolution=SIZE, max_bad_items=0))
    assert [(e.id, e.metadata["text"]) for e in data] == list(zip((7, 8, 9), words, strict=True))
    for example, word in zip(data, words, strict=True):
        sign = draw_sign(word, SIZE, 0)
        assert example.source is not None and example.target is not None and example.mask is not None
        assert example.source.tobytes() == example.target.tobytes() == sign.picture.tobytes()
        assert example.mask.tobytes() == sign.mask.tobytes()
        assert example.reference is not None
        assert example.reference.tobytes() == sign.picture.crop(mask_box(sign.mask)).tobytes()


@pytest.mark.parametrize("word", ["TEKE", "BAB"])
def test_the_reference_of_a_single_sign_shows_another_word(word: str, tmp_path: Path) -> None:
    """Also where the word is the same read from its end: a reference with its letters teaches to copy them."""
    write_signs(tmp_path / "x", [word], SIZE, 0, styled=True)
    own = draw_sign(word, SIZE, 0)
    same = draw_sign(word, SIZE, derive_seed("reference", 0, word), own.face, own.ink)
    reference = Image.open(tmp_path / "x" / "test0_ref.png")
    assert reference.tobytes() != same.picture.crop(mask_box(same.mask)).tobytes()


def test_a_folder_without_targets_holds_bare_grounds(tmp_path: Path) -> None:
    words = draw_words(3, "train", 0)
    write_signs(tmp_path / "x", words, SIZE, 0, with_targets=False)
    assert not list((tmp_path / "x").glob("*_ref.png"))
    data = load_dataset(SelfBenchData(path=str(tmp_path / "x"), resolution=SIZE, max_bad_items=0, target="none"))
    for example, word in zip(data, words, strict=True):
        assert example.target is None and example.reference is None
        assert example.source is not None
        assert example.source.tobytes() == draw_sign(word, SIZE, 0).ground.tobytes()
        assert example.prompt == f"The text is '{word}'."


# --- retouch data synth ---


def command(out: Path, *options: object) -> tuple[int, str]:
    outcome = retouch("data", "synth", "--out", out, *options)
    return outcome.code, outcome.out + outcome.err


def test_from_the_command_line_to_a_data_set_and_back(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "train"
    assert command(out, "--count", 4, "--seed", 5, "--size", "40x80", "--length", 3) == (0, f"{out}: 4 items\n")
    assert words_of(out) == set(draw_words(4, "train", 5, 3))
    assert Image.open(out / "test3_source.png").size == (80, 40)
    outcome = retouch("data", "validate", out, "--resolution", "40x80")
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, "4 items can be used")


def test_the_command_line_excludes_the_words_of_a_folder(tmp_path: Path) -> None:
    first, second, held_out = tmp_path / "first", tmp_path / "second", tmp_path / "held-out"
    assert command(first, "--count", 6)[0] == 0
    assert command(second, "--count", 6, "--exclude", first, "--no-targets")[0] == 0
    assert command(held_out, "--count", 6, "--half", "held_out", "--exclude", first)[0] == 0
    assert len(words_of(first) | words_of(second)) == 12
    assert words_of(first) | words_of(second) == set(draw_words(12, "train", 0))
    assert words_of(held_out) == set(draw_words(6, "held_out", 0))
    assert not list(second.glob("*_ref.png"))


def test_wrong_captions_stand_in_the_list_and_leave_the_pictures(tmp_path: Path) -> None:
    clean, noisy = tmp_path / "a", tmp_path / "b"
    assert command(clean, "--count", 6)[0] == 0
    assert command(noisy, "--count", 6, "--caption-noise", 0.3)[0] == 0
    before, after = bytes_of(clean), bytes_of(noisy)
    assert before.pop("self_bench.txt") != after.pop("self_bench.txt")
    assert after.pop("words.txt").decode().split() == draw_words(6, "train", 0)
    assert before == after
    captions = {line.partition("-")[2] for line in (noisy / "self_bench.txt").read_text().splitlines()}
    assert captions == {misheard(word, 0.3, 0) for word in draw_words(6, "train", 0)}


def test_a_list_of_other_data_is_no_exclusion(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('[{"prompt": "like a lemon"}]', encoding="utf-8")
    with pytest.raises(DataError, match=r"^--exclude: .*/manifest\.json is no list of signs with `lines`"):
        words_of(tmp_path)


@pytest.mark.parametrize("texts", [1, 2])
def test_words_behind_wrong_captions_are_excluded(texts: int, tmp_path: Path) -> None:
    """The captions of a folder are not the words that its images show: those were drawn again as new ones."""
    noisy, other = tmp_path / "noisy", tmp_path / "other"
    size = ("--size", "64x64", "--texts", texts)
    assert command(noisy, "--count", 6, "--caption-noise", 0.9, *size)[0] == 0
    assert command(other, "--count", 6, "--exclude", noisy, *size)[0] == 0
    words = draw_words(12 * texts, "train", 0)
    assert words_of(noisy) == set(words[: 6 * texts]) and words_of(other) == set(words[6 * texts :])


def test_an_existing_data_set_stays(tmp_path: Path) -> None:
    out = tmp_path / "x"
    assert command(out, "--count", 2)[0] == 0
    before = bytes_of(out)
    assert command(out, "--count", 3, "--seed", 1) == (
        2,
        f"error: {out} already holds a data set; choose another --out, or delete it\n",
    )
    assert bytes_of(out) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--count", 1, "--half", "test"], "--half: given 'test'; allowed: train, held_out"),
        (["--count", 1, "--size", "7x64"], "--size: given 7x64; a sign has at least 8x16 pixels"),
        (["--count", 1, "--size", "32x15"], "--size: given 32x15; a sign has at least 8x16 pixels"),
        (
            ["--count", 1, "--size", "big"],
            "--size: given 'big'; write a side like 512, or HEIGHTxWIDTH like 32x64, of at most 8192",
        ),
        (["--count", 1, "--caption-noise", 30], "--caption-noise: given 30.0; a share of letters lies in [0, 1]"),
        (
            ["--count", 1, "--caption-noise", 0.3, "--no-targets"],
            "--caption-noise with --no-targets: no image shows the word, so no caption can be wrong",
        ),
        (["--count", 1, "--exclude", "nowhere"], "--exclude: nowhere has no self_bench.txt"),
        (
            ["--count", 18, "--half", "held_out", "--length", 2],
            (
                "--count: given 18; there are 17 held_out words of 2 letters to draw from; lower it, or set another "
                "--length"
            ),
        ),
    ],
)
def test_options_that_cannot_work(options: list[object], message: str, tmp_path: Path) -> None:
    assert command(tmp_path / "x", *options) == (2, f"error: {message}\n")
    assert not (tmp_path / "x").exists()


def test_out_is_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("mine")
    assert command(path, "--count", 1) == (2, f"error: {path} is a file; give a folder as --out\n")
    assert path.read_text() == "mine"


# --- several texts ---


def test_signs_with_several_texts_have_a_place_for_each(tmp_path: Path) -> None:
    options: dict[str, Any] = {"half": "train", "seed": 1, "size": (64, 64), "length": 4, "exclude": None}
    assert synthesize(tmp_path / "a", 3, targets=True, caption_noise=0.0, texts=2, **options) == 3
    section = ManifestData(path=str(tmp_path / "a" / MANIFEST), resolution=64)
    first, *_ = examples = list(load_dataset(section, needs={"mask", "source"}))
    assert [e.prompt for e in examples] == [TEXTS_PROMPT.format(e.metadata["text"]) for e in examples]
    assert len({word for e in examples for word in e.metadata["text"].split()}) == 6
    upper, lower = parse_lines(first.metadata["lines"])
    assert first.mask is not None and first.source is not None and upper.bounds and lower.bounds
    assert upper.bounds[3] < 32 < lower.bounds[1]
    shares = [
        glyph_correlation(np.asarray(first.source), np.asarray(polygon_mask([line.polygon or ()], (64, 64))), text)
        for line in (upper, lower) for text in (upper.text, lower.text)
    ]  # fmt: skip
    assert min(shares[0], shares[3]) > 0.85 > 0.75 > max(shares[1], shares[2])  # each word stands in its own row
    assert words_of(tmp_path / "a") == {line.text for e in examples for line in parse_lines(e.metadata["lines"])}


def test_grounds_without_texts_and_wrong_captions(tmp_path: Path) -> None:
    options: dict[str, Any] = {"half": "train", "seed": 1, "size": (64, 64), "length": 4, "texts": 2}
    synthesize(tmp_path / "a", 2, targets=False, caption_noise=0.0, exclude=None, **options)
    synthesize(tmp_path / "b", 2, targets=True, caption_noise=0.0, exclude=None, **options)
    bare, full = (Image.open(tmp_path / name / "sign0.png") for name in ("a", "b"))
    assert np.asarray(bare).min() > np.asarray(full).min() + 50
    assert words_of(tmp_path / "a") == words_of(tmp_path / "b")
    synthesize(tmp_path / "c", 2, targets=True, caption_noise=1.0, exclude=None, **options)
    told = load_dataset(ManifestData(path=str(tmp_path / "c" / "manifest.json"), resolution=64))
    captions = {line.text for e in told for line in parse_lines(e.metadata["lines"])}
    assert not captions & words_of(tmp_path / "b") and words_of(tmp_path / "c") == words_of(tmp_path / "b")
    synthesize(tmp_path / "d", 2, targets=True, caption_noise=0.0, exclude=tmp_path / "b", **options)
    assert not words_of(tmp_path / "d") & words_of(tmp_path / "b")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [({"styled": True}, "--texts: given 2 with --styled"), ({"size": (15, 64)}, "a sign has at least 16x16 pixels")],
)
def test_signs_with_several_texts_that_cannot_be_made(changed: dict[str, Any], problem: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"half": "train", "seed": 1, "size": (64, 64), "length": 4, "exclude": None, **changed}
    with pytest.raises(DataError, match=problem):
        synthesize(tmp_path / "a", 2, targets=True, caption_noise=0.0, texts=2, **options)


@pytest.mark.parametrize(
    "command",
    [("synth", "--count", 2), ("synth", "--count", 2, "--texts", 2, "--size", "64x64"), ("edits", "--count", 2)],
)
def test_two_processes_do_not_mix_their_images_in_one_folder(tmp_path: Path, command: tuple[str, ...]) -> None:
    """The second one ends at once; when the first is gone, also by a kill, the next may write."""
    name, *options = command
    out = tmp_path / "data"
    out.mkdir()
    with only_writer(out):
        outcome = retouch("data", name, *options, "--out", out)
        assert outcome.code == 2
        assert outcome.err == (
            f"error: {out}: another process is writing there; wait for it, or choose another --out\n"
        )
        assert not list(out.iterdir())
    assert retouch("data", name, *options, "--out", out).code == 0
