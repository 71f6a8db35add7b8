"""Qwen-Image: a flow model that draws what a sentence says, or repaints a mask, on diffusers' own networks.

The network knows no mask: inpainting blends latents. Outside the mask the state stays on the straight line from the
noise to the source, which is to say that the velocity there is (x - x0) / sigma. So the blend is a part of `predict`,
solvers need not know of it, and what lies outside is the source's at every step, as in `QwenImageInpaintPipeline`.
Everything here equals diffusers' pipelines on the same weights (tests/models/test_qwen_image.py); unlike them, the
source is encoded by the mode of the autoencoder's posterior, so that a condition is a function of its example.

Legend: B rows, C latent channels, h w latent sides, S text tokens, D widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.core.schedule import FlowSchedule, flux_shift
from retouch.image_encoder import ImageEncoder
from retouch.models.embeddings import open_cache
from retouch.models.flux_fill import pack, unpack
from retouch.models.inputs import inpainting_inputs, reference_encoder, reference_inputs
from retouch.models.loading import ModelFilesError, load_component, open_pipeline
from retouch.models.text import TextEncoders
from retouch.types import Condition, Example, ModelSpec

if TYPE_CHECKING:
    from retouch.config.model_sections import QwenImageModel

GUIDANCE_SCALE = 4.0  # true classifier-free guidance of the released model
NEGATIVE = " "  # what the pipeline's examples guide away from

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
"""Config of the released transformer: 20.4 B parameters."""

PREFIX = 34
"""Tokens of the template before the prompt, with the released tokenizer."""


class QwenImage:
    """The family protocol (`retouch.types.DiffusionModel`) for Qwen-Image, with a source and mask or without."""

    network_name = "transformer"

    def __init__(
        self,
        network: Any,  # QwenImageTransformer2DModel; diffusers' configs are untyped
        vae: Any,  # AutoencoderKLQwenImage
        text: TextEncoders,
        scheduler: Any,  # FlowMatchEulerDiscreteScheduler
        device: torch.device | str = "cpu",
        image_encoder: ImageEncoder | None = None,  # of references, for a style adapter in the network
    ) -> None:
        self.network: nn.Module = network
        self.vae = vae.eval().requires_grad_(False).to(device)
        self.text = text
        self.scheduler = scheduler
        self.image_encoder = image_encoder
        self.device = torch.device(device)
        if image_encoder is not None:
            image_encoder.to(device)
        self.dtype: torch.dtype = network.dtype
        self._factor = 2 ** len(vae.temperal_downsample)  # diffusers' spelling
        self._mean, self._std = (
            torch.tensor(list(values)).view(1, -1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        self.spec = ModelSpec(
            family="qwen_image",
            prediction="flow",
            latent_channels=vae.config.z_dim,
            downsampling=self._factor,
            size_multiple=2 * self._factor,
            guidance_scale=GUIDANCE_SCALE,
            needs=frozenset(),
            lora_targets=LORA_TARGETS,
            network_name=self.network_name,
            reference_width=image_encoder.width if image_encoder is not None else None,
            empty_prompt=NEGATIVE,
        )
        if network.config.in_channels != 4 * vae.config.z_dim:
            raise ModelFilesError(
                f"model.path: the transformer takes {network.config.in_channels} channels, with this autoencoder "
                f"Qwen-Image takes {4 * vae.config.z_dim}; use Qwen/Qwen-Image"
            )

    @classmethod
    def from_config(cls, config: QwenImageModel, device: torch.device | str = "cpu") -> QwenImage:
        """Load a hub id or a local folder in the diffusers layout.

        Raises:
            ModelFilesError: a component is missing or of another class.
            ConfigError: no such image encoder.
        """
        path, trained, frozen = open_pipeline(config, "QwenImagePipeline")
        stored = open_cache(config)
        if stored is None:
            model = load_component(Qwen2_5_VLForConditionalGeneration, path, "text_encoder", frozen)
            tokenizer = load_component(AutoTokenizer, path, "tokenizer", None)
            text = _encoders(model, tokenizer, config.max_sequence_length, device, config.offload_text_encoders)
        else:
            text = TextEncoders({}, device, config.offload_text_encoders, stored)
        return cls(
            network=load_component(QwenImageTransformer2DModel, path, "transformer", trained),
            vae=load_component(AutoencoderKLQwenImage, path, "vae", frozen),
            text=text,
            scheduler=load_component(FlowMatchEulerDiscreteScheduler, path, "scheduler", None),
            device=device,
            image_encoder=reference_encoder(config),
        )

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128) -> QwenImage:
        """The networks of a `QwenImagePipeline` in memory, prompts of up to `length` tokens."""
        text = _encoders(pipeline.text_encoder, pipeline.tokenizer, length, "cpu", offload=True)
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler)

    @staticmethod
    def released_network() -> nn.Module:
        """The network at its released size; build it under `torch.device("meta")`."""
        return QwenImageTransformer2DModel(**RELEASED_TRANSFORMER)

    def to(self, device: Any) -> None:
        self.device = torch.device(device)
        self.vae.to(self.device)
        self.text.to(self.device)
        if self.image_encoder is not None:
            self.image_encoder.to(self.device)

    def schedule(self, num_steps: int, size: tuple[int, int]) -> FlowSchedule:
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
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, vectors of the references and, where there are sources, their latents and the mask, of examples of one
        size; a `guidance_scale` above 1 adds the negative prompt, and `predict` then runs twice the rows.

        Raises:
            ValueError: some examples with a source and some without, or neither a source nor a size.
        """
        tensors = {
            **self.text.encode([e.prompt for e in examples]),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        if guidance_scale > 1:
            negative = self.text.encode([NEGATIVE])
            tensors |= {f"negative_{name}": t.expand_as(tensors[name]) for name, t in negative.items()}
        if any(e.source is not None for e in examples):
            images, mask = inpainting_inputs(examples, self.spec, self.device)
            size = (images.shape[2], images.shape[3])
            cells = (size[0] // self._factor, size[1] // self._factor)
            tensors["source_latents"] = self.encode_images(images)
            tensors["mask_cells"] = nn.functional.interpolate(mask, size=cells)
            return Condition(tensors, mask, size)
        sizes = {e.size for e in examples}
        size = examples[0].size
        if size is None or len(sizes) > 1:
            raise ValueError(f"examples without a source need one size; given {sorted(map(str, sizes))}")
        if any(side % self.spec.size_multiple for side in size):
            multiple = self.spec.size_multiple
            raise ValueError(f"images are {size[0]} x {size[1]}; qwen_image needs multiples of {multiple}")
        return Condition(tensors, None, size)

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

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]: by classifier-free guidance whose result is scaled back, token by
        token, to the length of the guided prediction; outside the mask the one that leads to the source."""
        c = condition.tensors
        h, w = x.shape[2:]
        tokens, timestep = pack(x).to(self.dtype), (t * 1000).to(self.dtype) / 1000
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
            img_shapes=[[(1, h // 2, w // 2)]] * len(tokens),
            attention_kwargs=_reference(c, guided=guided),
            return_dict=False,
        )[0].float()
        if guided:
            without, with_text = output.chunk(2)
            both = without + c["guidance"].view(-1, 1, 1) * (with_text - without)
            output = both * (with_text.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        velocity = unpack(output, h, w)
        if "source_latents" not in c:
            return velocity
        to_source = (x - c["source_latents"]) / t.view(-1, 1, 1, 1)
        return torch.where(c["mask_cells"] > 0, velocity, to_source)

    def cache_prompts(self, prompts: Sequence[str]) -> None:
        self.text.cache([NEGATIVE, *prompts])

    def release_text_encoders(self) -> None:
        self.text.release()


@dataclass(frozen=True)
class QwenPrompts:
    """Prompts in the chat template of Qwen-Image -> states of the vision-language model, its system part cut off.

    Attributes:
        length: tokens kept, fewer are padded; those of the template behind the prompt count.
        states: the states [B, S, D]; False: which of them are no padding [B, S].
    """

    model: Any  # Qwen2_5_VLForConditionalGeneration
    tokenizer: Any
    length: int
    states: bool

    def __call__(self, prompts: Sequence[str]) -> Tensor:
        rows = [self._row(prompt) for prompt in prompts]
        padded = [nn.functional.pad(row, (0, 0) * (row.ndim - 1) + (0, self.length - len(row))) for row in rows]
        return torch.stack(padded)

    def _row(self, prompt: str) -> Tensor:
        template = _template()
        drop = len(self.tokenizer(template.partition("{}")[0]).input_ids)
        if len(self.tokenizer) > 100_000 and drop != PREFIX:  # the released one
            raise ModelFilesError(f"tokenizer/: {drop} tokens before the prompt instead of {PREFIX}; copy it anew")
        options = {"truncation": True, "max_length": 1024 + drop, "return_tensors": "pt"}
        ids = self.tokenizer(template.replace("{}", prompt), **options).input_ids.to(self.model.device)
        if not self.states:
            return torch.ones(min(self.length, ids.shape[1] - drop), device=ids.device)
        states = self.model.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        return states[0, drop : drop + self.length]


def _encoders(model: Any, tokenizer: Any, length: int, device: Any, offload: bool) -> TextEncoders:
    made: dict[str, Any] = {
        "text": QwenPrompts(model, tokenizer, length, states=True),
        "text_mask": QwenPrompts(model, tokenizer, length, states=False),
    }
    return TextEncoders(made, device, offload)


def _template() -> str:
    """The chat that the released model was trained on, as diffusers has it; {} stands for the prompt."""
    absent: Any = None
    return QwenImagePipeline(absent, absent, absent, absent, absent).prompt_template_encode


def _reference(tensors: Mapping[str, Tensor], *, guided: bool) -> dict[str, Any] | None:
    """What the attention processors of a style adapter take; rows of the negative prompt attend to no token."""
    if "reference" not in tensors:
        return None
    vectors, keep = tensors["reference"], tensors["reference_keep"]
    if guided:
        vectors, keep = torch.cat([vectors] * 2), torch.cat([torch.zeros_like(keep), keep])
    return {"ip_adapter_image_embeds": (vectors, keep)}
