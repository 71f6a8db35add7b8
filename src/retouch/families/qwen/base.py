"""What the families on Qwen-Image's networks share: latents, tokens, true guidance, conditions.

Prompts become text states in `qwen_text`. The transformer takes the tokens of the noisy picture and, behind them, those
of pictures to edit; it knows them apart by their positions. Guidance above 1 runs a negative prompt beside the prompt
and scales the guided prediction back, token by token, to the length of the one with the prompt.

Legend: B rows, C latent channels, h w latent sides, S text tokens, L of one row, D widths.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from retouch.core.schedule import FlowSchedule, flux_shift
from retouch.families.flux_fill.model import (
    pack,
    unpack,
)
from retouch.families.inputs import KeptLatents
from retouch.families.loading import ModelFilesError
from retouch.families.text import TextEncoders
from retouch.families.vae import frame_by_frame
from retouch.types import Condition, Example, ModelSpec

GUIDANCE_SCALE = 4.0  # true classifier-free guidance of the released models
NEGATIVE = " "  # what the pipelines' examples guide away from

LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "img_mlp.net.0.proj",
    "img_mlp.net.2",
    "txt_mlp.net.0.proj",
    "txt_mlp.net.2",
)

RELEASED_TRANSFORMER: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "axes_dims_rope": (16, 56, 56),
}
"""Config of the released transformers: 20.4 B parameters."""


RELEASED_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
RELEASED_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""Config of the released text encoders, Qwen2.5-VL-7B: what speaks, and what sees; 8.3 B parameters."""


class QwenModel(ABC):
    """Networks, latents and conditions of a family; what its examples become is the family's own.

    Attributes:
        text: None where the family was opened to draw from given text states only.
        shift: timestep shift in place of the scheduler's, its end value included; None keeps the scheduler's.
        kept_latents: `encode_images` of each picture once.
    """

    network_name = "transformer"

    def __init__(
        self,
        network: Any,  # QwenImageTransformer2DModel; diffusers' configs are untyped
        vae: Any,  # AutoencoderKLQwenImage
        text: TextEncoders | None,
        scheduler: Any,  # FlowMatchEulerDiscreteScheduler
        device: torch.device | str,
        *,
        family: str,
        released: str,
        needs: frozenset[str] = frozenset(),
        reference_width: int | None = None,
        shift: float | None = None,
    ) -> None:
        self.network: nn.Module = network
        self.vae = vae.eval().requires_grad_(False).to(device)
        frame_by_frame(self.vae)
        self.text = text
        self.scheduler = scheduler
        self.shift = shift
        self.device = torch.device(device)
        self.dtype: torch.dtype = network.dtype
        self._factor = 2 ** len(vae.temperal_downsample)  # diffusers' spelling
        self._mean, self._std = (
            torch.tensor(list(values)).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self.kept_latents = KeptLatents(lambda images: self.encode_images(images))
        self.spec = ModelSpec(
            family=family,
            prediction="flow",
            latent_channels=vae.config.z_dim,
            downsampling=self._factor,
            size_multiple=2 * self._factor,
            guidance_scale=GUIDANCE_SCALE,
            needs=needs,
            lora_targets=LORA_TARGETS,
            network_name=self.network_name,
            reference_width=reference_width,
            empty_prompt=NEGATIVE,
        )
        if network.config.in_channels != 4 * vae.config.z_dim:
            raise ModelFilesError(
                f"model.path: the transformer takes {network.config.in_channels} channels, with this autoencoder "
                f"Qwen-Image takes {4 * vae.config.z_dim}; use {released}"
            )

    @staticmethod
    def released_network() -> nn.Module:
        """The network at its released size; build it under `torch.device("meta")`."""
        return QwenImageTransformer2DModel(**RELEASED_TRANSFORMER)

    @staticmethod
    def released_beside() -> dict[str, nn.Module]:
        """The networks beside it at their released sizes, by component; likewise."""
        config = Qwen2_5_VLConfig(text_config=RELEASED_TEXT, vision_config=RELEASED_VISION)  # type: ignore[arg-type]
        return {"vae": AutoencoderKLQwenImage(), "text_encoder": Qwen2_5_VLForConditionalGeneration(config)}

    @abstractmethod
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """As `retouch.types.DiffusionModel` has it."""

    def to(self, device: Any) -> None:
        self.device = torch.device(device)
        self.vae.to(self.device)
        if self.text is not None:
            self.text.to(self.device)

    def schedule(self, num_steps: int, size: tuple[int, int]) -> FlowSchedule:
        if self.shift is not None:
            return FlowSchedule.make(num_steps, self.shift)
        config = self.scheduler.config
        if not config.get("use_dynamic_shifting", False):
            return FlowSchedule.make(num_steps, config.get("shift", 1.0), config.get("shift_terminal"))
        tokens = (size[0] // self.spec.size_multiple) * (size[1] // self.spec.size_multiple)
        shift = flux_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return FlowSchedule.make(num_steps, shift, config.get("shift_terminal"))

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        frames = images.to(self.device, self.vae.dtype)[:, :, None]
        latents = self.vae.encode(frames).latent_dist.mode()[:, :, 0].float()
        return (latents - self._mean.to(latents)) / self._std.to(latents)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        latents = latents.float() * self._std.to(latents.device) + self._mean.to(latents.device)
        frames = latents.to(self.device, self.vae.dtype)[:, :, None]
        return self.vae.decode(frames).sample[:, :, 0].float().clamp(-1, 1)

    def encode_picture(self, picture: Image) -> Tensor:
        """A picture to edit -> latents [1, C, h, w], kept for the next time.

        Raises:
            ValueError: sides that are no multiples of what the network takes.
        """
        self.require_size((picture.height, picture.width))
        pixels = torch.from_numpy(np.asarray(picture.convert("RGB"), np.float32)).to(self.device)
        return self.kept_latents(pixels.permute(2, 0, 1)[None] / 127.5 - 1)

    def require_size(self, size: tuple[int, int]) -> None:
        multiple = self.spec.size_multiple
        if any(side % multiple for side in size):
            raise ValueError(f"images are {size[0]} x {size[1]}; {self.spec.family} needs multiples of {multiple}")

    def condition_on(
        self,
        text: Sequence[Tensor],
        size: tuple[int, int],
        guidance_scale: float = 1.0,
        negative: Sequence[Tensor] = (),
        pictures: Sequence[Sequence[Tensor]] = (),
    ) -> Condition:
        """A condition from text states that are there already, however long each row's are.

        Args:
            text: [L, D] of each of B rows, without padding; any dtype and device.
            size: (height, width) to draw at.
            guidance_scale: above 1 `predict` guides away from `negative`; at 1 that must be empty.
            negative: [L, D] of each row.
            pictures: latents [1, C, h, w] of the pictures that each row edits: as many in each, of the same sizes.

        Raises:
            ValueError: a size or a number of rows that does not fit, or guidance without negative states.
        """
        self.require_size(size)
        if (guidance_scale > 1) != bool(negative):
            raise ValueError(
                f"guidance_scale is {guidance_scale} with {len(negative)} negative text states; above 1 every row "
                "needs one, at 1 there is nothing to guide away from"
            )
        if negative and len(negative) != len(text):
            raise ValueError(f"{len(text)} rows of text states, but {len(negative)} negative ones")
        if pictures and len(pictures) != len(text):
            raise ValueError(f"{len(text)} rows of text states, but pictures of {len(pictures)}")
        if bool(pictures and pictures[0]) != ("source" in self.spec.needs):
            wants = "needs pictures to edit" if "source" in self.spec.needs else "takes no pictures to edit"
            raise ValueError(f"{self.spec.family} {wants}; given {len(pictures[0]) if pictures else 0} a row")
        longest = max(len(states) for states in (*text, *negative))
        states, mask = padded([states.to(self.device) for states in text], longest)
        tensors = {"text": states, "text_mask": mask, "guidance": torch.full((len(text),), float(guidance_scale))}
        if negative:
            tensors["negative_text"], tensors["negative_text_mask"] = padded(
                [states.to(self.device) for states in negative], longest
            )
        tensors |= picture_tensors(pictures)
        return Condition(tensors, None, size).to(self.device)

    def cache_prompts(self, prompts: Sequence[str]) -> None:
        self.texts().cache([NEGATIVE, *prompts])

    def release_text_encoders(self) -> None:
        self.texts().release()

    def texts(self) -> TextEncoders:
        """Raises: RuntimeError: opened without a text encoder."""
        if self.text is None:
            raise RuntimeError(f"{self.spec.family} was opened without its text encoder; open it with one to encode")
        return self.text

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]: by classifier-free guidance whose result is scaled back, token by
        token, to the length of the guided prediction."""
        return self._velocity(network, x, t, condition)

    def _velocity(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition, **options: Any) -> Tensor:
        c = condition.tensors
        h, w = x.shape[2:]
        pictures = pictures_in(c)
        tokens = torch.cat([pack(picture) for picture in (x, *pictures)], 1).to(self.dtype)
        timestep = (t * 1000).to(self.dtype) / 1000
        text, mask = c["text"], c["text_mask"]
        guided = "negative_text" in c
        if guided:
            tokens, timestep = torch.cat([tokens] * 2), torch.cat([timestep] * 2)
            text, mask = torch.cat([c["negative_text"], text]), torch.cat([c["negative_text_mask"], mask])
        output = network(
            hidden_states=tokens,
            timestep=timestep,
            encoder_hidden_states=text.to(self.dtype),
            encoder_hidden_states_mask=mask > 0,
            img_shapes=[[(1, p.shape[2] // 2, p.shape[3] // 2) for p in (x, *pictures)]] * len(tokens),
            return_dict=False,
            **options,
        )[0][:, : (h // 2) * (w // 2)].float()
        if guided:
            without, with_text = output.chunk(2)
            both = without + c["guidance"].view(-1, 1, 1) * (with_text - without)
            output = both * (with_text.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        return unpack(output, h, w)


def padded(rows: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """States [L, D] of B rows -> [B, length, D] filled up with zeros, and [B, length] 1 where there is no padding."""
    states = torch.stack([nn.functional.pad(row, (0, 0, 0, length - len(row))) for row in rows])
    counts = torch.tensor([[len(row)] for row in rows])
    return states, (torch.arange(length) < counts).to(states)


def unpadded(states: Tensor, mask: Tensor) -> list[Tensor]:
    """[B, S, D] with a mask [B, S], whichever side is padded -> states [L, D] of each row."""
    return [row[keep > 0] for row, keep in zip(states, mask, strict=True)]


def picture_tensors(pictures: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Latents [1, C, h, w] of the pictures of B rows -> `picture_0` [B, C, h, w], `picture_1` ..."""
    return {f"picture_{i}": torch.cat(column) for i, column in enumerate(zip(*pictures, strict=True))}


def pictures_in(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """What `picture_tensors` put in, in order."""
    count = sum(name.startswith("picture_") for name in tensors)
    return [tensors[f"picture_{i}"] for i in range(count)]
