"""Building a tiny base from nothing: an inpainting model of a few million parameters that writes words into a mask.

Three stages, a few minutes on two CPU cores, all from one seed:

    1. the autoencoder, on pictures of signs and on masked ones;
    2. the text encoders, on spelling: which letter stands where (what T5 and CLIP bring along at their real size);
    3. the denoiser, by flow matching on signs with their words, the text encoders along with it: first with right
       captions, which teach letters quickly, then with wrong letters in them (`CAPTION_NOISE`), as scraped data have.

The base is meant to be mediocre: it draws letters well, and picks the right one only about as often as its captions
did. Supervision does no better than its captions; a reward can.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retouch.config.errors import ConfigError, nearest
from retouch.config.schema import FluxFillModel, OcrReward, RewardClientConfig, TrainFull
from retouch.core.objectives.sft import denoising_loss
from retouch.data import derive_seed
from retouch.data.synth import Sign, draw_sign, draw_words, misheard
from retouch.evaluate import evaluate
from retouch.models.flux_fill import FluxFill
from retouch.models.text import FluxTextEncoders
from retouch.models.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.observe import Stopwatch
from retouch.rewards.compose import RewardTable
from retouch.rollout import denoising_error
from retouch.types import Condition, Example

logger = logging.getLogger(__name__)

PROMPT = "The text is '{}'."
SIZE = (32, 64)
LETTERS = 4
CAPTION_NOISE = 0.3
"""Share of the letters that the last captions get wrong."""


@dataclass(frozen=True)
class Schedule:
    """How long each stage trains; the defaults make the committed base."""

    signs: int = 8000
    vae_steps: int = 800
    text_steps: int = 250
    letter_steps: int = 300
    denoiser_steps: int = 400
    batch: int = 64


def build_flux_fill(out: Path, seed: int = 0, schedule: Schedule = Schedule()) -> dict[str, float]:
    """Train and write a diffusers folder with fp16 weights -> seconds by stage."""
    pipeline = tiny_pipeline("flux_fill", seed)
    signs = training_signs(schedule.signs, seed)
    started = time.monotonic()
    train_autoencoder(pipeline.vae, signs, schedule.vae_steps, seed)
    after_vae = time.monotonic()
    train_spelling(pipeline, schedule.text_steps, schedule.batch, seed)
    after_text = time.monotonic()
    right = [sign.word for sign in signs]
    heard = [misheard(sign.word, CAPTION_NOISE, derive_seed(seed, "caption", i)) for i, sign in enumerate(signs)]
    train_denoiser(pipeline, signs, right, schedule.letter_steps, schedule.batch, derive_seed(seed, "letters"))
    train_denoiser(pipeline, signs, heard, schedule.denoiser_steps, schedule.batch, derive_seed(seed, "scraped"))
    after_denoiser = time.monotonic()
    for component in (pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer):
        component.half()
    pipeline.save_pretrained(out, safe_serialization=True)
    return {
        "autoencoder": after_vae - started,
        "text": after_text - after_vae,
        "denoiser": after_denoiser - after_text,
    }


def training_signs(count: int, seed: int) -> list[Sign]:
    """Signs with words of the training half of the language, two signs a word."""
    words = draw_words(-(-count // 2), "train", seed, LETTERS)
    return [draw_sign(words[i // 2], SIZE, derive_seed(seed, "base", i)) for i in range(count)]


def train_autoencoder(vae: Any, signs: Sequence[Sign], steps: int, seed: int, batch: int = 16) -> None:
    """Reconstruction of signs, an eighth of them masked, with noisy latents; then latents are scaled to mean 0, std 1,
    and the posterior is made a point."""
    pictures, masks = _pixels(signs)
    draw = torch.Generator().manual_seed(derive_seed(seed, "autoencoder"))
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99))
    vae.train()
    for step in range(steps):
        _set_lr(optimizer, 2e-3, step, steps, ramp=20)
        rows = torch.randint(len(signs), (batch,), generator=draw)
        x = pictures[rows]
        x[: batch // 8] *= 1 - masks[rows[: batch // 8]]
        mean = vae.encode(x).latent_dist.mean
        decoded = vae.decode(mean + 0.05 * torch.randn(mean.shape, generator=draw)).sample
        error = decoded - x
        loss = 4 * error.square().mean() + 0.5 * error.abs().mean() + 1e-3 * mean.square().mean()
        _update(optimizer, loss, vae.parameters())
        if step % 100 == 0:
            logger.info("autoencoder step %d: mean |error| %.3f", step, float(error.detach().abs().mean()))
    vae.eval().requires_grad_(False)
    with torch.no_grad():
        latents = torch.cat([vae.encode(x).latent_dist.mean for x in pictures[:512].split(128)])
        vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=1 / float(latents.std()))
        channels = vae.config.latent_channels
        vae.encoder.conv_out.weight[channels:] = 0
        vae.encoder.conv_out.bias[channels:] = -30  # log-variance: sampling the posterior gives its mode


def train_spelling(pipeline: Any, steps: int, batch: int, seed: int) -> None:
    """Teach the T5 each letter's identity and place from both ends, and CLIP's vector all letters, by linear probes."""
    t5, clip = pipeline.text_encoder_2, pipeline.text_encoder
    words = draw_words(4096, "train", derive_seed(seed, "spelling"), LETTERS)
    width, letters = t5.config.d_model, 26
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "probes"))
        place, letter, whole = nn.Linear(width, LETTERS), nn.Linear(width, letters), nn.Linear(width, LETTERS * letters)
    parameters = [p for m in (t5, clip, place, letter, whole) for p in m.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98))
    first = PROMPT.index("{")  # a byte is a token
    draw = torch.Generator().manual_seed(derive_seed(seed, "text"))
    for step in range(steps):
        _set_lr(optimizer, 3e-3, step, steps, ramp=30)
        chosen = [words[i] for i in torch.randint(len(words), (2 * batch,), generator=draw)]
        spelled = torch.tensor([[ord(c) - ord("A") for c in word] for word in chosen])
        places = torch.arange(LETTERS).expand_as(spelled)
        text, pooled = _encode_text(pipeline, [PROMPT.format(word) for word in chosen])
        at_letters = text[:, first : first + LETTERS]
        loss = (
            nn.functional.cross_entropy(place(at_letters).flatten(0, 1), places.flatten())
            + nn.functional.cross_entropy(letter(at_letters).flatten(0, 1), spelled.flatten())
            + nn.functional.cross_entropy(whole(pooled).view(-1, letters), spelled.flatten())
        )
        _update(optimizer, loss, parameters)
        if step % 50 == 0:
            logger.info("spelling step %d: loss %.3f", step, float(loss.detach()))


def train_denoiser(
    pipeline: Any, signs: Sequence[Sign], captions: Sequence[str], steps: int, batch: int, seed: int
) -> None:
    """Flow matching on the signs and their captions, text encoders included; the averaged weights stay."""
    model = family_model(pipeline)
    pictures, masks = _pixels(signs)
    with torch.no_grad():
        x0 = torch.cat([model.encode_images(x) for x in pictures.split(256)])
        masked = torch.cat([model.encode_images(x) for x in (pictures * (1 - masks)).split(256)])
    cells = nn.functional.pixel_unshuffle(masks, model.spec.downsampling)
    prompts = [PROMPT.format(caption) for caption in captions]
    trained = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    parameters = [p for m in trained for p in m.requires_grad_(True).parameters()]
    average = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = model.schedule(8, SIZE)
    draw = torch.Generator().manual_seed(derive_seed(seed, "denoiser"))
    for step in range(steps):
        _set_lr(optimizer, 8e-3, step, steps, ramp=50)
        rows = torch.randint(len(signs), (batch,), generator=draw)
        text, pooled = _encode_text(pipeline, [prompts[i] for i in rows])
        guidance = torch.full((batch,), model.spec.guidance_scale)
        tensors = {
            "text": text,
            "pooled": pooled,
            "masked_latents": masked[rows],
            "mask_cells": cells[rows],
            "guidance": guidance,
        }
        noise = torch.randn(x0[rows].shape, generator=draw)
        uniform = torch.rand(batch, generator=draw, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        condition = Condition(tensors, masks[rows], SIZE)
        times = schedule.training_times(uniform)
        errors = denoising_error(model, pipeline.transformer, schedule, x0[rows], noise, times, condition)
        _update(optimizer, denoising_loss(errors)[0], parameters)
        decay = min((1 + step) / (10 + step), 0.99)
        with torch.no_grad():
            for mean, p in zip(average, parameters, strict=True):
                mean.lerp_(p, 1 - decay)
        if step % 50 == 0:
            logger.info("denoiser step %d: loss %.4f", step, float(errors.detach().mean()))
    with torch.no_grad():
        for mean, p in zip(average, parameters, strict=True):
            p.copy_(mean)


def family_model(pipeline: Any) -> FluxFill:
    """The pipeline's networks as the family of the package."""
    text = FluxTextEncoders(
        pipeline.text_encoder, pipeline.tokenizer, pipeline.text_encoder_2, pipeline.tokenizer_2, TEXT_TOKENS
    )
    return FluxFill(pipeline.transformer, pipeline.vae, text, pipeline.scheduler)


def _encode_text(pipeline: Any, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """(text [B, S, D], pooled [B, D]) with gradient."""
    keywords = {"padding": "max_length", "max_length": TEXT_TOKENS, "truncation": True, "return_tensors": "pt"}
    text = pipeline.text_encoder_2(pipeline.tokenizer_2(prompts, **keywords).input_ids).last_hidden_state
    return text, pipeline.text_encoder(pipeline.tokenizer(prompts, **keywords).input_ids).pooler_output


def _pixels(signs: Sequence[Sign]) -> tuple[Tensor, Tensor]:
    """Pictures [N, 3, H, W] in [-1, 1] and masks [N, 1, H, W] in {0, 1}."""
    pictures = (
        torch.from_numpy(np.stack([np.asarray(s.picture) for s in signs])).permute(0, 3, 1, 2).float() / 127.5 - 1
    )
    masks = torch.from_numpy(np.stack([np.asarray(s.mask) for s in signs])).float()[:, None] / 255
    return pictures, masks


def _set_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int, ramp: int) -> None:
    """A linear ramp, then a cosine down to 2 % of the peak."""
    rate = peak * min(1.0, (step + 1) / ramp) * (0.5 * (1 + math.cos(math.pi * step / steps)) + 0.02)
    for group in optimizer.param_groups:
        group["lr"] = rate


def _update(
    optimizer: torch.optim.Optimizer, loss: Tensor, parameters: Sequence[nn.Parameter] | Iterator[nn.Parameter]
) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


BUILDERS = {"flux_fill": build_flux_fill}
"""Family -> function that trains its tiny base and writes it."""


def build_and_measure(family: str, out: Path, seed: int) -> dict[str, Any]:
    """What `retouch tiny build` does: train, write, and measure on words of the held-out half.

    The result is also written to `out/base.json`; the one of the committed base says what another build should reach.

    Raises:
        ConfigError: no tiny base of the family, or an `out` that holds files.
    """
    if family not in BUILDERS:
        raise ConfigError(f"family: given {family!r}; {nearest(family, BUILDERS)}")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty; choose another folder")
    started = time.monotonic()
    seconds = BUILDERS[family](out, seed)
    seconds["in all"] = time.monotonic() - started
    result = {
        "family": family,
        "seed": seed,
        "held_out": measure(out),
        "seconds": {name: round(s, 1) for name, s in seconds.items()},
        "megabytes": round(sum(f.stat().st_size for f in out.rglob("*.safetensors")) / 1e6, 2),
    }
    (out / "base.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


def measure(folder: Path, words: int = 192, num_steps: int = 8) -> dict[str, float]:
    """Evaluation of a tiny flow base on held-out words: means of every measure."""
    config = FluxFillModel(path=str(folder), dtype="fp32", max_sequence_length=TEXT_TOKENS, train=TrainFull())
    model = FluxFill.from_config(config)
    signs = [draw_sign(word, SIZE, seed=0) for word in draw_words(words, "held_out", 0, LETTERS)]
    examples = [
        Example(i, PROMPT.format(sign.word), sign.ground, sign.mask, metadata={"text": sign.word})
        for i, sign in enumerate(signs)
    ]
    rewards = RewardTable({"ocr": OcrReward(detect=False)}, RewardClientConfig())
    rewards.start()
    try:
        result = evaluate(
            model, model.network, examples, 1, num_steps, model.spec.guidance_scale, 64, rewards, Stopwatch()
        )
    finally:
        rewards.close()
    return {name: round(value, 4) for name, value in result.means().items()}
