"""The KTO recipe on the tiny bases: labels from a manifest, one noise for every forward of a step, z over the step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retouch.algorithms.kto import recipe as kto
from retouch.config import RunConfig
from retouch.data.base import DataError
from tests.selection import default
from tests.tiny_models import WITH_BASE

from .runs import Config, base_weights, labelled, of_kind, train

pytestmark = pytest.mark.usefixtures("bare", "shallow")

LORA = {"kind": "lora", "rank": 4, "alpha": 8}
Make = Callable[..., RunConfig]


@pytest.fixture
def kto_run(config: Config, signs: Path, tmp_path: Path) -> Make:
    def make(labels: tuple[Any, Any] = ("good", "bad"), **overrides: Any) -> RunConfig:
        algorithm = {"name": "kto", "beta": 100.0, **overrides.pop("algorithm", {})}
        data = {"format": "manifest", "path": str(labelled(signs, tmp_path, labels)), "resolution": [32, 64]}
        own = {"data": data | {"limit": 4}, "rewards": {}, "rollout__window": None, "rollout__noise_level": None}
        return config(algorithm=algorithm, **{**own, **overrides})

    return make


@pytest.mark.parametrize("family", default(WITH_BASE, lambda family: family == "flux_fill"))
def test_labelled_images_train_without_rewards_or_rollouts(family: str, kto_run: Make) -> None:
    """The first loss is 1/2 exactly; good images become easier to denoise than bad ones."""
    run, records = train(
        kto_run(
            model={"family": family, "path": "tiny", "dtype": "fp32", "train": LORA},
            algorithm={"timesteps_per_image": 2},
            optimizer={"lr": 1e-2, "batch_size_per_device": 2, "gradient_accumulation": 2},
            training__max_steps=6,
        )
    )
    steps = of_kind(records, "train")
    assert (steps[0]["loss"], steps[0]["label_margin"]) == (0.5, 0.0)
    assert steps[-1]["label_margin"] > 0 and steps[-1]["label_accuracy"] >= 0.75 and steps[-1]["loss"] < 0.5
    assert not of_kind(records, "rollout")
    assert run.derived.global_images_per_epoch == 0


def test_the_reference_is_the_policy_after_the_warm_up(kto_run: Make, signs: Path) -> None:
    warm = {"format": "self_bench", "path": str(signs / "targets"), "resolution": [32, 64]}
    base = base_weights(kto_run(name="base"))
    run, records = train(
        kto_run(algorithm={"warmup_steps": 1}, warmup_data=warm, optimizer__lr=1e-3, training__max_steps=3)
    )
    rl = [step for step in of_kind(records, "train") if step["phase"] == "rl"]
    assert [step["loss"] == 0.5 for step in rl] == [True, False]
    assert any(not torch.equal(t, base[n]) for n, t in run.policy.state("reference").items())


@pytest.mark.full
def test_micro_batches_change_memory_not_gradients(kto_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, so that z and the gains of the second are not 0; z is that of the whole step in every micro-batch."""
    seen: list[float] = []
    real = kto.kto_loss

    def watched(*args: Any, baseline: Tensor, **kwargs: Any) -> Any:
        seen.append(float(baseline))
        return real(*args, baseline=baseline, **kwargs)

    monkeypatch.setattr(kto, "kto_loss", watched)
    norms: list[list[float]] = []
    for batch in (1, 2, 4):
        seen.clear()
        sizes = {"lr": 1e-3, "batch_size_per_device": batch, "gradient_accumulation": 4 // batch}
        options = {"training__max_steps": 2, "algorithm": {"good_weight": 2.0}}
        _, records = train(kto_run(name=f"by{batch}", optimizer=sizes, **options))
        assert [len(set(seen[: 4 // batch])), len(set(seen[4 // batch :]))] == [1, 1]
        norms.append([step["grad_norm"] for step in of_kind(records, "train")])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)


def test_every_forward_of_a_step_has_the_same_times_and_noise(kto_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor, bool]] = []
    real = kto.noised_copies

    def watched(*args: Any) -> Any:
        copies = real(*args)
        seen.append((copies.noise, copies.time, torch.is_grad_enabled()))
        return copies

    monkeypatch.setattr(kto, "noised_copies", watched)
    size = {"lr": 1e-3, "batch_size_per_device": 4, "gradient_accumulation": 1}
    train(kto_run(optimizer=size, training__max_steps=2))
    assert [grad for _, _, grad in seen] == [False, False, True] * 2  # reference, baseline, training
    for step in (seen[:3], seen[3:]):
        assert all(torch.equal(a, step[0][0]) and torch.equal(b, step[0][1]) for a, b, _ in step)
    assert not torch.equal(seen[0][0], seen[3][0])


@pytest.mark.parametrize(
    "labels", default([(True, False), (1, 0), ("1", "0"), ("Good", " bad ")], ("Good", " bad ").__eq__)
)
def test_labels_as_json_and_csv_have_them(labels: tuple[Any, Any], kto_run: Make, tmp_path: Path) -> None:
    run, _ = train(kto_run(labels, training__max_steps=1))
    assert [kto.label_of(item) for item in run.data.items] == [True, False, True, False]


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (("good", "fine"), "item 1 has label 'fine'; expected good or bad"),
        ((None, "bad"), "item 0 has label None; expected good or bad"),
        (("good", "good"), "every example has label good, but kto compares good with bad images; add examples with "),
        (("bad", "bad"), "every example has label bad"),
    ],
)
def test_data_that_it_cannot_train_on(labels: tuple[Any, Any], says: str, kto_run: Make) -> None:
    with pytest.raises(DataError, match=says):
        train(kto_run(labels))


def test_an_entry_without_its_image_is_refused(kto_run: Make, tmp_path: Path, signs: Path) -> None:
    run = kto_run()
    path = tmp_path / "labels.json"
    entries = json.loads(path.read_text())
    for entry in entries:
        del entry["target_path"]
    path.write_text(json.dumps(entries))
    with pytest.raises(DataError, match="target_path missing, which the run needs"):
        train(run)
