"""Forwards, images and FLOPs of a step are those that were computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from retouch.config import RunConfig, derive
from retouch.data.dataset import load_dataset
from retouch.families.loading import load_model
from retouch.observe import cost
from retouch.observe.cost import Costs, forward_flops
from retouch.observe.timing import Stopwatch
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from tests.algorithms.runs import of_kind, train
from tests.tiny_models import tiny_model

Config = Callable[..., RunConfig]

SD = {"family": "sd_inpaint", "path": "tiny", "dtype": "fp32", "train": {"kind": "full"}}
ODE: dict[str, Any] = {"rollout__window": None, "rollout__noise_level": None}


def totals(records: list[dict[str, Any]]) -> dict[str, float]:
    """Of all training steps and evaluations."""
    times = [r["time"] for r in records if r["kind"] in ("train", "eval")]
    names = [*(f"nfe_{part}" for part in cost.COUNTED), "images"]
    return {name: sum(t.get(name, 0.0) for t in times) for name in names}


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"algorithm__kl_weight": 0.1}, marks=pytest.mark.full),
        {"algorithm__kl_weight": 0.1, "optimizer__steps_per_forward": 1, "training__gradient_checkpointing": True},
        pytest.param({"model": SD, "rollout__noise_level": None}, marks=pytest.mark.full),  # guided: twice
        {"algorithm": {"name": "nft", "timesteps_per_image": 2, "kl_weight": 0.1, "old_policy": "copy"}, **ODE},
        pytest.param({"algorithm": {"name": "dpo", "timesteps_per_pair": 2}, **ODE}, marks=pytest.mark.full),
    ],
    ids=["grpo", "grpo_checkpointed", "guided", "nft", "dpo"],
)
def test_what_is_counted_is_what_was_derived(overrides: dict[str, Any], config: Config) -> None:
    """Of full weights, where a backward is two forwards; every group of these runs has a signal."""
    given = config(training__max_steps=2, optimizer__gradient_accumulation=2, **overrides)
    _, records = train(given)
    counted = totals(records)
    assert counted["images"] == 2 * 4
    assert [r["zero_std_groups"] for r in of_kind(records, "rollout")] == [0.0, 0.0]
    computed = sum(counted[f"nfe_{part}"] for part in ("rollout", "train_forward", "train_backward"))
    assert computed == counted["images"] * derive(given).forwards_per_image
    steps, guided = given.rollout.num_steps, 2 if given.model.family == "sd_inpaint" else 1
    assert counted["nfe_rollout"] == counted["images"] * steps * guided
    assert counted["nfe_eval"] == 2 * 2 * steps * guided  # at the start and at the end


def test_a_backward_through_a_frozen_network_is_one_forward(config: Config) -> None:
    _, records = train(config(training__max_steps=1, model__train={"kind": "lora", "rank": 4, "alpha": 8}))
    counted = totals(records)
    assert counted["nfe_train_backward"] == counted["nfe_train_forward"] > 0


def test_supervised_rows_are_images(config: Config) -> None:
    _, records = train(config(algorithm={"name": "sft"}, training__max_steps=2, data=config().warmup_data))
    counted = totals(records)
    assert counted == {
        "nfe_rollout": 0,
        "nfe_train_forward": 4,
        "nfe_train_backward": 8,
        "nfe_eval": 12,
        "images": 4,
    }
    for record in of_kind(records, "train"):
        seconds = record["time"]
        assert seconds["images_per_s"] == pytest.approx(seconds["images"] / seconds["step"], rel=0.01)


@pytest.mark.parametrize("family", ["flux_fill", "sd_inpaint"])
def test_flops_are_those_of_the_real_network(family: str, config: Config) -> None:
    """Counted on a bare copy; for one row, whatever the batch."""
    length = {"max_sequence_length": 24} if family == "flux_fill" else {}
    given = config(model={"family": family, "path": "tiny", "dtype": "fp32", **length}, rollout__noise_level=None)
    model: Any = load_model(given.model)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    model.network.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    examples = list(load_dataset(given.data, "data", model.spec.needs))[:3]
    condition = model.encode(examples, 1.0)
    x = torch.randn(3, model.spec.latent_channels, 8, 16)
    # torch's counter has no formula for the fused attention of CPUs
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.predict(model.network, x, torch.full((3,), 0.5), condition)
    assert forward_flops(model.network, *seen[0]) == pytest.approx(counter.get_total_flops() / 3)
    assert counter.get_total_flops() > 1e7


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("flux_fill", marks=pytest.mark.full),
        "sd_inpaint",
        pytest.param("qwen_image", marks=pytest.mark.full),
    ],
)
def test_flops_of_a_network_with_a_style_adapter(
    family: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted without it, and a GPU's run, which counts them, trains: the UNet's config bears the adapter's mark."""
    counted: list[float] = []

    def spied(*given: Any) -> float:
        counted.append(forward_flops(*given))
        return counted[-1]

    monkeypatch.setattr(cost, "peak_flops", lambda network: 1e12)
    monkeypatch.setattr(cost, "forward_flops", spied)
    write_signs(tmp_path / "styled", draw_words(4, "train", 2), (32, 64), 2, styled=True)
    common: dict[str, Any] = {
        "data": {"format": "self_bench", "path": str(tmp_path / "styled"), "resolution": [32, 64]},
        "evaluation__data": None,
        "rollout__noise_level": None,
        "training__max_steps": 1,
    }
    model: dict[str, Any] = {"family": family, "path": tiny_model(family), "dtype": "fp32"}
    if family != "sd_inpaint":
        model["max_sequence_length"] = 24
    for train_section in (
        {"kind": "full"},
        {"kind": "ip_adapter", "image_encoder": "tiny", "tokens": 4},
    ):
        train(config(name=train_section["kind"], model={**model, "train": train_section}, **common))
    bare, adapted = counted
    assert adapted == bare > 0


class Wide(nn.Linear):
    """A network of 2 x 4 x 4 FLOPs a row."""


def test_share_of_the_peak_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows forward and backward, two without a gradient: 3 x 3 + 2 forwards. Recomputation is no use of it."""
    monkeypatch.setattr(cost, "peak_flops", lambda network: 1000.0)
    monkeypatch.setattr(cost, "forward_flops", lambda network, args, kwargs: 32.0)
    network, clock = Wide(4, 4), Stopwatch()
    costs = Costs(network, clock, frozen=False, recomputes=True)
    with clock.part("train_forward"):
        network(torch.ones(3, 4))
    with clock.part("rollout"), torch.no_grad():
        network(torch.ones(2, 4))
    found = costs.split(seconds=4.0)
    assert found["nfe_train_forward"] == 3 and found["nfe_train_backward"] == 9 and found["nfe_rollout"] == 2
    assert found["tflops"] == pytest.approx(11 * 32 / 4 / 1e12)
    assert found["mfu"] == pytest.approx(11 * 32 / 4 / 1000)
    assert costs.split(seconds=1.0)["mfu"] == 0.0
    costs.close()
    network(torch.ones(3, 4))
    assert "nfe_rollout" not in costs.split(seconds=1.0)
