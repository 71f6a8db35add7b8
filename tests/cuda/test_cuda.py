"""What only a GPU can show: `make test-gpu`.

The run without sharding, its precisions, kernels and memory. What does not depend on the device is tested on the CPU.
Without a GPU these tests run on the CPU, so that they do not wait for the next GPU to tell that a run of theirs is no
longer valid.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel

from retouch.adapters.lora import add_lora
from retouch.config.run import (
    OptimizerConfig,
    TrainingConfig,
)
from retouch.engine import Engine
from retouch.families.flux_fill.spec import FluxFillModel
from retouch.families.quantized import QuantizedLinear
from retouch.observe.timing import PARTS
from retouch.tiny.signs import (
    draw_words,
    write_signs,
)
from retouch.training.step import ON_POLICY_TOLERANCE, forward_precision
from tests.algorithms.runs import Config, Use, brightness, of_kind, train, weights
from tests.algorithms.test_cells import resumes_bitwise
from tests.tiny_models import tiny_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []

needs_a_gpu = pytest.mark.skipif(DEVICE.type == "cpu", reason="there is no GPU")

variant: list[pytest.MarkDecorator] = [pytest.mark.full] if DEVICE.type == "cpu" else []
"""Marks of a case that is left out where the CPU stands in."""


@pytest.fixture(autouse=True)
def other_kernels() -> Any:
    """As they were before a test."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.parametrize(
    ("family", "algorithm", "kind"),
    [
        pytest.param("flux_fill", "grpo", "lora", marks=variant),
        pytest.param("flux_fill", "nft", "full", marks=variant),
        pytest.param("sd_inpaint", "dpo", "lora", marks=variant),
        pytest.param("sd_inpaint", "ppo", "full", marks=variant),
        ("qwen_image", "grpo", "lora"),
    ],
)
def test_with_deterministic_kernels_a_run_resumes_bitwise(
    family: str, algorithm: str, kind: str, config: Config, scripted: Use, signs: Path
) -> None:
    scripted(brightness)
    resumes_bitwise(family, algorithm, kind, config, signs=signs, training__deterministic=True)


@pytest.mark.parametrize(
    "precision", ["no", pytest.param("bf16", marks=variant), pytest.param("fp16", marks=needs_a_gpu)]
)
@pytest.mark.parametrize(
    "family", [*(pytest.param(family, marks=variant) for family in ("flux_fill", "sd_inpaint", "sd3")), "qwen_image"]
)
def test_before_the_first_update_the_ratio_is_one(family: str, precision: str, config: Config, scripted: Use) -> None:
    """Sampled four at a time, trained two at a time. fp16's loss scaler may skip a step, and says so."""
    scripted(brightness)
    given = config(
        model={
            "family": family,
            "path": tiny_model(family),
            "dtype": {"no": "fp32"}.get(precision, precision),
            "train": {"kind": "lora", "rank": 4, "alpha": 8},
            **({} if family == "sd_inpaint" else {"max_sequence_length": 32}),
        },
        rollout__noise_level=None,
        training__mixed_precision=precision,
        optimizer={"lr": 1e-4, "batch_size_per_device": 2, "gradient_accumulation": 2},
    )
    run, records = train(given)
    assert run.engine.device.type == DEVICE.type
    steps = of_kind(records, "train")
    assert all(step["max_abs_log_ratio"] <= ON_POLICY_TOLERANCE[forward_precision(given)] for step in steps)
    moved = [step for step in steps if not step["overflow"]]
    assert len(moved) >= (1 if precision == "fp16" else len(steps))
    assert all(0 < step["grad_norm"] < 1e4 for step in moved)
    assert all(bool(t.isfinite().all()) for t in weights(run).values())


def test_the_gradient_of_a_reward_trains_beside_advantages(config: Config) -> None:
    """Latents of an epoch wait on the CPU, the decoder is on the GPU."""
    run, records = train(
        config(
            algorithm={"name": "nft", "old_policy": "copy"},
            rewards={"preservation": {"gradient_weight": 1.0}},
            rollout__window=None,
            rollout__noise_level=None,
        )
    )
    assert run.engine.device.type == DEVICE.type and run.rewards.failed == 0
    assert all(0 < step["grad_norm"] < 1e4 for step in of_kind(records, "train"))


@pytest.mark.parametrize("scheme", ["int8", pytest.param("fp8", marks=variant), pytest.param("nf4", marks=variant)])
def test_a_quantized_base_is_on_policy_and_that_of_the_cpu(scheme: Any, config: Config, scripted: Use) -> None:
    """The first ratio is exactly 1 where rollout and training have the same batches, and a matrix that is quantized on
    the GPU is restored as on the CPU, to a rounding step."""
    if scheme == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    scripted(brightness)
    run, records = train(
        config(
            model__train={"kind": "lora", "rank": 4},
            model__quantize=scheme,
            model__dtype="bf16",
            training__mixed_precision="bf16",
            rollout__batch_size_per_device=1,
            optimizer__batch_size_per_device=1,
            rollout__window={"size": 1},
        )
    )
    assert run.engine.device.type == DEVICE.type
    first = of_kind(records, "train")[0]
    assert first["max_abs_log_ratio"] == 0.0 and first["grad_norm"] > 0
    whole = torch.nn.Linear(96, 24)
    here, there = (
        QuantizedLinear(whole, scheme, device).to(device).matrix(torch.float32) for device in ("cpu", DEVICE)
    )
    torch.testing.assert_close(there.cpu(), here, atol=1e-6, rtol=1e-5)


@needs_a_gpu
def test_moments_of_8_bits_train_and_resume(config: Config, scripted: Use) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    scripted(brightness)
    ends: dict[str, dict[str, torch.Tensor]] = {}
    for moments in ("fp32", "int8"):
        run, _ = train(
            config(
                name=moments,
                training__max_steps=4,
                training__checkpoint_every=2,
                training__deterministic=True,
                optimizer__moments=moments,
            )
        )
        ends[moments] = weights(run)
    assert any(not torch.equal(t, ends["int8"][n]) for n, t in ends["fp32"].items())
    for name, tensor in ends["fp32"].items():
        torch.testing.assert_close(ends["int8"][name], tensor, atol=8e-4, rtol=0)  # four steps of 1e-4 either way
    again, _ = train(
        config(
            name="again",
            resume=str(run.dir.path / "checkpoints/step-000002"),
            training__max_steps=4,
            training__deterministic=True,
            optimizer__moments="int8",
        )
    )
    for name, tensor in weights(again).items():
        torch.testing.assert_close(tensor, ends["int8"][name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", [pytest.param("flux_fill", marks=variant), "qwen_image"])
def test_networks_that_wait_on_the_cpu_change_nothing(family: str, config: Config, scripted: Use) -> None:
    scripted(brightness)
    model = {
        "family": family,
        "path": tiny_model(family),
        "dtype": "fp32",
        "max_sequence_length": 32,
        "train": {"kind": "lora", "rank": 4, "alpha": 8},
    }
    ends: list[dict[str, torch.Tensor]] = []
    for name, waits in (("stays", False), ("waits", True)):
        run, _ = train(
            config(
                name=name,
                model={**model, "offload_text_encoders": waits, "offload_vae": waits},
                training__max_steps=2,
                training__deterministic=True,
            )
        )
        ends.append(weights(run))
        assert next(run.model.vae.parameters()).device.type == ("cpu" if waits else DEVICE.type)
    assert all(torch.equal(t, ends[1][n]) for n, t in ends[0].items())


@pytest.mark.parametrize(
    "family", [*(pytest.param(family, marks=variant) for family in ("flux_fill", "sd_inpaint")), "qwen_image"]
)
def test_a_style_adapter_trains_and_its_cost_is_told(
    family: str, config: Config, scripted: Use, tmp_path: Path
) -> None:
    """FLOPs are counted where the peak of the device is known: on the UNet without its adapter, too."""
    scripted(brightness)
    write_signs(tmp_path / "styled", draw_words(6, "train", 2), (32, 64), 2, styled=True)
    model = {
        "family": family,
        "path": tiny_model(family),
        "dtype": "bf16",
        "train": {"kind": "ip_adapter", "image_encoder": "tiny", "tokens": 4},
        **({} if family == "sd_inpaint" else {"max_sequence_length": 32}),
    }
    _, records = train(
        config(
            model=model,
            data={"format": "self_bench", "path": str(tmp_path / "styled"), "resolution": [32, 64]},
            evaluation__data=None,
            rollout__noise_level=None,
            training__max_steps=2,
            training__mixed_precision="bf16",
        )
    )
    for step in of_kind(records, "train"):
        seconds = step["time"]
        assert step["grad_norm"] > 0
        assert DEVICE.type == "cpu" or seconds["peak_memory_gib"] > 0
        parts = sum(seconds[name] for name in PARTS)
        assert parts == pytest.approx(seconds["step"], rel=0.02)
        if "mfu" in seconds:  # of a device whose peak is known
            assert 0 <= seconds["mfu"] < 1 and "tflops" in seconds  # of a toy: rounded to 0


@needs_a_gpu
def test_the_backward_of_blocks_of_the_released_width() -> None:
    """Two double and two single blocks of FLUX.1-Fill with LoRA, as many tokens as 512 x 512 pixels have, in bf16 with
    recomputation. With cuDNN's attention this read beyond its memory."""
    torch.manual_seed(0)
    with DEVICE:
        sizes = dict(FluxFillModel.spec.released["transformer"]) | {"num_layers": 2, "num_single_layers": 2}
        network = FluxTransformer2DModel(**sizes).to(torch.bfloat16)
    add_lora(network, 16, 16, FluxFillModel.spec.lora_targets)
    engine = Engine(TrainingConfig(mixed_precision="bf16"), OptimizerConfig(), seed=0)
    engine.prepare(network, gradient_checkpointing=True)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    lines = torch.arange(1024, device=DEVICE)
    ids = torch.stack([torch.zeros_like(lines), lines // 32, lines % 32], dim=1).bfloat16()

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

    for rows in (1, 2, 2):
        out = engine.network(
            hidden_states=noise(rows, 1024, 384),
            encoder_hidden_states=noise(rows, 512, 4096),
            pooled_projections=noise(rows, 768),
            timestep=torch.full((rows,), 0.5, device=DEVICE, dtype=torch.bfloat16),
            guidance=torch.full((rows,), 30.0, device=DEVICE),
            img_ids=ids,
            txt_ids=torch.zeros(512, 3, device=DEVICE, dtype=torch.bfloat16),
            return_dict=False,
        )[0]
        engine.backward(out.float().square().mean())
    torch.cuda.synchronize()
    gradients = [p.grad for p in network.parameters() if p.requires_grad and p.grad is not None]
    assert gradients and all(bool(g.isfinite().all()) for g in gradients)
    assert any(bool(g.any()) for g in gradients)


def test_log_probs_computed_again_have_the_rounding_of_training(config: Config, scripted: Use) -> None:
    """In bf16, sampled four at a time and trained one at a time, in two updates that change nothing: the second is
    compared with what it computes itself, to the last bit."""
    scripted(brightness)
    _, records = train(
        config(
            model={
                "family": "flux_fill",
                "path": tiny_model("flux_fill"),
                "dtype": "bf16",
                "max_sequence_length": 32,
                "train": {"kind": "lora", "rank": 4, "alpha": 8},
            },
            algorithm__old_log_probs="recomputed",
            training__max_steps=2,
            training__mixed_precision="bf16",
            optimizer={"lr": 1e-30, "batch_size_per_device": 1, "gradient_accumulation": 2},
        )
    )
    _, later = of_kind(records, "train")
    assert later["max_abs_log_ratio"] == 0.0 and later["ratio"] == 1.0
