"""Supervised fine-tuning: the denoising loss on examples with a target picture (flow matching, arXiv 2210.02747).

Alone it is the baseline; before GRPO it is the warm-up. Departure from the paper: times go through the same shift as
sampling (`shifted_times`), so that training sees the noise levels that sampling visits.
"""

from __future__ import annotations

import torch

from retouch.build import Run
from retouch.config.schema import SftConfig
from retouch.core.objectives.sft import denoising_loss
from retouch.data import batch_examples, derive_seed
from retouch.observe import Metrics
from retouch.recipes.session import Session
from retouch.rollout import EncodedData, denoising_error, latent_region, noise_for


def train(run: Run) -> None:
    """Train to max_steps."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, SftConfig)
    with Session(run, "sft") as session:
        supervised_phase(
            session, run.config.training.max_steps, run.config.optimizer.lr, algorithm.shifted_times, algorithm.region
        )
        session.finish()


def supervised_phase(session: Session, until: int, lr: float, shifted: bool, region: str) -> None:
    """Supervised optimizer steps up to step `until` of the run.

    Row r of step s draws its noise and time from (run seed, s, r), whatever the rank or micro-batch it lands in.
    """
    run, progress, metrics = session.run, session.progress, Metrics()
    config, engine = run.config, run.engine
    data = EncodedData(run.model, run.warmup_data, run.guidance_scale, run.clock)
    micro = config.optimizer.batch_size_per_device
    per_rank = micro * config.optimizer.gradient_accumulation
    total = per_rank * engine.world_size
    while progress.step < until:
        positions = batch_examples(len(run.warmup_data), total, config.seed, progress.step)
        rows = range(engine.rank * per_rank, (engine.rank + 1) * per_rank)
        for start in range(0, per_rank, micro):
            chunk = rows[start : start + micro]
            condition = data.conditions([positions[r] for r in chunk], engine.device)
            x0 = data.targets([positions[r] for r in chunk], engine.device)
            schedule = run.model.schedule(config.rollout.num_steps, condition.size)
            seeds = [derive_seed(config.seed, "sft", progress.step, r) for r in chunk]
            noise, generators = noise_for(x0.shape[1:], seeds)
            uniform = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in generators])
            time = schedule.training_times(uniform.clamp(1e-6, 1 - 1e-6), shifted=shifted).to(engine.device)
            weights = None
            if region == "mask" and condition.mask is not None:
                weights = latent_region(condition.mask, run.model.spec.downsampling)
            with engine.micro_step(last=start + micro >= per_rank):
                with run.clock.part("train_forward"):
                    errors = denoising_error(
                        run.model, run.network, schedule, x0, noise.to(engine.device), time, condition, weights
                    )
                    loss, values = denoising_loss(errors, normalizer=total)
                with run.clock.part("train_backward"):
                    engine.backward(loss)
            metrics.add(values | {"loss": loss}, weight=len(chunk))
        rate = session.learning_rate(lr, progress.step, until)
        with run.clock.part("optimizer"):
            stepped = engine.step(rate)
        session.end_step({**metrics.reduce(engine), **stepped, "lr": rate}, updated=not stepped["overflow"])
