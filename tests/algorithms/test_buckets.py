"""Runs on images in their own shape: every shape is trained, on policy, and a resumed run is the same run."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.config import RunConfig
from retouch.data.dataset import load_dataset
from retouch.imaging.masks import MASK_THRESHOLD
from retouch.observe.run_dir import read_metrics
from retouch.observe.timing import Stopwatch
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.protocol import RewardItem
from retouch.rewards.scorers.preservation import PreservationReward
from retouch.rewards.table import RewardTable
from retouch.training.evaluation import evaluate, shared_work
from retouch.training.step import Step
from retouch.types import Example, Score
from tests.command_line import retouch
from tests.selection import default
from tests.shapes import OWN_SHAPE, SHAPES, write_shapes

from .runs import Config, Use, brightness, by_group, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

ON_THE_ODE: dict[str, Any] = {"rollout__window": None, "rollout__noise_level": None}


@pytest.fixture
def mixed(tmp_path: Path) -> dict[str, Any]:
    """A data section of two signs of each of four shapes."""
    return {"format": "manifest", "path": str(write_shapes(tmp_path / "mixed", 2)), "resolution": OWN_SHAPE}


@pytest.fixture
def run_of(config: Config, mixed: dict[str, Any]) -> Config:
    """A run of an algorithm: a pass over the examples is four epochs of one step, or four supervised steps."""

    def make(algorithm: str, options: dict[str, Any] | None = None, **overrides: Any) -> RunConfig:
        own = {"data": mixed, "warmup_data": None, "evaluation__data": None, "training__max_steps": 4}
        own |= {"optimizer__batch_size_per_device": 4 if algorithm in ("grpo", "ppo", "nft", "reward_gradient") else 2}
        own |= {} if algorithm in ("grpo", "ppo") else ON_THE_ODE
        return config(algorithm={"name": algorithm, **(options or {})}, **{**own, **overrides})

    return make


@pytest.fixture
def trained_shapes(monkeypatch: pytest.MonkeyPatch) -> list[set[tuple[int, int]]]:
    """The shapes of the examples of every optimizer step."""
    shapes: list[set[tuple[int, int]]] = []
    enter = Step.__enter__

    def noted(self: Step) -> Step:
        shapes.append({self.data.shapes[position] for position in self.positions})
        return enter(self)

    monkeypatch.setattr(Step, "__enter__", noted)
    return shapes


SHAPED = ["grpo", "ppo", "nft", "reward_gradient", "sft", "kto", "dpo", "online dpo"]


@pytest.mark.parametrize("name", default(SHAPED, lambda name: name not in ("ppo", "online dpo")))
def test_every_shape_is_trained(
    name: str, run_of: Config, trained_shapes: list[set[tuple[int, int]]], scripted: Use
) -> None:
    scripted(brightness)
    given = {"dpo": {"pairs": "offline"}}.get(name, {})
    name = name.removeprefix("online ")
    rewards = {"rewards": {"edge": {"scorer": "seam"}}} if name == "reward_gradient" else {}
    run, records = train(run_of(name, given, **rewards))
    assert [len(shapes) for shapes in trained_shapes] == [1, 1, 1, 1]
    assert set.union(*trained_shapes) == {*SHAPES}
    steps = of_kind(records, "train")
    assert all(step["grad_norm"] > 0 for step in steps) and len(steps) == 4
    assert all(step.get("max_abs_log_ratio", 0) <= 1e-6 for step in steps)
    assert run.data.shapes == [example.shape for example in run.data]


def test_groups_without_a_signal_are_followed_by_others_of_their_shape(
    run_of: Config, trained_shapes: list[set[tuple[int, int]]], scripted: Use, tmp_path: Path
) -> None:
    def flat_first(group: int, item: RewardItem) -> Score:
        return Score(0.5) if group == 0 else brightness(item)  # type: ignore[return-value]

    rule, groups = by_group(flat_first)
    scripted(rule)
    data = {"format": "manifest", "path": str(write_shapes(tmp_path / "four", 4)), "resolution": OWN_SHAPE}
    train(run_of("grpo", {"resample_rounds": 1}, data=data, training__max_steps=1))
    assert len(groups) == 3 and len({group // 100 for group in groups}) == 1  # ids of a shape
    assert len(trained_shapes) == 1


def test_images_of_one_size_are_trained_as_at_that_size(config: Config, whole: None) -> None:
    runs = []
    for name, resolution in (("sized", [32, 64]), ("shaped", OWN_SHAPE)):
        sections = ("data", "warmup_data", "evaluation__data")
        sizes = {f"{section}__resolution": resolution for section in sections}
        runs.append(train(config(name=name, algorithm__sft_steps=1, training__max_steps=3, **sizes)))
    (sized, records), (shaped, again) = runs
    assert {*shaped.data.shapes} == {(32, 64)} and same_weights(weights(sized), weights(shaped))
    measured = [[{k: v for k, v in r.items() if k not in ("time", "seconds")} for r in of] for of in (records, again)]
    assert [r for r in measured[0] if r["kind"] != "event"] == [r for r in measured[1] if r["kind"] != "event"]


def test_a_run_of_several_shapes_goes_on_inside_an_epoch_as_the_same_run(
    run_of: Config, mixed: dict[str, Any], whole: None
) -> None:
    """Two steps an epoch: the checkpoint after three lies inside the second."""
    manifest = Path(mixed["path"])
    lines = manifest.read_text("utf-8").splitlines(keepends=True)
    manifest.write_text("".join(lines[::2] + lines[1::2]), encoding="utf-8")  # shapes alternate
    shape = {"optimizer__batch_size_per_device": 2, "training__checkpoint_every": 3}
    shape |= {"evaluation__num_examples": 8, "evaluation__grid_examples": 8}
    through, _ = train(run_of("grpo", name="whole", training__max_steps=4, **shape))
    train(run_of("grpo", name="halves", training__max_steps=3, **shape))
    resumed, _ = train(run_of("grpo", name="halves", training__max_steps=4, resume="auto", **shape))
    assert same_weights(weights(through), weights(resumed))
    steps = [of_kind(read_metrics(run.dir.path / "metrics.jsonl"), "train") for run in (through, resumed)]
    losses = [[(step["step"], step["loss"]) for step in of_run] for of_run in steps]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    folder = through.dir.path / "evaluations" / "step-000004"
    sizes = [Image.open(path).size[::-1] for path in sorted(folder.glob("*.png"))]
    assert sizes == through.data.shapes  # in the order of the examples, not in that of the forwards
    with closing(RewardTable({"preservation": PreservationReward()}, RewardClientConfig())) as rewards:
        rewards.start()
        alone = evaluate(through.model, through.network, [*through.data], 1, 1, 1.0, 4, rewards, Stopwatch())
    assert [image.shape[:2] for image in alone.images] == through.data.shapes


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 4))
def test_ranks_share_an_evaluation_by_shape(sides: list[int], world_size: int, batch: int) -> None:
    """Each image once, as many forwards on every rank, and hardly more than if all had one shape: a rank shares at most
    one shape with the rank before it, and at most one with the rank after it."""
    work = [(Example(i, "", size=(8 * side, 8)), 0) for i, side in enumerate(sides)]
    shares = [shared_work(work, batch, rank, world_size) for rank in range(world_size)]
    assert sorted(row for own, _ in shares for row in own) == [*range(len(work))]
    each = -(-len(work) // world_size)
    assert all(len(own) <= each for own, _ in shares)
    forwards = [
        sum(-(-count // batch) for count in Counter(sides[i] for i in own).values()) + len(padding)
        for own, padding in shares
    ]
    whole, shapes = each // batch, len({*sides})
    assert {*forwards} == {max(forwards)} and max(forwards) <= whole + shapes
    if world_size == 1:
        assert [len(padding) for _, padding in shares] == [0]
        assert shapes > 1 or shares[0][0] == [*range(len(work))]
    if shapes == len(sides):
        assert max(forwards) == each  # a forward per shape on every rank would be `shapes`


def test_a_sample_has_the_size_of_its_source(run_of: Config, mixed: dict[str, Any], tmp_path: Path) -> None:
    """And its pixels outside of the mask; `--resolution` still samples at one size."""
    run, _ = train(run_of("sft", training__max_steps=1, training__checkpoint_every=1))
    data = load_dataset(run.config.data)
    asked = ("sample", "--run", run.dir.path, "--data", mixed["path"], "--steps", "1")
    for out, options in (("own", ()), ("square", ("--resolution", "64", "--fit", "stretch"))):
        done = retouch(*asked, "--out", tmp_path / out, *options)
        assert done.code == 0, done.err
        for item in data.items:
            source, mask = (np.asarray(Image.open(path)) for path in (item.source_path, item.mask_path))  # type: ignore[arg-type]
            drawn = np.asarray(Image.open(tmp_path / out / item.source_path.name))  # type: ignore[union-attr]
            assert drawn.shape == source.shape
            assert np.array_equal(drawn[mask < MASK_THRESHOLD], source[mask < MASK_THRESHOLD])
