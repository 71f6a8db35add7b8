"""Shared parts of the families on FLUX.2's network: autoencoder, tokens, positions, schedule, and toy networks.

The families differ in their text encoder and its chat, and in guidance: classifier-free, or embedded, an input of the
network. Latents are 2 x 2 patches of the autoencoder's cells, normalized by the statistics of its batch norm. The
tokens of the noisy latents are followed by those of the source and of the reference, which differ in the first axis of
their positions: 0, 10, 20. Inpainting blends latents as well (`retouch.families.blending`). Everything equals
diffusers' pipelines on the same weights, sizes and states (tests/families/test_flux2_*.py), with these differences:
images keep the size of the examples, and a mask is binary on the latent grid.

Legend: B samples, C latent channels, h w latent sides, N image tokens, S text tokens, D width.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Self

import torch
import transformers
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel
from torch import Tensor, nn
from transformers import AutoTokenizer

from retouch.core.schedule import FlowSchedule, Schedule
from retouch.families.blending import blended, blending_inputs, edited_inputs
from retouch.families.diffusion import FamilyModel
from retouch.families.flux2.spec import Flux2Section
from retouch.families.guidance import doubled, guided, halves
from retouch.families.inputs import reference_pixels
from retouch.families.loading import ModelFilesError, load_component
from retouch.families.text import Networks, TextEncoders, drop_layers
from retouch.families.tiny import start_orthogonal
from retouch.families.vae import Autoencoder
from retouch.types import Condition, Example


class Flux2Autoencoder(Autoencoder):
    """The autoencoder of FLUX.2: latents are 2 x 2 patches of its cells, normalized channel by channel."""

    @property
    def downsampling(self) -> int:
        return 2 * super().downsampling

    @property
    def channels(self) -> int:
        return 4 * super().channels

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [1, C, 1, 1] fp32 of the patches, from the buffers of the batch norm."""
        norm = self.vae.bn
        mean, variance = (buffer.float().view(1, -1, 1, 1) for buffer in (norm.running_mean, norm.running_var))
        return mean, torch.sqrt(variance + self.vae.config.batch_norm_eps)

    def _encode(self, images: Tensor) -> Tensor:
        cells = self.vae.encode(images.to(self.device, self.vae.dtype)).latent_dist.mode().float()
        mean, std = self.statistics()
        return (nn.functional.pixel_unshuffle(cells, 2) - mean) / std

    def _decode(self, latents: Tensor) -> Tensor:
        mean, std = self.statistics()
        cells = nn.functional.pixel_shuffle(latents.to(self.device) * std + mean, 2)
        return self.vae.decode(cells.to(self.vae.dtype)).sample


class Flux2Model(FamilyModel):
    """Images, schedule and predictions of a family: a prompt, with a source or without, and a mask where there is a
    source. The text is the family's own."""

    autoencoder_class = Flux2Autoencoder
    tokenizer_class: ClassVar[Any] = AutoTokenizer
    """Class that tokenizer/ is loaded by."""
    patch = 1
    embeds_guidance: ClassVar[bool]
    """Whether the scale of guidance is an input of the network."""

    @staticmethod
    @abstractmethod
    def language_model(encoder: Any) -> Any:
        """The part of the text encoder whose states condition the network."""

    @staticmethod
    @abstractmethod
    def states(model: Any, tokenizer: Any, length: int) -> Any:
        """A callable from prompts to states [B, S, D] of a `language_model`, for `retouch.families.text.TextEncoders`.

        Args:
            model: None where prompts are only counted.
            length: S, tokens that a prompt is padded or cut to.
        """

    @classmethod
    def kept(cls, name: str, network: Any) -> Any:
        """The language model of the text encoder, up to the last layer whose states are used; others whole."""
        if name != "text_encoder":
            return network
        model = cls.language_model(network)
        drop_layers(model, max(quarters(model)))
        return model

    @classmethod
    def text_encoders(cls, config: Flux2Section, path: str, network: Networks, *, embedded: bool) -> Mapping[str, Any]:
        encoder = network(getattr(transformers, config.spec.networks["text_encoder"]), "text_encoder")
        model = None if encoder is None else cls.language_model(encoder)
        tokenizer = load_component(cls.tokenizer_class, path, "tokenizer", None)
        states = cls.states(model, tokenizer, config.max_sequence_length)  # counts the layers
        if encoder is not None:
            cls.kept("text_encoder", encoder)
        return {"text": states}

    @classmethod
    def from_pipeline(cls, pipeline: Any, length: int = 128, **options: Any) -> Self:
        """The networks of a diffusers pipeline in memory, prompts padded to `length` tokens.

        Args:
            options: of the section of the run file.
        """
        states = cls.states(cls.language_model(pipeline.text_encoder), pipeline.tokenizer, length)
        config = cls.section.model_validate({"path": "in memory", **options})
        text = TextEncoders({"text": states})
        return cls(pipeline.transformer, pipeline.vae, text, pipeline.scheduler, config=config)

    def __init__(self, network: Any, *parts: Any, **options: Any) -> None:
        super().__init__(network, *parts, **options)
        if network.config.guidance_embeds != self.embeds_guidance:
            has, needs = ("no", "one") if self.embeds_guidance else ("a", "none")
            key = "model.path" if self.config.transformer is None else "model.transformer"
            raise ModelFilesError(
                f"{key}: the transformer has {has} guidance embedding, but {self.spec.family} needs {needs}; set "
                f"model.family to the one of these weights, or use {self.spec.hub_ids[0]}"
            )

    def schedule(self, num_steps: int, size: tuple[int, int]) -> Schedule:
        """With a shift of the image tokens and of the number of steps; a scheduler without dynamic shifting has its
        own."""
        config = self.scheduler.config
        if not config.get("use_dynamic_shifting", False):
            return super().schedule(num_steps, size)
        shift = self.dynamic_shift(flux2_shift(self.image_tokens(size), num_steps))
        return FlowSchedule.make(num_steps, shift, config.get("shift_terminal"))

    @torch.no_grad()
    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, the scale of guidance and, where there are any, latents of the sources and references, and the mask, of
        examples of one size; with classifier-free guidance a `guidance_scale` above 1 adds the empty prompt, and
        `predict` then doubles the batch of the network.

        Raises:
            ValueError: some examples with a source, a mask or a reference and some without, neither a source nor a
                size, or guidance of a model that was distilled to sample without.
        """
        tensors = self.guided_texts(examples, guidance_scale)
        if all(e.source is None for e in examples):
            images, mask, size = blending_inputs(self, examples)  # nothing to blend: the common size
        else:
            images, mask, size = edited_inputs(self, examples, rounded_mask_cells)
        if self.config.reference_images:
            references = torch.stack([reference_pixels(e, size) for e in examples]).to(self.device)
            images["reference_latents"] = self.autoencoder.encode_once(references)
        return Condition(tensors | images, mask, size)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B], with guidance; outside the mask the one that leads to the source."""
        c = condition.tensors
        images = [x, *(c[name] for name in ("source_latents", "reference_latents") if name in c)]
        tokens = torch.cat([image.flatten(2).transpose(1, 2) for image in images], 1).to(self.dtype)
        # the pipeline rounds 1000 sigma to the network's dtype before it divides; the network multiplies again
        timestep, text = (t * 1000).to(self.dtype) / 1000, halves(c, "text")
        output = network(
            hidden_states=doubled(tokens, c),
            timestep=doubled(timestep, c),
            guidance=c["guidance"] if self.embeds_guidance else None,
            encoder_hidden_states=text.to(self.dtype),
            txt_ids=_text_positions(text.shape[1], str(x.device)),
            img_ids=_image_positions(tuple((i.shape[2], i.shape[3]) for i in images), str(x.device)),
            return_dict=False,
        )[0][:, : x.shape[2] * x.shape[3]].float()
        return blended(guided(output, c).transpose(1, 2).unflatten(2, x.shape[2:]), x, t, c)


def flux2_shift(tokens: int, num_steps: int) -> float:
    """The shift e^mu of FLUX.2 for an image of `tokens` and a number of sampling steps: mu is linear in both, and in
    the tokens alone above 4300. 7.3 at 512 x 512 and 10 steps, 6.4 at 28."""
    at_200_steps = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return math.exp(at_200_steps)
    at_10_steps = 8.73809524e-05 * tokens + 1.89833333
    return math.exp(at_200_steps + (num_steps - 200) * (at_200_steps - at_10_steps) / 190)


def rounded_mask_cells(mask: Tensor, factor: int) -> Tensor:
    """A mask [B, 1, H, W] at the cells of the latents [B, 1, h, w], in {0, 1}: interpolated as the pipeline does it,
    then rounded, because a cell can only be repainted or kept. Other families take the nearest pixel, as their own
    pipelines do (`retouch.families.blending.mask_cells`); at the edge of a mask the two differ."""
    size = (mask.shape[2] // factor, mask.shape[3] // factor)
    return (nn.functional.interpolate(mask, size=size, mode="bilinear") >= 0.5).to(mask)


def tiny_parts(width: int, guidance_embeds: bool) -> dict[str, Any]:
    """Networks and scheduler of a pipeline without its text encoder: 2 double and 4 single blocks of width 128 on an
    autoencoder that downsamples by 4.

    Args:
        width: of the text encoder, of which three layers are taken.
    """
    down, up = "DownEncoderBlock2D", "UpDecoderBlock2D"
    vae = AutoencoderKLFlux2(
        down_block_types=(down,) * 3,
        up_block_types=(up,) * 3,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=4,
        sample_size=64,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    start_orthogonal(vae)
    assert vae.bn.running_mean is not None and vae.bn.running_var is not None
    vae.bn.running_mean.normal_(std=0.2)  # 0 and 1 would hide that latents are normalized
    vae.bn.running_var.uniform_(0.5, 2.0)
    transformer = Flux2Transformer2DModel(
        in_channels=32,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=3 * width,
        timestep_guidance_channels=32,
        axes_dims_rope=(8, 8, 8, 8),
        guidance_embeds=guidance_embeds,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return {"scheduler": scheduler, "vae": vae, "transformer": transformer}


def quarters(model: Any) -> tuple[int, ...]:
    """Entries of `hidden_states` that condition the network, of a whole language model: after a quarter, half and three
    quarters of its layers; none of None."""
    if model is None:
        return ()
    count = model.config.num_hidden_layers
    return count // 4, count // 2, 3 * count // 4


@lru_cache(maxsize=16)
def _text_positions(count: int, device: str) -> Tensor:
    """[S, 4] int64: (0, 0, 0, n)."""
    return nn.functional.pad(torch.arange(count, dtype=torch.int64, device=device)[:, None], (3, 0))


@lru_cache(maxsize=16)
def _image_positions(sizes: tuple[tuple[int, int], ...], device: str) -> Tensor:
    """[N, 4] int64: (10 i, row, column, 0) of the i-th image of (h, w)."""
    grids = [
        torch.cartesian_prod(
            *(torch.tensor(list(axis), dtype=torch.int64) for axis in ([10 * i], range(h), range(w), [0]))
        )
        for i, (h, w) in enumerate(sizes)
    ]
    return torch.cat(grids).to(device)
