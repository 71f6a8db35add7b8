"""The evaluations of a run: drawn by all processes, kept beside each other, and looked at for what training hides."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal, Protocol

from retouch.config import RunConfig
from retouch.data.sampler import own_share
from retouch.observe import RunDir, Stopwatch
from retouch.observe.guards import Alarm, evaluation_alarms
from retouch.observe.run_dir import read_metrics
from retouch.rewards.table import RewardTable
from retouch.rollout.scorer import RewardOutage
from retouch.training.build import Run
from retouch.training.evaluation import (
    Evaluation,
    Scored,
    draw_and_score,
    evaluation_grid,
    load_evaluation,
    measured,
    save_evaluation,
    work_of,
)
from retouch.training.stopping import raise_together

logger = logging.getLogger(__name__)

Moment = Literal["start", "warmup", "step", "end"]


def evaluated(run: Run) -> Evaluation | None:
    """Evaluate the weights that the run file names on fixed seeds, each process its share -> all of it on the first
    process, None on the others.

    Raises:
        RewardOutage: on every process, if on any.
    """
    c, engine = run.config.evaluation, run.engine
    work = work_of(run.eval_data[: c.num_examples], c.images_per_example)
    own, padding = own_share(work, engine.rank, engine.world_size)
    scored: Scored | None = None
    stopped: RewardOutage | None = None
    with run.clock.part("eval"):
        try:
            with run.policy.use("ema" if run.config.ema and c.weights != "raw" else None):
                scored = draw_and_score(
                    run.model,
                    run.network,
                    own + work[:1] * padding,
                    c.num_steps or run.config.rollout.num_steps,
                    run.guidance_scale,
                    run.config.rollout.batch_size_per_device,
                    run.rewards,
                    Stopwatch(),  # all of it counts as "eval"
                    padding,
                )
        except RewardOutage as error:
            stopped = error
        raise_together(stopped, engine.any)
        assert scored is not None
        parts = engine.gather_list([scored])
        return measured(work, reduce(add, parts)) if engine.is_main else None


def keep_evaluation(
    run: Run, step: int, after_warmup: bool, moment: Moment, result: Evaluation, seconds: Mapping[str, float]
) -> Sequence[Alarm]:
    """Log, save and draw the evaluation of a step -> its alarms; none during a warm-up, which changes images on
    purpose. On the first process.

    Args:
        seconds: time that it took, by part.
    """
    c, first = run.config.evaluation, run.config.algorithm.supervised_steps(run.config) if after_warmup else None
    kept = c.grid_examples * c.images_per_example
    alarms = record_evaluation(run, step, moment, result, seconds, images=kept, compared_from=first)
    if c.grid_examples:
        before = _milestones(run, step, after_warmup, run.dir.path / "evaluations")
        examples = run.eval_data[: c.num_examples]
        grid = evaluation_grid(examples, {**before, f"step {step}": result}, c.grid_examples)
        run.dir.save_image(step, "evaluation", grid)
    return alarms


class Evaluated(Protocol):
    """The parts of a run that recording an evaluation needs."""

    config: RunConfig
    rewards: RewardTable
    dir: RunDir
    eval_is_held_out: bool


def record_evaluation(
    run: Evaluated,
    step: int,
    moment: Moment,
    result: Evaluation,
    seconds: Mapping[str, float],
    *,
    images: int,
    compared_from: int | None,
) -> Sequence[Alarm]:
    """Log the evaluation of a step and save it below evaluations/ -> its alarms. On the first process.

    Args:
        images: number of images saved.
        compared_from: first step whose evaluations count as earlier ones for alarms; None for no alarms.
    """
    held_out, means = "held_out" if run.eval_is_held_out else "train", result.means()
    run.dir.log("eval", step, {"moment": moment, "examples": held_out, "images": len(result.rows), **means}, seconds)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    logger.info("step %d, %d %s images: %s", step, len(result.rows), held_out.replace("_", "-"), shown)
    folder, rewards = run.dir.path / "evaluations", run.rewards
    alarms: Sequence[Alarm] = []
    if compared_from is not None:
        weights = {name: rewards.weights[name] for name in rewards.trained if rewards.weights[name]}
        gold = [name for name in rewards.entries if name not in rewards.trained]
        past = [path for path in sorted(folder.glob("step-*")) if compared_from <= int(path.name[5:]) < step]
        earlier = [read_metrics(path / "rows.jsonl") for path in past]
        alarms = evaluation_alarms(earlier, result.rows, weights, gold)
    save_evaluation(result, folder / f"step-{step:06d}", images)
    return alarms


def _milestones(run: Run, step: int, after_warmup: bool, folder: Path) -> dict[str, Evaluation]:
    """Earlier evaluations that stand beside the one of a step in its grid: before the run, and after its warm-up."""
    milestones = {
        "before": 0,
        "after warm-up": run.config.algorithm.supervised_steps(run.config) if after_warmup else 0,
    }
    earlier = {name: folder / f"step-{at:06d}" for name, at in milestones.items() if at < step}
    columns = {name: load_evaluation(path) for name, path in earlier.items() if path.is_dir()}
    if len({str(path) for path in earlier.values()}) < len(earlier):  # no warm-up: both are step 0
        columns.pop("after warm-up", None)
    return columns
