"""Masks as mask editors save them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from retouch.errors import ImageProblem
from retouch.imaging.masks import MAY_BE_INVERTED, mask_box, read_mask
from retouch.imaging.reading import open_image

from .conftest import HOLE, SIZE, box_mask, picture, pixels

EXPECTED = np.asarray(box_mask())
INSIDE = EXPECTED == 255


def rgb(inside: tuple[int, int, int], outside: tuple[int, int, int]) -> Image.Image:
    return Image.fromarray(np.where(INSIDE[..., None], np.uint8(inside), np.uint8(outside)))


def with_alpha(image: Image.Image, inside: int, outside: int) -> Image.Image:
    image = image.convert("RGBA")
    image.putalpha(Image.fromarray(np.where(INSIDE, np.uint8(inside), np.uint8(outside))))
    return image


def painted_red(photo: Image.Image) -> Image.Image:
    photo = photo.copy()
    photo.paste((255, 0, 0), HOLE)
    return photo


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=0)
    return Image.open(io.BytesIO(file.getvalue()))


WHITE_WALL = Image.new("RGB", SIZE, (250, 248, 246))
PINK_WALL = Image.new("RGB", SIZE, (200, 140, 160))


@pytest.mark.parametrize(
    ("image", "channel"),
    [
        (box_mask(), "luminance"),
        (box_mask().convert("1"), "luminance"),
        (box_mask().convert("P"), "luminance"),
        (rgb((255, 255, 255), (0, 0, 0)), "luminance"),
        (rgb((128, 128, 128), (127, 127, 127)), "luminance"),  # the threshold
        (rgb((200, 204, 199), (3, 0, 7)), "luminance"),  # coloured noise of a converter
        (with_alpha(picture(), 255, 0), "alpha"),
        (with_alpha(picture(), 140, 120), "alpha"),
        (with_alpha(Image.new("RGB", SIZE), 255, 0), "alpha"),  # strokes on a transparent layer
        (with_alpha(box_mask(), 255, 254), "luminance"),  # alpha that carries nothing
        (rgb((255, 0, 0), (0, 0, 0)), "red"),
        (rgb((255, 255, 0), (0, 255, 0)), "red"),  # a mask in the red channel alone
        (painted_red(picture()), "red"),
        (painted_red(WHITE_WALL), "red"),  # white is full red too, and no paint
        (painted_red(PINK_WALL), "red"),
    ],
)
def test_the_mask_is_found_in_its_channel(image: Image.Image, channel: str) -> None:
    found = read_mask(image, "m.png")
    assert found.channel == channel
    assert pixels(found.mask) == pixels(box_mask())


@pytest.mark.parametrize("quality", [30, 60, 90])
@pytest.mark.parametrize(
    ("image", "channel"), [(box_mask(), "luminance"), (painted_red(WHITE_WALL), "red"), (painted_red(picture()), "red")]
)
def test_soft_edges_of_a_jpeg(image: Image.Image, channel: str, quality: int) -> None:
    jpeg = as_jpeg(image, quality)
    assert len(np.unique(np.asarray(jpeg))) > 2  # it did soften
    found = read_mask(jpeg, "m.jpg")
    assert found.channel == channel
    assert np.unique(np.asarray(found.mask)).tolist() == [0, 255]
    assert (np.asarray(found.mask) != EXPECTED).mean() < 0.01


def test_a_blurred_edge_is_cut_at_half_height() -> None:
    ramp = np.tile(np.arange(120, 136, dtype=np.uint8), (4, 1))  # 120 .. 135 along a row
    assert mask_box(read_mask(Image.fromarray(ramp), "m.png").mask) == (8, 0, 16, 4)  # from 128 on


@pytest.mark.parametrize(
    "image",
    [
        box_mask().point(lambda v: 255 - v),
        with_alpha(picture(), 0, 255),  # the hole is erased
    ],
)
def test_inverted_masks_on_request(image: Image.Image) -> None:
    assert pixels(read_mask(image, "m.png", invert=True).mask) == pixels(box_mask())
    assert np.array_equal(np.asarray(read_mask(image, "m.png").mask), 255 - EXPECTED)


GREY = Image.new("L", SIZE, 127)
LABELS = box_mask().point(lambda v: v // 255)  # 0 and 1
EMPTY, FULL = "empty: nothing to repaint", "full: nothing to keep"


@pytest.mark.parametrize(
    ("image", "seen", "what"),
    [
        (GREY, "luminance channel, values 127 to 127, threshold 128", EMPTY),
        (LABELS, "luminance channel, values 0 to 1, threshold 128", EMPTY),
        (Image.new("L", SIZE, 255), "luminance channel, values 255 to 255, threshold 128", FULL),
        (with_alpha(picture(), 100, 0), "alpha channel, values 0 to 100, threshold 128", EMPTY),
        (rgb((0, 0, 255), (0, 255, 0)), "red channel, values 0 to 0, threshold 128", EMPTY),
    ],
)
def test_empty_and_full_masks(image: Image.Image, seen: str, what: str) -> None:
    with pytest.raises(ImageProblem) as caught:
        read_mask(image, "m.png")
    hint = "paint the area to repaint white, the rest black (data.invert_mask=false)"
    assert str(caught.value) == f"m.png: the mask ({seen}) is {what}; {hint}"


def test_an_inverted_empty_mask_is_full() -> None:
    with pytest.raises(ImageProblem) as caught:
        read_mask(GREY, "m.png", invert=True)
    seen = "luminance channel, values 127 to 127, threshold 128"
    hint = "paint the area to repaint black, the rest white (data.invert_mask=true)"
    assert str(caught.value) == f"m.png: the mask ({seen}) is {FULL}; {hint}"


def test_mask_box_is_half_open() -> None:
    mask = np.zeros((10, 20), np.uint8)
    mask[3, 7] = 255
    assert mask_box(mask) == (7, 3, 8, 4)
    mask[5, 2] = 128
    mask[9, 19] = 127  # below the threshold
    assert mask_box(mask) == (2, 3, 8, 6)
    assert mask_box(Image.fromarray(mask)) == (2, 3, 8, 6)
    assert mask_box(np.full((10, 20), 255, np.uint8)) == (0, 0, 20, 10)


def test_the_box_of_a_mask_is_the_crop_that_holds_it() -> None:
    left, top, right, bottom = mask_box(box_mask())
    assert (left, top, right, bottom) == HOLE
    assert np.asarray(box_mask())[top:bottom, left:right].min() == 255


def test_an_empty_mask_has_no_box() -> None:
    with pytest.raises(ImageProblem, match="the mask is empty: it has no box"):
        mask_box(np.full((4, 4), 127, np.uint8))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (with_alpha(picture(), 0, 255), True),  # the region to repaint was erased
        (with_alpha(picture(), 255, 0), False),  # strokes on a transparent layer
        (box_mask(), False),
        (Image.fromarray(255 - EXPECTED), False),  # luminance says what it means
    ],
)
def test_a_mask_that_is_probably_meant_the_other_way_round(image: Image.Image, expected: bool) -> None:
    assert (read_mask(image, "m.png").doubt == MAY_BE_INVERTED) == expected


# --- what is no mask, or another one than is meant ---


def noise(seed: int, low: int = 0, high: int = 256) -> np.ndarray:
    """[64, 64]: a photograph as far as its levels go: smooth, and many."""
    y, x = np.mgrid[0:64, 0:64]
    waves = np.sin(x / 9 + seed) * np.cos(y / 7) + np.random.default_rng(seed).normal(0, 0.1, (64, 64))
    return np.interp(waves, (waves.min(), waves.max()), (low, high - 1)).astype(np.uint8)


COLOURED = Image.fromarray(np.stack([noise(0), noise(3), noise(6)], -1))
RED = Image.fromarray(np.stack([noise(0), noise(0, 0, 40), noise(0, 0, 40)], -1))


@pytest.mark.parametrize(
    "image",
    [
        Image.fromarray(noise(0)),
        Image.fromarray(noise(0)).convert("RGB"),
        COLOURED,
        RED,  # of something red, which could be paint
        Image.fromarray(noise(3, 0, 160)),  # dark
        as_jpeg(COLOURED, 80),
    ],
)
def test_a_photograph_in_place_of_a_mask_is_doubted(image: Image.Image) -> None:
    doubt = read_mask(image, "m.png").doubt
    assert doubt is not None
    found = re.match(
        r"(\d+) grey levels in the (red|luminance) channel, (\d+)% of the pixels far from two levels", doubt
    )
    assert found is not None and int(found[1]) > 64 and int(found[3]) > 50
    assert read_mask(image, "m.png", invert=True).doubt == doubt


def soft(radius: int) -> Image.Image:
    """A mask of 256 x 256 with a soft edge."""
    return box_mask((256, 256), (60, 60, 200, 200)).filter(ImageFilter.GaussianBlur(radius))


@pytest.mark.parametrize(
    "image",
    [
        box_mask(),
        box_mask().filter(ImageFilter.GaussianBlur(1)),
        soft(2),
        soft(12),
        as_jpeg(soft(2), 30),
        as_jpeg(painted_red(picture()), 80),
        painted_red(COLOURED.resize(SIZE)),
        as_jpeg(painted_red(COLOURED.resize((480, 320)).crop((0, 0, *SIZE))), 60),
        with_alpha(picture(), 255, 0),
        box_mask().point(lambda v: 40 + v // 2),  # grey on grey
        Image.fromarray(np.tile(np.arange(120, 136, dtype=np.uint8), (4, 1))),
    ],
)
def test_a_mask_is_not_doubted(image: Image.Image) -> None:
    assert read_mask(image, "m.png").doubt is None


def label_map(objects: list[tuple[tuple[int, int, int], tuple[int, int, int, int]]], mode: str) -> Image.Image:
    """Objects (colour, box) on black."""
    image = Image.new("RGB", SIZE)
    for colour, box in objects:
        image.paste(colour, box)
    return image.quantize(16) if mode == "P" else image


@pytest.mark.parametrize("mode", ["P", "RGB"])
@pytest.mark.parametrize(
    ("second", "edge", "doubted"),
    [
        ((0, 128, 0), (128, 0, 0), True),  # DAVIS and VOC: the first object alone
        ((0, 128, 0), (224, 224, 192), True),  # VOC: the line around the second object alone
        ((30, 144, 255), (220, 20, 60), True),  # colours of SAM's and COCO's viewers
        ((128, 128, 128), (255, 0, 0), False),  # red paint on a flat grey image
    ],
)
def test_a_map_of_labels_is_doubted(
    second: tuple[int, int, int], edge: tuple[int, int, int], doubted: bool, mode: str
) -> None:
    """Of several objects only those of a red colour are repainted, or the line around one."""
    found = read_mask(label_map([(edge, (4, 4, 14, 14)), (second, (20, 8, 40, 28))], mode), "m.png")
    assert found.channel == "red" and np.asarray(found.mask)[5, 5] == 255 and np.asarray(found.mask)[10, 22] == 0
    assert (found.doubt is not None and "as in a map of labels" in found.doubt) == doubted


@pytest.mark.parametrize("red", [(255, 0, 0), (220, 20, 60)])
@pytest.mark.parametrize("ground", [(0, 0, 0), (255, 255, 255), (128, 128, 128), (0, 255, 0)])
def test_red_paint_with_soft_edges_is_no_map_of_labels(ground: tuple[int, int, int], red: tuple[int, int, int]) -> None:
    """The edge of a brush has a few colours between that of the paint and that of what it is painted on."""
    image = Image.new("RGB", (256, 256), ground)
    ImageDraw.Draw(image).ellipse((60, 90, 190, 170), fill=red)
    found = read_mask(image.reduce(4), "m.png")
    assert found.channel == "red" and len(image.reduce(4).getcolors(64) or ()) > 3
    assert found.doubt is None


@pytest.mark.parametrize("levels", [(0, 17, 140), (0, 128, 255)])
def test_a_grey_map_of_labels_is_doubted(levels: tuple[int, int, int]) -> None:
    """Classes of ADE20K by number, of which those from 128 on are repainted; a trimap."""
    image = Image.fromarray(np.repeat(np.uint8(levels), 8)[:, None].repeat(24, 1))
    assert read_mask(image, "m.png").doubt == (
        f"the flat levels {', '.join(map(str, levels))}, as in a map of labels; those from 128 on count"
    )


def test_integers_of_32_bits_are_refused_with_their_values(tmp_path: Path) -> None:
    """Their scale is unknown: these would all be read as 0."""
    Image.fromarray(np.asarray(LABELS).astype(np.int32) * 255).save(tmp_path / "m.tif")
    with pytest.raises(ImageProblem) as caught:
        open_image(tmp_path / "m.tif")
    assert str(caught.value) == (
        f"{tmp_path}/m.tif: holds integers of unknown scale (signed, of 32 bits, or of a format that states none), "
        "values 0 to 255; convert it to an 8-bit PNG or JPEG, values 0 to 255"
    )


@pytest.mark.parametrize(("ground", "second"), [((0, 0, 0), (100, 0, 0)), ((0, 0, 255), (127, 0, 128))])
def test_an_object_whose_colour_lies_between_two_others_is_no_soft_edge(
    ground: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    image = Image.new("RGB", (64, 64), ground)
    image.paste((255, 0, 0), (4, 4, 24, 24))
    image.paste(second, (34, 4, 60, 60))
    assert "as in a map of labels" in (read_mask(image, "m.png").doubt or "")
