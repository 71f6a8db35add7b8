"""What sampling copies to the second device and waits for, family by family.

`python -m tests.rehearsal.steps FAMILY ...` prints a JSON object of `sampled` of each.
"""

from __future__ import annotations

import json
import sys

import torch

from retouch.core.rules import STEP_RULES, rules_of
from retouch.families import FAMILIES
from retouch.families.diffusion import FamilyModel
from retouch.families.loading import family_class
from retouch.families.tiny import tiny_pipeline
from retouch.rollout.plan import StepPlan
from retouch.rollout.sampler import sample
from tests.families.test_contract import SEEDS, SIZE, examples_of
from tests.rehearsal.device import recorded, rehearse


def sampled(family: str, device: torch.device) -> dict[str, int]:
    """A stochastic step and one on the ODE of two rows, their prompts of different lengths, with guidance -> waits and
    copies by their places, without those of a first use."""
    model: FamilyModel = family_class(family).from_pipeline(tiny_pipeline(family, seed=3))
    model.network.to(device).eval()
    model.to(device)
    spec = model.spec
    condition = model.encode(examples_of(bool(spec.needs), count=2), max(spec.guidance_scale, 1.5))
    schedule = model.schedule(2, SIZE)
    rule = STEP_RULES[rules_of(schedule.prediction)[0]]
    plan = StepPlan(schedule, rule, rule.default, 0, 1, 1)
    sample(model, model.network, plan, condition, SEEDS[:2])
    with recorded() as record:
        sample(model, model.network, plan, condition, SEEDS[:2])
    return dict(record.places)


def main(families: list[str]) -> None:
    torch.set_num_threads(1)
    device = rehearse()
    found = {family: sampled(family, device) for family in families}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
