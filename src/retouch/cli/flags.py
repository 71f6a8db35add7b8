"""Flags of the usual fine-tuning scripts, typed after `retouch train`, and the line with keys that replaces them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from retouch.algorithms import ALGORITHMS
from retouch.config.load import read_yaml
from retouch.config.published import PREFIX, is_run_file, published_files
from retouch.families.base import SHORT_NAMES

KEYS: Mapping[str, str] = {
    "model_type": "model.family",
    "pretrained_model_name_or_path": "model.path",
    "siglip_path": "model.train.image_encoder",
    "initial_ip_adapter_path": "model.train.initial_adapter",
    "offload_text_encoder_two": "model.offload_text_encoders",
    "train_data_json": "data.path",
    "resolution": "data.resolution",
    "output_dir": "logging.dir",
    "report_to": "logging.sinks",
    "learning_rate": "optimizer.lr",
    "train_batch_size": "optimizer.batch_size_per_device",
    "gradient_accumulation_steps": "optimizer.gradient_accumulation",
    "gradient_checkpointing": "training.gradient_checkpointing",
    "mixed_precision": "training.mixed_precision",
    "max_train_steps": "training.max_steps",
    "checkpointing_steps": "training.checkpoint_every",
    "resume_from_checkpoint": "resume",
    "use_rl": "algorithm.name",
    "rl_method": "algorithm.name",
    "rl_warmup_steps": "algorithm.sft_steps",
    "rl_num_images_per_prompt": "rollout.group_size",
    "rl_num_batches_per_epoch": "rollout.batches_per_epoch",
    "rl_num_inference_steps": "rollout.num_steps",
    "rl_guidance_scale": "rollout.guidance_scale",
    "rl_timestep_fraction": "algorithm.timestep_fraction",
    "rl_num_inner_epochs": "algorithm.inner_epochs",
    "rl_adv_clip_max": "algorithm.advantage_clip",
    "rl_per_prompt_stat_tracking": "algorithm.baseline",
    "rl_grpo_clip_range": "algorithm.clip_range",
    "rl_kl_beta": "algorithm.kl_weight",
    "nft_beta": "algorithm.mix",
    "nft_adv_mode": "algorithm.mode",
    "nft_decay_type": "algorithm.old_policy",
    "use_ema": "ema",
    "ema_decay": "ema.decay",
    "ema_update_interval": "ema.update_interval",
    "ocr_weight": "rewards.ocr.weight",
    "vlm_weight": "rewards.vlm.weight",
}
"""Flag, with _ for -, -> key, as in docs/coming-from.md."""

_SWITCHES = (
    "use_rl", "use_ema", "offload_text_encoder_two", "gradient_checkpointing", "rl_per_prompt_stat_tracking",
)  # fmt: skip
"""Flags without a value."""

_CHOICE = ("model_type", "use_rl", "rl_method", "use_ema")
"""Flags that choose the run file, or what every published one has."""

_FALSE = ("false", "0", "no")

_SWITCHED = ("sft", "grpo", "ppo", "dpo", "nft")
"""Algorithms that `algorithm.name` alone makes of a file of GRPO."""


def answer(command: str, arguments: Sequence[str]) -> str | None:
    """The message for arguments with flags of other scripts, whose last part is the line to type; None without one.

    Args:
        command: train or check.
        arguments: words behind it.
    """
    if not _parsed(arguments)[0]:  # the options of a command take a tenth of a second to read
        return None
    own, others = _without_own(arguments, _own_options(command))
    given, words, unknown = _parsed(others)
    files = [word for word in words if is_run_file(word)]
    kind = "" if files else _kind(given)
    named = _algorithm(given) if _algorithm(given) in published_algorithms(kind) else "grpo"
    file = files[0] if files else f"{PREFIX}{kind}_{named}" if kind else "RUN.yaml"
    typed, unread = _overrides(given, kind, named)
    # the published files have that section, and --ema_decay makes one
    own_ema = not kind and given.get("use_ema", "false") not in _FALSE and "ema_decay" not in given
    line = shlex.join(["retouch", command, file, *typed, *(word for word in words if word not in files), *own])
    notes = [
        f"; without a key: {', '.join(unknown)}" if unknown else "",
        f"; {_algorithm(given)} does not read {', '.join(unread)}" if unread else "",
        f"; --use_ema is the section ema of {file}; where it has none, add ema.decay=0.999" if own_ema else "",
    ]
    return (
        f"--{next(iter(given))}: a flag of the fine-tuning scripts; expected keys of a run file (docs/coming-from.md "
        f"has the table{''.join(notes)}); type\n  {line}"
    )


def _own_options(command: str) -> dict[str, bool]:
    """The options of a command, and whether a value follows."""
    from retouch.cli.runs import app

    group: Any = typer.main.get_command(app)
    options = [one for one in group.commands[command].params if one.param_type_name == "option"]
    return {name: not option.is_flag for option in options for name in option.opts}


def published_algorithms(kind: str) -> list[str]:
    """Algorithms that the published files of a kind are of: the ends of their names."""
    return [name for name in ALGORITHMS if f"{kind}_{name}" in published_files()]


def _without_own(arguments: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The options that are the command's own, with their values, and the other words."""
    own, others = list[str](), list[str]()
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        (own if name in options else others).append(word)
        if options.get(name) and not equals and left:
            own.append(left.pop(0))
    return own, others


def _parsed(arguments: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Known flags with their values, words that are no flags, and unknown flags."""
    given, words, unknown = dict[str, str](), list[str](), list[str]()
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        # The flags are of other programs, in both of their forms: `--flag value`, and switches that may stand alone. An
        # override or a run file behind a flag is never its value.
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        takes = left and not left[0].startswith("--") and "=" not in left[0] and not is_run_file(left[0])
        if not equals and takes and (name not in _SWITCHES or left[0].lower() in ("true", *_FALSE)):
            value = left.pop(0)
        if name in KEYS:
            given[name] = (value.lower() if name in _SWITCHES else value) or "true"
        else:
            unknown.append(f"--{name}")
    return given, words, unknown


def _algorithm(given: Mapping[str, str]) -> str:
    off = given.get("use_rl", "true" if "rl_method" in given else "false") in _FALSE
    return "sft" if off else given.get("rl_method", "grpo")


def _kind(given: Mapping[str, str]) -> str:
    """Start of the names of the published files for the model, its trained part, its data and its rewards; "" if none
    of them becomes a run of the algorithm. Each has a file of GRPO."""
    family = given.get("model_type", "flux")
    family = SHORT_NAMES.get(family, family)
    algorithm, part = _algorithm(given), ""
    if not {"siglip_path", "initial_ip_adapter_path"}.isdisjoint(given):
        judged = "vlm_weight" in given and (family, algorithm) == ("flux_fill", "grpo")
        part = "_ip_vlm_ocr" if judged else "_ip"
    elif "train_data_json" in given and published_algorithms(f"{family}_manifest"):
        part = "_manifest"
    kind = f"{family}{part}"
    published = published_algorithms(kind)
    return kind if "grpo" in published and algorithm in (*published, *_SWITCHED) else ""


def _overrides(given: Mapping[str, str], kind: str, named: str) -> tuple[list[str], list[str]]:
    """key=value of the flags, and the flags that the algorithm does not read.

    Args:
        kind: of the published file; "" for another run file, whose model and algorithm are not known.
        named: algorithm of the published file.
    """
    algorithm = _algorithm(given)
    chosen = algorithm != named if kind else not {"use_rl", "rl_method"}.isdisjoint(given)
    # a run file of one's own has its own algorithm, unless a flag names one
    options = ALGORITHMS[algorithm].model_fields if algorithm in ALGORITHMS and (kind or chosen) else {}
    typed, unread = list[str](), list[str]()
    if chosen:
        typed.append(f"algorithm.name={algorithm}")
    if not kind and "model_type" in given:
        typed.append(f"model.family={SHORT_NAMES.get(given['model_type'], given['model_type'])}")
    for flag, value in given.items():
        section, _, key = KEYS[flag].partition(".")
        if section == "algorithm" and flag not in _CHOICE and options and key not in options:
            unread.append(f"--{flag}")
        else:
            typed += _typed(flag, value, kind, algorithm)
    return typed, unread


def _typed(flag: str, value: str, kind: str, algorithm: str) -> list[str]:
    """key=value of one flag.

    Args:
        kind: as of `_overrides`.
    """
    key = KEYS[flag]
    if flag in _CHOICE:
        return ["ema=null"] if flag == "use_ema" and value in _FALSE else []
    if flag == "siglip_path":
        compared = kind.endswith("_ip") and algorithm != "sft"  # its reward reads the same encoder
        return [f"{key}={value}", *([f"rewards.style.image_encoder={value}"] if compared else [])]
    if flag == "train_data_json":
        chosen = [] if kind.endswith("_manifest") else ["data.format=manifest"]
        return [*chosen, f"{key}={value}", *(["data.reference=mask_box"] if "_ip" in kind else [])]
    if flag == "report_to":
        return [f"{key}=[{'' if value == 'none' else value}]"]
    if flag == "rl_per_prompt_stat_tracking":
        return [f"{key}={'batch' if value in _FALSE else 'group'}"]
    if flag == "resume_from_checkpoint":
        return [f"{key}={'auto' if value == 'latest' else value}"]
    if flag in ("vlm_weight", "ocr_weight"):
        # a file of one's own is taken to read text and to ask no judge
        rewards = read_yaml(published_files()[f"{kind}_grpo"])["rewards"] if kind else {"ocr"}
        if key.split(".")[1] not in rewards:
            return [f"{key.removesuffix('.weight')}={{weight: {value}}}"]
    return [f"{key}={value}"]
