"""Base of the entries under `rewards` of a run file, and of the scorers of the package.

A reward is one file: its entry (a `RewardEntry`: the options, what the scorer needs) and its scorer, which `make`
returns; `scorers/jpeg_size.py` is a short one. It imports without torch; a scorer imports its libraries in `load`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar, cast

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from retouch.config.base import Count, Names, NonNegative, Section, Text, Unit
from retouch.config.errors import nearest
from retouch.config.reads import ReadBy, ReadIf, is_given
from retouch.errors import RetouchError
from retouch.registry import Chosen
from retouch.rewards import REWARDS
from retouch.rewards.protocol import RewardItem, Scorer, ScorerSpec
from retouch.types import Failure, Outcome

if TYPE_CHECKING:
    from torch import Tensor

    from retouch.config.run import RunConfig

_TEXTS = "texts 3"
"""In the revision of every scorer that compares texts: which text of a prompt is read (`retouch.rewards.quotes`), and
how `ocr`, `ocr_lines`, `recognizer` and `glyph_structure` compare it (`retouch.imaging.lines.folded`)."""

NO_NETWORK = "this scorer has no network and runs on the CPU; leave device out"


UNSCORED = (
    "weight", "gradient_weight", "role", "transform", "noise", "min_group_std", "url", "device", "threads",
    "images_per_forward", "concurrency", "timeout_s", "requests_per_minute", "tokens_per_minute", "budget_requests",
    "budget_tokens", "budget_dollars", "price_in", "price_out", "key_header", "from_judge",
)  # fmt: skip
"""Keys of an entry that do not change its scores, of every scorer."""


_PIXELS_A_TOKEN = 784
"""Pixels that are a token of a Qwen2.5-VL: 28 x 28."""


@dataclass(frozen=True)
class Question:
    """A question to a judge about an image.

    Attributes:
        number: of such questions for each image.
        images: images that it shows.
        text, tokens_out: tokens of its text and of the answer, estimated.
        tiled: whether images are counted as OpenAI does, in tiles.
    """

    number: float = 1.0
    images: int = 1
    text: int = 200
    tokens_out: int = 80
    tiled: bool = False

    def tokens_in(self, size: tuple[int, int]) -> float:
        """Tokens of the question about images of (height, width)."""
        return self.text + self.images * (tiled_tokens(size) if self.tiled else size[0] * size[1] / _PIXELS_A_TOKEN)


def tiled_tokens(size: tuple[int, int]) -> int:
    """Tokens of an image at OpenAI (gpt-4o, high detail): within 2048 x 2048 and a shorter side of 768, 85 and 170 for
    each tile of 512 x 512."""
    factor = min(1.0, 2048 / max(size))
    factor *= min(1.0, 768 / (factor * min(size)))
    return 85 + 170 * math.prod(math.ceil(side * factor / 512) for side in size)


TRAINED = ReadIf(
    "with `role: train`",
    lambda own: own.role == "train",
    "but role is 'gold', which is never trained on; leave it out",
)
GATED = ReadIf("with `gated_by`", lambda own: own.gated_by is not None, "but gated_by is not set; leave it out")
CROPPED = ReadIf(
    "with `crop: mask_box`",
    lambda own: own.crop == "mask_box",
    "but crop is 'none'; set crop=mask_box, or leave it out",
)


class RewardEntry(Section):
    """One reward of the table; its key is the scorer's name unless `scorer` is set."""

    KEPT: ClassVar[Set[str]] = {"role"}
    ALIASES: ClassVar[Mapping[str, str]] = {"noise": "min_group_std"}
    value_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    """Lowest and highest value of the scorer; a value outside is a failure."""
    images: ClassVar[frozenset[str]] = frozenset()
    """Images that an item must have in addition to the sample: mask, source, reference."""
    licence: ClassVar[str] = "Apache-2.0"
    """Licence of the scorer's code and weights."""
    differentiable: ClassVar[bool] = False
    """Whether the scorer has `values`: scores with a gradient with respect to the pixels."""
    scores_edits: ClassVar[bool] = False
    """Whether it scores edits: examples without the source image that it needs are then not sampled."""
    unscored: ClassVar[frozenset[str]] = frozenset()
    """Options of the scorer that do not change its scores, in addition to `UNSCORED`, or whose content its revision
    names; two values of any other option are two revisions."""
    cpu_only: ClassVar[str | None] = None
    """Why the scorer ignores `device`, and the remedy; None if it computes on it."""

    scorer: str
    """Name of the scorer; several entries may share one with different options."""
    url: Annotated[Text | Annotated[list[Text], Field(min_length=1)] | None, Names("servers", own=("auto",))] = None
    """Null scores in this process; "auto" starts a server on loopback for the run, one per machine; else one or more
    server addresses, or the endpoints file that `retouch reward serve` wrote."""
    device: Text | Annotated[list[Text], Field(min_length=1)] = "cpu"
    """Device of the scorer's network. "cuda" is the GPU that this process trains on, "auto" is that GPU, or the CPU if
    there is none, "cuda:2" is the third GPU. With url "auto" the server has one instance per device: "cuda" means every
    GPU of the machine that the run trains on, and a list names several, like [cuda:2, cuda:3]."""
    weight: Annotated[
        float,
        ReadIf(
            "with `role: train`",
            lambda own: own.role == "train" or own.weight in (0.0, 1.0),
            "but role is 'gold', which is never trained on; leave weight out, or set role=train",
        ),
    ] = 1.0
    """Weight of this reward in the combined score."""
    gradient_weight: Annotated[NonNegative, TRAINED, ReadBy("gradients")] = 0.0
    """Weight of the gradient of this reward by the pixels, beside the advantages of an epoch (nft); the scorer must be
    differentiable and run in this process. With `weight: 0` the reward trains by its gradient alone."""
    role: Literal["train", "gold"] = "train"
    """"gold" is scored only in evaluations and never trained on: it shows whether the run improves the images or only
    exploits its other rewards."""
    paste_back: bool = True
    """Score the composite (the source with the masked region replaced), as a user would see it, instead of the raw
    sample."""
    crop: Literal["none", "mask_box"] = "none"
    """"mask_box" passes only the bounding box of the mask to the scorer, of sample, source and mask."""
    box_margin: Annotated[Unit, CROPPED] = 0.0
    """Widens the box of `crop` by this fraction of its sides."""
    box_min_side: Annotated[Count, CROPPED] = 224
    """Minimum side of the box of `crop` in pixels, limited by the image size."""
    gated_by: Text | None = None
    """Name of another reward that gates this one: the value is multiplied by the gate's value, clamped to [0, 1]. If
    the gate fails, this reward fails too."""
    gate_threshold: Annotated[float | None, GATED] = None
    """Replaces the product: this reward counts in full if its gate reaches this value, and not at all below it."""
    gate_floor: Annotated[float, GATED] = 0.0
    """Value of the reward when its gate is closed; set it for rewards whose values are not above 0."""
    transform: Annotated[Literal["none", "win_rate", "rank"], TRAINED, ReadBy("epochs", anew=True)] = "none"
    """Signal that trains instead of the value. "win_rate": the fraction of the group's other samples that a sample
    beats (a tie counts half). "rank": minus the number of distinct values of the group above the sample's (equal values
    share a rank), as in a rank ensemble; several with `algorithm.combine: sum_then_normalize`."""
    min_group_std: Annotated[NonNegative, TRAINED, ReadBy("epochs", anew=True)] = 0.0
    """A group whose standard deviation does not exceed this gets no advantage from this reward; with a `transform`,
    closer values are a tie. Set it to the standard deviation of repeated scores of one image (`retouch reward
    probe`)."""

    @classmethod
    def is_free_in_epoch(cls, name: str, then: object, now: object) -> bool:
        """An epoch has recorded advantages, whatever scored them, and gradients of the pixels. A retired option is not
        free where training depends on the reward (`trained_on`): who resumes has not chosen the change."""
        return name != "gradient_weight" and name not in cls.retired()

    @abstractmethod
    def make(self) -> Scorer:
        """The scorer with these options, not loaded yet.

        Raises:
            ConfigError: a requirement that depends on no option, such as an API key, is missing.
        """

    def required_images(self) -> frozenset[str]:
        """Images that an item must have in addition to the sample."""
        return self.images

    def example_images(self) -> frozenset[str]:
        """Images that an example must have to be sampled at all; a sample without the others fails this reward."""
        return self.required_images() & ({"reference", "source"} if self.scores_edits else {"reference"})

    def reads_text(self) -> bool:
        """Whether the scorer compares what it reads in the image with the target text of the example."""
        return False

    def lacking(self, text: str) -> list[str]:
        """Characters of a target text that the scorer's reader cannot return, as far as this is known without a model
        that is not installed: no image scores 1."""
        return []

    def remedy_for(self, characters: Sequence[str], name: str) -> str:
        """How the reward `name` can score texts with characters that are `lacking`."""
        return "leave these examples out, or set rewards that read them"

    def compares_group(self) -> bool:
        """Whether a value depends on the other samples of its group. Such a reward is scored in training only, where
        every call of its scorer gets whole groups; with role gold, by `retouch eval` only."""
        return False

    def questions(self, group_size: int) -> tuple[Question, ...]:
        """Questions to a judge for each image of a group of this size; none of a scorer without one."""
        return ()

    def prices(self) -> tuple[float, float] | None:
        """Dollars per million tokens of questions and answers; None if not known."""
        return None

    def seconds_an_image(self) -> float:
        """Seconds that one instance takes for an image on its CPU; 0 where it was not measured."""
        return 0.0

    def extras(self) -> frozenset[str]:
        """Extras of the package that the scorer needs in addition to `train`."""
        return frozenset()

    def models(self) -> dict[str, str]:
        """Folders or hub ids of models, by the option that names them."""
        named = {name: getattr(self, name) for name in ("path", "processor", "image_encoder") if hasattr(self, name)}
        return {name: model for name, model in named.items() if model}

    def advice(self, name: str) -> list[str]:
        """Warnings about an entry that is valid but easily misunderstood."""
        return []

    @property
    def is_made_here(self) -> bool:
        """Whether the run makes the scorer itself, in this process or in the server of `url: auto`."""
        return self.url in (None, "auto")

    @property
    def spec_name(self) -> str:
        """Name of the scorer in failures and at /info."""
        return self.scorer

    def unused(self) -> frozenset[str]:
        """The options of the scorer, beside the address of a server: they are the server's."""
        return frozenset() if self.is_made_here else frozenset(self.own_options())

    @classmethod
    def own_options(cls) -> list[str]:
        """Names of the options of the scorer, without those that every entry has."""
        return [name for name in cls.model_fields if name not in RewardEntry.model_fields]

    def scorer_options(self) -> dict[str, Any]:
        """The options of the scorer, without those that every entry has."""
        return {name: getattr(self, name) for name in self.own_options()}

    def options_digest(self) -> str:
        """Digest of the scorer's options that change its scores and are not at their default; "" if all are."""
        names = [name for name in self.own_options() if name not in {*UNSCORED, *self.unscored, "scorer"}]
        defaults = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in names}
        changed = [name for name in names if getattr(self, name) != defaults[name]]
        text = json.dumps(self.model_dump(mode="json", include=set(changed)), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest() if changed else ""

    def check(self, run: RunConfig, key: str = "") -> None:
        """Check the entry against the run; `key` is "rewards.NAME".

        Raises:
            ValueError: a gate or a gradient that cannot work, or a transform without groups.
        """
        self.check_among(run.rewards, key)
        if self.gated_by is not None and run.rewards[self.gated_by].role == "gold" and self.role == "train":
            raise ValueError(
                f"{key}.gated_by: given {self.gated_by!r}, whose role is 'gold': it is not scored in training; set its "
                "role=train, weight=0"
            )
        if self.gradient_weight and run.algorithm.reads(run, "gradients"):
            if self.weight < 0:
                raise ValueError(
                    f"{key}.gradient_weight: given {self.gradient_weight:g}, but {key}.weight is {self.weight:g}: its "
                    f"advantages would lower what its gradient raises; set {key}.weight to 0 or more, or leave "
                    "gradient_weight out"
                )
            without = f"{key}.gradient_weight=0"
            self.require_gradient(key, f"{key}.gradient_weight", without, without)
        if self.transform != "none" and run.rollout.group_size == 1:
            raise ValueError(
                f"{key}.transform: given {self.transform!r}, but rollout.group_size is 1 and a group has no other "
                "samples; set rollout.group_size to 2 or more, or transform=none"
            )
        if self.compares_group():
            self._check_whole_groups(run, key)

    def check_among(self, rewards: Mapping[str, RewardEntry], key: str, whose: str = "run") -> None:
        """Check the entry against the others that score the same images.

        Args:
            whose: what has the rewards, for messages: a run or a benchmark.

        Raises:
            ValueError: a gate that cannot work, or options that belong to a server.
        """
        self._require_options_of_server(key)
        gate = self.gated_by
        if gate is None:
            return
        where = f"{key}.gated_by: given {gate!r}"
        others = [other for other in rewards if other != key.removeprefix("rewards.")]
        if gate not in others:
            hint = nearest(gate, others) if others else "there is no other"
            raise ValueError(f"{where}, which is no other reward of the {whose}; {hint}")
        if rewards[gate].compares_group():
            raise ValueError(f"{where}, which compares samples of a group and has no value in evaluations")
        if rewards[gate].gated_by is not None:
            raise ValueError(f"{where}, which is gated itself; gate both by {rewards[gate].gated_by!r}")

    def require_gradient(self, key: str, algorithm: str, remedy: str, without: str) -> None:
        """Refuse a reward that has no gradient in this process, or whose value is more than the scorer's own.

        Args:
            key: of the entry.
            remedy: for an entry whose gradient cannot be taken.
            without: key and value that take no gradient of it.

        Raises:
            ValueError: the key, and what to set.
        """
        if not self.differentiable:
            known = ", ".join(name for name in REWARDS if REWARDS[name].differentiable)
            raise ValueError(
                f"{key}: given scorer {self.scorer!r}, but {algorithm} trains on the gradient of a reward with respect "
                f"to the pixels, which it does not have; set {remedy}, and train on one of {known}"
            )
        if self.url is not None:
            raise ValueError(
                f"{key}.url: given {self.url!r}, but a server returns no gradient; leave url out and set {key}.device, "
                f"or set {remedy}"
            )
        for name in ("gated_by", "transform", "min_group_std"):
            if is_given(self, name):
                raise ValueError(
                    f"{key}.{name}: given {getattr(self, name)!r}, but {algorithm} trains on the gradient of the value "
                    f"itself; leave {name} out, or set {without}"
                )

    def _check_whole_groups(self, run: RunConfig, key: str) -> None:
        size, batch = run.rollout.group_size, run.rollout.batch_size_per_device
        if self.url is not None:
            raise ValueError(f"{key}.url: given {self.url!r}, but {key} {PARTS_OF_GROUPS}; leave url out")
        compared = f"{key} compares the samples of a group with each other"
        if self.role == "gold":
            return  # compared by `retouch eval` only
        if run.algorithm.trains_text_encoder:
            raise ValueError(
                f"{key}: {compared}, which algorithm {run.algorithm.name!r} does not score together; set "
                "against=reference"
            )
        if size == 1:
            raise ValueError(
                f"{key}: {compared}, but rollout.group_size is 1; set rollout.group_size to 2 or more, or "
                "against=reference"
            )
        if batch % size:
            raise ValueError(
                f"rollout.batch_size_per_device: given {batch}, but {compared} and needs whole groups of "
                f"{size} in a batch; set rollout.batch_size_per_device to a multiple of {size}"
            )

    @field_validator("url", mode="wrap")
    @classmethod
    def _is_an_address(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        try:
            return handler(value)
        except ValidationError:  # pydantic reports one problem per member of the union
            raise ValueError(
                f"given {value!r}; set null (score in this process), auto, http://host:port, a list of these, or the "
                "endpoints file that `retouch reward serve` wrote"
            ) from None

    @field_validator("device", mode="wrap")
    @classmethod
    def _is_a_device(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        forms = r"cpu|auto|cuda(:\d+)?" if isinstance(value, str) else r"cpu|cuda:\d+"
        try:
            checked: str | list[str] = handler(value)
        except ValidationError:  # pydantic reports one problem per member of the union
            checked = []
        names = [checked] if isinstance(checked, str) else checked
        if not names or len({*names}) < len(names) or not all(re.fullmatch(forms, one) for one in names):
            raise ValueError(
                f"given {value!r}; set cpu, cuda, cuda:N or auto, or with url: auto a list of different devices like "
                "[cuda:2, cuda:3]"
            )
        return checked

    @model_validator(mode="after")
    def _device_applies(self) -> RewardEntry:
        if self.device == "cpu":
            return self
        if not self.is_made_here:
            raise ValueError(
                f"device: given {self.device!r} beside url {self.url!r}, but a running server keeps the devices it was "
                f"started on; drop device here and start it with `retouch reward serve {self.scorer} --devices 0`, or "
                "set url: auto"
            )
        if (reason := self.cpu_only) is not None:
            raise ValueError(f"device: given {self.device!r}, but {reason}")
        if self.url is None and not isinstance(self.device, str):
            raise ValueError(
                f"device: given {self.device!r}, but a scorer in this process computes on one device; set url: auto "
                "for a server with one instance per device, or give one device"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _has_what_only_a_server_reads(cls, given: Any) -> Any:
        """A server has its own values of the texts that an entry of this process must set."""
        served = isinstance(given, Mapping) and cast("Mapping[str, Any]", given).get("url") not in (None, "auto")
        return {**dict.fromkeys(cls._required_texts(), ""), **given} if served else given

    @model_validator(mode="after")
    def _has_its_texts(self) -> RewardEntry:
        empty = [name for name in self._required_texts() if not getattr(self, name)] if self.is_made_here else []
        if empty:
            raise ValueError(f"{empty[0]}: given ''; expected a text; set {empty[0]} to one")
        return self

    def _require_options_of_server(self, key: str) -> None:
        """Refuse options of the scorer beside the address of a server, whose own they are."""
        # compared by value, because a dumped run file writes every default
        texts = dict.fromkeys(self._required_texts(), "")
        defaults = {name: type(self).model_fields[name].default for name in self.own_options()} | texts
        changed = {name for name in defaults if getattr(self, name) != defaults[name]}
        if self.is_made_here or not changed:
            return
        name = key.removeprefix("rewards.")
        other = {"scorer": self.scorer} if self.scorer != name else {}
        options = {**other, **self.model_dump(mode="json", include=changed)}
        entry = {**other, **self.model_dump(mode="json", include={*RewardEntry.model_fields}, exclude_defaults=True)}
        served = shlex.join(["retouch", "reward", "serve", name, "--options", json.dumps({name: options})])
        raise ValueError(
            f"{key}.{min(changed)}: given beside url {self.url!r}, but the options of a scorer belong to its server; "
            f"start it with `{served}`, and replace the entry: {shlex.quote(f'{key}={json.dumps(entry)}')}"
        )

    @classmethod
    def _required_texts(cls) -> list[str]:
        fields = {name: cls.model_fields[name] for name in cls.own_options()}
        return [
            n for n, field in fields.items() if field.is_required() and field.annotation is str and not field.metadata
        ]


Reward = Annotated[RewardEntry, Chosen(REWARDS, "scorer")]


def trained_on(entries: Mapping[str, RewardEntry]) -> set[str]:
    """The rewards that training depends on: those with a weight or a gradient, and what gates one with a weight."""
    weighed = {name for name, entry in entries.items() if entry.role == "train" and entry.weight}
    by_gradient = {name for name, entry in entries.items() if entry.gradient_weight}
    return weighed | by_gradient | {gate for name in weighed if (gate := entries[name].gated_by) is not None}


Options = TypeVar("Options", bound=RewardEntry)


PARTS_OF_GROUPS = "compares the samples of a group with each other, and a server receives parts of groups"
"""Why a server cannot have a reward that `compares_group`."""

_OF_A_SCORER = re.compile(r"^reward '[^']*': ")


def problem_of(name: str, scorer: object, error: RetouchError) -> str:
    """The message of a scorer that cannot be loaded, by the key of its reward: `rewards.NAME`, or of an option."""
    told = _OF_A_SCORER.sub("", str(error), count=1)
    options = getattr(scorer, "options", None)
    of_an_option = isinstance(options, RewardEntry) and told.partition(": ")[0] in options.own_options()
    return f"rewards.{name}.{told}" if of_an_option else f"rewards.{name}: {told}"


class PackageScorer(Generic[Options]):
    """Base of the package's scorers: its options, and a spec that follows from them and a revision."""

    def __init__(self, options: Options, revision: str = "1") -> None:
        self.options = options
        self.set_revision(revision)

    def set_revision(self, revision: str) -> None:
        """Describe the scorer by its options; `revision` names everything else that its scores depend on."""
        o = self.options
        options = f" options {digest}" if (digest := o.options_digest()) else ""
        options = (f" {_TEXTS}" if o.reads_text() else "") + options
        revision = revision.removesuffix(options) + options  # a scorer may extend its own revision
        self.spec = ScorerSpec(o.spec_name, o.value_range, o.required_images(), revision, o.licence)

    @property
    def compares_group(self) -> bool:
        """Whether a value depends on the other samples of its group; each call must then have whole groups."""
        return self.options.compares_group()

    def load(self, device: str) -> None:
        """Nothing to load."""

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """One outcome per item, in order; one by one: a score does not depend on its batch."""
        return [self._one(item) for item in items]

    def _one(self, item: RewardItem) -> Outcome:
        """The outcome of an item."""
        raise NotImplementedError(f"{type(self).__name__} has no method score; define score(items)")


class PixelScorer(PackageScorer[Options]):
    """Base of the scorers with a gradient that score one image at a time."""

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        """The scores of images [B, 3, H, W] in [0, 1], scalars with gradient; `item.image` is not read."""
        return [self._value(image, item) for image, item in zip(images, items, strict=True)]

    def _value(self, image: Tensor, item: RewardItem) -> Tensor | Failure:
        """The score of an image [3, H, W]."""
        raise NotImplementedError


Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """The items in order, `size` at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))
