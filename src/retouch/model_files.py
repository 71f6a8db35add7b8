"""Where the model of a run lies: a folder, a tiny base of the package, or the hub. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retouch import plain_json
from retouch.errors import ModelFilesError
from retouch.hub import looks_local

if TYPE_CHECKING:
    from retouch.families.base import OtherTransformer


INDEX = "model_index.json"
"""The file of a pipeline folder that names its class and its parts."""


def component_path(path: str, family: str) -> str:
    """A hub id or folder as given; "tiny" is the trained base that comes with the package.

    Raises:
        ModelFilesError: a local-looking path that does not exist.
    """
    if path == "tiny":
        if not tiny_path(family).is_dir():
            raise ModelFilesError(f"model.path: given 'tiny', but no tiny base of {family} comes with the package")
        return str(tiny_path(family))
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / INDEX).is_file():
            raise ModelFilesError(f"model.path: {folder} has no {INDEX}; give the top folder of a diffusers model")
        return str(folder)
    if looks_local(path):
        raise ModelFilesError(f"model.path: {path}: no such folder; give a folder in the diffusers layout or a hub id")
    return path


def transformer_path(other: OtherTransformer) -> tuple[str, str | None]:
    """(hub id or folder, subfolder) of `model.transformer`.

    Raises:
        ModelFilesError: a local-looking path that does not exist, or a folder without the config of a network.
    """
    folder = Path(other.path).expanduser()
    if folder.is_dir():
        if not (folder / (other.subfolder or "") / "config.json").is_file():
            raise ModelFilesError(
                f"model.transformer: {folder / (other.subfolder or '')} has no config.json; give the folder of a "
                "network in the diffusers layout as model.transformer.path, or set model.transformer.subfolder"
            )
        return str(folder), other.subfolder
    if looks_local(other.path):
        raise ModelFilesError(f"model.transformer.path: {other.path}: no such folder; give a folder or a hub id")
    return other.path, other.subfolder


def require_pipeline(path: str, expected: str) -> None:
    """Refuse a local folder of another family before anything of it is loaded.

    Raises:
        ModelFilesError: its model_index.json names another pipeline class than `expected`.
    """
    index = Path(path) / INDEX
    if not index.is_file():  # a hub id: its components are checked as they load
        return
    found = _index(index).get("_class_name", expected)
    if found != expected:
        raise ModelFilesError(
            f"model.path: {path} is a {found}; model.family needs a {expected}; set another path, or the family of it"
        )


def has_component(folder: Path, name: str) -> bool:
    """Whether the model_index.json of a model folder names a class for this component; null means that there is none.

    Raises:
        ModelFilesError: a damaged model_index.json.
    """
    return name in components(folder)


def components(folder: Path) -> list[str]:
    """Names of the parts of a model folder that its model_index.json names a class for.

    Raises:
        ModelFilesError: a damaged model_index.json.
    """
    entries = _index(folder / INDEX).items()
    return [name for name, entry in entries if isinstance(entry, list) and entry and isinstance(entry[0], str)]


UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "invert_sigmas",
    "stochastic_sampling",
)
"""Options of a flow scheduler with which its pipeline samples at other noise levels, or with noise of its own."""


def schedule_problem(config: Mapping[str, Any]) -> str | None:
    """Why a flow model with this config of a scheduler cannot be sampled as its pipeline does; None where it can."""
    if name := next((name for name in UNSUPPORTED if config.get(name)), None):
        return f"scheduler/scheduler_config.json has {name}, which is not supported; set {name} to false there"
    return None


def _index(file: Path) -> dict[str, Any]:
    try:
        found = plain_json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no object")
        return cast("dict[str, Any]", found)
    except ValueError as error:
        raise ModelFilesError(f"model.path: {file} is damaged ({error}); copy the model anew") from None


def tiny_path(family: str) -> Path:
    """Folder of the tiny base of a family inside the installed package."""
    return Path(str(resources.files("retouch") / "tiny" / "bases" / family))
