"""Opening, colour modes, scaling and cropping, paste-back, text distance."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import MAX_TEXT_CHUNK, PngInfo

from retouch.errors import ImageProblem
from retouch.imaging.file_image import read_file_image
from retouch.imaging.fitting import Fit, MaskCrop, fit_size, resize
from retouch.imaging.lines import folded
from retouch.imaging.masks import Box, paste_back
from retouch.imaging.masks import box_mask as mask_of_box
from retouch.imaging.reading import image_size, open_image, opened, packed, to_rgb
from retouch.rewards.text_distance import edit_distance, text_similarity

from .conftest import box_mask, picture, pixels
from .image_files import write_png_of, write_tiff_of

RNG = np.random.default_rng(0)

# --- opening ---


def test_an_ordinary_picture_opens_as_it_is(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    assert pixels(open_image(tmp_path / "a.png")) == pixels(picture())


@pytest.mark.parametrize("orientation", [3, 6, 8])
def test_a_photo_opens_upright(orientation: int, tmp_path: Path) -> None:
    turned = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270, 8: Image.Transpose.ROTATE_90}[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(tmp_path / "a.png", exif=exif)
    assert pixels(open_image(tmp_path / "a.png")) == pixels(picture().transpose(turned))


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    Image.fromarray(levels).save(tmp_path / "a.png")
    assert np.asarray(open_image(tmp_path / "a.png")).tolist() == [[0, 0, 1, 128, 255]]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_scan_on_its_side_is_turned(mode: str, orientation: int, tmp_path: Path) -> None:
    """Pillow maps an uncompressed TIFF of one channel, or of four, into memory in the size that it has when turned."""
    words = RNG.integers(0, 65536, (4, 6), np.uint16)
    scan = Image.fromarray(words) if mode == "I;16" else picture(size=(6, 4)).convert(mode)
    upright, exif = tmp_path / "upright.tif", Image.Exif()
    scan.save(upright)
    exif[0x0112] = orientation
    scan.save(tmp_path / "a.tif", exif=exif)
    expected = to_rgb(open_image(upright))
    expected.getexif()[0x0112] = orientation
    assert pixels(to_rgb(open_image(tmp_path / "a.tif"))) == pixels(ImageOps.exif_transpose(expected))


def test_levels_of_twelve_bits_are_scaled(tmp_path: Path) -> None:
    """A scan of a microscope is not nearly black."""
    packed_bits = np.frombuffer(bytes.fromhex("000fff800400"), "<u2")  # levels 0, 4095, 2048 and 1024
    write_tiff_of(tmp_path / "a.tif", packed_bits.reshape(1, 3, 1), "<", (256, 4, 1, 4), (258, 3, 1, 12))
    assert np.asarray(open_image(tmp_path / "a.tif")).tolist() == [[0, 255, 128, 64]]
    assert read_file_image(tmp_path / "a.tif").values.ravel().tolist() == [0, 65535, 32776, 16388]


def test_sixteen_bits_of_which_zero_is_white(tmp_path: Path) -> None:
    """Pillow turns such levels around up to 8 bits alone."""
    levels = np.array([0, 65535, 16384], np.uint16).reshape(1, 3, 1)
    write_tiff_of(tmp_path / "a.tif", levels, "<", (262, 3, 1, 0))
    assert np.asarray(open_image(tmp_path / "a.tif")).tolist() == [[255, 0, 191]]
    assert read_file_image(tmp_path / "a.tif").values.ravel().tolist() == [65535, 0, 49151]


@pytest.mark.parametrize(("bits", "key"), [(2, 1), (4, 6), (8, 100)])
def test_a_transparent_grey_of_few_bits(bits: int, key: int, tmp_path: Path) -> None:
    """An optimised drawing lies on white: the key has the scale of the file, and the levels that of 8 bits."""
    values = np.array([0, key, 2**bits - 1, key], np.uint16).reshape(1, 4, 1)
    write_png_of(tmp_path / "a.png", values, bits, (b"tRNS", struct.pack(">H", key)))
    assert np.asarray(to_rgb(open_image(tmp_path / "a.png")))[0, :, 0].tolist() == [0, 255, 255, 255]
    assert read_file_image(tmp_path / "a.png").values[0, :, 1].tolist() == [255, 0, 255, 0]


def test_a_transparent_colour_of_sixteen_bits(tmp_path: Path) -> None:
    values = np.array([[[0] * 3, [300] * 3, [40000] * 3]], np.uint16)
    write_png_of(tmp_path / "a.png", values, 16, (b"tRNS", struct.pack(">3H", 300, 300, 300)))
    assert np.asarray(to_rgb(open_image(tmp_path / "a.png")))[0, :, 0].tolist() == [0, 255, 156]


def test_integers_of_a_format_without_a_scale(tmp_path: Path) -> None:
    """The levels of an astronomer may be 0 to 4095, or signed."""
    card = "{:80}".format
    head = "".join(map(card, ("SIMPLE  = T", "BITPIX  = 16", "NAXIS   = 2", "NAXIS1  = 2", "NAXIS2  = 2", "END")))
    (tmp_path / "a.fits").write_bytes(f"{head:2880}".encode() + struct.pack(">4h", 0, 1, 2, 3) + bytes(2872))
    with pytest.raises(ImageProblem, match=r"holds integers of unknown scale .* values 0 to 3"):
        open_image(tmp_path / "a.fits")


def test_pictures_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tiff"
    with pytest.raises(ImageProblem) as caught:
        open_image(path)
    assert str(caught.value) == f"{path}: no such file"
    Image.fromarray(np.ones((4, 4), np.float32)).save(path)
    with pytest.raises(ImageProblem) as caught:
        open_image(path)
    assert str(caught.value) == f"{path}: holds floating-point values; convert it to an 8-bit PNG or JPEG"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    picture().save(tmp_path / "a.png")
    with pytest.raises(ImageProblem, match=r"a\.png: too large \(Image size \(1536 pixels\).*\); scale it down first"):
        open_image(tmp_path / "a.png")
    with pytest.raises(ImageProblem, match="not a file"):
        open_image(tmp_path)


def test_a_large_picture_is_read_without_a_warning(tmp_path: Path) -> None:
    """Up to twice Pillow's limit, above which it refuses. In a process of its own: pytest has other filters."""
    picture().save(tmp_path / "a.png")
    code = (
        "import sys; from pathlib import Path; from PIL import Image; from retouch.imaging.reading import open_image\n"
        "Image.MAX_IMAGE_PIXELS = 1000; print(open_image(Path(sys.argv[1])).size)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.png"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{picture().size}\n", "")


def test_transparency_lies_on_white() -> None:
    image = Image.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 127, 255)):
        image.putpixel((x, 0), (100, 0, 200, alpha))
    # 255 + (c - 255) * alpha / 255
    assert [to_rgb(image).getpixel((x, 0)) for x in range(3)] == [(255, 255, 255), (178, 128, 228), (100, 0, 200)]


def test_colour_modes_become_rgb() -> None:
    grey = Image.new("L", (1, 1), 77)
    assert to_rgb(grey).getpixel((0, 0)) == (77, 77, 77)
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert to_rgb(palette).getpixel((1, 0)) == (40, 50, 60)
    palette.info["transparency"] = 1
    assert to_rgb(palette).getpixel((0, 0)) == (10, 20, 30)
    assert to_rgb(palette).getpixel((1, 0)) == (255, 255, 255)


# --- scaling and cropping ---


@pytest.mark.parametrize(
    ("size", "target", "keep", "scaled", "window"),
    [
        # as it is
        ((64, 32), (64, 32), None, (64, 32), (0, 0, 64, 32)),
        # no scaling: a window in the middle, around the mask, or moved back inside
        ((100, 50), (50, 50), None, (100, 50), (25, 0, 75, 50)),
        ((100, 50), (50, 50), (40, 0, 60, 10), (100, 50), (25, 0, 75, 50)),
        ((100, 50), (50, 50), (20, 0, 50, 10), (100, 50), (10, 0, 60, 50)),  # centre 35
        ((100, 50), (50, 50), (0, 0, 10, 10), (100, 50), (0, 0, 50, 50)),
        ((100, 50), (50, 50), (90, 40, 100, 50), (100, 50), (50, 0, 100, 50)),
        # scaled by the larger of the two factors, the centre with it
        ((40, 20), (64, 64), (10, 0, 20, 20), (128, 64), (16, 0, 80, 64)),  # 3.2: centre 15 -> 48
        ((200, 400), (100, 100), (0, 300, 200, 340), (100, 200), (0, 100, 100, 200)),  # 0.5: centre 320 -> 160
        ((30, 30), (16, 32), None, (32, 32), (8, 0, 24, 32)),
        ((333, 500), (512, 512), None, (512, 769), (0, 128, 512, 640)),  # 500 x 1.5375 = 768.8; 384.5 - 256 = 128.5
    ],
)
def test_the_crop_window(
    size: tuple[int, int], target: tuple[int, int], keep: Box | None, scaled: tuple[int, int], window: Box
) -> None:
    assert fit_size(size, target, "crop", keep) == (scaled, window)


def test_stretching_takes_all_of_it() -> None:
    assert fit_size((100, 50), (64, 32), "stretch", (0, 0, 1, 1)) == ((64, 32), (0, 0, 64, 32))


@pytest.mark.parametrize(
    ("size", "keep", "enlarge", "box"),
    [
        # the longer side and a quarter of it on each side, at the target's aspect ratio
        ((2000, 1500), (1150, 750, 1750, 1050), False, (1000, 450, 1900, 1350)),
        ((2000, 1500), (0, 1400, 600, 1500), False, (0, 600, 900, 1500)),  # moved inside
        # no fewer pixels than the target, unless they may be enlarged
        ((2000, 1500), (1000, 1000, 1060, 1030), False, (774, 759, 1286, 1271)),
        ((2000, 1500), (1000, 1000, 1060, 1030), True, (985, 970, 1075, 1060)),
        ((2000, 1500), (1000, 1000, 1002, 1002), True, (969, 969, 1033, 1033)),  # 8 times at most
        # the whole image, where the largest box is no larger, or does not hold the mask
        ((512, 600), (10, 10, 60, 60), False, None),
        ((2000, 1500), (100, 100, 1200, 1300), False, (0, 0, 1500, 1500)),
        ((2000, 1500), (100, 100, 1700, 300), True, None),
    ],
)
def test_the_box_around_a_mask(size: tuple[int, int], keep: Box, enlarge: bool, box: Box | None) -> None:
    assert MaskCrop(0.25, enlarge).box(size, (512, 512), keep) == box


def test_the_box_of_a_wide_model() -> None:
    assert MaskCrop(0.0, enlarge=True).box((1000, 1000), (64, 32), (400, 400, 500, 500)) == (350, 400, 550, 500)
    # a margin that the image has no room for: the largest box of the model's aspect ratio
    assert MaskCrop(1.0, enlarge=False).box((2000, 1500), (64, 32), (500, 300, 1300, 900)) == (0, 100, 2000, 1100)
    assert MaskCrop(1.0, enlarge=False).box((2000, 1000), (64, 32), (500, 300, 1300, 900)) is None  # all of it


def test_a_mask_of_a_box() -> None:
    mask = np.asarray(mask_of_box((1, 0, 3, 2), (4, 3)))
    assert mask.tolist() == [[0, 255, 255, 0], [0, 255, 255, 0], [0, 0, 0, 0]]
    for outside in ((-1, 0, 3, 2), (0, 0, 5, 2), (0, 0, 3, 4)):
        with pytest.raises(
            ImageProblem, match=r"^given .*; expected a box inside the image, which is 4 x 3; set RIGHT"
        ):
            mask_of_box(outside, (4, 3))
    for empty in ((2, 0, 2, 2), (0, 3, 4, 1)):
        with pytest.raises(ImageProblem, match=r"expected LEFT,TOP,RIGHT,BOTTOM with LEFT < RIGHT and TOP < BOTTOM"):
            mask_of_box(empty, (4, 3))


def test_an_image_in_memory_is_read_as_a_file_is() -> None:
    for image in (picture(), picture().convert("RGBA"), box_mask().convert("1")):
        assert pixels(open_image(packed(image, "x"))) == pixels(image)
    assert open_image(packed(picture().convert("CMYK"), "x")).mode == "RGB"
    assert packed(picture(), "x") == packed(picture(), "y")  # by their bytes


sides = st.integers(1, 400)


@given(size=st.tuples(sides, sides), target=st.tuples(sides, sides), data=st.data())
def test_the_window_lies_inside_and_holds_a_mask_that_fits(
    size: tuple[int, int], target: tuple[int, int], data: st.DataObject
) -> None:
    left, top = data.draw(st.integers(0, size[0] - 1)), data.draw(st.integers(0, size[1] - 1))
    right, bottom = data.draw(st.integers(left + 1, size[0])), data.draw(st.integers(top + 1, size[1]))
    scaled, window = fit_size(size, target, "crop", (left, top, right, bottom))
    assert (window[2] - window[0], window[3] - window[1]) == target
    assert window[0] >= 0 and window[1] >= 0 and window[2] <= scaled[0] and window[3] <= scaled[1]
    assert scaled[0] == target[0] or scaled[1] == target[1]
    for low, high, side, now, start, end in (
        (left, right, size[0], scaled[0], window[0], window[2]),
        (top, bottom, size[1], scaled[1], window[1], window[3]),
    ):
        if (high - low) * now / side <= end - start:
            assert low * now / side >= start - 1 and high * now / side <= end + 1  # rounding


@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_a_crop_without_scaling_moves_no_pixel(fit: Fit) -> None:
    scaled, window = fit_size((48, 32), (48, 32) if fit == "stretch" else (20, 32), fit, (30, 0, 40, 32))
    cut = resize(picture(), scaled, window)
    assert pixels(cut) == pixels(picture().crop(window))
    assert cut.getpixel((0, 0)) == (window[0], 0, 0)


def test_a_mask_is_averaged_and_cut_again() -> None:
    fine = np.zeros((2, 8), np.uint8)
    fine[:, 0:2] = 255  # all of the first cell
    fine[0, 2:4] = fine[1, 2] = 255  # three quarters of the second
    fine[0, 4] = 255  # one quarter of the third
    coarse = resize(Image.fromarray(fine, "L"), (4, 1), (0, 0, 4, 1))
    assert np.asarray(coarse).tolist() == [[255, 255, 0, 0]]


def test_a_picture_scales_to_its_mean_colour() -> None:
    flat = Image.new("RGB", (64, 48), (10, 200, 90))
    assert np.unique(np.asarray(resize(flat, (32, 24), (4, 4, 20, 20))).reshape(-1, 3), axis=0).tolist() == [
        [10, 200, 90]
    ]


# --- paste-back ---


def random_pixels() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return RNG.integers(0, 256, (32, 48, 3), np.uint8)


@pytest.mark.parametrize("feather", [0.0, 0.5, 3.0, 20.0])
def test_outside_the_mask_nothing_changes_by_a_bit(feather: float) -> None:
    source, generated = random_pixels(), random_pixels()
    for mask in (np.asarray(box_mask()), RNG.integers(0, 256, (32, 48), np.uint8)):
        result = paste_back(source, generated, mask, feather)
        assert result.dtype == np.uint8
        assert np.array_equal(result[mask < 128], source[mask < 128])


def test_inside_a_hard_mask_everything_is_generated() -> None:
    source, generated, mask = random_pixels(), random_pixels(), np.asarray(box_mask())
    result = paste_back(source, generated, mask)
    assert np.array_equal(result[mask >= 128], generated[mask >= 128])


def test_a_feather_fades_in_over_its_radius() -> None:
    source, generated = np.full((9, 60, 3), 100, np.uint8), np.full((9, 60, 3), 200, np.uint8)
    mask = np.zeros((9, 60), np.uint8)
    mask[:, 20:] = 255
    row = paste_back(source, generated, mask, feather=4.0)[4, :, 0].astype(int)
    assert (row[:20] == 100).all()
    assert (np.diff(row) >= 0).all()
    # alpha is 2 Phi(x / 4) - 1 at x pixels inside: .10 at .5, .68 at 4; Pillow's blur is close to a Gaussian
    assert row[20] == pytest.approx(110, abs=3)
    assert (row[23] + row[24]) / 2 == pytest.approx(168, abs=4)
    assert (row[34:] == 200).all()


# --- text ---


@pytest.mark.parametrize(
    ("a", "b", "distance", "similarity"),
    [
        ("", "", 0, 1.0),
        ("Ocean", "Ocean", 0, 1.0),
        ("", "Ocean", 5, 0.0),
        ("Ocean", "OceanOcean", 5, 0.5),  # repeating a word does not pay
        ("Ocean", "Ocea", 1, 0.8),
        ("Ocean", "ocean", 1, 0.8),
        ("kitten", "sitting", 3, 4 / 7),
        ("flaw", "lawn", 2, 0.5),
        ("abc", "xyz", 3, 0.0),
        ("ab", "ba", 2, 0.0),
        ("東京", "東亰", 1, 0.5),
    ],
)
def test_text_similarity(a: str, b: str, distance: int, similarity: float) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) == distance
    assert text_similarity(a, b) == text_similarity(b, a) == pytest.approx(similarity, abs=1e-12)


words = st.text("abcä東", max_size=8)


@given(words, words, words)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    ab, bc, ac = edit_distance(a, b), edit_distance(b, c), edit_distance(a, c)
    assert ab == edit_distance(b, a)
    assert (ab == 0) == (a == b)
    assert ac <= ab + bc
    assert abs(len(a) - len(b)) <= ab <= max(len(a), len(b))
    assert 0.0 <= text_similarity(a, b) <= 1.0
    assert (text_similarity(a, b) == 1.0) == (a == b)


@given(words, words, st.sampled_from("abcä東"))
def test_a_common_end_changes_no_distance(a: str, b: str, end: str) -> None:
    assert edit_distance(a + end, b + end) == edit_distance(end + a, end + b) == edit_distance(a, b)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("ﬁne", "fine"),
        ("ＡＢＣ１", "ABC1"),
        ("e\u0301", "é"),
        ("  two\u00a0\u3000 words\n", "two words"),
        ("①", "1"),
        ("Straße", "Straße"),
    ],
)
def test_text_is_compared_in_nfkc_with_single_spaces(text: str, normal: str) -> None:
    assert folded(text) == normal
    assert folded(normal) == normal


def test_case_is_folded_on_request() -> None:
    assert folded("Straße MOON", case_sensitive=False) == "strasse moon"
    assert folded("STRASSE moon", case_sensitive=False) == "strasse moon"


@pytest.mark.parametrize(
    ("values", "problem"),
    [(np.int32([[200]]), "integers of unknown scale"), (np.float32([[0.8]]), "floating-point values")],
)
def test_values_of_unknown_scale_in_memory_are_refused_as_in_a_file(values: Any, problem: str) -> None:
    """Read as 0 to 65535, or as 0 to 255, they would be a black image."""
    image = Image.fromarray(values)
    with pytest.raises(ImageProblem, match=f"^image: holds {problem}"):
        packed(image, "image")


@pytest.mark.parametrize("read", [open_image, image_size])
def test_a_text_that_pillow_does_not_unpack_is_a_problem_of_the_file(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    texts = PngInfo()
    texts.add_text("workflow", "x" * (MAX_TEXT_CHUNK + 1), zip=True)
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png", pnginfo=texts)
    with pytest.raises(ImageProblem, match=r"a\.png: Pillow does not read it .*; save it again without its texts"):
        read(tmp_path / "a.png")


@pytest.mark.parametrize("read", [open_image, read_file_image])
def test_a_text_after_the_pixels_is_a_problem_of_the_file(read: Callable[[Path], object], tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    body = b"zTXtworkflow\0\0" + zlib.compress(b"x" * (MAX_TEXT_CHUNK + 1))
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    (tmp_path / "a.png").write_bytes(data[:-12] + chunk + data[-12:])
    with pytest.raises(ImageProblem, match="save it again without its texts"):
        read(tmp_path / "a.png")


def test_a_level_that_is_no_number_is_a_problem_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.pgm").write_bytes(b"P2 2 1 255 0 x")
    with pytest.raises(ImageProblem, match=r"a\.pgm: Pillow does not read it \(.*\); replace the file"):
        open_image(tmp_path / "a.pgm")


def test_an_error_of_the_caller_is_no_problem_of_the_file(tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"^other$"), opened(tmp_path / "a.png"):
        raise ValueError("other")
