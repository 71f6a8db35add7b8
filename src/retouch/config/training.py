"""Sections `ema`, `training`, `evaluation` and `logging` of a run file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from retouch.algorithms.base import RlConfig
from retouch.config.base import Count, Name, Positive, Section, SolverSteps
from retouch.config.reads import ReadBy, ReadIf, ReadIn
from retouch.data.formats import Data

if TYPE_CHECKING:
    from retouch.config.run import RunConfig

COLUMNS = frozenset(
    {
        *("example", "index", "text", "read", "level", "discipline", "complexity", "image_type"),
        *("outside_l1", "glyph_correlation", "failed", "combined"),
        *("step", "kind", "time", "moment", "examples", "images"),
    }
)
"""Columns of an evaluation, and keys of its record in metrics.jsonl, beside those of its rewards."""

PLATEAU_EXAMPLES = 20
"""Examples that a verdict on a plateau needs. Equal changes have an interval without width, and the probability that so
many are equal by chance is below what any of 500 evaluations spends."""


PLATEAU_EVALUATIONS = 7
"""Evaluations that the first verdict on a plateau needs: two in each third of a run, and the one that ends it."""

FALSE_ALARMS = 0.05
"""Probability that a run of any length whose gold rewards never change has an alarm of one of them."""


def gold_share(earlier: int, rewards: int = 1) -> float:
    """Probability of a false alarm that comparing a gold reward with one of `earlier` evaluations may have.

    The k-th comparison of a run chooses from k evaluations and spends 1 / (k (k + 1)) of `FALSE_ALARMS`, divided among
    them and among the gold rewards; the sum over all k is 1 (Bonferroni; alpha spending, Lan and DeMets 1983).
    """
    return FALSE_ALARMS / (earlier**2 * (earlier + 1) * rewards)


class EmaConfig(Section):
    """Exponential moving average of the trained weights; decay_t = min((1 + t) / (10 + t), decay). t counts the
    optimizer steps that changed the weights, from 1 at the first, as in Flow-GRPO (which counts from 0), and not the
    updates of the average, as in diffusers (EMAModel): with an `update_interval` of 8 the decay rises 8 times as
    fast."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.999
    """Maximum decay; early updates use less."""
    update_interval: Count = 1
    """Optimizer steps between updates."""


def _not_sharded(own: object, run: RunConfig) -> str:
    useful = "zero2" if run.model.train.kind == "ip_adapter" else "fsdp2"
    return f"but training.sharding is none; leave it out, or set sharding={useful}"


class TrainingConfig(Section):
    FREE_IN_EPOCH: ClassVar[Set[str]] = {
        "max_steps", "max_minutes", "checkpoint_every", "keep_checkpoints", "eval_every", "stop_on_plateau",
        "gradient_checkpointing", "compile", "deterministic", "sharding", "shard_gradients",
    }  # fmt: skip

    max_steps: Annotated[int, Field(ge=1, le=1_000_000_000)] = 10000
    """Optimizer steps of the whole run, warm-up included."""
    max_minutes: Positive | None = None
    """Minutes after which this process stops at the next step boundary, resumable and with exit code 0; null: never."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 500
    """Optimizer steps between checkpoints; 0 writes them only at the end of warm-up and of the run."""
    keep_checkpoints: Count | None = None
    """Number of checkpoints to keep; older ones are deleted, except those at the end of warm-up and of the run. Null
    keeps all."""
    eval_every: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps between evaluations; 0 evaluates only at the start, at the end of warm-up and at the end."""
    stop_on_plateau: bool | Name = False
    """Stop, resumable and with exit code 0, when the evaluations no longer rise: their last third adds less than a
    tenth of the gain since the start of RL, with confidence (docs/expect.md). True reads the weighted sum of the
    rewards of role train, a name the values of that reward."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "bf16"
    """Autocast of forward and backward; trained weights stay fp32. "no" computes in model.dtype: a bf16 base and its
    LoRA then compute in bf16 throughout, as diffusers' pipelines do; autocast has norms and sums in fp32.
    Without full training a model.dtype of fp16 needs fp16 here, whose loss scaler keeps small gradients above 0, and
    fp16 here needs a model.dtype of fp16 or fp32."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, one more forward."""
    compile: Annotated[bool, ReadBy("diffusion")] = False
    """Compile the repeated blocks of the network (torch.compile), in rollout and training. Needs a C++ compiler,
    on a GPU Triton; the first step of each shape takes minutes."""
    deterministic: bool = False
    """On a GPU, use only deterministic kernels, at some cost in speed: runs with the same seed, and resumed runs, are
    then bitwise identical, as they always are on a CPU; without it they are equal up to rounding. If torch has no
    deterministic kernel of an operation, the run stops with an error that names it."""
    sharding: Annotated[Literal["none", "fsdp2", "zero2", "zero3"], ReadBy("diffusion")] = "none"
    """On several processes: "none" gives each the whole network (DDP); "fsdp2" gives each 1/N of every weight,
    gradient, moment and snapshot, and gathers weights block by block in each forward and backward; "zero3" is the same
    by DeepSpeed, layer by layer; "zero2", by DeepSpeed, shards only gradients and moments. The results are the same."""
    shard_gradients: Annotated[
        bool, ReadBy("diffusion"), ReadIn("with `sharding`", lambda own, run: own.sharding != "none", _not_sharded)
    ] = True
    """With sharding, exchange gradients after every backward and keep only a shard of them (zero3 always does); false
    keeps them whole over the accumulation (4 bytes for each trained weight on every device) and exchanges them once."""

    def check(self, run: RunConfig, key: str = "") -> None:
        if self.sharding == "none":
            return
        if self.compile:
            raise ValueError(
                f"{key}.compile: given true beside {key}.sharding={self.sharding}, which has hooks in each block; set "
                "compile=false"
            )
        if self.mixed_precision == "fp16":
            raise ValueError(
                f"{key}.mixed_precision: given 'fp16', whose loss scaler would see only its own piece of the gradients "
                f"under {key}.sharding={self.sharding}; set bf16"
            )
        if self.sharding == "zero3" and not self.shard_gradients:
            raise ValueError(
                f"{key}.shard_gradients: given false, but {key}.sharding=zero3 keeps no whole gradients; leave it out, "
                "or set sharding=zero2"
            )

    def check_trainable(self, run: RunConfig, key: str = "") -> None:
        if run.resume is None and (problem := self._precision_problem(run)) is not None:
            raise ValueError(problem)
        given = self.stop_on_plateau
        told = f"{key}.stop_on_plateau: given {str(given).lower() if given is True else given}"
        # evaluations score every image alone: no plateau can be judged by a reward that compares those of a group
        scored = {name: entry for name, entry in run.rewards.items() if not entry.compares_group()}
        trained = [n for n, e in scored.items() if e.role == "train" and (e.weight or e.gradient_weight)]
        if given is True and not trained:
            raise ValueError(
                f"{told}, but evaluations score no reward of role train; name a gold reward, or set it to false"
            )
        if isinstance(given, str) and given not in scored:
            raise ValueError(
                f"{told}; expected true or a reward that evaluations score ({', '.join(scored) or 'none'}); set one, "
                "or set it to false"
            )

    def _precision_problem(self, run: RunConfig) -> str | None:
        given, dtype = f"training.mixed_precision: given {self.mixed_precision!r}", run.model.dtype
        if dtype == "fp32" or run.algorithm.trained_kind(run) == "full":
            return None
        if (dtype, self.mixed_precision) == ("fp16", "no"):
            return (
                f"{given}, but model.dtype is fp16, whose small gradients underflow to 0 without a loss scaler; set "
                "training.mixed_precision=fp16, or model.dtype=bf16"
            )
        if self.mixed_precision not in ("no", dtype) and not run.algorithm.trains_text_encoder:
            return (
                f"{given}, but model.dtype is {dtype}, which torch's autocast does not combine with it; set "
                f"model.dtype={self.mixed_precision}"
            )
        return None

    def warnings(self, run: RunConfig) -> Iterator[str]:
        """One about the precision of a run that is resumed, which may be older than the rule; and those about a stop
        that cannot come: no errors, because smoke runs, other rewards and another algorithm are overrides of a run
        file that has it."""
        if run.resume is not None and (problem := self._precision_problem(run)) is not None:
            yield problem
        if self.stop_on_plateau is False:
            return
        stays = "and training.stop_on_plateau will not stop the run"
        if not has_rl(run):
            yield f"algorithm.name: given {run.algorithm.name}, which has no RL whose start is compared, {stays}"
        elif not self.eval_every:
            yield f"training.eval_every: given 0, {stays}; set it to 1 or more"
        elif (count := self.evaluations_of_rl(run)) < PLATEAU_EVALUATIONS:
            yield (
                f"training.eval_every: given {self.eval_every}, {count} evaluations of RL, but a plateau takes "
                f"{PLATEAU_EVALUATIONS} to see, {stays}; lower it"
            )
        elif (examples := run.evaluation.num_examples) < PLATEAU_EXAMPLES:
            yield (
                f"evaluation.num_examples: given {examples}, but a plateau takes {PLATEAU_EXAMPLES} to see, {stays}; "
                f"set it to {PLATEAU_EXAMPLES} or more (256 is useful)"
            )

    def evaluations_of_rl(self, run: RunConfig) -> int:
        """Evaluations before the last step, the one at the start of RL included."""
        every, warm_up = self.eval_every, getattr(run.algorithm, "sft_steps", 0)
        return 1 + (self.max_steps - 1) // every - warm_up // every if every else 1


def has_rl(run: RunConfig) -> bool:
    """Whether a run has a start of RL that later evaluations are compared with."""
    return run.algorithm.trains_on_rewards or isinstance(run.algorithm, RlConfig)


class EvaluationConfig(Section):
    """Fixed seeds, plain ODE, the same for every checkpoint of the run."""

    data: Data | None = None
    """Held-out examples; null falls back to the first training examples, with a warning."""
    allow_overlap: bool = False
    """Evaluate although data or warmup_data holds some of the same images (by the bytes of the files); false rejects
    the run."""
    num_examples: Count = 64
    """Number of examples, from the start of the data."""
    images_per_example: Count = 1
    """Images of each example, each with its own seed."""
    num_steps: SolverSteps | None = None
    """Solver steps; null is rollout.num_steps."""
    weights: Literal["ema", "raw"] | None = None
    """Weights to evaluate, in the run and by `retouch eval` and `sample`: the EMA weights, or the raw trained ones.
    Null takes the EMA weights if the run file has an ema section."""
    on_gold_fall: Annotated[
        Literal["warn", "stop"],
        ReadIn(
            "in runs with a gold reward",
            lambda own, run: any(e.role == "gold" and not e.compares_group() for e in run.rewards.values()),
            "but no reward has role gold, and nothing would stop the run; set it for one that evaluations score, or "
            "on_gold_fall=warn",
            warns=True,
        ),
    ] = "warn"
    """Action when rewards of role train rise while one of role gold falls: a warning in the log, or the end of the run,
    resumable (exit 3)."""
    grid_examples: Annotated[int, Field(ge=0)] = 8
    """Examples shown in the image grids."""

    def check(self, run: RunConfig, key: str = "") -> None:
        if self.weights == "ema" and run.ema is None:
            section = "set ema.decay=0.999, or " if run.algorithm.reads(run, "diffusion") else "set "
            raise ValueError(f"{key}.weights: given 'ema', but there is no ema section; {section}{key}.weights=raw")

    def warnings(self, run: RunConfig) -> Iterator[str]:
        yield from self.gold_warnings(run, self.num_examples)

    def gold_warnings(self, run: RunConfig, examples: int) -> Iterator[str]:
        """The warning about evaluations of so few examples that a gold reward which falls on all of them raises no
        alarm in the later ones, because as many fall together by chance more often than `gold_share` permits."""
        gold = sum(entry.role == "gold" and not entry.compares_group() for entry in run.rewards.values())
        comparisons = run.training.evaluations_of_rl(run)  # with the last one, and without the first
        if not gold or not has_rl(run) or comparisons < 1 or 0.5**examples <= gold_share(comparisons, gold):
            return  # without a comparison the run ends in its supervised warm-up
        possible = sum(0.5**examples <= gold_share(k, gold) for k in range(1, comparisons))
        needed = math.ceil(-math.log2(gold_share(comparisons, gold)))
        key, raised = "evaluation.num_examples", f"set it to {needed} or more (64 is useful)"
        if examples < self.num_examples:
            key = "evaluation.data" if self.data else "data"
            raised = f"give it {needed} examples or more"
        yield (
            f"{key}: given {examples} examples, with which gold rewards can raise an alarm in {possible} of "
            f"{comparisons} evaluations after the first; {raised}"
        )

    def check_trainable(self, run: RunConfig, key: str = "") -> None:
        for name in sorted(COLUMNS & run.rewards.keys()):
            raise ValueError(
                f"rewards.{name}: given as the name of a reward, but evaluations have a column {name!r} of their own, "
                f"and would show neither rightly; give it another name, with scorer: {run.rewards[name].scorer}"
            )


TRACKED = ReadIf(
    "by wandb and trackio",
    lambda own: {"wandb", "trackio"} & {*own.sinks},
    "which wandb and trackio read, but logging.sinks is {own.sinks}; add one of them, or leave {name} out",
)


class LoggingConfig(Section):
    dir: str = "runs"
    """Parent of the run directory, which is named after the run."""
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default=["tensorboard"])
    """Trackers that receive the same numbers and grids as metrics.jsonl, which is always written. wandb and trackio are
    extras of the package and also receive the run file; their own environment variables set the destination
    (WANDB_MODE, WANDB_ENTITY, TRACKIO_SPACE_ID). A resumed run continues the same run there; steps that it repeats
    after its checkpoint appear twice. If a tracker is slow or offline, training continues."""
    project: Annotated[Name, TRACKED] = "retouch"
    """Project of the run in wandb and trackio."""
    group: Annotated[Name | None, TRACKED] = None
    """Group of the run in wandb and trackio; null is no group."""
    rollout_images_every: Annotated[int, Field(ge=0), ReadBy("rollouts", warns=True)] = 0
    """Epochs between grids of sampled groups with their rewards; 0 writes none."""
