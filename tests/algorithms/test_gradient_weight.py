"""DiffusionNFT with the gradient of a reward beside its advantages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.nft import recipe
from retouch.config import RunConfig
from retouch.engine.saved import read_state
from retouch.rewards.protocol import RewardItem, ScorerSpec
from retouch.rewards.scorers import preservation
from retouch.training import experience, pixel_gradients
from retouch.types import Failure, Outcome, Score, Stopped
from tests.selection import default

from .runs import Config, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

FAMILIES: dict[str, dict[str, Any]] = {
    "flux_fill": {},
    "sd_inpaint": {"model__family": "sd_inpaint", "rollout__guidance_scale": 1.0},
}


class Noisy:
    """Stands in for the preservation scorer: values that say nothing, with the gradient of the brightness."""

    def __init__(self, fails: Callable[[Tensor], bool], saturated: Callable[[int], bool]) -> None:
        self.spec = ScorerSpec("preservation", (-1e9, 1e9), frozenset(), "test", "-")
        self.fails, self.saturated = fails, saturated

    def load(self, device: str) -> None: ...

    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        drawn = [hashlib.sha256(item.image.tobytes()).digest()[0] / 255 for item in items]
        return [Score(1.0 if self.saturated(item.group) else d) for item, d in zip(items, drawn, strict=True)]

    def values(self, images: Tensor, items: Sequence[RewardItem]) -> list[Tensor | Failure]:
        del items
        return [Failure("scorer_error", "no") if self.fails(image) else 50 * image.mean() for image in images]


@pytest.fixture
def mixed(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    def make(
        gradient_weight: float,
        fails: Callable[[Tensor], bool] = lambda image: False,
        saturated: Callable[[int], bool] = lambda group: False,
        **options: Any,
    ) -> RunConfig:
        monkeypatch.setattr(preservation, "PreservationScorer", lambda _: Noisy(fails, saturated))
        algorithm = {"name": "nft", "old_policy": "copy", "kl_weight": 0.0, **options.pop("algorithm", {})}
        rewards = {"preservation": {"gradient_weight": gradient_weight, **options.pop("reward", {})}}
        return config(algorithm=algorithm, rewards=rewards, rollout__window=None, rollout__noise_level=None, **options)

    return make


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[experience.Experience]:
    """The rows of every epoch."""
    found, real = list[experience.Experience](), recipe.collect

    def collect(*arguments: Any, **options: Any) -> experience.Experience:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(recipe, "collect", collect)
    return found


@pytest.mark.parametrize("family", default(FAMILIES, "flux_fill".__eq__))
def test_the_policy_follows_the_gradient_where_advantages_say_nothing(family: str, mixed: Config) -> None:
    light: dict[float, float] = {}
    for weight in (0.0, 10.0):
        options = {"optimizer__lr": 1e-3, "training__max_steps": 6, **FAMILIES[family]}
        run, _ = train(mixed(weight, name=f"weight{weight:g}", **options))
        light[weight] = brightness(run)
    assert light[10.0] > light[0.0] + 0.02


def brightness(run: Any) -> float:
    """Of one image per example by the trained weights."""
    from retouch.rollout.sampler import sample

    condition = run.encoded.conditions([0, 1], torch.device("cpu"))
    plan = run.plans.plan(run.model.schedule(3, condition.size), 0)
    with torch.no_grad():
        found = sample(run.model, run.network, plan, condition, [1, 2], None, None, "exact", keep_means=False)
        return float((run.model.decode(found.final) + 1).mean() / 2)


@pytest.mark.parametrize("region", ["all", "mask"])
def test_the_pull_has_the_size_of_its_weight_and_the_direction_of_the_reward(
    region: str, mixed: Config, collected: list[experience.Experience], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gradient * elements of the region has a root mean square of gradient_weight over it; the loss is -s <v, g>."""
    seen: list[tuple[Any, ...]] = []
    real = recipe.linear_loss

    def watched(*arguments: Any) -> Any:
        seen.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(recipe, "linear_loss", watched)
    run, _ = train(mixed(3.0, algorithm={"region": region}, training__max_steps=1))
    [rows] = collected
    live = rows.counts_in_loss > 0
    if region == "all":
        scaled = rows.gradient[live] * rows.gradient[0].numel()
        assert float(scaled.double().pow(2).mean().sqrt()) == pytest.approx(3.0, rel=1e-5)
    x0, step = rows.latents[live][:1, -1], 1e-2 / rows.gradient[live][:1].abs().max()
    ahead, behind = (run.model.decode(x0 - by * step * rows.gradient[live][:1]).mean() for by in (1.0, -1.0))
    assert ahead > behind  # the gradient is minus that of the reward
    for velocity, pull, coefficient, _, weight, _ in seen:
        assert velocity.requires_grad and pull.shape == velocity.shape and (coefficient < 0).all()
        assert weight.shape == velocity.shape[:1]
    assert seen


def test_without_a_gradient_weight_nothing_is_differentiated(
    mixed: Config, collected: list[experience.Experience], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(recipe, "linear_loss")
    train(mixed(0.0, lambda image: pytest.fail("asked for a gradient"), training__max_steps=1))
    assert len(collected[0].gradient) == 0


def test_a_sample_without_gradient_trains_on_its_advantage_and_counts(
    mixed: Config, collected: list[experience.Experience]
) -> None:
    calls: list[int] = []

    def first(image: Tensor) -> bool:
        calls.append(1)
        return len(calls) == 1

    options = {"reward_client__max_failure_rate": 0.5, "training__max_steps": 1}
    run, _ = train(mixed(1.0, first, **options))
    [rows] = collected
    live = rows.gradient[rows.counts_in_loss > 0].flatten(1).abs().sum(1) > 0
    assert int((~live).sum()) == 1 and int(live.sum()) == len(calls) - 1
    assert run.rewards.failed == 1
    scaled = rows.gradient[rows.counts_in_loss > 0][live] * rows.gradient[0].numel()
    assert float(scaled.double().pow(2).mean().sqrt()) == pytest.approx(1.0, rel=1e-5)  # those of the others


@pytest.mark.parametrize("skips", [True, False])
def test_groups_of_a_saturated_reward_train_on_the_gradient_if_they_are_kept(
    skips: bool, mixed: Config, collected: list[experience.Experience]
) -> None:
    algorithm = {"skip_zero_std_groups": skips}
    train(mixed(1.0, saturated=lambda group: True, algorithm=algorithm, training__max_steps=1))
    [rows] = collected
    live = rows.counts_in_loss > 0
    assert bool(live.any()) is not skips and not rows.advantages[live].any()
    assert bool((rows.gradient[live].flatten(1).abs().sum(1) > 0).all())


def test_lost_gradients_are_counted_among_all_samples_of_the_epoch(
    mixed: Config, collected: list[experience.Experience], caplog: pytest.LogCaptureFixture
) -> None:
    """One of 8 is lost, and 4 are of a group without advantages: 1 in 8 is below a rate of .2, 1 in 4 is not."""
    groups: list[int] = []
    calls: list[int] = []

    def first(image: Tensor) -> bool:
        calls.append(1)
        return len(calls) == 1

    def one_group(group: int) -> bool:
        groups.append(group)
        return group == groups[0]

    options = {"reward_client__max_failure_rate": 0.2, "training__max_steps": 1, "rollout__group_size": 4}
    train(mixed(1.0, first, one_group, **options))
    [rows] = collected
    assert int((rows.counts_in_loss > 0).sum()) == len(calls) == 4
    assert "1 of 8 samples have no gradient" in caplog.text


def test_an_epoch_that_lost_its_gradients_is_not_counted(mixed: Config) -> None:
    """Its images are generated again when the run is resumed."""
    run = mixed(1.0, lambda image: True, training__max_steps=1)
    with pytest.raises(Stopped, match=r"images have no gradient, over .* nothing was trained on that batch"):
        train(run)
    [folder] = (Path(run.logging.dir) / run.name / "checkpoints").iterdir()
    assert read_state(folder)["rewards"]["asked"] == 0


def test_it_resumes_inside_an_epoch_bitwise(mixed: Config) -> None:
    options = {"training__checkpoint_every": 1, "algorithm": {"inner_epochs": 2}, "training__max_steps": 4}
    whole, records = train(mixed(1.0, name="whole", **options))
    inside = str(whole.dir.path / "checkpoints/step-000003")
    half, _ = train(mixed(1.0, name="half", resume=inside, **options))
    assert len(of_kind(records, "train")) == 4
    half_weights = weights(half)
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, half_weights[name]), name


@pytest.mark.parametrize("size", [0.0, 1e-43, 1e-30, 1.0, 1e30])
def test_gradients_that_nearly_vanish_have_a_quotient(size: float) -> None:
    """Of a saturated scorer: fp32 holds no 1 / 1e-43, and Inf times 0 ends a run."""
    gradient = torch.tensor([0.0, 1.0]) * size
    found = gradient / pixel_gradients.divisor(float(gradient.double().square().mean().sqrt()), 2.0)
    assert bool(found.isfinite().all())
    assert found[1] == pytest.approx(2**-0.5 if size >= 1e-30 else 0, abs=1e-6)
