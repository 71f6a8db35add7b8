"""Memory of a run of vlm_grpo: bytes that a process stores throughout, from the shapes of its weights, and bytes that
each phase allocates on top, from running the networks on tensors without data (`families.meta.without_data`).

Legend: B rows, S tokens of a row, D width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache

from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.config.needs import data_sections
from retouch.config.run import RunConfig
from retouch.doctor.launch import Launch
from retouch.doctor.line import BYTES
from retouch.doctor.memory import Part, weights_in
from retouch.doctor.model import FoundModel
from retouch.families.base import Model
from retouch.families.loading import DTYPES, load_component
from retouch.families.meta import on_meta, to_run_without_data, without_data
from retouch.families.qwen.text import PREFIX, evaluating, prefix_length
from retouch.families.vae import frame_by_frame, limit_batch, single_frames
from retouch.observe.live_bytes import LiveBytes

BUCKET = 500_000_000
"""Weights whose gradients DeepSpeed exchanges at once, in a buffer of this fixed size (its default)."""

LIVE = 1_000_000_000
"""Maximum number of weights that ZeRO-3 keeps gathered during training (its default)."""

HEAD_TILE = (4096, 32768)
"""Tokens and vocabulary entries of the tiles in which TRL computes log-probabilities; a test compares it with the
installed trl."""

ADAMW = ("adamw_torch", "adamw_torch_fused")

NOT_COUNTED = {
    "use_vllm": "vLLM's memory on the same device, set by vllm_gpu_memory_utilization",
    "optim": "its moments; those of AdamW in fp32 are counted",
    "use_liger_kernel": "its savings",
    "cast_lm_head_to_fp32": "the head in fp32",
    "deepspeed": "its settings; --accelerate FILE is counted",
}
"""Options of TRL with an unknown effect on memory -> what is not counted."""

Around = Callable[[], Any]
"""Makes the context of a forward: autocast, or none."""


@dataclass(frozen=True)
class PolicyEncoder:
    """The text encoder as TRL trains it, without data.

    Attributes:
        model: with its adapter.
        trained, frozen: numbers of weights, and bytes of each weight.
        autocasts: whether training forwards compute in a smaller precision than that of the weights.
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
    """`device_bytes` of the `parts` that are stored throughout, bytes of the `phases` on top, `peak_bytes` of the
    largest, and `notes` on what is not counted.

    Args:
        networks: component -> network on the meta device; they are modified.
        dropped: tokens of the chat before the user's.
    """
    mode = without_data()
    encoder = make_text_encoder(run, networks["text_encoder"], mode, launch)
    others = {name: network for name, network in networks.items() if name != "text_encoder"}
    parts = vlm_parts(run, encoder, {name: weights_in(network) for name, network in others.items()}, launch, world_size)
    phases = vlm_phases(run, encoder, others, mode, dropped, launch, world_size)
    stored = sum(part.bytes for part in parts if not part.waits)
    return {
        "device_bytes": stored,
        "host_bytes": sum(part.bytes for part in parts if part.waits),
        "complete": True,
        "parts": [asdict(part) for part in parts],
        "phases": [{"what": what, "bytes": count} for what, count in phases.items()],
        "peak_bytes": stored + max(phases.values()),
        "notes": notes(run, launch),
    }


def make_text_encoder(run: RunConfig, model: Any, mode: Any, launch: Launch) -> PolicyEncoder:
    """The text encoder with its adapter, in the precision that DeepSpeed or PEFT gives it."""
    from retouch.algorithms.vlm_grpo.trainer import adapter_config

    # DeepSpeed casts every weight to the precision of training and keeps an fp32 copy of the trained ones, which is
    # counted with the optimizer. Without it, trained weights are fp32, and those under an adapter stay as loaded.
    algorithm, precision = _algorithm(run), run.training.mixed_precision
    trained = frozen = torch.float32
    if launch.stage and precision != "no":
        trained = frozen = DTYPES[precision]
    elif algorithm.uses_adapter:
        frozen = DTYPES[run.model.dtype]
    if algorithm.uses_adapter:
        base = model
        model = on_meta(lambda: get_peft_model(base, adapter_config(algorithm)))
    elif not algorithm.train_vision_tower:
        model.model.visual.requires_grad_(False)
    if run.training.gradient_checkpointing:
        model.activation_checkpointing_enable(algorithm.trl.get("gradient_checkpointing_kwargs"))
        if algorithm.uses_adapter:
            model.enable_input_require_grads()
    to_run_without_data(model, mode, lambda weight: trained if weight.requires_grad else frozen)
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    autocasts = precision != "no" and not launch.stage
    return PolicyEncoder(model, count, trained.itemsize, weights_in(model) - count, frozen.itemsize, autocasts)


def vlm_parts(
    run: RunConfig, encoder: PolicyEncoder, others: Mapping[str, int], launch: Launch, world_size: int = 1
) -> list[Part]:
    """Memory of a process from its first update on.

    Args:
        others: component -> number of weights of the diffusion model and autoencoder, which every process has whole.
    """
    n, each, stage = encoder.trained, encoder.trained_bytes, launch.stage
    of_moments, of_gradients, of_weights = (world_size if stage >= least else 1 for least in (1, 2, 3))
    trained = "LoRA" if _algorithm(run).uses_adapter else "text encoder"
    parts = [
        Part(f"{trained}, trained", n, math.ceil(each * n / of_weights), launch.weights_wait),
        Part("gradients", n, math.ceil(each * n / of_gradients), launch.optimizer_waits),
        Part("optimizer", n, math.ceil(8 * n / of_moments), launch.optimizer_waits),
    ]
    if stage:
        copy = math.ceil(4 * n / of_moments)
        parts.append(Part("DeepSpeed's copy of the weights", n, copy, launch.optimizer_waits))
    if not stage and world_size > 1:
        parts.append(Part("exchange of gradients", n, each * n))
    elif stage == 3:  # with the other stages it exists while gradients do
        parts.append(Part("exchange of gradients", BUCKET, each * BUCKET))
    frozen = math.ceil(encoder.frozen_bytes * encoder.frozen / of_weights)
    parts.append(Part("text encoder, frozen", encoder.frozen, frozen, launch.weights_wait))
    waiting = _waiting(run)
    return [part for part in parts if part.weights] + [
        Part(f"{name}, frozen", count, BYTES[run.model.dtype] * count, name in waiting)
        for name, count in others.items()
    ]


def vlm_phases(
    run: RunConfig,
    encoder: PolicyEncoder,
    others: Mapping[str, Any],
    mode: Any,
    dropped: int,
    launch: Launch,
    world_size: int = 1,
) -> dict[str, int]:
    """Bytes on top of the parts in each phase of a generation and its training, with rows of the maximum length that
    `model.max_sequence_length` allows. Images are scored elsewhere.

    Args:
        others: "transformer" and "vae", networks on the meta device; modified.
        mode: the mode in which `encoder` runs.
    """
    algorithm, model = _algorithm(run), encoder.model
    derived = algorithm.derive(run, world_size)
    images = derived.images_per_generation_per_device
    completions = images // algorithm.images_per_completion
    limit: int = run.model.max_sequence_length  # type: ignore[union-attr]
    tokens = dropped + limit
    new = min(algorithm.count("max_completion_length"), tokens - 1)
    batch, at_once = algorithm.count("per_device_train_batch_size"), run.rollout.batch_size_per_device
    training = autocast(run.training.mixed_precision) if encoder.autocasts else nullcontext
    # accelerate's autocast is around the outermost module, which the `generate` of an adapter bypasses
    generation = nullcontext if algorithm.uses_adapter else training
    for network in others.values():
        to_run_without_data(network, mode, lambda weight: DTYPES[run.model.dtype])
    vae = others["vae"]
    frame_by_frame(vae)
    limit_batch(vae, run.model.vae_batch)
    whole = encoder.bytes if launch.stage == 3 else 0
    moved = sum(BYTES[run.model.dtype] * weights_in(others[name]) for name in _waiting(run))
    states = completions * limit * others["transformer"].config.joint_attention_dim * encoder.frozen_bytes
    gathered = encoder.trained_bytes * min(LIVE, encoder.trained + encoder.frozen) if launch.stage == 3 else 0
    buffer = encoder.trained_bytes * BUCKET if launch.stage in (1, 2) else 0
    size = max((data.size for data in data_sections(run).values()), key=math.prod)
    count = min(at_once, images) * (2 if derived.forwards_per_image > run.rollout.num_steps else 1)
    sources = int(run.model.spec.edits)
    with mode:
        found = {
            "generates completions": whole + generating(model, completions, tokens - new, new, generation),
            "encodes completions": whole + encoding(model, min(at_once, completions), tokens),
            "generates images": whole
            + moved
            + states
            + generating_images(others["transformer"], vae, min(at_once, images), count, size, limit, sources),
        }
        if algorithm.trl.get("beta"):
            found["runs the reference"] = gathered + comparing(model, batch, tokens, new, training)
        model.train()
        found["trains"] = gathered + buffer + training_step(model, batch, tokens, new, training)
    return found


def notes(run: RunConfig, launch: Launch) -> list[str]:
    """Memory that is not counted, a line for each kind."""
    algorithm = _algorithm(run)
    given = {name: value for name, value in algorithm.trl.items() if value and value not in ADAMW}
    found = [f"algorithm.trl.{name}: {what}" for name, what in NOT_COUNTED.items() if name in given]
    if algorithm.train_vision_tower:
        found.append("algorithm.train_vision_tower: activations of the vision tower")
    return [*found, "temporary buffers of DeepSpeed's step"] if launch.stage else found


# --- peaks of the phases, in bytes ---


def autocast(precision: str) -> Around:
    """The context that `training.mixed_precision` has around a forward; DeepSpeed casts weights instead."""
    return nullcontext if precision == "no" else lambda: torch.autocast("cpu", DTYPES[precision])


def generating(policy: Any, rows: int, prompt: int, new: int, around: Around = nullcontext) -> int:
    """Peak while `rows` completions of `new` tokens are sampled: the prompt in one forward, or the last token with the
    keys and values of all before it."""
    cache: Any = DynamicCache(config=_base(policy).model.language_model.config)
    with evaluating(policy), LiveBytes() as live:
        _next_token(policy, cache, rows, prompt, around)
        for layer in cache.layers:
            layer.keys, layer.values = (
                kept.new_empty(*kept.shape[:2], prompt + new - 1, kept.shape[3]) for kept in (layer.keys, layer.values)
            )
        _next_token(policy, cache, rows, 1, around)
    return live.peak


def encoding(policy: Any, rows: int, tokens: int) -> int:
    """Peak while the text states of prompts and completions are computed."""
    with evaluating(policy), LiveBytes() as live:
        _states(policy, rows, tokens)
    return live.peak


def comparing(policy: Any, rows: int, tokens: int, scored: int, around: Around = nullcontext) -> int:
    """Peak while log-probabilities of `rows` x `scored` tokens are computed without gradient: of the reference, which
    is the policy without its adapter, or of the policy as it generated."""
    with torch.no_grad(), around(), LiveBytes() as live:
        states = _states(policy, rows, tokens)
        live.add(_head_bytes(_base(policy).lm_head.weight, states, rows * scored, backward=False))
    return live.peak


def training_step(policy: Any, rows: int, tokens: int, scored: int, around: Around = nullcontext) -> int:
    """Peak of a forward and backward of the loss of `rows` x `scored` tokens, without the gradients of weights, which
    are stored throughout."""

    def drop_gradient(weight: Tensor) -> None:
        weight.grad = None

    hooks = [w.register_post_accumulate_grad_hook(drop_gradient) for w in policy.parameters() if w.requires_grad]
    try:
        with LiveBytes() as live:
            with around():
                states = _states(policy, rows, tokens)
                live.add(_head_bytes(_base(policy).lm_head.weight, states, rows * scored, backward=True))
            states.backward(torch.empty_like(states))
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak


def generating_images(
    network: Any, vae: Any, images: int, rows: int, size: tuple[int, int], text_tokens: int, sources: int
) -> int:
    """Peak while `images` images are generated at once: their sources encoded one by one, a step of the network, or the
    decoding at the end.

    Args:
        rows: rows of a forward; with guidance twice as many as images.
        size: (height, width) of the images and of the `sources` that each edits.
        text_tokens: states of the longest condition.
    """
    dtype, channels = network.dtype, vae.config.z_dim
    h, w = (side // 2 ** len(vae.temperal_downsample) for side in size)  # diffusers' spelling
    cells = (1, h // 2, w // 2)
    tokens, width = (1 + sources) * cells[1] * cells[2], network.config.joint_attention_dim
    with torch.no_grad():
        with LiveBytes() as denoising:
            network(
                hidden_states=torch.empty(rows, tokens, 4 * channels, dtype=dtype),
                timestep=torch.empty(rows, dtype=dtype),
                encoder_hidden_states=torch.empty(rows, text_tokens, width, dtype=dtype),
                encoder_hidden_states_mask=torch.ones(rows, text_tokens, dtype=torch.float32) > 0,
                img_shapes=[[cells] * (1 + sources)] * rows,
                return_dict=False,
            )
        with LiveBytes() as decoding, single_frames(vae):
            vae.decode(torch.empty(images, channels, 1, h, w, dtype=vae.dtype))
        with LiveBytes() as encoding_sources, single_frames(vae):
            if sources:
                vae.encode(torch.empty(1, 3, 1, *size, dtype=vae.dtype))
    return max(denoising.peak, decoding.peak, encoding_sources.peak)


def _head_bytes(head: Tensor, states: Tensor, tokens: int, *, backward: bool) -> int:
    """Bytes that TRL's fused head allocates: a tile of logits and of the weights in the precision of the computation,
    and in the backward gradients in fp32.

    Args:
        head: [V, D] weights.
        states: [B, S, D] input of the head, under the run's autocast.
        tokens: number of scored tokens over all rows.
    """
    vocabulary, width = head.shape
    precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else states.dtype
    tile = min(tokens, HEAD_TILE[0]) * HEAD_TILE[1] * precision.itemsize
    cast = 0 if head.dtype == precision else min(vocabulary, HEAD_TILE[1]) * width * precision.itemsize
    found = tokens * width * states.dtype.itemsize + tile + cast
    if not backward:
        return found
    gradient = vocabulary * width * (4 + (0 if head.dtype == torch.float32 else head.dtype.itemsize))
    return found + tokens * width * 4 + (gradient if head.requires_grad else 0)


def _states(policy: Any, rows: int, tokens: int, cache: Any = None) -> Tensor:
    """[B, S, D] of a forward over rows of which one is padded: rows of one length would need no mask."""
    mask = torch.ones(rows, tokens if cache is None else cache.get_seq_length() + tokens, dtype=torch.long)
    mask[0, 0] = 0
    return (
        _base(policy)
        .model.language_model(
            input_ids=torch.zeros(rows, tokens, dtype=torch.long),
            attention_mask=mask,
            position_ids=torch.zeros(3, rows, tokens, dtype=torch.long),
            past_key_values=cache,
            use_cache=cache is not None,
        )
        .last_hidden_state
    )


def _next_token(policy: Any, cache: Any, rows: int, tokens: int, around: Around) -> None:
    """A forward over `tokens` behind those of the cache, and the sampling of the next one."""
    with around():
        logits = nn.functional.linear(_states(policy, rows, tokens, cache)[:, -1], _base(policy).lm_head.weight)
    logits = logits.to(torch.float32, copy=True)
    logits.softmax(-1)


def _base(policy: Any) -> Any:
    """The model below an adapter."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy


def _algorithm(run: RunConfig) -> VlmGrpoConfig:
    assert isinstance(run.algorithm, VlmGrpoConfig)
    return run.algorithm


def _waiting(run: RunConfig) -> Sequence[str]:
    """Components that are kept on the CPU while they are not used."""
    if _algorithm(run).offload_diffusion_model:
        return ("transformer", "vae")
    return ("vae",) if run.model.offload_vae else ()


def dropped_tokens(model: Model, found: FoundModel) -> int:
    """Number of tokens of a Qwen chat before the user's; the released number if the tokenizer is missing."""
    task = model.chat_task
    assert task is not None, "`check` refuses other families"
    if found.folder is None or not (found.folder / "tokenizer/tokenizer_config.json").is_file():
        return PREFIX[task]
    return prefix_length(load_component(AutoTokenizer, str(found.folder), "tokenizer", None), task)
