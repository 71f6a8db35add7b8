"""Checkpoints of a run of vlm_grpo: what the trainer writes, in the layout of every run.

checkpoints/step-000040/
    weights/      an adapter as PEFT takes it, or the text encoder as transformers takes it, with its processor
    optimizer.pt  scheduler.pt  rng_state.pth  trainer_state.json  [entropy_ctrl_state.json]      the trainer's
    global_step40/  latest        DeepSpeed's in place of optimizer.pt: what each process holds
    state.json    the run file, and what the rewards counted
    complete.json written last
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from retouch.config import RunConfig, dump_run
from retouch.engine import CheckpointError
from retouch.engine.checkpoint import require_finite
from retouch.engine.saved import (
    complete_checkpoints,
    declare_complete,
    drop_unfinished,
    prune,
    put_in_place,
    read_complete,
    read_state,
    require_sound,
)
from retouch.families.loading import (
    ModelFilesError,
    load_component,
)

_STATE = ("trainer_state.json", "entropy_ctrl_state.json", "latest")
"""Of the trainer's and DeepSpeed's files, those that are read where they were written, beside every *.pt and *.pth."""

_DROPPED = ("training_args.bin", "README.md", "zero_to_fp32.py", "zero_to_torch.py")
"""What the trainer writes besides: its arguments as a pickle, which nobody needs, a page about itself, and programs of
DeepSpeed's that would gather weights, which are there already."""


def newest_or(config: RunConfig, root: Path) -> Path | None:
    """The checkpoint that `resume` means; None for a new run.

    Raises:
        CheckpointError: incomplete, or of a run of another kind.
    """
    if config.resume is None:
        return None
    found = complete_checkpoints(root)
    folder = (found[-1] if found else None) if config.resume == "auto" else Path(config.resume).expanduser()
    if folder is not None:
        _may_go_on(folder, config)
    return folder


def may_go_on_with(folder: Path, stage: int | None, processes: int) -> None:
    """DeepSpeed's state is in pieces, one a process; nothing but the same ZeRO stage on as many processes reads it.

    Args:
        stage: of ZeRO; None without DeepSpeed.

    Raises:
        CheckpointError: written otherwise.
    """
    pieces = list(folder.glob("global_step*/*_optim_states.pt"))
    whole = list(folder.glob("global_step*/mp_rank_00_model_states.pt"))  # the weights, which ZeRO-3 has in pieces
    before = f"DeepSpeed ZeRO-{2 if whole else 3} on {len(pieces)} processes" if pieces else "no DeepSpeed"
    kind = 2 if stage == 1 else stage  # whose files are alike
    now = "no DeepSpeed" if stage is None else f"DeepSpeed ZeRO-{kind} on {processes} processes"
    if before != now:
        raise CheckpointError(
            f"{folder}: was written under {before}, this is {now}, which cannot read its optimizer state; launch as "
            "then, or start a new run under another name=..."
        )


def read_step(folder: Path) -> int:
    """Optimizer steps taken."""
    return int(read_complete(folder)["step"])


def rewards_state(folder: Path) -> dict[str, Any] | None:
    """What the rewards had counted; None in a checkpoint that does not say."""
    return read_state(folder).get("rewards")


def finish_checkpoint(writing: Path, step: int, config: RunConfig, rewards: Mapping[str, Any], *, pinned: bool) -> Path:
    """Turn what the trainer wrote below `writing` into a checkpoint, by one rename; drop old ones beyond
    `training.keep_checkpoints`.

    Args:
        rewards: their state.
    """
    root, [written] = writing.parent, list(writing.glob("checkpoint-*"))
    weights = written / "weights"
    weights.mkdir()
    for file in list(written.iterdir()):
        if file.name in _DROPPED:
            file.unlink()
        elif file.is_file() and file.name not in _STATE and not file.name.endswith((".pt", ".pth")):
            file.rename(weights / file.name)
    state = {"progress": {"step": step, "phase": "rl"}, "config": dump_run(config), "rewards": dict(rewards)}
    (written / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
    declare_complete(written, step, pinned=pinned)
    folder = root / f"step-{step:06d}"
    put_in_place(written, folder)
    drop_unfinished(root)
    prune(root, config.training.keep_checkpoints)
    return folder


def load_weights(model: Any, folder: Path) -> None:
    """Weights of a checkpoint into a policy, exactly: every name of one is in the other.

    Raises:
        CheckpointError: other names or shapes, or nothing there.
    """
    tensors = _saved_weights(model, folder)
    require_finite(tensors, str(folder))
    own = _own_weights(model)
    for name, missing in ((folder, own.keys() - tensors.keys()), ("the policy", tensors.keys() - own.keys())):
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} weights are not in {name}, {min(missing)} among them; was algorithm.trl "
                "changed since (use_peft, lora_target_modules)?"
            )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{folder}: {name} is {list(tensors[name].shape)}, of the policy {list(tensor.shape)}; was "
                "algorithm.trl.lora_r changed since?"
            )
        tensor.copy_(tensors[name])


def _saved_weights(model: Any, folder: Path) -> dict[str, Tensor]:
    """What the files hold; whole models by the names that they have in memory, which transformers saves under others.

    Raises:
        CheckpointError: nothing there, or files of another model.
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


def _own_weights(model: Any) -> dict[str, Tensor]:
    """What a checkpoint holds of a policy; the tensors are the policy's own."""
    if isinstance(model, PeftModel):
        return {name: tensor.data for name, tensor in get_peft_model_state_dict(model).items()}
    return {name: tensor.data for name, tensor in model.state_dict().items()}


def _may_go_on(folder: Path, config: RunConfig) -> None:
    read_complete(folder)
    state = read_state(folder)
    require_sound(state, folder)
    before = yaml.safe_load(state["config"])
    for section, name in (("model", "family"), ("algorithm", "name")):
        kept, given = before[section][name], getattr(getattr(config, section), name)
        if kept != given:
            raise CheckpointError(
                f"{folder}: was written under {section}.{name}={kept}, the run file says {given}; set it back, or "
                "start a new run under another name=..."
            )
