"""Every option of a run file, where a run resumes inside an epoch: it is refused, or it may change and is run here."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from retouch.algorithms import ALGORITHMS
from retouch.algorithms.base import AdvantageConfig
from retouch.algorithms.grpo import recipe as grpo
from retouch.algorithms.grpo.config import GrpoConfig
from retouch.config import RunConfig
from retouch.config.base import Section
from retouch.config.optimizer import OptimizerConfig
from retouch.config.parts import completed
from retouch.config.rollout import RolloutConfig, Window
from retouch.config.training import EmaConfig, EvaluationConfig, LoggingConfig, TrainingConfig
from retouch.data.formats import FORMATS
from retouch.families import FAMILIES
from retouch.families.base import Train
from retouch.families.flux.base import FluxModel
from retouch.observe.settings import scoring_differences
from retouch.rewards import REWARDS
from retouch.rewards.base import RewardEntry
from retouch.rewards.client.config import RewardClientConfig
from retouch.training.resume import changes
from tests.command_line import Outcome, retouch
from tests.conftest import small_run
from tests.selection import default
from tests.tiny_models import shallow_flux

ANOTHER = "another value"

TRAINS = get_args(get_args(Train)[0])


def sections() -> Iterator[tuple[str, type[Section]]]:
    """Every class of a section with its key, but for those that are free as a whole."""
    yield "", RunConfig
    for key, kinds in {
        "model": FAMILIES.values(),
        "model.train": TRAINS,
        "data": FORMATS.values(),
        "rollout": [RolloutConfig],
        "rollout.window": [Window],
        "algorithm": ALGORITHMS.values(),
        "rewards.a": REWARDS.values(),
        "optimizer": [OptimizerConfig],
        "training": [TrainingConfig],
    }.items():
        yield from ((key, kind) for kind in kinds)


WHOLE = (EvaluationConfig, LoggingConfig, RewardClientConfig, EmaConfig)
"""Sections that are free as a whole, without those of data."""


def made(kind: type[Section]) -> Section:
    """A section with its defaults, whether or not they are valid together."""
    given: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        given[name] = (
            ANOTHER if field.is_required() else field.get_default(call_default_factory=True, validated_data=given)
        )
    return kind.model_construct(**given)


def with_section(config: RunConfig, key: str, section: Section) -> RunConfig:
    """A run with this section at its key."""
    if key == "rewards.a":
        return config.model_copy(update={"rewards": {"a": section}})
    head, _, rest = key.partition(".")
    if not head:
        return config
    inside = getattr(config, head).model_copy(update={rest: section}) if rest else section
    return config.model_copy(update={head: inside})


def walk(config: RunConfig) -> Iterator[tuple[type[Section], str, str, list[str]]]:
    """(Class, option, its key, keys that are refused) of every option, given another value in the checkpoint."""
    for key, kind in sections():
        run = with_section(config, key, made(kind))
        now = run.model_dump(mode="json", warnings=False)
        for name in kind.model_fields:
            before = inside = dict(now)
            for part in filter(None, key.split(".")):
                inside[part] = inside = dict(inside[part])
            if name == "from_judge":
                continue  # in no stored file
            inside[name] = ANOTHER if inside[name] != ANOTHER else None
            yield kind, name, f"{key}.{name}".lstrip("."), [found for found, *_ in changes(RunConfig, run, before, now)]


def declares(kind: type[Section], name: str) -> tuple[str, str] | None:
    """(Class, option) where an option of a class is declared to be free."""
    owner = next((k for k in kind.__mro__ if name in vars(k).get("FREE_IN_EPOCH", ())), None)
    return None if owner is None else (owner.__name__, name)


# --- what is run ---

ODE = {"rollout__window": None, "rollout__noise_level": None}

BASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"name": "grpo", "kl_weight": 0.1, "clip_range": 1e-3, "sft_steps": 1}},
    "nft": {"algorithm": {"name": "nft", "kl_weight": 0.1}, **ODE},
    "dpo": {"algorithm": {"name": "dpo", "beta": 100.0}, **ODE},
    "reward_gradient": {"algorithm": {"name": "reward_gradient", "kl_weight": 0.1}, **ODE},
}
"""Runs whose last checkpoint lies inside an epoch."""

MANY = (
    "{preservation: {weight: 0.5, paste_back: false, crop: mask_box, box_margin: 0.1, box_min_side: 32, transform: "
    "win_rate, min_group_std: 0.01, gated_by: other, gate_threshold: 0.1, gate_floor: 0.1}, other: {scorer: "
    "preservation, weight: 0}, gold: {scorer: preservation, role: gold}}"
)

RUNS: dict[str, tuple[str, ...]] = {
    "grpo: optimizer": (
        "optimizer.lr=1e-3", "optimizer.sft_lr=1e-3", "optimizer.betas=[0.5, 0.9]", "optimizer.weight_decay=0.1",
        "optimizer.eps=1e-6", "optimizer.schedule=cosine", "optimizer.ramp_steps=2", "optimizer.max_grad_norm=0.1",
        "optimizer.batch_size_per_device=1", "optimizer.gradient_accumulation=2", "optimizer.on_out_of_memory=stop",
        "optimizer.steps_per_forward=1",
    ),
    "grpo: training": (
        "training.max_minutes=60", "training.checkpoint_every=2", "training.keep_checkpoints=1",
        "training.eval_every=1", "training.gradient_checkpointing=true", "training.deterministic=true",
        "training.max_steps=5", "training.stop_on_plateau=true",
    ),
    "grpo: evaluation": (
        "evaluation.data={format: self_bench, path: SIGNS/targets, resolution: [32, 64]}",
        "evaluation.allow_overlap=true", "evaluation.num_examples=1", "evaluation.images_per_example=2",
        "evaluation.num_steps=2", "evaluation.weights=raw", "evaluation.on_gold_fall=stop",
        "rewards.seam={role: gold}",
        "evaluation.grid_examples=3", "training.eval_every=1",
    ),
    "grpo: logging, reward_client, model, ema and sampling": (
        "logging.sinks=[tensorboard]", "logging.rollout_images_every=1", "logging.dir=RUNS/elsewhere", "name=other",
        "plugins=[json]",
        "reward_client.timeout_s=20", "reward_client.outage_wait_s=2", "reward_client.logged_wait_s=1",
        "reward_client.max_failure_rate=0.5", "reward_client.max_run_failure_rate=0.5", "reward_client.batch_size=2",
        "reward_client.balance=round_robin", "reward_client.requests_per_server=1",
        "reward_client.probe_every=1", "reward_client.probe_tolerance=0.1", "reward_client.on_drift=stop",
        "reward_client.cache=true",
        "model.offload_text_encoders=false", "model.offload_vae=true", "model.vae_batch=one",
        "model.free_text_encoders=true",
        "ema.decay=0.5", "ema.update_interval=2",
        "rollout.batch_size_per_device=2", "rollout.preset=fast", "rollout.shared_first_step=false",
        "data.limit=100", "data.max_bad_items=3",
    ),
    "grpo: no ema and no KL": (
        "ema=null", "warmup_data={format: self_bench, path: SIGNS/targets, resolution: [32, 64], limit: 4}",
        "algorithm.kl_weight=0",
    ),
    "grpo: loss and advantages": (
        "algorithm.clip_range=1e-5", "algorithm.kl_weight=0.5", "algorithm.kl_mode=flow_grpo",
        "algorithm.step_weight=std", "algorithm.advantage_clip=1", "algorithm.old_log_probs=recomputed",
        "algorithm.baseline=batch", "algorithm.scale=batch", "algorithm.skip_zero_std_groups=false",
        "algorithm.combine=sum_then_normalize",
    ),
    "grpo: resampling": (
        "algorithm.resample_rounds=1", "algorithm.advantages=tests.algorithms.test_custom_advantages:as_the_package",
    ),
    "grpo: rewards": (
        f"rewards={MANY}",
    ),
    "nft: loss": (
        "algorithm.mix=0.9", "algorithm.mode=binary", "algorithm.old_policy=copy", "algorithm.kl_weight=0",
        "algorithm.timesteps_per_image=3",
    ),
    "dpo: loss": (
        "algorithm.beta=10", "algorithm.rollout_policy=reference", "algorithm.reference_refresh_every=1",
        "algorithm.timesteps_per_pair=2",
    ),
    "reward_gradient: loss": ("algorithm.kl_weight=0.5",),
}  # fmt: skip
"""Run: what it changes, in a checkpoint of its base inside an epoch. SIGNS and RUNS are folders."""

COPIES = {"nft: loss", "dpo: loss"}
"""Runs that train on more noised copies of the same rows."""

EXPENSIVE = {"grpo: resampling", "nft: loss", "reward_gradient: loss"}
"""Runs of `make test-all`."""

NOT_RUN = {
    ("RunConfig", "resume"): "every run here changes it",
    ("RunConfig", "judge"): "an endpoint; rewards of the epoch are recorded",
    ("LoggingConfig", "project"): "only services read it",
    ("LoggingConfig", "group"): "only services read it",
    ("TrainingConfig", "compile"): "minutes; tests/cuda",
    ("TrainingConfig", "sharding"): "several processes: tests/distributed",
    ("TrainingConfig", "shard_gradients"): "several processes: tests/distributed",
    ("ModelSection", "path"): "by the files: test_an_epoch_of_another_model_is_refused",
    ("TrainLora", "initial_adapter"): "only a new run reads it",
    ("TrainIpAdapter", "initial_adapter"): "only a new run reads it",
    ("TrainIpAdapter", "reference_dropout"): "only supervised steps read it",
    ("TrainIpAdapter", "image_encoder"): "by the files",
    ("TrainIpAdapter", "scale"): "by the adapter's file",
    ("TrainIpAdapter", "value_norm"): "by the adapter's file",
    ("Objective", "caption_dropout"): "only supervised steps read it",
}
"""Free option -> why no run here changes it."""


@pytest.fixture(scope="module")
def written(signs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a run of `BASES` that ended inside an epoch; made on first use."""
    found: dict[str, Path] = {}

    def directory(base: str) -> Path:
        if base not in found:
            root = tmp_path_factory.mktemp(base)
            given = {
                "model__path": shallow_flux(),
                "ema": {"decay": 0.9},
                "evaluation__num_steps": 1,
                "optimizer": {"lr": 1e-3, "batch_size_per_device": 2, "gradient_accumulation": 1},
                **BASES[base],
            }
            if base == "dpo":  # a pair in a step
                given["optimizer"] = {**given["optimizer"], "batch_size_per_device": 1}
            steps = 1 + given["algorithm"].get("sft_steps", 0)
            run = small_run(signs, root, name="t", training__max_steps=steps, **given)
            (root / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
            outcome = retouch("train", root / "run.yaml")
            assert outcome.code == 0, outcome.err
            found[base] = root / "t"
            assert (last(found[base]) / "rollouts.safetensors").is_file()
        return found[base]

    return directory


def last(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What the policy predicted of in each optimizer step: digests of (state, time) of the rows."""
    from retouch.engine import Engine

    steps: list[set[str]] = [set()]
    predict, step = FluxModel.predict, Engine.step

    def watched(self: Any, network: Any, x: Any, time: Any, condition: Any) -> Any:
        if torch.is_grad_enabled():
            rows = zip(x.detach(), time.expand(len(x)), strict=True)
            steps[-1] |= {hashlib.md5(row.numpy().tobytes() + t.numpy().tobytes()).hexdigest() for row, t in rows}
        return predict(self, network, x, time, condition)

    def stepped(self: Engine, lr: float) -> dict[str, float]:
        steps.append(set())
        return step(self, lr)

    monkeypatch.setattr(FluxModel, "predict", watched)
    monkeypatch.setattr(Engine, "step", stepped)
    return steps


def resumed(run: Path, into: Path, signs: Path, *overrides: str) -> Outcome:
    """Two steps more of a copy of a run: what is left of the epoch, and the next one."""
    shutil.copytree(run, into / "t")
    checkpoint = last(into / "t")
    most = f"training.max_steps={int(checkpoint.name[5:]) + 2}"
    given = [one.replace("SIGNS", str(signs)).replace("RUNS", str(into)) for one in overrides]
    return retouch("train", run / "config.yaml", f"logging.dir={into}", f"resume={checkpoint}", most, *given)


UNCHANGED: dict[str, set[str]] = {}
"""Base -> what the policy predicts of in the step that ends its epoch."""


@pytest.mark.parametrize("name", default(RUNS, lambda name: name not in EXPENSIVE))
def test_an_option_that_may_change_changes_no_row(
    name: str, written: Callable[[str], Path], inputs: list[set[str]], signs: Path, tmp_path: Path
) -> None:
    base = name.partition(":")[0]
    run = written(base)
    if base not in UNCHANGED:
        inputs[:] = [set()]
        outcome = resumed(run, tmp_path / "same", signs)
        assert outcome.code == 0, outcome.err
        UNCHANGED[base] = inputs[0]
    inputs[:] = [set()]
    outcome = resumed(run, tmp_path / "changed", signs, *RUNS[name])
    assert outcome.code == 0, outcome.err
    assert "Traceback" not in outcome.err
    expected, found = UNCHANGED[base], inputs[0]
    assert expected and (len(found) > len(expected) if name in COPIES else found == expected)


def test_every_option_is_refused_or_run(config: Callable[..., RunConfig]) -> None:
    """An option of a new class is refused until its section says that it is free, and a test here runs it."""
    free: set[tuple[str, str]] = set()
    for kind, name, key, refused in walk(config()):
        if refused:
            assert refused == [key], f"{kind.__name__}.{name}"
            continue
        if issubclass(kind, RewardEntry) and name != "gradient_weight":
            continue  # advantages are recorded, whatever scored them
        if issubclass(kind, tuple(FAMILIES.values())) and name == "vae_batch":
            continue  # by its values
        declared = declares(kind, name)
        assert declared is not None, f"{kind.__name__}.{name}: neither refused nor declared free"
        if not issubclass(kind, tuple(FORMATS.values())):  # data is known by its items
            free.add(declared)
    free |= {(kind.__name__, name) for kind in WHOLE for name in kind.model_fields}
    assert free - {*changed()} == NOT_RUN.keys()


def changed() -> Iterator[tuple[str, str]]:
    """(Class, option) of everything that `RUNS` changes."""
    of_section = {"optimizer": OptimizerConfig, "training": TrainingConfig, "rollout": RolloutConfig}
    whole = {
        "evaluation": EvaluationConfig,
        "logging": LoggingConfig,
        "reward_client": RewardClientConfig,
        "ema": EmaConfig,
    }
    for run, overrides in RUNS.items():
        kinds = {**of_section, "algorithm": ALGORITHMS[run.partition(":")[0]], "model": FAMILIES["flux_fill"]}
        for override in overrides:
            section, _, name = override.partition("=")[0].rpartition(".")
            if section in whole:
                yield whole[section].__name__, name
                yield "RunConfig", section
            elif (declared := declares(kinds.get(section, RunConfig), name)) is not None:
                yield declared


def test_options_that_an_epoch_depends_on_are_not_free() -> None:
    """By name, where a wrong declaration would train on rows of another meaning."""
    for kind, names in {
        GrpoConfig: ("kl_mask_threshold", "guard", "log_prob_mode", "timestep_fraction", "region", "inner_epochs"),
        ALGORITHMS["nft"]: ("advantage_clip", "region"),
        ALGORITHMS["dpo"]: ("pairs",),
        ALGORITHMS["reward_gradient"]: ("trained_step", "last_steps", "reward_at", "gradient_scale"),
        RolloutConfig: ("num_steps", "group_size", "guidance_scale", "step_rule", "shared_noise"),
        RewardEntry: ("gradient_weight",),
    }.items():
        for name in names:
            assert not kind.is_free_in_epoch(name, 1, 2), f"{kind.__name__}.{name}"
    assert not FAMILIES["flux_fill"].is_free_in_epoch("vae_batch", "all", "tiles")


def test_a_retired_option_of_another_value_is_refused_or_free(config: Callable[..., RunConfig]) -> None:
    """Of every table of them. The epoch of an older version would go on as today; its evaluations are compared by the
    option, too."""
    walked = [*sections(), ("reward_client", RewardClientConfig)]
    refused: dict[str, bool] = {}
    for key, kind in walked:
        for name, today in kind.retired().items():
            section = kind.model_validate({"model": "m"} if "model" in kind.model_fields else {})
            run = with_section(config(), key, section)
            now = run.model_dump(mode="json", serialize_as_any=True)
            for value in (today, ANOTHER):
                before = inside = dict(now)
                for part in key.split("."):
                    inside[part] = inside = dict(inside[part])
                inside[name] = value
                found = list(changes(RunConfig, run, before, now))
                assert found in ([], [(f"{key}.{name}", ANOTHER, today, True)])
                assert not found or value == ANOTHER
                if "rewards" in key:
                    entries = [completed(one)["rewards"]["a"] for one in (before, now)]
                    assert scoring_differences(*entries) == [name] * (value == ANOTHER)
            refused[name] = bool(found)
    assert refused == {
        **dict.fromkeys(("show_source", "alignment_weight", "quality_weight"), True),
        **dict.fromkeys(("sft_shifted_times", "warmup_shifted_times", "late_rewards", "hedge_after_s"), False),
    }
    kinds: list[type[Section]] = [Section]
    for kind in kinds:
        kinds += kind.__subclasses__()
    owners = {kind for kind in kinds if vars(kind).get("RETIRED") and kind.__module__.startswith("retouch")}
    assert owners <= {base for _, kind in walked for base in kind.__mro__}


def test_options_of_a_plug_in_are_refused_until_it_declares_them(config: Callable[..., RunConfig]) -> None:
    class Rwr(AdvantageConfig):
        name: str = "grpo"
        temperature: float = 1.0
        emphasis: float = 1.0

    class Declared(Rwr):
        FREE_IN_EPOCH = {"temperature"}  # noqa: RUF012

    for kind, refused in ((Rwr, ["algorithm.temperature", "algorithm.emphasis"]), (Declared, ["algorithm.emphasis"])):
        run = config().model_copy(update={"algorithm": kind(temperature=2.0, emphasis=3.0)})
        before = config().model_copy(update={"algorithm": kind()})
        assert keys(run, before) == refused


def test_a_gradient_that_was_recorded_is_not_left_out(config: Callable[..., RunConfig]) -> None:
    """Also of a reward that the run file no longer has."""
    nft = {"algorithm": {"name": "nft"}, **ODE}
    weighed = {"l1": {"scorer": "glyph_structure", "gradient_weight": 0.5}, "preservation": {}}
    plain = {"preservation": {"weight": 0.2}}
    for then, now, refused in (
        (plain, weighed, True),
        (weighed, plain, True),
        (plain, {"other": plain["preservation"] | {"scorer": "preservation"}}, False),
    ):
        found = keys(config(rewards=now, **nft), config(rewards=then, **nft))
        assert found == (["rewards.l1.gradient_weight"] if refused else [])


def keys(run: RunConfig, before: RunConfig) -> list[str]:
    """The options that are refused."""
    now, then = (one.model_dump(mode="json", serialize_as_any=True) for one in (run, before))
    return [key for key, *_ in changes(RunConfig, run, then, now)]


@pytest.mark.parametrize("added", [False, True])
def test_the_mask_of_the_kl_cannot_come_or_go_inside_an_epoch(
    added: bool, signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left out, the epoch would go on as GRPO-Guard, because it has recorded means."""
    masked = {"name": "grpo", "kl_mask_threshold": 1e-5}
    then, now = ({"name": "grpo"}, masked) if added else (masked, {"name": "grpo"})
    run = small_run(signs, tmp_path, training__max_steps=1, evaluation__num_steps=1, algorithm=then)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    assert retouch("train", tmp_path / "run.yaml").code == 0
    run["algorithm"] = now
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    monkeypatch.setattr(grpo, "guard_log_probs", lambda *_: pytest.fail("GRPO-Guard"))
    outcome = retouch("train", tmp_path / "run.yaml", "resume=auto", "training.max_steps=2")
    assert outcome.code == 2
    assert "lies inside an epoch of algorithm.kl_mask_threshold=" in outcome.err


def test_the_recipe_asks_the_option_and_not_the_rows(
    signs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Means that another option recorded are not trained on."""
    run = small_run(signs, tmp_path, training__max_steps=1, evaluation__num_steps=1)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    monkeypatch.setattr(grpo, "guard_log_probs", lambda *_: pytest.fail("GRPO-Guard"))
    monkeypatch.setattr(GrpoConfig, "records_means", property(lambda self: False))
    real = grpo.surrogate

    def with_means(run: Any, algorithm: Any, experience: Any, *rest: Any) -> Any:
        experience.means = torch.zeros_like(experience.latents[:, 1:])
        return real(run, algorithm, experience, *rest)

    monkeypatch.setattr(grpo, "surrogate", with_means)
    assert retouch("train", tmp_path / "run.yaml").code == 0


def test_a_resumed_run_takes_the_options_of_adamw_from_its_run_file(
    written: Callable[[str], Path], signs: Path, tmp_path: Path
) -> None:
    """torch would go on with those of the checkpoint, while the log says that they changed."""
    out = []
    for name, overrides in {"same": (), "other": ("optimizer.weight_decay=0.5", "optimizer.betas=[0.1, 0.2]")}.items():
        assert resumed(written("grpo"), tmp_path / name, signs, *overrides).code == 0
        folder = last(tmp_path / name / "t")
        out.append(torch.load(folder / "optimizer.pt", weights_only=True)["optimizer"]["param_groups"][0])
    assert [tuple(group["betas"]) for group in out] == [(0.9, 0.999), (0.1, 0.2)]
    assert [group["weight_decay"] for group in out] == [1e-4, 0.5]
