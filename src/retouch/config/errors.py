"""Messages for errors of a run file: the value given, the values expected, the option to set."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import BaseModel, ValidationError

from retouch.errors import ConfigError as ConfigError
from retouch.registry import Chosen


def nearest(word: str, known: Iterable[str], former: Mapping[str, str] | None = None) -> str:
    """The end of a message about an unknown name: the closest known one, or all of them.

    Args:
        former: former name -> name.
    """
    options, former = sorted(known), former or {}
    close = difflib.get_close_matches(word, [*options, *former], n=1, cutoff=0.6)
    return f"did you mean {former.get(close[0], close[0])!r}?" if close else f"known: {', '.join(options)}"


def explain(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line for each problem, with the dotted key first."""
    return [_line(problem["type"], problem, root) for problem in error.errors() if problem["type"] not in _FOLLOWS]


_FOLLOWS = {"default_factory_not_called"}
"""pydantic's error types that follow from another error: the default of a key that is computed from an invalid one."""


_NAMES_OF_COMPONENTS = {"family", "format", "name", "scorer"}
"""Keys whose values plug-ins can add to."""

CUSTOM = (
    "; for a custom component, add the module that registers it to plugins (without a run file: to RETOUCH_PLUGINS), "
    "or install its package"
)

_NOT_A_SECTION = {"model_attributes_type", "model_type", "dict_type"}
"""pydantic's error types for a value in place of a section."""


def _line(kind: str, problem: Any, root: type[BaseModel]) -> str:
    loc: Sequence[int | str] = problem["loc"]
    path, section = walk(root, loc)
    key = ".".join(path)
    # One branch for each kind of error whose text pydantic writes with Python's types and its own classes, which a
    # reader of YAML does not know. The message of the section's own validator only gets the key, unless it begins with
    # one.
    if kind == "extra_forbidden":
        _, model = walk(root, loc[:-1])
        former = {old: new for c in model.__mro__ for old, new in getattr(c, "ALIASES", {}).items()} if model else {}
        return f"{key}: unknown key; {nearest(str(loc[-1]), model.model_fields if model else (), former)}"
    if kind in _NOT_A_SECTION:
        return f"{key}: given {problem['input']!r}; expected a section; write its keys as {{key: value}}"
    if kind == "list_type" and isinstance(text := problem["input"], str):
        return f"{key}: given {text!r}; expected a list; set {key}=[{text}]"
    if kind == "union_tag_not_found":
        return f"{key}: the kind is missing; set {key}.{problem['ctx']['discriminator'].strip(chr(39))}"
    if kind == "union_tag_invalid":
        context = problem["ctx"]
        tags = [tag.strip(" '") for tag in str(context["expected_tags"]).split(",")]
        tag, name = str(context["tag"]), str(context["discriminator"]).strip("'")
        hint = nearest(tag, tags)
        may_be_custom = name in _NAMES_OF_COMPONENTS and hint.startswith("known")
        return f"{key}.{name}: given {tag!r}; {hint}{CUSTOM if may_be_custom else ''}"
    if kind == "missing":
        return f"{key}: required and not set"
    message: str = problem["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        names_its_key = section is not None and re.split(r"\W", message, maxsplit=1)[0] in section.model_fields
        return f"{key}{'.' if names_its_key else ': '}{message}" if key else message
    return f"{key}: given {problem.get('input')!r}; {message[0].lower()}{message[1:]}"


def walk(root: type[BaseModel], loc: Sequence[int | str]) -> tuple[list[str], type[BaseModel] | None]:
    """Resolve pydantic's location of an error -> the keys in the file, and the class there.

    pydantic adds the tag of a discriminated union ("model", "train", "lora", "rank"), which is no key of the file.
    """
    keys: list[str] = []
    annotation: Any = root
    for part in loc:
        models = models_of(annotation)
        tagged = [m for m in models if len(models) > 1 and part in _tags(m)]
        if tagged:
            annotation = tagged[0]
            continue
        keys.append(str(part))
        if typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
        elif len(models) == 1 and part in models[0].model_fields:
            annotation = field_annotation(models[0], str(part))
        else:
            annotation = None
    found = models_of(annotation)
    return keys, found[0] if len(found) == 1 else None


def field_annotation(model: type[BaseModel], name: str) -> Any:
    """The annotation of a field in the class: pydantic separates the type from the metadata of `Annotated`."""
    info = model.model_fields[name]
    chosen = [extra for extra in info.metadata if isinstance(extra, Chosen)]
    return Annotated[info.annotation, chosen[0]] if chosen else info.annotation


def models_of(
    annotation: Any, section: Mapping[str, Any] | None = None, tag: str | None = None
) -> list[type[BaseModel]]:
    """The config classes in an annotation, also in unions, `Annotated` and registries.

    Args:
        section: what is validated; of a registry it leaves the class that it names, if it names one.
        tag: what a section names that gives no tag.
    """
    chosen = [extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Chosen)]
    if chosen:
        named = None if section is None else chosen[0].of(section, tag)
        return chosen[0].classes if named is None else [named]
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    if typing.get_origin(annotation) is dict:
        return []
    return [m for argument in typing.get_args(annotation) for m in models_of(argument, section, tag)]


def _tags(model: type[BaseModel]) -> set[str]:
    """Values of the literal fields, which can be the tag of the class."""
    tags: set[str] = set()
    for info in model.model_fields.values():
        if typing.get_origin(info.annotation) is typing.Literal:
            values = cast("tuple[str, ...]", typing.get_args(info.annotation))
            if len(values) == 1:
                tags.update(values)
    return tags
