"""A few-step LoRA merged as the network is loaded, against diffusers' `load_lora_weights` and `fuse_lora`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers.loaders.lora_pipeline import QwenImageLoraLoaderMixin
from safetensors.torch import save_file
from torch import Tensor

from retouch.adapters.trainee import make_trainable
from retouch.families.base import DistillationLora, TrainLora
from retouch.families.diffusion import pack
from retouch.families.loading import ModelFilesError, load_model
from retouch.families.qwen.distillation import _read  # pyright: ignore[reportPrivateUsage]
from retouch.families.qwen.spec import NEGATIVE
from retouch.families.qwen_image.model import QwenImage
from retouch.families.qwen_image.spec import QwenImageModel
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    noise_for,
    sample,
)
from retouch.types import Example
from tests.tiny_models import attentive

RANK, SCALE, SIZE = 2, 0.5, (32, 32)
LIGHTNING: dict[str, Any] = {
    "base_shift": math.log(3), "max_shift": math.log(3), "shift": 1.0, "shift_terminal": None,
    "base_image_seq_len": 256, "max_image_seq_len": 8192, "use_dynamic_shifting": True,
    "time_shift_type": "exponential", "num_train_timesteps": 1000,
}  # fmt: skip
"""The schedule that Qwen-Image-Lightning is published with."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen")
    attentive(tiny_pipeline("qwen_image", seed=3)).save_pretrained(path)
    return path


def factors(folder: Path) -> dict[str, Tensor]:
    """Random factors of some weights: module -> A [R, D] under lora_A, B [D, R] under lora_B."""
    network = QwenImagePipeline.from_pretrained(folder).transformer
    torch.manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name in ("attn.to_q", "attn.add_k_proj", "attn.to_out.0", "img_mlp.net.2"):
        weight = network.get_submodule(f"transformer_blocks.0.{name}").weight
        tensors[f"transformer_blocks.0.{name}.lora_A.weight"] = torch.randn(RANK, weight.shape[1]) * 0.3
        tensors[f"transformer_blocks.0.{name}.lora_B.weight"] = torch.randn(weight.shape[0], RANK) * 0.3
    return tensors


def diffusers_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"transformer.{name}": tensor for name, tensor in tensors.items()}


def lightning_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """lora_down, lora_up and .alpha, as Qwen-Image-Lightning has it; alpha halves the update."""
    names = {name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up") for name in tensors}
    alphas = {name.replace("lora_A.weight", "alpha"): torch.tensor(RANK / 2) for name in tensors if "lora_A" in name}
    return {names[name]: tensor for name, tensor in tensors.items()} | alphas


def kohya_layout(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    flat: dict[str, Tensor] = {}
    for name, tensor in lightning_layout(tensors).items():
        module, _, rest = name.partition(".lora_") if ".lora_" in name else name.rpartition(".")
        rest = f"lora_{rest}" if ".lora_" in name else rest
        flat[f"lora_unet_{module.replace('.', '_')}.{rest}"] = tensor
    return flat


def image_of(model: QwenImage) -> Tensor:
    """One image in two steps, [1, H, W, 3] in [0, 1]."""
    condition = model.encode([Example(0, "a red cat", size=SIZE)], 1.0)
    final = sample(model, model.network, ode_plan(model.schedule(2, SIZE)), condition, [7]).final
    return ((model.decode(final) + 1) / 2).permute(0, 2, 3, 1)


def opened(folder: Path, lora: DistillationLora | None) -> Any:
    return load_model(QwenImageModel(path=str(folder), dtype="fp32", max_sequence_length=64, distillation_lora=lora))


@pytest.mark.parametrize("layout", [diffusers_layout, lightning_layout, kohya_layout])
@torch.no_grad()
def test_image_is_the_pipelines_with_the_lora_fused(
    layout: Callable[[dict[str, Tensor]], dict[str, Tensor]], folder: Path, tmp_path: Path
) -> None:
    save_file(layout(factors(folder)), tmp_path / "few_steps.safetensors")
    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(LIGHTNING)
    pipeline.set_progress_bar_config(disable=True)
    prefix = pipeline.prompt_template_encode.partition("{}")[0]
    pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)
    pipeline.load_lora_weights(str(tmp_path), weight_name="few_steps.safetensors")
    pipeline.fuse_lora(lora_scale=SCALE)
    noise, _ = noise_for((4, SIZE[0] // 4, SIZE[1] // 4), [7])
    drawn = pipeline(
        prompt="a red cat", negative_prompt=NEGATIVE, true_cfg_scale=1.0, height=SIZE[0], width=SIZE[1],
        num_inference_steps=2, latents=pack(noise), output_type="np",
    )  # fmt: skip
    expected = torch.from_numpy(drawn.images)
    lora = DistillationLora(path=str(tmp_path), weight_name="few_steps.safetensors", scale=SCALE, shift=3.0)
    model = opened(folder, lora)
    torch.testing.assert_close(image_of(model), expected, atol=1e-4, rtol=0)
    assert not [name for name, _ in model.network.named_parameters() if "lora" in name]
    as_file = DistillationLora(path=str(tmp_path / "few_steps.safetensors"), scale=SCALE, shift=3.0)
    assert torch.equal(image_of(opened(folder, as_file)), image_of(model))
    for other in (None, lora.model_copy(update={"scale": 1.0}), lora.model_copy(update={"shift": None})):
        assert float((image_of(opened(folder, other)) - expected).abs().max()) > 1e-3


def test_a_lora_is_trained_on_the_merged_network(folder: Path, tmp_path: Path) -> None:
    """Merging leaves no adapter behind that a new one would be stacked on."""
    save_file(diffusers_layout(factors(folder)), tmp_path / "few_steps.safetensors")
    lora = DistillationLora(path=str(tmp_path / "few_steps.safetensors"))
    model = opened(folder, lora)
    before = {name: weight.clone() for name, weight in model.network.named_parameters()}
    make_trainable(model.network, TrainLora(rank=2, alpha=4), model.spec)
    trained = [name for name, weight in model.network.named_parameters() if weight.requires_grad]
    assert trained and all("distillation" not in name for name in trained)
    plain = {name.replace("base_layer.", ""): weight for name, weight in model.network.named_parameters()}
    assert all(torch.equal(plain[name], weight) for name, weight in before.items())


def _magnitudes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a DoRA, which diffusers drops with a warning."""
    factors = {name: tensor for name, tensor in tensors.items() if name.endswith("lora_B.weight")}
    return {name.replace("lora_B.weight", "dora_scale"): torch.ones(len(tensor)) for name, tensor in factors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {f"{name}x": tensor for name, tensor in t.items()}, "which is no LoRA factor of this network"),
        (lambda t: {name.replace("_blocks.0", "_blocks.9"): v for name, v in t.items()}, "no LoRA factor of this"),
        (lambda t: {name: tensor[:, :1] for name, tensor in t.items()}, "which does not fit the weight"),
        (lambda t: {name.removeprefix("transformer."): v for name, v in t.items()}, "no LoRA factor of this network"),
        (lambda t: {**t, **_magnitudes(t)}, r"dora_scale, of a DoRA, which is not supported; give a LoRA"),
        (None, r"model.distillation_lora.path: given .*, which cannot be read as a LoRA of Qwen-Image"),
    ],
    ids=["suffix", "block", "shape", "prefix", "dora", "missing"],
)
def test_a_lora_of_another_network_is_one_message(change: Any, message: str, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    if change is not None:
        save_file({n: t.contiguous() for n, t in change(diffusers_layout(factors(folder))).items()}, path)
    with pytest.raises(ModelFilesError, match=message):
        opened(folder, DistillationLora(path=str(path)))


@pytest.mark.parametrize("chosen", ["sound", "dora"])
def test_the_file_that_diffusers_chooses_is_searched_for_a_dora(chosen: str, tmp_path: Path) -> None:
    """Of several, that with the usual name."""
    sound = {"transformer.transformer_blocks.0.attn.to_q.lora_B.weight": torch.ones(2, 2)}
    for name, tensors in (("sound", sound), ("dora", {**sound, **_magnitudes(sound)})):
        save_file(tensors, tmp_path / f"{'pytorch_lora_weights' if name == chosen else 'a'}.safetensors")
    refusal = pytest.raises(ModelFilesError, match=r"pytorch_lora_weights.*of a DoRA")
    with refusal if chosen == "dora" else nullcontext():
        assert _read(DistillationLora(path=str(tmp_path)))[0].keys() == sound.keys()


def test_a_file_of_the_hub_that_is_not_kept_is_not_searched_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"x.dora_scale": torch.ones(2)}, tmp_path / "a.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(QwenImageLoraLoaderMixin, "lora_state_dict", lambda *_, **__: ({}, None))
    assert _read(DistillationLora(path="owner/name", weight_name="a.safetensors")) == ({}, None)
