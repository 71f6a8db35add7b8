"""FLUX.1-Fill: a flow model that repaints a mask, on diffusers' own networks.

The token sequence of the transformer is, per 2 x 2 patch of latent cells and in this order: noisy latents, latents of
the masked image, the mask itself with its pixels unshuffled into channels. Everything here equals
`diffusers.FluxFillPipeline` on the same weights (tests/families/test_flux_fill.py); unlike it, the masked image is
encoded by the mode of the autoencoder's posterior, so that a condition is a function of its example.

Legend: B rows, C latent channels, h w latent sides, f pixels a latent cell covers per side, S text tokens, D widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from retouch.core.schedule import FlowSchedule, flux_shift
from retouch.families.embeddings import open_cache
from retouch.families.inputs import (
    KeptLatents,
    inpainting_inputs,
    reference_encoder,
    reference_inputs,
)
from retouch.families.loading import (
    ModelFilesError,
    load_component,
    open_pipeline,
)
from retouch.families.text import (
    TextEncoder,
    TextEncoders,
)
from retouch.image_encoder import ImageEncoder
from retouch.saved_tensors import DamagedFile, load_saved
from retouch.types import Condition, Example, ModelSpec

if TYPE_CHECKING:
    from retouch.families.sections import FluxFillModel

GUIDANCE_SCALE = 30.0  # of the released FLUX.1-Fill; FLUX.1-dev uses 3.5

LORA_TARGETS = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
    "ff.net.0.proj",
    "ff.net.2",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)

RELEASED_TRANSFORMER: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 384,
    "out_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
"""Config of the released transformer: 11.9 B parameters."""


class FluxFill:
    """The family protocol (`retouch.types.DiffusionModel`) for FLUX.1-Fill."""

    network_name = "transformer"

    def __init__(
        self,
        network: Any,  # FluxTransformer2DModel; diffusers' configs are untyped
        vae: Any,  # AutoencoderKL
        text: TextEncoders,
        scheduler: Any,  # FlowMatchEulerDiscreteScheduler
        device: torch.device | str = "cpu",
        image_encoder: ImageEncoder | None = None,  # of references, for a style adapter in the network
    ) -> None:
        self.network: nn.Module = network
        self.vae = vae.eval().requires_grad_(False).to(device)
        self.text = text
        self._text_shapes: dict[str, torch.Size] = {}
        self._text_width: int = network.config.joint_attention_dim
        self.scheduler = scheduler
        self.image_encoder = image_encoder
        self.device = torch.device(device)
        if image_encoder is not None:
            image_encoder.to(device)
        self._kept = KeptLatents(lambda images: self.encode_images(images))
        self.dtype: torch.dtype = network.dtype
        self._embeds_guidance = bool(network.config.guidance_embeds)
        self._factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self.spec = ModelSpec(
            family="flux_fill",
            prediction="flow",
            latent_channels=vae.config.latent_channels,
            downsampling=self._factor,
            size_multiple=2 * self._factor,
            guidance_scale=GUIDANCE_SCALE,
            needs=frozenset({"source", "mask"}),
            lora_targets=LORA_TARGETS,
            network_name=self.network_name,
            reference_width=image_encoder.width if image_encoder is not None else None,
        )
        expected = 4 * (2 * vae.config.latent_channels + self._factor**2)
        if network.config.in_channels != expected:
            raise ModelFilesError(
                f"model.path: the transformer takes {network.config.in_channels} channels, a Fill model with this "
                f"autoencoder takes {expected}; a text-to-image FLUX cannot inpaint: use "
                "black-forest-labs/FLUX.1-Fill-dev"
            )

    @classmethod
    def from_config(
        cls, config: FluxFillModel, device: torch.device | str = "cpu", *, embedded: bool = False
    ) -> FluxFill:
        """Load a hub id or a local folder in the diffusers layout ("tiny": the base of the package).

        Args:
            embedded: whether every example names a file with its `prompt_embeds`: T5 is not loaded.

        Raises:
            ModelFilesError: a component is missing or of another class.
            ConfigError: no such image encoder.
        """
        path, trained, frozen = open_pipeline(config, "FluxFillPipeline")
        stored, encoders = open_cache(config), {}
        network = load_component(FluxTransformer2DModel, path, "transformer", trained)
        if stored is None:
            encoders = {"pooled": TextEncoder.load(CLIPTextModel, path, "", frozen, output="pooler_output")}
            if not embedded:
                encoders["text"] = TextEncoder.load(T5EncoderModel, path, "_2", frozen, config.max_sequence_length)
        return cls(
            network=network,
            vae=load_component(AutoencoderKL, path, "vae", frozen),
            text=TextEncoders(encoders, device, config.offload_text_encoders, stored=stored),
            scheduler=load_component(FlowMatchEulerDiscreteScheduler, path, "scheduler", None),
            device=device,
            image_encoder=reference_encoder(config),
        )

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> FluxFill:
        """The networks of a `FluxFillPipeline` in memory."""
        t5 = TextEncoder(pipeline.text_encoder_2, pipeline.tokenizer_2, pipeline.tokenizer_2.model_max_length)
        length = pipeline.tokenizer.model_max_length
        clip = TextEncoder(pipeline.text_encoder, pipeline.tokenizer, length, "pooler_output")
        return cls(pipeline.transformer, pipeline.vae, TextEncoders({"text": t5, "pooled": clip}), pipeline.scheduler)

    @staticmethod
    def released_network() -> nn.Module:
        """The network at its released size; build it under `torch.device("meta")`."""
        return FluxTransformer2DModel(**RELEASED_TRANSFORMER)

    def to(self, device: Any) -> None:
        self.device = torch.device(device)
        self.vae.to(self.device)
        self.text.to(self.device)
        if self.image_encoder is not None:
            self.image_encoder.to(self.device)

    def schedule(self, num_steps: int, size: tuple[int, int]) -> FlowSchedule:
        config = self.scheduler.config
        if not config.get("use_dynamic_shifting", False):
            return FlowSchedule.make(num_steps, config.get("shift", 1.0))
        tokens = (size[0] // self.spec.size_multiple) * (size[1] // self.spec.size_multiple)
        shift = flux_shift(
            tokens,
            config.get("base_image_seq_len", 256),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.5),
            config.get("max_shift", 1.15),
        )
        return FlowSchedule.make(num_steps, shift)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, masked-image latents, unshuffled mask and vectors of the references of examples of one size."""
        images, mask = inpainting_inputs(examples, self.spec, self.device)
        tensors = {
            **self._text(examples),
            "masked_latents": self._kept(images * (1 - mask)),
            "mask_cells": nn.functional.pixel_unshuffle(mask, self._factor),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        return Condition(tensors, mask, (images.shape[2], images.shape[3]))

    def _text(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Of the files that examples name; what they lack is encoded."""
        rows = [given_embeddings(e.embedding_path) if e.embedding_path else {} for e in examples]
        for row, example in zip(rows, examples, strict=True):
            if "text" in row and row["text"].shape[1] != self._text_width:
                raise ModelFilesError(
                    f"{example.embedding_path}: prompt_embeds of {tuple(row['text'].shape)}, but the transformer takes "
                    f"a width of {self._text_width}; encode the prompt with the T5 of this model"
                )
            if row.keys() != {"text", "pooled"}:
                made = self.text.of(example.prompt)
                if "text" in row and "text" in made and row["text"].shape != made["text"].shape:
                    raise ModelFilesError(
                        f"{example.embedding_path}: prompt_embeds of {tuple(row['text'].shape)}, but the model makes "
                        f"{tuple(made['text'].shape)}; set model.max_sequence_length={len(row['text'])}, or encode anew"
                    )
                row.update({name: t for name, t in made.items() if name not in row})
            for name, tensor in row.items():
                if tensor.shape != (shape := self._text_shapes.setdefault(name, tensor.shape)):
                    raise ModelFilesError(
                        f"{example.embedding_path or repr(example.prompt)}: {GIVEN[name]} of {tuple(tensor.shape)}, "
                        f"but the texts before it had {tuple(shape)}, and a run takes one length; encode it anew"
                    )
        return {name: torch.stack([row[name] for row in rows]).to(self.device) for name in ("text", "pooled")}

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        config = self.vae.config
        latents = self.vae.encode(images.to(self.device, self.vae.dtype)).latent_dist.mode()
        return (latents.float() - config.shift_factor) * config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        latents = latents.float() / config.scaling_factor + config.shift_factor
        return self.vae.decode(latents.to(self.device, self.vae.dtype)).sample.float().clamp(-1, 1)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]. The one place where latents become tokens."""
        c = condition.tensors
        h, w = x.shape[2:]
        channels = torch.cat([x, c["masked_latents"].to(x), c["mask_cells"].to(x)], dim=1)
        # the pipeline rounds 1000 sigma to the network's dtype before it divides; the network multiplies again
        timestep = (t * 1000).to(self.dtype) / 1000
        output = network(
            hidden_states=pack(channels).to(self.dtype),
            timestep=timestep,
            guidance=c["guidance"].float() if self._embeds_guidance else None,
            pooled_projections=c["pooled"].to(self.dtype),
            encoder_hidden_states=c["text"].to(self.dtype),
            txt_ids=torch.zeros(c["text"].shape[1], 3, device=x.device, dtype=self.dtype),
            img_ids=_grid_ids(h // 2, w // 2, str(x.device), self.dtype),
            joint_attention_kwargs=_reference(c),
            return_dict=False,
        )[0]
        return unpack(output.float(), h, w)

    def cache_prompts(self, prompts: Sequence[str]) -> None:
        self.text.cache(prompts)

    def release_text_encoders(self) -> None:
        self.text.release()


GIVEN = {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
"""Name in the condition -> key in a file of embeddings."""


def given_embeddings(path: Path) -> dict[str, Tensor]:
    """A torch file with T5's states [S, D] or [1, S, D], or a dict with them as `prompt_embeds` and optionally
    `pooled_prompt_embeds` [D] or [1, D] -> `text` [S, D] and, where it is there, `pooled` [D].

    Raises:
        ModelFilesError: not such a file.
    """
    try:
        found: Any = load_saved(path)
    except (OSError, DamagedFile) as error:
        raise ModelFilesError(f"{path}: no torch file of tensors ({str(error).splitlines()[0]})") from None
    found = {"prompt_embeds": found} if isinstance(found, Tensor) else found
    tensors = found if isinstance(found, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    given: dict[str, Tensor] = {}
    for (name, key), rank in zip(GIVEN.items(), (2, 1), strict=True):
        tensor: Any = tensors.get(key)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if isinstance(tensor, Tensor):
            tensor = tensor[0] if tensor.ndim == rank + 1 and len(tensor) == 1 else tensor
            if tensor.ndim != rank:
                raise ModelFilesError(f"{path}: {key} is {list(tensor.shape)}; it must have {rank} dimensions")
            given[name] = tensor
    if "text" not in given:
        raise ModelFilesError(f"{path}: holds no tensor, and no dict with prompt_embeds")
    return given


def _reference(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """What the attention processors of a style adapter take; its projection runs inside the network's forward."""
    if "reference" not in tensors:
        return None
    return {"ip_adapter_image_embeds": (tensors["reference"], tensors["reference_keep"])}


def pack(x: Tensor) -> Tensor:
    """[B, C, h, w] -> [B, h/2 · w/2, 4 C]: 2 x 2 patches become tokens, channels outermost."""
    b, c, h, w = x.shape
    return x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, (h // 2) * (w // 2), c * 4)


def unpack(tokens: Tensor, h: int, w: int) -> Tensor:
    """The inverse of `pack`: [B, h/2 · w/2, 4 C] -> [B, C, h, w]."""
    b, _, d = tokens.shape
    return tokens.view(b, h // 2, w // 2, d // 4, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, d // 4, h, w)


@lru_cache(maxsize=16)
def _grid_ids(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    """[rows · columns, 3] position ids (0, row, column) of the packed grid."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return ids.reshape(-1, 3).to(device=device, dtype=dtype)
