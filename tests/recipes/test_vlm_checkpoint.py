"""Checkpoints of vlm_grpo that hold DeepSpeed's state: where its files go, and who may read them. DeepSpeed itself runs
in tests/distributed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from retouch.config import load_run
from retouch.engine import CheckpointError
from retouch.vlm.checkpoint import finish_checkpoint, may_go_on_with
from tests.recipes.vlm_runs import RunFile, vlm_file

__all__ = ["vlm_file"]

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
    folder = finish_checkpoint(written(tmp_path / ".writing-step-000002", ZERO2), 2, load_run(vlm_file()), pinned=False)
    assert {path.name for path in folder.iterdir()} == {
        "latest",
        "global_step2",
        "weights",
        "state.json",
        "complete.json",
    }
    assert {path.name for path in (folder / "global_step2").iterdir()} == set(ZERO2)
    assert [path.name for path in (folder / "weights").iterdir()] == ["adapter_model.safetensors"]


@pytest.mark.parametrize(
    ("state", "before", "stage", "processes"),
    [((), "no DeepSpeed", None, 4), (ZERO2, "DeepSpeed ZeRO-2 on 2", 2, 2), (ZERO3, "DeepSpeed ZeRO-3 on 3", 3, 3)],
)
def test_state_of_deepspeed_is_read_by_the_same_engine_alone(
    tmp_path: Path, state: tuple[str, ...], before: str, stage: int | None, processes: int
) -> None:
    [folder] = written(tmp_path, state).iterdir()
    may_go_on_with(folder, stage, processes)
    if stage == 2:
        may_go_on_with(folder, 1, processes)  # the files of ZeRO-1 are alike
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
                CheckpointError, match=f"was written under {before}.*, this is .*{what}.*launch as then"
            ):
                may_go_on_with(folder, other, ranks)
