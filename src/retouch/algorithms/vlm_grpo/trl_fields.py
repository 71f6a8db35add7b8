"""TRL's own options in a run file: `algorithm.trl`, checked against the installed package without importing it.

Importing trl imports torch, and `retouch check` must answer in a second. The names of its options are read from the
class bodies of its source instead.
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

_GRPO_CLASSES = {
    "trl": {"trainer/grpo_config.py": "GRPOConfig", "trainer/base_config.py": "_BaseConfig"},
    "transformers": {"training_args.py": "TrainingArguments"},
}
"""Package -> file -> class whose fields are options of GRPO."""

_MODEL_CLASSES = {"trl": {"trainer/model_config.py": "ModelConfig"}}
"""The same for what `get_peft_config` takes."""

MOVED = {
    "max_steps": ("training", "max_steps"),
    "save_steps": ("training", "checkpoint_every"),
    "save_total_limit": ("training", "keep_checkpoints"),
    "eval_steps": ("training", "eval_every"),
    "gradient_checkpointing": ("training", "gradient_checkpointing"),
    "seed": ("", "seed"),
}
"""TRL's name -> section and key of the run file that says the same; given under `trl`, it is moved there."""

REFUSED = {
    "output_dir": "logging.dir and name",
    "run_name": "name",
    "logging_dir": "logging.dir",
    "report_to": "logging.sinks",
    "logging_steps": "nothing: every step is logged",
    "logging_strategy": "nothing: every step is logged",
    "resume_from_checkpoint": "resume",
    "reward_weights": "rewards.NAME.weight",
    "eval_strategy": "training.eval_every",
    "eval_on_start": "nothing: a run is evaluated at its start",
    "do_train": "nothing",
    "do_eval": "training.eval_every",
    "do_predict": "retouch eval",
    "save_strategy": "training.checkpoint_every",
    "load_best_model_at_end": "nothing: retouch eval compares checkpoints",
    "metric_for_best_model": "nothing: retouch eval compares checkpoints",
    "greater_is_better": "nothing: retouch eval compares checkpoints",
    "save_only_model": "nothing: checkpoints hold what a resumed run needs",
    "ignore_data_skip": "nothing: a resumed run goes on where it was in its data",
    "auto_find_batch_size": "algorithm.trl.per_device_train_batch_size",
    "logging_nan_inf_filter": "nothing: losses are logged as they are",
    "fsdp": "nothing: launch with configs/accelerate/zero3.yaml",
    "fsdp_config": "nothing: launch with configs/accelerate/zero3.yaml",
    "push_to_hub": "nothing: runs stay on the disk",
    "bf16": "training.mixed_precision",
    "fp16": "training.mixed_precision",
    "data_seed": "seed",
    "full_determinism": "training.deterministic",
    "shuffle_dataset": "nothing: every pass has an order of its own from the seed",
    "num_train_epochs": "training.max_steps",
    "remove_unused_columns": "nothing: rewards see every column",
    "model_init_kwargs": "model",
    "model_name_or_path": "model.path",
    "dtype": "model.dtype",
    "load_in_8bit": "model.dtype",
    "load_in_4bit": "model.dtype",
    "bnb_4bit_quant_type": "model.dtype",
    "bnb_4bit_quant_storage": "model.dtype",
    "use_bnb_nested_quant": "model.dtype",
    "model_revision": "model.path",
    "attn_implementation": "nothing: transformers chooses it",
    "lora_task_type": "nothing: it is a causal language model",
    "log_completions": "logging.rollout_images_every",
}
"""Names that have a place of their own here, and which."""

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
"""TRL's own, of those of COUNTS that have one; a test compares them with the installed package."""

_Test = Callable[[float], bool]

_RANGES: tuple[tuple[str, _Test, tuple[str, ...]], ...] = (
    ("a number above 0", lambda x: x > 0, ("temperature", "repetition_penalty", "delta")),
    (
        "a number, 0 or more",
        lambda x: x >= 0,
        (
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "adam_epsilon",
            "beta",
            "epsilon",
            "epsilon_high",
        ),
    ),
    ("a number above 0, at most 1", lambda x: 0 < x <= 1, ("top_p", "vllm_gpu_memory_utilization")),
    ("a number from 0 to 1", lambda x: 0 <= x <= 1, ("min_p",)),
    ("a number from 0 to below 1", lambda x: 0 <= x < 1, ("adam_beta1", "adam_beta2", "lora_dropout")),
    ("a whole number above 0", lambda x: x >= 1, ("num_generations_eval", "lora_r", "lora_alpha")),
    ("a whole number, 0 for every token", lambda x: x >= 0, ("top_k",)),
)

NUMBERS: dict[str, tuple[str, _Test]] = {name: (says, fits) for says, fits, names in _RANGES for name in names}
"""Options whose values are checked, beside the counts -> what to set, and whether a number is that."""

MAY_BE_NULL = frozenset({"min_p", "delta", "epsilon_high", "num_generations_eval"})
"""Of them those that TRL also takes None for."""

DRAWING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "cache_implementation": None,
}
"""How TRL draws completions, with its defaults; a test compares them, too."""


@lru_cache
def grpo_fields() -> frozenset[str]:
    """Options of the installed trl's GRPOConfig; empty where it is not installed."""
    return _fields(_GRPO_CLASSES)


@lru_cache
def model_fields() -> frozenset[str]:
    """Options of the installed trl's ModelConfig, of which `get_peft_config` reads the adapter."""
    return _fields(_MODEL_CLASSES)


def moved(trl: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """TRL's names for what the run file has keys of its own for, moved there -> (trl, run).

    Raises:
        ValueError: both are given and differ.
    """
    rest, result = dict(trl), dict(run)
    for name, (section, key) in MOVED.items():
        if name not in rest:
            continue
        value = rest.pop(name)
        own: Any = result.get(section) if section else result
        own = dict(own) if isinstance(own, Mapping) else {}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if own.get(key, value) != value:
            dotted = f"{section}.{key}" if section else key
            raise ValueError(
                f"algorithm.trl.{name}: given {value!r}, but {dotted} is {own[key]!r}, which says the same; set one"
            )
        own[key] = value
        if section:
            result[section] = own
        else:
            result = own
    return rest, result


def check_names(trl: Mapping[str, Any]) -> None:
    """Refuse what TRL does not know, what has a place of its own here, and numbers that are none or out of range.

    Raises:
        ValueError: with the nearest name, the key to set instead, or what may be set.
    """
    known = grpo_fields() | model_fields()
    for name, value in trl.items():
        if name in REFUSED:
            raise ValueError(f"{name}: given {value!r}; a run file says it elsewhere: set {REFUSED[name]}")
        if known and name not in known:
            raise ValueError(f"{name}: unknown option of TRL; {nearest(name, known - REFUSED.keys())}")
        if name in COUNTS and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: given {value!r}; set a whole number above 0")
        if name in NUMBERS and (value is not None or name not in MAY_BE_NULL):
            says, fits = NUMBERS[name]
            number: Any = value
            kinds = (int,) if says.startswith("a whole number") else (int, float)  # a bool is an int to isinstance
            if type(number) not in kinds or not math.isfinite(number) or not fits(number):
                raise ValueError(f"{name}: given {value!r}; set {says}")


def _fields(classes: Mapping[str, Mapping[str, str]]) -> frozenset[str]:
    names: set[str] = set()
    for package, files in classes.items():
        spec = find_spec(package)  # of a top-level package: finds it without importing it
        if spec is None or not spec.submodule_search_locations:
            return frozenset()
        root = Path(next(iter(spec.submodule_search_locations)))
        for file, name in files.items():
            names |= _annotated(root / file, name)
    return frozenset(names)


def _annotated(path: Path, name: str) -> set[str]:
    """Annotated names in the body of a dataclass."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and not field.target.id.startswith("_")
                and "ClassVar" not in ast.unparse(field.annotation)
            }
    raise ValueError(f"algorithm.trl: no class {name} in {path}; this trl is not one that retouch knows (1.16)")
