"""Two processes train as one does: torchrun with gloo on a CPU, through the real command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from retouch.adapters.lora import FILE
from retouch.engine.checkpoint import read_state
from retouch.observe.run_dir import read_metrics
from tests import forked
from tests.command_line import retouch
from tests.shapes import write_shapes
from tests.tiny_models import shallow_flux, tiny_model

pytestmark = pytest.mark.usefixtures("shallow")

WEIGHTS = "diffusion_pytorch_model.safetensors"

CHILD = """
import os, sys
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
import retouch.training.session as session
from retouch.data import item
from retouch.data.sampler import epoch_examples
from retouch.engine import Engine
from retouch.rewards.scorers.preservation import PreservationScorer
from retouch.types import Failure, Score
finish, backward, score = session.Session.finish, Engine.backward, PreservationScorer.score
examine = item.examine
backwards, examined = 0, []

def noted(one, *options):
    examined.append(str(one.id))
    return examine(one, *options)

def counted(self, loss):
    global backwards
    backwards += 1
    backward(self, loss)

def finish_and_save(self):
    finish(self)
    file = self.run.dir.path / f"rank-{self.run.engine.rank}.safetensors"
    about = {"backwards": str(backwards), "examined": " ".join(examined)}
    save_file({n: t.clone() for n, t in self.run.policy.state().items()}, file, about)

def flat_in_the_first_half(self, items):
    flat = {100 + position for position in epoch_examples(8, 4, 5, 0)[:2]}
    return [Score(0.5) if item.group in flat else one for item, one in zip(items, score(self, items))]

def bad(self, items):
    which, last = os.environ["BAD"], os.environ.get("RANK", "0") == os.environ.get("LAST", "0")
    fails = [i.group < 200 and (which == "all" or last and i.id == int(which)) for i in items]
    return [Failure("bad_item", "no") if no else one for no, one in zip(fails, score(self, items))]

def coarse(self, items):
    return [Score(round(one.value, 3)) for one in score(self, items)]

session.Session.finish, Engine.backward, item.examine = finish_and_save, counted, noted
if os.environ.get("COARSE"):
    PreservationScorer.score = coarse
if os.environ.get("FLAT"):
    PreservationScorer.score = flat_in_the_first_half
if os.environ.get("BAD"):
    PreservationScorer.score = bad
if os.environ.get("NO_GRADIENT"):
    from retouch.rewards.gradient import PixelReward
    gradient, asked = PixelReward.gradient, []
    def fails_once(self, image, item):
        asked.append(item)
        last = os.environ.get("RANK", "0") == os.environ.get("LAST", "0")
        if last and os.environ["NO_GRADIENT"] in ("all", str(len(asked) - 1)):
            return Failure("scorer_error", "no")
        return gradient(self, image, item)
    PixelReward.gradient = fails_once
from retouch.cli import main
main()
"""
"""`retouch`, and at the end the weights of every rank, not only those that the first one saves, how many backwards it
took, and which items it examined at its start, where nothing is remembered of any. With FLAT, all images of the first
half of four groups score the same; with BAD, the image of that number in each batch of process LAST fails, or all. With
NO_GRADIENT, the gradient of that number in process LAST fails, or all of them. With COARSE, scores have three digits,
and a pixel that rounds otherwise changes no advantage, which divides by the small std of a group."""

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def on_two(run: Path, *overrides: str, **environment: str) -> Path:
    """Train with two processes -> the run directory."""
    return in_child(run, "two", TORCHRUN, *overrides, **environment)


def in_child(run: Path, name: str, launcher: list[str], *overrides: str, **environment: str) -> Path:
    done = child_of(run, name, launcher, *overrides, **environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return run.parent / "runs" / name


def child_of(
    run: Path, name: str, launcher: list[str], *overrides: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    child = run.with_name("child.py")
    child.write_text(CHILD, encoding="utf-8")
    cache = str(run.with_name(f"cache-{name}"))
    return forked.run(
        [sys.executable, *launcher, str(child), "train", str(run), f"name={name}", *overrides],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "XDG_CACHE_HOME": cache,
            **environment,
        },
        timeout=900,
    )


def on_one(run: Path, *overrides: str) -> Path:
    """Train in this process -> the run directory."""
    outcome = retouch("train", run, "name=one", *overrides)
    assert outcome.code == 0, outcome.err
    return run.parent / "runs" / "one"


@pytest.fixture
def run_yaml(run_file: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A step of warm-up on 10 rows, two of RL on 9: groups of 3 lie across the ranks, and one slot is padding. AdamW's
    eps is raised, or it would blow up rounding where a gradient is almost 0."""
    path = tmp_path / "run.yaml"
    run = run_file(
        algorithm__sft_steps=1,
        algorithm__kl_weight=0.01,
        rollout__group_size=3,
        rollout__global_groups_per_batch=3,
        rollout__batch_size_per_device=9,
        optimizer__eps=1e-3,
        optimizer__lr=1e-3,
        training__max_steps=3,
        ema={"decay": 0.5},
    )
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


@pytest.mark.fast
def test_two_ranks_train_as_one_process_does(run_yaml: Path) -> None:
    """Of the same global batch: equal weights on both ranks, and those of one process within rounding. The two share
    the server that scores, and it ends with them."""
    one = on_one(run_yaml, "optimizer.batch_size_per_device=2", "optimizer.gradient_accumulation=5")
    served = ("rewards.preservation.url=auto", "reward_client.cache=true")
    two = on_two(run_yaml, "optimizer.batch_size_per_device=1", "optimizer.gradient_accumulation=5", *served)
    assert (two / "reward-server.log").read_text().count("preservation loaded on cpu") == 1
    assert [path.name for path in two.glob("*.sqlite")] == ["rewards.sqlite"]
    first, second = (load_file(two / f"rank-{rank}.safetensors") for rank in range(2))
    alone = load_file(one / "checkpoints" / "step-000003" / "weights" / WEIGHTS)
    for name, expected in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, atol=1e-5, rtol=0, msg=name)
    start = load_file(Path(shallow_flux()) / "transformer" / WEIGHTS)
    assert max(float((t - start[name].float()).abs().max()) for name, t in alone.items()) > 1e-3
    averaged = [load_file(run / "checkpoints" / "step-000003" / "ema" / WEIGHTS) for run in (one, two)]
    for name, expected in averaged[0].items():
        torch.testing.assert_close(averaged[1][name], expected, atol=1e-5, rtol=0, msg=name)
    same_records(read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl"))


GLOBAL = ("optimizer.global_batch_size=4", "optimizer.batch_size_per_device=2")
"""Keys of the published files: warm-up steps of 4 rows, and three steps of 3 of an epoch's 9 images."""


@pytest.mark.parametrize("groups_left_out", [pytest.param("", marks=pytest.mark.full), "1"])
def test_a_file_is_the_same_run_on_two_processes(run_yaml: Path, groups_left_out: str) -> None:
    """No key is changed between them: each of several steps of an epoch trains on the same images."""
    four = ("rollout.group_size=2", "rollout.global_groups_per_batch=4", "algorithm.sft_steps=0", "ema=null")
    shape = (*GLOBAL, *(four if groups_left_out else ()), "training.max_steps=4")
    one = in_child(run_yaml, "one", [], *shape, FLAT=groups_left_out)
    two = on_two(run_yaml, *shape, FLAT=groups_left_out)
    ranks_agree_with(one, two, "step-000004", pictures=False)
    rows = [r["rows"] for r in read_metrics(two / "metrics.jsonl") if r["kind"] == "train" and r["phase"] == "rl"]
    assert rows == ([2.0, 2.0, 4.0, 4.0] if groups_left_out else [3.0, 3.0, 3.0])


@pytest.mark.full
def test_images_in_their_own_shape_are_the_same_run_on_two_processes(run_yaml: Path) -> None:
    """Each step, of the warm-up and of RL, has one shape on both ranks, with whole weights and with sharded ones. In an
    evaluation the ranks have other shapes at a time."""
    manifest = write_shapes(run_yaml.parent / "mixed", 3)
    data = f"data={{format: manifest, path: {manifest}, resolution: {{pixels: 2048, max_aspect: 8}}}}"
    own = (data, "warmup_data=null", "evaluation.data=null", "evaluation.num_examples=5", "algorithm.sft_steps=2")
    shape = (*GLOBAL, *own, "training.max_steps=8")
    one = in_child(run_yaml, "one", [], *shape, COARSE="1")
    ranks_agree_with(one, on_two(run_yaml, *shape, COARSE="1"), "step-000008", pictures=False)
    sharded = in_child(run_yaml, "sharded", TORCHRUN, *shape, "training.sharding=fsdp2", COARSE="1")
    mine, theirs = (load_file(run / "checkpoints" / "step-000008" / "weights" / WEIGHTS) for run in (one, sharded))
    for name, expected in mine.items():
        torch.testing.assert_close(theirs[name], expected, atol=1e-5, rtol=0, msg=name)
    records = [read_metrics(run / "metrics.jsonl") for run in (one, sharded)]
    same_records(*[[r for r in of_run if r["kind"] != "eval"] for of_run in records])


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["dpo", "nft", "reward_gradient"])
def test_each_algorithm_is_the_same_run_on_two_processes(algorithm: str, run_yaml: Path) -> None:
    ode = ("rollout.window=null", "rollout.noise_level=null", "ema=null", "training.max_steps=3")
    options = {
        "dpo": ("algorithm={name: dpo, beta: 100.0, timesteps_per_pair: 2}", "optimizer.global_batch_size=2"),
        "nft": ("algorithm={name: nft}",),
        "reward_gradient": ("algorithm={name: reward_gradient}", "rewards={edge: {scorer: seam}}"),
    }[algorithm]
    shape = (*GLOBAL, *ode, *options)
    ranks_agree_with(in_child(run_yaml, "one", [], *shape), on_two(run_yaml, *shape), "step-000003", pictures=False)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes_as_the_same_run(run_yaml: Path) -> None:
    """After the first of two epochs; the file stays as it is."""
    shape = (*GLOBAL, "algorithm.sft_steps=0", "optimizer.global_batch_size=5", "training.checkpoint_every=2")
    whole = in_child(run_yaml, "one", [], *shape, "training.max_steps=4")
    on_two(run_yaml, *shape, "training.max_steps=2")
    rest = in_child(run_yaml, "two", [], *shape, "training.max_steps=4", "resume=auto")
    expected = load_file(whole / "checkpoints" / "step-000004" / "weights" / WEIGHTS)
    for name, tensor in load_file(rest / "checkpoints" / "step-000004" / "weights" / WEIGHTS).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("algorithm", ["reward_gradient", "nft"])
def test_a_gradient_that_fails_on_one_rank(
    algorithm: str, run_file: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The weights are those of one process that lost the same sample; too many failures stop both ranks."""
    entry = {"weight": 0.0, "gradient_weight": 1.0, "scorer": "seam"} if algorithm == "nft" else {"scorer": "seam"}
    rewards = {"edge": entry, **({"preservation": {}} if algorithm == "nft" else {})}
    run = run_file(rewards=rewards, optimizer__eps=1e-3, training__max_steps=1, rollout__global_groups_per_batch=4)
    run["algorithm"] = {"name": algorithm}
    for key in ("window", "noise_level"):
        del run["rollout"][key]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    shape = ("optimizer.batch_size_per_device=1", "reward_client.max_failure_rate=0.2")
    one = in_child(file, "one", [], *shape, "optimizer.gradient_accumulation=8", NO_GRADIENT="7")
    four = (*shape, "optimizer.gradient_accumulation=4")
    two = on_two(file, *four, NO_GRADIENT="3", LAST="1")
    ranks_agree_with(one, two, "step-000001")
    dead = child_of(file, "dead", TORCHRUN, *four, NO_GRADIENT="all", LAST="1")
    assert dead.returncode != 0 and "exitcode  : 3" in dead.stderr, dead.stderr[-2000:]
    assert "4 of 8 images have no gradient" in " ".join(dead.stderr.split())


def ranks_agree_with(alone: Path, two: Path, step: str, *, pictures: bool = True) -> None:
    """Both ranks end with equal weights, those of one process within rounding.

    Args:
        pictures: compare evaluations too, in which a pixel that rounds otherwise changes the bytes of a JPEG.
    """
    first, second = (load_file(two / f"rank-{rank}.safetensors") for rank in range(2))
    for name, expected in load_file(alone / "checkpoints" / step / "weights" / WEIGHTS).items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, atol=1e-5, rtol=0, msg=name)
    records = [read_metrics(run / "metrics.jsonl") for run in (alone, two)]
    same_records(*[[r for r in of_run if pictures or r["kind"] != "eval"] for of_run in records])


def backwards(run: Path, rank: int) -> int:
    return int(said(run, rank)["backwards"])


def examined(run: Path, rank: int) -> list[str]:
    return said(run, rank)["examined"].split()


def said(run: Path, rank: int) -> dict[str, str]:
    with safe_open(run / f"rank-{rank}.safetensors", "pt") as file:
        return file.metadata()


@pytest.mark.slow
def test_two_ranks_of_sharded_weights_train_as_one_process_does(run_yaml: Path) -> None:
    """FSDP2: each holds a half of every weight, moment and snapshot. More, and some in every run of the tests, in
    test_sharded.py."""
    one = on_one(run_yaml, "optimizer.batch_size_per_device=2", "optimizer.gradient_accumulation=5")
    shape = ("optimizer.batch_size_per_device=1", "optimizer.gradient_accumulation=5")
    two = on_two(run_yaml, *shape, "training.sharding=fsdp2")
    halves = [sum(t.numel() for t in load_file(two / f"rank-{rank}.safetensors").values()) for rank in range(2)]
    alone = load_file(one / "checkpoints" / "step-000003" / "weights" / WEIGHTS)
    whole = sum(t.numel() for t in alone.values())
    assert sum(halves) == whole and max(halves) < 0.52 * whole
    for file in (f"weights/{WEIGHTS}", f"ema/{WEIGHTS}", "snapshots/reference.safetensors"):
        mine, theirs = (load_file(run / "checkpoints" / "step-000003" / file) for run in (one, two))
        for name, expected in mine.items():
            torch.testing.assert_close(theirs[name], expected, atol=1e-5, rtol=0, msg=f"{file}: {name}")
    same_records(read_metrics(one / "metrics.jsonl"), read_metrics(two / "metrics.jsonl"))


@pytest.mark.full
def test_groups_left_out_on_one_rank_are_no_burden_to_the_other(run_yaml: Path) -> None:
    """Of four groups of two both of rank 0 are flat: the four rows left are two for each, not four and none. Before
    that each has checked one half of the data."""
    four = ("algorithm.sft_steps=0", "rollout.group_size=2", "rollout.global_groups_per_batch=4", "ema=null")
    shape = ("optimizer.batch_size_per_device=1", "training.max_steps=1")
    one = in_child(run_yaml, "one", [], *four, *shape, "optimizer.gradient_accumulation=8", FLAT="1")
    two = on_two(run_yaml, *four, *shape, "optimizer.gradient_accumulation=4", FLAT="1")
    ranks_agree_with(one, two, "step-000001")
    assert [backwards(one, 0), backwards(two, 0), backwards(two, 1)] == [4, 2, 2]
    assert [len(examined(one, 0)), len(examined(two, 0)), len(examined(two, 1))] == [20, 10, 10]
    assert sorted(examined(two, 0) + examined(two, 1)) == sorted(examined(one, 0))


@pytest.mark.full
def test_pairs_whose_images_lie_on_two_ranks_train_as_on_one(run_yaml: Path) -> None:
    """DPO on three groups of three over 5 + 4 slots: the group in the middle is split; each rank gets two pairs, the
    last of which is padding."""
    online = "algorithm={name: dpo, beta: 100.0, reference_refresh_every: 0, timesteps_per_pair: 2}"
    ode = ("rollout.window=null", "rollout.noise_level=null", "ema=null", "training.max_steps=2")
    one = in_child(run_yaml, "one", [], online, *ode, "optimizer.gradient_accumulation=4")
    two = on_two(run_yaml, online, *ode, "optimizer.gradient_accumulation=2", "optimizer.batch_size_per_device=1")
    ranks_agree_with(one, two, "step-000002")
    rows = [r["rows"] for r in read_metrics(two / "metrics.jsonl") if r["kind"] == "train"]
    assert rows == [3.0, 3.0]


@pytest.mark.slow
def test_failures_of_one_rank_are_a_share_of_all(run_yaml: Path) -> None:
    """The last of eight images fails, a quarter of those of its rank: both go on, as one process does. Padding that
    fails is nothing at all, and where all images fail both ranks stop, resumable."""
    four = ("algorithm.sft_steps=0", "rollout.group_size=2", "rollout.global_groups_per_batch=4", "ema=null")
    shape = ("optimizer.batch_size_per_device=1", "training.max_steps=1")
    one = in_child(run_yaml, "one", [], *four, *shape, "optimizer.gradient_accumulation=8", BAD="7")
    two = on_two(run_yaml, *four, *shape, "optimizer.gradient_accumulation=4", BAD="3", LAST="1")
    ranks_agree_with(one, two, "step-000001")
    assert [r["failed"] for r in read_metrics(two / "metrics.jsonl") if r["kind"] == "rollout"] == [1.0]
    nine = ("algorithm.sft_steps=0", "optimizer.gradient_accumulation=5", "reward_client.max_failure_rate=0")
    padded = in_child(run_yaml, "padded", TORCHRUN, *nine, *shape, BAD="4", LAST="1")
    (rollout,) = [r for r in read_metrics(padded / "metrics.jsonl") if r["kind"] == "rollout"]
    assert (rollout["images"], rollout["failed"]) == (9.0, 0.0)
    dead = child_of(run_yaml, "dead", TORCHRUN, *four, *shape, "optimizer.gradient_accumulation=4", BAD="all")
    assert dead.returncode != 0 and "exitcode  : 3" in dead.stderr
    assert "8 of 8 images have no reward" in " ".join(dead.stderr.split())
    assert (run_yaml.parent / "runs/dead/checkpoints/step-000000").is_dir()


@pytest.mark.slow
def test_counts_of_rewards_are_those_of_both_ranks_and_go_on_on_one(run_yaml: Path) -> None:
    """Eight images a step, on both, on both again, and on one."""
    shape = ("algorithm.sft_steps=0", "rollout.group_size=2", "rollout.global_groups_per_batch=4", "ema=null")
    options = (*shape, "optimizer.batch_size_per_device=1", "resume=auto")
    counted: list[int] = []
    for step, (launcher, rows) in enumerate(((TORCHRUN, 4), (TORCHRUN, 4), ([], 8)), 1):
        steps = (f"training.max_steps={step}", f"optimizer.gradient_accumulation={rows}")
        folder = in_child(run_yaml, "two", launcher, *options, *steps)
        counted.append(read_state(folder / f"checkpoints/step-{step:06d}")["rewards"]["asked"])
    assert counted == [8, 16, 24]


def same_records(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> None:
    """What is logged is that of all ranks together, once."""
    assert [(r["kind"], r["step"]) for r in one] == [(r["kind"], r["step"]) for r in two]
    for a, b in zip(one, two, strict=True):
        for name in a.keys() - {"time", "max_abs_log_ratio"}:
            assert b[name] == (pytest.approx(a[name], rel=1e-3, abs=1e-5) if isinstance(a[name], float) else a[name]), (
                name
            )
        assert b.get("max_abs_log_ratio", 0) <= max(1e-5, 1.1 * a.get("max_abs_log_ratio", 0))


@pytest.mark.slow
def test_two_ranks_on_a_quantized_base_train_as_one_process_does(run_yaml: Path) -> None:
    quantized = ("model.train={kind: lora, rank: 4}", "model.quantize=int8")
    one = on_one(run_yaml, "optimizer.batch_size_per_device=2", "optimizer.gradient_accumulation=5", *quantized)
    two = on_two(run_yaml, "optimizer.batch_size_per_device=1", "optimizer.gradient_accumulation=5", *quantized)
    ranks = [load_file(two / f"rank-{rank}.safetensors") for rank in range(2)]
    alone = load_file(one / "checkpoints/step-000003/weights" / FILE)
    for name, tensor in ranks[0].items():
        assert torch.equal(tensor, ranks[1][name]), name
    for name, expected in load_file(two / "checkpoints/step-000003/weights" / FILE).items():
        torch.testing.assert_close(alone[name], expected, atol=1e-5, rtol=0, msg=name)


def test_ranks_need_not_run_equally_many_forwards(tmp_path: Path) -> None:
    """Qwen-Image-2.1 runs a batch as one forward for each length of its prompts, and a rank draws its prompts."""
    run, prompts = tmp_path / "run.yaml", tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"Sign {i}." + " Blue." * max(0, i - 4) for i in range(8)), encoding="utf-8")
    section = {"family": "qwen_image_21", "path": tiny_model("qwen_image_21"), "dtype": "fp32"}
    small: dict[str, Any] = {
        "model": {**section, "max_sequence_length": 64, "train": {"kind": "lora", "rank": 4}},
        "data": {"format": "prompts", "path": str(prompts), "resolution": 32},
        "rollout": {"group_size": 2, "global_groups_per_batch": 8, "batch_size_per_device": 8, "num_steps": 2},
        "algorithm": {"name": "nft"},
        "rewards": {"jpeg_size": {}},
        "optimizer": {"batch_size_per_device": 4, "gradient_accumulation": 1},
        "training": {"max_steps": 3, "mixed_precision": "no"},
        "evaluation": {"num_examples": 2, "grid_examples": 1, "num_steps": 2},
        "logging": {"dir": str(tmp_path / "runs"), "sinks": []},
    }
    run.write_text(yaml.safe_dump({"name": "q21", **small}), encoding="utf-8")
    two = on_two(run)
    first, second = (load_file(two / f"rank-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
