"""What the first run of vlm_grpo on a machine with GPUs meets, as far as a CPU shows it: several GPUs without a
launcher, ZeRO-2's checkpoints, a frozen vision tower, and the precision in which a run of all weights is used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("trl")

from accelerate.state import AcceleratorState, PartialState

from retouch.algorithms.vlm_grpo import use
from retouch.algorithms.vlm_grpo.checkpoint import saved_dtype
from retouch.algorithms.vlm_grpo.recipe import VlmTrainer
from retouch.algorithms.vlm_grpo.trainer import trl_arguments
from retouch.algorithms.vlm_grpo.use import evaluated_dtype
from retouch.config import load_run
from retouch.engine.saved import declare_complete
from retouch.observe.run_dir import read_rows
from tests.command_line import retouch

from . import vlm_runs
from .test_vlm_grpo import Watched, parts_of
from .vlm_runs import RunFile, run_section, train, vlm_file, weights

__all__ = ["parts_of", "vlm_file"]

FULL = {"use_peft": None, "lora_r": None, "lora_alpha": None, "lora_dropout": None, "learning_rate": 1e-3}
MODEL = run_section(Path())["model"]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As transformers and accelerate see them. The state of the processes is made anew afterwards."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def test_one_process_takes_the_first_of_several_gpus(two_gpus: Any, vlm_file: RunFile) -> None:
    arguments = trl_arguments(load_run(vlm_file()))
    assert (arguments.n_gpu, arguments.world_size, arguments.device) == (1, 1, torch.device("cuda:0"))


def test_several_gpus_without_a_launcher_train(parts_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL counts them in its constructor; here they only count, and the CPU computes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    parts, arguments = parts_of({"use_cpu": False})
    assert VlmTrainer(parts, arguments).args.train_batch_size == 8


@pytest.mark.parametrize(
    "trl", [pytest.param({}, id="adapter", marks=pytest.mark.full), pytest.param(FULL, id="all weights")]
)
def test_a_frozen_vision_tower_has_no_backward(parts_of: Any, trl: dict[str, Any]) -> None:
    """Under gradient checkpointing, which transformers turns on when the training begins, and TRL after each
    generation."""
    parts, arguments = parts_of(trl, training__gradient_checkpointing=True, training__max_steps=1)
    backwards: list[str] = []
    trainer = Watched(parts, arguments)
    model: Any = trainer.model
    for name, module in model.named_modules():
        if name.endswith(("visual.blocks.0", "language_model.layers.0")):
            module.register_full_backward_hook(lambda *_, name=name: backwards.append(name))
    trainer.train()
    assert backwards and not any("visual" in name for name in backwards)
    trained = {name for name, p in model.named_parameters() if p.grad is not None or p.requires_grad}
    assert trained and not any("visual" in name for name in trained)


def test_zero_2_writes_an_adapter_without_a_copy_of_the_text_encoder(
    parts_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = VlmTrainer(*parts_of())
    trainer.save_model(str(tmp_path / "before"))
    copied: list[Any] = []

    def copy(model: Any) -> dict[str, Tensor]:
        copied.append(model)
        return model.state_dict()

    monkeypatch.setattr(trainer.accelerator, "get_state_dict", copy)
    trainer.is_deepspeed_enabled = True
    trainer.deepspeed = trainer.model_wrapped = trainer.model
    trainer.args.deepspeed_plugin = SimpleNamespace(zero_stage=2)
    trainer.save_model(str(tmp_path / "after"))
    assert not copied
    one, two = (Path(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("before", "after"))
    assert one == two


def test_a_run_is_evaluated_in_the_dtype_of_its_weights(vlm_file: RunFile, tmp_path: Path) -> None:
    """bf16 from ZeRO-3, fp32 from other engines; the base beside them in the same; without weights, and under an
    adapter, `model.dtype`."""
    config = load_run(vlm_file(FULL, model={**MODEL, "dtype": "bf16"}))
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        save_file({"a.weight": torch.zeros(2, dtype=dtype)}, folder / "model.safetensors")
        assert saved_dtype(folder) == evaluated_dtype(config, [None, folder]) == dtype
        assert evaluated_dtype(load_run(vlm_file(model={**MODEL, "dtype": "bf16"})), [folder]) == torch.bfloat16
    assert evaluated_dtype(config, [None]) == torch.bfloat16
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert evaluated_dtype(config, [folder]) == torch.bfloat16


@pytest.mark.full
def test_a_run_of_all_weights_is_evaluated_in_its_precision(
    vlm_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word by word, under autocast, as the run was. From bf16 weights, which ZeRO-3 leaves, no weight becomes fp32."""
    file = vlm_file(
        {**FULL, "max_completion_length": 24},
        model={**MODEL, "dtype": "bf16"},
        evaluation={"num_examples": 6, "grid_examples": 0},
        training__max_steps=1,
        training__mixed_precision="bf16",
    )
    assert train(file).code == 0
    opened: list[torch.dtype] = []
    scorer = use.CompletionScorer

    def watched(run: Any) -> Any:
        opened.append(run.policy.dtype)
        return scorer(run)

    monkeypatch.setattr(use, "CompletionScorer", watched)
    again = ("eval", "--run", tmp_path / "a", "--trust", "--data", str(vlm_runs.tasks()), "--out", tmp_path / "out")
    done = retouch(*again)
    assert done.code == 0, done.err
    for step, name in ((0, "base"), (1, "after-RL")):
        during = read_rows(tmp_path / f"a/evaluations/step-{step:06d}/rows.jsonl")
        assert during == read_rows(tmp_path / f"out/{name}.jsonl")
    checkpoint = tmp_path / "a/checkpoints/step-000001"
    lowered = {name: tensor.bfloat16() for name, tensor in weights(tmp_path / "a", 1).items()}
    save_file(lowered, checkpoint / "weights/model.safetensors", {"format": "pt"})
    declare_complete(checkpoint, 1, pinned=True)
    assert retouch(*again).code == 0
    assert opened == [torch.float32] * 2 + [torch.bfloat16] * 2
