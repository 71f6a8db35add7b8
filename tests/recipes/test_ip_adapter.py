"""Style adapters trained from a run file: every algorithm, every choice of weights, their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from retouch.adapters.formats import read_adapter
from retouch.build import Run, build
from retouch.config import RunConfig
from retouch.data.synth import draw_words, write_signs

from .runs import Config, Use, brightness, of_kind, train, weights
from .test_cells import ALGORITHMS

FAMILIES = ("flux_fill",)

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
        "algorithm": own,
        "rollout__window": window,
        "rollout__noise_level": None,
        "optimizer": {"lr": 3e-3, "batch_size_per_device": 2 if algorithm == "dpo" else 4, "gradient_accumulation": 1},
        "training__max_steps": 3,
        "training__checkpoint_every": 2,
        "ema": {"decay": 0.9},
    }
    return config(**{**settings, **overrides})


def base_of(run: Run) -> dict[str, torch.Tensor]:
    """The weights of the network that are not the adapter's."""
    names = set(run.trainee.adapter.names.values())  # type: ignore[attr-defined]
    return {
        n: p.detach().clone() for n, p in run.model.network.named_parameters() if n not in names and "lora" not in n
    }


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_algorithm_trains_the_adapter_alone_and_resumes_bitwise(
    family: str, algorithm: str, config: Config, scripted: Use, styled: Path
) -> None:
    scripted(brightness)
    start = build(run_of(config, styled, algorithm, {}, name="start"))
    start.close()
    before, base = weights(start), base_of(start)
    whole, records = train(run_of(config, styled, algorithm, {}, name="whole"))
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
    again = run_of(config, styled, algorithm, {}, name="whole", resume=str(whole.dir.path / "checkpoints/step-000002"))
    second, _ = train(again)
    assert all(torch.equal(t, weights(second)[n]) for n, t in after.items())


@pytest.mark.parametrize(
    ("choice", "trained"),
    [
        ("all", lambda key: True),
        ("no_last_layer", lambda key: ".proj.2." not in key and ".id_proj.2." not in key),
        ("kv", lambda key: key.startswith("ip_adapter.")),
    ],
)
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
    assert all(torch.equal(t, weights(second)[n]) for n, t in weights(whole).items())


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
        assert all(torch.equal(t, weights(first)[n]) for n, t in weights(made).items())


def test_dropped_references_train_nothing_and_are_drawn_anew_each_step(config: Config, styled: Path) -> None:
    """On a frozen network a row without tokens has no gradient for the adapter; half the rows of many are dropped."""
    _, none = train(run_of(config, styled, "sft", {"reference_dropout": 1.0}, name="all"))
    assert [r["grad_norm"] for r in of_kind(none, "train")] == [0, 0, 0]
    _, some = train(run_of(config, styled, "sft", {"reference_dropout": 0.5}, name="half"))
    _, every = train(run_of(config, styled, "sft", {}, name="none"))
    norms = [[r["grad_norm"] for r in of_kind(records, "train")] for records in (some, every)]
    assert norms[0] != norms[1] and sum(norms[0]) > 0
