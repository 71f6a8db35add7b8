"""`data`: the formats of examples."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveInt, ValidationError, ValidatorFunctionWrapHandler, field_validator

from retouch.config.section import Section

Fit = Literal["crop", "stretch"]
FITS = get_args(Fit)


class DataSection(Section):
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
    """A JSON list or JSONL file of `{"prompt", "image_path"?, "mask_path"?, "target_path"?, "reference_path"?,
    "win_path"? and "lose_path"?, ...}`; without image_path for text to image, without mask_path to edit all of it."""

    format: Literal["manifest"] = "manifest"
    image_root: str | None = None
    """Folder that relative paths start from; null is the manifest's own."""


class PromptsData(DataSection):
    """Prompts of text to image, without pictures: a text file with one a line, or JSON or JSONL of
    `{"prompt", "text"?, "id"?, ...}`."""

    format: Literal["prompts"] = "prompts"


Data = Annotated[SelfBenchData | CrossBenchData | ManifestData | PromptsData, Field(discriminator="format")]
