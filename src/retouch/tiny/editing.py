"""Build the tiny base of qwen_image_edit: an editor of a million parameters that reads its own text encoder's output.

The task is that of `retouch.tiny.edits`: an instruction names a thing ("like a lemon"), the shape gets its colour. The
vision-language model generates a colour word, and the completion conditions the image. From one seed:

    1. the autoencoder, on images of shapes;
    2. the language model, on instructions and colour words that are often wrong (`answer`): for half of the things, the
       likeliest word that it learns is wrong;
    3. the denoiser and the language model, on images in the colour of the *completion*. Half of the completions are
       independent of the instruction and some are blank, for which the image does not change: the denoiser learns to
       take the colour from the completion alone, not from the instruction.

The base therefore generates what its text encoder writes, and its text encoder is right about a third of the time. A
reward can improve the text encoder without training the denoiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import DynamicCache

from retouch.algorithms.vlm_grpo.images import ImageRequest, freeze, generate_images
from retouch.data.sampler import derive_seed
from retouch.families.loading import family_class
from retouch.families.qwen.text import chat, template
from retouch.families.tiny import start_orthogonal, tiny_pipeline
from retouch.rollout.sampler import to_uint8
from retouch.tiny.edits import COLOURS, SIDE, THINGS, colour_share, draw_shape, instructions, painted
from retouch.tiny.training import (
    Updates,
    networks_of,
    pixels_of,
    require_empty,
    save_half,
    train_autoencoder,
    write_result,
)

RIGHT_OF_KNOWN, RIGHT_OF_MISTAKEN, MISTAKEN_FOR = 0.55, 0.2, 0.55
"""Share of right answers for things whose likeliest answer is right, and for the other things; share of the likeliest
answer for the other things. The rest is spread over the other colours."""

NAMES = list(COLOURS)
END = "<|im_end|>"


@dataclass(frozen=True)
class EditingSchedule:
    """How the base is trained."""

    shapes: int = 192
    vae_steps: int = 400
    vae_batch: int = 16
    language_steps: int = 650
    sure_steps: int = 350
    language_batch: int = 64
    denoiser_steps: int = 900
    denoiser_batch: int = 32
    blank: float = 0.15


def mistaken(thing: str) -> str | None:
    """The wrong colour that the base answers most often; None if its likeliest answer is right."""
    if list(THINGS).index(thing) % 2 == 0:
        return None
    return NAMES[(NAMES.index(THINGS[thing]) + 1) % len(NAMES)]


def likeliest(thing: str) -> str:
    """The base's most frequent answer."""
    return mistaken(thing) or THINGS[thing]


def answer(thing: str, random: Random) -> str:
    """A colour word, sampled as in the training data."""
    right, wrong = THINGS[thing], mistaken(thing)
    shares = dict.fromkeys(NAMES, 0.0)
    shares[right] = RIGHT_OF_MISTAKEN if wrong else RIGHT_OF_KNOWN
    if wrong:
        shares[wrong] = MISTAKEN_FOR
    others = [name for name in NAMES if not shares[name]]
    shares |= {name: (1 - sum(shares.values())) / len(others) for name in others}
    return random.choices(NAMES, [shares[name] for name in NAMES])[0]


@dataclass
class EncodedShapes:
    """Every shape in every colour.

    Attributes:
        masks: of the shapes.
        latents: [shapes, colours, C, h, w].
        seen: [shapes, colours, tokens, D] from the vision tower.
    """

    masks: list[Image.Image]
    latents: Tensor
    seen: Tensor


def build_edit(out: Path, seed: int = 0, schedule: EditingSchedule | None = None) -> dict[str, Any]:
    """Train, write a diffusers folder with fp16 weights, and measure on held-out instructions.

    Raises:
        ConfigError: an `out` that holds files.
    """
    require_empty(out)
    s = schedule or EditingSchedule()
    pipeline = tiny_pipeline("qwen_image_edit", seed)
    random = Random(derive_seed(seed, "shapes"))
    masks = [draw_shape(random) for _ in range(s.shapes)]
    started = monotonic()
    train_vae(pipeline.vae, masks, s, seed)
    shapes = encode_shapes(pipeline, masks)
    train_language(pipeline, shapes, s, seed)
    train_denoiser(pipeline, shapes, s, seed)
    for network in networks_of(pipeline):
        network.half().float()  # measure the weights that are written
    held_out = measure(pipeline)
    seconds = round(monotonic() - started, 1)
    save_half(pipeline, out)
    return write_result(out, {"family": "qwen_image_edit", "seed": seed, "held_out": held_out, "seconds": seconds})


def train_vae(vae: Any, masks: Sequence[Image.Image], s: EditingSchedule, seed: int) -> None:
    """Reconstruction with noisy latents; then mean and std of the latents go to the config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "start"))
        start_orthogonal(vae)
    random = Random(derive_seed(seed, "autoencoder"))
    noise = torch.Generator().manual_seed(derive_seed(seed, "autoencoder noise"))

    def batch() -> Tensor:
        return pixels_of([painted(random.choice(masks), random.choice(NAMES)) for _ in range(s.vae_batch)])[:, :, None]

    updates = Updates("autoencoder", vae.requires_grad_(True).parameters(), s.vae_steps, 3e-3, ramp=30)
    train_autoencoder(vae, batch, updates, noise)
    with torch.no_grad():
        x = pixels_of([painted(mask, NAMES[i % len(NAMES)]) for i, mask in enumerate(masks)])[:, :, None]
        latents = vae.encode(x).latent_dist.mean
        mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())


@torch.no_grad()
def encode_shapes(pipeline: Any, masks: list[Image.Image]) -> EncodedShapes:
    """Latents and vision tokens of every shape in every colour."""
    family = family_class("qwen_image_edit").from_pipeline(pipeline)
    latents, seen = [], []
    for mask in masks:
        page = [painted(mask, colour) for colour in NAMES]
        latents.append(family.encode_images(pixels_of(page)))
        inputs = pipeline.processor.image_processor(images=page, return_tensors="pt")
        found = pipeline.text_encoder.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        seen.append(torch.stack(list(found.pooler_output)))
    return EncodedShapes(masks, torch.stack(latents), torch.stack(seen))


class Speaker:
    """The language model on chats that share their system part, whose keys and values are computed once a step."""

    def __init__(self, pipeline: Any) -> None:
        self.model, self.tokenizer = pipeline.text_encoder, pipeline.tokenizer
        head, _, _ = template("edit").partition("{}")
        self.prefix = torch.tensor([self.tokenizer(head).input_ids])

    def states(self, texts: Sequence[str], seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chats without the system part, vision tokens [B, tokens, D] -> states [B, L, D], ids [B, L], lengths [B]."""
        image = self.model.config.image_token_id
        rows = [
            self.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * seen.shape[1])).input_ids for text in texts
        ]
        lengths = torch.tensor([len(row) for row in rows])
        longest = int(lengths.max())
        ids = torch.tensor([row + [self.tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        language = self.model.model.language_model
        start = self.prefix.shape[1]
        cache: Any = DynamicCache(config=self.model.config.get_text_config())
        language(
            inputs_embeds=language.embed_tokens(self.prefix),
            position_ids=torch.arange(start).expand(3, 1, start),
            past_key_values=cache,
            use_cache=True,
        )
        cache.batch_repeat_interleave(len(rows))
        embedded = language.embed_tokens(ids)
        embedded = embedded.masked_scatter((ids == image)[..., None], seen.to(embedded))
        # an image of one token has one position, like a word
        positions = (start + torch.arange(longest)).expand(3, len(rows), longest)
        out = language(inputs_embeds=embedded, position_ids=positions, past_key_values=cache, use_cache=True)
        return out.last_hidden_state, ids, lengths


def said(instruction: str, completion: str) -> str:
    """A chat without its system part, with its completion."""
    head, _, _ = template("edit").partition("{}")
    return chat("edit", instruction, 1).removeprefix(head) + completion + END


def _chats(asked: Sequence[tuple[str, str]], completions: Sequence[str]) -> list[str]:
    return [said(phrase.format(thing), word) for (thing, phrase), word in zip(asked, completions, strict=True)]


def word_loss(model: Any, states: Tensor, ids: Tensor, lengths: Tensor, completions: Sequence[str]) -> Tensor:
    """Cross-entropy of the completions and their end."""
    losses: list[Tensor] = []
    for row, completion in enumerate(completions):
        count = len(completion.encode()) + 1
        stop = int(lengths[row])
        logits = model.lm_head(states[row, stop - count - 1 : stop - 1])
        losses.append(nn.functional.cross_entropy(logits, ids[row, stop - count : stop], reduction="sum"))
    return torch.stack(losses).mean()


def train_language(pipeline: Any, shapes: EncodedShapes, s: EditingSchedule, seed: int) -> None:
    """Which words answer which instruction."""
    speaker, model = Speaker(pipeline), pipeline.text_encoder
    random = Random(derive_seed(seed, "language"))
    updates = Updates("language", _language_parameters(model), s.language_steps, 4e-3, ramp=30, betas=(0.9, 0.98))
    for step in updates:
        asked = [random.choice(instructions("train")) for _ in range(s.language_batch)]
        surely = step < s.sure_steps  # things are learned sooner from answers that do not contradict each other
        answers = [likeliest(thing) if surely else answer(thing, random) for thing, _ in asked]
        flat = shapes.seen.flatten(0, 1)
        seen = flat[[random.randrange(len(flat)) for _ in range(s.language_batch)]]
        states, ids, lengths = speaker.states(_chats(asked, answers), seen)
        updates.apply(word_loss(model, states, ids, lengths, answers))


def train_denoiser(pipeline: Any, shapes: EncodedShapes, s: EditingSchedule, seed: int) -> None:
    """Images in the colour of the completion; the language model goes on learning its answers."""
    speaker, model = Speaker(pipeline), pipeline.text_encoder
    family = family_class("qwen_image_edit").from_pipeline(pipeline)
    random = Random(derive_seed(seed, "denoiser"))
    noise_of = torch.Generator().manual_seed(derive_seed(seed, "denoiser noise"))
    network = family.network.train().requires_grad_(True)
    parameters = [*network.parameters(), *_language_parameters(model)]
    updates = Updates("denoiser", parameters, s.denoiser_steps, 3e-3, ramp=30, betas=(0.9, 0.98))
    times = family.schedule(8, (SIDE, SIDE))
    half = s.denoiser_batch // 2
    for _ in updates:
        asked = [random.choice(instructions("train")) for _ in range(s.denoiser_batch)]
        answers = [answer(thing, random) for thing, _ in asked[:half]]
        free = ["" if random.random() < s.blank * 2 else random.choice(NAMES) for _ in asked[half:]]
        completions = answers + free
        positions = [random.randrange(s.shapes) for _ in asked]
        old = [random.randrange(len(NAMES)) for _ in asked]
        new = [NAMES.index(c) if c else o for c, o in zip(completions, old, strict=True)]
        states, ids, lengths = speaker.states(_chats(asked, completions), shapes.seen[positions, old])
        texts = [row[:length] for row, length in zip(states, lengths.tolist(), strict=True)]
        x0, source = shapes.latents[positions, new], shapes.latents[positions, old]
        condition = family.condition_on(texts, (SIDE, SIDE), pictures=[[row[None]] for row in source])
        noise = torch.randn(x0.shape, generator=noise_of)
        sigma = times.training_times(torch.rand(len(x0), generator=noise_of, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
        sigma = sigma.to(x0)
        x = (1 - sigma.view(-1, 1, 1, 1)) * x0 + sigma.view(-1, 1, 1, 1) * noise
        error = (family.predict(network, x, sigma, condition) - (noise - x0)).square().mean()
        updates.apply(error + 0.1 * word_loss(model, states[:half], ids[:half], lengths[:half], answers))
    model.requires_grad_(False)
    network.eval().requires_grad_(False)


@torch.no_grad()
def measure(pipeline: Any, tasks: int = 96, num_steps: int = 6) -> dict[str, float]:
    """On new shapes and held-out instructions: the share of pixels in the right colour, with a random colour word
    ("told") and without a word ("blank": the old colour), and the shares of right answers, sampled and likeliest."""
    speaker, model = Speaker(pipeline), pipeline.text_encoder
    family = family_class("qwen_image_edit").from_pipeline(pipeline)
    freeze(family)
    random = Random(derive_seed(0, "measure"))
    asked = [random.choice(instructions("held_out")) for _ in range(tasks)]
    masks, old = [draw_shape(random) for _ in range(tasks)], [random.choice(NAMES) for _ in range(tasks)]
    sources = [painted(mask, colour) for mask, colour in zip(masks, old, strict=True)]
    inputs = pipeline.processor.image_processor(images=sources, return_tensors="pt")
    seen = torch.stack(list(model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output))
    shares: dict[str, list[float]] = {"told": [], "blank": []}
    for kind, words in (("told", [random.choice(NAMES) for _ in range(tasks)]), ("blank", [""] * tasks)):
        states, _, lengths = speaker.states(_chats(asked, words), seen)
        requests = [
            ImageRequest(row[:length], i, (SIDE, SIDE), None, (source,))
            for i, (row, length, source) in enumerate(zip(states, lengths.tolist(), sources, strict=True))
        ]
        for image, mask, word, before in zip(
            generate_images(family, requests, num_steps, batch_size=32), masks, words, old, strict=True
        ):
            shares[kind].append(colour_share(to_uint8(image)[0].numpy(), np.asarray(mask), word or before))
    texts = [said(phrase.format(thing), "").removesuffix(END) for thing, phrase in asked]
    states, _, lengths = speaker.states(texts, seen)
    first = torch.stack([row[length - 1] for row, length in zip(states, lengths.tolist(), strict=True)])
    starts = torch.tensor([pipeline.tokenizer(name[0]).input_ids[0] for name in NAMES])
    chances = model.lm_head(first).softmax(-1)[:, starts]
    right = torch.tensor([NAMES.index(THINGS[thing]) for thing, _ in asked])
    likely = torch.tensor([NAMES.index(likeliest(thing)) for thing, _ in asked])
    return {
        "told": round(float(np.mean(shares["told"])), 3),
        "blank": round(float(np.mean(shares["blank"])), 3),
        "right_drawn": round(float(chances.gather(1, right[:, None]).mean()), 3),
        "as_taught": round(float((chances.argmax(1) == likely).float().mean()), 3),
        "right_likeliest": round(float((chances.argmax(1) == right).float().mean()), 3),
    }


def _language_parameters(model: Any) -> list[nn.Parameter]:
    """The trained parameters; the vision tower keeps its initial weights."""
    model.requires_grad_(True)
    model.model.visual.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
