"""Every family and kind of weights leave as a diffusers pipeline: its own pipeline samples the run's image from it.

The folders name the classes of the released pipelines, some of which cannot be loaded here (torchvision): an export
that loads more than the network fails.
"""

from __future__ import annotations

import json
import logging
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.adapters import pipeline
from retouch.adapters.about import About
from retouch.adapters.export import export
from retouch.adapters.pipeline import fuse
from retouch.adapters.trainee import make_trainable
from retouch.engine import Policy
from retouch.errors import ModelFilesError
from retouch.families import FAMILIES
from retouch.families.base import DistillationLora, ModelSection
from retouch.families.diffusion import pack
from retouch.families.loading import load_model, load_network
from retouch.families.qwen.spec import NEGATIVE
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.rollout.sampler import latent_shape, noise_for
from retouch.types import Condition, Example
from tests.families.conftest import ode_image, random_example, with_point_posterior
from tests.selection import rows
from tests.tiny_models import attentive

SIZE, STEPS, SEED = (32, 64), 2, 11
ABOUT = About("run-step-000004")
KINDS: dict[str, dict[str, Any]] = {
    "full": {"kind": "full"},
    "lora": {"kind": "lora", "rank": 2, "alpha": 3.0},
}
LENGTHS = {"sd3": 40, "z_image": 160, **dict.fromkeys(["flux_fill", "flux_dev", "flux_kontext"], TEXT_TOKENS)}
"""Family -> tokens of a prompt; 96 of others."""

STOCK = {
    "qwen_image_edit": {"processor": "Qwen2_5_VLProcessor"},
    "qwen_image_21": {"processor": "Qwen3VLProcessor"},
    "flux2_dev": {"tokenizer": "PixtralProcessor"},
}
"""Family -> classes in the released model_index.json that need torchvision."""

POSITIONS = "pos_embed.pos_embed"
"""Table of positions of SD3, which is no parameter."""

WHOLE = ("flux_fill", "sd_inpaint")
"""Families whose full weights are drawn from here: a transformer and a UNet. Those of every family are read again."""

GUIDANCE = {"flux_kontext": 2.5, "sd_inpaint": 7.5, "sdxl_inpaint": 7.5, "flux_fill": 30.0, "flux_dev": 3.5}
"""Family -> guidance scale; 4 of others."""


@dataclass(frozen=True)
class Base:
    """A tiny pipeline on disk.

    Attributes:
        stock: parts of it by classes that can be loaded here.
    """

    family: str
    folder: Path
    stock: dict[str, Any]

    def section(self, kind: str, **options: Any) -> ModelSection:
        given = {"path": str(self.folder), "dtype": "fp32", "train": KINDS[kind], **options}
        section = FAMILIES[self.family]
        if "max_sequence_length" in section.model_fields:
            given["max_sequence_length"] = LENGTHS.get(self.family, 96)
        return section.model_validate(given)

    @property
    def example(self) -> Example:
        prompt, needs = "The text is 'W'.", FAMILIES[self.family].spec.needs
        drawn = random_example(1, *SIZE)
        source, mask = (getattr(drawn, name) if name in needs else None for name in ("source", "mask"))
        return Example(1, prompt, source, mask, size=None if source else SIZE)

    @property
    def guidance(self) -> float:
        return GUIDANCE.get(self.family, 4.0)


@pytest.fixture(scope="module", params=list(FAMILIES))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return saved_base(request.param, tmp_path_factory.mktemp(request.param))


def saved_base(family: str, folder: Path) -> Base:
    made = tiny_pipeline(family, seed=3)
    if family in ("flux_fill", "sd_inpaint", "sdxl_inpaint"):
        with_point_posterior(made)
    if family in ("qwen_image", "qwen_image_edit"):
        attentive(made)
    made.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    index |= {name: ["transformers", kind] for name, kind in STOCK.get(family, {}).items()}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return Base(family, folder, {name: getattr(made, name) for name in STOCK.get(family, {})})


def trained(section: ModelSection, out: Path) -> Any:
    """The model with weights moved at random, which are saved as a checkpoint saves them."""
    model: Any = load_model(section)
    trainee = make_trainable(model.network, section.train, model.spec)
    policy, draw = Policy(model.network), torch.Generator().manual_seed(5)
    scale = {
        n: 0.2 if section.train.kind == "lora" else 0.2 * float(t.std(correction=0)) for n, t in policy.state().items()
    }
    policy.load({n: t + scale[n] * torch.randn(t.shape, generator=draw) for n, t in policy.state().items()})
    trainee.save(policy.whole(), out)
    return model


def theirs(base: Base, folder: Path, noise: Tensor, condition: Condition) -> Tensor:
    """The image of diffusers' own pipeline, [1, H, W, 3] in [0, 1]."""
    given = {name: part if name == "processor" else None for name, part in base.stock.items()}  # its class is checked
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, **given)
    pipe.register_modules(**base.stock)
    pipe.set_progress_bar_config(disable=True)
    call, example = CALLS[base.family], base.example
    common = {"prompt": example.prompt, "height": SIZE[0], "width": SIZE[1], "num_inference_steps": STEPS}
    if "text_encoder_2" in pipe.config or base.family in ("flux2_klein", "flux2_dev"):
        common["max_sequence_length"] = LENGTHS.get(base.family, 96)
    options = call(base, pipe, noise, condition)
    inputs = {k: v for k, v in {**common, "output_type": "np", **options}.items() if v is not None}
    with (
        patch.object(pipe, "check_inputs", create=True),
        patch.object(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: (*SIZE[::-1], None)),
    ):  # they want multiples of 8 of every autoencoder, and images of a megapixel
        image = torch.from_numpy(pipe(generator=torch.Generator().manual_seed(0), **inputs).images)
    opacity = image[..., 3:] if image.shape[-1] == 4 else 1.0
    return image[..., :3] * opacity + 1 - opacity  # on white, as we decode images with opacity


def inpainting(base: Base, pipe: Any, noise: Tensor, condition: Condition) -> dict[str, Any]:
    image = torch.from_numpy(np.array(base.example.source)).permute(2, 0, 1)[None] / 255.0
    mask = torch.from_numpy(np.array(base.example.mask))[None, None] / 255.0
    packed = base.family == "flux_fill"
    return {"image": image, "mask_image": mask, "guidance_scale": base.guidance, "max_sequence_length": None} | (
        {"latents": pack(noise), "max_sequence_length": TEXT_TOKENS} if packed else {"latents": noise, "strength": 1.0}
    )


def kontext(base: Base, pipe: Any, noise: Tensor, condition: Condition) -> dict[str, Any]:
    own_size = {"max_area": SIZE[0] * SIZE[1], "_auto_resize": False}
    return {"image": base.example.source, "guidance_scale": 2.5, "latents": pack(noise), **own_size}


def flux2(base: Base, pipe: Any, noise: Tensor, condition: Condition) -> dict[str, Any]:
    return {"guidance_scale": 4.0, "latents": noise, "text_encoder_out_layers": (1, 2, 3)}


def qwen(base: Base, pipe: Any, noise: Tensor, condition: Condition) -> dict[str, Any]:
    prefix = pipe.prompt_template_encode.partition("{}")[0]
    pipe.prompt_template_encode_start_idx = len(pipe.tokenizer(prefix).input_ids)  # 34 with the released tokenizer
    scale = float(condition.tensors["guidance"][0])
    return {"negative_prompt": NEGATIVE, "true_cfg_scale": scale, "latents": pack(noise)}


def qwen_edit(base: Base, pipe: Any, noise: Tensor, condition: Condition) -> dict[str, Any]:
    """From the states of our own encoder: the pipeline does not say where the image is among the tokens."""
    found: dict[str, Any] = {
        "image": base.example.source,
        "prompt": None,
        "true_cfg_scale": 4.0,
        "latents": pack(noise),
    }
    for mine, name in (("text", "prompt"), ("negative_text", "negative_prompt")):
        [states], [mask] = condition.tensors[mine], condition.tensors[f"{mine}_mask"]
        found[f"{name}_embeds"] = states[mask > 0][None]
        found[f"{name}_embeds_mask"] = torch.ones(1, int(mask.sum()), dtype=torch.long)
    return found


def qwen_21(base: Base, pipe: Any, noise: Tensor, condition: Condition) -> dict[str, Any]:
    latents = noise.flatten(2).transpose(1, 2)
    return {"negative_prompt": " ", "true_cfg_scale": 4.0, "latents": latents}


CALLS: Mapping[str, Any] = {
    "flux_fill": inpainting,
    "sd_inpaint": inpainting,
    "sdxl_inpaint": inpainting,
    "flux_dev": lambda base, pipe, noise, condition: {"guidance_scale": 3.5, "latents": pack(noise)},
    "flux_kontext": kontext,
    "flux2_dev": flux2,
    "flux2_klein": flux2,
    "qwen_image": qwen,
    "qwen_image_21": qwen_21,
    "qwen_image_edit": qwen_edit,
    "sd3": lambda base, pipe, noise, condition: {"guidance_scale": 4.0, "latents": noise},
    "z_image": lambda base, pipe, noise, condition: {"guidance_scale": 3.0, "latents": noise},
}


def levels(a: Tensor, b: Tensor) -> int:
    """Largest difference in grey levels."""
    return int(((a * 255).round() - (b * 255).round()).abs().max())


@pytest.mark.parametrize(
    ("base", "kind"),
    rows([*product(FAMILIES, KINDS)], [*product(FAMILIES, ["lora"]), *product(WHOLE, ["full"])]),
    indirect=["base"],
    scope="module",
)
@torch.no_grad()
def test_the_pipeline_of_an_export_samples_the_runs_image(base: Base, kind: str, tmp_path: Path) -> None:
    section = base.section(kind)
    untrained: Any = load_model(section)
    model = trained(section, tmp_path / "weights")
    export(section, tmp_path / "weights", "diffusers", tmp_path / "out", ABOUT)
    condition = model.encode([base.example], base.guidance)
    noise, _ = noise_for(latent_shape(model, SIZE), [SEED])
    ours = ode_image(model, condition, STEPS, [SEED])
    assert levels(theirs(base, tmp_path / "out", noise, condition), ours) <= 1
    assert levels(ode_image(untrained, condition, STEPS, [SEED]), ours) > 1  # and training changed it
    files = {file.relative_to(base.folder) for file in base.folder.rglob("*") if file.is_file()}
    assert files == {file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*") if file.is_file()}


def test_full_weights_are_a_whole_model_folder(base: Base, tmp_path: Path) -> None:
    """Of SD3 with its table of positions, which is no parameter; `model.transformer` and diffusers take the folder."""
    section = base.section("full")
    network: Any = load_network(section, torch.float32)
    trainee = make_trainable(network, section.train, section.spec)
    policy = Policy(network)
    trainee.save(policy.whole(), tmp_path / "weights")
    again, info = type(network).from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = network.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert trainee.load(tmp_path / "weights").keys() == policy.state().keys()
    other = base.section("lora", transformer={"path": str(tmp_path / "weights")})
    assert load_network(other, torch.float32).state_dict().keys() == expected.keys()


# --- one family: what a pipeline is made of ---


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return saved_base("qwen_image", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def few_steps(qwen_base: Base, tmp_path_factory: pytest.TempPathFactory) -> DistillationLora:
    """A few-step LoRA of random factors, with a shift of its own."""
    network: Any = load_network(qwen_base.section("lora"), torch.float32)
    draw, tensors = torch.Generator().manual_seed(1), {}
    for module in ("attn.to_q", "attn.add_k_proj", "img_mlp.net.2"):
        rows, columns = network.get_submodule(f"transformer_blocks.0.{module}").weight.shape
        key = f"transformer.transformer_blocks.0.{module}"
        tensors[f"{key}.lora_A.weight"] = 0.3 * torch.randn(2, columns, generator=draw)
        tensors[f"{key}.lora_B.weight"] = 0.3 * torch.randn(rows, 2, generator=draw)
    folder = tmp_path_factory.mktemp("few")
    save_file(tensors, folder / "few.safetensors")
    return DistillationLora(path=str(folder / "few.safetensors"), scale=0.5, shift=3.0)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_few_step_lora_is_part_of_the_export(
    qwen_base: Base, few_steps: DistillationLora, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its shift in the scheduler."""
    section = qwen_base.section(kind, distillation_lora=few_steps)
    model = trained(section, tmp_path / "weights")
    with caplog.at_level(logging.INFO):
        export(section, tmp_path / "weights", "diffusers", tmp_path / "out", ABOUT)
    assert "few.safetensors is part of the network: sample with its number of steps and without guidance" in caplog.text
    condition = model.encode([qwen_base.example], 1.0)
    noise, _ = noise_for(latent_shape(model, SIZE), [SEED])
    ours = ode_image(model, condition, STEPS, [SEED])
    assert levels(theirs(qwen_base, tmp_path / "out", noise, condition), ours) <= 1
    shutil.copytree(qwen_base.folder / "scheduler", tmp_path / "out" / "scheduler", dirs_exist_ok=True)
    assert levels(theirs(qwen_base, tmp_path / "out", noise, condition), ours) > 1


def test_a_lora_file_says_that_it_belongs_on_a_few_step_lora(
    qwen_base: Base, few_steps: DistillationLora, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = qwen_base.section("lora", distillation_lora=few_steps)
    trained(section, tmp_path / "weights")
    for to in ("diffusers-lora", "comfyui", "safetensors"):
        caplog.clear()
        export(section, tmp_path / "weights", to, tmp_path / to, ABOUT)
        assert "few.safetensors, which is not part of this file; load it as well, with strength 0.5" in caplog.text


def test_a_part_that_is_missing_is_named(qwen_base: Base, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen_base.folder, tmp_path / "base"))
    section = Base("qwen_image", folder, {}).section("lora")
    trained(section, tmp_path / "weights")
    shutil.rmtree(folder / "text_encoder")
    with pytest.raises(ModelFilesError, match=r"has no text_encoder/, which its model_index\.json names; copy"):
        export(section, tmp_path / "weights", "diffusers", tmp_path / "out", ABOUT)


def test_weights_that_do_not_fit_are_not_exported(qwen_base: Base, tmp_path: Path) -> None:
    section, weights = qwen_base.section("full"), tmp_path / "weights" / "diffusion_pytorch_model.safetensors"
    trained(section, weights.parent)
    tensors = load_file(weights)
    for change in ({"proj_out.bias": torch.ones(3)}, {"more": torch.ones(3)}):
        save_file({**tensors, **change}, weights)
        with pytest.raises(ValueError, match="1 weights are missing or do not fit"):
            export(section, weights.parent, "diffusers", tmp_path / "out", ABOUT)
    lora = qwen_base.section("lora")
    trained(lora, tmp_path / "lora")
    with pytest.raises(ValueError, match=r"the LoRA adapts transformer_blocks\.0\.attn\.to_q, which Linear does not"):
        fuse(torch.nn.Linear(2, 2), {"transformer_blocks.0.attn.to_q.lora_A.default.weight": torch.ones(2, 2)})


@pytest.mark.parametrize("earlier", [False, True])
def test_full_weights_are_exported_without_the_network_of_the_base(earlier: bool, tmp_path: Path) -> None:
    """From several files, in the dtype of the run, with the table of positions that was saved; earlier versions saved
    none, and it is that of the base: another one than the class makes."""
    section = saved_base("sd3", tmp_path / "base").section("full", dtype="bf16")
    file = tmp_path / "base/transformer/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, POSITIONS: tensors[POSITIONS] + 1}, file, metadata={"format": "pt"})
    expected = trained(section, tmp_path / "weights").network.state_dict()
    whole = load_file(saved := tmp_path / "weights/diffusion_pytorch_model.safetensors")
    names = sorted(whole.keys() - ({POSITIONS} if earlier else set()))
    saved.unlink()
    for number, part in enumerate((names[:9], names[9:]), 1):
        save_file({n: whole[n] for n in part}, saved.with_stem(f"{saved.stem}-0000{number}-of-00002"))
    read: list[str] = []
    with patch("retouch.adapters.pipeline.load_network", lambda *a: read.append("base") or load_network(*a)):
        export(section, tmp_path / "weights", "diffusers", tmp_path / "out", ABOUT)
    assert read == ["base"] * earlier
    found = load_file(tmp_path / "out/transformer/diffusion_pytorch_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(t, expected[n].to(torch.bfloat16)) for n, t in found.items())


def test_full_weights_are_read_one_file_at_a_time(qwen_base: Base, tmp_path: Path) -> None:
    """Each is freed when the next one is opened; and parts that diffusers keeps in fp32 stay so."""
    section = qwen_base.section("full", dtype="bf16")
    trained(section, tmp_path)
    whole = load_file(saved := tmp_path / "diffusion_pytorch_model.safetensors")
    for number in range(3):
        save_file({n: whole[n].float() for n in sorted(whole)[number::3]}, saved.with_stem(f"{saved.stem}-{number}"))
    saved.unlink()
    alive: list[weakref.ref[Tensor]] = []

    def opened(file: Path) -> dict[str, Tensor]:
        assert sum(one() is not None for one in alive) <= 1  # the last tensor of the file before
        tensors = load_file(file)
        alive.extend(weakref.ref(t) for t in tensors.values())
        return tensors

    with (
        patch("retouch.adapters.pipeline.load_file", opened),
        patch.object(diffusers.QwenImageTransformer2DModel, "_keep_in_fp32_modules", None),
    ):
        export(section, tmp_path, "diffusers", tmp_path / "out", ABOUT)
    assert len(alive) == len(whole)
    with patch.object(diffusers.QwenImageTransformer2DModel, "_keep_in_fp32_modules", ["proj_out"]):
        export(section, tmp_path, "diffusers", tmp_path / "kept", ABOUT)
    found = load_file(tmp_path / "kept/transformer/diffusion_pytorch_model.safetensors")
    assert {n for n, t in found.items() if t.dtype == torch.float32} == {"proj_out.weight", "proj_out.bias"}


def test_full_weights_without_a_sound_config(qwen_base: Base, tmp_path: Path) -> None:
    section, config = qwen_base.section("full"), tmp_path / "config.json"
    trained(section, tmp_path)
    for text in ("{", "[]", json.dumps({**json.loads(config.read_text("utf-8")), "num_layers": "many"}), None):
        config.unlink()
        if text is not None:
            config.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"^/.*config\.json makes no QwenImageTransformer2DModel: .*[^w]$"):
            export(section, tmp_path, "diffusers", tmp_path / "out", ABOUT)


def test_a_network_without_weights_is_not_exported(qwen_base: Base, tmp_path: Path) -> None:
    """As a hub snapshot has of a text encoder whose files were never asked for."""
    folder = Path(shutil.copytree(qwen_base.folder, tmp_path / "base"))
    section = Base("qwen_image", folder, {}).section("lora")
    trained(section, tmp_path / "weights")
    (folder / "tokenizer/config.json").write_text("{}", encoding="utf-8")  # has no weights by right
    export(section, tmp_path / "weights", "diffusers", tmp_path / "out", ABOUT)
    for file in (folder / "text_encoder").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelFilesError, match=r"text_encoder has a config\.json and no weights; copy the model anew"):
        export(section, tmp_path / "weights", "diffusers", tmp_path / "out2", ABOUT)


@pytest.mark.parametrize("there", [True, False])
def test_the_variant_of_a_hub_id_is_asked_for(there: bool, qwen_base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    """And plain files where it has none of it: diffusers raises a ValueError."""
    asked: list[str | None] = []

    def download(path: str, variant: str | None = None, **_: Any) -> Path:
        asked.append(variant)
        if variant and not there:
            raise ValueError("no such modeling files are available")
        return qwen_base.folder

    monkeypatch.setattr("retouch.files.hub._is_downloaded", lambda *_: True)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", download)
    hub = qwen_base.section("lora").model_copy(update={"path": "Qwen/Qwen-Image", "weights_variant": "fp16"})
    assert pipeline._base_folder(hub, torch.nn.Identity()) == qwen_base.folder
    assert asked == (["fp16"] if there else ["fp16", None])


def test_parts_of_a_hub_id_come_from_its_snapshot(
    qwen_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are links; what the run did not need of it, the text encoder under stored embeddings, is asked for."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    shutil.copytree(qwen_base.folder, blobs)
    for file in (file for file in blobs.rglob("*") if file.is_file()):
        place = snapshot / file.relative_to(blobs)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(file)
    section = qwen_base.section("lora")
    trained(section, tmp_path / "weights")
    asked: list[tuple[str, list[str]]] = []

    def download(path: str, **given: Any) -> Path:
        asked.append((path, list(given)))
        return snapshot

    monkeypatch.setattr("retouch.files.hub._is_downloaded", lambda *_: True)
    monkeypatch.setattr(diffusers.DiffusionPipeline, "download", download)
    hub = section.model_copy(update={"path": "Qwen/Qwen-Image"})
    local = load_network(section, torch.float32)
    monkeypatch.setattr("retouch.adapters.pipeline.load_network", lambda *_: local)
    export(hub, tmp_path / "weights", "diffusers", tmp_path / "out", ABOUT)
    assert asked == [("Qwen/Qwen-Image", ["transformer"])]
    copied = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert copied and not any(file.is_symlink() for file in copied)
    assert (tmp_path / "out/text_encoder/model.safetensors").read_bytes()


# --- rounding ---


@pytest.mark.parametrize(("size", "dtype", "least", "most"), [
    (1e-3, torch.bfloat16, 0.3, 0.6), (1e-2, torch.bfloat16, 0.97, 1.03), (1e-3, torch.float32, 0.999, 1.001),
])  # fmt: skip
def test_the_share_of_an_update_that_rounding_keeps(size: float, dtype: torch.dtype, least: float, most: float) -> None:
    """Of |dW| = size |W|, by another formula: the slope of the change of the weights on the update."""
    draw = torch.Generator().manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(96, 96, bias=False, dtype=dtype))
    a, b = torch.randn(4, 96, generator=draw), torch.randn(96, 4, generator=draw)
    before = torch.randn(96, 96, generator=draw).to(dtype)
    b *= size * float(before.float().norm() / (b @ a).norm())
    with torch.no_grad():
        layer[0].weight.copy_(before)
    found = fuse(layer, {"0.lora_A.default.weight": a, "0.lora_B.default.weight": b})
    change = (layer[0].weight.detach().float() - before.float()).double().numpy().ravel()
    slope = float(np.linalg.lstsq((b @ a).double().numpy().ravel()[:, None], change, rcond=None)[0][0])
    assert found == pytest.approx(slope, rel=1e-3) and least < found < most


def test_an_update_that_rounding_takes_away_is_reported(
    qwen_base: Base, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    section = qwen_base.section("lora")
    trained(section, tmp_path / "weights")
    file = tmp_path / "weights" / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as opened:
        about = opened.metadata()
    small = {name: t * 1e-3 if ".lora_B." in name else t for name, t in load_file(file).items()}
    for dtype, told in (("fp32", False), ("bf16", True)):
        caplog.clear()
        save_file(small, file, metadata=about)
        export(section.model_copy(update={"dtype": dtype}), file.parent, "diffusers", tmp_path / dtype, ABOUT)
        warned = "in which the fused weights keep" in caplog.text and "use --to diffusers-lora" in caplog.text
        assert warned == told
