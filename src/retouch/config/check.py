"""Combinations that cannot work, refused before anything is loaded."""

from __future__ import annotations

from retouch.algorithms.sections import (
    AdvantageConfig,
    DpoConfig,
    GrpoConfig,
    Objective,
    RlConfig,
    SftConfig,
    VlmGrpoConfig,
)
from retouch.algorithms.vlm_grpo.rules import check_vlm
from retouch.config import presets
from retouch.config.needs import data_sections, seen_tokens, step_rule, takes_given_pairs, trains_on_rewards
from retouch.config.reward_rules import check_entries
from retouch.config.run import RunConfig
from retouch.families.facts import (
    ADAPTERS,
    EDIT_CHAT_TOKENS,
    ENDS_WITHOUT_NOISE,
    ETA,
    FACTS,
    NOISE_LEVEL,
    RULES_OF,
)
from retouch.families.sections import QwenImageEditModel, TrainIpAdapter


def check(run: RunConfig) -> None:
    """Raise ValueError with *what you gave, what is allowed, what to set*."""
    _model(run)
    _rewards(run)
    _logging(run)
    if isinstance(run.algorithm, VlmGrpoConfig):
        check_vlm(run, run.algorithm)
        _data(run)
        return
    _adapter(run)
    _groups(run)
    _steps(run)
    _preset(run)
    _sampling(run)
    _objective(run)
    _data(run)
    _weights(run)
    _sharding(run)


def _data(run: RunConfig) -> None:
    for key, section in data_sections(run).items():
        section.check(run, key)
        if isinstance(run.model, QwenImageEditModel):
            _shows_the_image(run.model, key, section.size)


def _shows_the_image(model: QwenImageEditModel, key: str, size: tuple[int, int]) -> None:
    taken = seen_tokens(model, size) + EDIT_CHAT_TOKENS
    if taken >= model.max_sequence_length:
        raise ValueError(
            f"model.max_sequence_length: given {model.max_sequence_length}, but a picture of {key}.resolution "
            f"{size[0]} x {size[1]} takes {taken} tokens of it with the chat around it, which leaves none for a "
            f"prompt; set {taken + 256} or more, or a smaller model.vision_pixels"
        )


def _model(run: RunConfig) -> None:
    if not run.model.path:
        raise ValueError("model.path: empty; set a hub id or a folder in the diffusers layout")
    if FACTS[run.model.family].edits and run.model.free_text_encoders:
        raise ValueError(
            f"model.free_text_encoders: given true, but what the text encoder of {run.model.family} reads depends on "
            "the picture, so that it is needed all along; set offload_text_encoders=true"
        )
    if FACTS[run.model.family].edits and run.model.embeddings is not None:
        raise ValueError(
            f"model.embeddings: given {run.model.embeddings!r}, but what the text encoder of {run.model.family} reads "
            "depends on the picture, and embeddings are kept by the prompt; leave it out"
        )


def _adapter(run: RunConfig) -> None:
    train = run.model.train
    if not isinstance(train, TrainIpAdapter):
        return
    if run.model.family not in ADAPTERS:
        raise ValueError(
            f"model.train.kind: given 'ip_adapter', which is for {', '.join(ADAPTERS)}; set kind=lora for "
            f"{run.model.family}"
        )
    if ADAPTERS[run.model.family].head == "linear":
        for key, value in (("query_former", train.query_former), ("weights", train.weights == "no_last_layer")):
            if value:
                raise ValueError(
                    f"model.train.{key}: given {getattr(train, key)!r}, but the projection of {run.model.family} is "
                    f"one layer; leave {key} out"
                )
        if train.value_norm:
            raise ValueError(
                f"model.train.value_norm: given true, but {run.model.family} uses the attention of diffusers, which "
                "does not normalize values; leave value_norm out"
            )
    defaults = TrainIpAdapter()
    if train.weights != "kv_lora" and (train.rank, train.alpha) != (defaults.rank, defaults.alpha):
        raise ValueError(
            f"model.train.rank: rank and alpha are of weights=kv_lora, but weights is {train.weights!r}; leave them "
            "out, or set weights=kv_lora"
        )
    supervised = not isinstance(run.algorithm, RlConfig) or run.algorithm.warmup_steps > 0
    if train.reference_dropout and not supervised:
        raise ValueError(
            f"model.train.reference_dropout: given {train.reference_dropout}, but the run has no supervised steps; "
            "leave it out, or set algorithm.warmup_steps"
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
    check_entries(run)
    if not trains_on_rewards(run):
        return
    if not run.rewards:
        raise ValueError(
            f"rewards: none given, but algorithm.name is {run.algorithm.name!r}, which trains on rewards; "
            "set for example rewards: {ocr: {weight: 1.0}}"
        )
    trained = [entry for entry in run.rewards.values() if entry.role == "train"]
    if not trained:
        raise ValueError("rewards: every role is gold, so that there is nothing to raise; add one of role train")
    if not any(entry.weight for entry in trained):
        raise ValueError("rewards: every weight is 0, so that there is nothing to raise; set one weight above 0")
    if not any(entry.weight > 0 for entry in trained):
        raise ValueError(
            "rewards: no weight is above 0, so that training would lower what the rewards say; set one weight above 0"
        )


def _groups(run: RunConfig) -> None:
    algorithm, k = run.algorithm, run.rollout.group_size
    if not trains_on_rewards(run):
        return
    if isinstance(algorithm, DpoConfig) and k == 1:
        raise ValueError(
            "rollout.group_size: given 1, but dpo pairs the best with the worst image of a group; set group_size to 2 "
            "or more (4-16 is usual)"
        )
    if not isinstance(algorithm, AdvantageConfig):
        return
    for key, value in (("baseline", algorithm.baseline), ("scale", algorithm.scale)):
        if value == "group" and k == 1:
            raise ValueError(
                f"rollout.group_size: given {k}, but algorithm.{key}=group compares the images of "
                f"one example with each other; set group_size to 2 or more (4-16 is usual), or algorithm.{key}=batch"
            )
    if algorithm.skip_zero_std_groups and algorithm.baseline == "batch":
        raise ValueError(
            "algorithm.skip_zero_std_groups: given true, but algorithm.baseline=batch compares with the whole batch, "
            "where a group whose rewards are all alike counts as well; leave it out, or set baseline=group"
        )
    if algorithm.resample_rounds and not (algorithm.baseline == "group" and algorithm.skip_zero_std_groups):
        raise ValueError(
            f"algorithm.resample_rounds: given {algorithm.resample_rounds}, which replaces groups that are left out; "
            "set algorithm.baseline=group and algorithm.skip_zero_std_groups=true, or resample_rounds=0"
        )


def _steps(run: RunConfig) -> None:
    if not isinstance(run.algorithm, RlConfig):
        return
    if run.algorithm.warmup_steps > run.training.max_steps:
        raise ValueError(
            f"algorithm.warmup_steps: given {run.algorithm.warmup_steps}, more than training.max_steps "
            f"{run.training.max_steps}; max_steps counts the warm-up too"
        )
    if not run.algorithm.warmup_steps and not run.algorithm.warmup_shifted_times:
        raise ValueError(
            "algorithm.warmup_shifted_times: given false, but algorithm.warmup_steps is 0: there is no warm-up; set "
            "warmup_steps, or leave warmup_shifted_times out"
        )


def _preset(run: RunConfig) -> None:
    if run.rollout.preset is not None and run.algorithm.name not in (*presets.ALGORITHMS, "sft"):
        raise ValueError(
            f"rollout.preset: given {run.rollout.preset!r}, but presets are of {', '.join(presets.ALGORITHMS)}, and "
            f"algorithm.name is {run.algorithm.name}; leave preset out, and set rollout.num_steps and guidance_scale"
        )


def _sampling(run: RunConfig) -> None:
    """Rollout options that the algorithm reads, and stochastic steps that the model has."""
    rollout, algorithm, rule = run.rollout, run.algorithm, step_rule(run)
    if rollout.solver == "dpm2" and FACTS[run.model.family].prediction != "flow":
        raise ValueError(
            f"rollout.solver: given 'dpm2', which is of flow models, but {run.model.family} predicts the noise; leave "
            "solver out"
        )
    if rule is None or not isinstance(algorithm, GrpoConfig):
        _deterministic(run)
        return
    _noise(run, rule)
    _window(run, rule, algorithm)
    _published_modes(run, rule, algorithm)


def _noise(run: RunConfig, rule: str) -> None:
    """The step rule is one of the family's, and so are its options."""
    rollout, prediction = run.rollout, FACTS[run.model.family].prediction
    if rule not in RULES_OF[prediction]:
        raise ValueError(
            f"rollout.step_rule: given {rule!r}, but {run.model.family} predicts "
            f"{'a velocity' if prediction == 'flow' else 'the noise'}; set one of {', '.join(RULES_OF[prediction])}"
        )
    for key, rules in (("noise_level", NOISE_LEVEL), ("eta", ETA)):
        value = getattr(rollout, key)
        if value is not None and rule not in rules:
            raise ValueError(
                f"rollout.{key}: given {value}, which scales the noise of {' and '.join(rules)}, but "
                f"rollout.step_rule is {rule}; leave {key} out"
            )
    if rule == "cps" and (rollout.noise_level or 0) > 1:
        raise ValueError(
            f"rollout.noise_level: given {rollout.noise_level}, but for step_rule cps it is a share in (0, 1]; set "
            "0.8, as published, or another step_rule"
        )
    if rule == "ddim" and rollout.eta is not None and rollout.eta > 1:
        raise ValueError(
            f"rollout.eta: given {rollout.eta}, but for step_rule ddim it is a share in (0, 1]; set 1.0, as published"
        )


def _window(run: RunConfig, rule: str, algorithm: GrpoConfig) -> None:
    """There are stochastic steps, and as many as the window asks for."""
    rollout = run.rollout
    last = rollout.num_steps - (1 if rule in ENDS_WITHOUT_NOISE else 0)
    if last < 1:
        raise ValueError(
            f"rollout.num_steps: given 1, but step_rule {rule} draws no noise in the last step; set num_steps to 2 or "
            "more, or another step_rule"
        )
    if rollout.window:
        low, high = (round(share * rollout.num_steps) for share in rollout.window.range)
        held = max(0, min(high, last) - low)
        if held < rollout.window.size:
            raise ValueError(
                f"rollout.window.size: given {rollout.window.size}, but window.range {list(rollout.window.range)} of "
                f"num_steps {rollout.num_steps} holds {held} stochastic steps of {rule}; widen the range or lower the "
                "size"
            )
        if rollout.window.position != "sliding" and (rollout.window.stride, rollout.window.batches_per_position) != (
            1,
            25,
        ):
            raise ValueError(
                f"rollout.window: stride and batches_per_position are of a sliding window, but position is "
                f"{rollout.window.position!r}; set position=sliding, or leave them out"
            )
        if algorithm.timestep_fraction < 1:
            raise ValueError(
                f"algorithm.timestep_fraction: given {algorithm.timestep_fraction} beside rollout.window; the window "
                "already says which steps are trained; leave timestep_fraction at 1.0"
            )
    elif rollout.solver != "first_order":
        raise ValueError(
            f"rollout.solver: given {rollout.solver!r}, but without a window no two steps on the ODE follow each "
            "other; set rollout.window, or leave solver out"
        )


def _published_modes(run: RunConfig, rule: str, algorithm: GrpoConfig) -> None:
    """What reproduces a published code is asked for beside what that code has."""
    if algorithm.kl_mode == "published" and not algorithm.kl_weight:
        raise ValueError(
            "algorithm.kl_mode: given 'published', but algorithm.kl_weight is 0: there is no KL; set kl_weight "
            "(Flow-GRPO: 0.04), or leave kl_mode out"
        )
    if algorithm.kl_mode == "published" and FACTS[run.model.family].prediction != "flow":
        raise ValueError(
            f"algorithm.kl_mode: given 'published', which is Flow-GRPO's; {run.model.family} is no flow model; set "
            "kl_mode=exact"
        )
    if algorithm.kl_mode == "published" and rule != "flow_sde":
        raise ValueError(
            f"algorithm.kl_mode: given 'published', which is Flow-GRPO's, of the std of flow_sde, but "
            f"rollout.step_rule is {rule}; set kl_mode=exact, or step_rule=flow_sde"
        )
    if algorithm.log_prob_mode == "published" and rule != "cps":
        raise ValueError(
            f"algorithm.log_prob_mode: given 'published', which is that of the cps code, but rollout.step_rule is "
            f"{rule}; set log_prob_mode=exact, or step_rule=cps"
        )
    if algorithm.log_prob_mode == "published" and algorithm.guard:
        raise ValueError(
            "algorithm.guard: given true beside log_prob_mode 'published', which has no std to correct for; set "
            "log_prob_mode=exact"
        )


def _deterministic(run: RunConfig) -> None:
    name, rollout = run.algorithm.name, run.rollout
    if name == "sft":  # a run file with another algorithm in it stays one of its rollouts
        return
    if run.optimizer.steps_per_forward is not None:
        raise ValueError(
            f"optimizer.steps_per_forward: given {run.optimizer.steps_per_forward}, but {name} trains no solver steps; "
            "leave it out"
        )
    offline = takes_given_pairs(run.algorithm)
    why = "algorithm.pairs=offline samples no images" if offline else f"{name} samples by the ODE"
    for key in ("noise_level", "eta", "step_rule"):
        if getattr(rollout, key) is not None:
            raise ValueError(f"rollout.{key}: given {getattr(rollout, key)!r}, but {why}; leave {key} out")
    if run.rollout.window is not None:
        untrained = "" if offline else " and trains no steps of it"
        raise ValueError(f"rollout.window: given, but {why}{untrained}; leave it out")
    if offline and rollout.solver != "first_order":
        raise ValueError(f"rollout.solver: given {rollout.solver!r}, but {why}; leave it out")
    if run.rollout.shared_noise:
        alike = "" if offline else ": all images of a group would be one"
        raise ValueError(f"rollout.shared_noise: given true, but {why}{alike}; set shared_noise=false")


def _objective(run: RunConfig) -> None:
    algorithm = run.algorithm
    assert isinstance(algorithm, Objective)
    key = "shifted_times" if isinstance(algorithm, SftConfig) else "warmup_shifted_times"
    if not getattr(algorithm, key) and FACTS[run.model.family].prediction == "epsilon":
        raise ValueError(
            f"algorithm.{key}: given false, but {run.model.family} samples without a shift; leave {key} out"
        )
    if algorithm.caption_dropout and not FACTS[run.model.family].doubles_for_guidance:
        raise ValueError(
            f"algorithm.caption_dropout: given {algorithm.caption_dropout}, but {run.model.family} has no "
            "classifier-free guidance, which would need a prediction without a caption; leave it out"
        )
    if algorithm.region == "all" and algorithm.region_dilation:
        raise ValueError(
            f"algorithm.region_dilation: given {algorithm.region_dilation}, but algorithm.region is 'all'; set "
            "region=mask, or region_dilation=0"
        )
    if algorithm.seam_weight != 1 and not algorithm.region_dilation:
        raise ValueError(
            f"algorithm.seam_weight: given {algorithm.seam_weight}, but it weighs the cells that region_dilation adds, "
            "and that is 0; set region_dilation, or seam_weight=1"
        )
    if takes_given_pairs(algorithm):
        if run.data.format != "manifest":
            raise ValueError(
                f"data.format: given {run.data.format!r}, but algorithm.pairs=offline takes win_path and lose_path "
                "of a manifest; set data.format=manifest, or algorithm.pairs=online"
            )
        unread = {
            "rollout_policy": "current",
            "resample_rounds": 0,
            "inner_epochs": 1,
            "combine": "normalize_then_sum",
        }
        for key, default in unread.items():
            if getattr(algorithm, key) != default:
                raise ValueError(
                    f"algorithm.{key}: given {getattr(algorithm, key)!r}, but algorithm.pairs=offline samples no "
                    f"images; leave {key} out"
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
    if run.optimizer.moments == "int8":
        raise ValueError(
            f"optimizer.moments: given 'int8' beside training.sharding={training.sharding}, which shards them already, "
            "in fp32; set moments=fp32"
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
