"""Options of VLM-GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator

from retouch.algorithms.base import AlgorithmSection
from retouch.algorithms.vlm_grpo import trl_fields
from retouch.algorithms.vlm_grpo.rules import VlmDerived, check_vlm, derive_vlm

if TYPE_CHECKING:
    from retouch.config.run import RunConfig


class VlmGrpoConfig(AlgorithmSection):
    """GRPO of the text encoder (TRL): the vision-language model says how to edit or what to draw, its own completion
    conditions the frozen diffusion transformer, and the picture is scored."""

    trainer: ClassVar[str] = "retouch.algorithms.vlm_grpo.recipe:train"
    trains_text_encoder: ClassVar[bool] = True

    name: Literal["vlm_grpo"] = "vlm_grpo"
    trl: dict[str, Any] = Field(default={})
    """TRL's own options by name: those of its GRPOConfig, and of its ModelConfig what an adapter is made of (use_peft,
    lora_r, lora_alpha, ...). Null takes TRL's default. Dr. GRPO is loss_type: dr_grpo with scale_rewards: none."""
    conditioning: Literal["response_states", "rewrite_text"] = "response_states"
    """"response_states": the states of prompt and completion, as they were generated, in one pass; "rewrite_text": the
    completion's words in the place of the prompt, in the family's own chat."""
    negative_encoder: Literal["base", "policy"] | None = None
    """Who encodes the negative prompt of guidance: the model without its adapter, whose states are kept, or as it is.
    Null is base with an adapter, policy without."""
    images_per_completion: PositiveInt = 1
    """Pictures of each completion, each from a noise of its own; their rewards are averaged."""
    train_vision_tower: bool = False
    """Train what sees, too, not only what speaks."""
    offload_painter: bool = False
    """Keep the diffusion network and its autoencoder in the CPU's memory while the text encoder generates and trains;
    they come to the GPU for each batch of drawings, at the cost of moving them twice."""
    on_overflow: Literal["error", "truncate"] = "error"
    """A condition of more than model.max_sequence_length tokens stops the run, or loses its last ones and is counted
    in the metrics (`truncated`)."""

    @field_validator("trl")
    @classmethod
    def _are_options_of_trl(cls, value: dict[str, Any]) -> dict[str, Any]:
        given = {name: option for name, option in value.items() if option is not None}
        trl_fields.check_names(given)
        return given

    @property
    def uses_adapter(self) -> bool:
        """Low-rank adapters instead of all weights."""
        return bool(self.trl.get("use_peft", False))

    @property
    def encodes_negatives(self) -> Literal["base", "policy"]:
        """`negative_encoder`, its default filled in."""
        return self.negative_encoder or ("base" if self.uses_adapter else "policy")

    def count(self, name: str) -> int:
        """One of TRL's counts, its default filled in."""
        return self.trl.get(name) or trl_fields.DEFAULTS[name]

    @classmethod
    def completed(cls, run: Mapping[str, Any]) -> dict[str, Any]:
        """TRL's names for keys that the run file has itself (`algorithm.trl.max_steps`) go to these."""
        algorithm: Any = run["algorithm"]
        if not isinstance(algorithm, Mapping) or not isinstance(algorithm.get("trl"), Mapping):  # pyright: ignore[reportUnknownMemberType]
            return dict(run)
        rest, moved = trl_fields.moved(algorithm["trl"], run)  # pyright: ignore[reportUnknownArgumentType]
        return {**moved, "algorithm": {**algorithm, "trl": rest}}

    def trained_kind(self, run: RunConfig) -> str:
        return "lora" if self.uses_adapter else "full"

    def derive(self, run: RunConfig, world_size: int) -> VlmDerived:
        return derive_vlm(run, self, world_size)

    def check(self, run: RunConfig, key: str = "") -> None:
        check_vlm(run, self)
