"""Use a text encoder that vlm_grpo trained: `retouch sample` and `retouch eval` with its own completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image

from retouch.algorithms.vlm_grpo.checkpoint import load_weights, saved_dtype
from retouch.algorithms.vlm_grpo.config import VlmGrpoConfig
from retouch.algorithms.vlm_grpo.run import VlmRun, run_with_networks
from retouch.algorithms.vlm_grpo.scoring import CompletionScorer, evaluation_of
from retouch.config import RunConfig
from retouch.data.dataset import Dataset
from retouch.families.loading import DTYPES
from retouch.imaging.png import write_png
from retouch.observe import RunDir, Stopwatch
from retouch.rewards.table import RewardTable
from retouch.rollout.sampler import require_drawn
from retouch.training.evaluation import Evaluation


def open_trained(
    config: RunConfig, data: Dataset, weights: Path | None, rewards: RewardTable, device: Any, dtype: torch.dtype
) -> VlmRun:
    """A run with trained weights in its policy; None: the base.

    Args:
        dtype: of `evaluated_dtype`.

    Raises:
        ModelFilesError, CheckpointError: files that are missing or of another model.
    """
    algorithm = config.algorithm
    assert isinstance(algorithm, VlmGrpoConfig)
    derived, run_dir = _one_process(algorithm).derive(config), RunDir(config, main=False)
    run = run_with_networks(config, device, derived, data, data, rewards, run_dir, Stopwatch(), dtype=dtype)
    run.policy.to(device).eval().requires_grad_(False)
    if weights is not None and (weights / "adapter_config.json").is_file():
        run.policy = PeftModel.from_pretrained(run.policy, str(weights)).eval()
    if weights is not None:
        load_weights(run.policy, weights)  # an adapter again, exactly: from_pretrained ignores names that do not match
    lowered = DTYPES.get(config.training.mixed_precision, torch.float32)
    if not algorithm.uses_adapter and dtype == torch.float32 != lowered:
        # the trainer samples whole fp32 weights under autocast, and adapters and DeepSpeed's weights without
        run.policy.forward = torch.autocast(torch.device(device).type, lowered)(run.policy.forward)
    return run


def evaluated_dtype(config: RunConfig, weights: Iterable[Path | None]) -> torch.dtype:
    """Dtype of the text encoder in the evaluations of a run, by its weights: bf16 under ZeRO-3, else fp32 where all
    weights are trained, and `model.dtype` under an adapter. Another dtype would sample other completions."""
    assert isinstance(config.algorithm, VlmGrpoConfig)
    stored = (saved_dtype(folder) for folder in weights if folder is not None and not config.algorithm.uses_adapter)
    return next((dtype for dtype in stored if dtype is not None), DTYPES[config.model.dtype])


def evaluate_trained(
    config: RunConfig, data: Dataset, weights: Mapping[str, Path | None], images: int | None, rewards: RewardTable
) -> dict[str, Evaluation]:
    """Evaluate each set of weights on the same examples and seeds."""
    examples = data[: config.evaluation.num_examples]
    rounds = range(images or config.evaluation.images_per_example)

    dtype = evaluated_dtype(config, weights.values())

    def evaluated(folder: Path | None) -> Evaluation:  # frees its networks before the next ones are loaded
        run = open_trained(config, data, folder, rewards, _device(), dtype)
        scorer = CompletionScorer(run)
        return evaluation_of([scorer.complete(run.policy, examples, 0, "eval", k, score=True) for k in rounds])

    return {name: evaluated(folder) for name, folder in weights.items()}


def sample_trained(
    config: RunConfig,
    data: Dataset,
    weights: Path | None,
    seed: int,
    count: int,
    steps: int | None,
    path_of: Callable[[int], Path],
    about: Callable[[int], Mapping[str, str]] = lambda _: {},
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Generate completions and images for every example: a PNG each, with its completion in a text file beside it.

    Args:
        path_of: from the id of an example to the path of its next image.
        about: from the id of an example to the texts that its images hold.
        dtype: of `evaluated_dtype`; None for that of these weights.

    Returns:
        Paths of the images.
    """
    steps = steps or config.evaluation.num_steps
    if steps is not None:
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_steps": steps})})
    dtype = dtype or evaluated_dtype(config, [weights])
    run = open_trained(config, data, weights, RewardTable({}, config.reward_client), _device(), dtype)
    scorer, written = CompletionScorer(run), list[Path]()
    for position in range(len(data)):
        example = data[position]
        for k in range(count):
            [generated] = scorer.complete(run.policy, [example], seed, "sample", k, score=False)
            require_drawn(generated.broken, example.id)
            path = path_of(example.id)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".txt").write_text(generated.text + "\n", encoding="utf-8")
            write_png(Image.fromarray(generated.images[0].numpy()), path, about(example.id))
            written.append(path)
    return written


def _device() -> str:
    return str(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def _one_process(algorithm: VlmGrpoConfig) -> VlmGrpoConfig:
    """The algorithm with batch sizes that fit one process; they have no effect without training."""
    group = algorithm.count("num_generations")
    sizes = {"per_device_train_batch_size": group, "gradient_accumulation_steps": 1, "num_iterations": 1}
    rest = {n: v for n, v in algorithm.trl.items() if n not in ("steps_per_generation", "generation_batch_size")}
    return algorithm.model_copy(update={"trl": {**rest, **sizes}})
