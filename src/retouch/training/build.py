"""Build the parts of a run from its run file."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from torch import nn

from retouch.adapters.formats import describe_unused
from retouch.adapters.initial_lora import require_initial_lora
from retouch.adapters.train_ip_adapter import initial_adapter
from retouch.adapters.trainee import Trainee, make_trainable
from retouch.algorithms.base import AdvantageConfig
from retouch.config import Derived, RunConfig, derive
from retouch.config.needs import needed_pictures
from retouch.core.schedule import Schedule
from retouch.data.dataset import Dataset, all_embedded, load_dataset
from retouch.data.rules import require_groups, require_held_out, require_one_batch, require_targets, shape_warnings
from retouch.data.texts import require_texts_of
from retouch.engine import Checkpoints, Engine, Policy
from retouch.errors import logging_long
from retouch.families.embeddings import require_prompts
from retouch.families.loading import DTYPES, load_model
from retouch.families.prompts import PromptCheck
from retouch.observe import RunDir, Stopwatch
from retouch.observe.cost import Costs
from retouch.observe.timing import stopwatch
from retouch.registry import load_named
from retouch.rewards.table import RewardTable
from retouch.rollout.encoded import EncodedData
from retouch.rollout.plan import Plans
from retouch.training.beginning import require_can_begin
from retouch.training.resume import with_kept_defaults
from retouch.types import DiffusionModel

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """Everything a recipe works with.

    Attributes:
        network: what the engine made of `model.network`; what `model.predict` must be given.
        warmup_data: examples with targets; equal to `data` where the run file names no other.
        eval_data: examples to evaluate on.
        eval_is_held_out: whether none of them is trained on.
        encoded: encoded examples of `data`, under the guidance of rollouts.
        plans: the solver plans of rollouts.
    """

    config: RunConfig
    derived: Derived
    engine: Engine
    model: DiffusionModel
    network: nn.Module
    trainee: Trainee
    policy: Policy
    data: Dataset
    warmup_data: Dataset
    eval_data: Dataset
    eval_is_held_out: bool
    rewards: RewardTable
    dir: RunDir
    checkpoints: Checkpoints
    clock: Stopwatch
    costs: Costs
    encoded: EncodedData
    plans: Plans
    _schedules: dict[tuple[int, int], Schedule] = field(
        default_factory=dict[tuple[int, int], Schedule], init=False, repr=False
    )

    def schedule(self, size: tuple[int, int]) -> Schedule:
        """The schedule of training for images of (height, width), made once: its tables stay on the device."""
        if size not in self._schedules:
            self._schedules[size] = self.model.schedule(self.config.rollout.num_steps, size)
        return self._schedules[size]

    @property
    def guidance_scale(self) -> float:
        """Guidance of rollouts, of their log-probabilities, and of evaluation."""
        return self.encoded.guidance_scale

    @cached_property
    def encoded_for_denoising(self) -> EncodedData:
        """Encoded examples of `data`, under the guidance of losses on noised images."""
        guided = self.config.model.forwards_of_guidance(self.guidance_scale) > 1
        return self.encoded.guided(self.denoising_guidance_scale, conditional=guided)

    @property
    def denoising_guidance_scale(self) -> float:
        """Guidance of losses on noised images (SFT, DPO, NFT): that of rollouts if the network embeds it; 1 if guidance
        is two forwards, because it is the conditional prediction that learns to denoise. Their conditions have no
        negative prompt for the same reason."""
        return 1.0 if self.config.model.spec.doubles_for_guidance else self.guidance_scale

    def close(self) -> None:
        self.costs.close()
        self.rewards.close()
        self.dir.close()
        self.engine.close()


def build(config: RunConfig) -> Run:
    """Load data, connect rewards, load the model, prepare it for training. Cheap things that may fail come first.

    Raises:
        ConfigError, DataError, ModelFilesError: one message each, with the remedy.
    """
    config = with_kept_defaults(config)
    engine = Engine(config.training, config.optimizer, config.seed, config.reward_client.collective_s)
    derived = derive(config, engine.world_size)
    needs = needed_pictures(config, training=False)
    load = partial(load_dataset, processes=engine, check_prompts=PromptCheck(config))
    data = load(config.data, "data", needed_pictures(config, training=True))
    warmup = load(config.warmup_data, "warmup_data", needs) if config.warmup_data else data
    section = config.evaluation.data
    held_out = load(section, "evaluation.data", needs) if section else None
    for warning in PromptCheck(config).fixed() if engine.is_main else ():
        logger.warning("%s", warning)
    named = {"data": data, "warmup_data": warmup, "evaluation.data": held_out}
    loaded = {name: given for name, given in named.items() if given is not None}
    for name, given in loaded.items():
        require_one_batch(config, name, given)
    require_texts_of(config, {name: given.items for name, given in loaded.items()})
    config.algorithm.check_items(data.items)
    if isinstance(config.algorithm, AdvantageConfig):
        config.algorithm.advantage_function()  # refused before minutes go into the model
    if config.optimizer.factory is not None:  # as that one
        load_named("optimizer.factory", config.optimizer.factory, "class")
    require_targets(config, warmup)
    left_out = require_groups(config, derived, data)
    for warning in filter(None, (left_out, *shape_warnings(config, derived, data, warmup))) if engine.is_main else ():
        logger.warning("%s", warning)
    apart = require_held_out(config, held_out, data, warmup)
    run_dir = RunDir(config, main=engine.is_main)
    require_can_begin(config, run_dir)
    run_dir.require_sinks()
    require_prompts(config.model, [p for d in (data, warmup, held_out) if d is not None for p in d.prompts])
    require_initial_lora(config.model.train)
    initial = initial_adapter(config.model.train, config.model.family)  # refused before minutes go into the model
    if initial is not None and initial.unused and engine.is_main:
        logger.warning("model.train.initial_adapter: %s", describe_unused(initial.unused))
    rewards = RewardTable(config.rewards, config.reward_client, run_dir.path, str(engine.device))
    embedded = all_embedded(item for given in loaded.values() for item in given.items)
    model = load_model(config.model, engine.device, embedded=embedded, mapped=True)
    if config.model.free_text_encoders:  # before the network is placed: they are never on the device together
        assert model.prompts is not None, "`check` refuses this for other families"
        prompts = [p for d in (data, warmup, held_out) if d is not None for p in d.prompts]
        with logging_long(logger, f"encoding {len(prompts)} prompts (model.free_text_encoders)"):
            model.prompts.cache_and_release([*config.model.fixed_prompts, *prompts])
    trainee = make_trainable(model.network, config.model.train, model.spec, config.seed)
    network = engine.prepare(
        model.network,
        gradient_checkpointing=config.training.gradient_checkpointing,
        some_without_gradient=config.model.spec.drops_text_stream is True and config.model.train.kind != "ip_adapter",
        dtype=DTYPES["fp32"] if config.model.train.kind == "full" else None,
    )
    policy = Policy(model.network, exchange=engine.own_memory)
    clock = stopwatch(engine.device.type)
    frozen, recomputes = config.model.train.kind != "full", config.training.gradient_checkpointing
    return Run(
        config=config,
        derived=derived,
        engine=engine,
        model=model,
        network=network,
        trainee=trainee,
        policy=policy,
        data=data,
        warmup_data=warmup,
        eval_data=(held_out or data).each_once,
        eval_is_held_out=apart,
        rewards=rewards,
        dir=run_dir,
        checkpoints=Checkpoints(run_dir.checkpoints, trainee.save, trainee.load, config.training.keep_checkpoints),
        clock=clock,
        costs=Costs(model.network, clock, frozen=frozen, recomputes=recomputes),
        encoded=EncodedData(model, data, config.guidance_scale, clock),
        plans=Plans(config),
    )


def train(config: RunConfig) -> Path:
    """Build what a run file names and run the algorithm's recipe on it -> the run directory."""
    algorithm = config.algorithm
    recipe = load_named(f"{type(algorithm).__name__}.recipe", algorithm.recipe, "function")
    run = build(config)
    try:
        recipe(run)
    finally:
        run.close()
    return run.dir.path
