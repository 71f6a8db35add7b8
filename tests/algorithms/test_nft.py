"""The DiffusionNFT recipe on the tiny base: who samples, what is regressed on, how the old policy follows."""

from __future__ import annotations

import json
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.nft import recipe as nft
from retouch.config import RunConfig
from retouch.engine import Engine
from retouch.rewards.protocol import RewardItem
from retouch.training import experience
from retouch.training.noised import NoisedRows
from retouch.types import Failure, Score
from tests.selection import default

from .runs import (
    Config,
    Use,
    base_weights,
    brightness,
    gap_between_light_and_dark,
    of_kind,
    same_weights,
    train,
    weights,
)
from .test_experience import moved

pytestmark = pytest.mark.usefixtures("bare", "shallow")


@pytest.fixture
def nft_run(config: Config) -> Config:
    def make(**overrides: Any) -> RunConfig:
        algorithm = {"name": "nft", "kl_weight": 0.0, "old_policy": "copy", **overrides.pop("algorithm", {})}
        options = {"optimizer__batch_size_per_device": 4, **overrides}
        return config(algorithm=algorithm, rollout__window=None, rollout__noise_level=None, **options)

    return make


def test_a_copied_old_policy_is_the_policy_at_every_epoch(nft_run: Config, scripted: Use) -> None:
    scripted(brightness)
    _, records = train(nft_run(algorithm={"inner_epochs": 2}, optimizer__lr=1e-3))
    distances = [step["old_velocity_distance"] for step in of_kind(records, "train")]
    assert [d == 0.0 for d in distances] == [True, False, True, False]


# --- the forward of the old policy, and the steps that leave it out ---


@dataclass
class Seen:
    """Of every optimizer step of RL.

    Attributes:
        left_out: whether it took no forward of the old policy.
        equal: whether the old and the trained weights are equal where it begins.
    """

    left_out: list[bool] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen, real = Seen(), nft.prepare

    def prepare(session: Any, *rest: Any) -> Any:
        policy = session.run.policy
        seen.equal.append(all(torch.equal(t, policy.state("old")[n]) for n, t in policy.state().items()))
        prepared = real(session, *rest)
        [left_out] = {micro.old is None for micro in prepared}
        seen.left_out.append(left_out)
        return prepared

    monkeypatch.setattr(nft, "prepare", prepare)
    return seen


@pytest.fixture
def differences(steps: Seen, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Of the first micro-batch of every step: relative differences of loss and gradient between the policy's own
    prediction and that of the old weights in the place of the old one."""
    seen, waiting = list[tuple[float, float]](), list[Tensor]()
    real_prepare, real_loss = nft.prepare, nft.implicit_policies_loss

    def prepare(session: Any, *rest: Any) -> Any:
        prepared = real_prepare(session, *rest)
        with session.run.policy.use("old"):
            waiting.append(nft.predict(session.run, prepared[0].noised()))
        return prepared

    def loss(run: Any, algorithm: Any, experience: Any, micro: Any, total: Any) -> Any:
        if waiting:
            found: list[Tensor] = []
            for old in (None, waiting.pop()):
                value = real_loss(run, algorithm, experience, micro._replace(old=old), total)[0]
                parts = torch.autograd.grad(value, list(run.policy.parameters.values()), allow_unused=True)
                found += [value.detach(), torch.cat([part.flatten() for part in parts if part is not None])]
            short, short_gradient, whole, whole_gradient = (t.double() for t in found)
            apart = (
                (short - whole).abs() / whole.abs(),
                (short_gradient - whole_gradient).norm() / whole_gradient.norm(),
            )
            seen.append((float(apart[0]), float(apart[1])))
        return real_loss(run, algorithm, experience, micro, total)

    monkeypatch.setattr(nft, "prepare", prepare)
    monkeypatch.setattr(nft, "implicit_policies_loss", loss)
    return seen


SD: dict[str, Any] = {"model": {"family": "sd_inpaint", "path": "tiny", "dtype": "fp32", "train": {"kind": "lora"}}}


@pytest.mark.parametrize("options", default([{}, SD], {}.__eq__), ids=["flux_fill-full", "sd_inpaint-lora"])
def test_the_old_forward_is_left_out_where_it_changes_neither_loss_nor_gradient(
    options: dict[str, Any], nft_run: Config, scripted: Use, steps: Seen, differences: list[tuple[float, float]]
) -> None:
    """In the first step of an epoch; without it the gradient of the second one would be another."""
    scripted(brightness)
    algorithm = {"inner_epochs": 2, "kl_weight": 0.1, "mix": 0.1}
    train(nft_run(algorithm=algorithm, optimizer__lr=1e-3, **options))
    assert steps.left_out == steps.equal == [True, False, True, False]
    assert max(*differences[0], *differences[2]) <= 1e-6
    assert min(differences[1][1], differences[3][1]) > 1e-3


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("copy", [True, True, True]),
        pytest.param("ramp_full", [True, True, True], marks=pytest.mark.full),  # a copy up to step 75
        ("ramp_half", [True, False, False]),
        pytest.param("frozen", [True, False, False], marks=pytest.mark.full),
    ],
)
def test_it_is_left_out_before_the_first_update_of_an_epoch_whose_old_policy_is_the_trained_one(
    kind: str, expected: list[bool], nft_run: Config, scripted: Use, steps: Seen
) -> None:
    """After a warm-up, too, where the snapshot begins; the forwards that the network's hook counts are one fewer."""
    scripted(brightness)
    algorithm = {"old_policy": kind, "warmup_steps": 1, "kl_weight": 0.0}
    _, records = train(nft_run(algorithm=algorithm, training__max_steps=4, optimizer__lr=1e-3))
    assert steps.left_out == steps.equal == expected
    trained = [step for step in of_kind(records, "train") if step["phase"] == "rl"]
    forwards = [step["time"]["nfe_train_forward"] for step in trained]
    assert forwards == [4 * 2 * (1 if left_out else 2) for left_out in expected]


def test_a_step_without_an_update_leaves_the_next_one_on_policy(
    nft_run: Config, scripted: Use, steps: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because the first gradient overflowed."""
    real, overflows = Engine.step, [True]

    def step(self: Engine, lr: float) -> dict[str, float]:
        if overflows:
            overflows.pop()
            self.drop_gradients()
            return {"overflow": 1.0}
        return real(self, lr)

    monkeypatch.setattr(Engine, "step", step)
    scripted(brightness)
    train(nft_run(algorithm={"inner_epochs": 3}, training__max_steps=3, optimizer__lr=1e-3))
    assert steps.left_out == steps.equal == [True, True, False]


def test_a_resumed_run_leaves_the_same_forwards_out(nft_run: Config, scripted: Use, steps: Seen) -> None:
    """And ends with the same bits: from a checkpoint between epochs, and from one inside an epoch."""
    scripted(brightness)
    options = {"algorithm": {"inner_epochs": 2}, "optimizer__lr": 1e-3, "training__checkpoint_every": 1}
    whole, _ = train(nft_run(name="whole", **options))
    expected = [True, False, True, False]
    assert steps.left_out == expected
    for at in (2, 3):
        steps.left_out.clear()
        folder = whole.dir.path / f"checkpoints/step-{at:06d}"
        again, _ = train(nft_run(name=f"from{at}", resume=str(folder), **options))
        assert steps.left_out == expected[at:]
        assert same_weights(weights(whole), weights(again))


def test_an_old_policy_that_was_not_copied_before_a_resume_keeps_its_forward(
    nft_run: Config, scripted: Use, steps: Seen
) -> None:
    """Until the end of the epoch, where the changed option copies it."""
    scripted(brightness)
    options = {"optimizer__lr": 1e-3, "training__checkpoint_every": 2, "training__max_steps": 4}
    frozen, _ = train(nft_run(name="frozen", algorithm={"old_policy": "frozen"}, **options))
    steps.left_out.clear()
    folder = frozen.dir.path / "checkpoints/step-000002"
    train(nft_run(name="copied", resume=str(folder), **options))
    assert steps.left_out == steps.equal[-2:] == [False, True]


def test_a_checkpoint_of_an_older_version_takes_the_old_forward_for_an_epoch(
    nft_run: Config, scripted: Use, steps: Seen
) -> None:
    """It does not say whether the old policy is the trained one."""
    scripted(brightness)
    options = {"optimizer__lr": 1e-3, "training__checkpoint_every": 2, "training__max_steps": 4}
    whole, _ = train(nft_run(name="whole", **options))
    folder = whole.dir.path / "checkpoints/step-000002"
    state, complete = (json.loads((folder / name).read_text("utf-8")) for name in ("state.json", "complete.json"))
    assert state["progress"].pop("on_policy") is True
    complete["files"] = list(complete["files"])  # names alone
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "complete.json").write_text(json.dumps(complete), encoding="utf-8")
    steps.left_out.clear()
    again, _ = train(nft_run(name="again", resume=str(folder), **options))
    assert steps.left_out == [False, True]
    assert same_weights(weights(whole), weights(again))


# --- how the old policy follows ---


@pytest.mark.full
def test_a_frozen_old_policy_is_left_behind(nft_run: Config, scripted: Use) -> None:
    scripted(brightness)
    base = base_weights(nft_run(name="base"))
    run, records = train(nft_run(algorithm={"old_policy": "frozen"}, optimizer__lr=1e-3))
    assert all(torch.equal(t, base[n]) for n, t in run.policy.state("old").items())
    distances = [step["old_velocity_distance"] for step in of_kind(records, "train")]
    assert distances[0] == 0.0 < distances[1]


def test_the_old_policy_follows_by_the_decay_of_the_optimizer_steps(
    nft_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an epoch of two steps: d(2), then d(4); the steps of the warm-up do not count."""
    asked: list[tuple[int, str]] = []
    monkeypatch.setattr(nft, "old_policy_decay", lambda step, kind: asked.append((step, kind)) or 0.75)
    scripted(brightness)
    run, _ = train(
        nft_run(
            algorithm={"inner_epochs": 2, "old_policy": "ramp_half", "warmup_steps": 1},
            optimizer__lr=1e-3,
            training__max_steps=5,
        )
    )
    assert asked == [(2, "ramp_half"), (4, "ramp_half")]
    assert moved(run.policy.state("old"), weights(run)) > 0


def test_snapshots_of_a_run_come_into_use_without_a_copy(nft_run: Config, scripted: Use) -> None:
    scripted(brightness)
    run, _ = train(nft_run(training__max_steps=1))
    kept = [t.data_ptr() for t in run.policy.state("old").values()]
    with run.policy.use("old"):
        assert [p.data_ptr() for p in run.policy.parameters.values()] == kept


def test_the_blend_is_what_the_decay_says(nft_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nft, "old_policy_decay", lambda step, kind: 0.75)
    scripted(brightness)
    base = base_weights(nft_run(name="base"))
    run, _ = train(nft_run(training__max_steps=1, optimizer__lr=1e-3))
    trained = weights(run)
    for name, old in run.policy.state("old").items():
        expected = 0.75 * base[name] + 0.25 * trained[name]
        torch.testing.assert_close(old, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("kind", "same"), [("frozen", True), ("copy", False)])
def test_the_old_policy_samples(
    kind: str, same: bool, nft_run: Config, scripted: Use, sampled_with: list[float]
) -> None:
    scripted(brightness)
    train(nft_run(algorithm={"old_policy": kind}, training__max_steps=2, optimizer__lr=1e-3))
    assert len(sampled_with) == 2 and (sampled_with[0] == sampled_with[1]) == same


def test_the_target_is_the_rollout_s_own_latent(
    nft_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the model's estimate, which carries no reward; and it is noised with fresh noise, not the rollout's."""
    finals: list[Tensor] = []
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    real_sample, real_loss = experience.sample, nft.nft_loss

    def sample(*arguments: Any, **options: Any) -> Any:
        trajectory = real_sample(*arguments, **options)
        finals.append(trajectory.final)
        return trajectory

    def loss(v: Tensor, old: Tensor, x_t: Tensor, x0: Tensor, sigma: Tensor, *rest: Any) -> Any:
        seen.append((x_t.detach(), x0.detach(), sigma))
        return real_loss(v, old, x_t, x0, sigma, *rest)

    monkeypatch.setattr(experience, "sample", sample)
    monkeypatch.setattr(nft, "nft_loss", loss)
    scripted(brightness)
    one_forward = {"optimizer__steps_per_forward": None}
    train(nft_run(algorithm={"timesteps_per_image": 3}, training__max_steps=1, **one_forward))
    (x_t, x0, sigma), (final,) = seen[0], finals
    assert x_t.shape[0] == 4 * 3
    for row in x0[::3]:
        assert any(torch.equal(row, image) for image in final)
    noise = (x_t - (1 - sigma.view(-1, 1, 1, 1)) * x0) / sigma.view(-1, 1, 1, 1)
    assert float(noise.std()) == pytest.approx(1, abs=0.1)
    copies = sigma.view(4, 3).sort(1).values
    assert bool((copies.diff(dim=1) > 0).all())


def test_the_copies_of_an_image_spread_over_the_schedule(nft_run: Config, scripted: Use) -> None:
    """A row's draws fall into equal shares of the distribution of times."""
    from retouch.training.noised import noised_copies, row_generators

    run, _ = train(nft_run(training__max_steps=1))
    condition = run.model.encode(run.data[:2], run.guidance_scale)
    x0 = torch.zeros(2, 8, 8, 16)
    for seed in range(5):
        rows = noised_copies(run, x0, condition, row_generators([seed, seed + 100], "t"), 4)
        edges = rows.schedule.training_times(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
        for times in rows.time.view(2, 4):
            assert torch.bucketize(times, edges).tolist() == [0, 1, 2, 3]


def test_rows_of_an_epsilon_model_are_weighted_by_what_its_errors_grow_by(
    nft_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none is noisier than where sampling starts."""
    seen: list[tuple[Tensor, Tensor]] = []
    real_loss, real_copies = nft.nft_loss, nft.noised_copies
    times: list[Tensor] = []

    def loss(*arguments: Any) -> Any:
        seen.append((arguments[4], arguments[10]))  # sigma, weight
        return real_loss(*arguments)

    def copies(*arguments: Any) -> Any:
        rows = real_copies(*arguments)
        times.append(rows.time)
        return rows

    monkeypatch.setattr(nft, "nft_loss", loss)
    monkeypatch.setattr(nft, "noised_copies", copies)
    scripted(brightness)
    model = {"family": "sd_inpaint", "path": "tiny", "dtype": "fp32", "train": {"kind": "full"}}
    train(nft_run(model=model, rollout__num_steps=4, rollout__guidance_scale=1.0, training__max_steps=2))
    for sigma, weight in seen:
        torch.testing.assert_close(weight, 1 - sigma)  # a / (a + b)
    assert seen and 0 < max(float(t.max()) for t in times) <= 751


def test_one_micro_batch_of_noised_copies_is_kept(
    nft_run: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, for the old policy, the reference and the trained one: the conditions of a step would fill a GPU."""
    scripted(brightness)
    made: list[weakref.ref[NoisedRows]] = []
    most: list[int] = []
    real, ask = nft.noised_copies, nft.predict

    def watch(*arguments: Any) -> NoisedRows:
        copies = real(*arguments)
        made.append(weakref.ref(copies))
        return copies

    def count(*arguments: Any) -> Tensor:
        most.append(sum(ref() is not None for ref in made))
        return ask(*arguments)

    monkeypatch.setattr(nft, "noised_copies", watch)
    monkeypatch.setattr(nft, "predict", count)
    sizes = {"optimizer__batch_size_per_device": 1, "optimizer__gradient_accumulation": 2, "training__max_steps": 2}
    train(nft_run(algorithm={"kl_weight": 0.1, "old_policy": "frozen"}, **sizes))
    assert most == [1] * len(most) and len(most) >= 2 * 2 * 2


def test_the_value_of_the_first_loss_does_not_depend_on_the_rewards(nft_run: Config, scripted: Use) -> None:
    losses: list[float] = []
    for sign in (1.0, -1.0):
        scripted(lambda item, sign=sign: Score(sign * float(item.image.mean())))
        _, records = train(nft_run(name=f"s{sign}", training__max_steps=1))
        losses.append(of_kind(records, "train")[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_failed_reward_is_as_if_the_row_were_not_there(nft_run: Config, scripted: Use) -> None:
    """Advantage 0 alone would leave a gradient once the policy has moved."""
    shape = {
        "rollout__batch_size_per_device": 6,
        "optimizer__batch_size_per_device": 6,
        "training__max_steps": 2,
        "reward_client__max_failure_rate": 0.5,
        "algorithm": {"inner_epochs": 2, "old_policy": "frozen", "kl_weight": 0.1},
    }

    def third(item: RewardItem) -> bool:
        return isinstance(item.id, int) and item.id % 3 == 2

    scripted(lambda item: Failure("scorer_error", "no") if third(item) else brightness(item))
    failed, records = train(nft_run(name="failed", rollout__group_size=3, **shape))
    assert [step["rows"] for step in of_kind(records, "train")] == [4.0, 4.0]
    scripted(brightness)
    two, _ = train(nft_run(name="two", rollout__group_size=2, **shape))
    scripted(lambda item: Score(0.0) if third(item) else brightness(item))
    zero, _ = train(nft_run(name="zero", rollout__group_size=3, **shape))
    assert moved(weights(failed), weights(zero)) > 10 * moved(weights(failed), weights(two))


def test_constant_rewards_leave_the_weights_bit_unchanged(nft_run: Config, scripted: Use) -> None:
    scripted(lambda item: Score(0.5))
    base = base_weights(nft_run(name="base"))
    run, records = train(nft_run(training__max_steps=2))
    assert [step["skipped"] for step in of_kind(records, "train")] == [1.0, 1.0]
    assert all(torch.equal(t, base[n]) for n, t in weights(run).items())


def test_micro_batches_change_memory_not_gradients(nft_run: Config, scripted: Use) -> None:
    scripted(brightness)
    norms: list[float] = []
    for rows in (1, 2, 4):
        _, records = train(
            nft_run(
                name=f"by{rows}",
                training__max_steps=1,
                optimizer__batch_size_per_device=rows,
                optimizer__gradient_accumulation=4 // rows,
                algorithm={"kl_weight": 0.1},
            )
        )
        norms.append(of_kind(records, "train")[0]["grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


@pytest.mark.full
def test_the_kl_pulls_back_to_the_reference(nft_run: Config, scripted: Use) -> None:
    scripted(brightness)
    kl: dict[str, list[float]] = {}
    for name, weight in (("free", 1e-12), ("held", 1e3)):
        _, records = train(nft_run(name=name, optimizer__lr=1e-3, algorithm={"kl_weight": weight}))
        kl[name] = [step["kl"] for step in of_kind(records, "train")]
    assert kl["free"][0] == kl["held"][0] == 0.0 < kl["held"][1]
    assert kl["held"][-1] < 0.7 * kl["free"][-1]


@pytest.mark.full
def test_the_reward_moves_the_policy_its_way(nft_run: Config, scripted: Use) -> None:
    """Rewarding brightness makes rollouts brighter; rewarding darkness, darker."""

    def make(name: str) -> RunConfig:
        return nft_run(
            name=name,
            rollout__group_size=8,
            rollout__batch_size_per_device=16,
            optimizer__batch_size_per_device=16,
            optimizer__lr=3e-4,
            training__max_steps=6,
        )

    assert gap_between_light_and_dark(make, scripted) > 0.02
