"""Checkpoints of a run of vlm_grpo: the trainer's files in the layout of every run.

checkpoints/step-000040/
    weights/      an adapter in PEFT's format, or the text encoder in transformers' format, with its processor
    optimizer.pt  scheduler.pt  rng_state.pth  trainer_state.json  [entropy_ctrl_state.json]      the trainer's
    global_step40/  latest        DeepSpeed's in place of optimizer.pt: a file for each process
    state.json    the run file and the reward statistics
    complete.json written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from retouch.config import RunConfig, dump_run
from retouch.engine import CheckpointError
from retouch.engine.checkpoint import require_finite
from retouch.engine.saved import declare_complete, drop_unfinished, prune, put_in_place
from retouch.families.loading import ModelFilesError, load_component

_STATE = ("trainer_state.json", "entropy_ctrl_state.json", "latest")
"""Files of the trainer and DeepSpeed that stay where they were written, in addition to *.pt and *.pth."""

_DROPPED = ("training_args.bin", "README.md", "zero_to_fp32.py", "zero_to_torch.py")
"""Files of the trainer that are deleted: its arguments as a pickle, a model card, and DeepSpeed's programs that gather
weights, which weights/ holds already."""


def require_same_engine(folder: Path, stage: int | None, processes: int) -> None:
    """Reject a checkpoint whose optimizer state another engine wrote: DeepSpeed saves a piece for each process, which
    only the same ZeRO stage on as many processes reads.

    Args:
        stage: of ZeRO; None without DeepSpeed.

    Raises:
        CheckpointError: written by another engine, stage or number of processes.
    """
    pieces = list(folder.glob("global_step*/*_optim_states.pt"))
    whole = list(folder.glob("global_step*/mp_rank_00_model_states.pt"))  # the weights, which ZeRO-3 saves in pieces
    before = f"DeepSpeed ZeRO-{2 if whole else 3} on {len(pieces)} processes" if pieces else "no DeepSpeed"
    kind = 2 if stage == 1 else stage  # both write the same files
    now = "no DeepSpeed" if stage is None else f"DeepSpeed ZeRO-{kind} on {processes} processes"
    if before != now:
        raise CheckpointError(
            f"{folder}: was written under {before}, but this is {now}, which cannot read its optimizer state; launch "
            "as before, or start a new run under another name=..."
        )


def require_between_cycles(folder: Path, step: int, cycle: int) -> None:
    """Reject a checkpoint that lies inside a cycle of the run file, whose completions would count as generated: later
    checkpoints would lose those that are still to be trained on.

    Args:
        cycle: optimizer steps of one.

    Raises:
        CheckpointError: it does.
    """
    if step % cycle:
        raise CheckpointError(
            f"{folder}: was written at step {step}, but the run file generates completions every {cycle} optimizer "
            "steps (steps_per_generation x num_iterations / gradient_accumulation_steps); set them back, resume from a "
            f"checkpoint at a multiple of {cycle}, or start a new run under another name=..."
        )


def finish_checkpoint(writing: Path, step: int, config: RunConfig, rewards: Mapping[str, Any], *, pinned: bool) -> Path:
    """Turn what the trainer wrote below `writing` into a checkpoint, by one rename; delete old ones beyond
    `training.keep_checkpoints`.

    Args:
        rewards: state of the reward table.
    """
    root, [written] = writing.parent, list(writing.glob("checkpoint-*"))
    weights = written / "weights"
    weights.mkdir()
    for file in list(written.iterdir()):
        if file.name in _DROPPED:
            file.unlink()
        elif file.is_file() and file.name not in _STATE and not file.name.endswith((".pt", ".pth")):
            file.rename(weights / file.name)
    sort_modules(weights / "adapter_config.json")
    state = {"progress": {"step": step, "phase": "rl"}, "config": dump_run(config), "rewards": dict(rewards)}
    (written / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    declare_complete(written, step, pinned=pinned)
    folder = root / f"step-{step:06d}"
    put_in_place(written, folder)
    drop_unfinished(root)
    prune(root, config.training.keep_checkpoints)
    return folder


def sort_modules(file: Path) -> None:
    """Give PEFT's sets of module names one order: equal runs then write equal files."""
    if file.is_file():
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        names = ("target_modules", "exclude_modules", "modules_to_save")
        config |= {name: sorted(config[name]) for name in names if isinstance(config.get(name), list)}
        file.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


def load_weights(model: Any, folder: Path) -> None:
    """Copy weights of a checkpoint into a policy; names and shapes must match exactly.

    Raises:
        CheckpointError: other names or shapes, NaN or Inf, or no files.
    """
    saved = _saved_weights(model, folder)
    require_finite(saved, str(folder))
    own = get_peft_model_state_dict(model) if isinstance(model, PeftModel) else model.state_dict()
    for name, missing in ((folder, own.keys() - saved.keys()), ("the policy", saved.keys() - own.keys())):
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} weights are not in {name}, for example {min(missing)}; was algorithm.trl "
                "changed since (use_peft, lora_target_modules)?"
            )
    for name, tensor in own.items():
        if tensor.shape != saved[name].shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(saved[name].shape)}, in the policy {list(tensor.shape)}; was "
                "algorithm.trl.lora_r changed since?"
            )
        tensor.data.copy_(saved[name])


def saved_dtype(folder: Path) -> torch.dtype | None:
    """Dtype of the first weight in a folder; None where none can be read, which loading them reports."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                return next((tensors.get_tensor(name).dtype for name in tensors.keys()), None)  # noqa: SIM118
        except (OSError, SafetensorError):
            return None
    return None


def _saved_weights(model: Any, folder: Path) -> dict[str, Tensor]:
    """Tensors of a folder; those of whole models under their names in memory, because transformers saves them under
    others.

    Raises:
        CheckpointError: no files, or files of another model.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: holds no *.safetensors; give a complete checkpoint")
    if isinstance(model, PeftModel):
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"{folder}: holds an adapter; set algorithm.trl.use_peft=true")
    try:
        return load_component(type(model), str(folder.parent), folder.name, model.dtype).state_dict()
    except ModelFilesError as error:
        raise CheckpointError(str(error)) from None
