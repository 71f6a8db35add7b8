"""From a YAML file and `key=value` overrides to a `RunConfig`."""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin

import yaml
from pydantic import ValidationError

from retouch.config import yaml12
from retouch.config.base import Section
from retouch.config.errors import ConfigError, explain, field_annotation, models_of, nearest
from retouch.config.kinds import changed_tag, is_reward, is_set, replace_kinds
from retouch.config.presets import section_of
from retouch.config.published import example_of, resolved
from retouch.config.run import RunConfig
from retouch.config.trust import Key, consented, foreign, in_run_directory, named, require_consent
from retouch.config.variables import variables_in, with_variables
from retouch.families import DEFAULT_FAMILY
from retouch.files.disk import is_file
from retouch.registry import import_plugins
from retouch.rewards import REWARDS

logger = logging.getLogger(__name__)

THIS_DIR = "${THIS_DIR}"
"""Stands for the folder of the file that holds it."""

_STEP_SIZES: tuple[Key, ...] = (
    ("optimizer", "global_batch_size"),
    ("optimizer", "gradient_accumulation"),
    ("algorithm", "trl", "gradient_accumulation_steps"),
)
"""Keys that set the rows of an optimizer step; one that a file or an override sets replaces another of the file below.
"""

_MAX_EXTENDS = 20
"""Maximum length of a chain of files that extend each other."""


def load_run(
    path: Path | str,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    unread: Collection[str] = (),
    trust: bool | None = None,
) -> RunConfig:
    """Read, override, fill in `${VAR}` and `${VAR:-default}`, validate. As in a shell, an empty variable takes the
    default, and a default may name another variable: `${A:-${B:-c}}`.

    Args:
        path: a file, or `example:NAME` for one that comes with the package.
        overrides: "dotted.key=value" as the command line takes them, or a mapping for `overlaid`.
        unread: sections that the caller does not read, like "evaluation.data"; variables in them may be unset and then
            stay as they are written.
        trust: whether to use the code and the hosts that the file names. False requires consent
            (`retouch.config.trust`), and so does None for a file in a run directory.

    Raises:
        ConfigError: with one message that names the value given, the values allowed and the option to set.
    """
    file = resolved(path)
    run = read_yaml(file)
    if trust is None:
        trust = not in_run_directory(file)
    trust = trust or consented(file.parent, file.read_bytes())
    if isinstance(overrides, Mapping):
        return parse_run(overlaid(run, overrides), source=str(path), unread=unread, trust=trust)
    return parse_run(run, overrides, source=str(path), unread=unread, trust=trust)


def overlaid(run: Mapping[str, Any], changes: Mapping[str, Any], *, warns: bool = True) -> dict[str, Any]:
    """A run with the keys of `changes` merged over it; dotted keys and nested mappings are equivalent, except that a
    table of `rewards` replaces all rewards, as on the command line.

    Args:
        warns: whether a section that another kind replaces is reported.

    Raises:
        ConfigError: a key set twice or below a value, an option of a reward that does not exist, or what cannot be laid
            over.
    """
    if isinstance(table := changes.get("rewards"), Mapping):
        _without_null(cast("Mapping[str, Any]", table))
        run = {**run, "rewards": {}}
    below, above = with_new_names(run), with_new_names(_nested(changes))
    rewards = {*section_of(below, "rewards"), *section_of(changes, "rewards")}
    rewards |= {key.removeprefix("rewards.") for key in changes if key.count(".") == 1}
    for key, value in changes.items():
        _require_reward(key.split("."), str(value), rewards)
    _check_family(below, above)
    merged, typed = deepcopy(_overlay(below, above, replaces=False)), [path for path, _ in _leaves(above, ())]
    _keep_one_step_size(merged, typed)
    for section in replace_kinds(below, merged, typed):
        logger.log(logging.WARNING if warns else logging.DEBUG, "%s", section)
    return merged


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as mappings within mappings."""
    nested: dict[str, Any] = {}
    for path, value in _leaves(changes, ()):
        node: Any = nested
        for key in path[:-1]:
            node = cast("dict[str, Any]", node).setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or path[-1] in node:
            raise ConfigError(f"override {'.'.join(path)}: given more than once; give it once")
        node[path[-1]] = value
    return nested


def _leaves(changes: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value with its path; an empty mapping is a value."""
    for dotted, value in changes.items():
        path = (*above, *str(dotted).split("."))  # YAML also has keys that are no strings
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[str, Any]", value), path)
        else:
            yield path, _as_yaml(value)


def _as_yaml(value: Any) -> Any:
    """A Python value as YAML would hold it."""
    if isinstance(value, list | tuple):
        return [_as_yaml(one) for one in cast("Sequence[Any]", value)]
    return str(value) if isinstance(value, Path) else value


def read_yaml(path: Path, chain: Sequence[Path] = ()) -> dict[str, Any]:
    """The mapping a YAML file holds, laid over the one it `extends`.

    `extends: other.yaml`, relative to the file, or `extends: example:NAME` adds the keys of the other that this one
    does not set. Sections are merged key by key, unless they name another kind (`train: {kind: full}` over a `lora`):
    then the new one replaces the old. Null removes a reward (`rewards: {ocr: null}`) or an optional section (`ema:
    null`).

    Raises:
        ConfigError: no such file, not YAML, not a mapping, files that extend each other, or what cannot be laid over.
    """
    if path.resolve() in chain:
        raise ConfigError(f"{path}: extends itself by way of {', '.join(p.name for p in chain)}")
    if len(chain) > _MAX_EXTENDS:
        raise ConfigError(f"{path}: more than {_MAX_EXTENDS} run files extend each other; merge some of them")
    if not path.is_file():
        folder = "is a folder; give a run file (.yaml)" if path.is_dir() else "no such run file"
        remedy = (
            f"{example} is published"
            if (example := example_of(path))
            else "`retouch init --example list` lists the published ones"
        )
        raise ConfigError(f"{path}: {folder}; {remedy}")
    try:
        data = with_this_dir(yaml12.parse(path.read_text(encoding="utf-8")), path.parent)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{path}: not valid YAML: {problem}") from None
    if not isinstance(data, dict):
        found = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{path}: expected a mapping of keys to values; the file holds {found}")
    try:
        own = with_new_names(cast("dict[str, Any]", data))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if "extends" not in own:
        return own
    base = own.pop("extends")
    if not isinstance(base, str):
        raise ConfigError(f"{path}: extends: given {base!r}; name one run file, relative to this one")
    other = path.parent / resolved(base, f"{path}: extends: given {base!r}")
    if not is_file(other):
        raise ConfigError(
            f"{path}: extends: given {base!r}, but there is no {other}; the name is relative to this file"
        )
    # Variables are filled in later, in the merged file: one of a section that this file replaces need not be set. The
    # family is checked before the merge, which mixes the keys of both.
    below = read_yaml(other, [*chain, path.resolve()])
    try:
        _check_family(below, own)
        merged = _overlay(below, own)
        _keep_one_step_size(merged, [path for path, _ in _leaves(own, ())])
        return merged
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def with_this_dir(node: Any, folder: Path) -> Any:
    """A part of a YAML file of a folder, with that folder in place of `${THIS_DIR}`."""
    return _replaced(node, THIS_DIR, os.path.abspath(folder).replace("${", "$${"))  # noqa: PTH100  keeps links


def _replaced(node: Any, old: str, new: str) -> Any:
    """A part of a YAML file with a part of its texts replaced."""
    if isinstance(node, dict):
        return {name: _replaced(value, old, new) for name, value in cast("dict[Any, Any]", node).items()}
    if isinstance(node, list):
        return [_replaced(value, old, new) for value in cast("list[Any]", node)]
    return node.replace(old, new) if isinstance(node, str) else node


def with_new_names(
    run: Mapping[str, Any], annotation: Any = RunConfig, key: str = "", tag: str | None = None
) -> dict[str, Any]:
    """A run file with former keys renamed to the current ones; layers of it can then be merged.

    Args:
        annotation: what the mapping is validated as.
        key: where it stands in the run file.
        tag: name of an entry in a table, which is its kind where it gives none.

    Raises:
        ConfigError: a key is given under both names.
    """
    kinds = [kind for kind in models_of(annotation, run, tag) if issubclass(kind, Section)]
    table = get_args(annotation)[1:] if get_origin(annotation) is dict else ()
    if not kinds and not table:
        return dict(run)
    known = {name for kind in kinds for name in kind.model_fields}
    named = dict(run)
    for kind in kinds:
        try:
            renamed = kind.renamed(named)
        except ValueError as error:
            raise ConfigError(f"{key}.{error}".removeprefix(".")) from None
        if not (named.keys() - renamed.keys()) & known:  # a former key may be a key of another kind
            named = renamed
    for name, value in named.items():
        if isinstance(value, Mapping):
            below: list[Any] = [field_annotation(kind, name) for kind in kinds if name in kind.model_fields]
            below += table
            part = f"{key}.{name}".removeprefix(".")
            section = cast("Mapping[str, Any]", value)
            named[name] = with_new_names(section, Union[*below] if below else None, part, name if table else None)
    return named


def _overlay(
    below: Mapping[str, Any], above: Mapping[str, Any], key: tuple[str, ...] = (), *, replaces: bool = True
) -> dict[str, Any]:
    """Keys of both, those of `above` first where both have one.

    Args:
        key: where the two stand in the file.
        replaces: whether a section of another kind replaces that of `below`.
    """
    if replaces and changed_tag(below, above, key):
        return dict(above)
    merged = dict(below)
    for name, value in above.items():
        if value is None and is_reward((*key, name)):
            _take_away(merged, name)
            continue
        old = merged.get(name, {} if (*key, name) == ("rewards",) else None)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = (
            _overlay(cast("dict[str, Any]", old), cast("dict[str, Any]", value), (*key, name), replaces=replaces)
            if both
            else value
        )
    return merged


def _keep_one_step_size(run: dict[str, Any], typed: Collection[Key]) -> None:
    """Remove the size of a step that another one replaces, or the two would be given together.

    Args:
        run: merged from layers; it is changed.
        typed: keys that the upper layer sets.
    """
    set_here = [path for path in _STEP_SIZES if is_set(path, typed) and _value_at(run, path) is not None]
    if len(set_here) != 1:
        return
    for path in _STEP_SIZES:
        section = _value_at(run, path[:-1])
        if path != set_here[0] and isinstance(section, dict):
            cast("dict[str, Any]", section).pop(path[-1], None)


def _value_at(run: Mapping[str, Any], path: Key) -> Any:
    node: Any = run
    for part in path:
        node = cast("dict[str, Any]", node).get(part) if isinstance(node, dict) else None
    return node


def _require_reward(path: Sequence[str], value: str, rewards: Collection[str]) -> None:
    """Reject an option of a reward that the run does not have: the option would add the reward with its defaults, of
    which some load a network of many gigabytes.

    Args:
        path: dotted key of the option.
        rewards: names of the rewards of the run.
    """
    if len(path) < 3 or not is_reward(path[:2]) or path[1] in rewards:
        return
    name, *inner = path[1:]
    entry = " ".join(f"{{{key}:" for key in inner) + f" {value.strip()}" + "}" * len(inner)
    if name not in REWARDS and inner[0] != "scorer":
        entry = "{scorer: NAME, " + entry[1:]
    close = nearest(name, rewards) if rewards else "it has none"
    raise ConfigError(
        f"{'.'.join(path)}: given {value.strip()}, but the run has no reward {name!r}; {close}; to add it, set "
        f"{shlex.quote(f'rewards.{name}={entry}')}"
    )


def _without_null(rewards: Mapping[str, Any]) -> None:
    """Reject null for a reward in a table that replaces all rewards: with `extends` it would remove the reward, and in
    a run file it would mean the reward with its defaults."""
    for name, entry in rewards.items():
        if entry is None:
            raise ConfigError(
                f"rewards.{name}: given null in a table that replaces all rewards; leave {name} out, or write "
                f"{name}: {{}} for its defaults"
            )


def _take_away(rewards: dict[str, Any], name: str) -> None:
    """Remove a reward that was given as null. Without one, null would mean the reward with its defaults."""
    if name not in rewards:
        raise ConfigError(
            f"rewards.{name}: given null, which takes a reward away, but there is none of that name "
            f"({', '.join(rewards) or 'none at all'}); leave it out, or write {name}: {{}} for its defaults"
        )
    del rewards[name]


def _check_family(below: Mapping[str, Any], above: Mapping[str, Any]) -> None:
    """Reject a guidance scale that another family would inherit: outside `model`, it is the only key that is valid for
    both but has another meaning."""
    model, new_rollout = section_of(below, "model"), section_of(above, "rollout")
    old = model.get("family", DEFAULT_FAMILY)
    new, scale = section_of(above, "model").get("family", old), section_of(below, "rollout").get("guidance_scale")
    changed = bool(model) and changed_tag(model, section_of(above, "model"), ("model",)) == "family"
    if changed and scale is not None and "guidance_scale" not in new_rollout:
        raise ConfigError(
            f"model.family: given {new!r} over {old!r}, for which rollout.guidance_scale {scale} was set; set "
            "guidance_scale anew (null takes the model's own)"
        )


def parse_run(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    source: str = "run",
    unread: Collection[str] = (),
    *,
    trust: bool = True,
) -> RunConfig:
    """Validate a mapping as `load_run` does. A section of which an override names another kind loses the keys of the
    old one (`replace_kinds`), with a warning.

    Args:
        source: name of it in messages.
        trust: False requires consent to the code and the hosts that it names.
    """
    merged = with_new_names(deepcopy(dict(data)))
    below = deepcopy(merged)
    overridden = [_apply(merged, override) for override in overrides]
    merged = with_new_names(merged)  # of the values that overrides set
    _keep_one_step_size(merged, overridden)
    if not {"rollout", "rollout.guidance_scale"} & {override.partition("=")[0].strip() for override in overrides}:
        _check_family(below, {"model": merged.get("model")})
    if not trust:
        _require_consent_to_read(merged, overridden, source)
    take_in_plugins(with_variables(merged.get("plugins"), "plugins"), source)
    replaced = replace_kinds(below, merged, overridden)
    try:
        run = RunConfig.model_validate(with_variables(merged, unread=unread))
    except ValidationError as error:
        problems = explain(error, RunConfig)
        problems += [str(one) for one in replaced if not any(line.startswith(f"{one.tag}: ") for line in problems)]
        raise ConfigError("\n".join(f"{source}: {line}" for line in problems)) from None
    for section in replaced:
        logger.warning("%s", section)
    if not trust:
        require_consent(named(run), overridden, source)
    return run


def _require_consent_to_read(run: Mapping[str, Any], overridden: Collection[Key], source: str) -> None:
    """Refuse plug-ins and variables of the environment without consent, before one is imported or read; the message
    has the other code and hosts as well, where the file is valid without them."""
    [mark] = RunConfig.model_fields["plugins"].metadata
    found = dict(variables_in(run))
    if modules := foreign(run.get("plugins"), mark):
        found["plugins",] = modules
    if not found:
        return
    with suppress(ValidationError):
        found |= named(RunConfig.model_validate(run))
    require_consent(found, overridden, source)


def take_in_plugins(modules: object, source: str) -> None:
    """Import the modules under `plugins`, which register components; the schema reports a malformed list."""
    named = cast("list[object]", modules) if isinstance(modules, list) else []
    try:
        import_plugins(name for name in named if isinstance(name, str))
    except ImportError as error:
        raise ConfigError(f"{source}: plugins: {error}") from error


def dump_run(run: RunConfig) -> str:
    """The whole run as YAML, defaults included; `load_run` gives the same run back. `${`, which a value of a variable
    may hold, is written as `$${`."""
    escaped = _replaced(run.model_dump(mode="json"), "${", "$${")
    return yaml.dump(escaped, Dumper=yaml12.Dumper, sort_keys=False, allow_unicode=True)


def _apply(data: dict[str, Any], override: str) -> Key:
    """Set one `dotted.key=value`, where the value is YAML -> the key, under its current name."""
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"override {override!r}: write it as key=value with a dotted key, like rollout.group_size=4")
    if len(path) > yaml12.MAX_DEPTH:
        raise ConfigError(f"override {override[:80]!r} ...: nested deeper than {yaml12.MAX_DEPTH} levels")
    # Null takes a reward out of the table; of any other key it is a value, which the schema may accept. Sections on the
    # way to the key are made where they are missing.
    path = _new_path(path)
    _require_reward(path, text, section_of(data, "rewards"))
    node = data
    for part in path[:-1]:
        child = node.get(part)
        if child is None:
            child = node[part] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {part!r} holds {child!r}, which has no keys")
        node = cast("dict[str, Any]", child)
    try:
        value = _value_of(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {override!r}: the value is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    if value is None and is_reward(path):
        _take_away(node, path[-1])
        return tuple(path)
    if path == ["rewards"] and isinstance(value, dict):
        _without_null(cast("dict[str, Any]", value))
    node[path[-1]] = value
    return tuple(path)


def _value_of(text: str) -> Any:
    """The value of an override: YAML, except that plain text with a `#` holds no comment, which would lose its end."""
    plain = text.strip()
    if _COMMENT.search(plain) and plain[0] not in _NOT_PLAIN:
        return plain
    return yaml12.parse(text)


_COMMENT = re.compile(r"(^|\s)#")
_NOT_PLAIN = "\"'[{|>&*!%@`"
"""First characters of YAML that is not plain text."""


def _new_path(path: list[str]) -> list[str]:
    """A dotted key under its current name."""
    nested: Any = None
    for part in reversed(path):
        nested = {part: nested}
    nested, renamed = with_new_names(nested), list[str]()
    for _ in path:
        renamed += nested
        nested = nested[renamed[-1]]
    return renamed
