"""Supervised fine-tuning on the tiny base: it learns, from what it should, reproducibly, however a batch is split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from retouch.algorithms.sft.config import SftConfig
from retouch.algorithms.train import recipe
from retouch.config import ConfigError, RunConfig
from retouch.data.sampler import (
    batch_examples,
    derive_seed,
)
from retouch.observe.run_dir import read_metrics
from retouch.rollout.encoded import EncodedData
from retouch.rollout.sampler import noise_for
from retouch.training import supervised
from retouch.training.build import (
    Run,
    build,
)
from retouch.training.noised import denoising_error
from retouch.types import Example
from tests.command_line import retouch

pytestmark = pytest.mark.usefixtures("bare", "shallow")

Config = Callable[..., RunConfig]

SFT = {"algorithm": {"name": "sft"}, "rewards": {}}


def train(config: RunConfig) -> tuple[Run, list[dict[str, Any]]]:
    """A finished run and the records of its optimizer steps."""
    run = build(config)
    try:
        recipe("sft")(run)
    finally:
        run.close()
    return run, [r for r in read_metrics(run.dir.path / "metrics.jsonl") if r["kind"] == "train"]


def weights(run: Run) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in run.policy.state().items()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((t - b[n]).abs().max()) for n, t in a.items())


@torch.no_grad()
def fixed_error(run: Run) -> float:
    """Denoising error on every example with targets, at fixed noise and times."""
    data = EncodedData(run.model, run.warmup_data, run.guidance_scale, run.clock)
    positions = list(range(len(run.warmup_data)))
    condition, x0 = data.conditions(positions, run.engine.device), data.images(positions, "target", run.engine.device)
    noise, _ = noise_for(x0.shape[1:], positions)
    time = torch.linspace(0.2, 0.95, len(positions))
    schedule = run.model.schedule(3, condition.size)
    return float(denoising_error(run.model, run.network, schedule, x0, noise, time, condition).mean())


@pytest.mark.parametrize(
    "train_kind",
    [{"kind": "full"}, pytest.param({"kind": "lora", "rank": 8, "alpha": 16}, marks=pytest.mark.full)],
    ids=["full", "lora"],
)
def test_training_lowers_the_error_on_fixed_noise_and_times(config: Config, train_kind: dict[str, Any]) -> None:
    options = config(
        **SFT,
        model__train=train_kind,
        optimizer__batch_size_per_device=8,
        optimizer__lr=1e-3 if train_kind["kind"] == "full" else 1e-2,
        training__max_steps=16,
    )
    fresh = build(options.model_copy(update={"name": "fresh"}))
    before = fixed_error(fresh)
    fresh.close()
    run, records = train(options)
    assert fixed_error(run) < 0.9 * before
    assert len(records) == 16 and {r["phase"] for r in records} == {"sft"}


def test_region_mask_takes_the_loss_in_the_hole_only(config: Config) -> None:
    """The logged error of the first step, against squared errors of the untrained model averaged here by hand."""
    for region in ("all", "mask"):
        options = config(**(SFT | {"algorithm": {"name": "sft", "region": region}}), name=region, training__max_steps=1)
        _, (record,) = train(options)
        run = build(options.model_copy(update={"name": "fresh"}))
        positions = batch_examples(len(run.warmup_data), 2, options.seed, 0)
        data = EncodedData(run.model, run.warmup_data, run.guidance_scale, run.clock)
        condition, x0 = (
            data.conditions(positions, run.engine.device),
            data.images(positions, "target", run.engine.device),
        )
        noise, generators = noise_for(x0.shape[1:], [derive_seed(options.seed, "sft", 0, row) for row in range(2)])
        uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
        schedule = run.model.schedule(options.rollout.num_steps, condition.size)
        time = schedule.training_times(uniform)
        with torch.no_grad():
            velocity = run.model.predict(run.network, schedule.add_noise(x0, noise, time), time, condition)
        run.close()
        squared = (velocity - (noise - x0)).square().mean(1)  # over channels: [B, h, w]
        assert condition.mask is not None
        cells = condition.mask.unflatten(2, (8, 4)).unflatten(4, (16, 4)).amax((1, 3, 5)) > 0  # any repainted pixel
        inside = torch.ones_like(squared) if region == "all" else cells.float()
        expected = ((squared * inside).sum((1, 2)) / inside.sum((1, 2))).mean()
        assert record["error"] == pytest.approx(float(expected), rel=1e-4)
        assert record["loss"] == pytest.approx(float(expected), rel=1e-4)


# --- caption dropout ---

GUIDED = {"model": {"family": "sd_inpaint", "path": "tiny", "dtype": "fp32", "train": {"kind": "full"}}}


def rows_of(shares: list[float], config: Config, monkeypatch: pytest.MonkeyPatch, rows: int) -> list[Any]:
    """The arguments of the denoising error of one step: (..., x0, noise, time, condition, region)."""
    found: list[Any] = []
    real = supervised.denoising_error
    monkeypatch.setattr(supervised, "denoising_error", lambda *a: found.append(a) or real(*a))
    for share in shares:
        algorithm = {"name": "sft", "caption_dropout": share}
        shape = {"training__max_steps": 1, "optimizer__batch_size_per_device": rows}
        train(config(**GUIDED, **shape, rewards={}, algorithm=algorithm, name=f"s{share:g}"))
    return found


@pytest.mark.full
def test_a_row_without_caption_is_one_of_the_empty_prompt(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 32 rows, each as it was or encoded with "", which is the text that guidance steers away from; noise, time
    and pictures are those of a run without dropout."""
    whole, half, none = rows_of([0.0, 0.5, 1.0], config, monkeypatch, 32)
    model, condition = half[0], half[6].tensors
    empty = model.encode([Example(0, "", *EMPTY)], 7.5).tensors
    assert torch.equal(empty["text"], empty["negative_text"])
    dropped = [bool(torch.equal(text, empty["text"][0])) for text in condition["text"]]
    assert 8 <= sum(dropped) <= 24
    for row, is_empty in enumerate(dropped):
        assert torch.equal(condition["text"][row], (none if is_empty else whole)[6].tensors["text"][row])
        assert not torch.equal(whole[6].tensors["text"][row], empty["text"][0])
    assert all(torch.equal(text, empty["text"][0]) for text in none[6].tensors["text"])
    for other in (half, none):
        assert all(torch.equal(whole[i], other[i]) for i in (3, 4, 5))
        assert all(torch.equal(t, other[6].tensors[n]) for n, t in whole[6].tensors.items() if n != "text")


class Seen(Exception):
    """Which rows would be encoded without a caption."""


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_share_of_rows_without_caption(share: float) -> None:
    def encode(positions: list[int], device: str, uncaptioned: list[bool]) -> None:
        raise Seen(sum(uncaptioned))

    data: Any = SimpleNamespace(images=lambda chosen, *_: torch.zeros(len(chosen), 1, 1, 1), conditions=encode)
    run = SimpleNamespace(engine=SimpleNamespace(device="cpu", rank=0), clock=None)
    session: Any = SimpleNamespace(run=run, progress=SimpleNamespace(step=0))
    rows = torch.arange(400)
    step: Any = SimpleNamespace(rows=rows, seeds=rows.tolist(), positions=rows.tolist())
    with pytest.raises(Seen) as caught:
        supervised.supervised_loss(session, data, SftConfig(caption_dropout=share), step, rows, shifted=True)
    assert caught.value.args[0] == pytest.approx(400 * share, abs=35)  # four standard deviations


EMPTY = (Image.new("RGB", (64, 32)), Image.new("L", (64, 32), 255))


def test_caption_dropout_is_refused_where_there_is_no_guidance_to_train_for(config: Config) -> None:
    options = {**SFT, "algorithm": {"name": "sft", "caption_dropout": 0.1}}
    with pytest.raises(ConfigError, match=r"algorithm\.caption_dropout: given 0\.1, but flux_fill has no classifier-"):
        config(**options, rollout__window=None, rollout__noise_level=None)


# --- repetition ---


@pytest.mark.full
def test_runs_repeat_and_seeds_differ(config: Config) -> None:
    first, a = train(config(**SFT, name="a"))
    second, b = train(config(**SFT, name="b"))
    other, _ = train(config(**SFT, name="c", seed=6))
    assert distance(weights(first), weights(second)) == 0
    assert distance(weights(first), weights(other)) > 0
    assert [{**r, "time": None} for r in a] == [{**r, "time": None} for r in b]


def test_accumulated_gradients_are_those_of_one_large_batch(config: Config) -> None:
    """4 rows as 1 x 4 and 4 x 1. AdamW's eps is raised, or it would blow up rounding where a gradient is almost 0."""
    shape = {**SFT, "training__max_steps": 2, "optimizer__eps": 1e-4, "optimizer__lr": 1e-3}
    whole, a = train(config(**shape, name="a", optimizer__batch_size_per_device=4))
    split, b = train(config(**shape, name="b", optimizer__batch_size_per_device=1, optimizer__gradient_accumulation=4))
    assert distance(weights(whole), weights(split)) < 1e-5
    for name in ("loss", "error", "grad_norm"):
        assert [r[name] for r in a] == pytest.approx([r[name] for r in b], rel=1e-4)


def test_the_learning_rate_ramps_up_and_decays(config: Config) -> None:
    _, records = train(config(**SFT, optimizer__ramp_steps=2, optimizer__schedule="linear", optimizer__lr=1e-4))
    assert [r["lr"] for r in records] == pytest.approx([0.5e-4, 0.75e-4, 0.5e-4, 0.25e-4])


def test_the_average_is_recorded_beside_the_weights(config: Config) -> None:
    """decay_t = min((1 + t) / (10 + t), decay): 2/11 after the first update, then 0.2."""
    options = config(**SFT, ema={"decay": 0.2}, training__max_steps=2, training__checkpoint_every=1)
    fresh = build(options.model_copy(update={"name": "fresh"}))
    initial = weights(fresh)
    fresh.close()
    run, _ = train(options)
    file = "diffusion_pytorch_model.safetensors"
    raw, averaged = (
        [load_file(run.checkpoints.root / f"step-00000{step}" / kind / file) for step in (1, 2)]
        for kind in ("weights", "ema")
    )
    for name, start in initial.items():
        first = start * 2 / 11 + raw[0][name] * 9 / 11
        torch.testing.assert_close(averaged[0][name], first, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(averaged[1][name], first * 0.2 + raw[1][name] * 0.8, atol=1e-6, rtol=1e-5)
    assert distance(raw[1], averaged[1]) > 0


def test_examples_without_targets_are_refused_in_one_line(
    run_file: Callable[..., dict[str, Any]], signs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    prompts = {"format": "self_bench", "path": str(signs / "prompts"), "resolution": [32, 64], "target": "none"}
    for section, remedy, overrides in (
        ("warmup_data", "set algorithm.sft_steps=0, or ", {"warmup_data": prompts, "algorithm__sft_steps": 1}),
        ("data", "", {"warmup_data": None, **SFT}),
    ):
        path.write_text(yaml.safe_dump(run_file(**overrides)), encoding="utf-8")
        outcome = retouch("train", path)
        message = (
            f"error: {section}: item 100 (and 7 more) has no target image, which supervised steps need; {remedy}"
            "name data with targets under warmup_data\n"
        )
        assert (outcome.code, outcome.err.splitlines(keepends=True)[-1]) == (2, message)  # after "loading torch"
