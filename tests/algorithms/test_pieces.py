"""Trained steps and noised copies of a row in several forwards: the numbers of one forward, up to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from retouch.config import dump_run, parse_run
from retouch.engine.saved import saved_run_file, sound_state
from retouch.training import resume
from retouch.training.resume import with_kept_defaults
from tests.config.conftest import BASE
from tests.selection import rows

from .runs import Config, Use, brightness, labelled, of_kind, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

ODE: dict[str, Any] = {"rollout__window": None, "rollout__noise_level": None}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl_weight": 0.1}, "rollout__window": {"size": 3, "range": [0, 1]}},
    "recomputed": {
        "algorithm": {"name": "grpo", "inner_epochs": 2, "old_log_probs": "recomputed", "guard": True},
        "rollout__window": {"size": 3, "range": [0, 1]},
    },
    "nft": {
        "algorithm": {"name": "nft", "kl_weight": 0.1, "timesteps_per_image": 3, "old_policy": "frozen"},
        **ODE,
    },
    "dpo": {"algorithm": {"name": "dpo", "beta": 100.0, "timesteps_per_pair": 3}, **ODE},
    "kto": {"algorithm": {"name": "kto", "beta": 100.0, "timesteps_per_image": 3}, **ODE},
}
"""Runs with three parts of a row."""

CHOSEN = {("grpo", 1), *((kind, 2) for kind in RUNS if kind not in ("grpo", "kto"))}

COUNTED = ("loss", "grad_norm", "rows", "kl", "ratio", "logit", "label_margin", "positive_error", "positive_share")
"""Metrics that must be those of one forward."""


@pytest.mark.parametrize(("kind", "size"), rows([(kind, size) for kind in RUNS for size in (1, 2)], CHOSEN))
def test_pieces_have_the_numbers_of_one_forward(
    kind: str, size: int, config: Config, scripted: Use, signs: Path, tmp_path: Path
) -> None:
    """Two of three copies, then the last one, which counts half as much: gradients, metrics and weights."""
    scripted(brightness)
    options = dict(RUNS[kind])
    if kind == "kto":
        data = {"format": "manifest", "path": str(labelled(signs, tmp_path, ("good", "bad"))), "resolution": [32, 64]}
        options |= {"data": data | {"limit": 4}, "rewards": {}}
    sizes = {"lr": 1e-3, "batch_size_per_device": 2, "gradient_accumulation": 2}
    ends = []
    for name, given in (("whole", None), ("pieces", size)):
        optimizer = {**sizes, "steps_per_forward": given}
        run, records = train(config(name=name, optimizer=optimizer, training__max_steps=2, **options))
        ends.append((weights(run), of_kind(records, "train")))
    for then, now in zip(ends[0][1], ends[1][1], strict=True):
        for metric in COUNTED:
            if metric in then:
                assert now[metric] == pytest.approx(then[metric], rel=2e-3, abs=1e-6), metric
    for name, tensor in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][name], tensor, atol=2e-4, rtol=0)


def test_the_ratio_before_the_first_update_is_1_in_every_piece(config: Config, scripted: Use) -> None:
    """Of forwards with other numbers of rows than sampling had."""
    scripted(brightness)
    for name, size in (("one", 1), ("auto", "auto")):
        window = {"rollout__window": {"size": 3, "range": [0, 1]}, "algorithm__clip_range": 1e-12}
        _, records = train(config(name=name, training__max_steps=1, optimizer__steps_per_forward=size, **window))
        [step] = of_kind(records, "train")
        assert (step["ratio"], step["clip_fraction"]) == (1.0, 0.0)


def test_a_resumed_run_keeps_the_forwards_of_its_checkpoint(
    config: Config, scripted: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without the key took all steps in one forward; under today's default its sums would round differently."""
    scripted(brightness)
    shape = {"optimizer__batch_size_per_device": 4, "algorithm": {"name": "nft", "timesteps_per_image": 3}, **ODE}
    first = {"training__max_steps": 1, "training__checkpoint_every": 1, **shape}
    run, _ = train(config(optimizer__steps_per_forward=None, **first))
    again = config(resume="auto", **first)
    assert again.optimizer.steps_per_forward == "auto"
    kept = with_kept_defaults(again)
    assert kept.optimizer.steps_per_forward is None and kept.model_copy(update={"optimizer": again.optimizer}) == again
    written = config(resume="auto", optimizer__steps_per_forward=2, **first)
    assert with_kept_defaults(written) == written  # a written key wins
    assert with_kept_defaults(config(**first)).optimizer.steps_per_forward == "auto"  # a new run
    [folder] = run.dir.checkpoints.glob("step-*")
    file = saved_run_file(sound_state(folder), folder)
    assert yaml.safe_load(dump_run(kept))["optimizer"]["steps_per_forward"] is None  # and so for the next resume
    del file["optimizer"]["steps_per_forward"]  # as before there was the key
    monkeypatch.setattr(resume, "saved_run_file", lambda *_: file)
    assert with_kept_defaults(again).optimizer.steps_per_forward is None
    file["optimizer"]["steps_per_forward"] = 2  # a key that was written, and taken out of the file
    assert with_kept_defaults(again).optimizer.steps_per_forward == "auto"
    monkeypatch.undo()
    scripted(brightness)
    more, _ = train(config(resume="auto", **{**first, "training__max_steps": 2}))
    assert more.config.optimizer.steps_per_forward is None


def test_only_changes_of_a_run_file_are_told(caplog: pytest.LogCaptureFixture, config: Config) -> None:
    two = {"preservation": {"weight": 0.5}, "other": {"scorer": "preservation"}}
    run = config(rewards=two)
    written: Any = yaml.safe_load(dump_run(run))
    for section, option in (
        ("optimizer", "options"),
        ("optimizer", "steps_per_forward"),
        ("reward_client", "on_drift"),
    ):
        del written[section][option]

    def changed(**options: Any) -> Config:
        return lambda: config(**{"rewards": two, **options})

    once = {"optimizer__steps_per_forward": None}  # all in one forward, as before there was the key
    for now, told in (
        (changed(**once), []),
        (changed(), ['optimizer.steps_per_forward: "auto" (was null)']),
        (changed(**once, optimizer__lr=2e-4, resume="auto"), ["optimizer.lr: 0.0002 (was 0.0001)"]),
        # the other reward has had the same line
        (changed(**once, rewards={**two, "preservation": {}}), ["rewards.preservation.weight: 1.0 (was 0.5)"]),
        (
            changed(**once, rewards={"preservation": {"weight": 0.5}}),
            ['rewards.other: null (was "preservation")'],
        ),
        (changed(**once, ema={"decay": 0.5}), ['ema: {"decay": 0.5, "update_interval": 1} (was null)']),
        (
            changed(**once, reward_client__probe_every=1, reward_client__on_drift="stop"),
            ["reward_client.probe_every: 1 (was 0)", 'reward_client.on_drift: "stop" (was "warn")'],
        ),
    ):
        caplog.clear()
        resume._warn_of_changes(written, now())
        assert caplog.messages == [f"changed since the checkpoint: {line}" for line in told]


def test_another_length_moves_the_stages_of_a_curriculum(caplog: pytest.LogCaptureFixture) -> None:
    for stages, effect in ((1, ""), (2, "; the stages of data.curriculum are shares of it, and move")):
        data = {"format": "complex_edit", "path": "somewhere", "resolution": 64, "curriculum": stages}
        edits = {**BASE, "model": {"family": "qwen_image_edit", "path": "tiny"}, "data": data, "rewards": {"hpsv2": {}}}
        then, now = (parse_run(edits, [f"training.max_steps={steps}"]) for steps in (4, 9))
        resume._warn_of_changes(yaml.safe_load(dump_run(then)), now)
        assert caplog.messages.pop() == f"changed since the checkpoint: training.max_steps: 9 (was 4){effect}"
