"""Parts of the run file of a run directory, read without what it names: it may be anybody's, and `retouch compare` and
`export` import no module for these, read no variable, and need no consent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from retouch.algorithms import ALGORITHMS
from retouch.config.base import Section
from retouch.config.errors import ConfigError, explain, field_annotation
from retouch.config.load import with_new_names
from retouch.config.presets import section_of
from retouch.config.run import RunConfig, with_family
from retouch.families.base import Model, ModelSection
from retouch.registry import import_plugins_of_environment
from retouch.rewards.base import Reward


class _ModelOf(BaseModel):
    """A run file of which only the model is read."""

    model: Model

    _family_has_a_default = field_validator("model", mode="before")(with_family)


def model_of(run: Mapping[str, Any], source: str) -> ModelSection:
    """The section `model` of a run file. Its family is one of this package, of an installed one, or of RETOUCH_PLUGINS.

    Raises:
        ConfigError: no such section.
    """
    import_plugins_of_environment()
    try:
        return _ModelOf.model_validate(with_new_names({"model": run.get("model")})).model
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in explain(error, _ModelOf))) from None


def trains_text_encoder(run: Mapping[str, Any]) -> bool:
    """Whether a run file trains the text encoder; an algorithm that is not known here does not."""
    return bool(getattr(ALGORITHMS.find(section_of(run, "algorithm").get("name")), "trains_text_encoder", False))


def completed(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run file with the present names of its keys and the defaults of keys that it does not have. A retired option
    stays where its value is not what every run has today, and a section that cannot be read, such as one of a plug-in,
    as it is written."""
    named = with_new_names(run)
    found = dict(named)
    for key, info in RunConfig.model_fields.items():
        if key == "rewards" and isinstance(named.get(key), dict):
            found[key] = {name: _completed(Reward, _entry(name, one)) for name, one in named[key].items()}
        elif key in named:
            value = with_family(named[key]) if key == "model" else named[key]
            found[key] = _completed(field_annotation(RunConfig, key), value)
        elif not info.is_required():
            found[key] = TypeAdapter(Any).dump_python(info.get_default(call_default_factory=True), mode="json")
    return found


def _entry(name: str, given: object) -> object:
    """An entry under `rewards` with its scorer."""
    return {"scorer": name, **cast("dict[str, Any]", given)} if isinstance(given, dict) else given


def _completed(annotation: Any, value: object) -> Any:
    adapter = TypeAdapter[Any](annotation)
    try:
        found = adapter.validate_python(value)
    except ValidationError:
        return value
    retired = type(found).retired_in(cast("dict[str, Any]", value)) if isinstance(found, Section) else {}
    dumped = adapter.dump_python(found, mode="json")
    return {**dumped, **retired} if retired else dumped
