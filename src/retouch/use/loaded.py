"""A model in memory that any of a run's weights can be loaded into."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from retouch.adapters.initial_lora import require_initial_lora
from retouch.adapters.lora import is_update
from retouch.adapters.train_ip_adapter import initial_adapter
from retouch.adapters.trainee import Trainee, make_trainable
from retouch.config import RunConfig
from retouch.data.base import DataSection, ItemFiles
from retouch.data.item import read_item
from retouch.engine import Engine, Policy
from retouch.errors import CheckpointError, ConfigError, first_line
from retouch.families.base import Model
from retouch.families.embeddings import EmbeddingCache, open_cache, prompts_missing
from retouch.families.loading import load_model
from retouch.process.plain_text import count_of
from retouch.types import DiffusionModel

logger = logging.getLogger(__name__)


class Loaded:
    """A model in memory: first with the weights of the base, then with any that `load` reads."""

    def __init__(self, config: RunConfig, *, keep_base: bool = False, embedded: bool = False) -> None:
        """Load the base.

        Args:
            keep_base: keep a copy of its weights on the CPU, to return to it after others.
            embedded: every example has its own text embeddings; T5 is not loaded.
        """
        self.config = config
        self.embedded = embedded
        self.engine = Engine(config.training, config.optimizer, config.seed)
        require_initial_lora(config.model.train)
        initial_adapter(config.model.train, config.model.family)
        self.model: DiffusionModel = load_model(config.model, self.engine.device, embedded=embedded)
        self.trainee: Trainee = make_trainable(self.model.network, config.model.train, self.model.spec, config.seed)
        self.network: nn.Module = self.engine.prepare(self.model.network, gradient_checkpointing=False)
        self.policy = Policy(self.model.network)
        state = self.policy.state() if keep_base else {}
        self._base: dict[str, Tensor] = {n: t.detach().to("cpu", copy=True) for n, t in state.items()}
        self._is_base = True

    @property
    def guidance_scale(self) -> float:
        return self.config.guidance_scale

    def load(self, weights: Path | None, strength: float = 1.0) -> None:
        """Use the weights of a folder; None: the base.

        Args:
            strength: share of their change of the base that is applied; other than 1 requires `keep_base`.

        Raises:
            CheckpointError: weights of another model.
            RuntimeError: the base after other weights, without `keep_base`.
        """
        if weights is None:
            if not self._is_base and not self._base:
                raise RuntimeError("the base was replaced by other weights; use Loaded(config, keep_base=True)")
            if not self._is_base:
                self.policy.load(self._base)
            self._is_base = True
            return
        try:
            state = self.trainee.load(weights)
            self.policy.load(state if strength == 1 else self._scaled(state, strength))
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{weights}: {error}") from None
        self._is_base = False

    def _scaled(self, state: Mapping[str, Tensor], strength: float) -> dict[str, Tensor]:
        """Trained weights with another share of their change. A LoRA that began as no change has only its B scaled, for
        its change is B A."""
        updates = {name for name in state if is_update(name)}
        scaled = updates if updates and not any(bool(self._base[n].any()) for n in updates) else set(state)
        return {
            name: torch.lerp(self._base[name].float(), t.cpu().float(), strength).to(t.dtype) if name in scaled else t
            for name, t in state.items()
        }


def for_items(config: RunConfig, items: Iterable[ItemFiles], section: DataSection) -> RunConfig:
    """The run for items that it need not have trained on: without `model.embeddings` if a prompt or a reference of them
    is not stored there, or the embeddings are not here or stale; then the encoders are loaded.

    Args:
        section: how the items are read.

    Raises:
        ImageProblem: an item that cannot be read.
    """
    model = config.model
    try:
        cache = open_cache(model)
        problem = None if cache is None else _missing(cache, model, {item.id: item for item in items}.values(), section)
    except ConfigError as error:
        problem = first_line(error).removeprefix("model.embeddings: ")
    if problem is None:
        return config
    logger.warning("loading the encoders instead of model.embeddings: %s", problem)
    return config.model_copy(update={"model": model.model_copy(update={"embeddings": None})})


def _missing(cache: EmbeddingCache, model: Model, items: Collection[ItemFiles], section: DataSection) -> str | None:
    """The missing entries, in words; None if there are none."""
    if prompts := prompts_missing(cache, model, dict.fromkeys(item.prompt for item in items)):
        return f"no entry for {count_of(len(prompts), 'prompt')}, {prompts[0]!r} among them"
    for item in items if model.reference_encoder else ():
        reference = read_item(item, section)[0].reference  # it may be a part of an image
        if reference is not None and not cache.has_reference(reference):
            return f"no entry for the reference of {item.where}"
    return None


def free_memory() -> None:
    """Free the memory of models that are no longer used: networks and hooks refer to each other, and only the garbage
    collector finds them."""
    gc.collect()
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        torch.get_device_module(device).empty_cache()
