"""A LoRA in other programs: diffusers with and without the file's metadata, and ComfyUI by its key map.

ComfyUI is not installed here. Its map is derived again from the rules that `comfy/lora.py` and `comfy/utils.py` follow:
each adapted weight of diffusers is a weight of the original network, or some rows of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retouch.adapters.about import About, base_name
from retouch.adapters.export import export
from retouch.adapters.lora import FILE, add_lora
from retouch.adapters.trainee import LoraWeights
from retouch.engine import Policy
from retouch.families import FAMILIES
from retouch.families.diffusion import pack
from retouch.families.loading import family_class
from retouch.families.meta import released_networks
from retouch.families.qwen.spec import NEGATIVE
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    noise_for,
    sample,
)
from tests.families.conftest import random_example, with_point_posterior
from tests.selection import default

RANK, ALPHA = 4, 6.0
"""Their ratio is no power of 2 and far from 1: a program that misses it applies 2/3 of the update."""

ADAPTED = ["flux_fill", "sd_inpaint", "qwen_image"]
SIZE, STEPS, SEED = (32, 64), 2, 11
ABOUT = About("run-step-000004", "grpo with retouch, step-000004", "The text is '{text}'.")


@dataclass(frozen=True)
class Adapted:
    """A network with LoRA of random weights, and what was written of it.

    Attributes:
        model: the family's, with the adapted network.
        base: weights of the network without LoRA, by name.
        fused: with it.
        weights: folder of the checkpoint's file.
    """

    family: str
    model: Any
    base: dict[str, Tensor]
    fused: dict[str, Tensor]
    weights: Path

    @property
    def name(self) -> str:
        return "unet" if self.family == "sd_inpaint" else "transformer"

    def export(self, to: str, out: Path) -> Path:
        return export(FAMILIES[self.family](), self.weights, to, out, ABOUT)


def fresh(family: str) -> Any:
    made = tiny_pipeline(family, seed=3)
    if family == "qwen_image":
        prefix = made.prompt_template_encode.partition("{}")[0]
        made.prompt_template_encode_start_idx = len(made.tokenizer(prefix).input_ids)  # 34 with the released tokenizer
        made.set_progress_bar_config(disable=True)
        return made
    return with_point_posterior(made)


@pytest.fixture(scope="module", params=ADAPTED)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """LoRA on every linear and convolutional layer, so that every name is tried."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    model: Any = family_class(family)
    model = model.from_pipeline(fresh(family), *([96] if family == "qwen_image" else []))
    network = model.network
    base = {name: t.clone() for name, t in network.state_dict().items()}
    layers = [name for name, m in network.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    add_lora(network, RANK, ALPHA, layers)
    policy, draw = Policy(network), torch.Generator().manual_seed(0)
    policy.load({name: 0.2 * torch.randn(t.shape, generator=draw) for name, t in policy.state().items()})
    LoraWeights(RANK, ALPHA, "unet" if family == "sd_inpaint" else "transformer").save(policy.state(), folder)
    deltas = {f"{name}.weight": network.get_submodule(name).get_delta_weight("default") for name in layers}
    fused = {name: t + deltas[name].detach() if name in deltas else t for name, t in base.items()}
    return Adapted(family, model, base, fused, folder)


# --- diffusers ---


def called(family: str, pipe: Any) -> Any:
    """The image of a stock pipeline, [1, H, W, 3] in [0, 1]."""
    example = random_example(1, *SIZE)
    channels = 8 if family == "flux_fill" else 4
    noise, _ = noise_for((channels, SIZE[0] // 4, SIZE[1] // 4), [SEED])
    common = {"prompt": example.prompt, "height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS}
    common |= {"output_type": "np", "generator": torch.Generator().manual_seed(0)}
    if family == "qwen_image":
        return pipe(**common, negative_prompt=NEGATIVE, true_cfg_scale=4.0, latents=pack(noise)).images
    image = torch.from_numpy(np.array(example.source)).permute(2, 0, 1)[None] / 255.0
    mask = torch.from_numpy(np.array(example.mask))[None, None] / 255.0
    inputs = {**common, "image": image, "mask_image": mask}
    if family == "flux_fill":
        return pipe(**inputs, guidance_scale=30.0, latents=pack(noise), max_sequence_length=TEXT_TOKENS).images
    with patch.object(pipe, "check_inputs"):  # it wants multiples of 8 of every autoencoder
        return pipe(**inputs, guidance_scale=7.5, latents=noise).images


def ours(adapted: Adapted) -> Any:
    example = random_example(1, *SIZE)
    if adapted.family == "qwen_image":  # the pipeline takes no source
        example = type(example)(1, example.prompt, size=SIZE)
    guidance = {"flux_fill": 30.0, "sd_inpaint": 7.5, "qwen_image": 4.0}[adapted.family]
    model = adapted.model
    plan = ode_plan(model.schedule(STEPS, SIZE))
    final = sample(model, model.network, plan, model.encode([example], guidance), [SEED]).final
    return ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1).numpy()


def levels(a: Any, b: Any) -> int:
    """Largest difference in grey levels."""
    return int(np.abs(np.round(a * 255) - np.round(b * 255)).max())


def without_metadata(file: Path, folder: Path) -> Path:
    folder.mkdir()
    save_file(load_file(file), folder / FILE)
    return folder


@pytest.mark.parametrize("adapted", default(ADAPTED, "flux_fill".__eq__), indirect=True)
def test_diffusers_draws_the_same_image_whether_it_reads_the_metadata_or_not(adapted: Adapted, tmp_path: Path) -> None:
    """Of the exported file; of the checkpoint's, with metadata alone."""
    exported = adapted.export("diffusers-lora", tmp_path / "exported")
    folders = {
        "exported": exported.parent,
        "exported, stripped": without_metadata(exported, tmp_path / "exported-bare"),
        "checkpoint": adapted.weights,
        "checkpoint, stripped": without_metadata(adapted.weights / FILE, tmp_path / "checkpoint-bare"),
    }
    expected, found = ours(adapted), {}
    for name, folder in folders.items():
        pipe = fresh(adapted.family)
        pipe.load_lora_weights(str(folder))
        found[name] = levels(called(adapted.family, pipe), expected)
    assert max(found["exported"], found["exported, stripped"], found["checkpoint"]) <= 1, found
    assert found["checkpoint, stripped"] > 1, found
    assert levels(called(adapted.family, fresh(adapted.family)), expected) > 1


def test_the_metadata_of_an_exported_file_agrees_with_its_weights(adapted: Adapted, tmp_path: Path) -> None:
    exported = adapted.export("diffusers-lora", tmp_path / "exported")
    assert exported.name == "run-step-000004.safetensors"
    with safe_open(exported, "pt") as opened:
        about = opened.metadata()
    adapter = json.loads(about["lora_adapter_metadata"])
    assert (adapter[f"{adapted.name}.r"], adapter[f"{adapted.name}.lora_alpha"]) == (RANK, RANK)
    before, after = load_file(adapted.weights / FILE), load_file(exported)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor * (ALPHA / RANK) if ".lora_B." in key else tensor)
    one = load_file(adapted.export("safetensors", tmp_path / "one"))
    assert one.keys() == after.keys() and all(torch.equal(one[key], t) for key, t in after.items())


ARCHITECTURES = {"flux_fill": "flux-1-dev/lora", "sd_inpaint": "stable-diffusion-v1-inpainting/lora",
                 "qwen_image": "qwen-image/lora"}  # fmt: skip


@pytest.mark.parametrize("to", ["diffusers-lora", "comfyui", "safetensors"])
def test_a_file_says_what_it_is(adapted: Adapted, tmp_path: Path, to: str) -> None:
    """By the keys that ComfyUI, Civitai and kohya's tools show: ModelSpec's, and those of sd-scripts."""
    with safe_open(adapted.export(to, tmp_path / to), "pt") as opened:
        found = opened.metadata()
    expected = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": ARCHITECTURES[adapted.family],
        "modelspec.title": "run-step-000004",
        "modelspec.description": f"grpo with retouch, step-000004, on {FAMILIES[adapted.family]().path}",
        "modelspec.trigger_phrase": "The text is '{text}'.",
        "ss_output_name": "run-step-000004",
        "ss_sd_model_name": FAMILIES[adapted.family]().path,
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(RANK),
        "ss_network_alpha": str(RANK),
    }
    assert {key: found[key] for key in expected} == expected
    assert ("modelspec.prediction_type" in found) == (adapted.family == "sd_inpaint")


def test_the_base_is_named_without_its_place_on_this_machine() -> None:
    model = FAMILIES["qwen_image"].model_validate(
        {
            "path": "/home/somebody/models/Qwen-Image",
            "distillation_lora": {"path": "owner/few", "weight_name": "few.st"},
        }
    )
    assert base_name(model) == "Qwen-Image with few.st"
    other = {"transformer": {"path": "/data/another"}}
    assert base_name(FAMILIES["flux_fill"].model_validate(other)) == "another"
    assert base_name(FAMILIES["flux_fill"]()) == FAMILIES["flux_fill"].spec.hub_ids[0]


def test_a_name_that_diffusers_does_not_look_at_is_not_given(adapted: Adapted, tmp_path: Path) -> None:
    """`load_lora_weights(folder)` skips files with these words in their names."""
    model = FAMILIES[adapted.family]()
    for name in ("my-checkpoint-run", "a-scheduler", "optimizer"):
        path = export(model, adapted.weights, "diffusers-lora", tmp_path / name, About(name))
        assert path.name == FILE
        fresh(adapted.family).load_lora_weights(str(path.parent))
    assert export(model, adapted.weights, "comfyui", tmp_path / "c", About("optimizer")).name == "optimizer.safetensors"


# --- ComfyUI ---


@dataclass(frozen=True)
class Target:
    """Where ComfyUI puts an update.

    Attributes:
        key: weight of the original network.
        rows: (first, count) of it; None: all.
        swapped: the halves change places, since the original has shift before scale.
    """

    key: str
    rows: tuple[int, int] | None = None
    swapped: bool = False


FLUX_DOUBLE = {
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
FLUX_OUTER = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    **{
        f"time_text_embed.{ours}.linear_{n}": f"{theirs}.{layer}"
        for ours, theirs in (
            ("timestep_embedder", "time_in"),
            ("text_embedder", "vector_in"),
            ("guidance_embedder", "guidance_in"),
        )
        for n, layer in ((1, "in_layer"), (2, "out_layer"))
    },
}


def flux_targets(config: Any) -> Iterator[tuple[str, Target]]:
    """(diffusers' module, target) of FLUX: q, k and v are thirds of one weight, in single blocks beside the MLP."""
    h = config.num_attention_heads * config.attention_head_dim
    for i in range(config.num_layers):
        here, there = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for names, stream in ((("to_q", "to_k", "to_v"), "img"), (("add_q_proj", "add_k_proj", "add_v_proj"), "txt")):
            for n, name in enumerate(names):
                yield f"{here}.attn.{name}", Target(f"{there}.{stream}_attn.qkv.weight", (n * h, h))
        for name, other in FLUX_DOUBLE.items():
            yield f"{here}.{name}", Target(f"{there}.{other}.weight")
    for i in range(config.num_single_layers):
        here, there = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        for n, name in enumerate(("to_q", "to_k", "to_v")):
            yield f"{here}.attn.{name}", Target(f"{there}.linear1.weight", (n * h, h))
        yield f"{here}.proj_mlp", Target(f"{there}.linear1.weight", (3 * h, 4 * h))
        yield f"{here}.norm.linear", Target(f"{there}.modulation.lin.weight")
        yield f"{here}.proj_out", Target(f"{there}.linear2.weight")
    for name, other in FLUX_OUTER.items():
        yield name, Target(f"{other}.weight")
    yield "norm_out.linear", Target("final_layer.adaLN_modulation.1.weight", swapped=True)


RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_OUTER = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def unet_places(config: Any) -> dict[str, str]:
    """Part of diffusers' U-Net -> part of the original, which numbers blocks in one row."""
    layers, levels_ = config.layers_per_block, len(config.block_out_channels)
    found = {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
    found |= {"mid_block.resnets.1": "middle_block.2", **UNET_OUTER}
    for level in range(levels_):
        for i in range(layers):
            there = f"input_blocks.{1 + level * (layers + 1) + i}"
            found[f"down_blocks.{level}.resnets.{i}"] = f"{there}.0"
            found[f"down_blocks.{level}.attentions.{i}"] = f"{there}.1"
        found[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{(level + 1) * (layers + 1)}.0.op"
        attends = "CrossAttn" in config.up_block_types[level]
        for i in range(layers + 1):
            there = f"output_blocks.{level * (layers + 1) + i}"
            found[f"up_blocks.{level}.resnets.{i}"] = f"{there}.0"
            found[f"up_blocks.{level}.attentions.{i}"] = f"{there}.1"
        last = f"output_blocks.{level * (layers + 1) + layers}"
        found[f"up_blocks.{level}.upsamplers.0.conv"] = f"{last}.{2 if attends else 1}.conv"
    return found


def unet_module(places: dict[str, str], module: str) -> str:
    """Name in the original of a module of diffusers' U-Net."""
    here = max((part for part in places if f"{module}.".startswith(f"{part}.")), key=len)
    rest = module.removeprefix(here).removeprefix(".")
    rest = RESNET.get(rest, rest) if ".resnets." in here else rest
    return ".".join(part for part in (places[here], rest) if part)


def targets(adapted: Adapted) -> dict[str, Target]:
    """What ComfyUI accepts in a file (without the ending for one of the factors) -> where it goes."""
    config = adapted.model.network.config
    if adapted.family == "flux_fill":
        return {f"transformer.{module}": target for module, target in flux_targets(config)}
    modules = {name.removesuffix(".weight") for name in adapted.base if name.endswith(".weight")}
    if adapted.family == "qwen_image":  # its weights have diffusers' names
        return {f"transformer.{module}": Target(f"{module}.weight") for module in modules}
    places = unet_places(config)
    return {
        f"lora_unet_{module.replace('.', '_')}": Target(f"{unet_module(places, module)}.weight") for module in modules
    }


ENDINGS = (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight"))


def patched(weights: dict[str, Tensor], file: Path, known: dict[str, Target]) -> dict[str, Tensor]:
    """Original weights with every update of a file added; nothing of it may be left."""
    tensors, out = load_file(file), {key: t.clone() for key, t in weights.items()}
    for name, target in known.items():
        for up, down in ENDINGS:
            if f"{name}.{up}" not in tensors:
                continue
            b, a = tensors.pop(f"{name}.{up}"), tensors.pop(f"{name}.{down}")
            delta = float(tensors.pop(f"{name}.alpha")) / a.shape[0] * (b.flatten(1) @ a.flatten(1))
            first, count = target.rows or (0, len(out[target.key]))
            part = out[target.key][first : first + count]
            part += (torch.cat(delta.chunk(2)[::-1]) if target.swapped else delta).view(part.shape)
    assert not tensors, f"not loaded: {list(tensors)[:3]}"
    return out


def original(weights: dict[str, Tensor], known: dict[str, Target]) -> dict[str, Tensor]:
    """diffusers' weights in the original layout: those that can be adapted."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        module, _, end = name.rpartition(".")
        file_name = next(
            (n for n in (f"transformer.{module}", f"lora_unet_{module.replace('.', '_')}") if n in known), ""
        )
        if end == "weight" and file_name:
            target = known[file_name]
            row = target.rows[0] if target.rows else 0
            parts.setdefault(target.key, {})[row] = torch.cat(tensor.chunk(2)[::-1]) if target.swapped else tensor
    return {key: torch.cat([rows[first] for first in sorted(rows)]) for key, rows in parts.items()}


def test_comfyui_applies_the_same_update(adapted: Adapted, tmp_path: Path) -> None:
    """To every linear and convolutional layer, of weights in its own layout."""
    file, known = adapted.export("comfyui", tmp_path / "out"), targets(adapted)
    found = patched(original(adapted.base, known), file, known)
    expected = original(adapted.fused, known)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, atol=1e-5, rtol=1e-5, msg=key)
    with safe_open(file, "pt") as opened:
        names = set(opened.keys())
    assert len(names) == 3 * sum(name.endswith(".alpha") for name in names)


def test_names_of_the_original_unet_are_those_that_diffusers_converts() -> None:
    """The other direction, by diffusers' own code, at the sizes of the released network."""
    with torch.device("meta"):
        unet = released_networks(SdInpaintModel.spec)["unet"]
    places = unet_places(unet.config)
    stored = {
        f"model.diffusion_model.{unet_module(places, name.rpartition('.')[0])}.{name.rpartition('.')[2]}": t
        for name, t in unet.state_dict().items()
    }
    converted = convert_ldm_unet_checkpoint(stored, unet.config)
    assert {name: t.shape for name, t in converted.items()} == {n: t.shape for n, t in unet.state_dict().items()}
