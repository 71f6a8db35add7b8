"""Whether everything that a run reads is on this machine, or on a hub that can be reached. Checked before torch is
imported: a mistyped path is an error within a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from retouch.config import ConfigError, RunConfig
from retouch.config.needs import data_sections
from retouch.data.base import listed_in
from retouch.data.remote import pinned
from retouch.errors import InputError
from retouch.families.base import TrainIpAdapter, TrainLora
from retouch.files.hub import is_hub_id, require_hub
from retouch.files.model_files import component_path, transformer_path


def require_files(run: RunConfig) -> None:
    """Refuse a run whose data, model, encoders or scorers are neither on this machine nor on a hub that can be reached.

    Raises:
        DataError, ModelFilesError, ConfigError: naming the key.
    """
    for check in _local_checks(run, downloads=True):
        check()
    require_model(run)
    for name, entry in run.rewards.items():
        if entry.is_made_here:  # a running server has its own models
            for option, model in entry.models().items():
                require_hub(f"rewards.{name}.{option}", model)
    for name, section in data_sections(run).items():
        if section.hub_id is not None:
            require_hub(f"{name}.path", section.hub_id, "datasets")


def require_model(run: RunConfig) -> None:
    """Refuse a model, or an encoder of references, that is neither on this machine nor on a hub that can be reached.

    Raises:
        ModelFilesError, ConfigError: naming the key.
    """
    require_hub("model.path", component_path(run.model.path, run.model.family))
    if run.model.transformer is not None:
        require_hub("model.transformer.path", transformer_path(run.model.transformer)[0])
    encoder = run.model.reference_encoder if run.model.embeddings is None else None  # stored vectors replace it
    require_hub("model.train.image_encoder", encoder or "")
    for check in _model_checks(run):
        check()
    if run.model.merged_lora is not None:
        require_hub("model.distillation_lora.path", run.model.merged_lora.path)


def missing_files(run: RunConfig) -> list[str]:
    """A line for each local path of a run file that is not on this machine; no hub is asked, nothing is downloaded,
    and no file is read. A path with a variable of the environment that is not set is left out."""
    lines = list[str]()
    for check in _local_checks(run, downloads=False):
        try:
            check()
        except InputError as error:
            lines.append(str(error))
    return [line for line in lines if "${" not in line]


def _local_checks(run: RunConfig, *, downloads: bool) -> Iterator[Callable[[], object]]:
    """A check of each local path of a run file, which raises if it does not exist; with `downloads` of each list at a
    commit, too."""
    for name, section in data_sections(run).items():
        is_local = section.hub_id is None and (downloads or pinned(section.path) is None)
        if is_local and not section.has_list():
            yield partial(listed_in, section, name)  # reports a missing list in the words of its format
    yield partial(component_path, run.model.path, run.model.family)
    yield from _model_checks(run)


def _model_checks(run: RunConfig) -> Iterator[Callable[[], object]]:
    if run.model.transformer is not None:
        yield partial(transformer_path, run.model.transformer)
    if isinstance(run.model.train, TrainLora | TrainIpAdapter):
        adapter = run.model.train.initial_adapter
        yield partial(_require_path, "model.train.initial_adapter", adapter, "an adapter file or a checkpoint")
    if (lora := run.model.merged_lora) is not None and not is_hub_id(lora.path):
        yield partial(_require_path, "model.distillation_lora.path", lora.path, "a LoRA file, its folder or a hub id")


def _require_path(key: str, path: str | None, expected: str) -> None:
    if path is not None and not Path(path).expanduser().exists():
        raise ConfigError(f"{key}: given {path!r}; no such file or folder; set {key} to {expected}")
