"""Images with a colour profile are read in sRGB, once, wherever they are read."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from retouch.imaging.colour_profiles import in_srgb, is_srgb
from retouch.imaging.masks import read_mask
from retouch.imaging.reading import as_shown, open_image, packed, to_rgb
from retouch.rewards import wire

from .conftest import box_mask, pixels
from .image_files import (
    ADOBE_RGB,
    DISPLAY_P3,
    PROPHOTO,
    SRGB,
    Matrix,
    grey_profile,
    rgb_profile,
    scanner_profile,
    srgb_of,
)

GRID = np.stack(np.meshgrid(*[np.linspace(0, 255, 9).astype(np.uint8)] * 3), -1).reshape(27, 27, 3)
ADOBE = rgb_profile(ADOBE_RGB, 2.2)
ROOM = wire.Share(wire.Room(1 << 40), 1 << 40)


def saved(image: Image.Image, profile: bytes, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, icc_profile=profile)
    return stream.getvalue()


@pytest.mark.parametrize(("colours", "gamma"), [(ADOBE_RGB, 2.2), (DISPLAY_P3, 2.2), (PROPHOTO, 1.8), (SRGB, 1.8)])
def test_colours_are_those_of_the_formulas(colours: Matrix, gamma: float, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(Image.fromarray(GRID), rgb_profile(colours, gamma)))
    read = np.asarray(to_rgb(open_image(tmp_path / "a.png"))).astype(int)
    wanted = srgb_of(GRID / 255, colours, gamma) * 255
    inside = (wanted > 0).all(-1) & (wanted < 255).all(-1)  # the library clips other colours in its own order
    assert inside.mean() > 0.25 and np.abs(read - wanted)[inside].max() <= 1.5


def test_grey_stays_grey(tmp_path: Path) -> None:
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    (tmp_path / "a.png").write_bytes(saved(ramp, grey_profile(1.75)))
    shown = open_image(tmp_path / "a.png")
    grey = (np.arange(256) / 255)[:, None].repeat(3, 1)
    assert shown.mode == "L" and "icc_profile" not in shown.info
    assert np.abs(np.asarray(shown)[0] - srgb_of(grey, SRGB, 1.75)[:, 0] * 255).max() <= 2


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1"])
def test_alpha_and_mode_stay(mode: str) -> None:
    profile = grey_profile(1.75) if mode in ("L", "LA", "1") else ADOBE
    image = Image.fromarray(GRID).convert(mode)
    alpha = Image.fromarray(GRID[..., 0])
    if mode in ("RGBA", "LA"):
        image.putalpha(alpha)
    shown = as_shown(Image.open(io.BytesIO(saved(image, profile))))
    assert shown.mode == {"P": "RGB", "1": "L"}.get(mode, mode)
    if mode in ("RGBA", "LA"):
        assert pixels(shown.getchannel("A")) == pixels(alpha)
    colours = image.convert("RGB") if mode in ("RGBA", "P") else image.convert("L") if mode != "RGB" else image
    assert pixels(shown.convert(colours.mode)) == pixels(as_shown(Image.open(io.BytesIO(saved(colours, profile)))))


def test_a_transparent_colour_is_one_of_the_file() -> None:
    """The key of a PNG names a value before the conversion."""
    image = Image.fromarray(GRID)
    stream = io.BytesIO()
    image.save(stream, "PNG", icc_profile=ADOBE, transparency=tuple(map(int, GRID[3, 4])))
    shown = as_shown(Image.open(stream))
    transparent = np.asarray(shown.convert("RGBA"))[..., 3] == 0
    assert np.argwhere(transparent).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    "profile",
    [
        None,
        ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        grey_profile(2.2),  # describes no RGB
        b"no profile",
        ADOBE[:200],
    ],
)
def test_srgb_and_what_is_no_profile_of_the_image_change_nothing(profile: bytes | None) -> None:
    image = Image.fromarray(GRID)
    image.info["icc_profile"] = profile
    assert pixels(in_srgb(image)) == pixels(Image.fromarray(GRID))


def test_a_profile_of_srgb_by_another_program_is_srgb() -> None:
    """Its curve is rounded otherwise; a power curve is another one."""
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert is_srgb(own, "RGB") and not is_srgb(rgb_profile(SRGB, 2.2), "RGB") and not is_srgb(ADOBE, "RGB")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_converted_once_and_everywhere(kind: str, tmp_path: Path) -> None:
    """By the command line, for an image in memory, and by a reward server."""
    data = saved(Image.fromarray(GRID), ADOBE, kind)
    path = tmp_path / "a"
    path.write_bytes(data)
    shown = open_image(path)
    assert "icc_profile" not in shown.info
    assert pixels(open_image(packed(shown, "x"))) == pixels(shown)
    assert pixels(open_image(packed(Image.open(path), "x"))) == pixels(shown)
    assert pixels(as_shown(shown)) == pixels(shown)
    plain = Image.fromarray(np.asarray(Image.open(path)))
    assert pixels(plain) != pixels(shown)
    if kind != "TIFF":
        assert np.array_equal(wire.decode_pixels(data, f"image/{kind.lower()}", "RGB", ROOM), np.asarray(shown))


def test_lab_and_cmyk_are_read(tmp_path: Path) -> None:
    image = Image.fromarray(GRID)
    image.convert("LAB").save(tmp_path / "lab.tif")
    assert np.abs(np.asarray(to_rgb(open_image(tmp_path / "lab.tif"))).astype(int) - GRID).mean() < 3
    image.convert("CMYK").save(tmp_path / "cmyk.tif")
    assert pixels(to_rgb(open_image(tmp_path / "cmyk.tif"))) == pixels(image.convert("CMYK").convert("RGB"))


def test_red_paint_of_a_wide_profile_is_a_mask() -> None:
    """sRGB's red is (179, 70, 26) in ProPhoto, which is no red paint by its values."""
    profile = rgb_profile(PROPHOTO, 1.8)
    page = Image.new("RGB", box_mask().size, (40, 90, 60))
    page.paste((179, 70, 26), (0, 0), box_mask())
    found = read_mask(as_shown(Image.open(io.BytesIO(saved(page, profile)))), "m.png")
    assert found.channel == "red" and pixels(found.mask) == pixels(box_mask())


def test_damaged_profiles_are_read_or_ignored() -> None:
    """Whatever stands in a file of somebody else: no error but those of a broken image."""
    draw = np.random.default_rng(0)
    image = Image.fromarray(GRID[:4])
    for profile in (ADOBE, grey_profile(1.75), scanner_profile()):
        for mode in ("RGB", "L", "RGBA", "CMYK"):
            for _ in range(20):
                data = bytearray(profile)
                for place in draw.integers(0, len(data), draw.integers(1, 8)):
                    data[place] = draw.integers(0, 256)
                given = image.convert(mode)
                given.info["icc_profile"] = bytes(data[: draw.integers(100, len(data) + 1)])
                assert in_srgb(given).size == image.size
