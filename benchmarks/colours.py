"""A text-to-image base under classifier-free guidance that trains in two minutes, where many runs are needed.

Its task is to draw a shape in the colour that is asked for (shapes and colours of `retouch.tiny.edits`). The base is
qwen_image: autoencoder and text encoder of the tiny qwen_image_edit, and a fresh transformer of the same size that
learned from pictures of which, in the end, four in ten had another colour than their caption said, one caption in ten
left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
from diffusers import QwenImageTransformer2DModel as Transformer
from numpy.typing import NDArray
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from retouch.core.objectives.sft import denoising_loss
from retouch.data.sampler import derive_seed
from retouch.families.qwen_image.model import QwenImage
from retouch.files.model_files import tiny_path
from retouch.rewards.protocol import RewardItem
from retouch.tiny.edits import (
    COLOURS,
    GROUND,
    SIDE,
    Half,
    draw_shape,
    painted,
)
from retouch.training.noised import denoising_error
from retouch.types import Example

RIGHT = 0.6
"""Share of the pictures that the base learned from in the end whose colour is right."""

SURE = 0.6
"""Share of the steps before that: colours are told apart sooner where pictures do not contradict their captions."""

LEFT_OUT = 0.1
"""Share of captions left out, for guidance."""

PHRASES = ("{}", "a {} one", "in {}", "{} shape", "{} please", "draw {}")

TEXT_TOKENS = 28

AREAS = (0.126, 0.353)
"""Smallest and largest share of the picture that a shape takes."""

NEAR = 60.0
"""Distance in RGB within which a pixel has one of the colours of the task."""


def prompts(half: Half) -> list[tuple[str, str]]:
    """(prompt, colour) of a half; each half has every colour and every phrase, but never in the same combination."""
    parity = 0 if half == "train" else 1
    return [(p.format(c), c) for i, c in enumerate(COLOURS) for j, p in enumerate(PHRASES) if (i + j) % 2 == parity]


def write_prompts(file: Path, half: Half, count: int) -> None:
    """`count` prompts of a half in turn; pictures of one prompt differ by their noise."""
    told = prompts(half)
    entries = [{"id": i, "prompt": told[i % len(told)][0], "colour": told[i % len(told)][1]} for i in range(count)]
    file.write_text(json.dumps(entries) + "\n", encoding="utf-8")


def right_colour(items: Sequence[RewardItem]) -> list[float]:
    """Of the pixels that clearly have one of the colours, the share that has the one asked for; a picture of nearly
    nothing but ground has none. Edges are blends, and count for nothing: else larger shapes would be better ones."""
    return [_right(item.image, str(item.metadata["colour"])) for item in items]


def right_shape(items: Sequence[RewardItem]) -> list[float]:
    """`right_colour`, times by how much a shape is smaller or larger than any that the base learned."""
    return [_right(item.image, str(item.metadata["colour"])) * _size(item.image) for item in items]


def clean(items: Sequence[RewardItem]) -> list[float]:
    """Share of pixels that have a colour of the task, 0 where the shape is smaller or larger than any that the base
    learned: what the colour alone does not see."""
    return [_clean(item.image) for item in items]


def _right(image: NDArray[np.uint8], colour: str) -> float:
    distances = _distances(image)
    nearest = np.where(distances.min(1) < NEAR, distances.argmin(1), len(COLOURS))
    shape = nearest < len(COLOURS)
    return float((nearest == list(COLOURS).index(colour)).sum() / max(int(shape.sum()), SIDE))


def _size(image: NDArray[np.uint8]) -> float:
    """1 for a shape of a size that the base learned; else by how much it is out of the range."""
    share = float((_distances(image).argmin(1) < len(COLOURS)).mean())
    return min(1.0, share / AREAS[0], AREAS[1] / max(share, AREAS[1]))


def _clean(image: NDArray[np.uint8]) -> float:
    distances = _distances(image)
    share = float((distances.argmin(1) < len(COLOURS)).mean())
    return float((distances.min(1) < NEAR).mean()) if 0.05 < share < 0.45 else 0.0


def _distances(image: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[pixels, colours and ground]."""
    palette = np.array([*COLOURS.values(), GROUND], np.float32)
    return np.sqrt(np.square(image.reshape(-1, 1, 3).astype(np.float32) - palette).sum(-1))


def build_base(out: Path, steps: int = 2000, batch: int = 48, seed: int = 0) -> None:
    """Train the base and write it as a diffusers folder."""
    pipeline = fresh_pipeline(seed)
    model = QwenImage.from_pipeline(pipeline, TEXT_TOKENS)
    random = Random(derive_seed(seed, "colours"))
    masks = [draw_shape(random) for _ in range(96)]
    pictures = {c: model.encode_images(_pixels([painted(mask, c) for mask in masks])) for c in COLOURS}
    told = prompts("train")
    size = (SIDE, SIDE)
    texts = model.encode([Example(i, prompt, size=size) for i, (prompt, _) in enumerate(told)], 1.0)
    empty = model.encode([Example(0, model.spec.empty_prompt, size=size)], 1.0)
    both = type(texts)({n: torch.cat([t, empty.tensors[n]]) for n, t in texts.tensors.items()}, None, size)
    model.network.train().requires_grad_(True)
    parameters = list(model.network.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.99))
    schedule = model.schedule(10, size)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 50, (steps - step) / (steps / 2))
        asked = [random.randrange(len(told)) for _ in range(batch)]
        shown = [_shown(told[i][1], random, 1.0 if step < SURE * steps else RIGHT) for i in asked]
        x0 = torch.stack([pictures[colour][random.randrange(len(masks))] for colour in shown])
        rows = [len(told) if random.random() < LEFT_OUT else i for i in asked]
        time = schedule.training_times(torch.rand(batch, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
        errors = denoising_error(
            model, model.network, schedule, x0, torch.randn(x0.shape), time, both.select(torch.tensor(rows))
        )
        optimizer.zero_grad()
        denoising_loss(errors)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    model.network.eval().requires_grad_(False)
    pipeline.save_pretrained(out)


def fresh_pipeline(seed: int) -> Any:
    """Autoencoder, text encoder and scheduler of the tiny qwen_image_edit; a transformer of its size, untrained."""
    base = tiny_path("qwen_image_edit")
    torch.manual_seed(seed)
    kinds: dict[str, Any] = {"vae": AutoencoderKLQwenImage, "scheduler": FlowMatchEulerDiscreteScheduler}
    parts = {name: kind.from_pretrained(base, subfolder=name) for name, kind in kinds.items()}
    parts["text_encoder"] = Qwen2_5_VLForConditionalGeneration.from_pretrained(base, subfolder="text_encoder")
    parts["tokenizer"] = AutoTokenizer.from_pretrained(base, subfolder="tokenizer")
    parts["transformer"] = Transformer.from_config(Transformer.load_config(base, subfolder="transformer"))
    for name in ("vae", "text_encoder"):
        parts[name].float().eval()
    return QwenImagePipeline(**parts)


def _shown(colour: str, random: Random, right: float) -> str:
    """The colour of a picture that is captioned with `colour`."""
    return colour if random.random() < right else random.choice([c for c in COLOURS if c != colour])


def _pixels(pictures: Sequence[Any]) -> torch.Tensor:
    stacked = np.stack([np.asarray(picture, np.float32) for picture in pictures])
    return torch.from_numpy(stacked).permute(0, 3, 1, 2) / 127.5 - 1
