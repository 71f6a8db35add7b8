"""A step whose gradient contains NaN or Inf leaves a dump, and `retouch replay` repeats it bitwise."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image, ImageChops
from safetensors.torch import load_file

from retouch.engine.saved import declare_complete
from retouch.observe.run_dir import read_metrics
from retouch.training.dump import read_dump
from tests import forked
from tests.command_line import retouch
from tests.conftest import small_run
from tests.selection import default

pytestmark = pytest.mark.usefixtures("shallow")

LORA = {"kind": "lora", "rank": 4}
BROKEN: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": {"name": "sft"}, "model__train": LORA},
    "grpo": {"algorithm__inner_epochs": 3, "algorithm__kl_weight": 0.1, "ema": {"decay": 0.9, "update_interval": 1}},
    "late": {"algorithm__late_rewards": "next_step"},
    "reward_gradient": {
        "algorithm": {"name": "reward_gradient", "kl_weight": 0.1},
        "rewards": {"seam": {}},
        "rollout__window": None,
        "rollout__noise_level": None,
    },
    "nft": {"algorithm": {"name": "nft", "inner_epochs": 3}, "rollout__window": None, "rollout__noise_level": None},
    "dpo": {"algorithm": {"name": "dpo", "inner_epochs": 3}, "rollout__window": None, "rollout__noise_level": None},
}
"""Runs whose first step makes weights so large that the forward of the second overflows."""


def broken_run(kind: str, folder: Path, run_file: Callable[..., dict[str, Any]]) -> tuple[Path, Path]:
    """A run that ended in its second step -> (run file, dump)."""
    run = run_file(**BROKEN[kind], name=kind, optimizer__lr=1e30, training__max_steps=4)
    if kind == "sft":
        run["data"] = run.pop("warmup_data")
        del run["rewards"], run["rollout"]["window"]
    file = folder / f"{kind}.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    outcome = retouch("train", file)
    assert outcome.code == 1 and "Traceback" not in outcome.err, outcome.err
    [dump] = (folder / "runs" / kind / "dumps").iterdir()
    line = outcome.err.splitlines()[-1]
    assert line.startswith("error: the gradient norm is nan; lower optimizer.lr") and str(dump) in line
    return file, dump


@pytest.mark.parametrize("kind", default(BROKEN, {"grpo", "reward_gradient", "dpo"}.__contains__))
def test_a_broken_step_is_repeated_bitwise(kind: str, tmp_path: Path, run_file: Callable[..., dict[str, Any]]) -> None:
    _, dump = broken_run(kind, tmp_path, run_file)
    before = sorted(path for path in tmp_path.rglob("*"))
    outcome = retouch("replay", dump)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1] == "reproduced: every loss and the gradient norm have the same bits"
    assert "without effect" not in outcome.out
    assert sorted(path for path in tmp_path.rglob("*")) == before  # it writes nothing
    records = read_metrics(tmp_path / "runs" / kind / "metrics.jsonl")
    assert records[-1] == {"step": 1, "kind": "event", "event": "diverged", "dump": "dumps/step-000001"}


@pytest.fixture(scope="module")
def made(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump of a run."""
    folder = tmp_path_factory.mktemp("broken")
    return broken_run("sft", folder, lambda **options: small_run(signs, folder / "runs", **options))[1]


@pytest.fixture
def dump(made: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return Path(shutil.copytree(made, tmp_path / "dumps" / made.name))


def test_what_a_dump_records(dump: Path) -> None:
    state, found = read_dump(dump)
    [share] = found.shares
    assert state["progress"]["step"] == 1 and len(share.examples) == len(share.seeds) == len(share.keys) == 2
    assert found.grad_norm == share.losses[0] == "nan" and found.lr == (1e30).hex()
    assert found.environment["torch"] == torch.__version__ and set(found.weights) == {"weights"}
    assert (dump / "weights").is_dir() and state["base"]["network_files"]


def test_the_examples_of_the_broken_micro_batch_are_named(dump: Path) -> None:
    examples = ", ".join(map(str, read_dump(dump)[1].shares[0].examples))
    lines = retouch("replay", dump).out.splitlines()
    assert lines[0].startswith("step 2 (sft, epoch 0): the gradient norm is nan")
    assert lines[2] == f"  first: micro-batch 1, loss nan, examples {examples}"


def rewritten(dump: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state of a dump, and record it as if it had been written so."""
    state = json.loads((dump / "state.json").read_text())
    change(state)
    (dump / "state.json").write_text(json.dumps(state))
    (dump / "complete.json").unlink()
    declare_complete(dump, state["progress"]["step"], pinned=False)


def test_other_numbers_are_listed_with_their_possible_reasons(dump: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["dump"]["shares"][0]["losses"][0] = (0.5).hex()
        state["dump"]["environment"]["torch"] = "2.0"
        state["dump"]["weights"]["weights"] = "0" * 64

    rewritten(dump, change)
    outcome = retouch("replay", dump)
    assert outcome.code == 1 and "Traceback" not in outcome.err
    lines = outcome.err.splitlines()
    where = lines.index("  not reproduced:")
    assert lines[where + 1] == "  loss 1: 0.5 then, nan now"
    assert lines[where + 2].startswith(f"  SHA-256 of weights: {'0' * 60} then, ")
    assert lines[where + 3] == f"  torch: 2.0 then, {torch.__version__} now"


def test_versions_without_effect_are_listed(dump: Path) -> None:
    rewritten(dump, lambda state: state["dump"]["environment"].update(diffusers="0.1"))
    outcome = retouch("replay", dump)
    assert outcome.code == 0 and "  without effect: diffusers: 0.1 then, " in outcome.out


def test_data_that_changed_is_named(tmp_path: Path, run_file: Callable[..., dict[str, Any]], signs: Path) -> None:
    own = tmp_path / "targets"
    shutil.copytree(signs / "targets", own)
    made = broken_run("sft", tmp_path, lambda **given: run_file(**given, warmup_data__path=str(own)))[1]
    example = read_dump(made)[1].shares[0].examples[0]
    rewritten(made, lambda state: state["dump"]["shares"][0]["losses"].__setitem__(0, "inf"))
    for file in own.rglob("*.png"):
        ImageChops.offset(Image.open(file), 1).save(file)
    outcome = retouch("replay", made)
    assert outcome.code == 1 and re.search(rf"data: example .*\b{example}\b.* has another prompt", outcome.err)


def test_a_changed_file_is_refused_by_name(dump: Path) -> None:
    [file] = (dump / "weights").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    outcome = retouch("replay", dump)
    assert outcome.code == 2 and f"damaged (weights/{file.name}: its SHA-256 differs" in outcome.err


def test_weights_that_are_broken_themselves_are_dumped_and_replayed(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint with such weights is loaded, but the dump of the step that met them is."""
    from retouch.engine.parallel import Replicated

    step = Replicated.step

    def overflowing(self: Replicated, lr: float) -> tuple[float, bool]:
        result = step(self, lr)
        self.parameters[0].data.fill_(float("inf"))
        return result

    monkeypatch.setattr(Replicated, "step", overflowing)
    file, made = broken_run("sft", tmp_path, run_file)
    monkeypatch.undo()
    assert any(not t.isfinite().all() for f in (made / "weights").glob("*.safetensors") for t in load_file(f).values())
    assert retouch("replay", made).code == 0
    refused = retouch("train", file, f"resume={made}", "name=other")
    assert refused.code == 2 and "contains NaN or Inf" in refused.err


def test_a_full_disk_does_not_hide_the_reason(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("retouch.engine.checkpoint.declare_complete", full)
    run = run_file(**BROKEN["grpo"], optimizer__lr=1e30)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    outcome = retouch("train", file)
    assert outcome.code == 1 and outcome.err.splitlines()[-1].startswith("error: the gradient norm is nan; lower")
    assert "replay" not in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2), ("grad_norm", 0.5), ("grad_norm", "1e5"), ("lr", "0x1p99999999999999999999999999999999999999"),
        ("rows_per_forward", 0), ("shares", []), ("shares", [{}]), ("weights", {"weights": "ab"}),
        ("environment", {"torch": 2}), ("problem", None), ("loss_scale", "nan "), ("more", 1),
    ],
)  # fmt: skip
def test_a_dump_that_no_run_wrote_is_refused(dump: Path, path: str, value: object) -> None:
    rewritten(dump, lambda state: state["dump"].__setitem__(path, value))
    outcome = retouch("replay", dump)
    assert outcome.code == 2 and "damaged (state.json: dump." in outcome.err and "Traceback" not in outcome.err


@pytest.mark.full
def test_a_step_of_two_processes(tmp_path: Path, run_file: Callable[..., dict[str, Any]]) -> None:
    """Each has its examples, seeds and losses; one process alone cannot repeat it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "retouch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    file = tmp_path / "run.yaml"
    run = run_file(**BROKEN["grpo"], optimizer__lr=1e30, optimizer__batch_size_per_device=1)
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    failed = forked.run([*torchrun, "train", str(file)], env=environment, timeout=300)
    assert failed.returncode == 1 and "`retouch replay " in failed.stderr, failed.stderr
    [made] = (tmp_path / "runs" / "t" / "dumps").iterdir()
    shares = read_dump(made)[1].shares
    assert len(shares) == 2 and shares[0].seeds != shares[1].seeds and all(share.losses for share in shares)
    again = forked.run([*torchrun, "replay", str(made)], env=environment, timeout=300)
    assert again.returncode == 0 and again.stdout.count("\nreproduced: every loss") == 1, again.stderr
    alone = retouch("replay", made)
    assert alone.code == 2 and "accelerate launch --num_processes 2" in alone.err


def test_a_folder_that_is_no_dump_is_refused(finished: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = finished("lora") / "checkpoints" / "step-000004"
    for given, says in ((checkpoint, "but no dump of a step"), (tmp_path / "none", "no such dump")):
        outcome = retouch("replay", given)
        assert outcome.code == 2 and says in outcome.err
