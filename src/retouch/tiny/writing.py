"""Build a tiny base from random weights: a model of a few million parameters that writes words, into a mask or, of a
text-to-image family, as a whole sign.

Three stages, a few minutes on two CPU cores, all from one seed:

    1. the autoencoder, on images of signs and on masked ones;
    2. the text encoders, on spelling: which letter stands where (which they know at their real size);
    3. the denoiser and the text encoders, by flow matching on signs with their words: first with right captions, which
       teach letters quickly, then with wrong letters in them (`CAPTION_NOISE`), as in scraped data. A chat model stays
       as stage 2 left it.

The base is mediocre on purpose: it generates clear letters, but the right ones only about as often as its captions did.
Supervised training cannot exceed its captions; training on a reward can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from retouch.config.errors import ConfigError, nearest
from retouch.core.objectives.sft import denoising_loss
from retouch.core.schedule import Schedule, shift_sigma
from retouch.data.sampler import derive_seed
from retouch.families.base import Model, TrainFull
from retouch.families.flux2_klein.spec import Flux2KleinModel
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.loading import family_class, load_model
from retouch.families.sd3.spec import Sd3Model
from retouch.families.sd_inpaint.spec import SdInpaintModel
from retouch.families.text import TextEncoder, TextEncoders
from retouch.families.tiny import TEXT_TOKENS, tiny_pipeline
from retouch.observe import Stopwatch
from retouch.rewards.client.config import RewardClientConfig
from retouch.rewards.scorers.ocr import OcrReward
from retouch.rewards.table import RewardTable
from retouch.tiny.signs import Sign, draw_sign, draw_words, misheard
from retouch.tiny.training import Updates, pixels_of, require_empty, save_half, train_autoencoder, write_result
from retouch.training.evaluation import evaluate
from retouch.training.noised import denoising_error
from retouch.types import Condition, DiffusionModel, Example

PROMPT = "The text is '{}'."
SIZE = (32, 64)
LETTERS = 4
ALPHABET = 26
CAPTION_NOISE = 0.3
"""Share of wrong letters in the last captions."""
CHAT_TOKENS = 24
"""Tokens (bytes) of a prompt in the chat of a Qwen3, cut after the word: the states of later tokens double the time of
a step."""
HIGHEST_WEIGHT = 64.0


@dataclass(frozen=True)
class WritingSchedule:
    """How a base is trained.

    Attributes:
        guidance_scale: of training and measuring.
        time_shift: shift of training times towards noise, where words are decided, in addition to the family's.
        length: tokens of a prompt; None takes those of the tokenizers.
        left_out: share of the last captions that are empty, for classifier-free guidance.
    """

    guidance_scale: float
    signs: int = 8000
    vae_steps: int = 800
    text_steps: int = 250
    text_batch: int = 128
    letter_steps: int = 300
    denoiser_steps: int = 400
    denoiser_batch: int = 64
    denoiser_lr: float = 8e-3
    time_shift: float = 1.0
    left_out: float = 0.0
    length: int | None = None


MODELS: dict[str, Model] = {
    "flux_fill": FluxFillModel(dtype="fp32", max_sequence_length=TEXT_TOKENS, train=TrainFull()),
    "sd_inpaint": SdInpaintModel(dtype="fp32", train=TrainFull()),
    "sd3": Sd3Model(dtype="fp32", max_sequence_length=TEXT_TOKENS, train=TrainFull()),
    "flux2_klein": Flux2KleinModel(dtype="fp32", max_sequence_length=CHAT_TOKENS, train=TrainFull()),
}
"""Family -> the model section of its base, without the path."""

SCHEDULES = {
    "flux_fill": WritingSchedule(guidance_scale=30.0),
    "sd_inpaint": WritingSchedule(
        guidance_scale=1.0,
        letter_steps=1200,
        denoiser_steps=600,
        denoiser_batch=16,
        denoiser_lr=3e-3,
        time_shift=3.0,
        left_out=0.1,
    ),
    "sd3": WritingSchedule(
        guidance_scale=1.0, letter_steps=900, denoiser_steps=300, denoiser_batch=32, denoiser_lr=3e-3, left_out=0.1
    ),
    "flux2_klein": WritingSchedule(
        guidance_scale=1.0,
        letter_steps=700,
        denoiser_steps=300,
        denoiser_batch=32,
        denoiser_lr=4e-3,
        left_out=0.1,
        length=CHAT_TOKENS,
    ),
}
"""Family -> the schedule of its base; those of FLUX.1-Fill and SD1.5 are in the package."""


def build(family: str, out: Path, seed: int, schedule: WritingSchedule) -> dict[str, float]:
    """Train and write a diffusers folder with fp16 weights -> seconds by stage."""
    pipeline = tiny_pipeline(family, seed)
    signs = training_signs(schedule.signs, seed)
    started = monotonic()
    train_vae(pipeline.vae, signs, schedule.vae_steps, seed)
    after_vae = monotonic()
    lengths = {} if schedule.length is None else {"length": schedule.length}
    model = family_class(family).from_pipeline(pipeline, **lengths)
    train_spelling(model.text, schedule.text_steps, schedule.text_batch, seed)
    after_text = monotonic()
    x0, conditions = encode_signs(model, signs, schedule.guidance_scale)
    right = [sign.word for sign in signs]
    heard = [misheard(sign.word, CAPTION_NOISE, derive_seed(seed, "caption", i)) for i, sign in enumerate(signs)]
    letters = replace(schedule, denoiser_steps=schedule.letter_steps, left_out=0.0)
    if not encoder_networks(model.text):
        model.text.cache_and_release(["", *(PROMPT.format(word) for word in dict.fromkeys([*right, *heard]))])
    train_denoiser(model, x0, conditions, right, letters, derive_seed(seed, "letters"))
    train_denoiser(model, x0, conditions, heard, schedule, derive_seed(seed, "scraped"))
    after_denoiser = monotonic()
    save_half(pipeline, out)
    return {
        "autoencoder": after_vae - started,
        "text": after_text - after_vae,
        "denoiser": after_denoiser - after_text,
    }


def training_signs(count: int, seed: int) -> list[Sign]:
    """Signs with words of the training half of the language, two signs a word."""
    words = draw_words(-(-count // 2), "train", seed, LETTERS)
    return [draw_sign(words[i // 2], SIZE, derive_seed(seed, "base", i)) for i in range(count)]


def train_vae(vae: Any, signs: Sequence[Sign], steps: int, seed: int, batch: int = 16) -> None:
    """Reconstruction of signs, an eighth of them masked, with noisy latents; then latents are scaled to std 1 (and
    mean 0, if the family has a shift), and the posterior's variance is set to 0."""
    pictures, masks = _pixels(signs)
    draw = torch.Generator().manual_seed(derive_seed(seed, "autoencoder"))

    def next_batch() -> Tensor:
        rows = torch.randint(len(signs), (batch,), generator=draw)
        x = pictures[rows]
        x[: batch // 8] *= 1 - masks[rows[: batch // 8]]
        return x

    train_autoencoder(vae, next_batch, Updates("autoencoder", vae.parameters(), steps, 2e-3, ramp=20), draw)
    with torch.no_grad():
        latents = torch.cat([vae.encode(x).latent_dist.mean for x in pictures[:512].split(128)])
        if "shift_factor" in vae.config:
            shift = None if vae.config.shift_factor is None else float(latents.mean())
            vae.register_to_config(shift_factor=shift, scaling_factor=1 / float(latents.std()))
        else:  # of FLUX.2: by the channels of 2 x 2 patches
            patches = nn.functional.pixel_unshuffle(latents, 2)
            vae.bn.running_mean.copy_(patches.mean((0, 2, 3)))
            vae.bn.running_var.copy_(patches.var((0, 2, 3)))
        channels = vae.config.latent_channels
        vae.encoder.conv_out.weight[channels:] = 0
        vae.encoder.conv_out.bias[channels:] = -30  # log-variance: sampling the posterior gives its mode


def train_spelling(text: TextEncoders, steps: int, batch: int, seed: int) -> None:
    """Train encoders of tokens to hold each letter's identity and place, and encoders of whole prompts to hold all
    letters, as linear probes read them."""
    words = draw_words(4096, "train", derive_seed(seed, "spelling"), LETTERS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "probes"))
        readers = [Reader(encoder) for encoder in text.encoders.values()]
    modules = [*dict.fromkeys(r.encoder.model for r in readers), *(r.probes for r in readers)]
    parameters = [p for module in modules for p in module.requires_grad_(True).parameters()]
    draw = torch.Generator().manual_seed(derive_seed(seed, "text"))
    updates = Updates("spelling", parameters, steps, 3e-3, ramp=30, betas=(0.9, 0.98))
    for _ in updates:
        chosen = [words[i] for i in torch.randint(len(words), (batch,), generator=draw)]
        updates.apply(torch.stack([error for reader in readers for error in reader.errors(chosen)]).sum())


def encoder_networks(text: TextEncoders) -> list[nn.Module]:
    """Networks that are trained with the denoiser, each once: several outputs may be of one. A vision-language or chat
    model is not trained."""
    return list(dict.fromkeys(e.model for e in text.encoders.values() if isinstance(e, TextEncoder)))


class Reader:
    """Linear probes that read a word from the encoding of its prompt."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        prompts = [PROMPT.format(letter + "A" * (LETTERS - 1)) for letter in "AB"]
        with torch.no_grad():
            shape = encoder(prompts[:1])[0].shape  # [D], or [S, D]
        self.whole = len(shape) == 1
        outputs = [LETTERS * ALPHABET] if self.whole else [LETTERS, ALPHABET]
        self.probes = nn.ModuleList(nn.Linear(shape[-1], count) for count in outputs)
        a, b = (tokens_of(encoder, prompt) for prompt in prompts)
        self.first = int((a != b).nonzero()[0])  # token of the first letter; a letter is a token

    def errors(self, words: Sequence[str]) -> list[Tensor]:
        """Cross-entropy of each probe."""
        spelled = torch.tensor([[ord(c) - ord("A") for c in word] for word in words])
        out = self.encoder([PROMPT.format(word) for word in words])
        if self.whole:
            return [nn.functional.cross_entropy(self.probes[0](out).view(-1, ALPHABET), spelled.flatten())]
        at_letters = out[:, self.first : self.first + LETTERS]
        targets = torch.arange(LETTERS).expand_as(spelled), spelled
        return [
            nn.functional.cross_entropy(probe(at_letters).flatten(0, 1), target.flatten())
            for probe, target in zip(self.probes, targets, strict=True)
        ]


def tokens_of(encoder: Any, prompt: str) -> Tensor:
    """[S] int64, of a prompt or of the chat that it is put into."""
    if isinstance(encoder, TextEncoder):
        return encoder.tokens([prompt])[0]
    return encoder.tokens(prompt)["input_ids"][0]


def train_denoiser(
    model: Any, x0: Tensor, conditions: Condition, captions: Sequence[str], schedule: WritingSchedule, seed: int
) -> None:
    """Train denoising of encoded signs given their captions, text encoders included; keeps the EMA weights.

    Args:
        model: a family whose text encoders are `TextEncoder`, or have been released with every caption in the cache.
    """
    # Text encoders learn with the network while there are any: random ones separate captions by chance alone. Where
    # they were released, every caption is in the cache, and the network is trained alone.
    prompts = [PROMPT.format(caption) for caption in captions]
    encoders = model.text.encoders
    trained = [model.network, *reversed(encoder_networks(model.text))]
    parameters = [p for m in trained for p in m.requires_grad_(True).parameters()]
    average = [p.detach().clone() for p in parameters]
    updates = Updates("denoiser", parameters, schedule.denoiser_steps, schedule.denoiser_lr, ramp=50)
    times, batch = model.schedule(8, SIZE), schedule.denoiser_batch
    draw = torch.Generator().manual_seed(derive_seed(seed, "denoiser"))
    for step in updates:
        rows = torch.randint(len(x0), (batch,), generator=draw)
        noise = torch.randn(x0[rows].shape, generator=draw)
        uniform = torch.rand(batch, generator=draw, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        time = times.training_times(shift_sigma(uniform, schedule.time_shift))
        texts = [prompts[i] for i in rows]
        if schedule.left_out:
            left_out = torch.rand(batch, generator=draw) < schedule.left_out
            texts = ["" if out else prompt for out, prompt in zip(left_out, texts, strict=True)]
        picked = conditions.select(rows)
        trained_text = {name: encoder(texts) for name, encoder in encoders.items()}
        text = model.arranged(trained_text or model.text.encode(texts))
        condition = replace(picked, tensors={**picked.tensors, **text})
        errors = denoising_error(model, model.network, times, x0[rows], noise, time, condition)
        updates.apply(denoising_loss(errors, velocity_weight(times, time))[0])
        decay = min((1 + step) / (10 + step), 0.99)
        with torch.no_grad():
            for mean, p in zip(average, parameters, strict=True):
                mean.lerp_(p, 1 - decay)
    with torch.no_grad():
        for mean, p in zip(average, parameters, strict=True):
            p.copy_(mean)


def velocity_weight(schedule: Schedule, time: Tensor) -> Tensor:
    """Weights [B] that make errors of a prediction those of the velocity it implies, up to `HIGHEST_WEIGHT`.

    1 for a flow model. At high noise, where words are decided, errors of a predicted noise are all but 0: without
    weights a word takes many times longer to learn.
    """
    one = torch.ones(len(time), 1)
    velocity = schedule.as_flow(torch.zeros_like(one), one, time)[1]
    return velocity.flatten().square().clamp(max=HIGHEST_WEIGHT)


def encode_signs(model: DiffusionModel, signs: Sequence[Sign], guidance_scale: float) -> tuple[Tensor, Condition]:
    """Clean latents, and conditions whose prompts are still empty."""
    pictures, masks = _pixels(signs)
    x0 = _latents(model, pictures)
    if "mask" not in model.spec.needs:
        one = model.encode([Example(0, "", size=SIZE)], guidance_scale)
        return x0, one.select([0] * len(signs))
    masked = _latents(model, pictures * (1 - masks))
    examples = [Example(i, "", sign.picture, sign.mask) for i, sign in enumerate(signs)]
    parts = [model.encode(examples[i : i + 256], guidance_scale) for i in range(0, len(examples), 256)]
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    tensors["masked_latents"] = masked  # the same to the last bits but one: of a batch in another memory layout
    return x0, Condition(tensors, None, SIZE)


def _latents(model: DiffusionModel, images: Tensor) -> Tensor:
    return torch.cat([model.encode_images(x) for x in images.split(256)])


def _pixels(signs: Sequence[Sign]) -> tuple[Tensor, Tensor]:
    """Images [N, 3, H, W] in [-1, 1] and masks [N, 1, H, W] in {0, 1}."""
    masks = torch.from_numpy(np.stack([np.asarray(s.mask) for s in signs])).float()[:, None] / 255
    return pixels_of([sign.picture for sign in signs]), masks


def build_and_measure(family: str, out: Path, seed: int) -> dict[str, Any]:
    """`retouch tiny build`: train, write, and measure on words of the held-out vocabulary.

    Raises:
        ConfigError: no tiny base of the family, or an `out` that holds files.
    """
    if family not in SCHEDULES:
        raise ConfigError(f"family: given {family!r}; {nearest(family, SCHEDULES)}")
    require_empty(out)
    started = monotonic()
    seconds = build(family, out, seed, SCHEDULES[family])
    seconds["in all"] = monotonic() - started
    return write_result(
        out,
        {
            "family": family,
            "seed": seed,
            "held_out": measure(family, out),
            "seconds": {name: round(s, 1) for name, s in seconds.items()},
            "megabytes": round(sum(f.stat().st_size for f in out.rglob("*.safetensors")) / 1e6, 2),
        },
    )


build_flux2_klein = partial(build_and_measure, "flux2_klein")
build_flux_fill = partial(build_and_measure, "flux_fill")
build_sd3 = partial(build_and_measure, "sd3")
build_sd_inpaint = partial(build_and_measure, "sd_inpaint")


def measure(family: str, folder: Path, words: int = 192, num_steps: int = 8) -> dict[str, float]:
    """Mean of every measure of a tiny base on held-out words."""
    model = load_model(MODELS[family].model_copy(update={"path": str(folder)}))
    signs = [draw_sign(word, SIZE, seed=0) for word in draw_words(words, "held_out", 0, LETTERS)]
    inputs = [(sign.ground, sign.mask, None) if "mask" in model.spec.needs else (None, None, SIZE) for sign in signs]
    examples = [
        Example(i, PROMPT.format(sign.word), source, mask, metadata={"text": sign.word}, size=size)
        for i, (sign, (source, mask, size)) in enumerate(zip(signs, inputs, strict=True))
    ]
    rewards = RewardTable({"ocr": OcrReward(detect=False)}, RewardClientConfig())
    rewards.start()
    try:
        rewards.wait_loaded()
        guidance = SCHEDULES[family].guidance_scale
        result = evaluate(model, model.network, examples, 1, num_steps, guidance, 64, rewards, Stopwatch())
    finally:
        rewards.close()
    return {name: round(value, 4) for name, value in result.means().items()}
