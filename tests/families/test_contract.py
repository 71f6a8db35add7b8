"""What every registered family must do, on random weights of toy size; its own file compares it with its pipeline."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from retouch.adapters.lora import add_lora
from retouch.config.run import RunConfig
from retouch.core.rules import STEP_RULES, rules_of
from retouch.core.steps import gaussian_log_prob
from retouch.doctor.memory import report_memory
from retouch.families import FAMILIES
from retouch.families.diffusion import FamilyModel, pack, unpack
from retouch.families.loading import family_class, load_model
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.plan import StepPlan, ode_plan, transition
from retouch.rollout.sampler import latent_shape, noise_for, sample
from retouch.types import Condition, Example
from tests.families.conftest import random_example
from tests.selection import rows

SIZE = (32, 64)
SEEDS = [5, 6, 7]
RESCALED = ("qwen_image", "qwen_image_edit")
"""Families that scale the guided prediction back to the length of the one with the prompt, token by token."""


def blends(family: str) -> bool:
    """Whether a mask is optional and keeps what is outside it."""
    return not FAMILIES[family].spec.needs


CASES = [(family, masked) for family in FAMILIES for masked in ([False, True] if blends(family) else [True])]
EACH = [(family, not blends(family) or number % 2 == 0) for number, family in enumerate(FAMILIES)]
"""Every family once; of those that work with and without a mask every other one has it."""

case = pytest.mark.parametrize(("family", "masked"), rows(CASES, EACH))
every_family = pytest.mark.parametrize("family", list(FAMILIES))


@cache
def tiny(family: str) -> FamilyModel:
    """A family's model with random weights; tests do not change it."""
    return family_class(family).from_pipeline(tiny_pipeline(family, seed=3))


def examples_of(masked: bool, size: tuple[int, int] = SIZE, count: int = 3) -> list[Example]:
    """With prompts of different lengths."""
    examples = [random_example(i, *size) for i in range(count)]
    prompts = ["The text is 'W'." + " Blue." * i for i in range(count)]
    made = [(e.source, e.mask, None) if masked else (None, None, size) for e in examples]
    return [
        Example(i, prompt, source, mask, size=given)
        for i, (prompt, (source, mask, given)) in enumerate(zip(prompts, made, strict=True))
    ]


def start(model: FamilyModel, size: tuple[int, int] = SIZE, rows: int = 3) -> Tensor:
    return noise_for(latent_shape(model, size), SEEDS[:rows])[0]


def times_of(model: FamilyModel, rows: int = 3) -> Tensor:
    """Different times of sampling, one a row."""
    return model.schedule(6, SIZE).times[1 : 1 + rows]


@pytest.fixture(autouse=True)
def _without_gradient() -> Iterator[None]:
    with torch.no_grad():
        yield


def together_and_alone(model: FamilyModel, examples: list[Example], guidance: float) -> tuple[Tensor, Tensor]:
    """Predictions of three rows in one batch, and of each in a batch of its own."""
    x, t = start(model), times_of(model)
    together = model.predict(model.network, x, t, model.encode(examples, guidance))
    alone = [
        model.predict(model.network, x[i : i + 1], t[i : i + 1], model.encode(examples[i : i + 1], guidance))
        for i in range(3)
    ]
    assert together.dtype == torch.float32 and together.shape == x.shape
    return together, torch.cat(alone)


@case
def test_a_row_does_not_depend_on_its_batch(family: str, masked: bool) -> None:
    """Up to rounding, which differs between processors: u + g (c - u) multiplies that of the forwards c and u by up to
    2 g - 1."""
    model, examples = tiny(family), examples_of(masked)
    doubles = model.spec.doubles_for_guidance
    for guidance in {model.spec.guidance_scale, 1.0} if doubles else {model.spec.guidance_scale}:
        together, alone = together_and_alone(model, examples, guidance)
        atol = 2e-6 * (2 * guidance - 1 if doubles else 1)
        torch.testing.assert_close(together, alone, atol=atol, rtol=1e-5)


@case
def test_a_row_in_float64_does_not_depend_on_its_batch(family: str, masked: bool) -> None:
    """Within the rounding of the returned fp32, guidance of the released scale included: what fp32 forwards differ by
    is rounding alone."""
    model = copy.copy(tiny(family))
    model.network, model.dtype = copy.deepcopy(model.network).double(), torch.float64
    together, alone = together_and_alone(model, examples_of(masked), model.spec.guidance_scale)
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].spec.doubles_for_guidance])
def test_guidance_is_two_predictions(family: str) -> None:
    """u + w (c - u), with the prompt's prediction c and the negative one's u each computed alone."""
    model = tiny(family)
    examples, scale = examples_of(not blends(family)), 3.5
    x, t = start(model), times_of(model)
    both = model.encode(examples, scale)
    tensors = {name: value for name, value in both.tensors.items() if not name.startswith("negative_")}
    negative = tensors | {n.removeprefix("negative_"): v for n, v in both.tensors.items() if n.startswith("negative_")}
    assert len(negative) == len(tensors) < len(both.tensors)
    with_prompt, without = (
        model.predict(model.network, x, t, Condition(rows, both.mask, both.size)) for rows in (tensors, negative)
    )
    expected = without + scale * (with_prompt - without)
    if family in RESCALED:
        tokens, length = pack(expected), pack(with_prompt).norm(dim=-1, keepdim=True)
        expected = unpack(tokens * (length / tokens.norm(dim=-1, keepdim=True)), *x.shape[2:])
    torch.testing.assert_close(model.predict(model.network, x, t, both), expected, atol=2e-5, rtol=2e-5)
    assert float((expected - with_prompt).abs().max()) > 1e-4
    assert not any(name.startswith("negative_") for name in model.encode(examples, 1.0).tensors)


@case
def test_a_forward_asks_for_no_value_of_a_tensor_on_the_device(family: str, masked: bool) -> None:
    """A GPU would have to compute everything before it knows one. Tensors without values stand for those of a device;
    one of the CPU beside them is an error, too."""
    model = copy.copy(tiny(family))
    condition = model.encode(examples_of(masked), model.spec.guidance_scale).to("meta")
    network = copy.deepcopy(model.network).to("meta")
    found = model.predict(network, start(model).to("meta"), times_of(model).to("meta"), condition)
    assert found.device.type == "meta" and found.shape == start(model).shape


def positions_of(model: FamilyModel) -> int:
    """Bytes of the tables of rotary frequencies that diffusers' networks of Qwen-Image copy to the device."""
    kept = vars(getattr(model.network, "pos_embed", None) or nn.Module())
    return sum(
        t.nbytes for t in [kept.get("pos_freqs"), kept.get("neg_freqs"), *kept.get("freqs", [])] if t is not None
    )


@case
def test_replayed_log_probabilities_are_the_recorded_ones(family: str, masked: bool) -> None:
    """Exactly, in batches of the same rows, with a graph as training has it."""
    model = tiny(family)
    rule = STEP_RULES[rules_of(model.spec.prediction)[0]]
    plan = StepPlan(model.schedule(4, SIZE), rule, 0.7, 0, 3, 3)
    condition = model.encode(examples_of(masked), model.spec.guidance_scale)
    trajectory = sample(model, model.network, plan, condition, SEEDS)
    with torch.enable_grad():
        for step in range(plan.trained):
            at = torch.full((3,), plan.first + step)
            mean, std = transition(model, model.network, plan, trajectory.latents[:, step], at, condition)
            found = gaussian_log_prob(trajectory.latents[:, step + 1], mean, std)
            assert found.requires_grad
            assert torch.equal(found.detach(), trajectory.log_probs[:, step])


@every_family
def test_training_sees_the_times_of_sampling(family: str) -> None:
    """To the last bit, for 4 to 50 steps."""
    model = tiny(family)
    condition = model.encode(examples_of(not blends(family), count=1), 1.0)
    seen: list[Tensor] = []

    class Recorder:
        spec, schedule = model.spec, model.schedule

        def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
            seen.append(t)
            return torch.zeros_like(x)

    recorder: Any = Recorder()
    rule = STEP_RULES[rules_of(model.spec.prediction)[0]]
    for count in (*range(4, 17), 20, 25, 28, 30, 40, 50):
        plan = StepPlan(model.schedule(count, SIZE), rule, 0.7, 0, count - 1, count - 1)
        seen.clear()
        sample(recorder, model.network, plan, condition, SEEDS[:1])
        sampled, x = list(seen), start(model, rows=1)
        seen.clear()
        for step in range(count):
            transition(recorder, model.network, plan, x, torch.tensor([step]), condition)
        assert torch.equal(torch.cat(sampled), torch.cat(seen)), count


@every_family
def test_a_tall_and_a_wide_image(family: str) -> None:
    """Sides that are odd numbers of tokens."""
    model = tiny(family)
    multiple = model.spec.size_multiple
    for size in ((3 * multiple, 7 * multiple), (5 * multiple, 3 * multiple)):
        condition = model.encode(examples_of(not blends(family), size, 1), model.spec.guidance_scale)
        final = sample(model, model.network, ode_plan(model.schedule(2, size)), condition, SEEDS[:1]).final
        assert final.isfinite().all()
        assert model.decode(final).shape == (1, 3, *size)


@every_family
def test_the_strip_of_a_reference_stands_above_the_source(family: str) -> None:
    """The strip is cut off again before images are scored: of a family without it that would be a part of the image."""
    [plain] = examples_of(True, count=1)
    seen: list[dict[str, Tensor]] = []
    for colour in ("red", "blue"):
        example = replace(plain, strip=Image.new("RGB", (SIZE[1], 32), colour))
        condition = tiny(family).encode([example], 1.0)
        assert condition.size == (32 + SIZE[0], SIZE[1])
        assert condition.mask is not None and condition.mask.shape[2:] == condition.size
        assert not condition.mask[:, :, :32].any() and condition.mask[:, :, 32:].any()
        seen.append(dict(condition.tensors))
    assert any(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0]), "nothing reads the strip"


@every_family
def test_new_lora_is_the_base_and_every_target_is_there(family: str) -> None:
    """The first step of a run is on-policy with the base: bitwise. And every factor that can learn gets a gradient."""
    model = tiny(family)
    network: Any = copy.deepcopy(model.network)
    names = [name for name, _ in network.named_modules()]
    for target in model.spec.lora_targets:
        in_a_later_block = any(int(n) >= 2 for n in re.findall(r"\.(\d+)\.attn", target))
        assert in_a_later_block or any(name == target or name.endswith("." + target) for name in names), target
    condition = model.encode(examples_of(not blends(family)), model.spec.guidance_scale)
    x, t = start(model), times_of(model)
    base = model.predict(model.network, x, t, condition)
    add_lora(network, 4, 8.0, model.spec.lora_targets)
    assert torch.equal(model.predict(network, x, t, condition), base)
    with torch.enable_grad():
        model.predict(network, x, t, condition).square().mean().backward()
    factors = [(name, p.grad) for name, p in network.named_parameters() if p.requires_grad and "lora_B" in name]
    still = [name for name, grad in factors if grad is None or not grad.any()]
    assert len(still) < len(factors) / 2 and (not still or model.spec.drops_text_stream), still
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            parameter += 0.5
    assert not torch.equal(model.predict(network, x, t, condition), base)
    network.disable_adapters()
    assert torch.equal(model.predict(network, x, t, condition), base)


def counted_lora(model: FamilyModel) -> int:
    """Weights of LoRA of rank 4 on the default targets."""
    targets = tuple(f".{target}" for target in model.spec.lora_targets)
    modules: list[tuple[str, Any]] = list(model.network.named_modules())
    return sum(4 * sum(m.weight.shape[:2]) for name, m in modules if name.endswith(targets) and hasattr(m, "weight"))


@every_family
def test_saved_loaded_counted(family: str, tmp_path: Path) -> None:
    """The hub's layout: the same predictions; finite and near them in bf16; and an estimate of its memory."""
    pipeline = tiny_pipeline(family, seed=3)
    pipeline.save_pretrained(tmp_path)
    model, examples = tiny(family), examples_of(not blends(family))
    x, t, guidance = start(model), times_of(model), model.spec.guidance_scale
    section = {"family": family, "path": str(tmp_path), "train": {"kind": "lora", "rank": 4}}
    length = {"max_sequence_length": 128} if "max_sequence_length" in FAMILIES[family].model_fields else {}
    expected = None
    for dtype in ("fp32", "bf16"):
        config: Any = FAMILIES[family].model_validate({**section, **length, "dtype": dtype})
        loaded = load_model(config)
        found = loaded.predict(loaded.network, x, t, loaded.encode(examples, guidance))
        expected = found if expected is None else expected
        assert found.dtype == torch.float32 and found.isfinite().all()
        assert float((found - expected).norm() / expected.norm()) <= 0.15  # embedded guidance 30 in bf16: .07
        assert loaded.spec == model.spec
    run = RunConfig.model_validate(
        {
            "name": "counted",
            "model": {**section, **length},
            "data": {"format": "prompts" if blends(family) else "manifest", "path": "unread", "resolution": 32},
            "algorithm": {"name": "grpo"},
            "rewards": {"ocr": {}},
        }
    )
    report = report_memory(run)
    assert report["complete"]
    frozen = [*pipeline.vae.parameters(), *model.network.parameters(), *model.network.buffers()]
    on_device = 2 * sum(p.numel() for p in frozen)  # bf16
    trained = 16 * counted_lora(model)  # fp32 weights, gradients and two moments
    assert report["device_bytes"] == on_device + trained + positions_of(model)
