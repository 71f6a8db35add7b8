"""TRL's own options in a run file (`algorithm.trl`), checked against the installed package without importing it.

Importing trl imports torch, and `retouch check` must answer in a second. The names of the options are read from the
class bodies in its source instead.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from retouch.config.errors import nearest

MOVED = {
    "max_steps": ("training", "max_steps"),
    "save_steps": ("training", "checkpoint_every"),
    "save_total_limit": ("training", "keep_checkpoints"),
    "eval_steps": ("training", "eval_every"),
    "gradient_checkpointing": ("training", "gradient_checkpointing"),
    "seed": ("", "seed"),
}
"""TRL's name -> section and key of the run file with the same meaning; an option given under `trl` is moved there."""

_KEY_FOR = {
    "logging.dir and name": "output_dir",
    "name": "run_name",
    "logging.dir": "logging_dir",
    "logging.sinks": "report_to",
    "nothing: every step is logged": "logging_steps logging_strategy",
    "resume": "resume_from_checkpoint",
    "rewards.NAME.weight": "reward_weights",
    "training.eval_every": "eval_strategy do_eval",
    "nothing: a run is evaluated at its start": "eval_on_start",
    "nothing": "do_train",
    "retouch eval": "do_predict",
    "training.checkpoint_every": "save_strategy",
    "nothing: retouch eval compares checkpoints": "load_best_model_at_end metric_for_best_model greater_is_better",
    "nothing: checkpoints hold what a resumed run needs": "save_only_model",
    "nothing: a resumed run continues where it was in its data": "ignore_data_skip",
    "algorithm.trl.per_device_train_batch_size": "auto_find_batch_size",
    "nothing: losses are logged as they are": "logging_nan_inf_filter",
    "nothing: launch with configs/accelerate/zero3.yaml": "fsdp fsdp_config",
    "nothing: runs stay on the disk": "push_to_hub",
    "training.mixed_precision": "bf16 fp16",
    "seed": "data_seed",
    "training.deterministic": "full_determinism",
    "nothing: every pass over the data has its own order from the seed": "shuffle_dataset",
    "training.max_steps": "num_train_epochs",
    "nothing: rewards receive every column": "remove_unused_columns",
    "model": "model_init_kwargs",
    "model.path": "model_name_or_path model_revision",
    "model.dtype": "dtype load_in_8bit load_in_4bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant",
    "nothing: transformers chooses it": "attn_implementation",
    "nothing: it is a causal language model": "lora_task_type",
    "logging.rollout_images_every": "log_completions",
}

REFUSED = {name: key for key, names in _KEY_FOR.items() for name in names.split()}
"""TRL's names for settings that have another place in a run file -> that place."""

COUNTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_generations",
    "num_iterations",
    "max_completion_length",
)
"""Options that derived numbers are computed from; whole numbers above 0."""

DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_completion_length": 512,
}
"""TRL's defaults of COUNTS, where it has one; a test compares them with the installed package."""

_Test = Callable[[float], bool]

_RANGES: Mapping[str, tuple[_Test, str]] = {
    "a number above 0": (lambda x: x > 0, "temperature repetition_penalty delta"),
    "a number, 0 or more": (
        lambda x: x >= 0,
        "learning_rate warmup_steps weight_decay max_grad_norm adam_epsilon beta epsilon epsilon_high",
    ),
    "a number above 0, at most 1": (lambda x: 0 < x <= 1, "top_p vllm_gpu_memory_utilization"),
    "a number from 0 to 1": (lambda x: 0 <= x <= 1, "min_p"),
    "a number from 0 to below 1": (lambda x: 0 <= x < 1, "adam_beta1 adam_beta2 lora_dropout"),
    "a whole number above 0": (lambda x: x >= 1, "num_generations_eval lora_r lora_alpha " + " ".join(COUNTS)),
    "a whole number, 0 for every token": (lambda x: x >= 0, "top_k"),
}

NUMBERS: dict[str, tuple[str, _Test]] = {
    name: (expected, fits) for expected, (fits, names) in _RANGES.items() for name in names.split()
}
"""Options whose values are checked -> what is expected, and whether a number fits."""

MAY_BE_NULL = frozenset({"min_p", "delta", "epsilon_high", "num_generations_eval"})
"""Options of NUMBERS for which TRL accepts None."""

SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
}
"""How TRL samples completions, with its defaults; a test compares them with the installed package."""


@lru_cache
def grpo_fields() -> frozenset[str]:
    """Options of the installed trl's GRPOConfig; empty where trl is not installed."""
    return (
        _fields("trl", "trainer/grpo_config.py", "GRPOConfig")
        | _fields("trl", "trainer/base_config.py", "_BaseConfig")
        | _fields("transformers", "training_args.py", "TrainingArguments")
        if find_spec("trl")
        else frozenset()
    )


@lru_cache
def model_fields() -> frozenset[str]:
    """Options of the installed trl's ModelConfig, of which `get_peft_config` reads those of the adapter."""
    return _fields("trl", "trainer/model_config.py", "ModelConfig") if find_spec("trl") else frozenset()


def moved(trl: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of TRL that have a key of their own in the run file, moved there -> (trl, run).

    Raises:
        ValueError: both are given and differ.
    """
    from retouch.config.presets import section_of

    rest, result = dict(trl), dict(run)
    for name, (section, key) in MOVED.items():
        if name not in rest:
            continue
        value = rest.pop(name)
        own = section_of(result, section) if section else result
        if own.get(key, value) != value:
            raise ValueError(
                f"algorithm.trl.{name}: given {value!r}, but {f'{section}.{key}'.removeprefix('.')} is {own[key]!r}, "
                "which has the same meaning; set one"
            )
        own[key] = value
        result = {**result, section: own} if section else own
    return rest, result


def check_names(trl: Mapping[str, Any]) -> None:
    """Reject options that TRL does not have, that have another place in a run file, and numbers out of range.

    Raises:
        ValueError: with the nearest name, the key to set instead, or the values that may be set.
    """
    known = grpo_fields() | model_fields()
    for name, value in trl.items():
        if name in REFUSED:
            raise ValueError(f"{name}: given {value!r}, which has another place in a run file; set {REFUSED[name]}")
        if known and name not in known:
            raise ValueError(f"{name}: unknown option of TRL; {nearest(name, known - REFUSED.keys())}")
        if name in NUMBERS and (value is not None or name not in MAY_BE_NULL):
            expected, fits = NUMBERS[name]
            number: Any = value
            kinds = (int,) if expected.startswith("a whole number") else (int, float)  # isinstance would accept a bool
            if type(number) not in kinds or not math.isfinite(number) or not fits(number):
                raise ValueError(f"{name}: given {value!r}; set {expected}")


def _fields(package: str, file: str, name: str) -> frozenset[str]:
    """Annotated names in the body of a dataclass of an installed package, which is not imported."""
    # `retouch check` needs the names, and importing TRL would import torch
    spec = find_spec(package)
    path = Path(next(iter((spec and spec.submodule_search_locations) or [""]))) / file
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and not field.target.id.startswith("_")
                and "ClassVar" not in ast.unparse(field.annotation)
            )
    raise ValueError(f"algorithm.trl: no class {name} in {path}; install trl 1.16, which retouch is written for")
