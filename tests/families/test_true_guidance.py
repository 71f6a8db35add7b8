"""True guidance of the FLUX.1 families in a run: its rules, its cost, where it applies, and what encodes its prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from retouch.adapters.trainee import make_trainable
from retouch.config import ConfigError, RunConfig, derive, parse_run
from retouch.core.rules import STEP_RULES
from retouch.core.steps import gaussian_log_prob
from retouch.data.dataset import load_dataset
from retouch.families import FAMILIES
from retouch.families.base import TrainIpAdapter
from retouch.families.flux_fill.model import FluxFill
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.image_encoder import ImageEncoder
from retouch.families.loading import family_class, load_model
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.plan import StepPlan, transition
from retouch.rollout.sampler import sample
from retouch.training.build import build
from retouch.types import Condition
from retouch.use.precompute import precompute
from tests.families.conftest import random_example

Config = Callable[..., RunConfig]
GUIDED: dict[str, Any] = {"model__true_guidance_scale": 4.0, "model__negative_prompt": "nsfw"}

every_family = pytest.mark.parametrize("family", ["flux_fill", "flux_dev", "flux_kontext"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model__negative_prompt": "nsfw"},
            "model.negative_prompt: given 'nsfw', but model.true_guidance_scale is 1, which uses no negative prompt",
        ),
        (
            {**GUIDED, "algorithm__caption_dropout": 0.1},
            "model.negative_prompt: given 'nsfw' with algorithm.caption_dropout, which trains the empty prompt",
        ),
        ({"algorithm__caption_dropout": 0.1}, "algorithm.caption_dropout: given 0.1, but flux_fill has no"),
        ({"model__true_guidance_scale": 0.5}, "model.true_guidance_scale: "),
    ],
)
def test_rules(config: Config, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**overrides)
    assert message in str(caught.value)


def test_a_caption_can_be_dropped_where_the_empty_prompt_guides(config: Config) -> None:
    assert config(model__true_guidance_scale=4.0, algorithm__caption_dropout=0.1).model.doubles_for_guidance


@every_family
def test_it_doubles_what_goes_through_the_solver(config: Config, family: str) -> None:
    """Whatever the embedded scale is."""
    for embedded in (1.0, 30.0):
        numbers = [
            derive(config(model__family=family, rollout__guidance_scale=embedded, **options)).forwards_per_image
            for options in ({}, GUIDED)
        ]
        assert numbers[1] == 2 * numbers[0]
    nft = {"algorithm": {"name": "nft", "kl_weight": 0}, "rollout__window": None, "rollout__noise_level": None}
    plain, guided = (derive(config(**nft, **options)).forwards_per_image for options in ({}, GUIDED))
    assert guided == plain + 3  # 3 steps; what is trained is the conditional prediction


def test_replayed_log_probabilities_are_the_recorded_ones(pipeline: Any) -> None:
    model = FluxFill.from_pipeline(pipeline, FluxFillModel(true_guidance_scale=4, negative_prompt="nsfw"))
    plan = StepPlan(model.schedule(4, (32, 64)), STEP_RULES["flow_sde"], 0.7, 0, 3, 3)
    condition = model.encode([random_example(i, 32, 64) for i in range(2)], 1.0)
    trajectory = sample(model, model.network, plan, condition, [5, 6])
    for step in range(plan.trained):
        at = torch.full((2,), plan.first + step)
        mean, std = transition(model, model.network, plan, trajectory.latents[:, step], at, condition)
        found = gaussian_log_prob(trajectory.latents[:, step + 1], mean, std).detach()
        assert torch.equal(found, trajectory.log_probs[:, step])


@pytest.mark.parametrize("guided", [False, True])
def test_rollouts_have_it_and_losses_on_noised_images_do_not(config: Config, guided: bool) -> None:
    """Also with the text encoders gone."""
    run = build(config(**GUIDED if guided else {}, model__free_text_encoders=True))
    try:
        rollouts, denoising = (
            data.conditions([0, 1], torch.device("cpu")).tensors for data in (run.encoded, run.encoded_for_denoising)
        )
        assert (run.encoded_for_denoising is run.encoded) == (not guided)
        assert ({"negative_text", "negative_pooled"} <= rollouts.keys()) == guided
        assert denoising.keys() == {name for name in rollouts if not name.startswith("negative_")}
        assert all(torch.equal(denoising[name], rollouts[name]) for name in denoising)
    finally:
        run.close()


def test_the_negative_prompt_is_stored_with_the_embeddings(run_file: Callable[..., Any], tmp_path: Path) -> None:
    plain, guided = (parse_run(run_file(**options)) for options in ({}, GUIDED))
    examples = list(load_dataset(guided.data, "data", ()))[:2]
    expected = load_model(guided.model).encode(examples, 1.0).tensors
    precompute(plain, tmp_path)
    stored = {**GUIDED, "model__embeddings": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"lacks 1 prompt of the run, 'nsfw' among them"):
        build(parse_run(run_file(**stored)))
    assert precompute(guided, tmp_path)["prompts"] == 1
    found = load_model(parse_run(run_file(**stored)).model).encode(examples, 1.0).tensors
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_t5_is_loaded_for_it_where_examples_bring_their_text(config: Config) -> None:
    for options, loaded in (({}, {"pooled"}), (GUIDED, {"pooled", "text"})):
        model: Any = load_model(config(**options).model, embedded=True)
        assert model.prompts.encoders.keys() == loaded


@every_family
def test_a_style_adapter_acts_on_the_half_with_the_prompt_alone(family: str) -> None:
    """A new one changes nothing; one with weights changes the conditional prediction."""
    config = FAMILIES[family].model_validate({"family": family, "true_guidance_scale": 4})
    model = family_class(family).from_pipeline(tiny_pipeline(family), config)
    model.image_encoder = ImageEncoder.load("tiny")
    network: Any = copy.deepcopy(model.network)
    spec = replace(model.spec, reference_width=model.image_encoder.width)
    make_trainable(network, TrainIpAdapter(image_encoder="tiny", tokens=4), spec, 0)
    example = replace(random_example(1, 32, 64), reference=Image.new("RGB", (9, 9), "red"))
    condition = model.encode([example], 1.0)
    conditional = condition.without_negative()
    x, t = torch.randn(1, 8, 8, 16), torch.tensor([0.7])
    with torch.no_grad():
        guided, base = (model.predict(model.network, x, t, c) for c in (stock(condition), stock(conditional)))
        assert torch.equal(model.predict(network, x, t, condition), guided)
        for name, weight in network.named_parameters():
            if "to_v_ip" in name:
                weight.normal_()
        styled = model.predict(network, x, t, conditional)
        assert float((styled - base).abs().max()) > 1e-3
        found = model.predict(network, x, t, condition)
    inside = condition.tensors["mask_cells"].amax(1, keepdim=True) > 0  # blending keeps the rest
    torch.testing.assert_close(found * inside, (guided + 4 * (styled - base)) * inside, atol=2e-5, rtol=2e-5)


def stock(condition: Condition) -> Condition:
    """Without the reference, for a network without an adapter."""
    tensors = {name: t for name, t in condition.tensors.items() if not name.startswith("reference")}
    return replace(condition, tensors=tensors)
