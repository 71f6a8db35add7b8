"""The first stochastic step of a group with one noise, computed once: the numbers of one row for each sample."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retouch.algorithms.grpo import recipe
from retouch.algorithms.grpo.recipe import of_inputs
from retouch.config import RunConfig
from retouch.config.derived import shared_training_steps
from retouch.engine import Engine
from retouch.training import build as building
from retouch.training.experience import Experience
from retouch.training.resume import with_kept_defaults
from retouch.training.step import ForwardSize
from tests.selection import default

from .runs import Config, Use, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

SHARED: dict[str, Any] = {
    "rollout__shared_noise": True,
    "rollout__group_size": 4,
    "rollout__batch_size_per_device": 8,
    "optimizer": {"lr": 1e-3, "batch_size_per_device": 2, "gradient_accumulation": 4},
}
"""Two groups of four, in one optimizer step of four forwards."""

RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "guided": {
        "model": {"family": "sd_inpaint", "path": "tiny", "dtype": "fp32", "train": {"kind": "full"}},
        "rollout__guidance_scale": 2.0,
        "rollout__noise_level": None,
        "optimizer": {**SHARED["optimizer"], "lr": 1e-4},
    },
    "recomputed": {
        "algorithm": {"name": "grpo", "inner_epochs": 2, "old_log_probs": "recomputed", "guard": True},
        "algorithm__region": "mask",
        "algorithm__kl_weight": 0.1,
    },
    "ppo": {"algorithm": {"name": "ppo"}, "optimizer__steps_per_forward": 1},
}
COUNTED = ("loss", "grad_norm", "rows", "kl", "ratio", "clip_fraction")


class RowsOfForwards:
    """Rows of the network in each forward, without and with gradient."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sampled, self.trained = list[int](), list[int]()
        real = building.build

        def watched(config: RunConfig) -> Any:
            run = real(config)
            run.model.network.register_forward_pre_hook(self._count, with_kwargs=True)
            return run

        monkeypatch.setattr("tests.algorithms.runs.build", watched)

    def _count(self, network: Any, given: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        x = options.get("hidden_states", options.get("sample", given[0] if given else None))
        assert x is not None
        (self.trained if torch.is_grad_enabled() else self.sampled).append(len(x))


@pytest.mark.parametrize("kind", default(RUNS, "recomputed".__eq__))
def test_gradients_are_those_of_a_row_for_each_sample(
    kind: str, config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first optimizer step; the metrics of the second one follow from its update."""
    gradients: list[dict[str, Tensor]] = []
    real = Engine.step

    def step(self: Engine, lr: float) -> dict[str, float]:
        gradients[-1] = gradients[-1] or {
            n: p.grad.clone() for n, p in self.network.named_parameters() if p.grad is not None
        }
        return real(self, lr)

    monkeypatch.setattr(Engine, "step", step)
    scripted(brightness)
    counted, guided = RowsOfForwards(monkeypatch), 2 if kind == "guided" else 1
    ends, of_reference = [], list[int]()
    in_reference = recipe.reference_means

    def reference_means(*given: Any) -> Tensor:
        before = sum(counted.sampled)
        found = in_reference(*given)
        of_reference.append(sum(counted.sampled) - before)
        return found

    monkeypatch.setattr(recipe, "reference_means", reference_means)
    for shared in (False, True):
        gradients.append({})
        options = {**SHARED, **RUNS[kind], "rollout__shared_first_step": shared}
        _, records = train(config(name=f"shared-{shared}", training__max_steps=2, **options))
        ends.append(of_kind(records, "train"))
        assert sum(counted.trained) == 2 * guided * (2 + 8 if shared else 8 + 8)
        counted.trained.clear()
    assert of_reference == ([8 + 8, 2 + 8] if kind == "recomputed" else [])  # the others have no KL
    for apart, together in zip(*ends, strict=True):
        for metric in COUNTED:
            if metric in apart:
                assert together[metric] == pytest.approx(apart[metric], rel=2e-3, abs=1e-5), metric
    largest = max(float(g.abs().max()) for g in gradients[0].values())
    assert largest > 1e-3
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-4 * largest, rtol=0)


class Operations(TorchDispatchMode):
    """Names of what torch computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_gradients_of_one_input_have_the_same_bits_whatever_the_threads_do() -> None:
    """A run on a CPU repeats bit by bit, also with latents that are large enough for several threads."""
    own, threads = torch.tensor([0, 1, 0, 0, 1, 0, 0, 1]), torch.get_num_threads()
    means, weights = torch.randn(2, 16, 64, 64, requires_grad=True), torch.randn(8, 16, 64, 64)
    assert torch.equal(of_inputs(means, own), means[own])
    torch.set_num_threads(4)
    try:
        found = [torch.autograd.grad((of_inputs(means, own) * weights).sum(), means)[0] for _ in range(50)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, found[0]) for gradient in found)
    with Operations() as operations:  # an index adds in any order; whether threads meet is a matter of luck
        torch.autograd.grad((of_inputs(means, own) * weights).sum(), means)
    assert operations.names and not [name for name in operations.names if "index" in name]
    torch.testing.assert_close(found[0], torch.stack([weights[own == number].sum(0) for number in range(2)]))


def test_rows_of_one_example_and_state_have_one_input() -> None:
    """Whose windows begin at one step, too: those of two rollout batches may begin at different ones."""
    state = torch.zeros(5, 2, 1, 2, 2)
    state[3, 0, 0, 1, 1] = 1e-30
    state[:, 1] = torch.randn(5, 1, 2, 2)
    position, first_step = torch.tensor([7, 7, 6, 7, 7]), torch.tensor([1, 1, 1, 1, 2])
    found: Any = SimpleNamespace(position=position, first_step=first_step, latents=state)
    first, own = Experience.first_inputs(found, torch.tensor([4, 3, 2, 1, 0]))
    assert (first.tolist(), own.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3, 3])


def forward_size(size: int, together: int = 1, most_elsewhere: int = 0) -> ForwardSize:
    """Of a process beside one with as many inputs."""
    found = object.__new__(ForwardSize)
    found.rows, found.parts_per_forward = size, together
    found._config = SimpleNamespace(rollout=SimpleNamespace(shares_first_step=True))  # type: ignore[assignment]
    found._engine = SimpleNamespace(gather=lambda own: torch.cat([own, own.new_tensor([most_elsewhere])]))  # type: ignore[assignment]
    return found


def numbered(*inputs: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """As `Experience.first_inputs` of rows that have these inputs."""
    return lambda rows: (rows, torch.tensor(inputs))


def spans(parts: list[tuple[Tensor, range]]) -> list[tuple[list[int], range]]:
    return [(rows.tolist(), span) for rows, span in parts]


def test_rows_of_one_input_are_in_one_forward_whatever_its_number_of_rows() -> None:
    rows, inputs = torch.tensor([9, 8, 7, 6, 5, 4]), numbered(0, 1, 0, 1, 0, 0)
    rest = [([9, 8], range(1, 2)), ([7, 6], range(1, 2)), ([5, 4], range(1, 2))]
    assert spans(forward_size(2).parts(rows, 2, inputs)) == [([9, 8, 7, 6, 5, 4], range(1)), *rest]
    one = [([9, 7, 5, 4], range(1)), ([8, 6], range(1))]
    assert spans(forward_size(1).parts(rows, 1, inputs)) == one
    assert len(forward_size(1, 2).parts(rows, 2, inputs)) == 1 + 6  # as many inputs as others have rows of the network
    assert spans(forward_size(1, 2).parts(rows, 3, inputs))[1] == ([9], range(1, 3))


def test_inputs_that_differ_keep_the_forwards_of_all_steps() -> None:
    """Of more than half of the rows, on any process."""
    rows, inputs = torch.arange(4), numbered(0, 1, 2, 0)
    assert spans(forward_size(2, 2).parts(rows, 2, inputs)) == spans(forward_size(2, 2).parts(rows, 2))
    two = numbered(0, 1, 1, 0)
    assert len(forward_size(4, 2).parts(rows, 2, two)) == 2
    assert spans(forward_size(4, 2, 3).parts(rows, 2, two)) == spans(forward_size(4, 2, 3).parts(rows, 2))
    assert forward_size(4).parts(rows[:0], 2, numbered()) == []


@pytest.mark.parametrize("elsewhere", range(1, 9))
def test_every_process_has_as_many_forwards(elsewhere: int) -> None:
    """One whose rows have fewer inputs splits those of one input; each row is still in one forward."""
    rows, inputs = torch.arange(16), numbered(*[0] * 14, 1, 1)
    parts = [chunk for chunk, span in forward_size(2, 1, elsewhere).parts(rows, 2, inputs) if span == range(1)]
    assert len(parts) == max(1, -(-elsewhere // 2)) and all(len(chunk) for chunk in parts)
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()


def test_the_expected_share_of_shared_steps_is_that_of_dealt_rows(config: Config) -> None:
    """Eight groups of eight, dealt into four steps in random orders."""
    options: dict[str, Any] = {"rollout__group_size": 8, "rollout__shared_noise": True}
    groups, generator, counted = torch.arange(8).repeat_interleave(8), torch.Generator().manual_seed(0), 0
    for _ in range(100):
        steps = groups[torch.randperm(64, generator=generator)].tensor_split(4)
        counted += sum(len(step.unique()) for step in steps)
    assert shared_training_steps(config(**options), 4) == pytest.approx(1 - counted / 6400, abs=0.02)
    assert shared_training_steps(config(**options), 1) == 1 - 1 / 8
    assert shared_training_steps(config(**options), 9) == 0  # most groups have one row in a step
    assert shared_training_steps(config(rollout__group_size=8), 1) == 0
    assert shared_training_steps(config(**options, rollout__shared_first_step=False), 1) == 0


def test_a_run_of_an_earlier_version_keeps_its_rows(config: Config, scripted: Use) -> None:
    """Its checkpoint lacks the option, and sums of other forwards round differently."""
    scripted(brightness)
    options = {**SHARED, "training__max_steps": 1, "training__checkpoint_every": 1}
    train(config(rollout__shared_first_step=False, **options))
    again = config(resume="auto", **options)
    assert again.rollout.shares_first_step and not with_kept_defaults(again).rollout.shares_first_step
    assert config(**SHARED).rollout.shares_first_step
    assert not config(**SHARED | {"rollout__shared_noise": False}).rollout.shares_first_step


@pytest.mark.full
def test_a_run_resumed_inside_an_epoch_has_the_same_bits(config: Config, scripted: Use) -> None:
    """The rows of its checkpoint have the inputs that they had."""
    scripted(brightness)
    options = {**SHARED, "algorithm__inner_epochs": 2, "training__checkpoint_every": 1}
    straight, _ = train(config(name="straight", training__max_steps=2, **options))
    for steps in (1, 2):
        resumed, _ = train(config(name="resumed", resume="auto", training__max_steps=steps, **options))
    assert same_weights(weights(straight), weights(resumed))
