"""Style adapters trained from a run file: every algorithm, every choice of weights, their checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FluxFillPipeline, FluxTransformer2DModel
from PIL import Image
from safetensors.torch import load_file

from retouch import adapters as retouch_adapters
from retouch import load
from retouch.adapters.formats import read_adapter, write_safetensors
from retouch.adapters.train_ip_adapter import IpAdapterWeights, train_ip_adapter
from retouch.config import ConfigError, RunConfig, dump_run, load_run, parse_run
from retouch.data.dataset import load_dataset
from retouch.engine import CheckpointError
from retouch.families.base import TrainIpAdapter
from retouch.families.diffusion import pack
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.loading import load_model
from retouch.files.model_files import tiny_path
from retouch.rollout.plan import ode_plan
from retouch.rollout.sampler import (
    noise_for,
    sample,
)
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.training import supervised
from retouch.training.build import (
    Run,
    build,
)
from retouch.types import Example
from retouch.use.loaded import Loaded
from tests.command_line import retouch
from tests.conftest import small_run
from tests.families.conftest import with_point_posterior
from tests.selection import rows
from tests.tiny_models import tiny_model

from .runs import Config, Use, brightness, labelled, of_kind, same_weights, train, weights
from .test_cells import ALGORITHMS, guidance_of

CELLS = [
    *product(["flux_fill"], ALGORITHMS),
    *product(["sd_inpaint", "qwen_image"], ["sft", "grpo", "nft"]),
    ("sd_inpaint", "reward_gradient"),
]

ADAPTER = {"kind": "ip_adapter", "image_encoder": "tiny", "tokens": 4}


@pytest.fixture(scope="session")
def styled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `targets` and `prompts`, whose references are other words in the style of each sign."""
    root = tmp_path_factory.mktemp("styled")
    write_signs(root / "targets", draw_words(6, "train", 1), (32, 64), 1, styled=True)
    write_signs(root / "prompts", draw_words(6, "train", 2), (32, 64), 2, with_targets=False, first_id=50, styled=True)
    return root


def run_of(config: Config, styled: Path, algorithm: str, adapter: dict[str, Any], **overrides: Any) -> RunConfig:
    own = {"name": algorithm, **ALGORITHMS[algorithm]}
    if algorithm != "sft":
        own["warmup_steps"] = 1
    section = {"format": "self_bench", "resolution": [32, 64]}
    targets = {**section, "path": str(styled / "targets")}
    window = {"size": 1, "range": [0, 0.5]} if algorithm in ("grpo", "ppo") else None
    settings: dict[str, Any] = {
        "model": {"family": "flux_fill", "path": "tiny", "dtype": "fp32", "train": {**ADAPTER, **adapter}},
        "data": targets if algorithm == "sft" else {**section, "path": str(styled / "prompts"), "target": "none"},
        "warmup_data": targets,
        "evaluation__data": targets,
        "evaluation__allow_overlap": True,
        "algorithm": own,
        "rollout__window": window,
        "rollout__noise_level": None,
        "optimizer": {"lr": 3e-3, "batch_size_per_device": 2 if algorithm == "dpo" else 4, "gradient_accumulation": 1},
        "training__max_steps": 3,
        "training__checkpoint_every": 2,
        "ema": {"decay": 0.9},
    }
    if algorithm == "kto":
        settings["data"] = {"format": "manifest", "path": str(labelled(styled, styled)), "resolution": [32, 64]}
    return config(**{**settings, **overrides})


def base_of(run: Run) -> dict[str, torch.Tensor]:
    """The weights of the network that are not the adapter's."""
    names = set(run.trainee.adapter.names.values())  # type: ignore[attr-defined]
    return {
        n: p.detach().clone() for n, p in run.model.network.named_parameters() if n not in names and "lora" not in n
    }


STARTS: dict[str, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
"""Family -> weights of the adapter and of the network before training, which depend on seed and family alone."""


def start_of(made: RunConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    if made.model.family not in STARTS:
        start = build(made)
        start.close()
        STARTS[made.model.family] = weights(start), base_of(start)
    return STARTS[made.model.family]


@pytest.mark.parametrize(
    ("family", "algorithm"),
    rows(
        CELLS,
        [("flux_fill", "reward_gradient"), ("sd_inpaint", "grpo"), ("qwen_image", "nft")],
    ),
)
@pytest.mark.usefixtures("bare", "shallow")
def test_every_algorithm_trains_the_adapter_alone_and_resumes_bitwise(
    family: str, algorithm: str, config: Config, scripted: Use, styled: Path
) -> None:
    scripted(brightness)
    own: dict[str, Any] = {"model__family": family, "model__path": tiny_model(family)}
    own |= {"evaluation__num_examples": 1, "evaluation__num_steps": 1}  # looked at elsewhere
    if algorithm == "reward_gradient":
        own["rollout__guidance_scale"] = guidance_of(family)
    before, base = start_of(run_of(config, styled, algorithm, {}, name="start", **own))
    whole, records = train(run_of(config, styled, algorithm, {}, name="whole", **own))
    assert all(step["grad_norm"] > 0 for step in of_kind(records, "train"))
    after = weights(whole)
    unmoved = [n for n, t in after.items() if torch.equal(t, before[n])]
    assert not unmoved  # the projection too: its tokens are not cut off from the graph
    assert all(torch.equal(t, base[n]) for n, t in base_of(whole).items())
    first = next((r for r in of_kind(records, "train") if r["phase"] == "rl"), {})
    assert first.get("max_abs_log_ratio", 0) <= 1e-5  # rollout and training are one policy
    folder = whole.dir.path / "checkpoints" / "step-000003"
    for kind in ("weights", "ema"):
        assert {f.name for f in (folder / kind).iterdir()} == {"ip-adapter.safetensors", "ip-adapter.bin"}
        a, b = (read_adapter(folder / kind / f"ip-adapter.{end}").tensors for end in ("safetensors", "bin"))
        assert list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)
    own["resume"] = str(whole.dir.path / "checkpoints/step-000002")
    second, _ = train(run_of(config, styled, algorithm, {}, name="whole", **own))
    assert same_weights(after, weights(second))


@pytest.mark.parametrize(
    ("choice", "trained"),
    [
        pytest.param("all", lambda key: True, marks=pytest.mark.full),
        pytest.param(
            "no_last_layer", lambda key: ".proj.2." not in key and ".id_proj.2." not in key, marks=pytest.mark.full
        ),
        ("kv", lambda key: key.startswith("ip_adapter.")),
    ],
)
@pytest.mark.usefixtures("bare", "shallow")
def test_what_is_trained(choice: str, trained: Any, config: Config, scripted: Use, styled: Path) -> None:
    """And the files hold everything: what is frozen as it was, what is trained as it became."""
    scripted(brightness)
    adapter = {"weights": choice, "query_former": True}
    start = build(run_of(config, styled, "sft", adapter, name="start"))
    start.close()
    names = start.trainee.adapter.names  # type: ignore[attr-defined]
    assert start.policy.parameters.keys() == {name for key, name in names.items() if trained(key)}
    before = {key: t.clone() for key, t in start.trainee.adapter.tensors().items()}  # type: ignore[attr-defined]
    run, _ = train(run_of(config, styled, "sft", adapter, name="run", training__max_steps=3))
    written = read_adapter(run.dir.path / "checkpoints/step-000003/weights")
    assert written.metadata["image_encoder"] == "tiny"
    # the bias of the queries of one attention moves all scores of a head alike, and so nothing
    changed = {key for key, t in written.tensors.items() if not torch.equal(t, before[key])}
    assert changed == {key for key in names if trained(key)}


@pytest.mark.usefixtures("bare", "shallow")
def test_lora_is_merged_into_the_files_and_goes_on_from_its_factors(
    config: Config, scripted: Use, styled: Path
) -> None:
    scripted(brightness)
    adapter = {"weights": "kv_lora", "rank": 3, "alpha": 6}
    whole, _ = train(run_of(config, styled, "grpo", adapter, name="whole"))
    assert all(".processor.to_" in n and ".lora_" in n for n in whole.policy.parameters)
    folder = whole.dir.path / "checkpoints" / "step-000003"
    factors, file = load_file(folder / "weights/ip-adapter-lora.safetensors"), read_adapter(folder / "weights")
    block = "transformer_blocks.1.attn.processor.to_v_ip"
    layer = whole.model.network.get_submodule(block)
    a, b = (factors[f"{block}.lora_{x}.default.weight"] for x in "AB")
    assert float(b.abs().max()) > 0
    torch.testing.assert_close(file.tensors["ip_adapter.1.to_v_ip.weight"], layer.base_layer.weight + 2.0 * b @ a)  # type: ignore[union-attr,operator]
    resume = str(whole.dir.path / "checkpoints/step-000002")
    second, _ = train(run_of(config, styled, "grpo", adapter, name="whole", resume=resume))
    assert same_weights(weights(whole), weights(second))


@pytest.mark.usefixtures("bare", "shallow")
def test_with_the_value_norm_training_is_on_policy_and_resumes_bitwise(
    config: Config, scripted: Use, styled: Path
) -> None:
    scripted(brightness)
    adapter = {"value_norm": True, "scale": 0.5}
    own = {"evaluation__num_examples": 1, "evaluation__num_steps": 1}
    whole, records = train(run_of(config, styled, "grpo", adapter, name="whole", **own))
    assert all(0 < step["grad_norm"] < float("inf") for step in of_kind(records, "train"))
    first = next(r for r in of_kind(records, "train") if r["phase"] == "rl")
    assert first["max_abs_log_ratio"] <= 1e-5
    for kind in ("weights", "ema"):
        written = read_adapter(whole.dir.path / "checkpoints/step-000003" / kind)
        assert written.value_norm is True
    resume = str(whole.dir.path / "checkpoints/step-000002")
    second, _ = train(run_of(config, styled, "grpo", adapter, name="whole", resume=resume, **own))
    assert same_weights(weights(whole), weights(second))
    with pytest.raises(CheckpointError, match=r"trained with value_norm=True, .* set model\.train\.value_norm=true"):
        train(run_of(config, styled, "grpo", {**adapter, "value_norm": None}, name="whole", resume=resume, **own))


@pytest.mark.usefixtures("bare", "shallow")
def test_training_goes_on_from_a_file_of_any_layout(
    config: Config, scripted: Use, styled: Path, tmp_path: Path
) -> None:
    scripted(brightness)
    first, _ = train(run_of(config, styled, "sft", {}, name="first"))
    folder = first.dir.path / "checkpoints/step-000003/weights"
    nested = torch.load(folder / "ip-adapter.bin", weights_only=True)
    torch.save({"image_proj_mlp": nested["image_proj"], "attn_adapter": nested["ip_adapter"]}, tmp_path / "legacy.bin")
    for path in (folder, folder / "ip-adapter.safetensors", tmp_path / "legacy.bin"):
        made = build(run_of(config, styled, "grpo", {"initial_adapter": str(path)}, name="next"))
        made.close()
        assert same_weights(weights(made), weights(first))


@pytest.mark.usefixtures("bare", "shallow")
def test_dropped_references_train_nothing_and_are_drawn_anew_each_step(config: Config, styled: Path) -> None:
    """On a frozen network a row without tokens has no gradient for the adapter; half the rows of many are dropped."""
    _, none = train(run_of(config, styled, "sft", {"reference_dropout": 1.0}, name="all"))
    assert [r["grad_norm"] for r in of_kind(none, "train")] == [0, 0, 0]
    _, some = train(run_of(config, styled, "sft", {"reference_dropout": 0.5}, name="half"))
    _, every = train(run_of(config, styled, "sft", {}, name="none"))
    norms = [[r["grad_norm"] for r in of_kind(records, "train")] for records in (some, every)]
    assert norms[0] != norms[1] and sum(norms[0]) > 0


@pytest.mark.parametrize("weights_of", [pytest.param("all", marks=pytest.mark.full), "kv_lora"])
@pytest.mark.usefixtures("bare", "shallow")
def test_an_adapter_on_a_quantized_base(config: Config, scripted: Use, styled: Path, weights_of: str) -> None:
    """On-policy, trained, and its files are whole."""
    scripted(brightness)
    small = {"rollout__batch_size_per_device": 1, "optimizer": {"lr": 3e-3, "batch_size_per_device": 1}}
    made = run_of(config, styled, "grpo", {"weights": weights_of}, model__quantize="int8", **small)
    done, records = train(made)
    first = next(r for r in of_kind(records, "train") if r["phase"] == "rl")
    assert first["max_abs_log_ratio"] <= 1e-6 and first["grad_norm"] > 0
    layers = [type(m).__name__ for m in done.model.network.modules()]
    assert "QuantizedLinear" in layers
    assert not read_adapter(done.dir.path / "checkpoints/step-000003/weights").unused


# --- using what was trained ---


@pytest.fixture(scope="module")
def finished(styled: Path, signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run with an adapter of 128 tokens, averaged, at a learning rate that shows."""
    root = tmp_path_factory.mktemp("finished")
    section = {"format": "self_bench", "resolution": [32, 64], "path": str(styled / "targets")}
    model = {"family": "flux_fill", "path": "tiny", "dtype": "fp32", "max_sequence_length": 24}
    data = small_run(
        signs,
        root,
        name="styled",
        model={**model, "train": {**ADAPTER, "tokens": 128}},
        data=section,
        warmup_data=None,
        evaluation__data=section,
        evaluation__allow_overlap=True,
        algorithm={"name": "sft"},
        rewards={"preservation": {}},
        optimizer={"lr": 3e-3, "batch_size_per_device": 4, "gradient_accumulation": 1},
        ema={"decay": 0.5},
        training__max_steps=6,
    )
    train(parse_run(data))
    return root / "styled"


def pixels(path: Path) -> Any:
    return np.asarray(Image.open(path)).astype(int)


def test_sample_takes_a_reference(finished: Path, styled: Path, tmp_path: Path) -> None:
    """Those of the data, one for all, one with a single picture; each is another style."""
    data = styled / "targets"
    one = ("--image", data / "test1_source.png", "--mask", data / "test1_mask.png", "--text", "MOON")
    runs = {
        "own": ("--data", data),
        "one for all": ("--data", data, "--reference", data / "test2_ref.png"),
        "single": (*one, "--reference", data / "test2_ref.png"),
        "single other": (*one, "--reference", data / "test0_ref.png"),
    }
    drawn: dict[str, dict[str, Any]] = {}
    for name, arguments in runs.items():
        outcome = retouch("sample", "--run", finished, *arguments, "--out", tmp_path / name)
        assert outcome.code == 0, outcome.err
        drawn[name] = {path.name: pixels(path) for path in (tmp_path / name).glob("*.png")}
    same = {n for n, picture in drawn["own"].items() if np.array_equal(picture, drawn["one for all"][n])}
    assert same == {"test2_source.png"}  # the one whose own reference it is
    assert not np.array_equal(drawn["single"]["test1_source.png"], drawn["single other"]["test1_source.png"])
    refused = retouch("sample", "--run", finished, *one, "--out", tmp_path / "refused")
    assert refused.code == 2 and "--image needs --reference: the run trained with references" in refused.err


def test_eval_takes_a_reference(finished: Path, styled: Path, tmp_path: Path) -> None:
    data = styled / "targets"
    means: list[dict[str, Any]] = []
    for extra in ((), ("--reference", data / "test2_ref.png")):
        outcome = retouch("eval", "--run", finished, "--data", data, "--json", *extra)
        assert outcome.code == 0, outcome.err
        means.append(json.loads(outcome.out)["means"])
    base = [m["base"]["preservation"] for m in means]
    assert base[0] == base[1]  # a new adapter sees no difference between references
    assert means[0]["trained"]["preservation"] != means[1]["trained"]["preservation"]


def test_a_run_without_an_adapter_takes_no_reference(config: Config, tmp_path: Path, styled: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(config()), encoding="utf-8")
    data = styled / "targets"
    for command in ("sample", "eval"):
        outcome = retouch(
            *(command, "--config", path, "--data", data, "--reference", data / "test0_ref.png"),
            *("--out", tmp_path / "out"),
        )
        assert outcome.code == 2
        assert "the run trained full weights, which take no reference" in outcome.err


def test_a_style_reward_takes_a_reference_to_score_and_none_to_draw(
    config: Config, styled: Path, tmp_path: Path
) -> None:
    """A run of a LoRA, say, whose network sees no reference; an item without one is drawn, but cannot be judged."""
    rewards = {"style": {"image_encoder": "tiny", "gate": 0}}
    path, data = tmp_path / "run.yaml", tmp_path / "data"
    path.write_text(dump_run(config(rewards=rewards)), encoding="utf-8")
    data.mkdir()
    for name in ("source", "mask"):
        copy(styled / f"targets/test1_{name}.png", data)
    (data / "self_bench.txt").write_text("1-MOON\n", encoding="utf-8")
    common, reference = ("--config", path, "--data", data), ("--reference", styled / "targets/test2_ref.png")
    drawn = retouch("sample", *common, "--out", tmp_path / "drawn")
    assert drawn.code == 0, drawn.err
    refused = retouch("sample", *common, *reference, "--out", tmp_path / "refused")
    assert refused.code == 2 and "which take no reference; leave it out" in refused.err
    assert "reference_path missing, which the run needs" in retouch("eval", *common).err
    judged = retouch("eval", *common, "--json", *reference)
    assert judged.code == 0, judged.err
    assert "style" in json.loads(judged.out)["means"]["base"], judged.err


def test_a_bad_initial_adapter_is_refused_before_the_model_is_loaded(
    config: Config, scripted: Use, styled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    monkeypatch.setattr("retouch.training.build.load_model", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    path = tmp_path / "run.yaml"
    for name, message in (("nowhere.bin", "given '{}'; no such file"), ("damaged.safetensors", "{}: damaged")):
        given = {"initial_adapter": str(tmp_path / name)}
        path.write_text(dump_run(run_of(config, styled, "grpo", given, name=f"of-{name}")), encoding="utf-8")
        outcome = retouch("train", path)
        assert outcome.code == 2, outcome.err
        assert f"model.train.initial_adapter: {message.format(tmp_path / name)}" in outcome.err


def test_factors_of_a_file_are_merged_where_the_network_is() -> None:
    """They are read to the CPU; meta stands for an accelerator."""
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    spec = replace(FluxFillModel.spec, reference_width=16)
    train = TrainIpAdapter(kind="ip_adapter", weights="kv_lora", rank=3, tokens=4)
    trainee = train_ip_adapter(network, train, spec, 0)
    network.to("meta")
    state = {n: torch.zeros(p.shape) for n, p in network.named_parameters() if p.requires_grad}
    assert len(state) > 3
    assert {t.device.type for t in trainee._whole(state).values()} == {"meta"}  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("bare", "shallow")
def test_a_row_that_loses_its_caption_loses_its_reference(
    config: Config, styled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    real = supervised.denoising_error
    monkeypatch.setattr(supervised, "denoising_error", lambda *a: found.append(a) or real(*a))
    monkeypatch.setitem(ALGORITHMS, "sft", {"caption_dropout": 0.5})
    optimizer = {"lr": 3e-3, "batch_size_per_device": 16, "gradient_accumulation": 1}
    own: dict[str, Any] = {"model__family": "sd_inpaint", "model__path": tiny_model("sd_inpaint")}
    own |= {"training__max_steps": 1, "optimizer": optimizer}
    for share in (0.0, 0.3):
        train(run_of(config, styled, "sft", {"reference_dropout": share}, name=f"s{share}", **own))
    model, alone, both = found[0][0], found[0][6].tensors, found[1][6].tensors
    empty = model.encode([Example(0, "", Image.new("RGB", (64, 32)), Image.new("L", (64, 32), 255))], 1.0)
    uncaptioned = (alone["text"] == empty.tensors["text"]).flatten(1).all(1)
    assert 2 <= int(uncaptioned.sum()) <= 14
    assert torch.equal(alone["reference_keep"] == 0, uncaptioned)
    gone = both["reference_keep"] == 0
    assert torch.equal(both["text"], alone["text"])
    assert gone[uncaptioned].all() and 0 < int(gone[~uncaptioned].sum()) < int((~uncaptioned).sum())


@pytest.mark.parametrize(
    ("to", "files"),
    [
        ("comfyui", {"ip-adapter.bin"}),
        ("ip-adapter", {"ip-adapter.bin", "ip-adapter.safetensors"}),
        ("safetensors", {"ip-adapter.safetensors"}),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_export(finished: Path, to: str, files: set[str], raw: bool, tmp_path: Path) -> None:
    """Averaged weights unless raw ones are asked for; every file is the checkpoint's, bit for bit."""
    checkpoint = finished / "checkpoints/step-000006"
    outcome = retouch("export", checkpoint, "--to", to, "--out", tmp_path / "out", *(["--raw"] if raw else []))
    assert outcome.code == 0, outcome.err
    assert ("set weight=" in outcome.err) == (to == "comfyui")
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    expected, other = (read_adapter(checkpoint / kind).tensors for kind in ("ema", "weights")[:: -1 if raw else 1])
    for name in files:
        found = read_adapter(tmp_path / "out" / name).tensors
        assert all(torch.equal(found[key], t) for key, t in expected.items())
        assert any(not torch.equal(found[key], t) for key, t in other.items())
    assert Path(outcome.out.strip()).name in files


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (
            "diffusers-lora",
            "but the run trained ip_adapter weights; use --to ip-adapter, comfyui, diffusers-ip-adapter",
        ),
        ("diffusers", "but the run trained ip_adapter weights"),
        ("diffusers-ip-adapter", "which has no place for a mlp adapter; use --to ip-adapter"),
    ],
)
def test_formats_that_do_not_fit_are_refused(finished: Path, to: str, message: str, tmp_path: Path) -> None:
    outcome = retouch("export", finished / "checkpoints/step-000006", "--to", to, "--out", tmp_path / "out")
    assert outcome.code == 2 and message in outcome.err
    assert not (tmp_path / "out").exists()


def test_ten_lines_for_users(finished: Path, styled: Path) -> None:
    """A stock pipeline draws with the file what `retouch sample` draws, and without it what it drew before."""
    loaded = Loaded(load_run(finished / "config.yaml"))
    loaded.load(finished / "checkpoints/step-000006/ema")
    example = load_dataset(loaded.config.evaluation.data)[0]  # type: ignore[arg-type]
    condition = loaded.model.encode([example], 30.0)
    final = sample(loaded.model, loaded.network, ode_plan(loaded.model.schedule(3, (32, 64))), condition, [11]).final
    ours = ((loaded.model.decode(final) + 1) / 2).permute(0, 2, 3, 1).numpy()

    pipe: Any = with_point_posterior(FluxFillPipeline.from_pretrained(tiny_path("flux_fill")))
    pipe.to(torch.float32)
    noise, _ = noise_for((8, 8, 16), [11])
    call = {
        "prompt": example.prompt,
        "image": example.source,
        "mask_image": example.mask,
        "height": 32,
        "width": 64,
        "num_inference_steps": 3,
        "guidance_scale": 30.0,
        "max_sequence_length": 24,
        "latents": pack(noise),
        "output_type": "np",
    }

    def drawn(**options: Any) -> Any:  # the point posterior still draws noise of 3e-7
        return pipe(**call, **options, generator=torch.Generator().manual_seed(0)).images

    before = drawn()
    adapter = retouch_adapters.load(finished / "checkpoints/step-000006/ema/ip-adapter.safetensors").attach(pipe)
    reference = adapter.condition([example.reference])  # type: ignore[list-item]
    theirs = drawn(**reference)
    assert np.abs(theirs - ours).max() <= 1e-4
    assert np.abs(theirs - before).max() > 1e-2
    assert np.array_equal(drawn(), before)
    adapter.set_scale(0.0)
    assert np.array_equal(drawn(**reference), before)
    adapter.detach()
    assert np.array_equal(drawn(), before)
    with pytest.raises(ConfigError, match="is not attached"):
        adapter.detach()
    nameless = retouch_adapters.load(finished / "checkpoints/step-000006/ema/ip-adapter.bin").attach(pipe)
    with pytest.raises(ConfigError, match="names no image encoder"):
        nameless.condition([example.reference])  # type: ignore[list-item]


def test_a_reference_in_memory_is_evaluated_as_its_file(finished: Path, styled: Path, tmp_path: Path) -> None:
    """Also a photograph on its side, and one in CMYK."""
    turned = Image.Exif()
    turned[0x0112] = 6
    with Image.open(next((styled / "targets").glob("*_ref.png"))) as image:
        image.convert("CMYK").save(tmp_path / "style.jpg", exif=turned)
    run = load(finished)
    by_path = run.evaluate(images=1, reference=tmp_path / "style.jpg")
    assert run.evaluate(images=1, reference=Image.open(tmp_path / "style.jpg")) == by_path


def image_of(model: Any, network: Any, example: Example, guidance: float) -> torch.Tensor:
    condition = model.encode([example], guidance)
    plan = ode_plan(model.schedule(3, (32, 64)))
    return model.decode(sample(model, network, plan, condition, [11]).final)


@pytest.mark.parametrize(
    ("family", "to", "name"),
    [
        pytest.param("flux_fill", "comfyui", "ip-adapter.bin", marks=pytest.mark.full),
        pytest.param("sd_inpaint", "diffusers-ip-adapter", "ip-adapter.safetensors", marks=pytest.mark.full),
        ("qwen_image", "ip-adapter", "ip-adapter.bin"),
    ],
)
def test_every_file_draws_and_goes_on_at_the_scale_of_training(
    family: str, to: str, name: str, config: Config, styled: Path, tmp_path: Path
) -> None:
    """What `retouch sample --run` draws, every file draws that is attached as it is, and training from it starts with:
    the checkpoint's, which says the scale, and other programs', which hold it in their values."""
    own: dict[str, Any] = {"model__family": family, "model__path": tiny_model(family), "training__max_steps": 2}
    own |= {"evaluation__num_examples": 1, "evaluation__num_steps": 1}
    adapter = {"scale": 0.25, "tokens": 128 if to == "comfyui" else 4}
    run, _ = train(run_of(config, styled, "sft", adapter, name="quarter", **own))
    folder = run.dir.path / "checkpoints/step-000002"
    loaded = Loaded(run.config)
    loaded.load(folder / "ema")
    example, guidance = load_dataset(run.config.evaluation.data)[0], loaded.guidance_scale  # type: ignore[arg-type]
    expected = image_of(loaded.model, loaded.network, example, guidance)
    assert retouch("export", folder, "--to", to, "--out", tmp_path / "out").code == 0
    stock = load_model(run.config.model, torch.device("cpu"))
    for file, says in ((folder / "ema", True), (tmp_path / "out" / name, False)):
        attached = retouch_adapters.load(file).attach(stock.network)
        drawn = image_of(stock, stock.network, example, guidance)
        torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)
        attached.set_scale(1.0)
        full = image_of(stock, stock.network, example, guidance)
        assert (float((full - expected).abs().max()) > 1e-3) == says
        attached.detach()
        again = {**adapter, "scale": None, "initial_adapter": str(file)}
        made = build(run_of(config, styled, "sft", again, name=f"says-{says}", **own))
        made.close()
        drawn = image_of(made.model, made.network, example, guidance)
        torch.testing.assert_close(drawn, expected, rtol=0, atol=1e-5)


def test_another_scale_than_that_of_training_is_refused(tmp_path: Path) -> None:
    """It would fit, and draw something else. A file that says none may be of any."""
    spec = replace(FluxFillModel.spec, reference_width=16)

    def trainee(scale: float | list[float]) -> IpAdapterWeights:
        network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
        return train_ip_adapter(network, TrainIpAdapter(scale=scale, tokens=4), spec, 0)

    trained = trainee(0.25)
    trained.save({}, tmp_path)
    trainee([0.25] * 6).load(tmp_path)
    with pytest.raises(ValueError, match=r"^trained at scale 0\.25, but model\.train has \[1, 1, 1, 1, 1, 0\]$"):
        trainee([1.0] * 5 + [0.0]).load(tmp_path)
    tensors = read_adapter(tmp_path).tensors
    write_safetensors(tmp_path / "ip-adapter.safetensors", tensors, {"family": "flux_fill"})
    trainee(1.0).load(tmp_path)


def test_a_factor_for_each_block_of_a_run_file_reaches_its_block() -> None:
    network: Any = FluxTransformer2DModel.from_pretrained(tiny_path("flux_fill") / "transformer")
    spec = replace(FluxFillModel.spec, reference_width=16)
    factors = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    train_ip_adapter(network, TrainIpAdapter(scale=factors, tokens=4), spec, 0)
    assert [processor.scale for processor in network.attn_processors.values()] == factors
