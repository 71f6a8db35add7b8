"""A sample keeps the values of its file outside the mask: every mode, depth, profile, alpha and orientation."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from retouch.imaging.file_image import FileImage, read_file_image
from retouch.imaging.masks import paste_back
from retouch.imaging.reading import open_image, packed, to_rgb

from .image_files import (
    ADOBE_RGB,
    DISPLAY_P3,
    PROPHOTO,
    grey_profile,
    png_chunks,
    png_values,
    rgb_profile,
    scanner_profile,
    write_png_of,
    write_tiff_of,
)

WIDTH, HEIGHT = 24, 16
BOX = (4, 4, 16, 12)
"""Part of the image that was generated."""
RNG = np.random.default_rng(0)
GREY, GREY_16 = (
    RNG.integers(0, 256 << shift, (HEIGHT, WIDTH, 1)).astype(kind) for shift, kind in ((0, "u1"), (8, "u2"))
)
RGB, RGB_16 = (RNG.integers(0, 256 << shift, (HEIGHT, WIDTH, 3)).astype(kind) for shift, kind in ((0, "u1"), (8, "u2")))
ALPHA, ALPHA_16 = (RNG.integers(0, 256 << s, (HEIGHT, WIDTH, 1)).astype(kind) for s, kind in ((0, "u1"), (8, "u2")))
for alpha in (ALPHA, ALPHA_16):
    alpha[::3], alpha[1::3] = 0, np.iinfo(alpha.dtype).max
SRGB_PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
GENERATED = Image.fromarray(RNG.integers(0, 256, (8, 12, 3)).astype(np.uint8))
MASK = np.zeros((HEIGHT, WIDTH), np.uint8)
MASK[6:10, 3:14] = 255  # one column outside the box
REPAINTED = np.zeros((HEIGHT, WIDTH), bool)
REPAINTED[6:10, 4:14] = True


@dataclass(frozen=True)
class Case:
    """A file, and the values that a sample of it keeps; None: those of sRGB, with a warning."""

    name: str
    write: Callable[[Path], object]
    values: NDArray[Any] | None
    profile: bytes | None = None


def with_alpha(colours: NDArray[Any], alpha: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([colours, alpha], -1)


def pil(values: NDArray[Any], **options: Any) -> Callable[[Path], object]:
    image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    return lambda path: image.save(path, **options)


def png(values: NDArray[Any], bits: int, *chunks: tuple[bytes, bytes]) -> Callable[[Path], object]:
    return lambda path: write_png_of(path, values, bits, *chunks)


def words(*numbers: int) -> bytes:
    return np.array(numbers, ">u2").tobytes()


PALETTE = Image.fromarray(RGB).quantize(40)
FEW = Image.fromarray(RGB).quantize(4)
IN_PALETTE = np.asarray(PALETTE.convert("RGB"))
BITS = RNG.integers(0, 2, (HEIGHT, WIDTH, 1)).astype(np.uint8)


def palette_alpha() -> NDArray[Any]:
    table = (np.arange(256) * 7 % 256).astype(np.uint8)
    return table[np.asarray(PALETTE)][..., None]


def opaque_but(values: NDArray[Any], key: NDArray[Any]) -> NDArray[Any]:
    most = np.iinfo(values.dtype).max
    return with_alpha(values, np.where((values == key).all(-1, keepdims=True), 0, most).astype(values.dtype))


def jpeg(image: Image.Image, **options: Any) -> tuple[Callable[[Path], object], NDArray[Any]]:
    """Its values are what is decoded."""
    import io

    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    decoded = np.asarray(Image.open(io.BytesIO(stream.getvalue())))
    return (lambda path: path.write_bytes(stream.getvalue())), decoded.reshape(HEIGHT, WIDTH, -1)


def jpegs() -> list[Case]:
    cases = [
        Case("rgb.jpg", *jpeg(Image.fromarray(RGB), quality=80)),
        Case("progressive.jpg", *jpeg(Image.fromarray(RGB), progressive=True)),
        Case("grey.jpg", *jpeg(Image.fromarray(GREY[..., 0]))),
        Case(
            "adobe.jpg",
            *jpeg(Image.fromarray(RGB), icc_profile=rgb_profile(ADOBE_RGB, 2.2)),
            rgb_profile(ADOBE_RGB, 2.2),
        ),
        Case("cmyk.jpg", jpeg(Image.fromarray(RGB).convert("CMYK"))[0], None),
    ]
    turns: dict[int, Callable[[NDArray[Any]], NDArray[Any]]] = {
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
        8: lambda a: np.rot90(a),
    }
    for orientation, turn in turns.items():
        exif = Image.Exif()
        exif[0x0112], exif[0x010E] = orientation, "a sign"
        write, values = jpeg(Image.fromarray(RGB), exif=exif.tobytes(), dpi=(100, 200))
        cases.append(Case(f"orientation{orientation}.jpg", write, turn(values)))
    return cases


CASES = [
    Case("bilevel.png", lambda path: Image.fromarray(BITS[..., 0] > 0).save(path), BITS * np.uint8(255)),
    Case("grey.png", pil(GREY), GREY),
    Case("grey-2-bits.png", png(GREY >> 6, 2), (GREY >> 6) * np.uint8(85)),
    Case("grey-4-bits.png", png(GREY >> 4, 4), (GREY >> 4) * np.uint8(17)),
    Case("grey-alpha.png", pil(with_alpha(GREY, ALPHA)), with_alpha(GREY, ALPHA)),
    Case("grey-key.png", png(GREY, 8, (b"tRNS", words(GREY[0, 0, 0]))), opaque_but(GREY, GREY[0, 0])),
    Case("rgb.png", pil(RGB), RGB),
    Case("rgb-key.png", png(RGB, 8, (b"tRNS", words(*RGB[0, 0]))), opaque_but(RGB, RGB[0, 0])),
    Case("rgb-alpha.png", pil(with_alpha(RGB, ALPHA)), with_alpha(RGB, ALPHA)),
    Case("palette.png", lambda path: PALETTE.save(path), IN_PALETTE),
    Case("palette-4.png", lambda path: FEW.save(path), np.asarray(FEW.convert("RGB"))),
    Case(
        "palette-alpha.png",
        lambda path: PALETTE.save(path, transparency=bytes((np.arange(256) * 7 % 256).astype(np.uint8))),
        with_alpha(IN_PALETTE, palette_alpha()),
    ),
    Case(
        "palette.gif",
        lambda path: PALETTE.save(path, transparency=3),
        with_alpha(IN_PALETTE, np.where(np.asarray(PALETTE) == 3, 0, 255).astype(np.uint8)[..., None]),
    ),
    Case("grey-16.png", png(GREY_16, 16), GREY_16),
    Case("grey-16-key.png", png(GREY_16, 16, (b"tRNS", words(GREY_16[0, 0, 0]))), opaque_but(GREY_16, GREY_16[0, 0])),
    Case("grey-alpha-16.png", png(with_alpha(GREY_16, ALPHA_16), 16), with_alpha(GREY_16, ALPHA_16)),
    Case("rgb-16.png", png(RGB_16, 16), RGB_16),
    Case("rgb-16-key.png", png(RGB_16, 16, (b"tRNS", words(*RGB_16[0, 0]))), opaque_but(RGB_16, RGB_16[0, 0])),
    Case("rgb-alpha-16.png", png(with_alpha(RGB_16, ALPHA_16), 16), with_alpha(RGB_16, ALPHA_16)),
    Case("rgb-16-little.tif", lambda path: write_tiff_of(path, RGB_16, "<"), RGB_16),
    Case("rgb-16-big.tif", lambda path: write_tiff_of(path, RGB_16, ">"), RGB_16),
    Case(
        "rgb-alpha-16.tif",
        lambda path: write_tiff_of(path, with_alpha(RGB_16, ALPHA_16), "<", (338, 3, 1, 2)),
        with_alpha(RGB_16, ALPHA_16),
    ),
    Case("grey-16.tif", lambda path: write_tiff_of(path, GREY_16, "<"), GREY_16),
    Case("grey-16-big.tif", lambda path: write_tiff_of(path, GREY_16, ">"), GREY_16),
    Case("grey-16-lzw.tif", pil(GREY_16, compression="tiff_lzw"), GREY_16),
    Case("rgb.tif", pil(RGB), RGB),
    Case("rgb-lzw.tif", pil(RGB, compression="tiff_lzw"), RGB),
    Case("rgb-alpha.tif", pil(with_alpha(RGB, ALPHA)), with_alpha(RGB, ALPHA)),
    Case("cmyk.tif", lambda path: Image.fromarray(RGB).convert("CMYK").save(path), None),
    Case("lab.tif", lambda path: Image.fromarray(RGB).convert("LAB").save(path), None),
    Case("rgb.webp", pil(RGB, lossless=True), RGB),
    Case("rgb-alpha.webp", pil(with_alpha(RGB, ALPHA), lossless=True, exact=True), with_alpha(RGB, ALPHA)),
    Case("rgb.bmp", pil(RGB), RGB),
    Case("grey.pgm", pil(GREY), GREY),
    Case("grey-16.pgm", pil(GREY_16), GREY_16),
    Case("srgb.png", pil(RGB, icc_profile=SRGB_PROFILE), RGB, SRGB_PROFILE),
    Case("adobe.png", pil(RGB, icc_profile=rgb_profile(ADOBE_RGB, 2.2)), RGB, rgb_profile(ADOBE_RGB, 2.2)),
    Case(
        "p3-alpha.png",
        pil(with_alpha(RGB, ALPHA), icc_profile=rgb_profile(DISPLAY_P3, 2.2)),
        with_alpha(RGB, ALPHA),
        rgb_profile(DISPLAY_P3, 2.2),
    ),
    Case("dot-gain.png", pil(GREY, icc_profile=grey_profile(1.75)), GREY, grey_profile(1.75)),
    Case(
        "palette-adobe.png",
        lambda path: PALETTE.save(path, icc_profile=rgb_profile(ADOBE_RGB, 2.2)),
        IN_PALETTE,
        rgb_profile(ADOBE_RGB, 2.2),
    ),
    Case(
        "profile-of-rgb-on-grey.png",
        pil(GREY, icc_profile=rgb_profile(ADOBE_RGB, 2.2)),
        GREY,
        rgb_profile(ADOBE_RGB, 2.2),
    ),
    Case("broken-profile.png", pil(RGB, icc_profile=b"no profile"), RGB, b"no profile"),
    Case("scanner.png", pil(RGB, icc_profile=scanner_profile()), None),
    *jpegs(),
]


def prophoto_16() -> Case:
    import zlib

    profile = rgb_profile(PROPHOTO, 1.8)
    return Case("prophoto-16.png", png(RGB_16, 16, (b"iCCP", b"x\0\0" + zlib.compress(profile))), RGB_16, profile)


CASES.append(prophoto_16())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_outside_the_mask_are_those_of_the_file(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Read by a reader of PNG that is not Pillow's."""
    path, out = tmp_path / case.name, tmp_path / "out.png"
    case.write(path)
    shown = open_image(path)
    with caplog.at_level(logging.WARNING):
        source = read_file_image(path)
    mask, repainted = (MASK, REPAINTED) if shown.width == WIDTH else (MASK.T, REPAINTED.T)
    box = BOX if shown.width == WIDTH else (BOX[1], BOX[0], BOX[3], BOX[2])
    generated = GENERATED.resize((box[2] - box[0], box[3] - box[1]))
    source.composite(generated, box, mask).save(out)
    values = png_values(out)
    kept = case.values
    if kept is None:
        assert "samples of it are written in sRGB with 8 bits a channel" in caplog.text
        kept = np.asarray(to_rgb(shown))
    else:
        assert not caplog.records
    assert values.dtype == kept.dtype and values.shape == kept.shape
    assert np.array_equal(values[~repainted], kept[~repainted])
    assert (values[repainted] != kept[repainted]).any(-1).mean() > 0.9
    if values.shape[-1] in (2, 4):
        assert (values[repainted][:, -1] == np.iinfo(values.dtype).max).all()  # repainted pixels are opaque
    assert Image.open(out).info.get("icc_profile") == case.profile
    # what is read of the sample is the generated image: converted there and back once
    own, wanted = np.asarray(open_image(out).convert("RGB")).astype(int), np.asarray(generated).astype(int)
    if len(kept[0, 0]) < 3:
        wanted = np.repeat(np.asarray(generated.convert("L")).astype(int)[..., None], 3, -1)
    inner = repainted[box[1] : box[3], box[0] : box[2]]
    assert np.abs(own[repainted] - wanted[inner]).max() <= (1 if case.profile in (None, SRGB_PROFILE) else 14)


def test_there_are_forty() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 40


def test_opaque_files_of_8_bits_are_composited_as_samples_are_scored() -> None:
    mask = np.asarray(Image.fromarray(MASK).resize((WIDTH, HEIGHT)))
    page = np.asarray(Image.fromarray(RNG.integers(0, 256, RGB.shape).astype(np.uint8)))
    for feather in (0.0, 2.0):
        own = FileImage(RGB).composite(Image.fromarray(page), (0, 0, WIDTH, HEIGHT), mask, feather)
        assert np.array_equal(own.values, paste_back(RGB, page, mask, feather))


def test_a_soft_edge_over_alpha_shows_the_blend_of_what_both_show() -> None:
    """Over any background: w of the generated pixel and 1 - w of the pixel of the file, by hand."""
    source = FileImage(with_alpha(RGB_16, ALPHA_16))
    page = RNG.integers(0, 256, RGB.shape).astype(np.uint8)
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[2:14, 2:22] = 255
    soft = source.composite(Image.fromarray(page), (0, 0, WIDTH, HEIGHT), mask, 3.0).values / 65535
    opaque = np.zeros_like(RGB)
    weight = paste_back(opaque, np.full_like(RGB, 255), mask, 3.0)[..., :1] / 255
    for background in (0.0, 1.0):
        under = RGB_16 / 65535 * (alpha := ALPHA_16 / 65535) + background * (1 - alpha)
        shown = soft[..., :3] * soft[..., 3:] + background * (1 - soft[..., 3:])
        assert np.abs(shown - ((1 - weight) * under + weight * page / 255)).max() < 2e-3  # the weight has 8 bits
    assert 0 < weight[2, 12, 0] < 0.3 < 0.9 < weight[7, 12, 0]


def test_exif_and_resolution_stay_and_the_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x010F] = 6, "a sign", "a camera"
    exif[0x8769] = {0x9003: "2026:01:01 00:00:00", 0x927C: b"maker\0notes"}
    Image.fromarray(RGB).save(tmp_path / "a.jpg", exif=exif.tobytes(), dpi=(100, 200), quality=95)
    sample = read_file_image(tmp_path / "a.jpg")
    sample.save(tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as out:
        assert (out.width, out.height) == (HEIGHT, WIDTH)
        kept = out.getexif()
        assert (kept[0x0112], kept[0x010E], kept[0x010F]) == (1, "a sign", "a camera")
        assert kept.get_ifd(0x8769) == {0x9003: "2026:01:01 00:00:00", 0x927C: b"maker\0notes"}
        assert out.info["dpi"] == pytest.approx((200, 100), abs=0.02)  # turned with the image
        upright = out.copy()
    assert np.array_equal(np.asarray(to_rgb(open_image(tmp_path / "out.png"))), np.asarray(upright))  # not turned again
    before, after = exif.tobytes(), dict(png_chunks(tmp_path / "out.png"))[b"eXIf"]
    assert sum(x != y for x, y in zip(before[6:], after, strict=True)) == 1  # the orientation alone


def test_a_tiff_keeps_what_describes_the_image_and_not_its_layout(tmp_path: Path) -> None:
    Image.fromarray(RGB).save(tmp_path / "a.tif", description="a sign", dpi=(300, 300), compression="tiff_lzw")
    read_file_image(tmp_path / "a.tif").save(tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as out:
        assert dict(out.getexif()) == {0x010E: "a sign"}
        assert out.info["dpi"] == pytest.approx((300, 300), abs=0.02)


def test_gamma_and_primaries_of_a_png_stay(tmp_path: Path) -> None:
    chunks = (b"gAMA", np.array([100000], ">u4").tobytes()), (b"cHRM", np.arange(1, 9, dtype=">u4").tobytes())
    for bits, values in ((8, RGB), (16, RGB_16)):
        write_png_of(tmp_path / "a.png", values, bits, *chunks)
        read_file_image(tmp_path / "a.png").save(tmp_path / "out.png")
        assert set(chunks) <= set(png_chunks(tmp_path / "out.png"))


@pytest.mark.parametrize("name", ["rgb.png", "palette-alpha.png", "grey-16.png", "adobe.png", "p3-alpha.png"])
def test_an_image_in_memory_keeps_the_same_values_as_its_file(name: str, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.name == name)
    case.write(tmp_path / name)
    with Image.open(tmp_path / name) as image:
        memory = read_file_image(packed(image, "image"))
    file = read_file_image(tmp_path / name)
    assert np.array_equal(memory.values, file.values) and memory.profile == file.profile


def test_16_bits_are_read_by_other_readers(tmp_path: Path) -> None:
    cv2: Any = pytest.importorskip("cv2")
    for values in (RGB_16, with_alpha(RGB_16, ALPHA_16), GREY_16):
        FileImage(values).save(tmp_path / "out.png")
        other = cv2.imread(str(tmp_path / "out.png"), cv2.IMREAD_UNCHANGED).reshape(values.shape)
        assert np.array_equal(other[..., [2, 1, 0, 3][: values.shape[-1]]] if values.shape[-1] > 2 else other, values)
        with Image.open(tmp_path / "out.png") as image:
            high = (values >> 8).astype(np.uint8)
            assert np.array_equal(np.asarray(image).reshape(high.shape), high if values.shape[-1] > 1 else values)
    for name in ("a.png", "a.tif"):  # compressed, as programs write them
        cv2.imwrite(str(tmp_path / name), RGB_16[..., ::-1])
        assert np.array_equal(read_file_image(tmp_path / name).values, RGB_16)


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_tiff_is_turned_once(orientation: int, tmp_path: Path) -> None:
    """Pillow turns a TIFF when it decodes it, also each of the two times for 16 bits."""
    write_tiff_of(tmp_path / "a.tif", RGB_16, "<", (274, 3, 1, orientation))
    turn = {1: 0, 3: 2, 6: -1}[orientation]
    sample = read_file_image(tmp_path / "a.tif")
    assert np.array_equal(sample.values, np.rot90(RGB_16, turn))
    assert open_image(tmp_path / "a.tif").size == sample.values.shape[1::-1]
    sample.save(tmp_path / "out.png")
    assert open_image(tmp_path / "out.png").size == sample.values.shape[1::-1]


def test_an_orientation_that_is_no_number(tmp_path: Path) -> None:
    exif = struct.pack("<2sHIHHHIII", b"II", 42, 8, 1, 0x0112, 2, 8, 26, 0) + b"upright\0"
    Image.fromarray(RGB).save(tmp_path / "a.png", exif=exif)
    sample = read_file_image(tmp_path / "a.png")
    sample.save(tmp_path / "out.png")
    assert np.array_equal(sample.values, RGB) and np.array_equal(png_values(tmp_path / "out.png"), RGB)


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_thumbnail_of_the_image_before_is_not_kept(order: str, tmp_path: Path) -> None:
    """A repainted face stood in the EXIF block of the sample."""
    mark = {"<": b"II", ">": b"MM"}[order]
    thumbnail = b"\xff\xd8 the face \xff\xd9"
    first = struct.pack(f"{order}HHHIHHI", 1, 0x0112, 3, 1, 6, 0, 8 + 2 + 12 + 4)
    place = 8 + 2 + 12 + 4 + 2 + 24 + 4
    second = struct.pack(f"{order}HHHIIHHIII", 2, 0x0201, 4, 1, place, 0x0202, 4, 1, len(thumbnail), 0)
    block = b"Exif\0\0" + mark + struct.pack(f"{order}HI", 42, 8) + first + second + thumbnail + b"after"
    Image.fromarray(RGB).save(tmp_path / "a.jpg", exif=block, quality=95)
    read_file_image(tmp_path / "a.jpg").save(tmp_path / "out.png")
    written = dict(png_chunks(tmp_path / "out.png"))[b"eXIf"]
    assert b"face" not in written and written.endswith(b"after")
    with Image.open(tmp_path / "out.png") as out:
        assert dict(out.getexif()) == {0x0112: 1} and out.getexif().get_ifd(1) == {}


def test_an_image_whose_orientation_was_taken_out_is_not_turned(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a sign"
    Image.fromarray(RGB).save(tmp_path / "a.jpg", exif=exif.tobytes())
    with Image.open(tmp_path / "a.jpg") as image:
        del image.getexif()[0x0112]
        there = read_file_image(packed(image, "image"))
    assert there.values.shape == RGB.shape
