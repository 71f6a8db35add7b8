"""Components by name: those of the package, of installed packages (entry points), and of modules that a run file names.

A component is one class or object in one file. The package lists its own as `name -> "module:attribute"`: a module
is imported only when its component is used. Other packages add theirs through an entry point of the registry's
group, or by calling `register` when a module named under `plugins` of a run file is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, cast, get_args

from pydantic import BaseModel, Field, GetCoreSchemaHandler, TypeAdapter, create_model
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from retouch.errors import ConfigError, code_place, is_own, shown

logger = logging.getLogger(__name__)

PLUGINS = "RETOUCH_PLUGINS"
"""Environment variable: modules of plug-ins, separated by commas, for processes that read no run file."""

ANNEXES = {"retouch_bench": "retouch.benchmarks", "retouch_glyphs": "retouch.tiny"}
"""Packages of this distribution that register their components through entry points, as those of others do -> a group
in which each has some. An editable installation of an earlier version finds their modules and not the entry points."""

_plugins: set[str] = set()

Component = TypeVar("Component")


@cache
def _entry_points() -> Mapping[str, list[tuple[str, str]]]:
    """Group -> (name, place) of every installed package. One reading serves all registries: it opens a file of each
    package, and `select` would go through all of them for each registry."""
    found: dict[str, list[tuple[str, str]]] = {}
    read: Any = entry_points()
    by_group = isinstance(read, dict)  # in Python 3.11, whose own `values` warns
    every = chain.from_iterable(dict.values(cast("dict[str, Any]", read))) if by_group else read
    for point in every:
        found.setdefault(point.group, []).append((point.name, point.value))
    for annex, group in ANNEXES.items():
        listed = any(place.startswith(f"{annex}.") for _, place in found.get(group, []))
        if not listed and importlib.util.find_spec(annex):
            logger.warning(
                "%s is there, but this installation does not list what it has, rewards among it, which are therefore "
                "unknown; install retouch again (in a checkout: pip install -e .)",
                annex,
            )
    return found


class Registry(Mapping[str, Component], Generic[Component]):
    """Components of one kind by name, imported on first use.

    Args:
        kind: what a message calls one, for example "reward".
        group: entry-point group of other packages, for example "retouch.rewards".
        builtin: name -> "module:attribute" of the package's own components.
        key: field of the components that has their name as its literal; "" if they have none.
        of: class of the components, if they are objects without `key`; None: any.
    """

    def __init__(
        self, kind: str, group: str, builtin: Mapping[str, str], key: str = "", of: type[Component] | None = None
    ) -> None:
        self.kind = kind
        self.key = key
        self.of = of
        points = _entry_points().get(group, [])
        annex = {name: place for name, place in points if place.partition(".")[0] in ANNEXES}
        own = {**annex, **builtin}
        self._places = {**own, **dict(points), **own}  # the distribution's own come first and keep their names
        self._builtin = frozenset(own)
        self._loaded: dict[str, Component] = {}

    def register(self, name: str, component: Component) -> Component:
        """Add a component of a plug-in, or the same one again.

        Raises:
            ValueError: another component has the name, or the component has another one in its own field.
        """
        known = self._loaded.get(name)
        same = known is not None and _qualified(known) == _qualified(component)
        place = self._places.get(name, "")
        if name in self and not same and (name in self._builtin or place != ":".join(_qualified(component))):
            raise ValueError(f"{self.kind} {name!r}: the name is taken; register it under another name")
        self._require_component(name, component)
        self._loaded[name] = component
        return component

    def _require_component(self, name: str, component: object) -> None:
        """Reject a component that a run file could not choose, or whose class is incomplete.

        Raises:
            ConfigError: what is wrong with it, and the remedy.
        """
        where = f"{self.kind} {name!r}"
        if not self.key:
            if self.of is not None and not isinstance(component, self.of):
                raise ConfigError(f"{where}: given {shown(component)}; expected a {self.of.__name__}; register one")
            return
        if not isinstance(component, type):
            raise ConfigError(f"{where}: given {shown(component)}; expected a class; register the class")
        own = component.__name__
        field = getattr(component, "model_fields", {}).get(self.key)
        names = get_args(field.annotation) if field is not None else ()
        if not names:
            raise ConfigError(
                f"{where}: {own} has no field {self.key} of type Literal; expected a class of an options section; "
                f"set {self.key}: Literal[{name!r}] = {name!r} in it"
            )
        if name not in names:
            raise ConfigError(
                f"{where}: given {self.key}={names[0]!r} in {own}; expected the registered name; "
                f"set {self.key}: Literal[{name!r}] = {name!r}, or register it as {names[0]!r}"
            )
        missing = sorted(getattr(component, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{where}: {own} has no {', '.join(missing)}; define each as a method of {own}")

    def is_builtin(self, name: str) -> bool:
        """Whether a component is one of the package."""
        return name in self._builtin

    def available(self) -> dict[str, Component]:
        """Every component that can be used. One of another package that cannot is left out with a warning."""
        return {name: component for name in self if (component := self.find(name)) is not None}

    def find(self, name: object) -> Component | None:
        """The component of a name; None without one, and with a warning if another package has it and it cannot be
        imported or is incomplete."""
        if not isinstance(name, str) or name not in self:
            return None
        try:
            return self[name]
        except (Exception, SystemExit) as error:
            if name in self._builtin:
                raise
            logger.warning("%s %r (%s) cannot be used: %s", self.kind, name, self._places[name], error)
            return None

    def __getitem__(self, name: str) -> Component:
        if name not in self._loaded:
            component = load_attribute(self._places[name])
            if name not in self._builtin:
                self._require_component(name, component)
            self._loaded[name] = cast("Component", component)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self._places, *self._loaded])

    def __len__(self) -> int:
        return len({*self._places, *self._loaded})


@dataclass(eq=False)
class Chosen:
    """Annotation of a run file's section whose class is chosen from a registry by one of its keys.

    `Annotated[BaseSection, Chosen(REGISTRY, "family")]` validates as the discriminated union of the registered classes,
    with the same errors, and imports only the class that is chosen.
    """

    registry: Registry[Any]
    key: str

    @property
    def classes(self) -> list[type[Any]]:
        """The registered classes, in order."""
        return list(self.registry.available().values())

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        del source, handler
        return core_schema.no_info_plain_validator_function(self._validated)

    def of(self, section: Mapping[str, Any], tag: str | None = None) -> type[Any] | None:
        """The class that a section names, or `tag` if it names none; None without one, or for an unknown one."""
        return self.registry.find(section.get(self.key, tag))

    def _validated(self, value: object) -> Any:
        """The section of its class; its errors are located below the tag, as those of a union."""
        if isinstance(value, BaseModel):
            own = self.of({self.key: getattr(value, self.key, None)})
            if own is not None and isinstance(value, own):
                return value
        if not isinstance(value, Mapping):
            raise PydanticKnownError("model_attributes_type")
        section = cast("Mapping[str, Any]", value)
        if self.key not in section:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": f"'{self.key}'"})
        chosen = self.of(section)
        if chosen is None:
            tags = ", ".join(f"'{name}'" for name in self.registry.available())
            names = {"discriminator": f"'{self.key}'", "tag": str(section[self.key]), "expected_tags": tags}
            raise PydanticKnownError("union_tag_invalid", names)
        return _below_its_tag(chosen, self.key).validate_python(dict(section))


@cache
def _below_its_tag(chosen: type[BaseModel], key: str) -> TypeAdapter[Any]:
    """The class as the one member of a tagged union; pydantic would reduce a union of one to its member and leave
    the tag out of the locations of errors: a second member without keys stands beside it."""
    other: Any = create_model("Other", **{key: (Literal["\0"], ...)})  # type: ignore[call-overload]
    union: Any = Annotated[Union[cast("Any", chosen), other], Field(discriminator=key)]  # noqa: UP007
    return TypeAdapter(union)


def import_from_here(module: str) -> Any:
    """Import a module of the user. The working directory, which an installed command does not search, is searched for a
    package that is not installed: it may be somebody else's, and libraries would find what they look for in it."""
    package, here = module.partition(".")[0], str(Path.cwd())
    if package and not _is_installed(package) and here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except SystemExit as end:  # this program would end with the code of that one, 0 for success
        raise ImportError(f"{module} ends the program when it is imported, with code {end.code}") from end


def _is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def import_plugins_of_environment() -> None:
    """Import the modules in RETOUCH_PLUGINS, in a command that reads no run file.

    Raises:
        ConfigError: one of them cannot be imported.
    """
    try:
        import_plugins()
    except ImportError as error:
        raise ConfigError(f"{PLUGINS}: {error}") from error


def import_plugins(modules: Iterable[str] = ()) -> None:
    """Import modules that register components, with those in RETOUCH_PLUGINS, and name them there for child processes.

    Raises:
        ImportError: a module that is not there, or fails; the message ends with the remedy.
    """
    named = [name for name in dict.fromkeys([*os.environ.get(PLUGINS, "").split(","), *modules]) if name]
    new = [name for name in named if name not in _plugins]
    for name in new:
        _imported(name, name, "install its package, or run the command in the folder of its file")
        _plugins.add(name)
    if new:
        os.environ[PLUGINS] = ",".join(named)


def _imported(module: str, given: str, if_absent: str) -> Any:
    """The module of a plug-in.

    Args:
        given: where the module is named, for the message.
        if_absent: remedy if there is no such module.

    Raises:
        ImportError: it is not there, or fails; the message ends with the remedy.
    """
    try:
        return import_from_here(module)
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        remedy, place = (if_absent, "") if absent else ("correct the module", code_place(error))
        raise ImportError(
            f"given {given!r}, which cannot be imported ({type(error).__name__}: {error}{place}); {remedy}"
        ) from error


def load_attribute(place: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_named(key: str, place: str, attribute: str) -> Any:
    """The object that the attribute `key` of a component names as "module:attribute".

    Args:
        attribute: what the attribute of the module is, "function" or "class".

    Raises:
        ConfigError: no such module or attribute, one that cannot be called, or a module that cannot be imported.
        ModuleNotFoundError: a module of retouch needs a package that is not installed.
    """
    given: Any = place
    name, _, wanted = place.partition(":") if isinstance(given, str) else ("", "", "")
    expected = f"set it to 'module:{attribute}'"
    if not name or not wanted or name.startswith("."):
        raise ConfigError(f"{key}: given {shown(given)}; {expected}")
    try:
        found = getattr(_imported(name, place, expected), wanted, None)
    except ImportError as error:
        cause = error.__cause__
        absent = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if cause is not None and absent and is_own(name) and not is_own(absent):
            raise cause from None  # a package of an extra, which the command line names
        raise ConfigError(f"{key}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key}: given {place!r}, but {name} has no {attribute} {wanted}; {expected}")
    return found


def _qualified(component: object) -> tuple[str, str]:
    kind = component if isinstance(component, type) else type(component)
    return kind.__module__, kind.__qualname__
