"""Reject combinations of options that cannot work, and warn of those that are probably not intended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import BaseModel

from retouch.algorithms import ALGORITHMS
from retouch.algorithms.base import RlConfig, require_gradient
from retouch.config.advice import advice
from retouch.config.base import EARLIER_DEFAULTS
from retouch.config.derived import stochastic_steps, window_starts
from retouch.config.needs import data_sections
from retouch.errors import ConfigError

if TYPE_CHECKING:
    from retouch.config.run import RunConfig
    from retouch.rewards.base import RewardEntry


COLUMNS = frozenset(
    {
        *("example", "index", "text", "read", "level", "discipline", "complexity", "image_type"),
        *("outside_l1", "glyph_correlation", "failed", "combined"),
        *("step", "kind", "time", "moment", "examples", "images"),
    }
)
"""Columns of an evaluation, and keys of its record in metrics.jsonl, beside those of its rewards."""

PLATEAU_EXAMPLES = 20
"""Examples that a verdict on a plateau needs. Equal changes have an interval without width, and the probability that so
many are equal by chance is below what any of 500 evaluations spends."""


PLATEAU_EVALUATIONS = 7
"""Evaluations that the first verdict on a plateau needs: two in each third of a run, and the one that ends it."""


def check(run: RunConfig) -> None:
    """Reject options of a section that cannot work in this run, and combinations of sections that cannot work.

    Raises:
        ValueError: "key: given ...; expected ...; set ...".
    """
    run.model.check(run, "model")
    for name, entry in run.rewards.items():
        entry.check(run, f"rewards.{name}")
        if entry.gradient_weight:
            _gradient_weight(run, f"rewards.{name}", entry)
    _rewards(run)
    _step_size(run)
    _logging(run)
    run.algorithm.check(run, "algorithm")
    for key, section in data_sections(run).items():
        section.check(run, key)
    _distilled(run)
    _weights(run)
    _sharding(run)


def require_trainable(run: RunConfig) -> None:
    """Reject what a run shall not be trained with, but may have been: earlier versions did, and such a run is opened.

    Raises:
        ConfigError: "key: given ...; expected ...; set ...".
    """
    for name in sorted(COLUMNS & run.rewards.keys()):
        raise ConfigError(
            f"rewards.{name}: given as the name of a reward, but evaluations have a column {name!r} of their own, and "
            f"would show neither rightly; give it another name, with scorer: {run.rewards[name].scorer}"
        )
    if run.training.stop_on_plateau is not False:
        _plateau(run, run.training.stop_on_plateau)


def _plateau(run: RunConfig, given: bool | str) -> None:
    """Reject a plateau of what no evaluation scores.

    Raises:
        ConfigError: "key: given ...; expected ...; set ...".
    """
    key, remedy = f"training.stop_on_plateau: given {str(given).lower() if given is True else given}", "set it to false"
    scored = {name: entry for name, entry in run.rewards.items() if not entry.compares_group()}
    trained = [n for n, e in scored.items() if e.role == "train" and (e.weight or e.gradient_weight)]
    if given is True and not trained:
        raise ConfigError(f"{key}, but evaluations score no reward of role train; name a gold reward, or {remedy}")
    if given is not True and given not in scored:
        names = ", ".join(scored) or "none"
        raise ConfigError(f"{key}; expected true or a reward that evaluations score ({names}); set one, or {remedy}")


def _gradient_weight(run: RunConfig, key: str, entry: RewardEntry) -> None:
    given = f"{key}.gradient_weight: given {entry.gradient_weight:g}, but"
    if not run.algorithm.takes_gradients:
        reading = " or ".join(
            name for name, other in ALGORITHMS.available().items() if getattr(other, "takes_gradients", False)
        )
        raise ValueError(
            f"{given} {run.algorithm.name} does not read it; leave it out, or set algorithm.name={reading}"
        )
    if entry.role == "gold":
        raise ValueError(f"{given} {key}.role is 'gold', which is never trained on; leave gradient_weight out")
    if entry.weight < 0:
        raise ValueError(
            f"{given} {key}.weight is {entry.weight:g}: its advantages would lower what its gradient raises; set "
            f"{key}.weight to 0 or more, or leave gradient_weight out"
        )
    without = f"{key}.gradient_weight=0"
    require_gradient(key, entry, f"{key}.gradient_weight", without, without)


def _step_size(run: RunConfig) -> None:
    given = run.optimizer.gradient_accumulation
    if given is not None and run.optimizer.global_batch_size is not None:
        raise ValueError(
            f"optimizer.gradient_accumulation: given {given} beside optimizer.global_batch_size "
            f"{run.optimizer.global_batch_size}, which already sets the rows of a step; leave one of them out"
        )


def _logging(run: RunConfig) -> None:
    if {"wandb", "trackio"} & {*run.logging.sinks}:
        return
    for key in ("project", "group"):
        given = getattr(run.logging, key)
        if given != type(run.logging).model_fields[key].default:
            raise ValueError(
                f"logging.{key}: given {given!r}, which wandb and trackio read, but logging.sinks is "
                f"{run.logging.sinks}; add one of them, or leave {key} out"
            )


def _rewards(run: RunConfig) -> None:
    if not run.algorithm.trains_on_rewards:
        return
    if not run.rewards:
        raise ValueError(
            f"rewards: none given, but algorithm.name is {run.algorithm.name!r}, which trains on rewards; "
            "set for example rewards: {ocr: {weight: 1.0}}"
        )
    trained = [entry for entry in run.rewards.values() if entry.role == "train"]
    if not trained:
        raise ValueError("rewards: every role is gold, but training needs one of role train; add one")
    if not any(entry.weight for entry in trained):
        raise ValueError("rewards: every weight is 0, but the objective is their weighted sum; set one weight above 0")
    if not any(entry.weight > 0 for entry in trained):
        raise ValueError("rewards: no weight is above 0, and training would lower every reward; set one weight above 0")


def _distilled(run: RunConfig) -> None:
    """A few-step model samples without guidance, and what a stochastic step does to its image must be undone by the
    deterministic steps around and behind it."""
    steps, rollout = run.model.distilled_steps, run.rollout
    if steps is None:
        return
    if rollout.guidance_scale is not None and rollout.guidance_scale > 1:
        raise ValueError(
            f"rollout.guidance_scale: given {rollout.guidance_scale:g}, but {run.model.path} was distilled to sample "
            f"in {steps} steps without guidance; set rollout.guidance_scale=1, or the base model"
        )
    stochastic = stochastic_steps(run)
    if not stochastic:
        return
    last = window_starts(run)[-1] + stochastic if rollout.window else stochastic
    if stochastic > rollout.num_steps // 2 or last >= rollout.num_steps:
        raise ValueError(
            f"rollout.window: up to {stochastic} of {rollout.num_steps} steps are stochastic, the last of them step "
            f"{last}, but {run.model.path} was distilled to {steps} steps, and only deterministic steps remove their "
            "noise; set rollout.window={size: 1, range: [0.25, 0.75]} with rollout.num_steps=4 or more, or "
            "algorithm.name=nft"
        )


def _weights(run: RunConfig) -> None:
    if run.evaluation.weights == "ema" and run.ema is None:
        raise ValueError(
            "evaluation.weights: given 'ema', but there is no ema section; set ema.decay=0.999, or "
            "evaluation.weights=raw"
        )


def _sharding(run: RunConfig) -> None:
    training = run.training
    if training.sharding == "none":
        if not training.shard_gradients:
            useful = "zero2" if run.model.train.kind == "ip_adapter" else "fsdp2"
            raise ValueError(
                "training.shard_gradients: given false, but training.sharding is none; leave it out, or set "
                f"sharding={useful}"
            )
        return
    if training.compile:
        raise ValueError(
            f"training.compile: given true beside training.sharding={training.sharding}, which has hooks in each "
            "block; set compile=false"
        )
    if run.optimizer.state == "8bit":
        raise ValueError(
            f"optimizer.state: given '8bit' beside training.sharding={training.sharding}, which shards them already, "
            "in fp32; set state=fp32"
        )
    if run.model.train.kind == "ip_adapter" and training.sharding != "zero2":
        raise ValueError(
            f"training.sharding: given {training.sharding!r}, but the files of a style adapter need its frozen weights "
            "whole; set sharding=zero2, or none"
        )
    if training.mixed_precision == "fp16":
        raise ValueError(
            "training.mixed_precision: given 'fp16', whose loss scaler would see only its own piece of the gradients "
            f"under training.sharding={training.sharding}; set bf16"
        )
    if training.sharding == "zero3" and not training.shard_gradients:
        raise ValueError(
            "training.shard_gradients: given false, but training.sharding=zero3 keeps no whole gradients; leave it "
            "out, or set sharding=zero2"
        )


def warnings_of(run: RunConfig, world_size: int = 1) -> list[str]:
    """One line for each warning: the key, the value given, its effect, and the option to set."""
    rewards = (line for name, entry in run.rewards.items() for line in entry.advice(name))
    own = (*run.algorithm.warnings(run), *_without_effect(run), *_advice_on_distilled(run), *_advice_on_stops(run))
    return [*own, *rewards, *advice(run, world_size).values()]


def _without_effect(run: RunConfig) -> Iterator[str]:
    """Options that were changed and that nothing reads in this run: what a run file keeps when its algorithm is
    changed, and what an option that is off leaves without a meaning."""
    algorithm, unread = run.algorithm, dict[str, str]()
    if not isinstance(algorithm, RlConfig) and algorithm.supervised_steps(run):
        samples = f"{algorithm.name} samples no images to train on"
        unread |= dict.fromkeys(sorted(RlConfig.UNREAD - {"rollout.preset"}), f"{samples}; leave it out")
        unread |= {
            "rollout.solver": f"{samples}; leave it out",
            "optimizer.sft_lr": f"it is of a warm-up before RL; {algorithm.name} trains with optimizer.lr; set that",
        }
    # a 0 that is written is meant
    if isinstance(algorithm, RlConfig) and "sft_steps" not in algorithm.model_fields_set:
        off = "algorithm.sft_steps is 0: there is no supervised warm-up; set sft_steps, or leave it out"
        unread["optimizer.sft_lr"] = off
    if not any("mask" in section.has_images for section in (run.data, run.warmup_data) if section):
        unread["algorithm.region"] = "no example has a mask, and the loss is taken everywhere; leave it out"
    if not algorithm.trains_on_rewards:
        unread["logging.rollout_images_every"] = f"{algorithm.name} samples no images to train on; leave it out"
    if not run.reward_client.probe_every:
        off = "reward_client.probe_every is 0: nothing is probed; set probe_every, or leave it out"
        unread |= dict.fromkeys(("reward_client.probe_tolerance", "reward_client.on_drift"), off)
    for key, why in unread.items():
        section, _, name = key.rpartition(".")
        holder: BaseModel = getattr(run, section) if section else run
        field, value = type(holder).model_fields.get(name), getattr(holder, name, None)
        if field is not None and value not in (field.default, EARLIER_DEFAULTS.get(key, field.default)):
            shown = f" {value}" if isinstance(value, str | int | float) else ""
            yield f"{key}: given{shown}, but {why}"


def _advice_on_stops(run: RunConfig) -> Iterator[str]:
    """Warnings about stops that cannot come; no errors, because smoke runs, other rewards and another algorithm are
    overrides of a run file that has them."""
    evaluated = [entry for entry in run.rewards.values() if entry.role == "gold" and not entry.compares_group()]
    if run.evaluation.on_gold_fall == "stop" and not evaluated:
        yield (
            "evaluation.on_gold_fall: given 'stop', but no reward has role gold, and nothing would stop the run; set "
            "it for one that evaluations score, or on_gold_fall=warn"
        )
    if run.training.stop_on_plateau is False:
        return
    stays = "and training.stop_on_plateau will not stop the run"
    if not has_rl(run):
        yield f"algorithm.name: given {run.algorithm.name}, which has no RL whose start is compared, {stays}"
    elif not run.training.eval_every:
        yield f"training.eval_every: given 0, {stays}; set it to 1 or more"
    elif (count := _evaluations_of_rl(run)) < PLATEAU_EVALUATIONS:
        yield (
            f"training.eval_every: given {run.training.eval_every}, {count} evaluations of RL, but a plateau takes "
            f"{PLATEAU_EVALUATIONS} to see, {stays}; lower it"
        )
    elif (examples := run.evaluation.num_examples) < PLATEAU_EXAMPLES:
        yield (
            f"evaluation.num_examples: given {examples}, but a plateau takes {PLATEAU_EXAMPLES} to see, {stays}; set "
            f"it to {PLATEAU_EXAMPLES} or more (256 is useful)"
        )


def _evaluations_of_rl(run: RunConfig) -> int:
    """Evaluations before the last step, the one at the start of RL included."""
    every, warm_up = run.training.eval_every, getattr(run.algorithm, "sft_steps", 0)
    return 1 + (run.training.max_steps - 1) // every - warm_up // every


def has_rl(run: RunConfig) -> bool:
    """Whether a run has a start of RL that later evaluations are compared with."""
    return run.algorithm.trains_on_rewards or isinstance(run.algorithm, RlConfig)


def _advice_on_distilled(run: RunConfig) -> Iterator[str]:
    """A few-step model is no flow model: what each objective assumes about it, and does to it."""
    if run.model.distilled_steps is None or run.algorithm.trains_text_encoder:
        return
    path = run.model.path
    if stochastic_steps(run):
        yield (
            f"algorithm.name: given {run.algorithm.name!r} for {path}, a distilled model, whose stochastic steps leave "
            "the distribution that it was distilled for; set algorithm.name=nft or dpo, or train the base model and "
            "use its LoRA with the distilled one"
        )
    if run.algorithm.supervised_steps(run):
        key = "algorithm.sft_steps" if isinstance(run.algorithm, RlConfig) else "algorithm.name"
        yield (
            f"{key}: supervised flow matching on {path}, a distilled model, undoes its distillation: images of few "
            "steps become blurred; train the base model"
        )
    if run.algorithm.trains_on_rewards and "reference" not in run.algorithm.snapshots:
        yield (
            f"algorithm.kl_weight: given 0 for {path}, a distilled model; runs of some thousand steps without KL are "
            "reported to lose detail; set algorithm.kl_weight above 0"
        )
