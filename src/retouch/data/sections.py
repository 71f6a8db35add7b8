"""`data`: the formats of examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

from pydantic import (
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from retouch.config.base import Section
from retouch.data.formats import FORMATS
from retouch.registry import Chosen

Fit = Literal["crop", "stretch"]
FITS = get_args(Fit)
StripFit = Literal["contain", "full_width"]


class DataSection(Section):
    """What every format has."""

    format: str
    """Registered name of the format."""
    path: str
    """A folder, or a manifest file; required."""
    resolution: PositiveInt | tuple[PositiveInt, PositiveInt] = 512
    """Side of a square in pixels, or [height, width]; multiples of what the family needs (16 for FLUX)."""
    max_bad_items: Annotated[int, Field(ge=0)] = 10
    """Broken items are skipped with a warning up to this many; one more is an error."""
    limit: PositiveInt | None = None
    """Use only the first so many items."""

    @field_validator("resolution", mode="wrap")
    @classmethod
    def _is_a_size(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:  # two lines, one for each kind of size
            raise ValueError(
                f"given {value!r}; write the side of a square in pixels, like 512, or [height, width], like [512, 768]"
            ) from None

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) in pixels."""
        return (self.resolution, self.resolution) if isinstance(self.resolution, int) else self.resolution


class PictureSection(DataSection):
    """A format whose items have pictures."""

    fit: Fit = "crop"
    """"crop" scales to cover and cuts a window around the mask; "stretch" ignores the aspect ratio."""
    invert_mask: bool = False
    """For masks that mark what to keep."""
    reference: Literal["given", "mask_box", "half_box"] = "given"
    """Style picture of an item. "given": its own file. "mask_box": where it has none, what its mask box shows in the
    target (else in the source). "half_box", for supervised steps: one half of that box, and only the other half is
    repainted, so that to copy the reference is always wrong; odd ids give the second half."""
    reference_strip: PositiveInt | None = None
    """Pixels: stack the reference above the picture, in a strip of this height that is not repainted (in-context
    reference); it is cut off again before images are scored and shown. Null: none."""
    reference_strip_fit: StripFit = "contain"
    """How the reference fills the strip. "contain": as large as the strip holds it, in its middle. "full_width": scaled
    to the width of the image, its height rounded to a multiple of 16, directly above the image, as Calligrapher stacks
    it. Images of a batch have one size, so the rest of the strip is white; a reference that is higher than the strip at
    that width is squeezed to the height of the strip."""

    @field_validator("reference_strip_fit")
    @classmethod
    def _has_a_strip(cls, value: StripFit, info: ValidationInfo) -> StripFit:
        if value != "contain" and info.data.get("reference_strip", 0) is None:
            raise ValueError(
                f"given {value!r}, but there is no strip to fill; set reference_strip to its height in pixels (288 "
                "holds a reference of 16:9 at 512), or leave reference_strip_fit out"
            )
        return value


DEFAULT_TEMPLATE = "The text is '{text}'."
"""Calligrapher's prompt."""


class SelfBenchData(PictureSection):
    """Calligrapher's layout: `self_bench.txt` with `{int}-{text}` lines, `test{N}_source/_mask/_ref.png`."""

    format: Literal["self_bench"] = "self_bench"
    list_file: str = "self_bench.txt"
    """File of the folder that lists the items."""
    prompt_template: str = DEFAULT_TEMPLATE
    """Prompt of an item; {text} stands for its text."""
    target: Literal["auto", "source", "none"] = "auto"
    """Ground truth: "auto" takes a full-size `_ref`, else the source (the text is already in it); "none": no item has
    one, for sources whose hole holds nothing to imitate."""

    @field_validator("prompt_template")
    @classmethod
    def _template(cls, value: str) -> str:
        return _has_text(value)


class CrossBenchData(PictureSection):
    """Calligrapher's layout with references of other items: `cross_bench.txt` with `{int}-{ref_id[,ref_id]}-{text}`
    lines in a self_bench folder; an item for each reference, numbered in order."""

    format: Literal["cross_bench"] = "cross_bench"
    list_file: str = "cross_bench.txt"
    """File of the folder that lists the items."""
    prompt_template: str = DEFAULT_TEMPLATE
    """Prompt of an item; {text} stands for its text."""

    @field_validator("prompt_template")
    @classmethod
    def _template(cls, value: str) -> str:
        return _has_text(value)


def _has_text(template: str) -> str:
    if "{text}" not in template:
        raise ValueError(f"given {template!r}; it must contain {{text}}, the place of the text to write")
    return template


class ManifestData(PictureSection):
    """A JSON list, JSONL or CSV file of `{"prompt", "image_path"?, "mask_path"?, "target_path"?, "reference_path"?,
    "win_path"? and "lose_path"?, ...}`, or a folder with metadata.jsonl or metadata.csv (imagefolder); without
    image_path for text to image, without mask_path to edit the whole image."""

    format: Literal["manifest"] = "manifest"
    target: Literal["auto", "file", "source", "none"] = "auto"
    """Ground truth of supervised steps. "file": target_path of each entry. "source": the image itself. "auto":
    target_path where any entry names one, else the image of each entry with a mask. "none": no example has one."""
    image_root: str | None = None
    """Folder that relative paths start from; null is the manifest's own."""


class BrushBenchData(PictureSection):
    """BrushBench (arXiv 2403.06976): a folder with `mapping_file.json`, which has the pictures' captions and two masks
    of each, and the pictures."""

    format: Literal["brushbench"] = "brushbench"
    region: Literal["inside", "outside"] = "inside"
    """What is repainted: "inside", what the caption names (`inpainting_mask`); "outside", all around it
    (`outpainting_mask`)."""


class PromptsData(DataSection):
    """Prompts of text to image, without pictures: a text file with one a line, or JSON or JSONL of
    `{"prompt", "text"?, "id"?, ...}`."""

    format: Literal["prompts"] = "prompts"


LEVELS = ("preschool", "primaryschool", "secondaryschool", "highschool", "undergraduate", "PhD")
"""Of MMMG, from the easiest."""

DISCIPLINES = (
    "Biology", "Chemistry", "Economics", "Engineering", "Geography", "History", "Literature", "Math", "Philosophy",
    "Sociology",
)  # fmt: skip
"""Of MMMG."""

MOST_COMPLEX = 8
"""Atomic edits that an instruction of Complex-Edit puts together at most."""


def complexities(value: str) -> tuple[int, ...]:
    """ "8", "1-8" or "1,3,5" as ascending numbers.

    Raises:
        ValueError: anything else.
    """
    found: set[int] = set()
    for piece in value.split(","):
        low, dash, high = (part.strip() for part in piece.partition("-"))
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"given {value!r}; {_COMPLEXITY}")
        found.update(range(int(low), int(high or low) + 1))
    if not found or not found <= set(range(1, MOST_COMPLEX + 1)):
        raise ValueError(f"given {value!r}; {_COMPLEXITY}")
    return tuple(sorted(found))


_COMPLEXITY = f'write numbers from 1 to {MOST_COMPLEX}, like "8", "1-8" or "1,3,5"'


def chosen(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """ "all" or names between commas, in whatever case, in the order of `names`.

    Raises:
        ValueError: a name that is none of them.
    """
    if value.strip().casefold() == "all":
        return tuple(names)
    by_key = {name.casefold(): name for name in names}
    asked = [piece.strip() for piece in value.split(",")]
    unknown = [piece for piece in asked if piece.casefold() not in by_key]
    if unknown:
        raise ValueError(f"given {value!r}: {unknown[0]!r} is none; write all, or some of {', '.join(names)}")
    picked = {by_key[piece.casefold()] for piece in asked}
    return tuple(name for name in names if name in picked)


class ProtocolData(DataSection):
    """What the data sets of published protocols share. Their `path` is a folder, or the id of a data set of the hub,
    which the library datasets fetches (`pip install "retouch[vlm]"`)."""

    part: Literal["all", "train", "held_out"] = "all"
    """"held_out" is a share of the pictures (of the prompts where there are none), chosen by their content; "train" is
    the rest. No picture is in both, whatever else is chosen."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """About this share is held out; the same for both parts."""
    curriculum: PositiveInt = 1
    """Stages of the rollouts: of n, stage s draws from the easiest s/n of the examples; 1 draws from all."""


class ComplexEditData(ProtocolData):
    """Complex-Edit (arXiv 2504.13143): one example for every picture and complexity. A folder holds parquet, arrow or
    JSONL files with the columns of the hub's data set, and "real" or "syn" in their names."""

    format: Literal["complex_edit"] = "complex_edit"
    complexity: str = "8"
    """How many atomic edits an instruction puts together: "8", "1-8" or "1,3,5"."""
    image_type: Literal["real", "syn", "all"] = "real"
    """Photographs, synthetic pictures, or both."""
    fit: Fit = "crop"
    """"crop" scales to cover and cuts out the middle; "stretch" ignores the aspect ratio."""

    @field_validator("complexity", mode="before")
    @classmethod
    def _is_complexity(cls, value: object) -> object:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        return ",".join(map(str, complexities(text))) if isinstance(text, str) else text


class MmmgData(ProtocolData):
    """MMMG (arXiv 2506.10963): prompts with the knowledge graphs that their pictures should show."""

    format: Literal["mmmg"] = "mmmg"
    layout: Literal["benchmark", "train"] = "benchmark"
    """The benchmark's columns (parquet, arrow, JSONL, or the hub), or the JSON file of the training set."""
    levels: str = "all"
    """"all", or some of preschool, primaryschool, secondaryschool, highschool, undergraduate, PhD, between commas."""
    disciplines: str = "all"
    """"all", or some of Biology, Chemistry, Economics, Engineering, Geography, History, Literature, Math, Philosophy,
    Sociology, between commas."""

    @field_validator("levels")
    @classmethod
    def _are_levels(cls, value: str) -> str:
        return ",".join(chosen(value, LEVELS)) if value != "all" else value

    @field_validator("disciplines")
    @classmethod
    def _are_disciplines(cls, value: str) -> str:
        return ",".join(chosen(value, DISCIPLINES)) if value != "all" else value


Data = Annotated[DataSection, Chosen(FORMATS, "format")]
