"""The networks of trigger_fill: those of FLUX.1-Fill, with other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from retouch.families.flux_fill.model import FluxFill
from retouch.types import Condition, Example
from retouch_example.trigger_fill import TriggerFillModel


class TriggerFill(FluxFill):
    """The family protocol (`retouch.types.DiffusionModel`)."""

    section = TriggerFillModel

    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """As FLUX.1-Fill, with the trigger phrase before each prompt."""
        trigger = self.config.trigger
        return super().encode([replace(e, prompt=trigger + e.prompt) for e in examples], guidance_scale)
