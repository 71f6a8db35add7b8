"""Common part of the data formats: items, and the section of the run file. No torch.

A format is one file with one section class: its options, `list_items`, and its values of the methods below.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from retouch.config.base import Count, Section, containing
from retouch.config.errors import explain
from retouch.config.reads import ReadBy, ReadIf, ReadIn
from retouch.data.buckets import Buckets, Shape
from retouch.data.remote import pinned
from retouch.errors import DataError, shown
from retouch.files.hub import is_hub_id
from retouch.imaging.fitting import Fit, StripFit
from retouch.imaging.reading import PackedImage

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

TargetRole = Literal["auto", "source", "none", "file"]
ReferenceRole = Literal["given", "mask_box", "half_box"]


@dataclass(frozen=True)
class ItemFiles:
    """One item as its format lists it, with no file opened.

    Attributes:
        target: source of the ground truth. "file": `target_path`. "source": the source image. "none": there is none.
            "auto": a reference of the source's size, whose mask box is then the style reference; else the source.
        crops_reference: a reference of the source's size is cut to its mask box, whatever `target` is.
        reference_mask_path: mask of the item that the reference belongs to; one of the reference's size cuts it to
            its box.
        difficulty: sort key of a curriculum.
        more_paths: source images beside the one that is edited, in order.
        mask_is_made: the mask is no file of the data set and white where to repaint, whatever `invert_mask` is.
        name: for messages, of an item whose id is in no file.
        original: `content_of` the image that the source is a copy of, at another size; "": it is none.
    """

    id: int
    prompt: str
    source_path: Path | PackedImage | None = None
    mask_path: Path | PackedImage | None = None
    reference_path: Path | PackedImage | None = None
    target_path: Path | None = None
    win_path: Path | None = None
    lose_path: Path | None = None
    embedding_path: Path | None = None
    target: TargetRole = "none"
    crops_reference: bool = False
    reference_mask_path: Path | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    difficulty: float = 0.0
    more_paths: tuple[Path | PackedImage, ...] = ()
    mask_is_made: bool = False
    name: str = ""
    original: str = ""

    @property
    def where(self) -> str:
        """The item in a message."""
        return self.name or f"item {self.id}"

    def inverts_mask(self, options: ImageOptions) -> bool:
        """Whether black pixels of the mask are repainted."""
        return options.invert_mask and not self.mask_is_made


@dataclass(frozen=True)
class ItemError:
    """One item that cannot be used, and why."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True)
class ItemDoubt:
    """One item that can be used, and why its mask may not be what is meant.

    Attributes:
        remembered: whether its files were read at an earlier start; `doubt` then has no reason.
    """

    where: str
    doubt: str
    remembered: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.doubt}"


def item_or_error(where: str, make: Callable[..., ItemFiles], *given: Any) -> ItemFiles | ItemError:
    """`make(*given)`; where it raises a DataError, an item that cannot be used."""
    try:
        return make(*given)
    except DataError as error:
        return ItemError(where, str(error))


@dataclass(frozen=True)
class ImageOptions:
    """How the images of an item become those of an example; the fields are options of `ImageSection`."""

    fit: Fit = "crop"
    invert_mask: bool = False
    reference: ReferenceRole = "given"
    reference_strip: int | None = None
    reference_strip_fit: StripFit = "contain"


Side = Annotated[int, Field(ge=1, le=16384)]
"""Pixels."""


Template = Annotated[str, containing("{text}", "the text to write")]
"""A prompt with a place for the text to write."""


def chosen(value: str, names: Sequence[str], unknown_is: str = "none") -> tuple[str, ...]:
    """ "all" or comma-separated names, in any case, in the order of `names`.

    Raises:
        ValueError: an unknown name.
    """
    if value.strip().casefold() == "all":
        return tuple(names)
    by_key = {name.casefold(): name for name in names}
    asked = [piece.strip() for piece in value.split(",")]
    unknown = [piece for piece in asked if piece.casefold() not in by_key]
    if unknown:
        raise ValueError(f"given {value!r}: {unknown[0]!r} is {unknown_is}; write all, or some of {', '.join(names)}")
    picked = {by_key[piece.casefold()] for piece in asked}
    return tuple(name for name in names if name in picked)


FOLDERS = ("image_root", "images")
"""Options beside `path` that name data, of the formats that have them."""


class DataSection(Section):
    """Options of every format."""

    KEPT: ClassVar[Set[str]] = {"path", "resolution", "max_bad_items", "limit"}
    FREE_IN_EPOCH: ClassVar[Set[str]] = {"format", "path", "limit", "max_bad_items"}

    format: str
    """Registered name of the format."""
    path: str
    """A folder, or a manifest file; required. Data at a commit: hf://datasets/OWNER/NAME@COMMIT/FILE of the hub, or
    github://OWNER/NAME@COMMIT/FILE, is downloaded once; COMMIT has 40 hexadecimal digits."""
    resolution: Side | tuple[Side, Side] | Buckets = 512
    """Side of a square in pixels, or [height, width]; multiples of the family's size multiple (16 for FLUX). A section
    {pixels, multiple, max_aspect} gives each image a shape near its own."""
    max_bad_items: Annotated[int, Field(ge=0)] = 10
    """Maximum number of broken items, which are skipped with a warning; more are an error."""
    limit: Count | None = None
    """Use only the first `limit` items."""

    expects: ClassVar[str] = ""
    """The paths that `recognises` accepts, for messages."""
    has_images: ClassVar[frozenset[str]] = frozenset()
    """Image fields of `Example` that an item can have."""
    has_texts: ClassVar[bool] = False
    """Whether every item has a target text by design."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Files and folders, one of which marks a folder of this format."""

    @abstractmethod
    def list_items(self) -> list[ItemFiles | ItemError]:
        """Every item, with no image opened.

        Raises:
            DataError: the list itself is missing or unreadable.
        """

    @classmethod
    def recognises(cls, path: Path) -> bool:
        """Whether a path given without a format is a data set of this one."""
        return any((path / name).exists() for name in cls.marks)

    def listing(self) -> Path | None:
        """The text, JSON or CSV file that names the items, which `retouch data split` divides; None: there is none."""
        return None

    def given_images(self) -> frozenset[str]:
        """Images beside the source that an algorithm without rollouts can train on: target, or win and lose."""
        return frozenset()

    def divisible(self) -> list[tuple[Mapping[str, Any], ItemFiles]] | None:
        """The entries of a JSONL `listing` that are no items, each with the images and texts that must not be in both
        lists of a split; None: each entry is an item."""
        return None

    def each_once(self, items: Sequence[ItemFiles]) -> list[ItemFiles]:
        """The items that are evaluated and sampled: fewer in a format that lists an input of the model again."""
        return [*items]

    def check(self, run: RunConfig, key: str = "") -> None:
        from retouch.config.needs import needed_pictures

        needs = needed_pictures(run, training=key == "data")
        if not needs <= self.has_images:
            has, family = ("sources alone", "qwen_image_edit") if self.has_images else ("no images", "qwen_image")
            raise ValueError(
                f"{key}.format: given {self.format!r}, which has {has}, but the run needs {', '.join(sorted(needs))} "
                f"in every example; set format=manifest, or model.family={family} with full weights or LoRA"
            )
        if isinstance(self.resolution, Buckets):
            if not self.has_images:
                raise ValueError(
                    f"{key}.resolution: given shapes for images, but format {self.format!r} has none; set the side of "
                    f"a square, like {min(self.resolution.shapes[0])}, or [height, width]"
                )
        elif any(side % run.model.size_multiple for side in self.size):
            multiple = run.model.size_multiple
            nearest = [max(multiple, round(side / multiple) * multiple) for side in self.size]
            raise ValueError(
                f"{key}.resolution: given {self.resolution}; {run.model.family} needs multiples of {multiple}; "
                f"set {nearest if nearest[0] != nearest[1] else nearest[0]}"
            )
        for size in self.page_sizes:
            run.model.check_size(key, size)

    @field_validator(*FOLDERS, "path", check_fields=False)
    @classmethod
    def _is_whole(cls, value: str | None) -> str | None:
        pinned(value or "")  # raises for an incomplete one
        return value

    @field_validator("resolution", mode="wrap")
    @classmethod
    def _is_a_size(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        if isinstance(value, Mapping):
            try:
                return Buckets.model_validate(value)
            except ValidationError as error:
                raise ValueError(explain(error, Buckets)[0]) from None
        try:
            return handler(value)
        except ValidationError:  # two lines, one for each kind of size
            raise ValueError(
                f"given {value!r}; write the side of a square in pixels, like 512, or [height, width], like [512, 768]"
            ) from None

    @property
    def size(self) -> Shape:
        """(height, width) in pixels; of several shapes the largest."""
        if isinstance(self.resolution, Buckets):
            return self.resolution.largest
        return (self.resolution, self.resolution) if isinstance(self.resolution, int) else self.resolution

    @property
    def sizes(self) -> tuple[Shape, ...]:
        """Every (height, width) that an example may have."""
        return self.resolution.shapes if isinstance(self.resolution, Buckets) else (self.size,)

    @property
    def page_sizes(self) -> tuple[Shape, ...]:
        """Every (height, width) that the network may see: an example with the strip of its reference above it."""
        strip = self.image_options.reference_strip or 0
        return tuple((height + strip, width) for height, width in self.sizes)

    def size_for(self, image: tuple[int, int] | None) -> Shape:
        """(height, width) of the example of an image of this (width, height), or of one without images."""
        if isinstance(self.resolution, Buckets):
            return self.resolution.nearest(*image or (1, 1))
        return self.size

    @property
    def image_options(self) -> ImageOptions:
        """How images are read: the options of that name which the format has."""
        names = [option.name for option in fields(ImageOptions)]
        return ImageOptions(**{name: getattr(self, name) for name in names if hasattr(self, name)})

    @property
    def hub_id(self) -> str | None:
        """The data set on the Hugging Face hub that `path` names; None: a local path."""
        return None

    def has_list(self) -> bool:
        """Whether what `path` names is on this machine; nothing is read."""
        return Path(self.path).expanduser().exists()

    @property
    def stages(self) -> int:
        """Stages of the curriculum; 1: there is no curriculum."""
        return 1

    @property
    def paths(self) -> list[str]:
        """Paths that the section reads: `path` and the folder of its images if one is given."""
        folders = [getattr(self, name, None) for name in FOLDERS]
        return [self.path, *(folder for folder in folders if folder)]

    def items(self) -> list[ItemFiles | ItemError]:
        """`list_items`, the first `limit` of them.

        Raises:
            DataError: the list itself is missing or unreadable, or `list_items` returned something else.
        """
        listed: Any = self.list_items()
        where = f"format {self.format}: {type(self).__name__}.list_items returned"
        if not isinstance(listed, list):
            raise DataError(f"{where} {shown(listed)}; expected a list of ItemFiles and ItemError; return one")
        kept = cast("list[Any]", listed)[: self.limit]
        for item in kept:
            problem = _item_problem(item)
            if problem is not None:
                raise DataError(f"{where} {problem}")
        return kept


def _item_problem(item: Any) -> str | None:
    """The part of a message about an item that no dataset can use; None for a usable one. A dataclass does not check
    its fields."""
    if isinstance(item, ItemError):
        return None
    if not isinstance(item, ItemFiles):
        return f"{shown(item)}; expected ItemFiles or ItemError; return one of them"
    for name, kind, given in (("id", int, cast("object", item.id)), ("prompt", str, cast("object", item.prompt))):
        if not isinstance(given, kind):
            return f"an item with {name} {shown(given)}; expected {kind.__name__}; set {name} to one"
    if item.target not in get_args(TargetRole):
        return f"an item with target {item.target!r}; set target to one of {', '.join(get_args(TargetRole))}"
    return None


def _takes_references(run: RunConfig) -> bool:
    from retouch.config.needs import takes_references

    return takes_references(run, scored=True)


class ImageSection(DataSection):
    """Options of formats whose items have images."""

    KEPT: ClassVar[Set[str]] = {"fit", "invert_mask", "reference", "reference_strip", "reference_strip_fit"}

    fit: Fit = "crop"
    """"crop" scales to cover and cuts a window around the mask; "stretch" ignores the aspect ratio."""
    invert_mask: bool = False
    """Invert the masks: for masks that mark the region to keep. Masks that are made from the places of `lines` stay as
    they are."""
    reference: Annotated[
        ReferenceRole,
        ReadIn(
            "with a style adapter, a style reward, `reference_strip`, or a family that reads a reference",
            lambda own, run: _takes_references(run),
            "but nothing in the run reads a reference; set model.train.kind=ip_adapter, a style reward or a "
            "reference_strip, or leave it out",
        ),
    ] = "given"
    """Style reference of an item. "given": its own file. "mask_box": if it has no file, the mask box of the target
    (else of the source). "half_box", for supervised steps: one half of that box is the reference and only the other
    half is repainted, which makes copying the reference always wrong; odd ids give the second half."""
    reference_strip: Annotated[Count | None, ReadBy("diffusion")] = None
    """Pixels: stack the reference above the image, in a strip of this height that is not repainted (in-context
    reference); the strip is cut off again before images are scored and shown. Null: none."""
    reference_strip_fit: Annotated[
        StripFit,
        ReadIf(
            "with `reference_strip`",
            lambda own: own.reference_strip is not None,
            "but there is no strip to fill; set reference_strip to its height in pixels (288 holds a reference of 16:9 "
            "at 512), or leave reference_strip_fit out",
        ),
    ] = "contain"
    """Size of the reference in the strip. "contain": as large as fits, centered. "full_width": scaled to the width of
    the image, its height rounded to a multiple of 16, directly above the image, as Calligrapher stacks it; a reference
    that is higher than the strip at that width is squeezed to the height of the strip. The rest of the strip is white,
    because images of a batch have one size."""

    has_images: ClassVar[frozenset[str]] = frozenset({"source", "mask", "target", "reference", "win", "lose"})

    def check(self, run: RunConfig, key: str = "") -> None:
        trained = run.data.image_options
        if self.reference_strip != trained.reference_strip:
            raise ValueError(
                f"{key}.reference_strip: given {self.reference_strip}, but data.reference_strip is "
                f"{trained.reference_strip}; a model is trained and used with one height; set both to the same"
            )
        if self.reference_strip_fit != trained.reference_strip_fit:
            raise ValueError(
                f"{key}.reference_strip_fit: given {self.reference_strip_fit!r}, but data.reference_strip_fit is "
                f"{trained.reference_strip_fit!r}; a model is trained and used with one layout; set "
                f"{key}.reference_strip_fit={trained.reference_strip_fit}"
            )
        sft = not run.algorithm.trains_on_rewards and not run.algorithm.given_images
        supervised = key == "warmup_data" or (key == "data" and sft and run.evaluation.data is not None)
        if self.reference == "half_box" and not supervised:
            raise ValueError(
                f"{key}.reference: given 'half_box', which repaints half of a text; no reward can read that; set "
                "it under warmup_data (SFT: data, with evaluation.data), and set mask_box here"
            )
        multiple, strip = run.model.size_multiple, self.reference_strip
        if strip is not None and strip % multiple:
            raise ValueError(
                f"{key}.reference_strip: given {strip}; {run.model.family} needs multiples of {multiple}; set "
                f"{max(multiple, round(strip / multiple) * multiple)}"
            )
        super().check(run, key)


class ProtocolData(DataSection):
    """Options of the data sets of published protocols. Their `path` is a folder, or the id of a data set on the hub,
    which the library datasets downloads (`pip install "retouch[vlm]"`)."""

    FREE_IN_EPOCH: ClassVar[Set[str]] = {"part", "held_out_share", "curriculum"}

    part: Literal["all", "train", "held_out"] = "all"
    """"held_out" is a share of the images (of the prompts, if there are no images), chosen by their content; "train" is
    the rest. No image is in both, independent of other options."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """Approximate share that is held out; the same for both parts."""
    curriculum: Annotated[
        Count,
        ReadIn(
            "by rollouts",
            lambda own, run: own is run.data and run.algorithm.trains_on_rewards,
            "but only rollouts have a curriculum, and they draw from data; leave it out",
        ),
    ] = 1
    """Number of stages n of the rollouts; stage s uses the easiest s/n of the examples. 1 uses all from the start."""

    choices: ClassVar[tuple[str, ...]]
    """Options that choose items beside `part`."""

    @abstractmethod
    def overlaps(self, other: DataSection) -> bool:
        """Whether another section of the same format and path chooses some of the same images or prompts, before
        `part` divides them."""

    @property
    def hub_id(self) -> str | None:
        data = pinned(self.path)
        if data is not None:
            return data.repository if data.host == "hf" and not data.place else None
        return self.path if is_hub_id(self.path) else None

    @property
    def stages(self) -> int:
        return self.curriculum

    def check(self, run: RunConfig, key: str = "") -> None:
        super().check(run, key)
        for name, data in (("data", run.data), ("warmup_data", run.warmup_data)) if key == "evaluation.data" else ():
            if isinstance(data, ProtocolData) and data.path == self.path and self.overlaps(data):
                self._require_held_out_of(name, data)

    def require_items(self, items: list[ItemFiles | ItemError]) -> list[ItemFiles | ItemError]:
        """The items of the section, at least one.

        Raises:
            DataError: none, which names the options that chose them.
        """
        if items:
            return items
        options = ", ".join(f"{name} {getattr(self, name)}" for name in self.choices)
        raise DataError(
            f"data.path: {self.path} has nothing with {options} and part {self.part} "
            f"(held_out_share {self.held_out_share:g}); choose others, or add data"
        )

    def _require_held_out_of(self, name: str, data: ProtocolData) -> None:
        if (data.part, self.part) != ("train", "held_out"):
            raise ValueError(
                f"evaluation.data.part: given {self.part!r} beside {name}.part {data.part!r} of the same path: "
                f"held-out examples would be trained on; set {name}.part=train and evaluation.data.part=held_out"
            )
        if data.held_out_share != self.held_out_share:
            raise ValueError(
                f"evaluation.data.held_out_share: given {self.held_out_share:g}, but {name}.held_out_share is "
                f"{data.held_out_share:g}; set both to one share"
            )


_DEMO_DATA = "runs/demo-data"
"""Data of the tiny run files where DATA_PATH is not set."""

_DEMO_REMEDY = "; the demo makes it (`make demo`, or `retouch init --example demo; python demo.py`); or set DATA_PATH"


def listed_in(config: DataSection, purpose: str) -> list[ItemFiles | ItemError]:
    """The items of a section, and those that are broken.

    Raises:
        DataError: it cannot be listed; by the option or the key that set its path.
    """
    try:
        return config.items()
    except DataError as error:  # formats name their keys as those of `data`
        key = f"{purpose}:" if purpose.startswith("--") else f"{purpose}.path:"
        remedy = _DEMO_REMEDY if _DEMO_DATA in config.path and not Path(config.path).exists() else ""
        raise DataError(re.sub(r"^data\.path:", key, str(error)) + remedy) from None
