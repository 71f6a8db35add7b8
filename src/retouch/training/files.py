"""Whether everything that a run reads is on this machine, or on a hub that can be reached. Checked before torch is
imported: a mistyped path is an error within a second."""

from __future__ import annotations

from pathlib import Path

from retouch.config import ConfigError, RunConfig
from retouch.config.needs import data_sections
from retouch.families.facts import ADAPTERS
from retouch.families.sections import (
    Model,
    QwenImageEditModel,
    QwenImageModel,
    TrainIpAdapter,
)
from retouch.hub import is_hub_id, require_hub
from retouch.model_files import component_path
from retouch.rewards.sections import (
    ClipReward,
    HpsV2Reward,
    MaskCompositeReward,
    RewardEntry,
)


def require_files(run: RunConfig) -> None:
    """Refuse a run whose data, model, encoders or scorers are neither on this machine nor on a hub that can be reached.

    Raises:
        DataError, ModelFilesError, ConfigError: naming the key.
    """
    for section in data_sections(run).values():
        if not Path(section.path).expanduser().exists() and section.hub_id is None:
            section.items()  # reports a missing list in the words of its format
    require_model(run)
    for name, entry in run.rewards.items():
        for field in _PATHS if entry.url in (None, "auto") else ():  # servers that others start have their own models
            require_hub(f"rewards.{name}.{field}", _model_of(entry, field))
    for name, section in data_sections(run).items():
        if section.hub_id is not None:
            require_hub(f"{name}.path", section.hub_id, "datasets")


def require_model(run: RunConfig) -> None:
    """Refuse a model, or an encoder of references, that is neither on this machine nor on a hub that can be reached.

    Raises:
        ModelFilesError, ConfigError: naming the key.
    """
    require_hub("model.path", component_path(run.model.path, run.model.family))
    require_hub("model.train.image_encoder", _image_encoder(run.model) or "")
    if isinstance(run.model.train, TrainIpAdapter):
        _require_path("model.train.initial_adapter", run.model.train.initial_adapter, "an adapter file or a checkpoint")
    lora = run.model.distillation_lora if isinstance(run.model, QwenImageModel | QwenImageEditModel) else None
    if lora is not None and is_hub_id(lora.path):
        require_hub("model.distillation_lora.path", lora.path)
    elif lora is not None:
        _require_path("model.distillation_lora.path", lora.path, "a LoRA file, its folder or a hub id")


def _model_of(entry: RewardEntry, field: str) -> str:
    """What a field of a reward names; an empty path of mask_composite is that of its judge."""
    found: str = getattr(entry, field, "") or ""
    if isinstance(entry, MaskCompositeReward) and field == "path" and not found:
        judge = {"clip": ClipReward, "hpsv2": HpsV2Reward}[entry.judge]
        return str(judge.model_fields["path"].default)
    return found


def _require_path(key: str, path: str | None, expected: str) -> None:
    if path is not None and not Path(path).expanduser().exists():
        raise ConfigError(f"{key}: given {path!r}; no such file or folder; set {key} to {expected}")


_PATHS = ("path", "processor", "image_encoder")
"""Fields of a scorer that may name a model of the hub."""


def _image_encoder(model: Model) -> str | None:
    """The encoder of references that a run loads; stored vectors replace it."""
    if not isinstance(model.train, TrainIpAdapter) or model.embeddings is not None:
        return None
    return model.train.image_encoder or ADAPTERS[model.family].image_encoder
