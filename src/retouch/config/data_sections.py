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
    fit: Fit = "crop"
    """"crop" scales to cover and cuts a window around the mask; "stretch" ignores the aspect ratio."""
    invert_mask: bool = False
    """For masks that mark what to keep."""
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


DEFAULT_TEMPLATE = "The text is '{text}'."
"""Calligrapher's prompt."""


class SelfBenchData(DataSection):
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
    def _has_text(cls, value: str) -> str:
        if "{text}" not in value:
            raise ValueError(f"given {value!r}; it must contain {{text}}, the place of the text to write")
        return value


class ManifestData(DataSection):
    """A JSON list or JSONL file of `{"prompt", "image_path"?, "mask_path"?, "target_path"?, "reference_path"?,
    "win_path"? and "lose_path"?, ...}`; without image_path for text to image, without mask_path to edit all of it."""

    format: Literal["manifest"] = "manifest"
    image_root: str | None = None
    """Folder that relative paths start from; null is the manifest's own."""


Data = Annotated[SelfBenchData | ManifestData, Field(discriminator="format")]
