"""Forwards, images and FLOPs of a step are those that were computed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from retouch.config import RunConfig, derive
from retouch.config.cost import cost as known_before
from retouch.families import FAMILIES
from retouch.observe import cost
from retouch.observe.cost import Costs, forward_flops
from retouch.observe.timing import Stopwatch
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.types import Example
from tests.algorithms.runs import of_kind, train
from tests.families.facts import text_length
from tests.families.test_contract import CASES, examples_of, start, times_of, tiny
from tests.selection import covering, rows
from tests.tiny_models import tiny_model

Config = Callable[..., RunConfig]

pytestmark = pytest.mark.usefixtures("shallow")

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
    """And an epoch with one step left of two is sampled whole, in the numbers before the run as in the run."""
    given = config(training__max_steps=1, model__train={"kind": "lora", "rank": 4, "alpha": 8})
    _, records = train(given)
    counted = totals(records)
    assert derive(given).optimizer_steps_per_epoch == 2
    assert known_before(given).images == counted["nfe_rollout"] / given.rollout.num_steps == 4
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


class Multiplications(TorchFunctionMode):
    """FLOPs of matrices, convolutions and attention by their closed forms, from the shapes of a real forward: nothing
    that torch's own counter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "linear":
            self.flops += 2 * output.numel() * args[0].shape[-1]
        elif name in ("conv2d", "conv3d"):
            weight = args[1]
            self.flops += 2 * output.numel() * math.prod(weight.shape[1:])
        elif name in ("matmul", "bmm", "__matmul__"):
            self.flops += 2 * output.numel() * args[0].shape[-1]
        elif name == "scaled_dot_product_attention":
            query, key, value = (args + tuple((kwargs or {}).get(n) for n in ("query", "key", "value")[len(args) :]))[
                :3
            ]
            scores = math.prod(query.shape[:-1]) * key.shape[-2]  # of every head
            self.flops += 2 * scores * (query.shape[-1] + value.shape[-1])
        return output


SCALES = (3.0, 1.0)
GUIDED = [(*case, scale) for case in CASES for scale in SCALES]
ALTERNATELY = [
    (family, masked, SCALES[n % 2] if FAMILIES[family].spec.doubles_for_guidance else 1.0)
    for n, (family, masked) in enumerate(CASES)
]


@pytest.mark.parametrize(("family", "masked", "guidance"), rows(GUIDED, covering(ALTERNATELY, 1)))
def test_flops_are_those_of_the_real_network(
    family: str, masked: bool, guidance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every family, with a source and mask where it takes them, for prompts of different lengths: by the closed
    forms, and by torch's counter, of the forward that was computed. With a gradient, what a backward takes is added."""
    model = tiny(family)
    if guidance > 1 and not model.spec.doubles_for_guidance:
        pytest.skip("the scale is an input of the network")
    condition, x, t = model.encode(examples_of(masked), guidance), start(model), times_of(model)
    # torch's counter has no formula for the fused attention of CPUs
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.predict(model.network, x, t, condition)
    with torch.no_grad(), Multiplications() as closed:
        model.predict(model.network, x, t, condition)
    monkeypatch.setattr(cost, "peak_flops", lambda network: 1e12)
    costs = Costs(model.network, Stopwatch(), frozen=True, recomputes=False)
    before = torch.get_rng_state()
    for trains in (False, True, True):  # counted once, remembered, and of the same network again
        with torch.set_grad_enabled(trains):
            model.predict(model.network, x, t, condition)
    costs.close()
    counted = costs.split(seconds=1.0)["tflops"] * 1e12 / (1 + 2 + 2)
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-12)
    assert counted == pytest.approx(closed.flops, rel=1e-12) and counted > 1e7
    assert torch.equal(torch.get_rng_state(), before)


def test_flops_depend_on_the_prompt_and_not_on_the_batch() -> None:
    """Text has its FLOPs, too: a longer prompt takes more, a larger batch as many a sample."""
    model, found = tiny("qwen_image"), list[float]()
    hook = model.network.register_forward_pre_hook(
        lambda network, args, kwargs: found.append(forward_flops(network, args, kwargs)), with_kwargs=True
    )
    for prompt, count in (("W", 1), ("W", 2), ("The text is " + 40 * "W", 1)):
        examples = [Example(0, prompt, size=(32, 64))] * count
        with torch.no_grad():
            model.predict(model.network, start(model, rows=count), times_of(model, count), model.encode(examples, 1.0))
    hook.remove()
    short, twice, long = found
    assert short == twice < long


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_gpu_by_its_name(name: str, peak: float | None) -> None:
    assert cost.peak_of(name) == peak


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
    counted: defaultdict[str, set[float]] = defaultdict(set)

    def spied(*given: Any) -> float:
        flops = forward_flops(*given)
        counted[kind].add(flops)
        return flops

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
    model |= {"max_sequence_length": length} if (length := text_length(family)) else {}
    for kind, options in {"full": {}, "ip_adapter": {"image_encoder": "tiny", "tokens": 4}}.items():
        train(config(name=kind, model={**model, "train": {"kind": kind, **options}}, **common))
    assert counted["full"] == counted["ip_adapter"] and min(counted["full"]) > 0


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
