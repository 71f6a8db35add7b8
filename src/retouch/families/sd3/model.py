"""Stable Diffusion 3.5: a flow model that generates an image from a prompt, or repaints a mask, on diffusers' own
networks.

Three encoders read a prompt. The states of two CLIPs lie side by side on the width and are filled up with zeros to that
of T5, whose states follow them on the token axis; the projected vectors of the CLIPs make one. A model without T5 has
zeros in its place. The network takes no mask: inpainting blends latents (`retouch.families.blending`). Everything here
equals diffusers' pipelines on the same weights (tests/families/test_sd3.py), except that the source is encoded by the
mode of the autoencoder's posterior: a condition is then a function of its example.

The style adapter and the guidance that skips layers (an option of the pipeline) are not here.

Legend: B samples, C latent channels, h w latent sides, S text tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from transformers import ByT5Tokenizer, CLIPTextModelWithProjection, T5EncoderModel

from retouch.core.schedule import FlowSchedule, shift_sigma
from retouch.families import tiny
from retouch.families.blending import blended, blending_inputs
from retouch.families.diffusion import FamilyModel
from retouch.families.guidance import doubled, guided, halves
from retouch.families.loading import is_there
from retouch.families.sd3.spec import Sd3Model
from retouch.families.text import Networks, TextEncoder, TextEncoders
from retouch.types import Condition, Example


class Sd3(FamilyModel):
    """The family protocol (`retouch.types.DiffusionModel`) for Stable Diffusion 3.5, with a source and mask or
    without."""

    section = Sd3Model

    def __init__(self, network: Any, *parts: Any, **options: Any) -> None:
        super().__init__(network, *parts, **options)
        # diffusers 0.42 names none for this class, and compiles the blocks that are named here as well
        network._repeated_blocks = ["JointTransformerBlock"]

    @classmethod
    def text_encoders(
        cls, config: Sd3Model, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, TextEncoder]:
        clip, clip_2 = (TextEncoder.load(network, CLIPTextModelWithProjection, path, number) for number in ("", "_2"))
        t5 = None
        if is_there(path, "text_encoder_3"):
            t5 = TextEncoder.load(network, T5EncoderModel, path, "_3", config.max_sequence_length)
        return _encoders(clip, clip_2, t5)

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int | None = None) -> Self:
        """The networks of a `StableDiffusion3Pipeline` in memory, T5 prompts of `length` tokens; None is 256, or the
        length of the tokenizer if that is less."""
        if length is None:
            length = min(256, pipeline.tokenizer_3.model_max_length) if pipeline.tokenizer_3 else 256
        clip, clip_2 = (
            TextEncoder(model, tokenizer, tokenizer.model_max_length, name=name)
            for model, tokenizer, name in (
                (pipeline.text_encoder, pipeline.tokenizer, "text_encoder"),
                (pipeline.text_encoder_2, pipeline.tokenizer_2, "text_encoder_2"),
            )
        )
        t5 = None
        if pipeline.text_encoder_3:
            t5 = TextEncoder(pipeline.text_encoder_3, pipeline.tokenizer_3, length, name="text_encoder_3")
        text = TextEncoders(_encoders(clip, clip_2, t5))
        config = Sd3Model(max_sequence_length=length)
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler, config=config)

    @staticmethod
    def tiny() -> StableDiffusion3Pipeline:
        """4 blocks of width 128, the first with a second attention, on an autoencoder that downsamples by 4 to the 16
        channels that the inpainting pipeline requires; images of up to 192 pixels a side."""
        transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=16,
            out_channels=16,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=tiny.TEXT_WIDTH,
            caption_projection_dim=128,
            pooled_projection_dim=64,
            pos_embed_max_size=24,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=tiny.autoencoder(latent_channels=16),
            text_encoder=tiny.projected_clip(16, 32),
            tokenizer=tiny.byte_clip_tokenizer(),
            text_encoder_2=tiny.projected_clip(48, 32),
            tokenizer_2=tiny.byte_clip_tokenizer(pad="!"),
            text_encoder_3=tiny.t5(),
            tokenizer_3=ByT5Tokenizer(extra_ids=0, model_max_length=tiny.TEXT_TOKENS),  # type: ignore[arg-type]
        )

    def require_size(self, size: tuple[int, int]) -> None:
        """As `FamilyModel.require_size`; also for images larger than the table of positions."""
        super().require_size(size)
        config: Any = self.network.config
        most = config.pos_embed_max_size * self.spec.size_multiple
        if max(size) > most:
            raise ValueError(f"images are {size[0]} x {size[1]}; this {self.spec.family} takes sides of up to {most}")

    def schedule(self, num_steps: int, size: tuple[int, int]) -> FlowSchedule:
        """Flow times that end, before 0, at the smallest sigma of training. The scheduler spaces its steps between its
        own sigmas, to which a constant shift has been applied already, and applies the shift to the steps again."""
        config, shift = self.scheduler.config, self.flow_shift(size)
        last = 1 / config.num_train_timesteps
        if not config.use_dynamic_shifting:
            last = float(shift_sigma(last, shift))
        return FlowSchedule.make(num_steps, shift, config.shift_terminal, last)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text and, if there are sources, their latents and the mask, of examples of one size; a `guidance_scale` above
        1 adds the empty prompt, and `predict` then doubles the batch of the network.

        Raises:
            ValueError: some examples with a source and some without, neither a source nor a size, a size that the
                network cannot take, or guidance of a model that was distilled to sample without.
        """
        blending, mask, size = blending_inputs(self, examples)
        return Condition(self.guided_texts(examples, guidance_scale) | blending, mask, size)

    def arranged(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`text` [B, S, D], tokens of both CLIPs before those of T5, and `pooled` [B, D']."""
        clips, t5 = torch.cat([made["clip"], made["clip_2"]], dim=-1), made.get("t5")
        config: Any = self.network.config
        if t5 is None:
            t5 = clips.new_zeros(len(clips), self.config.max_sequence_length, config.joint_attention_dim)
        clips = nn.functional.pad(clips, (0, t5.shape[2] - clips.shape[2]))
        return {
            "text": torch.cat([clips, t5], dim=1),
            "pooled": torch.cat([made["clip_vector"], made["clip_2_vector"]], dim=-1),
        }

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B], by classifier-free guidance (arXiv 2207.12598) where the condition
        has a `negative_text`; outside the mask the one that leads to the source."""
        c = condition.tensors
        velocity = network(
            hidden_states=doubled(x, c).to(self.dtype),
            timestep=doubled(t * 1000, c),  # fp32: the network computes its sinusoids in that
            encoder_hidden_states=halves(c, "text").to(self.dtype),
            pooled_projections=halves(c, "pooled").to(self.dtype),
            return_dict=False,
        )[0].float()
        return blended(guided(velocity, c), x, t, c)


def _encoders(clip: TextEncoder, clip_2: TextEncoder, t5: TextEncoder | None) -> Mapping[str, TextEncoder]:
    """By the names of their tensors: of each CLIP the states of the last layer but one and the projected vector."""
    made: dict[str, TextEncoder] = {}
    for name, encoder in (("clip", clip), ("clip_2", clip_2)):
        made[name] = replace(encoder, output=(-2,))
        made[f"{name}_vector"] = replace(encoder, output="text_embeds")
    return made if t5 is None else {**made, "t5": t5}
