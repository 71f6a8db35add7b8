"""Building tiny bases: what is the same for every family. How good they become is in tests/benchmarks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retouch.config.errors import ConfigError
from retouch.families.loading import family_class, load_model
from retouch.families.tiny import tiny_pipeline
from retouch.tiny import writing as tiny_base
from retouch.tiny.signs import draw_words
from retouch.tiny.writing import (
    CHAT_TOKENS,
    HIGHEST_WEIGHT,
    LETTERS,
    MODELS,
    PROMPT,
    SCHEDULES,
    SIZE,
    Reader,
    build,
    build_and_measure,
    tokens_of,
    train_spelling,
    velocity_weight,
)
from tests.selection import default
from tests.tiny_models import WITH_BASE

STEPS = {"vae_steps": 1, "text_steps": 1, "letter_steps": 1, "denoiser_steps": 1}
SMALL = {"signs": 12, "text_batch": 4, "denoiser_batch": 4, **STEPS}


@pytest.mark.parametrize("family", default(SCHEDULES, lambda family: family == "flux_fill"))
def test_a_base_is_built_again_to_the_same_bytes(family: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build(family, tmp_path / name, 7, replace(SCHEDULES[family], **SMALL))
    files = sorted((tmp_path / "one").rglob("*.safetensors"))
    assert files
    for file in files:
        assert file.read_bytes() == (tmp_path / "two" / file.relative_to(tmp_path / "one")).read_bytes()
    model = load_model(MODELS[family].model_copy(update={"path": str(tmp_path / "one")}))
    assert model.spec.family == family
    assert {p.dtype for p in model.network.parameters()} == {torch.float32}


def test_every_packaged_base_can_be_built_again() -> None:
    assert set(SCHEDULES) == set(MODELS) >= set(WITH_BASE)


@pytest.mark.parametrize("family", SCHEDULES)
def test_readers_find_the_letters(family: str) -> None:
    """The tokens at the place of the word are all that two prompts differ in."""
    text = family_class(family).from_pipeline(tiny_pipeline(family)).text
    for encoder in text.encoders.values():
        first = Reader(encoder).first
        one, two = (tokens_of(encoder, PROMPT.format(word)) for word in ("KEBO", "LIGA"))
        assert (one != two).nonzero().flatten().tolist() == list(range(first, first + LETTERS))


@pytest.mark.parametrize("family", SCHEDULES)
def test_signs_are_encoded_without_their_words(family: str) -> None:
    model = family_class(family).from_pipeline(tiny_pipeline(family))
    signs = tiny_base.training_signs(3, seed=0)
    x0, conditions = tiny_base.encode_signs(model, signs, SCHEDULES[family].guidance_scale)
    assert len(x0) == len(conditions) == 3 and conditions.size == SIZE
    masked = "mask" in model.spec.needs  # else it generates the whole sign
    example = (
        tiny_base.Example(0, "", signs[0].picture, signs[0].mask) if masked else tiny_base.Example(0, "", size=SIZE)
    )
    alone = model.encode([example], SCHEDULES[family].guidance_scale)
    for name, tensor in alone.tensors.items():
        torch.testing.assert_close(conditions.tensors[name][:1], tensor, atol=1e-4, rtol=1e-4, msg=name)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sd_inpaint"):
        build_and_measure("sd_inpant", tmp_path, 0)


def test_errors_weigh_as_those_of_the_velocity() -> None:
    """v = eps - x0 and x0 = (x - b eps) / a, so that an error e of eps is one of e (a + b) / a in v."""
    flux, sd = (family_class(f).from_pipeline(tiny_pipeline(f)).schedule(8, SIZE) for f in ("flux_fill", "sd_inpaint"))
    assert velocity_weight(flux, torch.tensor([0.999, 0.5])).tolist() == [1.0, 1.0]
    times = torch.tensor([999.0, 501.0, 1.0])
    level = sd.level(times)
    expected = ((level.sqrt() + (1 - level).sqrt()) / level.sqrt()).square()
    assert float(expected[0]) > HIGHEST_WEIGHT > float(expected[1])
    expected[0] = HIGHEST_WEIGHT
    torch.testing.assert_close(velocity_weight(sd, times), expected)


@torch.no_grad()
def test_chats_are_encoded_together_as_one_by_one() -> None:
    """Padding included, which a causal model computes from the chat."""
    chat = family_class("flux2_klein").from_pipeline(tiny_pipeline("flux2_klein")).text.encoders["text"]
    prompts = ["W", PROMPT.format("KEBO")]
    together = chat(prompts)
    for prompt, states in zip(prompts, together, strict=True):
        torch.testing.assert_close(states, chat([prompt])[0], atol=1e-6, rtol=1e-5)


def test_a_chat_model_learns_the_places_of_letters() -> None:
    """Random weights hold them in a small part of the variance of the states, which a denoiser takes long to find."""
    text = family_class("flux2_klein").from_pipeline(tiny_pipeline("flux2_klein"), length=CHAT_TOKENS).text
    [encoder] = text.encoders.values()

    @torch.no_grad()
    def share_of_places() -> float:
        states = encoder([PROMPT.format(word) for word in draw_words(64, "held_out", 0, LETTERS)])
        first = Reader(encoder).first
        states = states[:, first : first + LETTERS]  # [B, LETTERS, D]
        return float(states.mean(0).var(0).sum() / states.flatten(0, 1).var(0).sum())

    before = share_of_places()
    train_spelling(text, steps=60, batch=16, seed=0)
    after = share_of_places()
    assert after > 2 * before
