"""The evaluations of a run: shared out to all processes, saved beside each other, compared with the earlier ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from retouch.config.training import has_rl
from retouch.errors import log_once
from retouch.observe import RunDir, Stopwatch
from retouch.observe.guards import Alarm, Row, evaluation_alarms, score_of
from retouch.observe.kept import images_of, kept_images, kept_rows, steps_kept
from retouch.observe.log import means_text
from retouch.observe.plateau import lacking_after, trend
from retouch.observe.run_dir import read_metrics
from retouch.observe.settings import alike_after, of_same_examples
from retouch.observe.transfer import transfers
from retouch.rewards.table import RewardTable
from retouch.training.evaluation import (
    Evaluation,
    Scored,
    draw_and_score,
    evaluation_grid,
    measured,
    save_evaluation,
    shared_work,
    work_of,
)
from retouch.training.scoring import RewardOutage, raise_together

if TYPE_CHECKING:
    from retouch.config import RunConfig
    from retouch.training.build import Run

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
    share = partial(shared_work, work, run.config.rollout.batch_size_per_device, world_size=engine.world_size)
    own, padding = share(engine.rank)
    scored: Scored | None = None
    stopped: RewardOutage | None = None
    with run.clock.part("eval"):
        try:
            with run.policy.use("ema" if run.config.ema and c.weights != "raw" else None):
                scored = draw_and_score(
                    run.model,
                    run.network,
                    [work[i] for i in own],
                    c.num_steps or run.config.rollout.num_steps,
                    run.guidance_scale,
                    run.config.rollout.batch_size_per_device,
                    run.rewards,
                    Stopwatch(),  # all of it counts as "eval"
                    [work[i] for i in padding],
                )
        except RewardOutage as error:
            stopped = error
        raise_together(stopped, engine.any)
        assert scored is not None
        parts = engine.gather_list([scored])
        places = [place for rank in range(engine.world_size) for place in share(rank)[0]]
        return measured(work, reduce(add, parts).placed(places)) if engine.is_main else None


class Findings(NamedTuple):
    """The alarms of an evaluation, and the reason to stop where it shows a plateau."""

    alarms: Sequence[Alarm] = ()
    plateau: str | None = None


def keep_evaluation(
    run: Run, step: int, after_warmup: bool, moment: Moment, result: Evaluation, seconds: Mapping[str, float]
) -> Findings:
    """Log, save and draw the evaluation of a step -> its findings; none during a warm-up, which changes images on
    purpose. On the first process.

    Args:
        seconds: time that it took, by part.
    """
    c, first = run.config.evaluation, run.config.algorithm.supervised_steps(run.config) if after_warmup else None
    kept = c.grid_examples * c.images_per_example
    found = record_evaluation(run, step, moment, result, seconds, images=kept, compared_from=first)
    if c.grid_examples:
        before = _milestones(run, step, after_warmup, run.dir.path / "evaluations")
        examples = run.eval_data[: c.num_examples]
        grid = evaluation_grid(examples, {**before, f"step {step}": result}, c.grid_examples)
        run.dir.save_image(step, "evaluation", grid)
    return found


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
) -> Findings:
    """Log the evaluation of a step and save it below evaluations/ -> its findings. On the first process.

    Args:
        images: number of images saved.
        compared_from: first step whose evaluations count as earlier ones; None for no findings.
    """
    held_out, means = "held_out" if run.eval_is_held_out else "train", result.means()
    folder, rewards = run.dir.path / "evaluations", run.rewards
    gold = [name for name in rewards.evaluated if name not in rewards.trained]
    earlier = {} if compared_from is None else _earlier(run.dir.path, compared_from, step)
    earlier = of_same_examples(run.dir.path, earlier, result.rows)
    first = min(earlier, default=step)
    confirmed = transfers(earlier.get(first, ()), result.rows, list(optimized(rewards)), gold)
    record = {**means, **{name: value for one in confirmed for name, value in one.measures().items()}}
    run.dir.log("eval", step, {"moment": moment, "examples": held_out, "images": len(result.rows), **record}, seconds)
    logger.info("step %d, %d %s images: %s", step, len(result.rows), held_out.replace("_", "-"), means_text(means))
    for one in confirmed:
        logger.info("since step %d: %s", first, one.text())
    found = Findings()
    if compared_from is not None:
        alarms = evaluation_alarms([*earlier.values()], result.rows, optimized(rewards), gold)
        found = Findings(alarms, _plateau(run, {**earlier, step: result.rows}))
    save_evaluation(result, folder / f"step-{step:06d}", images)
    return found


def _earlier(run: Path, first: int, step: int) -> dict[int, list[Row]]:
    """The rows of the evaluations of a run from step `first` on, up to before `step`, by step; of those that were made
    as they are today, and of which there is a record: a killed run has left files of steps that it takes again."""
    first = max(first, alike_after(run) + 1)
    images_at = images_of(read_metrics(run / "metrics.jsonl"))
    past = {at: path for at, path in steps_kept(run / "evaluations").items() if first <= at < step and at in images_at}
    return {at: rows for at, path in past.items() if (rows := kept_rows(path, images_at[at])) is not None}


def _plateau(run: Evaluated, evaluations: Mapping[int, Sequence[Row]]) -> str | None:
    """Why the run stops by `training.stop_on_plateau`, or None."""
    given = run.config.training.stop_on_plateau
    if given is False or not has_rl(run.config):
        return None
    weights = optimized(run.rewards) if given is True else {given: 1.0}
    found, name = trend(evaluations, lambda row: score_of(row, weights)), " + ".join(weights)
    if found is None:
        if lacking := lacking_after(len(evaluations)):
            told = "%s: training.stop_on_plateau does not know whether %s still rises: %s"
            log_once(logger, told, run.dir.path, name, lacking)
        return None
    logger.info("plateau: %s changed by %s", name, found)
    return f"training.stop_on_plateau: {name} no longer rises ({found})" if found.over else None


def optimized(rewards: RewardTable) -> dict[str, float]:
    """Weights of the rewards that evaluations score and training optimizes, by advantages or by gradients."""
    weights = {name: rewards.weights[name] + rewards.entries[name].gradient_weight for name in rewards.trained}
    return {name: weight for name, weight in weights.items() if weight and name in rewards.evaluated}


def _milestones(run: Run, step: int, after_warmup: bool, folder: Path) -> dict[str, Evaluation]:
    """Earlier evaluations that stand beside the one of a step in its grid: before the run, and after its warm-up."""
    milestones = {"before": 0}
    if after_warmup and (end := run.config.algorithm.supervised_steps(run.config)):
        milestones["after warm-up"] = end
    images_at = images_of(read_metrics(run.dir.path / "metrics.jsonl"))
    columns: dict[str, Evaluation] = {}
    other = alike_after(run.dir.path)
    for name, at in milestones.items():
        path = folder / f"step-{at:06d}"
        if not other < at < step or not path.is_dir():
            continue
        rows, images = kept_rows(path, images_at.get(at)), kept_images(path)
        if rows is not None and images is not None:
            columns[name] = Evaluation(rows, images)
    return columns
