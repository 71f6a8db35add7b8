"""Flags of the usual fine-tuning scripts, typed after `retouch train`, and the line with keys that replaces them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from retouch.algorithms import ALGORITHMS
from retouch.families import FAMILIES
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

_FALSE = ("false", "False", "0", "no")


def answer(command: str, arguments: Sequence[str]) -> str | None:
    """The message for arguments with flags of other scripts, whose last part is the line to type; None without one.

    Args:
        command: train or check.
        arguments: words behind it.
    """
    given, words, unknown = _parsed(arguments)
    if not given:
        return None
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    file = files[0] if files else _run_file(given)
    typed, unread = _overrides(given, file, published=not files)
    line = shlex.join(["retouch", command, file, *typed, *(word for word in words if word not in files)])
    notes = [
        f"; without a key: {', '.join(unknown)}" if unknown else "",
        f"; {_algorithm(given)} does not read {', '.join(unread)}" if unread else "",
    ]
    return (
        f"--{next(iter(given))}: a flag of the fine-tuning scripts; expected keys of a run file (docs/coming-from.md "
        f"has the table{''.join(notes)}); type\n  {line}"
    )


def _parsed(arguments: Sequence[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """Known flags with their values, words that are no flags, and unknown flags."""
    given, words, unknown = dict[str, str](), list[str](), list[str]()
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        takes = left and not left[0].startswith("--") and "=" not in left[0]
        if not equals and takes and (name not in _SWITCHES or left[0].lower() in ("true", *_FALSE)):
            value = left.pop(0)
        if name in KEYS:
            given[name] = value or "true"
        else:
            unknown.append(f"--{name}")
    return given, words, unknown


def _algorithm(given: Mapping[str, str]) -> str:
    off = given.get("use_rl", "true" if "rl_method" in given else "false") in _FALSE
    return "sft" if off else given.get("rl_method", "grpo")


def _run_file(given: Mapping[str, str]) -> str:
    """The published file of the model, its trained part, its data, its rewards and its algorithm."""
    family = given.get("model_type", "flux")
    family = SHORT_NAMES.get(family, family)
    if family not in FAMILIES:
        return "RUN.yaml"
    algorithm, kind = _algorithm(given), ""
    if not {"siglip_path", "initial_ip_adapter_path"}.isdisjoint(given):
        judged = "vlm_weight" in given and (family, algorithm) == ("flux_fill", "grpo")
        kind = "_ip_vlm_ocr" if judged else "_ip"
    elif "train_data_json" in given and family == "flux_fill":
        kind = "_manifest"
    return f"configs/{family}{kind}_{algorithm}.yaml"


def _overrides(given: Mapping[str, str], file: str, *, published: bool) -> tuple[list[str], list[str]]:
    """key=value of the flags, and the flags that the algorithm does not read.

    Args:
        published: whether `file` was chosen by the flags.
    """
    algorithm = _algorithm(given)
    options = ALGORITHMS[algorithm].model_fields if algorithm in ALGORITHMS else {}
    typed, unread = list[str](), list[str]()
    if not published and not {"use_rl", "rl_method"}.isdisjoint(given):
        typed.append(f"algorithm.name={algorithm}")
    if not published and "model_type" in given:
        typed.append(f"model.family={SHORT_NAMES.get(given['model_type'], given['model_type'])}")
    for flag, value in given.items():
        section, _, key = KEYS[flag].partition(".")
        if section == "algorithm" and flag not in _CHOICE and options and key not in options:
            unread.append(f"--{flag}")
        else:
            typed += _typed(flag, value, file if published else "")
    return typed, unread


def _typed(flag: str, value: str, file: str) -> list[str]:
    """key=value of one flag.

    Args:
        file: the run file, if it is a published one.
    """
    key = KEYS[flag]
    if flag in _CHOICE:
        return ["ema=null"] if flag == "use_ema" and value in _FALSE else []
    if flag == "siglip_path":
        compared = file.endswith(("_ip_grpo.yaml", "_ip_nft.yaml"))  # its reward reads the same encoder
        return [f"{key}={value}", *([f"rewards.style.image_encoder={value}"] if compared else [])]
    if flag == "train_data_json":
        chosen = [] if "_manifest_" in file else ["data.format=manifest"]
        return [*chosen, f"{key}={value}", *(["data.reference=mask_box"] if "_ip_" in file else [])]
    if flag == "report_to":
        return [f"{key}=[{'' if value == 'none' else value}]"]
    if flag == "rl_per_prompt_stat_tracking":
        return [f"{key}={'batch' if value in _FALSE else 'group'}"]
    if flag == "resume_from_checkpoint":
        return [f"{key}={'auto' if value == 'latest' else value}"]
    if flag == "vlm_weight" and "_vlm_" not in file:
        return [f"rewards.vlm={{weight: {value}}}"]
    return [f"{key}={value}"]
