"""`model.attention`: the same numbers up to rounding, in one network alone; refused where it cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from torch import Tensor

from retouch.config import ConfigError, RunConfig
from retouch.families import FAMILIES, attention
from retouch.families.attention import NAMES, set_attention
from retouch.families.diffusion import FamilyModel
from retouch.families.loading import family_class
from retouch.families.tiny import tiny_pipeline
from retouch.types import Condition
from tests.algorithms.runs import Config

from .conftest import attention_of
from .test_contract import blends, examples_of, start, times_of

ABLE = [name for name, section in FAMILIES.available().items() if section.spec.unmasked_attention]


def model_of(family: str, kernel: Any) -> FamilyModel:
    model = family_class(family).from_pipeline(tiny_pipeline(family, seed=3))
    set_attention(model.network, kernel)
    return model


@torch.no_grad()
def velocity(model: FamilyModel, condition: Condition) -> Tensor:
    return model.predict(model.network, start(model), times_of(model), condition)


def test_the_families_that_choose_are_those_of_flux() -> None:
    """Whose networks of diffusers are called so."""
    specs = [section.spec for section in FAMILIES.available().values()]
    assert ABLE == [spec.family for spec in specs if spec.networks[spec.network_name].startswith("Flux")] != []


@pytest.mark.parametrize("kernel", ["math", "torch_flash"])
@pytest.mark.parametrize("family", ABLE)
def test_another_kernel_gives_the_same_velocity(family: str, kernel: Any) -> None:
    """In every attention layer, and in no network that is loaded after it."""
    plain, chosen = model_of(family, None), model_of(family, kernel)
    assert attention_of(plain.network) == {None} and attention_of(chosen.network) == {NAMES[kernel]}
    assert Registry.get_active_backend()[0] == "native"
    condition = plain.encode(examples_of(not blends(family)), 1.0)
    torch.testing.assert_close(velocity(chosen, condition), velocity(plain, condition), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model": {"family": "sd_inpaint", "path": "tiny", "attention": "math"}, "rollout__noise_level": None},
            r"model.attention: given 'math', but sd_inpaint has no choice of kernels; leave attention out",
        ),
        (
            {"model__train": {"kind": "ip_adapter"}, "model__attention": "math"},
            "model.attention: given 'math', but a style adapter brings attention of its own; leave attention out",
        ),
        ({"model__attention": "sage"}, "model.attention: given 'sage'"),
    ],
)
def test_combinations_that_cannot_work(changes: dict[str, Any], says: str, config: Config) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**changes)


def test_a_package_that_is_missing_is_an_error_where_the_model_loads(config: Config) -> None:
    """Not of the run file, which other machines read too."""
    run: RunConfig = config(model__attention="flash")
    network = model_of("flux_fill", None).network
    with pytest.raises(ConfigError, match=r"model.attention: given 'flash'; .*flash-attn.*; or leave attention out"):
        set_attention(network, run.model.attention)
    assert attention_of(network) == {None} and Registry.get_active_backend()[0] == "native"


def test_no_kernel_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "NAMES", {})
    set_attention(object(), None)


@pytest.mark.parametrize("kernel", [None, "math"])
def test_the_environment_chooses_no_kernel(kernel: Any, caplog: pytest.LogCaptureFixture) -> None:
    """DIFFUSERS_ATTN_BACKEND=sage would train with a kernel that has no gradient."""
    network = model_of("flux_fill", None).network
    Registry.set_active_backend(AttentionBackendName("_native_efficient"))  # type: ignore[arg-type]
    set_attention(network, kernel)
    assert Registry.get_active_backend()[0] == "native"
    assert "_native_efficient of the environment has no effect: model.attention decides" in caplog.text
