"""Runs that start from the LoRA of another: their reference, and SFT -> GRPO -> NFT in three run files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from retouch.adapters.lora import FILE
from retouch.algorithms.dpo import recipe as dpo
from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.nft import recipe as nft
from retouch.config import ConfigError, parse_run
from retouch.engine import CheckpointError
from retouch.observe.run_dir import read_metrics
from retouch.rollout.plan import transition
from retouch.training.build import Run, build
from retouch.training.experience import collect
from retouch.training.session import Session
from retouch.training.step import Step
from tests.conftest import small_run
from tests.tiny_models import shallow_flux

from .runs import Config, brightness, of_kind, same_weights, train, weights

pytestmark = pytest.mark.usefixtures("bare", "shallow")

LORA = {"kind": "lora", "rank": 3, "alpha": 5.0}
STRONG = {"optimizer__lr": 3e-3, "optimizer__sft_lr": 3e-3}


@pytest.fixture(scope="module")
def supervised(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished supervised run of a LoRA, averaged, whose adapter shows."""
    root = tmp_path_factory.mktemp("supervised")
    made = small_run(
        signs, root, name="sft", model__path=shallow_flux(), model__train=LORA, algorithm={"name": "sft"}, rewards={},
        optimizer__lr=2e-2, training__max_steps=3, ema={"decay": 0.5}, data__path=str(signs / "targets"),
        data__target="auto",
    )  # fmt: skip
    for section in ("warmup_data", "rollout"):
        made.pop(section)
    train(parse_run(made))
    return root / "sft"


def started(config: Config, supervised: Path, **options: Any) -> Run:
    return build(config(model__train={**LORA, "initial_adapter": str(supervised)}, **options))


def first_kl(run: Run) -> tuple[float, float]:
    """KL of the first GRPO step before any update -> (measured, closed form by the network with LoRA disabled)."""
    with Session(run) as session:
        algorithm: Any = run.config.algorithm
        session.take_snapshots()
        session.progress.phase = "rl"
        experience = collect(session, algorithm)
        rows, span = torch.tensor([0]), range(1)  # forwards of one row, as the reference's below
        weight = experience.counts_in_loss[rows].sum()
        step = Step(run, session.size, rows, weight, 0.0, data=run.data, positions=[], seeds=[])
        experience.counts_in_loss[:] = 1
        session.size.rows = 1
        experience.reference_means = grpo.reference_means(session, algorithm, experience)
        _, values, _ = grpo.surrogate(run, algorithm, experience, step, rows, span)
        now = grpo.forward_on_recorded(run, algorithm, experience, rows, span)
        condition = run.encoded.conditions(experience.position[rows].tolist(), run.engine.device)
        x, _, number = experience.transitions(rows, span, run.engine.device)
        plan = run.plans.plan(run.model.schedule(run.config.rollout.num_steps, condition.size))
        network: Any = run.model.network
        network.disable_adapters()
        with torch.no_grad():
            base, std = transition(run.model, run.network, plan, x, number, condition)
        network.enable_adapters()
        expected = ((now.mean - base) ** 2).mean() / (2 * std.square().squeeze())
        return float(values["kl"]), float(expected)


@pytest.mark.parametrize("reference", ["initial", "base"])
def test_kl_before_the_first_update(config: Config, supervised: Path, reference: str) -> None:
    run = started(config, supervised, algorithm__kl_weight=0.1, algorithm__kl_reference=reference)
    kl, from_base = first_kl(run)
    run.close()
    assert from_base > 1e-6
    if reference == "initial":
        assert kl == 0.0
    else:
        assert kl == pytest.approx(from_base, rel=1e-5)


@pytest.mark.parametrize("reference", [pytest.param("initial", marks=pytest.mark.full), "base"])
def test_nft_is_held_to_the_reference_of_the_run_file(
    config: Config, scripted: Any, supervised: Path, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(brightness)
    seen: list[float] = []
    real = nft.implicit_policies_loss

    def watch(run: Run, algorithm: Any, experience: Any, micro: Any, total: Any) -> Any:
        loss, values, count = real(run, algorithm, experience, micro, total)
        seen.append(float(values["kl"]))
        if len(seen) == 1:
            network: Any = run.model.network
            network.disable_adapters()
            with torch.no_grad():
                base = nft.predict(run, micro.noised())
            network.enable_adapters()
            with torch.no_grad():
                old = nft.predict(run, micro.noised())  # nothing was updated: the policy is the old one
            seen.append(float((base - old).square().mean()))
            assert torch.equal(micro.reference, base if reference == "base" else old)
        return loss, values, count

    monkeypatch.setattr(nft, "implicit_policies_loss", watch)
    options = {"kl_weight": 0.1, "kl_reference": reference, "name": "nft", "skip_zero_std_groups": False}
    run = started(config, supervised, algorithm=options, rollout__noise_level=None, rollout__window=None,
                  training__max_steps=1)  # fmt: skip
    nft.train(run)
    run.close()
    kl, from_base = seen[:2]
    assert from_base > 1e-6
    assert kl == pytest.approx(from_base, rel=1e-4) if reference == "base" else kl == 0.0


def test_dpo_against_the_base_starts_at_an_implicit_reward_and_else_at_none(
    config: Config, scripted: Any, supervised: Path
) -> None:
    """The loss is ln 2 where policy and reference are equal."""
    scripted(brightness)
    losses: dict[str, float] = {}
    for reference in ("initial", "base"):
        run = started(config, supervised, name=reference, algorithm={"name": "dpo", "kl_reference": reference},
                      rollout__noise_level=None, rollout__window=None, training__max_steps=1)  # fmt: skip
        dpo.train(run)
        run.close()
        losses[reference] = of_kind(read_metrics(run.dir.path / "metrics.jsonl"), "train")[0]["loss"]
    assert losses["initial"] == pytest.approx(0.6931472, abs=1e-6)
    assert abs(losses["base"] - 0.6931472) > 1e-4


def test_sft_then_grpo_then_nft_in_three_run_files(config: Config, scripted: Any, supervised: Path) -> None:
    """Each run starts with the EMA weights of the one before, bit for bit, and resumes bitwise without naming it."""
    scripted(brightness)
    before = supervised
    stages: list[dict[str, Any]] = [
        {"algorithm__kl_weight": 0.1, "algorithm__kl_reference": "base"},
        {"algorithm": {"name": "nft", "kl_weight": 0.1}, "rollout__noise_level": None, "rollout__window": None},
    ]
    for number, stage in enumerate(stages):
        options = {**stage, **STRONG, "ema": {"decay": 0.5}, "training__checkpoint_every": 1, "training__max_steps": 2}
        first = started(config, before, name=f"stage{number}", **options)
        step = sorted((before / "checkpoints").iterdir())[-1]
        loaded = load_file(step / "ema" / FILE)
        assert loaded.keys() == {"transformer." + n.replace(".default.weight", ".weight") for n in weights(first)}
        for name, tensor in weights(first).items():
            assert torch.equal(tensor, loaded["transformer." + name.replace(".default.weight", ".weight")])
        first.close()
        shutil.rmtree(first.dir.path, ignore_errors=True)
        lora = {**LORA, "initial_adapter": str(before)}
        whole, records = train(config(model__train=lora, name=f"stage{number}", **options))
        assert [r["step"] for r in of_kind(records, "train")] == [1, 2]
        middle = str(whole.dir.path / "checkpoints/step-000001")
        again, _ = train(config(model__train=LORA, name=f"stage{number}", resume=middle, **options))
        assert same_weights(weights(whole), weights(again))
        before = whole.dir.path


def test_a_run_cannot_change_its_reference_when_it_resumes(config: Config, scripted: Any, supervised: Path) -> None:
    scripted(brightness)
    options = {"training__max_steps": 2, "algorithm__kl_weight": 0.1, "training__checkpoint_every": 1}
    lora = {**LORA, "initial_adapter": str(supervised)}
    done, _ = train(config(model__train=lora, **options))
    last = str(done.dir.path / "checkpoints/step-000002")
    with pytest.raises(CheckpointError, match=r"keeps the reference of algorithm\.kl_reference=initial, .* has base"):
        train(config(model__train=lora, algorithm__kl_reference="base", resume=last, **options))


def test_a_reference_that_there_is_not(config: Config) -> None:
    given = r"algorithm\.kl_reference: given 'base', but "
    for options, message in (
        ({"model__train": LORA}, "grpo keeps no reference policy here; set algorithm.kl_weight, or leave"),
        ({"algorithm__kl_weight": 0.1}, "model.train.kind is full, whose base is not kept"),
    ):
        with pytest.raises(ConfigError, match=given + message):
            config(algorithm__kl_reference="base", **options)
    with pytest.raises(ConfigError, match=r"algorithm\.reference_refresh_every: given 10, but .*kl_reference=base"):
        config(model__train=LORA, rollout__noise_level=None, rollout__window=None,
               algorithm={"name": "dpo", "kl_reference": "base", "reference_refresh_every": 10})  # fmt: skip
