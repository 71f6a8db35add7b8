"""Memory of a run of vlm_grpo: what a process holds all the time, counted from shapes, and what each phase holds beside
it, from a run of the networks without data (`retouch.algorithms.vlm_grpo.footprint`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.algorithms.vlm_grpo.rules import derive_vlm
from retouch.config.needs import data_sections
from retouch.config.run import RunConfig
from retouch.doctor.launch import Launch
from retouch.doctor.memory import BYTES, Part
from retouch.families.facts import FACTS

BUCKET = 500_000_000
"""Weights whose gradients DeepSpeed exchanges at once, in a buffer of that size however few there are (its default)."""

LIVE = 1_000_000_000
"""Weights that ZeRO-3 keeps gathered while it trains, at most (its default)."""

ADAMW = ("adamw_torch", "adamw_torch_fused")

NOT_COUNTED = {
    "use_vllm": "what vLLM takes on the same device, which vllm_gpu_memory_utilization says",
    "optim": "its moments; those of AdamW in fp32 are counted",
    "use_liger_kernel": "what it saves",
    "cast_lm_head_to_fp32": "the head in fp32",
    "deepspeed": "what this file sets; --accelerate FILE is counted",
}
"""Options of TRL that change the memory in a way that is not known here -> what of it."""


@dataclass(frozen=True)
class Phase:
    """What a device holds beside the parts while the run `what`."""

    what: str
    bytes: int


@dataclass(frozen=True)
class Policy:
    """The text encoder as TRL trains it, and how it is held.

    Attributes:
        model: without data, with its adapter.
        trained: weights, and `frozen` the others, with the bytes of each.
        autocasts: forwards of training compute in a smaller precision than the weights have.
    """

    model: Any
    trained: int
    trained_bytes: int
    frozen: int
    frozen_bytes: int
    autocasts: bool

    @property
    def bytes(self) -> int:
        return self.trained * self.trained_bytes + self.frozen * self.frozen_bytes


def report_vlm(
    run: RunConfig, networks: Mapping[str, Any], dropped: int, launch: Launch, world_size: int
) -> dict[str, Any]:
    """`device_bytes` of the `parts` that are there all the time, the `phases` beside them, `peak_bytes` of the largest,
    and `notes` of what is not counted.

    Args:
        networks: component -> network on the meta device; they are changed.
        dropped: tokens of the chat before the user's.
    """
    from retouch.families.meta import without_data

    mode = without_data()
    policy = build_policy(run, networks["text_encoder"], mode, launch)
    painter = {name: network for name, network in networks.items() if name != "text_encoder"}
    parts = vlm_parts(run, policy, {name: _weights(network) for name, network in painter.items()}, launch, world_size)
    phases = vlm_phases(run, policy, painter, mode, dropped, launch, world_size)
    held = sum(part.bytes for part in parts if not part.waits)
    return {
        "device_bytes": held,
        "host_bytes": sum(part.bytes for part in parts if part.waits),
        "complete": True,
        "parts": [asdict(part) for part in parts],
        "phases": [asdict(phase) for phase in phases],
        "peak_bytes": held + max(phase.bytes for phase in phases),
        "notes": notes(run, launch),
    }


def build_policy(run: RunConfig, text_encoder: Any, mode: Any, launch: Launch) -> Policy:
    """As TRL makes it and DeepSpeed casts it."""
    import torch
    from peft import get_peft_model

    from retouch.algorithms.vlm_grpo.arguments import adapter_config
    from retouch.families.loading import DTYPES
    from retouch.families.meta import (
        on_meta,
        to_run_without_data,
    )

    algorithm, precision = _algorithm(run), run.training.mixed_precision
    model = text_encoder
    if algorithm.uses_adapter:
        model = on_meta(lambda: get_peft_model(text_encoder, adapter_config(algorithm)))
    elif not algorithm.train_vision_tower:
        model.model.visual.requires_grad_(False)
    trained = frozen = torch.float32
    if launch.stage and precision != "no":
        trained = frozen = DTYPES[precision]
    elif algorithm.uses_adapter:
        frozen = DTYPES[run.model.dtype]
    if run.training.gradient_checkpointing:
        model.activation_checkpointing_enable(algorithm.trl.get("gradient_checkpointing_kwargs"))
        if algorithm.uses_adapter:
            model.enable_input_require_grads()
    to_run_without_data(model, mode, lambda weight: trained if weight.requires_grad else frozen)
    learnt = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    rest = _weights(model) - learnt
    return Policy(model, learnt, trained.itemsize, rest, frozen.itemsize, precision != "no" and not launch.stage)


def vlm_parts(
    run: RunConfig, policy: Policy, painter: Mapping[str, int], launch: Launch, world_size: int = 1
) -> list[Part]:
    """What a process holds from its first update on.

    Args:
        painter: component -> weights of what draws, all of which every process has.
    """
    n, each, stage = policy.trained, policy.trained_bytes, launch.stage
    of_moments, of_gradients, of_weights = (world_size if stage >= least else 1 for least in (1, 2, 3))
    trained = "LoRA" if _algorithm(run).uses_adapter else "text encoder"
    parts = [
        Part(f"{trained}, trained", n, _share(each * n, of_weights), launch.weights_wait),
        Part("gradients", n, _share(each * n, of_gradients), launch.optimizer_waits),
        Part("optimizer", n, _share(8 * n, of_moments), launch.optimizer_waits),
    ]
    if stage:
        parts.append(Part("DeepSpeed's copy of the weights", n, _share(4 * n, of_moments), launch.optimizer_waits))
    if not stage and world_size > 1:
        parts.append(Part("exchange of gradients", n, each * n))
    elif stage == 3:  # under the others it is there while gradients are
        parts.append(Part("exchange of gradients", BUCKET, each * BUCKET))
    kept = _share(policy.frozen_bytes * policy.frozen, of_weights)
    parts.append(Part("text encoder, frozen", policy.frozen, kept, launch.weights_wait))
    away = _away(run)
    return [part for part in parts if part.weights] + [
        Part(f"{name}, frozen", count, BYTES[run.model.dtype] * count, name in away) for name, count in painter.items()
    ]


def vlm_phases(
    run: RunConfig,
    policy: Policy,
    painter: Mapping[str, Any],
    mode: Any,
    dropped: int,
    launch: Launch,
    world_size: int = 1,
) -> list[Phase]:
    """A generation and its training, with rows as long as `model.max_sequence_length` lets them be. Pictures are scored
    elsewhere.

    Args:
        painter: component -> network of what draws, on the meta device; changed.
        mode: what `policy` runs in.
    """
    from retouch.algorithms.vlm_grpo import footprint
    from retouch.families.loading import DTYPES
    from retouch.families.meta import to_run_without_data
    from retouch.families.vae import (
        frame_by_frame,
        save_memory,
    )

    algorithm, derived = _algorithm(run), derive_vlm(run, _algorithm(run), world_size)
    pictures = derived.images_per_generation_per_device
    answers = pictures // algorithm.images_per_completion
    limit: int = run.model.max_sequence_length  # type: ignore[union-attr]
    tokens = dropped + limit
    new = min(algorithm.count("max_completion_length"), tokens - 1)
    batch, at_once = algorithm.count("per_device_train_batch_size"), run.rollout.batch_size_per_device
    plain = footprint.autocast("no")
    trains = footprint.autocast(run.training.mixed_precision) if policy.autocasts else plain
    # accelerate has its autocast around the outermost module, which an adapter's `generate` goes past
    speaks = plain if algorithm.uses_adapter else trains
    for network in painter.values():
        to_run_without_data(network, mode, lambda weight: DTYPES[run.model.dtype])
    vae = painter["vae"]
    frame_by_frame(vae)
    save_memory(vae, run.model.model_copy(update={"offload_vae": False}), vae.device)
    whole = policy.bytes if launch.stage == 3 else 0
    brought = sum(BYTES[run.model.dtype] * _weights(painter[name]) for name in _away(run))
    states = answers * limit * painter["transformer"].config.joint_attention_dim * policy.frozen_bytes
    gathered = policy.trained_bytes * min(LIVE, policy.trained + policy.frozen) if launch.stage == 3 else 0
    buffer = policy.trained_bytes * BUCKET if launch.stage in (1, 2) else 0
    with mode:
        found = {
            "generates": whole + footprint.generating(policy.model, answers, tokens - new, new, speaks),
            "encodes what was said": whole + footprint.encoding(policy.model, min(at_once, answers), tokens),
            "draws": whole
            + brought
            + states
            + footprint.drawing(
                painter["transformer"],
                vae,
                min(at_once, pictures),
                max((data.size for data in data_sections(run).values()), key=math.prod),
                limit,
                sources=int(FACTS[run.model.family].edits),
                guided=derived.forwards_per_image > run.rollout.num_steps,
            ),
        }
        if algorithm.trl.get("beta"):
            found["asks the reference"] = gathered + footprint.comparing(policy.model, batch, tokens, new, trains)
        policy.model.train()
        found["trains"] = gathered + buffer + footprint.training(policy.model, batch, tokens, new, trains)
    return [Phase(what, count) for what, count in found.items()]


def notes(run: RunConfig, launch: Launch) -> list[str]:
    """What is not counted, a line each."""
    algorithm = _algorithm(run)
    given = {name: value for name, value in algorithm.trl.items() if value and value not in ADAMW}
    found = [f"algorithm.trl.{name}: {what}" for name, what in NOT_COUNTED.items() if name in given]
    if algorithm.train_vision_tower:
        found.append("algorithm.train_vision_tower: activations of what sees")
    return [*found, "passing buffers of DeepSpeed's step"] if launch.stage else found


def _algorithm(run: RunConfig) -> VlmGrpoConfig:
    assert isinstance(run.algorithm, VlmGrpoConfig)
    return run.algorithm


def _away(run: RunConfig) -> Sequence[str]:
    """Components of what draws that are on the CPU in between."""
    if _algorithm(run).offload_painter:
        return ("transformer", "vae")
    return ("vae",) if run.model.offload_vae else ()


def _share(count: int, pieces: int) -> int:
    return math.ceil(count / pieces)


def _weights(network: Any) -> int:
    return sum(weight.numel() for weight in network.parameters())
