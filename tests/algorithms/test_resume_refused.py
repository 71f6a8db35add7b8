"""A checkpoint that does not fit the run file is refused in one sentence, with exit code 2 and nothing overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from retouch.algorithms.dpo.recipe import Pairs
from retouch.config import RunConfig, parse_run
from retouch.data.dataset import load_dataset
from retouch.data.identity import item_key
from retouch.engine import CheckpointError
from retouch.families.embeddings import base_files
from retouch.files.model_files import tiny_path
from retouch.rewards import REWARDS
from retouch.training.experience import (
    Experience,
)
from retouch.training.resume import (
    may_go_on,
    with_keys,
    without_keys,
)
from retouch.training.session import Session
from tests.command_line import Outcome, retouch
from tests.conftest import small_run

Resume = Callable[..., Outcome]

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def written(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a GRPO run: a warm-up of two steps, and the first of the two steps of an epoch."""
    root = tmp_path_factory.mktemp("written")
    run = small_run(signs, root / "runs", algorithm__sft_steps=2, training__max_steps=3, training__checkpoint_every=1)
    (root / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    outcome = retouch("train", root / "run.yaml")
    assert outcome.code == 0, outcome.err
    steps = {p.name: (p / "rollouts.safetensors").exists() for p in (root / "runs" / "t" / "checkpoints").iterdir()}
    assert steps == {"step-000001": False, "step-000002": False, "step-000003": True}
    return root / "run.yaml"


@pytest.fixture
def resume(written: Path, tmp_path: Path) -> Resume:
    """Go on from a step of a copy of the run."""
    shutil.copytree(written.parent / "runs", tmp_path / "runs")

    def go_on(step: int, *overrides: str) -> Outcome:
        checkpoint = tmp_path / "runs" / "t" / "checkpoints" / f"step-{step:06d}"
        return retouch("train", written, f"logging.dir={tmp_path / 'runs'}", f"resume={checkpoint}", *overrides)

    return go_on


ODE = ("rollout.window=null", "rollout.noise_level=null")
INSIDE = "or resume from a checkpoint without rollouts.safetensors"
ELSE = "or start a new run under another name=..."


@pytest.mark.parametrize(
    ("step", "overrides", "problem"),
    [
        (1, ("algorithm={name: dpo}", *ODE), "was written under algorithm.name=grpo, the run file has dpo; set it "),
        pytest.param(
            3,
            ("algorithm={name: dpo}", *ODE),
            "was written under algorithm.name=grpo, the run file has dpo; set it ",
            marks=pytest.mark.full,
        ),
        (3, ("algorithm={name: nft}", *ODE), "was written under algorithm.name=grpo, the run file has nft; set it "),
        (2, ("algorithm.kl_weight=0.1",), "was written with algorithm.kl_weight=0, which keeps no reference, "),
        (2, ("algorithm.sft_steps=3",), "was written after a warm-up of algorithm.sft_steps=2, the run file has 3; "),
        (2, ("algorithm.sft_steps=0",), "was written after a warm-up of algorithm.sft_steps=2, the run file has 0; "),
        (
            1,
            ("algorithm.sft_steps=0",),
            "lies at step 1 of the warm-up, beyond algorithm.sft_steps=0 of the run file; ",
        ),
        (
            3,
            ("rollout.num_steps=4",),
            "lies inside an epoch of rollout.num_steps=3, the run file has 4; set it back, ",
        ),
        (3, ("algorithm.guard=true",), "lies inside an epoch of algorithm.guard=False, the run file has True; "),
        (3, ("algorithm.region=mask",), "lies inside an epoch of algorithm.region=all, the run file has mask; "),
        (3, ("optimizer.gradient_accumulation=2",), "lies inside an epoch of optimizer steps on 2 rows per device, "),
        (3, ("optimizer.global_batch_size=2",), "lies inside an epoch of optimizer.global_batch_size=None, the run "),
        (
            3,
            ("training.mixed_precision=bf16",),
            "lies inside an epoch of training.mixed_precision=no, the run file has bf16; set it back, ",
        ),
        (3, ("seed=6",), "lies inside an epoch of seed=5, the run file has 6; set it back, "),
        (
            3,
            ("data.resolution=[64, 64]", "data.fit=stretch"),
            "lies inside an epoch of data.resolution=[32, 64], the run file has [64, 64]; set it back, ",
        ),
        (
            3,
            ("model.max_sequence_length=32",),
            "lies inside an epoch of model.max_sequence_length=24, the run file has 32; set it back, ",
        ),
        (
            3,
            ("model.vae_batch=tiles",),
            "lies inside an epoch of model.vae_batch=all, the run file has tiles; set it back, ",
        ),
    ],
)
def test_another_structure_is_refused(
    step: int, overrides: tuple[str, ...], problem: str, resume: Resume, tmp_path: Path
) -> None:
    before = (tmp_path / "runs" / "t" / "metrics.jsonl").read_bytes()
    outcome = resume(step, *overrides)
    assert outcome.code == 2
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert f"step-{step:06d}: {problem}" in line
    assert line.endswith(INSIDE if "inside" in problem else ELSE)
    assert (tmp_path / "runs" / "t" / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("step", "overrides"),
    [
        (1, ("algorithm.kl_weight=0.1",)),  # the warm-up has no reference yet; its end is one
        (2, ("rollout.num_steps=4", "optimizer.gradient_accumulation=2", "seed=6")),  # the next epoch is sampled anew
        (3, ("training.max_steps=4", "optimizer.lr=1e-5", "rollout.batch_size_per_device=2", "model.vae_batch=one")),
    ],
)
def test_what_may_change_may(step: int, overrides: tuple[str, ...], resume: Resume, tmp_path: Path) -> None:
    outcome = resume(step, *overrides)
    assert outcome.code == 0, outcome.err
    if "algorithm.kl_weight=0.1" in overrides:
        end = tmp_path / "runs" / "t" / "checkpoints"
        reference = load_file(end / "step-000003" / "snapshots" / "reference.safetensors")
        weights = load_file(end / "step-000002" / "weights" / "diffusion_pytorch_model.safetensors")
        assert all(torch.equal(t, weights[name]) for name, t in reference.items())


def test_a_snapshot_that_is_gone_is_not_replaced_by_the_policy_of_today(resume: Resume, tmp_path: Path) -> None:
    assert resume(1, "algorithm.kl_weight=0.1").code == 0
    folder = tmp_path / "runs" / "t" / "checkpoints" / "step-000003"
    shutil.rmtree(folder / "snapshots")
    assert "damaged (snapshots/reference.safetensors is missing)" in resume(3, "algorithm.kl_weight=0.1").err
    complete = json.loads((folder / "complete.json").read_text("utf-8"))
    del complete["files"]["snapshots/reference.safetensors"]  # as if it had never been there
    (folder / "complete.json").write_text(json.dumps(complete), encoding="utf-8")
    outcome = resume(3, "algorithm.kl_weight=0.1", "training.max_steps=4")
    assert outcome.code == 2
    assert "step-000003: has no snapshot 'reference', which grpo needs; give another checkpoint" in outcome.err


def test_moments_of_another_kind_are_refused(written: Path) -> None:
    """Their states have other names, and other numbers under them."""
    run = yaml.safe_load((written.parent / "runs" / "t" / "config.yaml").read_text(encoding="utf-8"))
    older = {**run, "optimizer": {name: value for name, value in run["optimizer"].items() if name != "state"}}
    states = [{"config": yaml.safe_dump(of), "progress": {"phase": "rl"}} for of in (run, older)]
    run["optimizer"]["state"] = "8bit"
    for state in states:
        with pytest.raises(CheckpointError, match=r"was written under optimizer.state=fp32, the run file has 8bit"):
            may_go_on(written, state, parse_run(run), {})


@pytest.mark.parametrize(
    ("before", "key", "value", "default"),
    [
        ([], "algorithm.guard", "true", "False"),
        (
            ["data.reference_strip=16", "warmup_data=null", "evaluation.data=null"],
            "data.reference_strip_fit",
            "full_width",
            "contain",
        ),
        (["model={family: qwen_image, path: some/model}"], "model.distillation_lora", "{path: a/lora}", "None"),
        (["model.train={kind: lora}"], "model.train.rank", "3", "32"),
    ],
)
def test_an_option_that_an_older_checkpoint_lacks_had_its_default(
    before: list[str], key: str, value: str, default: str, written: Path, tmp_path: Path
) -> None:
    """With another value of today, the recorded log-probabilities would be of another policy."""
    run = yaml.safe_load((written.parent / "runs" / "t" / "config.yaml").read_text(encoding="utf-8"))
    older = parse_run(run, before).model_dump(mode="json")
    *sections, name = key.split(".")
    del reduce(lambda part, section: part[section], sections, older)[name]
    state = {"config": yaml.safe_dump(older), "progress": {"phase": "rl"}}
    (tmp_path / "rollouts.safetensors").touch()
    may_go_on(tmp_path, state, parse_run(run, before), {})
    with pytest.raises(CheckpointError, match=rf"lies inside an epoch of {key}={default}, the run file has"):
        may_go_on(tmp_path, state, parse_run(run, [*before, f"{key}={value}"]), {})


def test_a_retired_option_of_a_reward_cannot_be_set_back(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(REWARDS["preservation"], "RETIRED", {"former": 1})
    run = yaml.safe_load((written.parent / "runs" / "t" / "config.yaml").read_text(encoding="utf-8"))
    config = parse_run(run)
    run["rewards"]["preservation"]["former"] = 2
    state = {"config": yaml.safe_dump(run), "progress": {"phase": "rl"}}
    may_go_on(tmp_path, state, config, {})
    (tmp_path / "rollouts.safetensors").touch()
    told = (
        r"epoch of rewards\.preservation\.former=2, an option of earlier versions; every run has 1; "
        r"resume from a checkpoint without rollouts\.safetensors, or with the version that wrote it"
    )
    with pytest.raises(CheckpointError, match=told):
        may_go_on(tmp_path, state, config, {})
    run["rewards"] |= {"black": {"scorer": "jpeg_size", "gated_by": "preservation"}}
    run["rewards"]["preservation"]["weight"] = 0
    with pytest.raises(CheckpointError, match=told):  # a gate of a reward that trains
        may_go_on(tmp_path, state, parse_run(run), {})
    run["rewards"]["black"] = {"scorer": "jpeg_size"}
    may_go_on(tmp_path, state, parse_run(run), {})
    run["rewards"]["preservation"] = {"role": "gold", "former": 2}
    may_go_on(tmp_path, state, parse_run(run), {})


# --- what an epoch was sampled from ---


@pytest.fixture
def moved(written: Path, signs: Path, tmp_path: Path) -> tuple[str, str]:
    """The data and the model of the run in another place, which may be changed, as overrides."""
    shutil.copytree(signs / "prompts", tmp_path / "data")
    shutil.copytree(tiny_path("flux_fill"), tmp_path / "model")
    return f"data.path={tmp_path / 'data'}", f"model.path={tmp_path / 'model'}"


def sampled(checkpoint: Path, root: Path) -> list[int]:
    """Ids of the examples that the rollouts of a checkpoint are of, in the data under `root`."""
    position = load_file(checkpoint / "rollouts.safetensors")["0/position"].unique().tolist()
    lines = (root / "self_bench.txt").read_text(encoding="utf-8").splitlines()
    return [int(lines[p].partition("-")[0]) for p in position]


def test_an_epoch_goes_on_with_the_same_data_and_model_in_another_place(
    resume: Resume, moved: tuple[str, str], tmp_path: Path
) -> None:
    """What is not of the epoch may change besides: an example that it did not take, another one at the end."""
    checkpoints, data = tmp_path / "runs/t/checkpoints", tmp_path / "data"
    assert resume(3, "training.max_steps=4").code == 0
    stayed = load_file(checkpoints / "step-000004/weights" / WEIGHTS)
    listing = (data / "self_bench.txt").read_text(encoding="utf-8").splitlines()
    taken = sampled(checkpoints / "step-000003", data)
    other = next(line for line in listing if int(line.partition("-")[0]) not in taken)
    listing[listing.index(other)] = f"{other}S"
    for role in ("source", "mask"):
        shutil.copy(data / f"test{other.partition('-')[0]}_{role}.png", data / f"test999_{role}.png")
    (data / "self_bench.txt").write_text("\n".join([*listing, "999-more"]) + "\n", encoding="utf-8")
    outcome = resume(3, "training.max_steps=4", *moved)
    assert outcome.code == 0, outcome.err
    weights = load_file(checkpoints / "step-000004/weights" / WEIGHTS)
    assert all(torch.equal(t, weights[name]) for name, t in stayed.items())


@pytest.mark.parametrize("what", ["elsewhere", "text", "picture", "fewer"])
def test_an_epoch_of_other_data_is_refused(
    what: str, resume: Resume, moved: tuple[str, str], signs: Path, tmp_path: Path
) -> None:
    """Rollouts know their examples by position: paths of one would be trained on under the prompt of another. The next
    epoch may take what it likes."""
    data, where = tmp_path / "data", signs / "targets" if what == "elsewhere" else tmp_path / "data"
    first, *_ = sampled(tmp_path / "runs/t/checkpoints/step-000003", data)
    if what == "text":
        listing = (data / "self_bench.txt").read_text(encoding="utf-8")
        (data / "self_bench.txt").write_text(listing.replace(f"{first}-", f"{first}-X"), encoding="utf-8")
    elif what == "picture":
        ImageOps.invert(Image.open(data / f"test{first}_source.png")).save(data / f"test{first}_source.png")
    overrides = [f"data.path={where}", "training.max_steps=4", *(["data.limit=2"] if what == "fewer" else [])]
    which = f"example {first} (and 0 more)" if what in ("text", "picture") else ""
    before = (tmp_path / "runs/t/metrics.jsonl").read_bytes()
    outcome = resume(3, *overrides)
    assert outcome.code == 2, outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert f"step-000003: lies inside an epoch of other data than data.path={where} holds now, where {which}" in line
    assert line.endswith(f" is not what was sampled; set the data back, {INSIDE}")
    assert (tmp_path / "runs/t/metrics.jsonl").read_bytes() == before
    assert what != "elsewhere" or resume(2, *overrides).code == 0


@pytest.mark.parametrize("part", ["transformer", "text_encoder_2", "vae"])
def test_an_epoch_of_another_model_is_refused(
    part: str, resume: Resume, moved: tuple[str, str], tmp_path: Path
) -> None:
    """By its files, whatever their path: one that was trained on has the same names and sizes."""
    (file,) = (tmp_path / "model" / part).glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: t.flip(0) for name, t in tensors.items()}, file, {"format": "pt"})
    outcome = resume(3, "training.max_steps=4", *moved)
    name = {"transformer": "network", "text_encoder_2": "text encoder", "vae": "autoencoder"}[part]
    assert outcome.code == 2, outcome.err
    assert f"lies inside an epoch of another {name} than {moved[1]} has (it was tiny); set it back, {INSIDE}" in (
        outcome.err
    )


def test_a_model_that_is_not_here_is_known_by_its_path(written: Path, tmp_path: Path) -> None:
    """As ids of the hub are, whose files may lie anywhere; text encoders may have gone for good."""
    run = yaml.safe_load((written.parent / "runs" / "t" / "config.yaml").read_text(encoding="utf-8"))
    state = {"config": yaml.safe_dump(run), "progress": {"phase": "rl"}, "base": {"text_files": "a"}}
    (tmp_path / "rollouts.safetensors").touch()
    may_go_on(tmp_path, state, parse_run(run), {})
    run["model"]["path"] = "another/model"
    with pytest.raises(CheckpointError, match=r"another network than model.path=another/model has \(it was tiny\)"):
        may_go_on(tmp_path, state, parse_run(run), {})
    del state["base"]  # an older checkpoint
    may_go_on(tmp_path, state, parse_run(run), {})


def test_an_epoch_on_another_few_step_lora_is_refused(written: Path, tmp_path: Path) -> None:
    """By its content under the same path; an older checkpoint did not record it."""
    run = yaml.safe_load((written.parent / "runs" / "t" / "config.yaml").read_text(encoding="utf-8"))
    lora = tmp_path / "lora"
    lora.mkdir()
    file = lora / "few.safetensors"
    named = {"path": str(lora), "weight_name": "few.safetensors"}
    run["model"] = {"family": "qwen_image", "path": "some/model", "distillation_lora": named}
    config = parse_run(run)
    save_file({"a": torch.ones(3)}, file)
    then = base_files(config.model)
    state: dict[str, Any] = {"config": yaml.safe_dump(run), "progress": {"phase": "rl"}, "base": then}
    (tmp_path / "rollouts.safetensors").touch()
    may_go_on(tmp_path, state, config, base_files(config.model))
    run["model"]["distillation_lora"] = {"path": str(file)}
    assert base_files(parse_run(run).model) == then
    save_file({"a": torch.zeros(3)}, file)
    with pytest.raises(
        CheckpointError, match=r"another few-step LoRA than model\.distillation_lora\.path=.*set it back"
    ):
        may_go_on(tmp_path, state, config, base_files(config.model))
    del state["base"]["distillation_lora_files"]
    may_go_on(tmp_path, state, config, base_files(config.model))


def test_a_checkpoint_that_does_not_say_what_it_was_sampled_from_is_taken_as_it_is(
    resume: Resume, signs: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/t/checkpoints/step-000003"
    rows, state = load_file(folder / "rollouts.safetensors"), json.loads((folder / "state.json").read_text("utf-8"))
    assert rows.pop("0/example").tolist() and state.pop("base")
    save_file(rows, folder / "rollouts.safetensors")
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    complete = json.loads((folder / "complete.json").read_text("utf-8"))
    complete["files"] = [*complete["files"], "weights"]  # names alone, and folders among them
    (folder / "complete.json").write_text(json.dumps(complete), encoding="utf-8")
    assert resume(3, "training.max_steps=4", f"data.path={signs / 'targets'}").code == 0


def test_a_process_stops_with_one_whose_examples_are_others(signs: Path, config: Callable[..., RunConfig]) -> None:
    data = load_dataset(config().data, "data", ())
    run: Any = SimpleNamespace(data=data, engine=SimpleNamespace(any=lambda flag: True))
    rows = with_keys(run, {"position": torch.tensor([3, 3, 0])})
    assert rows["example"].tolist() == [item_key(data.items[p]) for p in (3, 3, 0)]
    with pytest.raises(CheckpointError, match="where one of its examples is not what was sampled"):
        without_keys(run, Path("step"), rows)
    run.engine.any = bool
    assert without_keys(run, Path("step"), rows).keys() == {"position"}


@pytest.mark.parametrize("kind", [Experience, Pairs])
def test_rollouts_of_another_algorithm_are_no_type_error(kind: Any) -> None:
    kept = SimpleNamespace(_resumed_rows={"frames": torch.zeros(1), "weight": torch.zeros(1)})
    with pytest.raises(
        CheckpointError, match=r"holds frames, weight, but this algorithm goes on with .*position.*seed"
    ):
        Session.take_resumed_rows(cast("Any", kept), kind)


@pytest.mark.full
def test_an_average_that_the_run_file_no_longer_has_is_dropped(signs: Path, tmp_path: Path) -> None:
    """It would be written to every checkpoint from then on, and `retouch sample` would take it for the average."""
    run = small_run(signs, tmp_path / "runs", ema={"decay": 0.9}, training__max_steps=2, training__checkpoint_every=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    assert retouch("train", tmp_path / "run.yaml").code == 0
    checkpoints = tmp_path / "runs/t/checkpoints"
    assert (checkpoints / "step-000002/ema").is_dir()
    outcome = retouch("train", tmp_path / "run.yaml", f"resume={checkpoints / 'step-000001'}", "ema=null")
    assert outcome.code == 0, outcome.err
    assert not (checkpoints / "step-000002/ema").exists()
    assert (checkpoints / "step-000002/weights").is_dir()
    again = retouch("train", tmp_path / "run.yaml", f"resume={checkpoints / 'step-000002'}", "training.max_steps=3")
    assert again.code == 2
    assert "has no EMA weights, but the run file has an ema section; set ema=null evaluation" in again.err
