"""The cost of a run: images, forwards, FLOPs, hours of GPUs, judges, waiting and disk, from its options alone.

Nothing is loaded. FLOPs are those of the released sizes (`retouch.families.sizes`); hours follow from the rates that
benchmarks/results/gpu.json has, or from a share of the GPU's peak where nothing was measured. Text encoders, the
autoencoder and the optimizer are in the measured rates, adapters and the exchange of gradients are not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from retouch.algorithms.base import Objective
from retouch.config.derived import kept_checkpoints, numbers, rows_per_forward, sampling_forwards, saved_bytes
from retouch.config.errors import ConfigError
from retouch.families.sizes import released_sizes
from retouch.process.machine import PEAKS, peak_of

if TYPE_CHECKING:
    from retouch.config.run import RunConfig
    from retouch.rewards.base import RewardEntry

DEFAULT_GPU = "h200"

MEASURED: Mapping[str, float] = {
    "FluxTransformer2DModel": 266.0,
    "QwenImageTransformer2DModel": 152.0,
    "UNet2DConditionModel": 135.0,
}
"""TFLOP/s of a network on one H200 with images of 512 x 512: the mean of the rows of benchmarks/results/gpu.json that
recompute nothing."""

MEASURED_FAMILIES, MEASURED_GPU, MEASURED_SIZE = ("flux_fill", "qwen_image", "sd_inpaint"), "H200", (512, 512)
"""Families, GPU and size of these rows; any other rate is derived from them."""

CONSUMER: Mapping[str, float] = {"4090": 165e12}
"""Dense bf16 FLOP/s of GPUs whose use no metric reports, with sums in fp32, from NVIDIA's white paper. The laptop GPU
and the D of this name are smaller ones."""

SHARE = 0.2
"""Share of a GPU's peak that is assumed of other networks: between the transformers that were measured, .27 and .15."""

SECONDS_A_QUESTION = 3.0
"""Assumed of a judge that is asked one question; `concurrency` are open at once."""


@dataclass(frozen=True)
class Forwards:
    """Forwards of the network that one image costs; `training` counts a backward as one forward where the network is
    frozen, else as two, and recomputation."""

    sampling: float = 0.0
    ratios: float = 0.0
    training: float = 0.0

    @property
    def all(self) -> float:
        return self.sampling + self.ratios + self.training


@dataclass(frozen=True)
class Judged:
    """A judge in the whole run.

    Attributes:
        dollars: None where the price is not known.
        budget: dollars after which all processes and starts of the run ask no more; a server that was started by hand
            counts its own.
    """

    requests: float
    tokens_in: float
    tokens_out: float
    dollars: float | None
    budget: float | None


@dataclass(frozen=True)
class ScoringCost:
    """A reward in an epoch.

    Attributes:
        seconds: of the instances that the run file names, or of the questions of a judge.
        instances: those of the run file; of a judge, questions that are open at once.
        needed: instances, or open questions, that would be done while the epoch is sampled; None where that time is not
            known.
    """

    seconds: float
    instances: int
    needed: int | None = None
    asks: bool = False


@dataclass(frozen=True)
class Cost:
    """See the module. Sums of the whole run unless named `epoch`; None is not known, and `unknown` states why."""

    gpu: str
    world_size: int
    images_per_epoch: int = 0
    images: float = 0.0
    supervised_rows: float = 0.0
    evaluation_images: int = 0
    forwards: Forwards = Forwards()
    tflop_per_forward: float | None = None
    evaluation_tflop: float | None = None
    tflops: float | None = None
    measured: bool = False
    gpu_hours: float | None = None
    epoch_seconds: float | None = None
    rollout_seconds: float | None = None
    judges: Mapping[str, Judged] = field(default_factory=dict[str, Judged])
    scored: Mapping[str, ScoringCost] = field(default_factory=dict[str, ScoringCost])
    checkpoints: int = 0
    checkpoint_bytes: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def dollars(self) -> float | None:
        """Dollars of all judges; None where one has no known price."""
        each = [judged.dollars for judged in self.judges.values()]
        return None if None in each else sum(one for one in each if one is not None)

    @property
    def replicas(self) -> int:
        """Reward servers that the run would not wait for."""
        return max((one.needed or 1 for one in self.scored.values() if not one.asks), default=1)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "dollars": self.dollars, "replicas": self.replicas}


def cost(run: RunConfig, world_size: int = 1, gpu: str = DEFAULT_GPU) -> Cost:
    """The cost of a run on `world_size` GPUs of this name, like "h100" or one that nvidia-smi shows.

    Raises:
        ConfigError: a GPU whose peak is not known, or as of `numbers`.
    """
    peak = known_peak(gpu)
    if peak is None:
        names = ", ".join((*PEAKS, *CONSUMER))
        raise ConfigError(f"--gpu: given {gpu!r}; expected a GPU whose peak is known: {names}")
    derived, unknown = numbers(run, world_size).as_dict(), list[str]()
    epoch, images, trained, rows = amounts(run, derived)
    evaluated = evaluations(run) * run.evaluation.num_examples * run.evaluation.images_per_example
    forwards = forwards_of(run, derived)
    if not images and not rows:
        unknown.append(f"images: algorithm {run.algorithm.name} does not state how many it samples")
    tflop, evaluation_tflop = (tflop_of(run, data) for data in (run.data, run.evaluation.data or run.data))
    if tflop is None:
        unknown.append(f"FLOPs and GPU hours: {run.model.path} has not the sizes that {run.model.family} records")
    elif (assumed := run.model.assumed_sizes) is not None:
        unknown.append(assumed)
    # A rate that was measured on one GPU is taken for another in proportion to their peaks; a network without one
    # takes a share of the peak. `unknown` names the parts without a number.
    network = run.model.spec.networks.get(run.model.spec.network_name, "")
    rate = MEASURED.get(network, SHARE * PEAKS[MEASURED_GPU] / 1e12) * peak / PEAKS[MEASURED_GPU]
    was = run.model.family in MEASURED_FAMILIES and pixels_of(run.data) == MEASURED_SIZE and is_measured(gpu)
    seconds = hours = rollout = None
    if tflop is not None and evaluation_tflop is not None and (images or rows):
        supervised = supervised_forwards(run)
        rollout = epoch * forwards.sampling * tflop / rate / world_size
        seconds = epoch * forwards.all * tflop / rate / world_size
        training = images * (forwards.sampling + forwards.ratios) + trained * forwards.training + rows * supervised
        evaluation = evaluated * evaluation_forwards(run) * evaluation_tflop
        hours = (training * tflop + evaluation) / rate / 3600
    if run.algorithm.trains_text_encoder:
        unknown.append("generation and training of the text encoder, which come on top of the GPU hours")
    if images and getattr(run.algorithm, "resample_rounds", 0):
        unknown.append("groups that algorithm.resample_rounds samples again, which come on top")
    one = saved_bytes(run)
    if one is None:
        unknown.append("checkpoints: retouch doctor counts what is trained here")
    return Cost(
        gpu=gpu,
        world_size=world_size,
        images_per_epoch=epoch,
        images=images,
        supervised_rows=rows,
        evaluation_images=evaluated,
        forwards=forwards,
        tflop_per_forward=tflop,
        evaluation_tflop=evaluation_tflop,
        tflops=None if tflop is None else rate,
        measured=was,
        gpu_hours=hours,
        epoch_seconds=seconds,
        rollout_seconds=rollout,
        judges=dict(judges(run, images, evaluated)),
        scored=dict(scored(run, epoch, world_size, rollout)),
        checkpoints=kept_checkpoints(run),
        checkpoint_bytes=one,
        unknown=tuple(unknown),
    )


def known_peak(gpu: str) -> float | None:
    """Peak FLOP/s of a GPU by its name; None if unknown."""
    return peak_of(gpu) or next(
        (peak for known, peak in CONSUMER.items() if re.search(rf"(?:\b|RTX){known}$", gpu.strip())), None
    )


def is_measured(gpu: str) -> bool:
    """Whether a name is that of the GPU that was measured."""
    return MEASURED_GPU.lower() in gpu.lower() and peak_of(gpu) == PEAKS[MEASURED_GPU]


def amounts(run: RunConfig, derived: Mapping[str, float]) -> tuple[int, float, float, float]:
    """Images of an epoch, sampled images of the run, those of them that its steps train on, and rows of supervised
    steps or of given pairs and labels. The last epoch is sampled whole, however many steps are left for it."""
    steps = run.training.max_steps
    if "global_completions_per_generation" in derived:
        epoch = int(derived["images_per_generation_per_device"] * derived["world_size"])
        images = epoch * derived["generations"]
        return epoch, images, images, 0
    epoch, rows = int(derived.get("global_images_per_epoch", 0)), derived.get("global_rows_per_step", 0)
    warmup = derived.get("warmup_steps", 0)
    if not epoch:
        return 0, 0, 0, steps * rows * (2 if "win" in run.algorithm.given_images else 1)
    trained = (steps - warmup) / derived["optimizer_steps_per_epoch"] * epoch
    return epoch, derived["epochs"] * epoch, trained, warmup * rows


def forwards_of(run: RunConfig, derived: Mapping[str, float]) -> Forwards:
    """Forwards of an image that is sampled; of a given one where nothing is. The algorithm's count is linear in what a
    training forward with its backward costs, which separates the parts."""
    if not isinstance(run.algorithm, Objective):
        return Forwards(sampling=derived.get("forwards_per_image", 0))
    algorithm, guided = run.algorithm, run.model.forwards_of_guidance(run.guidance_scale)
    steps = max(1, int(derived.get("optimizer_steps_per_epoch", 1)))
    rest, one = (algorithm.forwards_per_image(run, steps, guided, backward) for backward in (0, 1))
    sampling = guided * sampling_forwards(run) if algorithm.trains_on_rewards else 0.0
    return Forwards(sampling, max(0.0, rest - sampling), (one - rest) * training_forwards(run))


def training_forwards(run: RunConfig) -> int:
    """A training forward, its backward, and recomputation."""
    return 1 + (2 if run.model.train.kind == "full" else 1) + run.training.gradient_checkpointing


def supervised_forwards(run: RunConfig) -> float:
    """Forwards of a row of a supervised step, or of a given image."""
    if run.algorithm.given_images and isinstance(run.algorithm, Objective):
        return forwards_of(run, {}).all
    return training_forwards(run)


def evaluations(run: RunConfig) -> int:
    """Evaluations of the run: at the start, at the end of a warm-up, at the end, and regular ones between."""
    steps, every = run.training.max_steps, run.training.eval_every
    warmup = run.algorithm.supervised_steps(run)
    regular = (steps - 1) // every if every else 0
    own = 0 < warmup < steps and not (every and warmup % every == 0)
    return 2 + regular + own


def evaluation_forwards(run: RunConfig) -> float:
    """Forwards of an image of an evaluation."""
    return (run.evaluation.num_steps or run.rollout.num_steps) * run.model.forwards_of_guidance(run.guidance_scale)


def tflop_of(run: RunConfig, data: Any) -> float | None:
    """TFLOP of a forward of one sample of `data`; None where the sizes of the network are not known."""
    released = released_sizes(run.model.spec) if run.model.has_released_sizes else None
    if released is None:
        return None
    return released.flops(*run.model.network_tokens(pixels_of(data), data.has_images)) / 1e12


def pixels_of(data: Any) -> tuple[int, int]:
    """(height, width) of the images in the network, with a strip above them; of several shapes the largest with it,
    because a strip is as wide as the image."""
    return max(data.page_sizes, key=math.prod)


def judges(run: RunConfig, images: float, evaluated: float) -> Iterator[tuple[str, Judged]]:
    """Every judge, by the name of its reward."""
    for name, entry in run.rewards.items():
        trained, held_out = images_scored(entry, images, evaluated)
        asked = entry.questions(run.rollout.group_size)
        if asked:
            number = trained + held_out
            requests = number * sum(question.number for question in asked)
            tokens_in = number * sum(q.number * q.tokens_in(run.data.size) for q in asked)
            tokens_out = number * sum(q.number * q.tokens_out for q in asked)
            prices, budget = entry.prices(), getattr(entry, "budget_dollars", None)
            dollars = None if prices is None else (tokens_in * prices[0] + tokens_out * prices[1]) / 1e6
            yield name, Judged(requests, tokens_in, tokens_out, dollars, budget)


def images_scored(entry: RewardEntry, images: float, evaluated: float) -> tuple[float, float]:
    """Images that a reward scores in training, and in evaluations."""
    return (images if entry.role == "train" else 0.0), (0.0 if entry.compares_group() else evaluated)


def scored(run: RunConfig, epoch: int, world_size: int, hidden: float | None) -> Iterator[tuple[str, ScoringCost]]:
    """Every trained reward whose time is known, by its name.

    Args:
        hidden: seconds of an epoch during which rewards are scored and nothing waits.
    """
    for name, entry in run.rewards.items():
        if entry.role != "train" or not epoch:
            continue
        instances = world_size if entry.url is None else len(entry.url) if isinstance(entry.url, list) else 1
        questions = sum(question.number for question in entry.questions(run.rollout.group_size))
        if questions:
            instances *= getattr(entry, "concurrency", 1)
        seconds = epoch * (questions * SECONDS_A_QUESTION or entry.seconds_an_image())
        if seconds:
            needed = math.ceil(seconds / hidden) if hidden else None
            yield name, ScoringCost(seconds / instances, instances, needed, bool(questions))


def cost_lines(run: RunConfig, known: Cost) -> list[str]:
    """The cost as lines of text."""
    return ["cost", *(f"  {name:14} {told}" for name, told in told_of(run, known))]


def details_of(run: RunConfig, known: Cost) -> Iterator[tuple[str, str]]:
    """(what, numbers) of a forward."""
    if isinstance(run.algorithm, Objective):
        cpu, gpu = (rows_per_forward(run, device) for device in ("cpu", "gpu"))
        where = f" on a CPU, {gpu} on a GPU" if cpu != gpu else ""
        yield "a forward", f"{cpu} rows of the network in training{where}"
    if known.tflop_per_forward is not None and known.tflops is not None:
        size = " x ".join(map(str, pixels_of(run.data)))
        yield "TFLOP", f"{known.tflop_per_forward:.3g} a forward at {size}"


def told_of(run: RunConfig, known: Cost) -> Iterator[tuple[str, str]]:
    """(what, numbers) of the run."""
    # A line only for what the run has: an algorithm without rollouts has no images, a family of a plug-in no FLOPs. A
    # number that could not be derived is not left out in silence: the last lines name the reason.
    f = known.forwards
    if known.images:
        yield "images", f"{known.images_per_epoch:,} an epoch, {known.images:,.0f} in the run"
        parts = ((f.sampling, "sampled"), (f.ratios, "for ratios and references"), (f.training, "to train"))
        yield "forwards", " + ".join(f"{count:g} {what}" for count, what in parts if count) + " an image"
    if known.supervised_rows:
        yield "supervised", f"{known.supervised_rows:,.0f} rows"
    if known.gpu_hours is not None:
        how = "measured" if known.measured else "derived"
        each = (
            f", {known.gpu_hours / known.world_size:,.0f} on each of the {known.world_size}"
            if known.world_size > 1
            else ""
        )
        yield "GPU hours", f"{known.gpu_hours:,.0f} on {known.gpu} at {known.tflops:.0f} TFLOP/s ({how}){each}"
    if known.epoch_seconds and known.rollout_seconds:
        where = f"{known.world_size} GPU" + ("s" if known.world_size > 1 else "")
        yield "an epoch", f"{known.epoch_seconds:,.0f} s on {where}, {known.rollout_seconds:,.0f} s of them to sample"
    for name, one in known.scored.items():
        yield name, reward_told(one)
    for name, judged in known.judges.items():
        yield name, judge_told(judged)
    if known.checkpoint_bytes is not None:
        each, count = known.checkpoint_bytes / 2**30, known.checkpoints
        yield "disk", f"{each * count:,.1f} GiB: {count} checkpoints of {each:.1f} GiB"
    for why in known.unknown:
        yield "not known", why


def reward_told(one: ScoringCost) -> str:
    kind, more = ("question", "questions at once") if one.asks else ("instance", "replicas")
    instances = f"{one.instances} {kind}{'s' if one.instances > 1 else ''}" + (" at once" if one.asks else "")
    needed = ""
    if one.needed is not None and one.needed > one.instances:
        needed = f"; {one.needed} {more} would not be waited for"
    return f"{one.seconds:,.0f} s an epoch of {instances}{needed}"


def judge_told(judged: Judged) -> str:
    price = "no known price: set price_in and price_out" if judged.dollars is None else f"${judged.dollars:,.0f}"
    budget = "" if judged.budget is None else f", a budget of ${judged.budget:,.0f} for the whole run"
    tokens = f"{judged.tokens_in / 1e6:,.1f} + {judged.tokens_out / 1e6:,.1f} million tokens"
    return f"{judged.requests:,.0f} requests, {tokens}, {price}{budget}"
