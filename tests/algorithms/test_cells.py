"""Every family x algorithm x what is trained: it takes its steps, and resumed inside an epoch it goes on bitwise."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from retouch.config import RunConfig
from retouch.families import FAMILIES
from retouch.observe.run_dir import read_metrics
from tests.selection import covering, rows
from tests.tiny_models import WITH_BASE, narrow_sd, shallow_flux, tiny_model

from .runs import Config, Use, brightness, labelled, of_kind, same_weights, train, weights

TRAIN = {"full": {"kind": "full"}, "lora": {"kind": "lora", "rank": 4, "alpha": 8}}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"kl_weight": 0.1, "inner_epochs": 2},
    "ppo": {"kl_weight": 0.1, "inner_epochs": 2},
    "dpo": {"reference_refresh_every": 2, "inner_epochs": 2, "beta": 100.0},
    "kto": {"beta": 100.0, "timesteps_per_image": 2},
    "nft": {"old_policy": "ramp_half", "kl_weight": 0.1, "inner_epochs": 2},
    "reward_gradient": {"trained_step": "all", "last_steps": 2},
}

STEPS = 4
LAST = f"step-{STEPS:06d}"

CELLS = [
    *product(WITH_BASE, ALGORITHMS, TRAIN),
    *product(["qwen_image"], ["sft", "grpo", "nft", "reward_gradient"], ["lora"]),
    *product(["qwen_image_edit"], ["sft", "grpo", "dpo", "kto", "nft", "reward_gradient"], ["lora"]),
    ("qwen_image_edit", "grpo", "full"),
]

CHOSEN = [
    *(
        (family, name, list(TRAIN)[(n + m) % 2])
        for n, family in enumerate(WITH_BASE)
        for m, name in enumerate(ALGORITHMS)
    ),
    ("qwen_image", "nft", "lora"),
    ("qwen_image_edit", "grpo", "full"),
    ("qwen_image_edit", "dpo", "lora"),
]
"""Every algorithm on each base and on each kind of weights, and three on Qwen-Image, whose forwards take twice as long.
`make test` takes of these every family, algorithm and kind once."""


def cell(config: Config, family: str, algorithm: str, kind: str, **overrides: Any) -> RunConfig:
    """One warm-up step, an epoch of two steps and a step of the next (SFT: four steps); a checkpoint at step 2, inside
    an epoch."""
    own = {"name": algorithm, **ALGORITHMS[algorithm]}
    if algorithm != "sft":
        own["warmup_steps"] = 1
    window = {"size": 1, "range": [0, 0.5]} if algorithm in ("grpo", "ppo") else None
    if algorithm == "reward_gradient":
        overrides = {"rollout__guidance_scale": guidance_of(family), **overrides}
    return config(
        model={"family": family, "path": path_of(family), "dtype": "fp32", "train": TRAIN[kind]},
        algorithm=own,
        rollout__window=window,
        rollout__noise_level=None,
        optimizer={"lr": 1e-3, "batch_size_per_device": 2 if algorithm == "dpo" else 4, "gradient_accumulation": 1},
        training__max_steps=STEPS,
        training__checkpoint_every=2,
        evaluation__num_examples=1,
        ema={"decay": 0.9},
        **data_of(algorithm, overrides.pop("signs", None)),
        **overrides,
    )


def path_of(family: str) -> str:
    """A smaller network where there is one: runs of a cell are compared with each other alone."""
    smaller = {"flux_fill": shallow_flux, "sd_inpaint": narrow_sd}
    return smaller[family]() if family in smaller else tiny_model(family)


def data_of(algorithm: str, signs: Path | None) -> dict[str, Any]:
    """Targets for SFT, and labelled images for KTO; `signs` is only read for these."""
    if algorithm == "sft":
        assert signs is not None
        return {"data__path": str(signs / "targets"), "data__target": "auto"}
    if algorithm == "kto":
        assert signs is not None
        return {"data": {"format": "manifest", "path": str(labelled(signs, signs)), "resolution": [32, 64]}}
    return {}


def guidance_of(family: str) -> float:
    """Its own, or none where guidance takes a second forward."""
    facts = FAMILIES[family].spec
    return 1.0 if facts.doubles_for_guidance else facts.guidance_scale


@pytest.mark.parametrize(("family", "algorithm", "kind"), rows(CELLS, CHOSEN, fast=covering(CHOSEN, 1)))
def test_a_cell_trains_and_resumes_bitwise(
    family: str, algorithm: str, kind: str, config: Config, scripted: Use, signs: Path
) -> None:
    scripted(brightness)
    resumes_bitwise(family, algorithm, kind, config, signs=signs)


def resumes_bitwise(family: str, algorithm: str, kind: str, config: Config, **make: Any) -> None:
    """A run changes its weights, and one that goes on from its checkpoint inside an epoch ends like it."""
    base: dict[str, Tensor] = {}
    whole, records = train(cell(config, family, algorithm, kind, name="whole", **make), base)
    steps = of_kind(records, "train")
    assert [s["phase"] for s in steps] == (["sft"] * STEPS if algorithm == "sft" else ["warmup"] + ["rl"] * (STEPS - 1))
    assert all(s["grad_norm"] > 0 for s in steps)
    assert not same_weights(weights(whole), base)

    folder = whole.dir.path
    again = folder.with_name("again")
    shutil.copytree(folder, again)
    shutil.rmtree(again / "checkpoints" / LAST)
    second, _ = train(cell(config, family, algorithm, kind, name="again", resume="auto", **make))
    assert same_weights(weights(whole), weights(second))
    for name in whole.policy.snapshots:
        mine, theirs = whole.policy.state(name), second.policy.state(name)
        assert same_weights(mine, theirs), name
    assert without_times(folder) == without_times(again)
    saved = [load_file(f) for d in (folder, again) for f in (d / f"checkpoints/{LAST}/ema").glob("*.safetensors")]
    assert same_weights(*saved)


def without_times(run: Path) -> list[dict[str, Any]]:
    """Every record of training steps, rollouts and evaluations, wall times aside."""
    records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] in ("train", "rollout", "eval")]
    return [{k: v for k, v in record.items() if k not in ("time", "at")} for record in records]
