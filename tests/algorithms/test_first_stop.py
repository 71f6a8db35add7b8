"""A run that stops before its first checkpoint, at any place and for any reason, goes on as if it had not."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from torch import Tensor

from retouch.adapters.lora import FILE
from retouch.config import RunConfig
from retouch.errors import RewardOutage
from retouch.observe.run_dir import read_metrics
from retouch.training import evaluations, experience
from retouch.types import Stopped
from tests.command_line import retouch
from tests.selection import default, rows

from .runs import Config, Use, brightness, labelled, of_kind, same_weights, train
from .vlm_runs import RunFile, records
from .vlm_runs import train as train_vlm
from .vlm_runs import vlm_file as vlm_file
from .vlm_runs import weights as vlm_weights

pytestmark = pytest.mark.usefixtures("shallow")

OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {},
    "grpo": {"kl_weight": 0.1},
    "ppo": {"kl_weight": 0.1},
    "nft": {"kl_weight": 0.1},
    "dpo": {"beta": 100.0},
    "dpo_offline": {"beta": 100.0, "pairs": "offline"},
    "kto": {"beta": 100.0},
    "reward_gradient": {"kl_weight": 0.1},
}
"""Each with the snapshots that it can have."""

KL_TO_BASE = {"grpo", "nft", "reward_gradient"}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}


@pytest.fixture(autouse=True)
def _a_reward(scripted: Use) -> None:
    scripted(brightness)


@pytest.fixture
def run_of(config: Config, signs: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A run of two RL steps on a LoRA by an algorithm, without a warm-up."""

    def make(algorithm: str, options: Mapping[str, Any] = MappingProxyType({}), **overrides: Any) -> RunConfig:
        name = algorithm.partition("_offline")[0]
        given: dict[str, Any] = {
            "model__train": LORA,
            "rollout__window": {"size": 1, "range": [0, 0.5]} if algorithm in ("grpo", "ppo") else None,
            "rollout__noise_level": None,
            "optimizer": {"lr": 1e-2, "batch_size_per_device": 2, "gradient_accumulation": 1},
            "training__max_steps": 2,
            "evaluation__num_examples": 1,
            "ema": {"decay": 0.9},
            **data_of(algorithm, signs, tmp_path),
            **overrides,
        }
        return config(algorithm={"name": name, **OPTIONS[algorithm], **options}, **given)

    return make


def data_of(algorithm: str, signs: Path, folder: Path) -> dict[str, Any]:
    if algorithm == "sft":
        return {"data__path": str(signs / "targets"), "data__target": "auto"}
    if algorithm not in ("kto", "dpo_offline"):
        return {}
    path = labelled(signs, folder)
    if algorithm == "dpo_offline":
        entries = json.loads(path.read_text(encoding="utf-8"))
        paired = [{**e, "win_path": e["target_path"], "lose_path": e["image_path"]} for e in entries]
        path.write_text(json.dumps(paired), encoding="utf-8")
    return {"data": {"format": "manifest", "path": str(path), "resolution": [32, 64]}}


@contextmanager
def in_the_first_evaluation(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[None]:
    """Within it, an evaluation acts before it samples."""
    real = evaluations.draw_and_score

    def acts(*arguments: Any, **named: Any) -> Any:
        act()
        return real(*arguments, **named)

    with monkeypatch.context() as changed:
        changed.setattr(evaluations, "draw_and_score", acts)
        yield


def outage() -> None:
    raise RewardOutage("rewards stayed unavailable")


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def disk_full() -> None:
    raise OSError(28, "No space left on device", "images")


def final(run: Any, part: str = "weights") -> dict[str, Tensor]:
    """Weights of the checkpoint at the end."""
    return load_file(run.dir.path / "checkpoints/step-000002" / part / FILE)


def same_end(one: Any, other: Any) -> None:
    assert same_weights(final(one), final(other))
    assert same_weights(final(one, "ema"), final(other, "ema"))
    snapshots = [one.dir.path, other.dir.path]
    files = [sorted(path.glob("checkpoints/step-000002/snapshots/*")) for path in snapshots]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert all(same_weights(load_file(a), load_file(b)) for a, b in zip(*files, strict=True))


def without_snapshots(checkpoint: Path) -> None:
    """As earlier versions left it."""
    shutil.rmtree(checkpoint / "snapshots", ignore_errors=True)
    about = json.loads((checkpoint / "complete.json").read_text(encoding="utf-8"))
    about["files"] = {name: of for name, of in about["files"].items() if not name.startswith("snapshots/")}
    (checkpoint / "complete.json").write_text(json.dumps(about), encoding="utf-8")


@pytest.mark.parametrize("algorithm", default(OPTIONS, "grpo".__eq__))
def test_an_outage_in_the_first_evaluation_is_resumed_bitwise(
    algorithm: str, run_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a checkpoint of an earlier version, which has no snapshots."""
    whole, _ = train(run_of(algorithm, name="whole"))
    with in_the_first_evaluation(monkeypatch, outage), pytest.raises(Stopped, match=r"away/config.yaml resume=auto$"):
        train(run_of(algorithm, name="away"))
    start = whole.dir.path.with_name("away") / "checkpoints/step-000000"
    kept = {file.stem for file in (start / "snapshots").glob("*")}
    assert kept == run_of(algorithm).algorithm.snapshots
    shutil.copytree(start.parents[1], start.parents[2] / "older")
    without_snapshots(start.parents[2] / "older/checkpoints/step-000000")
    for name in ("away", "older"):
        again, found = train(run_of(algorithm, name=name, resume="auto"))
        same_end(whole, again)
        assert [r["moment"] for r in of_kind(found, "eval")] == ["start", "end"]


@pytest.mark.parametrize("algorithm", default(sorted(KL_TO_BASE), "grpo".__eq__))
def test_the_base_is_the_reference_after_an_outage_too(
    algorithm: str, run_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a LoRA to start from, the reference of the base is another one than the policy at the start."""
    first, _ = train(run_of(algorithm, name="first"))
    given = {
        "model__train": {**LORA, "initial_adapter": str(first.dir.path)},
        "options": {"kl_reference": "base"},
    }
    whole, _ = train(run_of(algorithm, name="whole", **given))
    with in_the_first_evaluation(monkeypatch, outage), pytest.raises(Stopped):
        train(run_of(algorithm, name="away", **given))
    without_snapshots(tmp_path / "runs/away/checkpoints/step-000000")
    again, _ = train(run_of(algorithm, name="away", resume="auto", **given))
    same_end(whole, again)
    assert not any(t.any() for n, t in again.policy.state("reference").items() if "lora_B" in n)


@pytest.mark.parametrize(
    ("stop", "algorithm"),
    rows([*product(["signal", "minutes", "disk"], OPTIONS)], [("minutes", "kto")]),
)
def test_other_stops_there_are_resumed_bitwise(
    stop: str, algorithm: str, run_of: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(run_of(algorithm, name="whole"))
    act = {"signal": terminated, "minutes": lambda: None, "disk": disk_full}[stop]
    limits = {"training__max_minutes": 1e-6} if stop == "minutes" else {}
    with (
        in_the_first_evaluation(monkeypatch, act),
        pytest.raises((OSError,) if stop == "disk" else (Stopped,)) as raised,
    ):
        train(run_of(algorithm, name="cut", **limits))
    assert getattr(raised.value, "code", None) == {"disk": None, "minutes": 0, "signal": 3}[stop]
    again, _ = train(run_of(algorithm, name="cut", resume="auto"))
    same_end(whole, again)


# --- a run that begins from a checkpoint of another one ---


@pytest.fixture
def first_run(run_of: Callable[..., RunConfig]) -> Callable[..., Path]:
    """Run `a` -> its checkpoint at step 1."""

    def made(algorithm: str, **overrides: Any) -> Path:
        run, _ = train(run_of(algorithm, name="a", training__checkpoint_every=1, **overrides))
        return run.dir.path / "checkpoints/step-000001"

    return made


class Killed(BaseException):
    """Stands in for SIGKILL: nothing of the session runs after it."""


def killed() -> None:
    raise Killed


@pytest.mark.parametrize(
    ("stop", "algorithm"),
    rows(
        [*product(["minutes", "signal", "killed"], OPTIONS)],
        [("killed", "dpo_offline")],
    ),
)
def test_a_run_begun_from_another_does_not_begin_from_the_base(
    stop: str,
    algorithm: str,
    run_of: Callable[..., RunConfig],
    first_run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped before it has a checkpoint of its own: while it samples, or in its first step; twice, and the second
    time it says resume=auto."""
    origin = first_run(algorithm)
    whole = origin.parents[1].with_name("a")
    begun = {"name": "b", "resume": str(origin)}
    for leg in (begun, {"name": "b", "resume": "auto"}):
        if stop == "minutes":
            with pytest.raises(Stopped):
                train(run_of(algorithm, **leg, training__max_minutes=1e-6))
            break  # it has a checkpoint from here on
        with stopped_in_training(monkeypatch, stop), pytest.raises((Killed, Stopped)):
            train(run_of(algorithm, **leg))
        if stop == "signal":
            break
    own = sorted(path.name for path in (whole.with_name("b") / "checkpoints").glob("step-*"))
    assert bool(own) == (stop != "killed")
    again, found = train(run_of(algorithm, name="b", resume="auto"))
    assert [r["step"] for r in of_kind(found, "train")] == [2]
    assert same_weights(load_file(whole / "checkpoints/step-000002/weights" / FILE), final(again))
    assert (again.dir.path / "begun_from").read_text(encoding="utf-8") == f"{origin.resolve()}\n"
    assert (again.dir.path / "config.yaml").read_text(encoding="utf-8") == again.dir.run_file


@contextmanager
def stopped_in_training(monkeypatch: pytest.MonkeyPatch, how: str) -> Iterator[None]:
    """Within it, a run is stopped where it samples for training, or computes its first gradient."""
    from retouch.engine import Engine

    real, backward = experience.sample, Engine.backward

    def act() -> None:
        terminated() if how == "signal" else killed()

    def sample(*arguments: Any, **named: Any) -> Any:
        act()
        return real(*arguments, **named)

    def back(self: Engine, loss: Tensor) -> None:
        act()
        backward(self, loss)

    with monkeypatch.context() as changed:
        changed.setattr(experience, "sample", sample)
        changed.setattr(Engine, "backward", back)
        yield


def test_a_run_begun_inside_an_epoch_of_another_keeps_its_rows(
    run_of: Callable[..., RunConfig], first_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage in the evaluation that it makes up for leaves a checkpoint with the rows of the other run."""
    whole = first_run("grpo", training__eval_every=1)
    assert (whole / "rollouts.safetensors").is_file()
    state = json.loads((whole / "state.json").read_text(encoding="utf-8"))
    assert state["evaluated_at"] == 1
    origin = whole.parents[1].with_name("origin") / "checkpoints" / whole.name
    shutil.copytree(whole, origin)
    rewrite(origin, {**state, "evaluated_at": 0})
    b = {"name": "b", "training__eval_every": 1}
    with in_the_first_evaluation(monkeypatch, outage), pytest.raises(Stopped):
        train(run_of("grpo", resume=str(origin), **b))
    own = whole.parents[2] / "b/checkpoints/step-000001"
    assert load_file(own / "rollouts.safetensors").keys() == load_file(whole / "rollouts.safetensors").keys()
    shutil.rmtree(origin)  # not needed any more
    again, found = train(run_of("grpo", resume="auto", **b))
    assert [(r["kind"], r["step"]) for r in found if r["kind"] in ("eval", "train", "rollout")] == [
        ("eval", 1), ("train", 2), ("eval", 2),
    ]  # fmt: skip
    assert same_weights(load_file(whole.parent / "step-000002/weights" / FILE), final(again))


def rewrite(checkpoint: Path, state: dict[str, Any]) -> None:
    """Another state.json, as if the run had written it."""
    from retouch.engine.saved import record_files

    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    about = json.loads((checkpoint / "complete.json").read_text(encoding="utf-8"))
    (checkpoint / "complete.json").write_text(json.dumps({**about, "files": record_files(checkpoint)}), "utf-8")


def test_the_run_file_of_a_run_begun_from_another_does_not_begin_it_again(
    run_of: Callable[..., RunConfig], first_run: Callable[..., Path]
) -> None:
    """It says what the user gave, to later commands as to those that look up consent by its text."""
    origin = first_run("grpo")
    b = {"name": "b", "training__checkpoint_every": 1}
    train(run_of("grpo", resume=str(origin), **b))
    again, before = train(run_of("grpo", resume="auto", training__max_steps=3, **b))
    outcome = retouch("train", again.dir.path / "config.yaml")
    assert outcome.code == 0, outcome.err
    found = read_metrics(again.dir.path / "metrics.jsonl")
    assert [r["step"] for r in of_kind(found, "train")] == [2, 3]
    assert of_kind(found, "train") == of_kind(before, "train")  # with their times: none was taken again
    assert "damaged" not in outcome.err
    assert again.dir.begun_from() == origin.resolve()


def test_an_origin_that_is_gone_is_named(run_of: Callable[..., RunConfig], first_run: Callable[..., Path]) -> None:
    """Beginning from the base would train another run under its name."""
    origin = first_run("grpo")
    b = run_of("grpo", name="b", resume=str(origin))
    (b_dir := origin.parents[2] / "b").mkdir()
    (b_dir / "config.yaml").write_text(f"resume: {origin}\n", encoding="utf-8")
    shutil.rmtree(origin)
    file = b_dir.parent / "run.yaml"
    file.write_text(yaml.safe_dump({**b.model_dump(mode="json"), "resume": "auto"}), encoding="utf-8")
    outcome = retouch("train", file)
    assert outcome.code == 2
    assert (
        f"b: was begun from {origin}, which is no complete checkpoint any more, and has none of its own" in outcome.err
    )
    assert "Traceback" not in outcome.err


def test_a_stop_in_a_warm_up_goes_on_from_the_adapter(
    run_of: Callable[..., RunConfig], first_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before any checkpoint: the run file names what it starts from, and `resume=auto` starts from it again."""
    origin = first_run("grpo")
    given = {"model__train": {**LORA, "initial_adapter": str(origin)}, "options": {"sft_steps": 1}}
    whole, _ = train(run_of("grpo", name="whole", **given))
    with stopped_in_training(monkeypatch, "killed"), pytest.raises(Killed):
        train(run_of("grpo", name="cut", **given))
    again, _ = train(run_of("grpo", name="cut", resume="auto", **given))
    same_end(whole, again)


# --- vlm_grpo ---


@pytest.mark.full
def test_vlm_grpo_begun_from_another_run(vlm_file: RunFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Killed before its first checkpoint, and resumed."""
    from retouch.algorithms.vlm_grpo.scoring import CompletionScorer

    file = vlm_file(training__checkpoint_every=1)
    assert train_vlm(file).code == 0
    origin = tmp_path / "a/checkpoints/step-000001"
    for resume in (str(origin), "auto"):
        with monkeypatch.context() as changed, pytest.raises(Killed):
            changed.setattr(CompletionScorer, "score", lambda *_, **__: killed())
            train_vlm(file, "name=b", f"resume={resume}")
    assert not (tmp_path / "b/checkpoints").exists()
    outcome = train_vlm(file, "name=b", "resume=auto")
    assert outcome.code == 0, outcome.err
    assert "b has no checkpoi" in " ".join(outcome.err.split())
    assert [record["step"] for record in records(tmp_path / "b")] == [2]
    assert same_weights(vlm_weights(tmp_path / "a", 2), vlm_weights(tmp_path / "b", 2))


@pytest.mark.full
def test_vlm_grpo_after_an_outage_in_its_first_evaluation(
    vlm_file: RunFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from retouch.algorithms.vlm_grpo.trainer import RunTrainer

    file = vlm_file()
    assert train_vlm(file).code == 0
    with monkeypatch.context() as changed:
        changed.setattr(RunTrainer, "evaluate_now", lambda *_: outage())
        assert train_vlm(file, "name=b").code == 3
    outcome = train_vlm(file, "name=b", "resume=auto")
    assert outcome.code == 0, outcome.err
    assert same_weights(vlm_weights(tmp_path / "a", 2), vlm_weights(tmp_path / "b", 2))
    assert [r["step"] for r in read_metrics(tmp_path / "b/metrics.jsonl") if r["kind"] == "eval"] == [0, 2]
