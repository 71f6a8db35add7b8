"""A tiny model of every family: the trained base of the package, or random weights of the same classes."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from retouch.adapters.hosts import host_of
from retouch.adapters.shape import AdapterShape
from retouch.families import FAMILIES
from retouch.families.image_encoder import TINY
from retouch.families.meta import released_networks
from retouch.families.tiny import TEXT_WIDTH, byte_clip_tokenizer, bytes_to_characters, tiny_pipeline
from retouch.families.unet.tiny import unet
from retouch.files.model_files import tiny_path

PACKAGED = [family for family in FAMILIES if tiny_path(family).is_dir()]
"""Families whose trained tiny base comes with the package."""

WITH_BASE = [family for family in PACKAGED if family != "qwen_image_edit"]
"""Those of them that write words into masks; the other one recolours shapes."""


@cache
def tiny_model(family: str) -> str:
    """What `model.path` takes."""
    if family in PACKAGED:
        return "tiny"
    folder = Path(tempfile.mkdtemp(prefix=f"retouch-{family}-"))
    tiny_pipeline(family).save_pretrained(folder)
    return str(folder)


def released_network(family: str) -> Any:
    """The network at its released size on the meta device, alone: with its text encoders it takes twice as long."""
    spec = FAMILIES[family].spec
    name = spec.network_name
    return released_networks(replace(spec, released={name: spec.released[name]}))[name]


@cache
def shallow_flux() -> str:
    """The tiny FLUX.1-Fill with two of its six blocks, one of each kind: for runs that are only compared."""
    whole, folder = tiny_path("flux_fill"), Path(tempfile.mkdtemp(prefix="retouch-shallow-"))
    for part in whole.iterdir():
        if part.name != "transformer":
            (folder / part.name).symlink_to(part)
    network: Any = FluxTransformer2DModel.from_pretrained(whole / "transformer")
    network.register_to_config(num_layers=1, num_single_layers=1)
    network.transformer_blocks = network.transformer_blocks[:1]
    network.single_transformer_blocks = network.single_transformer_blocks[-1:]
    network.save_pretrained(folder / "transformer")
    return str(folder)


@cache
def narrow_sd() -> str:
    """The tiny Stable Diffusion for inpainting with random weights in a U-Net of a third of its width."""
    whole, folder = tiny_path("sd_inpaint"), Path(tempfile.mkdtemp(prefix="retouch-narrow-"))
    for part in whole.iterdir():
        if part.name != "unet":
            (folder / part.name).symlink_to(part)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unet((16, 32), 4, TEXT_WIDTH).save_pretrained(folder / "unet")
    return str(folder)


RELEASED_PARTS = {"image_proj": "image_proj_mlp", "ip_adapter": "attn_adapter"}
"""What Calligrapher's file calls its parts; the query-former has the same name everywhere."""

UNUSED = {
    "attn_adapter": {"0.norm_added_k.weight": torch.ones(32)},
    "image_proj_mlp": {"position_ids": torch.arange(3)},
}
"""Tensors of a file that no adapter has: of a norm without parameters, and a buffer."""


def tiny_calligrapher(path: Path) -> Path:
    """A style adapter of the tiny FLUX.1-Fill, written as Calligrapher's file is: two heads, 128 tokens, legacy names,
    and the tensors of `UNUSED`. Its weights are random: it changes every image."""
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    host, encoder = host_of(network), json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    shape = AdapterShape("mlp+query_former", encoder["hidden_size"], 128, host.token_width(), host.inner())
    draw = torch.Generator().manual_seed(0)
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, size in shape.tensors().items():
        part, _, name = key.partition(".")
        parts.setdefault(RELEASED_PARTS.get(part, part), {})[name] = torch.randn(size, generator=draw) * 0.05
    torch.save({part: tensors | UNUSED.get(part, {}) for part, tensors in parts.items()}, path)
    return path


def attentive(pipeline: Any) -> Any:
    """Random weights hardly look at what they are shown. Larger ones do: another picture moves a pixel by some
    thousandths, and states of the text by more when their places change."""
    with torch.no_grad():
        for name, weight in pipeline.transformer.named_parameters():
            if weight.ndim > 1 and ("_mod." in name or "attn" in name or "time_text" in name):
                weight.mul_(2)
        for name, weight in pipeline.text_encoder.model.language_model.named_parameters():
            if weight.ndim > 1 and "self_attn" in name:
                weight.mul_(10)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@cache
def tiny_clip() -> str:
    """A `CLIPModel` of toy size with random weights, its tokenizer and its image processor, as they are released."""
    from transformers import CLIPConfig, CLIPModel

    folder = Path(tempfile.mkdtemp(prefix="retouch-clip-"))
    torch.manual_seed(0)
    tokenizer: Any = byte_clip_tokenizer()
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config={**tower, "vocab_size": len(tokenizer), "max_position_embeddings": 77,
                     "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )  # fmt: skip
    CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 32}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.48, 0.46, 0.41],
        "image_std": [0.27, 0.26, 0.28], "do_convert_rgb": True,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


VLM_MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
VLM_MARKS += ["<|video_pad|>"]


@cache
def tiny_vlm() -> str:
    """A two-layer Qwen2.5-VL over bytes with random weights; "yes", "No" and their like are tokens beside the bytes."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    path = Path(tempfile.mkdtemp(prefix="retouch-vlm-"))
    vocabulary = {chr(c): i for i, c in enumerate(bytes_to_characters())}
    tokens = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokens.add_special_tokens({"additional_special_tokens": VLM_MARKS})
    tokens.add_tokens(["yes", " yes", "no", "No"])
    ids = {mark: tokens.convert_tokens_to_ids(mark) for mark in VLM_MARKS}
    text = {
        "vocab_size": len(tokens), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"], vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():  # answers that depend on the picture, and not all alike
        model.lm_head.weight.normal_(0, 0.4)
        for parameter in model.model.visual.parameters():
            parameter.mul_(3)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=64 * 28 * 28).save_pretrained(path)
    return str(path)
