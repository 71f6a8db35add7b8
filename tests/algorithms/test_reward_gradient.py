"""The reward-gradient recipe on the tiny bases: whose gradient is taken, where it is 0, what a row holds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.reward_gradient import recipe
from retouch.config import RunConfig, parse_run
from retouch.core.steps import ode_step
from retouch.doctor.memory import report_memory
from retouch.families.loading import load_model
from retouch.families.vae import decoder_blocks, gradient_bytes, recomputed
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.scorers import preservation
from retouch.training import pixel_gradients
from retouch.types import Failure, Outcome, Score, Stopped
from tests.selection import default
from tests.tiny_models import tiny_model

from .runs import Config, base_weights, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

Value = Callable[[Tensor], Tensor]
"""Reward of an image [3, H, W] in [0, 1]."""


class Pixelwise:
    """Stands in for the preservation scorer: a differentiable function of the pixels."""

    def __init__(self, value: Value, fails: Callable[[RewardItem], bool]) -> None:
        self.spec = ScorerSpec("preservation", (-1e9, 1e9), frozenset(), "test", "-")
        self.value, self.fails = value, fails

    def load(self, device: str) -> None: ...

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        return [
            Failure("scorer_error", "no") if self.fails(item) else self.value(image)
            for image, item in zip(images, items, strict=True)
        ]

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        images = [torch.from_numpy(item.image.copy()).permute(2, 0, 1) / 255 for item in items]
        return [Score(float(self.value(image))) for image in images]


Use = Callable[..., None]


@pytest.fixture
def rewarded(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Replace the preservation reward by a function of the pixels."""

    def use(value: Value, fails: Callable[[RewardItem], bool] = lambda item: False) -> None:
        monkeypatch.setattr(preservation.PreservationReward, "differentiable", True)
        monkeypatch.setattr(preservation, "PreservationScorer", lambda _: Pixelwise(value, fails))

    return use


@pytest.fixture
def gradient_run(config: Config) -> Config:
    def make(**overrides: Any) -> RunConfig:
        algorithm = {"name": "reward_gradient", **overrides.pop("algorithm", {})}
        options = {"optimizer__batch_size_per_device": 4, **overrides}
        return config(algorithm=algorithm, rollout__window=None, rollout__noise_level=None, **options)

    return make


def brightness(image: Tensor) -> Tensor:
    return image.mean()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[recipe.TrainedSteps]:
    """The rows of every epoch."""
    found, real = list[recipe.TrainedSteps](), recipe.collect

    def collect(*arguments: Any) -> recipe.TrainedSteps:
        found.append(real(*arguments))
        return found[-1]

    monkeypatch.setattr(recipe, "collect", collect)
    return found


def test_the_reward_moves_the_policy_its_way(gradient_run: Config, rewarded: Use) -> None:
    for sign in (1.0, -1.0):
        rewarded(lambda image, sign=sign: sign * image.mean())
        _, records = train(
            gradient_run(name=f"sign{sign:g}", algorithm={"kl_weight": 0.0}, optimizer__lr=1e-3, training__max_steps=6)
        )
        scores = [record["combined_score"] for record in of_kind(records, "rollout")]
        assert scores[-1] > scores[0] + 0.02


# --- what a row holds ---


FAMILIES: dict[str, dict[str, Any]] = {
    "flux_fill": {},
    "sd_inpaint": {"model__family": "sd_inpaint", "rollout__guidance_scale": 1.0},
}


@pytest.mark.parametrize("family", default(FAMILIES, "flux_fill".__eq__))
@pytest.mark.parametrize(
    ("algorithm", "steps"),
    [
        ({"trained_step": "last"}, [[2]] * 4),
        ({"trained_step": "all"}, [[0, 1, 2]] * 4),
        ({"trained_step": "all", "last_steps": 2, "reward_at": "step"}, [[1, 2]] * 4),
        ({"trained_step": "random"}, None),
        ({"trained_step": "random", "last_steps": 2, "reward_at": "step"}, None),
    ],
)
def test_rows_hold_the_recorded_states_and_the_gradient_of_their_image(
    family: str,
    algorithm: dict[str, Any],
    steps: list[list[int]] | None,
    gradient_run: Config,
    rewarded: Use,
    collected: list[recipe.TrainedSteps],
) -> None:
    """The state is the one that the solver went through, bit for bit: its prediction leads to the next one. The
    gradient is that of the decoder and the reward at the image of `reward_at`, by finite differences."""
    rewarded(lambda image: (image**2).sum())
    options = {"gradient_scale": "none", "kl_weight": 0.0, **algorithm}
    run, _ = train(gradient_run(algorithm=options, optimizer__lr=1e-12, training__max_steps=1, **FAMILIES[family]))
    [rows] = collected
    per_image = len(rows.step) // 4
    found = sorted(rows.step.view(4, per_image).tolist())
    first = 3 - options.get("last_steps", 3)
    assert found == steps if steps is not None else all(first <= k[0] < 3 for k in found)

    condition = run.encoded.conditions(rows.position.tolist(), torch.device("cpu"))
    schedule = run.model.schedule(3, condition.size)
    with torch.no_grad():
        for k in range(3):
            at = (rows.step == k).nonzero().flatten()
            if not len(at):
                continue
            here, time = condition.select(at), schedule.times[k].expand(len(at))
            prediction = run.model.predict(run.network, rows.latents[at], time, here)
            level = schedule.level(schedule.times)
            if options.get("reward_at") == "step":
                check_gradient(run, schedule.to_x0(rows.latents[at], prediction, time), rows.gradient[at])
                scale = -level[k]
            elif k == 2:
                final = ode_step(schedule.prediction, rows.latents[at], prediction, level[2], level[3])
                check_gradient(run, final, rows.gradient[at])
                scale = -level[2]
            else:
                scale = level[k + 1] - level[k]
            if family == "flux_fill":
                torch.testing.assert_close(rows.coefficient[at], scale.expand(len(at)))


def check_gradient(run: Any, clean: Tensor, gradient: Tensor) -> None:
    """-d sum of squared pixels / d latents, along a random direction, by finite differences of a decoder in fp64."""
    exact = copy.deepcopy(run.model.autoencoder)
    exact.vae.double()
    direction = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0)).double()
    eps = 1e-5
    images = [exact.decode_unclamped(clean.double() + by * direction) for by in (eps, -eps)]
    assert images[0].dtype == torch.float64
    values = [(((image + 1) / 2) ** 2).flatten(1).sum(1) for image in images]
    slope = -(values[0] - values[1]) / (2 * eps)
    torch.testing.assert_close((gradient * direction).flatten(1).sum(1), slope, rtol=1e-3, atol=1e-3)


def test_pixels_outside_the_mask_of_a_composite_have_no_gradient(
    gradient_run: Config, rewarded: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the latent gradient counts within the region alone: nothing outside changes the loss, bit for bit."""
    pixels: list[Tensor] = []

    def watched(image: Tensor) -> Tensor:
        return (image * torch.linspace(0, 1, image.numel()).view_as(image)).sum()

    real = pixel_gradients.combined_gradient

    def combined(scorers: Any, image: Tensor, item: RewardItem) -> Any:
        g = real(scorers, image, item)
        assert isinstance(g, Tensor) and item.mask is not None
        inside = torch.from_numpy(item.mask >= 128)
        pixels.append(g)
        assert not g[:, ~inside].any() and g[:, inside].any()
        return g

    rewarded(watched)
    monkeypatch.setattr(pixel_gradients, "combined_gradient", combined)
    losses: list[tuple[Tensor, Tensor]] = []
    real_loss = recipe.linear_loss

    def loss(prediction: Tensor, gradient: Tensor, coefficient: Tensor, region: Tensor, *rest: Any) -> Any:
        found = real_loss(prediction, gradient, coefficient, region, *rest)
        spoiled = [torch.where(region > 0, t, 1e20) for t in (prediction, gradient)]
        again = real_loss(*spoiled, coefficient, region, *rest)
        losses.append((found[0].detach(), again[0].detach()))
        return found

    monkeypatch.setattr(recipe, "linear_loss", loss)
    rewards = {"preservation": {"paste_back": True}}
    train(gradient_run(rewards=rewards, algorithm={"region": "mask"}, training__max_steps=1))
    assert len(pixels) == 4 and all(torch.equal(a, b) for a, b in losses) and losses


def test_a_crop_has_no_gradient_outside(gradient_run: Config, rewarded: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    rewarded(lambda image: sizes.append(tuple(image.shape)) or image.sum())
    train(gradient_run(rewards={"preservation": {"crop": "mask_box", "box_min_side": 8}}, training__max_steps=1))
    assert sizes and all(h < 32 or w < 64 for _, h, w in sizes)


# --- the loss ---


@pytest.mark.parametrize("region", default(["all", "mask"], "mask".__eq__))
def test_rms_makes_the_step_independent_of_the_scale_of_the_reward(
    region: str, gradient_run: Config, rewarded: Use
) -> None:
    norms: dict[tuple[str, float], float] = {}
    for scale in ("rms", "none"):
        for factor in (1.0, 1000.0):
            rewarded(lambda image, factor=factor: factor * image.mean())
            algorithm = {"gradient_scale": scale, "kl_weight": 0.0, "region": region}
            name = f"{scale}{factor:g}"
            _, records = train(gradient_run(name=name, algorithm=algorithm, training__max_steps=1))
            norms[scale, factor] = of_kind(records, "train")[0]["grad_norm"]
    assert norms["rms", 1000.0] == pytest.approx(norms["rms", 1.0], rel=1e-4)
    assert norms["none", 1000.0] == pytest.approx(1000 * norms["none", 1.0], rel=1e-4)


def test_under_rms_the_gradient_of_the_loss_by_the_prediction_has_the_size_of_the_coefficient(
    gradient_run: Config, rewarded: Use, collected: list[recipe.TrainedSteps]
) -> None:
    """coefficient * gradient * elements has a root mean square of |c| = s_last."""
    rewarded(brightness)
    run, _ = train(gradient_run(training__max_steps=1))
    [rows] = collected
    scaled = rows.coefficient.view(-1, 1, 1, 1) * rows.gradient * rows.gradient[0].numel()
    last = float(run.model.schedule(3, (32, 64)).times[2])
    assert float(scaled.double().pow(2).mean().sqrt()) == pytest.approx(last, rel=1e-5)


def test_the_kl_pulls_back_to_the_reference(gradient_run: Config, rewarded: Use) -> None:
    rewarded(brightness)
    kl: dict[str, list[float]] = {}
    for name, weight in (("free", 1e-12), ("held", 1e3)):
        _, records = train(gradient_run(name=name, optimizer__lr=1e-3, algorithm={"kl_weight": weight}))
        kl[name] = [step["kl"] for step in of_kind(records, "train")]
    assert kl["free"][0] == kl["held"][0] == 0.0 < kl["held"][1]
    assert kl["held"][-1] < 0.7 * kl["free"][-1]


def test_micro_batches_change_memory_not_gradients(gradient_run: Config, rewarded: Use) -> None:
    rewarded(brightness)
    norms: list[float] = []
    for rows in (1, 2, 4):
        shape = {"optimizer__batch_size_per_device": rows, "optimizer__gradient_accumulation": 12 // rows}
        algorithm = {"trained_step": "all"}
        _, records = train(gradient_run(name=f"by{rows}", algorithm=algorithm, training__max_steps=1, **shape))
        norms.append(of_kind(records, "train")[0]["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


# --- failures ---


def test_a_failed_gradient_has_weight_0(
    gradient_run: Config, rewarded: Use, collected: list[recipe.TrainedSteps]
) -> None:
    """As if the sample were not there, whether the scorer gives a failure, raises or has a gradient that is NaN."""

    def second(item: RewardItem) -> bool:
        return item.id == 1

    def broken(image: Tensor) -> Tensor:
        return torch.sqrt(image.detach() - image).mean() + image.mean() if len(collected) == 1 else image.mean()

    shape = {"training__max_steps": 1, "reward_client__max_failure_rate": 1.0, "optimizer__lr": 1e-3}
    rewarded(brightness, second)
    train(gradient_run(name="failure", **shape))
    rewarded(broken)
    base = base_weights(gradient_run(name="base"))
    run, records = train(gradient_run(name="nan", **shape))
    rows = [int(rows.counts_in_loss.sum()) for rows in collected]
    assert rows == [3, 0]
    assert of_kind(records, "train")[0]["skipped"] == 1.0
    assert all(torch.equal(t, base[n]) for n, t in weights(run).items())


def test_too_many_failed_gradients_stop_the_run(gradient_run: Config, rewarded: Use) -> None:
    rewarded(brightness, lambda item: True)
    with pytest.raises(Stopped, match=r"4 of 4 images have no gradient.*scorer_error x 4 \(no\)"):
        train(gradient_run(training__max_steps=1))


# --- the decoder ---


@cache
def loaded(family: str) -> Any:
    section = {"family": family, "path": tiny_model(family), "dtype": "fp32"}
    data = {"format": "self_bench", "path": "nowhere", "resolution": 64}
    rewards: dict[str, Any] = {"preservation": {}}
    run = parse_run({"name": "t", "model": section, "data": data, "rewards": rewards, "algorithm": {"name": "grpo"}})
    return load_model(run.model)


@pytest.mark.parametrize("family", ["flux_fill", "sd_inpaint", "qwen_image", "qwen_image_21", "flux2_klein"])
def test_the_gradient_through_the_decoder(family: str) -> None:
    """Equal to finite differences, with checkpointing bitwise the same; values beyond [-1, 1] count, and the image is
    that of `decode` where it is not clamped."""
    model = loaded(family)
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(1, model.spec.latent_channels, 4, 4, generator=draw) * 3
    with torch.no_grad():
        raw = model.autoencoder.decode_unclamped(latents).float()
    torch.testing.assert_close(model.decode(latents), raw.clamp(-1, 1), atol=1e-5, rtol=0)
    probe = torch.randn(raw.shape, generator=draw)

    def value(image: Tensor) -> Tensor:
        return (image * probe).sum()

    def by_pixels(image: Tensor) -> Tensor:
        assert image.dtype == torch.float32 and not image.requires_grad
        return probe

    found = model.latent_gradient(latents, by_pixels)
    again = model.latent_gradient(latents, by_pixels, checkpointing=True)
    tiny = model.latent_gradient(latents, lambda image: probe * 2.0**-40)
    assert torch.equal(tiny * 2.0**40, found)  # scaled by a power of two: nothing underflows, not a bit changes
    assert not model.latent_gradient(latents, torch.zeros_like).any()
    assert found.shape == latents.shape and torch.equal(found, again)
    direction = torch.randn(latents.shape, generator=draw)
    with torch.no_grad():
        around = [value(model.autoencoder.decode_unclamped(latents + by * direction).float()) for by in (1e-3, -1e-3)]
    slope = float(around[0] - around[1]) / 2e-3
    assert float((found * direction).sum()) == pytest.approx(slope, rel=2e-2)
    assert not any("forward" in vars(block) for block in decoder_blocks(model.vae.decoder))
    assert all(weight.grad is None for weight in model.vae.parameters())


@pytest.mark.parametrize("family", ["flux_fill", "qwen_image"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_memory_of_a_decode_with_gradient_is_counted(family: str, checkpointing: bool, rewarded: Use) -> None:
    """On tensors without data, as `check --memory` does, and as the decode keeps it."""
    rewarded(brightness)
    model = loaded(family)
    size = 64
    cells = size // model.spec.downsampling
    latents = torch.zeros(1, model.spec.latent_channels, cells, cells)
    run = parse_run(
        {
            "name": "t",
            "model": {"family": family, "path": tiny_model(family), "dtype": "fp32"},
            "data": {"format": "self_bench", "path": "nowhere", "resolution": size},
            "rewards": {"preservation": {}},
            "algorithm": {"name": "reward_gradient"},
            "rollout": {"guidance_scale": 1.0},
            "training": {"gradient_checkpointing": checkpointing},
        }
    )
    report = report_memory(run)
    [counted] = [part["bytes"] for part in report["parts"] if part["what"] == "decode with gradient"]
    assert counted == gradient_bytes(model.autoencoder, latents)[checkpointing]
    assert report["device_bytes"] > counted > 3 * size * size * 4
    everything = kept_bytes(model, latents, checkpointing=False)
    if checkpointing:
        assert kept_bytes(model, latents, checkpointing=True) < counted < everything
    else:
        assert counted == everything


def kept_bytes(model: Any, latents: Tensor, *, checkpointing: bool) -> int:
    """Bytes of the tensors that autograd saves at once, weights aside."""
    weights = {w.untyped_storage().data_ptr() for w in model.vae.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    blocks = decoder_blocks(model.vae.decoder) if checkpointing else []
    with recomputed(blocks), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = model.autoencoder.decode_unclamped(latents.clone().requires_grad_())
    del held
    return sum(kept.values())
