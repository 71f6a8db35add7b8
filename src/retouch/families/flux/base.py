"""Shared parts of the families on FLUX.1's network: text, tokens, guidance, and toy networks.

The families differ in the tokens of the sequence alone (`FluxModel.sequence`). Everything equals diffusers' pipelines
on the same weights (tests/families/test_flux_*.py), except that images are encoded by the mode of the autoencoder's
posterior: a condition is then a function of its example.

Guidance is embedded: the network takes the scale as an input. Beside it, `model.true_guidance_scale` w above 1 steers
away from a negative prompt, with the same embedded scale in both halves of a doubled batch:
v = v_negative + w (v_prompt - v_negative).

Legend: B samples, C latent channels, h w latent sides, N image tokens, S text tokens, D widths.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor, nn
from transformers import ByT5Tokenizer, CLIPTextModel, T5EncoderModel

from retouch.errors import first_line
from retouch.families import tiny
from retouch.families.diffusion import FamilyModel, unpack
from retouch.families.flux.spec import FluxSection
from retouch.families.guidance import adapter_inputs, doubled, guided, halves
from retouch.families.inputs import reference_inputs
from retouch.families.loading import ModelFilesError
from retouch.families.text import Networks, TextEncoder, TextEncoders
from retouch.files.saved_tensors import DamagedFile, load_saved
from retouch.types import Condition, Example

GIVEN = {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
"""Name in the condition -> key in a file of embeddings."""


class FluxModel(FamilyModel):
    """Networks, text and predictions of a family; encoding of images and the token sequence are the family's own."""

    def __init__(self, network: Any, *parts: Any, **options: Any) -> None:
        super().__init__(network, *parts, **options)
        if not network.config.guidance_embeds:
            raise ModelFilesError(
                f"model.path: the transformer has no guidance embedding (FLUX.1-schnell has none), which "
                f"{self.spec.family} needs for rollout.guidance_scale; set the path of a guidance-distilled model"
            )
        self._text_shapes: dict[str, torch.Size] = {}

    @classmethod
    def text_encoders(
        cls, config: FluxSection, path: str, network: Networks, *, embedded: bool
    ) -> Mapping[str, TextEncoder]:
        encoders = {"pooled": TextEncoder.load(network, CLIPTextModel, path, "", output="pooler_output")}
        if not embedded or config.doubles_for_guidance:  # no file has the negative prompt
            encoders["text"] = TextEncoder.load(network, T5EncoderModel, path, "_2", config.max_sequence_length)
        return encoders

    @classmethod
    def from_pipeline(cls, pipeline: Any, config: FluxSection | None = None) -> Self:
        """The networks of a diffusers pipeline in memory; prompts have the length of its tokenizers."""
        length = pipeline.tokenizer_2.model_max_length
        t5 = TextEncoder(pipeline.text_encoder_2, pipeline.tokenizer_2, length, name="text_encoder_2")
        length = pipeline.tokenizer.model_max_length
        clip = TextEncoder(pipeline.text_encoder, pipeline.tokenizer, length, "pooler_output")
        text = TextEncoders({"text": t5, "pooled": clip})
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler, config=config)

    def input_channels(self) -> int:
        return 4 * self.spec.latent_channels

    def encoded_texts(self, examples: Sequence[Example], guidance_scale: float) -> dict[str, Tensor]:
        """Condition tensors that do not depend on images: text states, the embedded guidance, vectors of references,
        and the states of the negative prompt where `true_guidance_scale` is above 1."""
        tensors = {
            **self._text(examples),
            "guidance": torch.full((len(examples),), guidance_scale, dtype=torch.float32, device=self.device),
            **reference_inputs(examples, self.image_encoder, self.device),
        }
        if self.config.doubles_for_guidance:
            negative = self._text([Example(-1, self.config.negative_prompt)])
            tensors |= {f"negative_{name}": t.expand_as(tensors[name]) for name, t in negative.items()}
        return tensors

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
                [made] = self.texts().rows([example.prompt])
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

    @abstractmethod
    def sequence(self, x: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Image tokens [B, N', D] and their position ids [N', 3]: first those of the noisy latents `x` [B, C, h, w],
        then the others, if there are any."""

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]; with a negative prompt in the condition by classifier-free guidance
        (arXiv 2207.12598) of `true_guidance_scale`."""
        c = condition.tensors
        h, w = x.shape[2:]
        tokens, ids = self.sequence(x, c)
        # the pipeline rounds 1000 sigma to the network's dtype before it divides; the network multiplies again
        timestep = (t * 1000).to(self.dtype) / 1000
        text = halves(c, "text")
        output = network(
            hidden_states=doubled(tokens, c).to(self.dtype),
            timestep=doubled(timestep, c),
            guidance=doubled(c["guidance"].float(), c),
            pooled_projections=halves(c, "pooled").to(self.dtype),
            encoder_hidden_states=text.to(self.dtype),
            txt_ids=torch.zeros(text.shape[1], 3, device=x.device, dtype=self.dtype),
            img_ids=ids.to(self.dtype),
            joint_attention_kwargs=adapter_inputs(c),
            return_dict=False,
        )[0][:, : (h // 2) * (w // 2)].float()
        return unpack(guided(output, c, self.config.true_guidance_scale), h, w)


@lru_cache(maxsize=16)
def grid_ids(rows: int, columns: int, device: str, image: int = 0) -> Tensor:
    """[rows · columns, 3] position ids (image, row, column) of a packed grid, fp32."""
    ids = torch.full((rows, columns, 3), float(image), dtype=torch.float32)
    ids[..., 1] = torch.arange(rows, dtype=torch.float32)[:, None]
    ids[..., 2] = torch.arange(columns, dtype=torch.float32)[None, :]
    return ids.reshape(-1, 3).to(device)


def tiny_parts(in_channels: int) -> dict[str, Any]:
    """Networks, tokenizers and scheduler of a pipeline: 2 double and 4 single blocks of width 128 on an autoencoder
    that downsamples by 4; 32 tokens for 32 x 64 pixels, 3.2 M parameters in all."""
    vae = tiny.autoencoder()
    transformer = FluxTransformer2DModel(
        in_channels=in_channels,
        out_channels=4 * tiny.CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=tiny.TEXT_WIDTH,
        pooled_projection_dim=tiny.TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(**tiny.SHIFTED),
        "vae": vae,
        "text_encoder": tiny.clip(),
        "tokenizer": tiny.byte_clip_tokenizer(),
        "text_encoder_2": tiny.t5(),
        "tokenizer_2": ByT5Tokenizer(extra_ids=0, model_max_length=tiny.TEXT_TOKENS),
        "transformer": transformer,
    }


def given_embeddings(path: Path) -> dict[str, Tensor]:
    """Read a torch file with T5's states [S, D] or [1, S, D], or a dict with them as `prompt_embeds` and optionally
    `pooled_prompt_embeds` [D] or [1, D] -> `text` [S, D] and, if present, `pooled` [D].

    Raises:
        ModelFilesError: not such a file.
    """
    try:
        found: Any = load_saved(path)
    except (OSError, DamagedFile) as error:
        raise ModelFilesError(f"{path}: no torch file of tensors ({first_line(error)})") from None
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
