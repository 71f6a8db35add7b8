"""Base of the benchmarks of `retouch eval --benchmark`. No torch.

A benchmark is one file: which data format reads the published folder, which rewards observe an output, and the official
arithmetic from the observations to the published measures. Its fields are the keys of a benchmark file (YAML).
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from PIL import Image
from pydantic import Field, PrivateAttr, model_validator

from retouch.config.base import Count, ImageCount, NonNegative, Section, Text
from retouch.config.load import overlaid
from retouch.config.variables import with_variables
from retouch.data.base import DataSection, ItemFiles, ProtocolData
from retouch.errors import ConfigError
from retouch.process.plain_text import count_of
from retouch.rewards.base import UNSCORED, Reward, RewardEntry
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.foreign import one_line
from retouch.types import Outcome, Score

_AS_SAVED = {"paste_back": False}
"""Keys of every entry: an output is scored as it was saved, which `Benchmark.composites` decides."""

_PLACES = {"address", "detector_url", "path", "model", "image_encoder", "detector", "prompts"}
_CLOSER = {"engine", "wording", "readability", "reader"}

_NOT_COMPARED = frozenset({*UNSCORED, "scorer", *_PLACES, *_CLOSER})
"""Keys of a reward that are not compared with the official ones: those that change no score; places and models, which
the revision of the reward names; and those that bring the reward closer to the official one, on which `caveats` and
`departures` of the benchmark report."""

_MODELS = ("processor", "color_model")
"""Keys for a model that the revision does not always name: their last path component is compared."""

_IDLE = {"box_margin": "crop", "box_min_side": "crop", "gate_threshold": "gated_by", "gate_floor": "gated_by"}
"""Keys that are read only beside another one."""


JUDGE: Mapping[str, Any] = {"address": "${JUDGE_URL:-https://api.openai.com/v1}"}
"""Keys of a judge's entry: the endpoint that the environment names."""


def judge(model: str) -> dict[str, Any]:
    """Keys of a judge's entry: the endpoint and the model that the environment names (JUDGE_URL, JUDGE_MODEL), else
    `model` at OpenAI."""
    return {**JUDGE, "model": f"${{JUDGE_MODEL:-{model}}}"}


@dataclass(frozen=True)
class ImageRow:
    """One output, as it was scored.

    Attributes:
        key: official key of its item, or of the first item with its source: edits of one image are not independent,
            and together a unit of intervals.
        index: number of the image, from 0, among those of its item.
        outcomes: of every reward of the benchmark, by name.
        file: official name of the output.
    """

    key: str
    index: int
    metadata: Mapping[str, Any]
    outcomes: Mapping[str, Outcome]
    file: str = ""

    def score(self, reward: str) -> Score | None:
        """The outcome of a reward; None if it failed, or if the benchmark file removed the reward."""
        outcome = self.outcomes.get(reward)
        return outcome if isinstance(outcome, Score) else None

    def without(self, *rewards: str) -> ImageRow:
        """The output without the outcomes of some rewards; itself if there are none."""
        kept = {name: outcome for name, outcome in self.outcomes.items() if name not in rewards}
        return replace(self, outcomes=kept) if rewards else self


@dataclass(frozen=True)
class PublishedRow:
    """One row of a published table.

    Attributes:
        numbers: by the names of `Benchmark.summary`.
        source: paper and table, or the page.
    """

    model: str
    numbers: Mapping[str, float]
    source: str

    @classmethod
    def table(cls, source: str, measures: Sequence[str], *rows: tuple[Any, ...]) -> tuple[PublishedRow, ...]:
        """Rows of a model and its number of each measure."""
        return tuple(cls(model, dict(zip(measures, numbers, strict=True)), source) for model, *numbers in rows)


@dataclass(frozen=True)
class Official:
    """Facts of the official run.

    Attributes:
        images_per_item: number of images of an item.
        resolution: (height, width) of the outputs; None: the protocol sets none.
        items: number of items of the whole data set; None: not known, or by the options (`Benchmark.official_items`).
        scorers: reward -> the model of its published scores, by the name that revisions have.
        settings: other settings, by name; they are written to the result and are not applied.
    """

    images_per_item: int = 1
    resolution: tuple[int, int] | None = None
    items: int | None = None
    scorers: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


class DistanceEntry(Section):
    """A distance between all outputs, as they are scored, and real images."""

    measure: Literal["fid", "kid", "cmmd"]
    """Distance. fid needs 2,048 images or more; cmmd and kid (both x 1000) are usable with fewer."""
    extractor: Literal["encoder", "torchscript"] = "encoder"
    """Network of the features: an image encoder of transformers (CLIP for the published CMMD, DINOv2), or a TorchScript
    file that takes [1, 3, H, W] uint8, like the Inception of published FIDs (`inception-2015-12-05.pt`)."""
    path: Text
    """Hub id or folder of the encoder, or the TorchScript file."""
    real: Text = "source"
    """Real images: "source" or "target" of the items, one that items share once; or a folder."""
    draws: Annotated[int, Field(ge=0)] = 100
    """Bootstrap samples of the interval; 0 gives none. A sample of FID with 2,048 features takes seconds."""


class Benchmark(Section):
    """One benchmark and its settings."""

    _path_key: str = PrivateAttr(default="--path")
    name: str
    """Registered name of the benchmark."""
    path: Text
    """The published data: a folder, a file, or for some benchmarks the id of a data set on the hub."""
    images_per_item: ImageCount | None = None
    """Images of each item, each with its own seed; null is the official number."""
    resolution: Count | tuple[Count, Count] | None = None
    """Side or [height, width] in pixels to sample at; null is the official size, or the run's if there is none."""
    num_steps: Count | None = None
    """Solver steps; null is the run's evaluation.num_steps."""
    guidance_scale: NonNegative | None = None
    """Guidance scale; null is the run's."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Random seed for the noise of all images."""
    limit: Count | None = None
    """Use only the first `limit` items; the result is not the benchmark's."""
    held_out_share: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Use only the items that a run with `data.part: train` and this `data.held_out_share` of the same data does not
    train on, for the formats that have these keys; null uses all items."""
    max_bad_items: Annotated[int, Field(ge=0)] = 10
    """Maximum number of broken items, which are left out and reported; more are an error."""
    rewards: dict[str, Reward] = Field(default={})
    """Rewards by name; keys given here replace those of the benchmark's own rewards, and null removes one."""
    distances: dict[str, DistanceEntry] = Field(default={})
    """Distances of sets of images by name; none by default."""
    reward_client: RewardClientConfig = RewardClientConfig()
    """How reward servers are called, as in a run file."""

    title: ClassVar[str]
    """Name in tables."""
    source: ClassVar[str]
    """Paper and place of the data."""
    section: ClassVar[type[DataSection]]
    """Format of the data, unless the benchmark has a `data` of its own."""
    official: ClassVar[Official] = Official()
    file: ClassVar[str] = "{key}.png"
    """`file_name` with the `key`, the `id` and the metadata of an item, and the `index` of the output."""
    own_rewards: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """The benchmark's own rewards by name, each as under `rewards` of a run file."""
    composites: ClassVar[bool] = True
    """Whether samples are composited into their sources inside the mask before they are saved; the official protocol
    decides."""
    published: ClassVar[Sequence[PublishedRow]] = ()
    caveats: ClassVar[Sequence[str]] = ()
    """Reasons why the measures never compare with published ones, whatever the settings."""

    @classmethod
    def default_rewards(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """`own_rewards`, or those that depend on the given keys, which are not validated yet."""
        return cls.own_rewards

    @property
    def path_key(self) -> str:
        """Where `path` was given, for messages: the option, or the key of a file."""
        return self._path_key

    def with_path_key(self, key: str) -> Self:
        self._path_key = key
        return self

    def data(self) -> DataSection:
        """How the published data at `path` are read. Here: by `section`, with the options of the benchmark that it has
        under the same name, and with images brought to the official size as a whole."""
        kind = getattr(type(self), "section", None)
        if kind is None:
            raise NotImplementedError(f"{type(self).__name__} has no section; define section, or data(self)")
        fit = {"fit": "stretch"} if "fit" in kind.model_fields else {}
        own = {"path", *type(self).model_fields.keys() - Benchmark.model_fields.keys()} & kind.model_fields.keys()
        return self.sized(kind(**fit, **{name: getattr(self, name) for name in own}))

    def file_name(self, item: ItemFiles, index: int) -> str:
        """Official name of an output, with its suffix, relative to the folder of outputs. Different for all outputs."""
        name = self.file.format(**{**item.metadata, "key": self.key(item), "id": item.id, "index": index})
        return name if "{index" in self.file else numbered(name, index)

    @abstractmethod
    def summary(self, rows: Sequence[ImageRow]) -> dict[str, float]:
        """The published measures of some outputs by name. A failed outcome is left out of its measures: it is never a
        number. A measure without outputs is left out."""

    def key(self, item: ItemFiles) -> str:
        """Official key of an item."""
        return str(item.metadata.get("key", item.id))

    def prepared(self, image: Image.Image, source: Image.Image | None, mask: Image.Image | None) -> Image.Image:
        """An output as it is scored. Here: with a mask, at the size of the source.

        Args:
            image: RGB; its `format` is that of the file, like "JPEG".
            source, mask: of the item, at the size of the published files.
        """
        if source is None or mask is None or image.size == source.size:
            return image
        return image.resize(source.size, Image.Resampling.LANCZOS)

    def departures(self) -> list[str]:
        """Settings by which the measures do not compare with published ones, each as a sentence without a full stop;
        beside `caveats`. The result adds those of the run: its items, sizes and models."""
        found: list[str] = []
        if self.count != self.official.images_per_item:
            found.append(f"{count_of(self.count, 'image')} per item instead of {self.official.images_per_item}")
        if self.limit is not None:
            found.append(f"only the first {count_of(self.limit, 'item')}")
        if self.held_out_share is not None:
            found.append(f"only the held-out share of {self.held_out_share:g} of the items")
        if self.official.resolution not in (None, self.size):
            found.append("sampled at {} x {} pixels instead of {} x {}".format(*(self.size or ()), *self.official_size))
        return [*found, *self._other_rewards()]

    def _other_rewards(self) -> list[str]:
        """Keys of the benchmark's own rewards that are not the official ones. The options of a server that runs already
        are not known here."""
        found: list[str] = []
        for name, keys in self.default_rewards(self.model_dump()).items():
            entry = self.rewards.get(name)
            if entry is None:
                continue
            if entry.scorer != (scorer := keys.get("scorer", name)):
                found.append(f"rewards.{name} is {entry.scorer} instead of {scorer}")
            elif entry.is_made_here:
                found += [
                    f"rewards.{name}.{key} is {_shown(getattr(entry, key))} instead of {_shown(value)}"
                    for key, value in _compared(entry, keys).items()
                    if not self._is_official(name, key, getattr(entry, key), value)
                ]
        return found

    def _is_official(self, name: str, key: str, given: Any, official: Any) -> bool:
        if key not in _MODELS or not isinstance(given, str):
            return given == official
        return _last(given) in (_last(official), _last(self.official.scorers.get(name, "")))

    def official_items(self) -> int | None:
        """Number of items of the whole data set with these options; None: not known."""
        return self.official.items

    def published_rows(self) -> Sequence[PublishedRow]:
        """The published rows that belong to these settings."""
        return self.published

    @property
    def count(self) -> int:
        """Images of each item."""
        return self.images_per_item or self.official.images_per_item

    @property
    def size(self) -> tuple[int, int] | None:
        """(height, width) to sample at; None: the run's."""
        given = self.resolution
        return self.official.resolution if given is None else (given, given) if isinstance(given, int) else given

    @property
    def official_size(self) -> tuple[int, int]:
        """(height, width) of the official outputs, where there is one."""
        assert self.official.resolution is not None
        return self.official.resolution

    def sized(self, section: DataSection) -> DataSection:
        """A data section with the keys that choose its items and, if it is known, the size to sample at.

        Raises:
            ConfigError: `held_out_share` for a format without parts.
        """
        size = {} if self.size is None else {"resolution": self.size}
        if self.held_out_share is not None and not isinstance(section, ProtocolData):
            raise ConfigError(
                f"held_out_share: given {self.held_out_share:g}, but format {section.format!r} has no parts; divide "
                "the data with `retouch data split`, and leave it out"
            )
        part = {} if self.held_out_share is None else {"part": "held_out", "held_out_share": self.held_out_share}
        return section.model_copy(update={"limit": self.limit, "max_bad_items": self.max_bad_items, **part, **size})

    def check_rewards(self) -> None:
        """Check the rewards as those of a run are checked, before anything is loaded or sampled.

        Raises:
            ConfigError: an option that is never read, a gate that cannot work, or a reward that scores no single image.
        """
        try:
            for name, entry in self.rewards.items():
                if entry.compares_group():
                    raise ValueError(
                        f"rewards.{name}: compares the samples of a group with each other, but a benchmark scores "
                        "every image alone; remove it, or set against=reference"
                    )
                entry.check_among(self.rewards, f"rewards.{name}", whose="benchmark")
        except ValueError as error:
            raise ConfigError(str(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _own_rewards_first(cls, value: object) -> object:
        """The benchmark's own rewards with the given keys over them."""
        if not isinstance(value, Mapping):
            return value
        options = dict(cast("Mapping[str, Any]", value))
        given = options.get("rewards") or {}
        if not isinstance(given, Mapping):
            return options
        given = cast("Mapping[str, Any]", given)
        own = {
            name: {**_AS_SAVED, "scorer": name, **_without_options(entry, given.get(name))}
            for name, entry in cls.default_rewards(options).items()
        }
        changes = {f"rewards.{name}": entry for name, entry in given.items()}
        merged = overlaid({"rewards": own}, changes, warns=False)["rewards"] if given else own
        named = {name: _named(name, entry) for name, entry in merged.items()}
        return {**options, "rewards": with_variables(named, "rewards")}


def _named(name: str, entry: Any) -> Any:
    """An entry with its defaults; one that is no mapping is reported by the validation."""
    given: Any = {} if entry is None else entry
    return {**_AS_SAVED, "scorer": name, **given} if isinstance(given, Mapping) else given


def _without_options(entry: Mapping[str, Any], given: Any) -> dict[str, Any]:
    """The keys of an entry that apply beside those given: a running server has options of its own."""
    served = isinstance(given, Mapping) and cast("Mapping[str, Any]", given).get("url") not in (None, "auto")
    return {name: value for name, value in entry.items() if not served or name in RewardEntry.model_fields}


def _compared(entry: RewardEntry, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The official value of every key of an entry that changes its scores.

    Args:
        keys: the official ones; the others have their defaults.
    """
    fields = {k: of for k, of in type(entry).model_fields.items() if k not in _NOT_COMPARED and not of.is_required()}
    official = {key: of.get_default(call_default_factory=True) for key, of in fields.items()}
    official |= {key: value for key, value in {**_AS_SAVED, **keys}.items() if key not in _NOT_COMPARED}
    return {
        key: value
        for key, value in official.items()
        if key not in _IDLE or getattr(entry, _IDLE[key]) != entry.model_fields[_IDLE[key]].default
    }


def _last(path: str) -> str:
    """The last component of a path, in lower case."""
    return path.rstrip("/").rpartition("/")[2].lower()


def _shown(value: Any) -> str:
    """The value of a key in a sentence."""
    return one_line(json.dumps(value, ensure_ascii=False, default=str), most=60)


def numbered(file: str, index: int) -> str:
    """The name of image `index` where the protocol has one image of an item: the first has that name, `x.png`, and
    further ones are `x_1.png`, `x_2.png`."""
    path = PurePosixPath(file)
    return file if index == 0 else str(path.with_name(f"{path.stem}_{index}{path.suffix}"))


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean of at least one value."""
    return sum(values) / len(values)


def means(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The mean of every column that has values."""
    return {name: mean(values) for name, values in columns.items() if values}
