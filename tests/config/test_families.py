"""What `retouch check` believes of a family, without torch, is what the family says with its network at hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.config.errors import models_of
from retouch.core.rules import STEP_RULES, rules_of
from retouch.families import FAMILIES
from retouch.families.base import TINY_SIZE_MULTIPLE, Model
from retouch.families.loading import family_class
from retouch.families.tiny import tiny_pipeline
from retouch.files.model_files import tiny_path
from retouch.types import Example


@cache
def tiny_model(family: str) -> Any:
    """The family's class on a toy network with random weights: the same code, the same facts but its sizes."""
    return family_class(family).from_pipeline(tiny_pipeline(family))


def example() -> Example:
    mask = np.zeros((32, 32), np.uint8)
    mask[8:24, 8:24] = 255
    return Example(1, "The text is 'A'.", Image.new("RGB", (32, 32), "red"), Image.fromarray(mask))


def test_every_family_is_a_model_of_the_run_file() -> None:
    assert {model.model_fields["family"].default for model in models_of(Model)} == FAMILIES.keys()
    assert all(section.spec.family == name for name, section in FAMILIES.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_those_of_the_model(family: str) -> None:
    facts, model = FAMILIES[family].spec, tiny_model(family)
    spec = model.spec
    assert facts.size_multiple == facts.downsampling * spec.size_multiple // spec.downsampling
    if tiny_path(family).is_dir():  # a base comes with the package
        assert TINY_SIZE_MULTIPLE % spec.size_multiple == 0
    assert model.schedule(4, (32, 32)).prediction == facts.prediction
    assert facts.networks[facts.network_name] == type(model.network).__name__
    assert type(tiny_pipeline(family)).__name__ == facts.pipeline
    modules = [name for name, _ in model.network.named_modules()]
    assert all(any(name.endswith(f".{target}") for name in modules) for target in facts.lora_targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_doubles_the_rows_of_the_network_where_it_is_said_to(family: str) -> None:
    model = tiny_model(family)
    latents = torch.zeros(1, model.spec.latent_channels, *(32 // model.spec.downsampling,) * 2)
    rows: dict[float, int] = {}

    def count(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = next(t for t in (*arguments, *options.values()) if isinstance(t, torch.Tensor))
        rows[guidance] = rows.get(guidance, 0) + len(given)

    hook = model.network.register_forward_pre_hook(count, with_kwargs=True)
    for guidance in (0.0, 1.0, 1.5, 7.5):
        condition = model.encode([example()], guidance)
        with torch.no_grad():
            model.predict(model.network, latents, model.schedule(4, (32, 32)).times[1:2], condition)
    hook.remove()
    doubled = 2 if FAMILIES[family].spec.doubles_for_guidance else 1
    assert rows == {0.0: 1, 1.0: 1, 1.5: doubled, 7.5: doubled}


# --- step rules ---


def test_every_prediction_has_a_default_rule() -> None:
    assert [rules_of(prediction)[0] for prediction in ("flow", "epsilon")] == ["flow_sde", "ddim"]


@pytest.mark.parametrize("name", STEP_RULES)
def test_rules_that_end_without_noise_are_those_whose_last_std_is_0(name: str) -> None:
    x, rule = torch.ones(1, 1), STEP_RULES[name]
    last = (0.25, 0.0) if rule.prediction == "flow" else (0.9, 1.0)
    second = (0.75,) if rule.takes_second_level else ()
    std = rule.mean_std(x, x, *last, 0.5, *second)[1]
    assert (float(std) == 0) == rule.ends_without_noise
