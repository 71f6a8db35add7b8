"""FLUX.1-Fill: a flow model that repaints a mask, on diffusers' own networks.

The token sequence of the transformer is, per 2 x 2 patch of latent cells and in this order: noisy latents, latents of
the masked image, the mask itself with its pixels unshuffled into channels. Everything here equals
`diffusers.FluxFillPipeline` on the same weights (tests/families/test_flux_fill.py), except that the masked image is
encoded by the mode of the autoencoder's posterior: a condition is then a function of its example.

Legend: B samples, C latent channels, h w latent sides, S text tokens, D widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxFillPipeline, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import ByT5Tokenizer, CLIPTextModel, T5EncoderModel

from retouch.families import tiny
from retouch.families.diffusion import FamilyModel, pack, unpack
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.inputs import inpainting_inputs, reference_inputs
from retouch.families.loading import ModelFilesError
from retouch.families.text import TextEncoder, TextEncoders
from retouch.saved_tensors import DamagedFile, load_saved
from retouch.types import Condition, Example


class FluxFill(FamilyModel):
    """The family protocol (`retouch.types.DiffusionModel`) for FLUX.1-Fill."""

    section = FluxFillModel

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._text_shapes: dict[str, torch.Size] = {}

    @classmethod
    def load_text(
        cls, config: FluxFillModel, path: str, dtype: torch.dtype, device: torch.device | str, *, embedded: bool
    ) -> TextEncoders:
        encoders = {"pooled": TextEncoder.load(CLIPTextModel, path, "", dtype, output="pooler_output")}
        if not embedded:
            encoders["text"] = TextEncoder.load(T5EncoderModel, path, "_2", dtype, config.max_sequence_length)
        return TextEncoders(encoders, device, config.offload_text_encoders)

    @classmethod
    def from_pipeline(cls, pipeline: Any) -> Self:
        """The networks of a `FluxFillPipeline` in memory."""
        t5 = TextEncoder(pipeline.text_encoder_2, pipeline.tokenizer_2, pipeline.tokenizer_2.model_max_length)
        length = pipeline.tokenizer.model_max_length
        clip = TextEncoder(pipeline.text_encoder, pipeline.tokenizer, length, "pooler_output")
        return cls(pipeline.transformer, pipeline.vae, TextEncoders({"text": t5, "pooled": clip}), pipeline.scheduler)

    @staticmethod
    def tiny() -> FluxFillPipeline:
        """2 double and 4 single blocks of width 128 on an autoencoder that downsamples by 4: 32 tokens for 32 x 64
        pixels, 3.2 M parameters in all."""
        vae, channels, factor = tiny.autoencoder(), tiny.CHANNELS, 4
        transformer = FluxTransformer2DModel(
            in_channels=4 * (2 * channels + factor**2),
            out_channels=4 * channels,
            num_layers=2,
            num_single_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=tiny.TEXT_WIDTH,
            pooled_projection_dim=tiny.TEXT_WIDTH,
            guidance_embeds=True,
            axes_dims_rope=(8, 12, 12),
        )
        return FluxFillPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(**tiny.SHIFTED),
            vae=vae,
            text_encoder=tiny.clip(),
            tokenizer=tiny.byte_clip_tokenizer(),
            text_encoder_2=tiny.t5(),
            tokenizer_2=ByT5Tokenizer(extra_ids=0, model_max_length=tiny.TEXT_TOKENS),
            transformer=transformer,
        )

    def input_channels(self) -> int:
        return 4 * (2 * self.spec.latent_channels + self.spec.downsampling**2)

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, masked-image latents, unshuffled mask and vectors of the references of examples of one size."""
        images, mask = inpainting_inputs(examples, self.spec, self.device)
        tensors = {
            **self._text(examples),
            "masked_latents": self.autoencoder.encode_once(images * (1 - mask)),
            "mask_cells": nn.functional.pixel_unshuffle(mask, self.spec.downsampling),
            "guidance": torch.full((len(examples),), guidance_scale, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        return Condition(tensors, mask, (images.shape[2], images.shape[3]))

    def _text(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Text states from the files that examples name; missing ones are encoded."""
        rows = [given_embeddings(e.embedding_path) if e.embedding_path else {} for e in examples]
        width = self.network.config.joint_attention_dim  # type: ignore[union-attr]
        for row, example in zip(rows, examples, strict=True):
            if "text" in row and row["text"].shape[1] != width:
                raise ModelFilesError(
                    f"{example.embedding_path}: prompt_embeds of {tuple(row['text'].shape)}, but the transformer takes "
                    f"a width of {width}; encode the prompt with the T5 of this model"
                )
            if row.keys() != {"text", "pooled"}:
                made = self.texts().of(example.prompt)
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
                        f"but earlier texts have {tuple(shape)}, and a run takes one length; encode it anew"
                    )
        return {name: torch.stack([row[name] for row in rows]).to(self.device) for name in ("text", "pooled")}

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
            guidance=c["guidance"].float() if self.network.config.guidance_embeds else None,  # type: ignore[union-attr]
            pooled_projections=c["pooled"].to(self.dtype),
            encoder_hidden_states=c["text"].to(self.dtype),
            txt_ids=torch.zeros(c["text"].shape[1], 3, device=x.device, dtype=self.dtype),
            img_ids=_grid_ids(h // 2, w // 2, str(x.device), self.dtype),
            joint_attention_kwargs=_reference(c),
            return_dict=False,
        )[0]
        return unpack(output.float(), h, w)


GIVEN = {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
"""Name in the condition -> key in a file of embeddings."""


def given_embeddings(path: Path) -> dict[str, Tensor]:
    """Read a torch file with T5's states [S, D] or [1, S, D], or a dict with them as `prompt_embeds` and optionally
    `pooled_prompt_embeds` [D] or [1, D] -> `text` [S, D] and, if present, `pooled` [D].

    Raises:
        ModelFilesError: not such a file.
    """
    try:
        found: Any = load_saved(path)
    except (OSError, DamagedFile) as error:
        raise ModelFilesError(f"{path}: no torch file of tensors ({str(error).splitlines()[0]})") from None
    tensors: dict[Any, Any] = {"prompt_embeds": found} if isinstance(found, Tensor) else found
    given: dict[str, Tensor] = {}
    for (name, key), rank in zip(GIVEN.items(), (2, 1), strict=True):
        tensor = tensors.get(key) if isinstance(tensors, dict) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if isinstance(tensor, Tensor):
            tensor = tensor[0] if tensor.ndim == rank + 1 and len(tensor) == 1 else tensor
            if tensor.ndim != rank:
                raise ModelFilesError(f"{path}: {key} is {list(tensor.shape)}; it must have {rank} dimensions")
            given[name] = tensor
    if "text" not in given:
        raise ModelFilesError(f"{path}: holds no tensor, and no dict with prompt_embeds")
    return given


def _reference(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Input of the attention processors of a style adapter; its projection runs inside the network's forward."""
    if "reference" not in tensors:
        return None
    return {"ip_adapter_image_embeds": (tensors["reference"], tensors["reference_keep"])}


@lru_cache(maxsize=16)
def _grid_ids(rows: int, columns: int, device: str, dtype: torch.dtype) -> Tensor:
    """[rows · columns, 3] position ids (0, row, column) of the packed grid."""
    ids = torch.zeros(rows, columns, 3)
    ids[..., 1] = torch.arange(rows)[:, None]
    ids[..., 2] = torch.arange(columns)[None, :]
    return ids.reshape(-1, 3).to(device=device, dtype=dtype)
