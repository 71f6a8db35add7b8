"""Models of the released sizes with random weights, made on the device: a benchmark needs no download.

A folder gets the configs that the released models were published with (tokenizers are the byte-level ones of the tiny
bases); with `random_weights`, `from_pretrained` of diffusers and transformers then draws weights in place of reading
them. All else is the package's own loading: `training.build`, `retouch check --memory`, the family's `from_config`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    ModelMixin,
)
from torch import nn
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)

from retouch.families import FAMILIES
from retouch.families.meta import on_meta, released_networks
from retouch.families.qwen.spec import FACTS
from retouch.families.qwen.tiny import byte_qwen_tokenizer
from retouch.families.qwen3.spec import QWEN3_4B
from retouch.families.qwen3.tiny import chat_tokenizer
from retouch.families.tiny import byte_clip_tokenizer, tiny_image_encoder, tiny_pipeline

QWEN_TEXT = FACTS["released"]["text_encoder"]

Networks = dict[str, Callable[[], Any]]
"""Folder of a component -> what makes its network."""


def clip() -> CLIPTextModel:
    """CLIP-L, of FLUX and of SD1.5: the text half of openai/clip-vit-large-patch14."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    return CLIPTextModel(CLIPTextConfig(**sizes))


def t5() -> T5EncoderModel:
    """The encoder of T5 1.1 XXL."""
    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))  # type: ignore[arg-type]


def qwen_vl() -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL-7B; marks of pictures by their ids in the byte tokenizer."""
    tokenizer = byte_qwen_tokenizer()
    text = {
        **QWEN_TEXT["text_config"],
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids: dict[str, Any] = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>")
        for name, mark in (("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"))
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=QWEN_TEXT["vision_config"], **ids)
    return Qwen2_5_VLForConditionalGeneration(config)


def autoencoder(**options: Any) -> Callable[[], AutoencoderKL]:
    """The one that FLUX and SD1.5 share but for its latents: 83.7 M parameters."""
    levels: Any = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2,
        "norm_num_groups": 32,
    }
    return lambda: AutoencoderKL(**levels, **options)


FLUX_VAE = autoencoder(
    latent_channels=16, use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159
)
SD_VAE = autoencoder(latent_channels=4, scaling_factor=0.18215)

PUBLISHED: dict[str, Networks] = {
    "flux_fill": {"vae": FLUX_VAE, "text_encoder": clip, "text_encoder_2": t5},
    "sd_inpaint": {"vae": SD_VAE, "text_encoder": clip},
    "qwen_image": {"vae": AutoencoderKLQwenImage, "text_encoder": qwen_vl},
    "flux2_klein": {"vae": AutoencoderKLFlux2, "text_encoder": lambda: Qwen3ForCausalLM(Qwen3Config(**QWEN3_4B))},
}
"""What stands beside the trained network, which the family builds itself."""


def siglip() -> SiglipVisionModel:
    """SigLIP so400m at 384 pixels, the encoder of references of FLUX and Qwen-Image."""
    sizes = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    return SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=384, patch_size=14))


def write_model(folder: Path, family: str, *, tiny: bool) -> Path:
    """A folder in the diffusers layout with configs and tokenizers alone, at the released or at the toy sizes."""
    folder.mkdir(parents=True)
    spec = FAMILIES[family].spec
    (folder / "model_index.json").write_text(json.dumps({"_class_name": spec.pipeline}), encoding="utf-8")
    toy: Any = tiny_pipeline(family) if tiny else None
    for name in spec.networks:
        made = toy.components[name] if tiny else on_meta(released(family)[name])
        if isinstance(made, ModelMixin):
            made.save_config(folder / name)
        else:
            write_config(made, folder / name)
    scheduler(family, toy).save_pretrained(folder / "scheduler")
    for name, tokenizer in tokenizers(family, toy).items():
        tokenizer.save_pretrained(folder / name)
    return folder


def released(family: str) -> Networks:
    """Every network of a family at its released size."""
    spec = FAMILIES[family].spec
    return {spec.network_name: lambda: released_networks(spec)[spec.network_name], **PUBLISHED[family]}


def write_encoder(folder: Path, *, tiny: bool) -> Path:
    """The encoder of references, as `model.train.image_encoder` takes it."""
    write_config(tiny_image_encoder() if tiny else on_meta(siglip), folder)
    return folder


def write_config(network: Any, folder: Path) -> None:
    """config.json of a network of transformers."""
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)


def scheduler(family: str, toy: Any) -> Any:
    if toy is not None:
        return toy.scheduler
    if family == "sd_inpaint":
        levels: Any = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
        return DDIMScheduler(**levels, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    if family == "flux2_klein":
        return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    terminal = 0.02 if family == "qwen_image" else None
    longest, most = (8192, 0.9) if family == "qwen_image" else (4096, 1.15)
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, max_image_seq_len=longest, max_shift=most, shift_terminal=terminal
    )


def tokenizers(family: str, toy: Any) -> dict[str, Any]:
    """Folder -> tokenizer of bytes."""
    if family == "qwen_image":
        return {"tokenizer": byte_qwen_tokenizer()}
    if family == "flux2_klein":
        return {"tokenizer": chat_tokenizer()}
    clip_tokenizer: Any = byte_clip_tokenizer()
    if toy is None:
        clip_tokenizer.model_max_length = 77
    t5_tokenizer: Any = ByT5Tokenizer(extra_ids=0, model_max_length=512)
    return {"tokenizer": clip_tokenizer} | ({"tokenizer_2": t5_tokenizer} if family == "flux_fill" else {})


@contextmanager
def random_weights(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Inside, networks are loaded with random weights, on the device."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(make: Callable[[], Any], dtype: torch.dtype | None) -> Any:
        with init_empty_weights(include_buffers=False):
            network = make()
        return fill(network, device, dtype or torch.float32, generator)

    def of_diffusers(cls: Any, path: Any, *, subfolder: str | None = None, dtype: Any = None, **_: Any) -> Any:
        config = cls.load_config(path, subfolder=subfolder)
        return draw(lambda: cls.from_config(config), dtype), {"missing_keys": [], "unexpected_keys": []}

    def of_transformers(cls: Any, path: Any, *, subfolder: str = "", dtype: Any = None, **_: Any) -> Any:
        config = cls.config_class.from_pretrained(path, subfolder=subfolder)
        return draw(lambda: cls(config), dtype), {"missing_keys": [], "unexpected_keys": []}

    replaced: list[tuple[Any, Any]] = [(ModelMixin, of_diffusers), (PreTrainedModel, of_transformers)]
    kept = [kind.__dict__["from_pretrained"] for kind, _ in replaced]
    for kind, loader in replaced:
        kind.from_pretrained = classmethod(loader)
    try:
        yield
    finally:
        for (kind, _), loader in zip(replaced, kept, strict=True):
            kind.from_pretrained = loader


@torch.no_grad()
def fill(
    network: nn.Module, device: torch.device, dtype: torch.dtype, generator: torch.Generator, *, repeats: bool = False
) -> nn.Module:
    """Weights of a network on the meta device, drawn: matrices with variance 1 / fan-in, so that depth does no harm;
    scales 1, shifts 0. What modules share they share.

    Args:
        repeats: draw a million numbers and repeat them in every matrix, which takes a twentieth of the time.
    """
    pool = torch.randn(1_000_003 if repeats else 0, device=device, generator=generator)
    drawn: dict[nn.Parameter, nn.Parameter] = {}
    for module in network.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in drawn:
                value = torch.zeros(parameter.shape, device=device, dtype=dtype)
                if not key.endswith("bias"):
                    is_matrix = parameter.ndim > 1 and key != "gamma"
                    std = value[0].numel() ** -0.5 if is_matrix else 1
                    if is_matrix and repeats:
                        value = (pool.to(dtype) * std).repeat(-(-value.numel() // len(pool)))[: value.numel()]
                        value = value.view(parameter.shape).contiguous()
                    else:
                        value = value.normal_(0, std, generator=generator) if is_matrix else value + 1
                drawn[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            setattr(module, key, drawn[parameter])
    return network.to(device)
