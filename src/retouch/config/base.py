"""Base class and field types of the sections of a run file."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, model_validator

from retouch.config.reads import Reading, require_read_beside
from retouch.errors import log_once

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

logger = logging.getLogger(__name__)

Unit = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
MOST_IMAGES = 1000
"""Images of one example or item."""
ImageCount = Annotated[int, Field(ge=1, le=MOST_IMAGES)]
MOST_STEPS = 1000
SolverSteps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Text = Annotated[str, Field(min_length=1)]


def containing(mark: str, what: str) -> AfterValidator:
    """Annotation of a text that must contain a placeholder, for `what`."""

    def checked(text: str) -> str:
        if mark not in text:
            raise ValueError(f"given {text!r}; it must contain {mark}, the place of {what}")
        return text

    return AfterValidator(checked)


Name = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


@dataclass(frozen=True)
class Names:
    """Annotation of an option whose value names code or a host, which a run directory may not choose without the
    user's consent (`retouch.config.trust`).

        address: Annotated[str, Names("host")] = "https://api.example.com/v1"

    Attributes:
        what: "code" is a module, or "module:name"; "host" is an address; "servers" is an address or an endpoints file.
        own: values that name nothing outside the package.
        variables: environment variables by which the user names such a value, alone or in a list with commas.
    """

    what: Literal["code", "host", "servers"]
    own: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


_RENAMED = "%s: this is now written %s; both are read"


class Section(BaseModel):
    """Keys of a run file. A former key or value of `ALIASES` and `VALUE_ALIASES` is read as the current one."""

    model_config = ConfigDict(defer_build=True, extra="forbid", frozen=True, allow_inf_nan=False)

    ALIASES: ClassVar[Mapping[str, str]] = {}
    """Former key -> key. Subclasses have those of their bases, too."""
    VALUE_ALIASES: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Key -> its former values -> the values of today."""
    RETIRED: ClassVar[Mapping[str, object]] = {}
    """Key of earlier versions -> the value that is what every run does today, with which stored run files are read."""
    KEPT: ClassVar[Set[str]] = frozenset()
    """Options that keep their values when an override names another kind of the section that has them as well, because
    they mean the same in both; subclasses have those of their bases, too."""
    FREE_IN_EPOCH: ClassVar[Set[str]] = frozenset()
    """Options that may change when a run resumes inside an epoch; subclasses have those of their bases, too. See
    `is_free_in_epoch`."""
    READ_BY: ClassVar[Reading | None] = None
    """Purpose (`retouch.config.reads`) of the options of this section that declare nothing; None: every algorithm reads
    them."""
    READ_BY_ALL: ClassVar[Set[str]] = frozenset()
    """Options of such a section that every algorithm reads."""

    def check(self, run: RunConfig, key: str = "") -> None:
        """Reject options of this section that cannot work in this run: "key: given ...; expected ...; set ...". A rule
        stands with the component that reads the option, a rule between two components with the narrower one; what a
        rule needs examples for is in `retouch.data.rules`.

        Args:
            key: dotted key of the section.

        Raises:
            ValueError: with that message.
        """

    def check_trainable(self, run: RunConfig, key: str = "") -> None:
        """Reject options that no run is trained with, but that a run of an earlier version may have: it is still
        opened. Called for a resumed run as well: where `run.resume` is None the run is new, and with "auto" it may be.

        Raises:
            ValueError: as `check`.
        """

    def warnings(self, run: RunConfig) -> Iterable[str]:
        """A sentence for each option that is valid but probably not intended: its key, its effect, the remedy."""
        return ()

    def unused(self) -> frozenset[str]:
        """Options without effect beside the others of this section."""
        return frozenset()

    @classmethod
    def is_free_in_epoch(cls, name: str, then: object, now: object) -> bool:
        """Whether an option may change from `then` to `now` where a run resumes inside an epoch: what the epoch has
        recorded (its rows and their order) keeps its meaning. Changes of an option that does not declare it are
        rejected there.

        Args:
            then, now: values as JSON; those of a section are its options by name.
        """
        return any(name in vars(kind).get("FREE_IN_EPOCH", ()) for kind in cls.__mro__)

    @classmethod
    def retired(cls) -> dict[str, object]:
        """`RETIRED` of this class and of its bases."""
        tables = [cast("Mapping[str, object]", vars(kind).get("RETIRED", {})) for kind in reversed(cls.__mro__)]
        return {key: today for table in tables for key, today in table.items()}

    @classmethod
    def retired_in(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Retired options of a section with another value than every run has today."""
        return {key: given[key] for key, today in cls.retired().items() if given.get(key, today) != today}

    @classmethod
    def renamed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keys and values of a section under their current names; a former one is logged once.

        Raises:
            ValueError: a key is given under both names.
        """
        section = dict(given)
        for kind in reversed(cls.__mro__):
            for former, key in cast("Mapping[str, str]", vars(kind).get("ALIASES", {})).items():
                if former not in section:
                    continue
                if key in section:
                    raise ValueError(f"{key}: also given as {former}, its former name; leave {former} out")
                log_once(logger, _RENAMED, former, key)
                section = {key if name == former else name: value for name, value in section.items()}
            for key, values in cast("Mapping[str, Mapping[str, str]]", vars(kind).get("VALUE_ALIASES", {})).items():
                value = section.get(key)
                if isinstance(value, str) and value in values:
                    log_once(logger, _RENAMED, f"{key}: {value}", f"{key}: {values[value]}")
                    section[key] = values[value]
        return section

    @model_validator(mode="wrap")
    @classmethod
    def _is_sound(cls, value: object, read: ModelWrapValidatorHandler[Self]) -> Self:
        """Reject what pydantic converts to a number, `1_000` and a truth value (`keep_checkpoints: true` would keep
        one), and what nothing reads beside the other options."""
        section = read(value)
        for key, given in cast("Mapping[str, object]", value).items() if isinstance(value, Mapping) else ():
            found = getattr(section, key, None)
            if isinstance(found, bool) or not isinstance(found, int | float):
                continue
            if isinstance(given, str) and "_" in given:
                raise ValueError(f"{key}: given {given!r}, which is text in YAML 1.2; write the number without _")
            if isinstance(given, bool):
                raise ValueError(f"{key}: given {str(given).lower()}; expected a number; write one, or leave {key} out")
        require_read_beside(section)
        return section

    @model_validator(mode="before")
    @classmethod
    def _former_names(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        section, retired = cls.renamed(cast("Mapping[str, Any]", value)), cls.retired()
        for key, given in cls.retired_in(section).items():  # a stored run file is still read
            told = f"{given!r}, which earlier versions had; every run has {retired[key]!r}"
            log_once(logger, "%s: given %s", key, told)
        return {key: given for key, given in section.items() if key not in retired}


def sections(value: object, key: str = "") -> Iterator[tuple[str, Section]]:
    """A section and all in it, by their dotted keys; the outer ones first."""
    if isinstance(value, Section):
        yield key, value
        for name in type(value).model_fields:
            part = getattr(value, name)
            if isinstance(part, Section | dict):
                yield from sections(cast("object", part), f"{key}.{name}".lstrip("."))
    elif isinstance(value, Mapping):
        for name, entry in cast("Mapping[object, object]", value).items():
            yield from sections(entry, f"{key}.{name}")
