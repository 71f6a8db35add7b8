"""Checkpoints of vlm_grpo: what goes where, what a run that is resumed finds, and who may read DeepSpeed's state.
DeepSpeed itself runs in tests/distributed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from retouch.algorithms.vlm_grpo import recipe as vlm_grpo
from retouch.algorithms.vlm_grpo.checkpoint import finish_checkpoint, require_same_engine, sort_modules
from retouch.algorithms.vlm_grpo.recipe import VlmTrainer
from retouch.config import ConfigError, load_run
from retouch.engine import CheckpointError
from retouch.engine.checkpoint import read_state
from retouch.engine.saved import is_pinned
from retouch.rewards.table import RewardTable
from retouch.training.scoring import RewardOutage
from retouch.use.exporting import export_weights
from tests.algorithms.test_vlm_grpo import parts_of
from tests.algorithms.vlm_runs import RunFile, records, train, vlm_file

__all__ = ["parts_of", "vlm_file"]

ZERO2 = ("mp_rank_00_model_states.pt", *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)))
ZERO3 = tuple(f"zero_pp_rank_{rank}_mp_rank_00_{what}_states.pt" for rank in range(3) for what in ("model", "optim"))


def written(folder: Path, state: Iterable[str]) -> Path:
    """What the trainer leaves behind."""
    made = folder / "checkpoint-2"
    (made / "global_step2").mkdir(parents=True)
    for name in (*(f"global_step2/{file}" for file in state), "latest", "zero_to_fp32.py", "adapter_model.safetensors"):
        (made / name).write_text(name, encoding="utf-8")
    return folder


def test_what_deepspeed_needs_to_go_on_stays_where_it_looks(vlm_file: RunFile, tmp_path: Path) -> None:
    writing = written(tmp_path / ".writing-step-000002", ZERO2)
    folder = finish_checkpoint(writing, 2, load_run(vlm_file()), {}, pinned=False)
    assert {path.name for path in folder.iterdir()} == {
        "latest",
        "global_step2",
        "weights",
        "state.json",
        "complete.json",
    }
    assert {path.name for path in (folder / "global_step2").iterdir()} == set(ZERO2)
    assert [path.name for path in (folder / "weights").iterdir()] == ["adapter_model.safetensors"]


def test_what_a_killed_run_left_does_not_stop_the_next(parts_of: Any) -> None:
    """Killed between the trainer's writing and the rename: the folder of weights is there already."""
    parts, arguments = parts_of()
    trainer = VlmTrainer(parts, arguments)
    trainer.create_optimizer_and_scheduler(2)
    left = parts.dir.checkpoints / ".writing-step-000000"
    (left / "checkpoint-0" / "weights").mkdir(parents=True)
    trainer.save(pinned=False)
    assert [path.name for path in parts.dir.checkpoints.iterdir()] == ["step-000000"]


def test_its_weights_are_not_exported_as_those_of_a_diffusion_model(parts_of: Any) -> None:
    parts, arguments = parts_of()
    trainer = VlmTrainer(parts, arguments)
    trainer.create_optimizer_and_scheduler(2)
    trainer.save(pinned=False)
    with pytest.raises(ConfigError, match=r"trained its text encoder, and .*weights is a PEFT adapter already"):
        export_weights(parts.dir.path, "diffusers", None)


@pytest.mark.full
def test_adaptive_entropy_goes_on_where_it_was(parts_of: Any) -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.25}
    trainer = VlmTrainer(*parts_of(options))
    trainer.create_optimizer_and_scheduler(2)
    trainer.entropy_coef = 0.5
    trainer.save(pinned=False)
    parts, arguments = parts_of(options, name="again")
    again = VlmTrainer(parts, arguments)
    again.create_optimizer_and_scheduler(2)
    again._load_optimizer_and_scheduler(str(trainer.run.dir.checkpoints / "step-000000"))
    assert again.entropy_coef == 0.5


@pytest.mark.full
def test_a_run_that_has_ended_is_left_as_it_is(vlm_file: RunFile, tmp_path: Path) -> None:
    file = vlm_file()
    (tmp_path / "a").mkdir()
    dead = tmp_path / "a/metrics.jsonl"  # of an attempt that was killed before its first checkpoint
    dead.write_text('{"step": 0, "kind": "eval"}\n', encoding="utf-8")
    assert train(file).code == 2
    assert train(file, "resume=auto", "training.max_steps=3").code == 0
    assert [record["moment"] for record in records(tmp_path / "a", "eval")] == ["start", "end"]
    assert "step 1 of 3: loss " in (tmp_path / "a/log.txt").read_text(encoding="utf-8")
    metrics = (tmp_path / "a/metrics.jsonl").read_bytes()
    again = train(file, "resume=auto", "algorithm.trl.num_iterations=2")  # of max_steps 2, and step 3 is inside a cycle
    assert again.code == 0, again.err
    assert "already ended at step 3" in again.err
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == metrics


@pytest.mark.full
def test_a_reward_that_is_the_same_everywhere_alarms_once(vlm_file: RunFile, tmp_path: Path) -> None:
    """Steps before a resume count."""
    reward = {"scorer": "fn", "fn": "tests.algorithms.completion_rewards:alike", "paste_back": False}
    file = vlm_file(rewards={"alike": reward})
    for steps in (6, 11):
        done = train(file, f"training.max_steps={steps}", "resume=auto")
        assert done.code == 0, done.err
    assert [r["step"] for r in records(tmp_path / "a", "event") if r["event"] == "alarm"] == [10]


@pytest.mark.full
def test_rewards_go_on_counting_and_the_last_checkpoint_stays_pinned(
    vlm_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards stay away from the evaluation at the end."""
    counted: list[int] = []
    real_restore, real_evaluate = RewardTable.restore, VlmTrainer.evaluate_now

    def watch(table: RewardTable, *state: Any) -> None:
        real_restore(table, *state)
        counted.append(table.asked)

    def away(trainer: Any, moment: str) -> None:
        if moment == "end":
            raise RewardOutage("rewards stayed unavailable")
        real_evaluate(trainer, moment)

    monkeypatch.setattr(RewardTable, "restore", watch)
    monkeypatch.setattr(VlmTrainer, "evaluate_now", away)
    file = vlm_file()
    stopped = train(file)
    assert stopped.code == 3, stopped.err
    assert is_pinned(tmp_path / "a/checkpoints/step-000002")
    monkeypatch.setattr(VlmTrainer, "evaluate_now", real_evaluate)
    resumed = train(file, "resume=auto")
    assert resumed.code == 0, resumed.err
    assert counted == [16]  # two steps of eight; evaluations count none
    assert [record["step"] for record in records(tmp_path / "a")] == [1, 2]
    assert [record["moment"] for record in records(tmp_path / "a", "eval")] == ["start", "end"]


def test_what_is_generated_again_is_not_counted(
    vlm_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step rewards stay away on another process alone."""
    real = vlm_grpo.raise_together

    def elsewhere(failed: Any, any_rank: Any) -> None:
        trainer = any_rank.__self__
        if trainer.scoring and trainer.state.global_step == 1:
            raise RewardOutage("rewards failed on another process; see its log")
        real(failed, any_rank)

    monkeypatch.setattr(vlm_grpo, "raise_together", elsewhere)
    stopped = train(vlm_file())
    assert stopped.code == 3, stopped.err
    assert read_state(tmp_path / "a/checkpoints/step-000001")["rewards"]["asked"] == 8


@pytest.mark.parametrize(
    ("state", "before", "stage", "processes"),
    [((), "no DeepSpeed", None, 4), (ZERO2, "DeepSpeed ZeRO-2 on 2", 2, 2), (ZERO3, "DeepSpeed ZeRO-3 on 3", 3, 3)],
)
def test_state_of_deepspeed_is_read_by_the_same_engine_alone(
    tmp_path: Path, state: tuple[str, ...], before: str, stage: int | None, processes: int
) -> None:
    [folder] = written(tmp_path, state).iterdir()
    require_same_engine(folder, stage, processes)
    if stage == 2:
        require_same_engine(folder, 1, processes)  # the files of ZeRO-1 are alike
    now = {
        (None, 4): "no DeepSpeed",
        (2, 2): "ZeRO-2 on 2",
        (2, 3): "ZeRO-2 on 3",
        (3, 2): "ZeRO-3 on 2",
        (3, 3): "3 on 3",
    }
    for (other, ranks), what in now.items():
        if (other, ranks) != (stage, processes):
            with pytest.raises(
                CheckpointError, match=f"was written under {before}.*, but this is .*{what}.*launch as before"
            ):
                require_same_engine(folder, other, ranks)


def test_the_module_names_of_an_adapter_have_one_order(tmp_path: Path) -> None:
    """PEFT keeps them in sets, whose order differs between processes: a resumed run wrote another file."""
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({"target_modules": ["v_proj", "k_proj"], "modules_to_save": None, "r": 4}))
    sort_modules(file)
    assert json.loads(file.read_text()) == {"target_modules": ["k_proj", "v_proj"], "modules_to_save": None, "r": 4}
    sort_modules(tmp_path / "none.json")
