"""Training from a LoRA: every layout gives the same adapter, and nothing is loaded in part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxFillPipeline, FluxTransformer2DModel
from diffusers.utils import logging as library
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from retouch.adapters.comfyui import comfyui_tensors
from retouch.adapters.initial_lora import initial_lora, lora_file, read_lora
from retouch.adapters.lora import FILE, adapted_modules, add_lora, folded_lora, is_update
from retouch.adapters.trainee import LoraWeights, make_trainable
from retouch.adapters.unet_names import original_names
from retouch.config import ConfigError
from retouch.engine import Policy
from retouch.families import FAMILIES
from retouch.families.base import TrainLora
from retouch.families.meta import released_networks
from retouch.families.tiny import tiny_pipeline
from retouch.files.complete import record_files

from .test_lora import drawn, network, velocity
from .test_lora_elsewhere import unet_module, unet_places

RANK, ALPHA = 3, 5.0
SPEC = FAMILIES["flux_fill"].spec


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Any, dict[str, Tensor], Path]:
    """A network with a random LoRA, its parameters, and the folder of its file."""
    made = network()
    add_lora(made, RANK, ALPHA, SPEC.lora_targets)
    policy = Policy(made)
    state = drawn(policy)
    policy.load(state)
    folder = tmp_path / "weights"
    LoraWeights(RANK, ALPHA, "transformer").save(state, folder)
    return made, state, folder


def begun(path: Path | str, rank: int = RANK, alpha: float = ALPHA, **options: Any) -> Any:
    """A fresh network that training from a file begins with."""
    made = network()
    make_trainable(made, TrainLora(rank=rank, alpha=alpha, initial_adapter=str(path), **options), SPEC)
    return made


def test_a_file_of_an_earlier_run_is_taken_bit_for_bit(trained: tuple[Any, dict[str, Tensor], Path]) -> None:
    made, state, folder = trained
    for path in (folder, folder / FILE):
        found = Policy(begun(path)).state()
        assert found.keys() == state.keys() and all(torch.equal(t, state[n]) for n, t in found.items())
    assert torch.equal(velocity(begun(folder)), velocity(made))


def test_a_checkpoint_and_a_run_directory_stand_for_their_newest_averaged_weights(
    trained: tuple[Any, dict[str, Tensor], Path], tmp_path: Path
) -> None:
    folder = trained[2]
    run = tmp_path / "run"
    for step, parts in (("000002", ("weights", "ema")), ("000010", ("weights",)), ("000012", ("weights",))):
        for part in parts:
            shutil.copytree(folder, run / f"checkpoints/step-{step}" / part)
        if step != "000012":  # a run that was killed while it wrote this one
            checkpoint = run / f"checkpoints/step-{step}"
            complete = {"files": record_files(checkpoint)}
            (checkpoint / "complete.json").write_text(json.dumps(complete), encoding="utf-8")
    assert lora_file(str(run)) == run / "checkpoints/step-000010/weights" / FILE
    first = run / "checkpoints/step-000002"
    assert lora_file(str(first)) == first / "ema" / FILE
    assert lora_file(str(first / "weights")) == first / "weights" / FILE


def test_a_file_of_diffusers_without_metadata_has_an_alpha_equal_to_its_rank(
    trained: tuple[Any, dict[str, Tensor], Path], tmp_path: Path
) -> None:
    """As diffusers itself applies it."""
    made, _, folder = trained
    folded, _ = folded_lora(folder, "transformer")
    exported = {f"transformer.{name.replace('.default.weight', '.weight')}": t for name, t in folded.items()}
    save_file(exported, tmp_path / "any-name.safetensors")
    found = velocity(begun(tmp_path / "any-name.safetensors", alpha=RANK))
    torch.testing.assert_close(found, velocity(made), atol=1e-5, rtol=1e-5)


def test_a_folder_of_peft(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = PeftConfig(r=RANK, lora_alpha=5, target_modules=["to_q", "to_k"], init_lora_weights=False)
    wrapped: PeftModel = get_peft_model(network(), config)  # pyright: ignore
    wrapped.save_pretrained(str(tmp_path))
    assert next(iter(load_file(tmp_path / "adapter_model.safetensors"))).startswith("base_model.model.")
    found = begun(tmp_path, targets=["attn.to_q", "attn.to_k"])
    torch.testing.assert_close(velocity(found), velocity(wrapped), atol=1e-5, rtol=1e-5)
    config_file = tmp_path / "adapter_config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "use_rslora": True}))
    with pytest.raises(ConfigError, match="was trained with use_rslora, which is not supported"):
        begun(tmp_path, targets=["attn.to_q", "attn.to_k"])


@pytest.mark.parametrize("writer", ["network", "renamed"])
def test_an_alpha_beside_and_inside_a_file_without_the_name_of_the_network(writer: str, tmp_path: Path) -> None:
    """diffusers' networks save themselves (`save_lora_adapter`) without their name in a pipeline, and a file of PEFT
    may have another name."""
    config = PeftConfig(r=RANK, lora_alpha=5, target_modules=["to_q"], init_lora_weights=False)
    made: Any = network()
    if writer == "network":
        made.add_adapter(config)
        made.save_lora_adapter(tmp_path)
    else:
        made = get_peft_model(made, config)
        made.save_pretrained(str(tmp_path))
        (tmp_path / "adapter_model.safetensors").rename(tmp_path / "mine.safetensors")
    found = begun(tmp_path, targets=["attn.to_q"])
    torch.testing.assert_close(velocity(found), velocity(made), atol=1e-5, rtol=1e-5)


def test_a_folder_of_dancegrpo_has_its_alpha_in_a_file_of_its_own(
    trained: tuple[Any, dict[str, Tensor], Path], tmp_path: Path
) -> None:
    """As FastVideo's `save_lora_checkpoint` writes it; its published run has an alpha of twice the rank."""
    made, _, folder = trained
    save_file(load_file(folder / FILE), tmp_path / FILE)  # without metadata
    config = {"step": 60, "lora_params": {"lora_rank": RANK, "lora_alpha": ALPHA, "target_modules": ["to_q"]}}
    (tmp_path / "lora_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert torch.equal(velocity(begun(tmp_path)), velocity(made))
    shutil.copy(folder / FILE, tmp_path / FILE)  # the metadata of the file itself count
    (tmp_path / "lora_config.json").write_text('{"lora_params": {"lora_alpha": 99}}', encoding="utf-8")
    assert torch.equal(velocity(begun(tmp_path)), velocity(made))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_lora_that_changed_its_base_is_refused(init: str, tmp_path: Path) -> None:
    """PEFT takes the first update out of the base, and stores how it began: on the released base, the file is another
    model."""
    config = PeftConfig(r=RANK, lora_alpha=5, target_modules=["to_q"], init_lora_weights=init)  # pyright: ignore
    bare, wrapped = network(), get_peft_model(network(), config)  # pyright: ignore
    place = "transformer_blocks.0.attn.to_q"
    own = wrapped.get_submodule(f"base_model.model.{place}.base_layer").weight
    assert not torch.allclose(own, bare.get_submodule(place).weight, atol=1e-3)
    wrapped.save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=f"began with init_lora_weights={init}, which changed the base"):
        begun(tmp_path, alpha=5, targets=["attn.to_q"])


def test_a_file_of_kohya_with_names_of_diffusers(tmp_path: Path) -> None:
    """Stable Diffusion as sd-scripts and ComfyUI name it, with alpha in its own tensors."""
    spec = FAMILIES["sd_inpaint"].spec
    made = tiny_pipeline("sd_inpaint", seed=3).unet
    add_lora(made, RANK, RANK, spec.lora_targets)
    state = drawn(Policy(made))
    tensors = comfyui_tensors(state, RANK, "unet")
    assert next(iter(tensors)).startswith("lora_unet_down_blocks_1_")
    save_file({k: t * 2 if k.endswith(".alpha") else t for k, t in tensors.items()}, tmp_path / "kohya.safetensors")
    bare = tiny_pipeline("sd_inpaint", seed=3).unet
    train = TrainLora(rank=RANK, alpha=2 * RANK, initial_adapter=str(tmp_path / "kohya.safetensors"))
    found = initial_lora(bare, train, spec)
    assert found.keys() == state.keys() and all(torch.equal(t, state[n]) for n, t in found.items())


def kohya_of_flux() -> dict[str, Tensor]:
    """sd-scripts' names of the original FLUX network; q, k and v are one weight."""
    draw, config = torch.Generator().manual_seed(1), network().config
    width = config.attention_head_dim * config.num_attention_heads
    sizes = {"double_blocks_0_img_attn_qkv": (3 * width, width), "double_blocks_0_txt_attn_proj": (width, width)}
    tensors: dict[str, Tensor] = {}
    for module, (rows, columns) in sizes.items():
        tensors[f"lora_unet_{module}.lora_down.weight"] = torch.randn(RANK, columns, generator=draw)
        tensors[f"lora_unet_{module}.lora_up.weight"] = torch.randn(rows, RANK, generator=draw)
        tensors[f"lora_unet_{module}.alpha"] = torch.tensor(5.0)
    return tensors


def test_a_file_of_kohya_with_names_of_the_original_network(tmp_path: Path) -> None:
    """Equal to what diffusers loads from it, and to the closed form of the fused weight."""
    tensors = kohya_of_flux()
    save_file(tensors, tmp_path / "kohya.safetensors")
    found = begun(tmp_path / "kohya.safetensors", alpha=RANK)  # diffusers' converter multiplies alpha / rank in
    loaded = network()
    loaded_state = FluxFillPipeline.lora_state_dict(dict(tensors))
    FluxFillPipeline.load_lora_into_transformer(loaded_state, None, loaded)
    torch.testing.assert_close(velocity(found), velocity(loaded), atol=1e-6, rtol=1e-6)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    whole = 5 / RANK * tensors[f"{name}.lora_up.weight"] @ tensors[f"{name}.lora_down.weight"]
    layer = found.transformer_blocks[0].attn.to_k
    update = layer.lora_B.default.weight @ layer.lora_A.default.weight
    torch.testing.assert_close(update, whole.chunk(3)[1], atol=1e-5, rtol=1e-5)
    assert not layer_b(found, "transformer_blocks.1.attn.to_k").any(), "modules that the file leaves out are a no-op"


def test_a_folder_of_peft_with_names_of_the_original_network(tmp_path: Path) -> None:
    """The converter of diffusers splits the weights, and does not see the alpha in the config of PEFT."""
    made: Any = tiny_pipeline("flux2_klein", seed=3).transformer
    width, draw = made.config.attention_head_dim * made.config.num_attention_heads, torch.Generator().manual_seed(1)
    stem, rows = "base_model.model.double_blocks.0.img_attn.qkv", torch.randn(3 * width, RANK, generator=draw)
    factors = {f"{stem}.lora_A.weight": torch.randn(RANK, width, generator=draw), f"{stem}.lora_B.weight": rows}
    save_file(factors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}), encoding="utf-8")
    path, spec = tmp_path / "adapter_model.safetensors", FAMILIES["flux2_klein"].spec
    file = read_lora(path, spec, dict(made.named_modules()))
    assert (file.rank, file.alpha) == (RANK, ALPHA)
    assert torch.equal(file.factors["transformer_blocks.0.attn.to_k"][1], rows.chunk(3)[1])
    save_file(factors | {f"{stem}.alpha": torch.tensor(7.0)}, path)  # no such file is known; nothing is guessed
    with pytest.raises(ConfigError, match="cannot be read as a LoRA of flux2_klein"):
        read_lora(path, spec, dict(made.named_modules()))


# --- names of other networks, by diffusers' own reading of the same file ---


def updates(network: Any) -> dict[str, Tensor]:
    """Module -> the update of its weight, of a network with one LoRA."""
    layers = {name: m for name, m in network.named_modules() if hasattr(m, "get_delta_weight")}
    return {name: m.get_delta_weight(next(iter(m.lora_A))).detach() for name, m in layers.items()}


def same_updates(family: str, file: Path, alpha: float, targets: list[str]) -> int:
    """Compare training from a file with diffusers' pipeline that loads it -> number of adapted modules."""
    spec, pipeline = FAMILIES[family].spec, tiny_pipeline(family, seed=3)
    made = getattr(tiny_pipeline(family, seed=3), spec.network_name)
    train = TrainLora(rank=RANK, alpha=alpha, targets=targets, initial_adapter=str(file))
    make_trainable(made, train, spec)
    pipeline.load_lora_weights(load_file(file))
    expected = updates(getattr(pipeline, spec.network_name))
    found = {name: update for name, update in updates(made).items() if bool(update.any())}
    assert expected and found.keys() == expected.keys()
    for name, update in expected.items():
        torch.testing.assert_close(found[name], update, atol=1e-6, rtol=1e-5, msg=name)
    return len(expected)


UNETS = ("sd_inpaint", "sdxl_inpaint")
IN_BLOCKS = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "net.0.proj", "net.2",
             "conv1", "conv2", "time_emb_proj", "conv_shortcut", "conv"]  # fmt: skip


def kohya_of_unet(family: str, alpha: float, dotted: bool = False) -> dict[str, Tensor]:
    """Every layer of the blocks by its name in the original network, which sd-scripts trains for SDXL."""
    unet, draw = tiny_pipeline(family, seed=3).unet, torch.Generator().manual_seed(1)
    places, tensors = unet_places(unet.config), dict[str, Tensor]()
    for module in adapted_modules(unet, IN_BLOCKS):
        weight, name = unet.get_submodule(module).weight, unet_module(places, module)
        stem = f"diffusion_model.{name}" if dotted else f"lora_unet_{name.replace('.', '_')}"
        ones = [1] * (weight.ndim - 2)
        tensors[f"{stem}.lora_down.weight"] = torch.randn(RANK, *weight.shape[1:], generator=draw)
        tensors[f"{stem}.lora_up.weight"] = torch.randn(weight.shape[0], RANK, *ones, generator=draw)
        tensors[f"{stem}.alpha"] = torch.tensor(alpha)
    return tensors


def test_a_file_of_kohya_for_sdxl(tmp_path: Path) -> None:
    """Names of the original U-Net, alpha in its own tensors; which diffusers returns apart from the factors."""
    tensors = kohya_of_unet("sdxl_inpaint", 5.0)
    assert any(key.startswith("lora_unet_input_blocks_") for key in tensors)
    save_file(tensors, tmp_path / "kohya.safetensors")
    assert same_updates("sdxl_inpaint", tmp_path / "kohya.safetensors", 5.0, IN_BLOCKS) == len(tensors) // 3
    with pytest.raises(ConfigError, match=r"has rank 3 and alpha 5; set model\.train\.rank=3 model\.train\.alpha=5"):
        same_updates("sdxl_inpaint", tmp_path / "kohya.safetensors", 3.0, IN_BLOCKS)


@pytest.mark.parametrize("family", UNETS)
@pytest.mark.parametrize("dotted", [True, False])
def test_names_of_the_original_unet_with_and_without_dots(family: str, dotted: bool, tmp_path: Path) -> None:
    tensors = kohya_of_unet(family, 5.0, dotted)
    save_file(tensors, tmp_path / "kohya.safetensors")
    spec, unet = FAMILIES[family].spec, tiny_pipeline(family, seed=3).unet
    train = TrainLora(rank=RANK, alpha=5, targets=IN_BLOCKS, initial_adapter=str(tmp_path / "kohya.safetensors"))
    found, places = initial_lora(unet, train, spec), unet_places(unet.config)
    assert len(found) == len(tensors) // 3 * 2
    for name, factor in found.items():
        module, _, part = name.partition(".lora_")
        place = unet_module(places, module)
        stem = f"diffusion_model.{place}" if dotted else f"lora_unet_{place.replace('.', '_')}"
        assert torch.equal(factor, tensors[f"{stem}.lora_{'down' if part.startswith('A') else 'up'}.weight"])


@pytest.mark.parametrize("family", UNETS)
def test_every_layer_of_a_released_unet_has_its_original_name(family: str) -> None:
    """Those of the blocks, and those around them; no two the same."""
    with torch.device("meta"):
        unet = released_networks(FAMILIES[family].spec)["unet"]
    layers = [name for name, module in unet.named_modules() if hasattr(module, "weight")]
    found, places = original_names([name for name, _ in unet.named_modules()]), unet_places(unet.config)
    back = {module: name for name, module in found.items()}
    known = {"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
    assert {layer: back[layer] for layer in layers} == {
        layer: known.get(layer) or unet_module(places, layer) for layer in layers
    }
    assert not original_names(["transformer_blocks.0.attn.to_q"])


@pytest.mark.parametrize(
    ("family", "alpha", "modulation"),
    [("flux_fill", None, True), ("flux_fill", RANK, True), ("flux2_klein", None, False), ("flux2_klein", 5, False)],
)
def test_a_final_layer_that_diffusers_converts_as_it_is(
    family: str, alpha: float | None, modulation: bool, tmp_path: Path
) -> None:
    """Without an alpha, or with one that changes nothing, or by the converter of FLUX.2, which reads it."""
    spec, net, draw = FAMILIES[family].spec, tiny_pipeline(family, seed=3).transformer, torch.Generator().manual_seed(1)
    layers = {"linear": net.proj_out} | ({"adaLN_modulation_1": net.norm_out.linear} if modulation else {})
    tensors, whole = dict[str, Tensor](), dict[str, Tensor]()
    for name, layer in layers.items():
        down = torch.randn(RANK, layer.in_features, generator=draw)
        up = torch.randn(layer.out_features, RANK, generator=draw)
        tensors |= {f"lora_unet_final_layer_{name}.lora_{k}.weight": t for k, t in (("down", down), ("up", up))}
        if alpha is not None:
            tensors[f"lora_unet_final_layer_{name}.alpha"] = torch.tensor(float(alpha))
        whole[name] = (1 if alpha is None else alpha / RANK) * up @ down
    save_file(tensors, tmp_path / "kohya.safetensors")
    file = read_lora(tmp_path / "kohya.safetensors", spec, dict(net.named_modules()))
    found = {name: b @ a * file.alpha / file.rank for name, (a, b) in file.factors.items()}
    torch.testing.assert_close(found["proj_out"], whole["linear"], atol=1e-5, rtol=1e-5)
    if modulation:  # the base has scale before shift in diffusers, and shift before scale in the original
        shift, scale = whole["adaLN_modulation_1"].chunk(2)
        torch.testing.assert_close(found["norm_out.linear"], torch.cat([scale, shift]), atol=1e-5, rtol=1e-5)


def xlabs_of_flux() -> dict[str, Tensor]:
    """XLabs' names of attention processors: q, k and v are one weight, and there is no alpha."""
    draw, config = torch.Generator().manual_seed(1), network().config
    width = config.attention_head_dim * config.num_attention_heads
    tensors: dict[str, Tensor] = {}
    for block in range(config.num_layers):
        for name, rows in {"qkv_lora1": 3, "qkv_lora2": 3, "proj_lora1": 1, "proj_lora2": 1}.items():
            stem = f"double_blocks.{block}.processor.{name}"
            tensors[f"{stem}.down.weight"] = torch.randn(RANK, width, generator=draw)
            tensors[f"{stem}.up.weight"] = torch.randn(rows * width, RANK, generator=draw)
    return tensors


def test_a_file_of_xlabs(tmp_path: Path) -> None:
    save_file(xlabs_of_flux(), tmp_path / "xlabs.safetensors")
    count = same_updates("flux_fill", tmp_path / "xlabs.safetensors", RANK, list(SPEC.lora_targets))
    assert count == network().config.num_layers * 8


@pytest.fixture
def quiet_diffusers() -> Iterator[None]:
    """As with DIFFUSERS_VERBOSITY=error, which also hides the warnings of what a converter drops."""
    level = library.get_verbosity()
    library.set_verbosity_error()
    yield
    library.set_verbosity(level)


def plus(tensors: dict[str, Tensor], stem: str, down: str = "lora_down", up: str = "lora_up") -> dict[str, Tensor]:
    return {**tensors, f"{stem}.{down}.weight": torch.ones(RANK, 8), f"{stem}.{up}.weight": torch.ones(8, RANK)}


@pytest.mark.parametrize(
    ("family", "tensors", "message"),
    [
        ("flux_fill", plus(kohya_of_flux(), "lora_unet_not_of_flux"), "not_of_flux"),
        ("flux_fill", plus(kohya_of_flux(), "lora_unet_double_blocks_99_img_attn_proj"), "double_blocks_99|blocks.99"),
        ("flux_fill", plus(xlabs_of_flux(), "other.processor.proj_lora1", "down", "up"), "other"),
        ("sdxl_inpaint", plus(kohya_of_unet("sdxl_inpaint", 5.0), "lora_unet_input_blocks_99_1_proj_in"), "blocks_99"),
        ("sdxl_inpaint", plus(kohya_of_unet("sdxl_inpaint", 5.0), "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
         r"lora_te1_text_model_encoder_layers_0_mlp_fc1\.lora_down\.weight, which is of a text encoder"),
        ("flux_fill", plus(kohya_of_flux(), "lora_te1_text_model_encoder_layers_0_mlp_fc1"), "is of a text encoder"),
        ("flux_fill", plus({}, "text_encoder_2.encoder.block.0.q", "lora_A", "lora_B"), "is of a text encoder"),
        ("flux_fill", plus({"lora_unet_final_layer_linear.alpha": torch.ones(())}, "lora_unet_final_layer_linear"),
         r"converts lora_unet_final_layer_linear\.alpha wrongly"),
        ("flux2_klein", plus({}, "diffusion_model.final_layer.adaLN_modulation.1", "lora_A", "lora_B"),
         r"converts diffusion_model\.final_layer\.adaLN_modulation\.1\.lora_A\.weight wrongly"),
    ],
)  # fmt: skip
def test_nothing_is_left_out_in_silence(
    family: str, tensors: dict[str, Tensor], message: str, tmp_path: Path, quiet_diffusers: None
) -> None:
    """The refusal names a key of what has no place."""
    save_file({key: t.clone() for key, t in tensors.items()}, tmp_path / "more.safetensors")
    spec = FAMILIES[family].spec
    bare = getattr(tiny_pipeline(family, seed=3), spec.network_name)
    for alpha in (RANK, 5):  # factors that diffusers converts have alpha multiplied in
        with pytest.raises(ConfigError, match=rf"model\.train\.initial_adapter: .*({message})"):
            initial_lora(
                bare, TrainLora(rank=RANK, alpha=alpha, initial_adapter=str(tmp_path / "more.safetensors")), spec
            )


def test_a_converter_that_drops_tensors_is_noticed_without_its_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rows that the updates of the file and of the result change."""
    save_file(kohya_of_flux(), tmp_path / "kohya.safetensors")
    dropped, whole = "lora_unet_double_blocks_0_txt_attn_proj", FluxFillPipeline.lora_state_dict

    def silent(tensors: dict[str, Tensor]) -> Any:
        rest = {key: tensor for key, tensor in tensors.items() if not key.startswith(dropped)}
        return whole(rest) if rest else {}

    monkeypatch.setattr(FluxFillPipeline, "lora_state_dict", silent)
    width = network().config.attention_head_dim * network().config.num_attention_heads
    with pytest.raises(
        ConfigError, match=rf"as a whole: {dropped} and perhaps more \({width} rows of updates\) have no"
    ):
        begun(tmp_path / "kohya.safetensors", alpha=RANK)


def layer_b(made: Any, module: str) -> Tensor:
    return made.get_parameter(f"{module}.lora_B.default.weight")


def changed(path: Path, out: Path, change: Any) -> Path:
    tensors = change(dict(load_file(path)))
    save_file({key: t.contiguous() for key, t in tensors.items()}, out)
    return out


ONE = "transformer.transformer_blocks.0.attn.to_q"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != f"{ONE}.lora_B.weight"}, "has only one factor of"),
        (lambda t: {**t, f"{ONE}.lora_B.bias": torch.ones(3)}, "lora_B.bias, which is no LoRA factor; DoRA"),
        (lambda t: {**t, f"{ONE}.lora_A.weight": t[f"{ONE}.lora_A.weight"][:2]}, "give a LoRA of this model"),
        (lambda t: {**t, f"{ONE}.lora_A.weight": t[f"{ONE}.lora_A.weight"][:2],
                    f"{ONE}.lora_B.weight": t[f"{ONE}.lora_B.weight"][:, :2]}, r"more than one rank \(2 to 3\)"),
        (lambda t: {**t, f"{ONE}.alpha": torch.tensor(7.0)}, r"more than one alpha \(3 to 7\)"),
        (lambda t: {**t, "text_encoder.layers.0.q_proj.lora_A.weight": torch.ones(3, 8)}, "without parts for text"),
        (lambda t: {}, "holds no tensors"),
        (lambda t: {**t, f"{ONE}.lora_B.weight": torch.ones(3)}, "give a LoRA of this model"),
        (lambda t: {**t, f"{ONE}.lora_B.weight": torch.tensor(1.0)}, "give a LoRA of this model"),
        (lambda t: {**t, f"{ONE}.lora_B.weight": t[f"{ONE}.lora_B.weight"][..., None]}, "give a LoRA of this model"),
        (lambda t: {k: (9 * v).to(torch.int32) for k, v in t.items()}, "int32; expected floating-point numbers"),
        (lambda t: {k: v.to(torch.complex64) for k, v in t.items()}, "complex64; expected floating-point numbers"),
        (lambda t: {**t, f"{ONE}.lora_A.weight": t[f"{ONE}.lora_A.weight"] / 0}, "contains NaN or Inf in the factors"),
        (lambda t: {**t, f"{ONE}.alpha": torch.ones(2)}, "expected one real number"),
        (lambda t: {**t, f"{ONE}.alpha": torch.tensor(1j)}, "expected one real number"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(
    trained: tuple[Any, dict[str, Tensor], Path], tmp_path: Path, change: Any, message: str
) -> None:
    path = changed(trained[2] / FILE, tmp_path / "changed.safetensors", change)
    with pytest.raises(ConfigError, match=message):
        begun(path, alpha=RANK)


@pytest.mark.parametrize(
    "config", ["[]", "3", "null", "{", *(f'{{"transformer.lora_alpha": {a}}}' for a in ('"x"', "null", "[]", 10**400))]
)
def test_a_lora_config_that_is_none_is_refused(
    trained: tuple[Any, dict[str, Tensor], Path], tmp_path: Path, config: str
) -> None:
    tensors, path = load_file(trained[2] / FILE), tmp_path / "changed.safetensors"
    save_file(tensors, path, metadata={"lora_adapter_metadata": config})
    with pytest.raises(ConfigError, match=f"{path}: its LoRA config is damaged"):
        begun(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_kind_of_float_is_taken(
    trained: tuple[Any, dict[str, Tensor], Path], tmp_path: Path, dtype: torch.dtype
) -> None:
    path = changed(
        trained[2] / FILE, tmp_path / "changed.safetensors", lambda t: {k: v.to(dtype) for k, v in t.items()}
    )
    expected = trained[1][f"{ONE.removeprefix('transformer.')}.lora_B.default.weight"]
    assert torch.equal(layer_b(begun(path, alpha=RANK), ONE.removeprefix("transformer.")), expected.to(dtype).float())


def test_another_rank_alpha_or_set_of_modules_says_what_to_set(trained: tuple[Any, dict[str, Tensor], Path]) -> None:
    folder = trained[2]
    with pytest.raises(ConfigError, match=r"given rank 8 and alpha 16, .* set model\.train\.rank=3 .*alpha=5"):
        begun(folder, rank=8, alpha=16)
    with pytest.raises(
        ConfigError, match=r"adapts single_transformer_blocks\.0\..* set model\.train\.targets="
    ) as error:
        begun(folder, targets=["attn.to_q"])
    suffixes = str(error.value).partition("targets=[")[2].rstrip("]").split(", ")
    assert torch.equal(velocity(begun(folder, targets=suffixes)), velocity(begun(folder)))


def test_a_file_that_is_not_there_or_damaged(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    (tmp_path / "empty").mkdir()
    for path, message in (
        ("nowhere", "no such file or folder"),
        ("cut.safetensors", "damaged"),
        ("empty", "holds no safetensors file"),
    ):
        with pytest.raises(ConfigError, match=rf"model\.train\.initial_adapter: .*{message}"):
            begun(tmp_path / path)


def test_a_reference_with_the_update_at_0_is_the_base_bitwise(trained: tuple[Any, dict[str, Tensor], Path]) -> None:
    made = trained[0]
    policy = Policy(made)
    policy.snapshot("reference", zero=is_update)
    with policy.use("reference"):
        assert torch.equal(velocity(made), velocity(network()))
    assert not torch.equal(velocity(made), velocity(network()))
    assert isinstance(made, FluxTransformer2DModel)
