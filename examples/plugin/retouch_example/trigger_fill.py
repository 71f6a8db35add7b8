"""A model family: FLUX.1-Fill checkpoints that were fine-tuned with a trigger phrase before every prompt.

This file imports no torch: `retouch check` reads it. The networks are in trigger_fill_model.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from retouch.families.base import FamilySpec
from retouch.families.flux_fill.spec import FluxFillModel


class TriggerFillModel(FluxFillModel):
    """FLUX.1-Fill with a trigger phrase."""

    spec: ClassVar[FamilySpec] = replace(
        FluxFillModel.spec, family="trigger_fill", model="retouch_example.trigger_fill_model:TriggerFill", hub_ids=()
    )

    family: Literal["trigger_fill"] = "trigger_fill"  # type: ignore[assignment]
    trigger: str = ""
    """Phrase before every prompt."""
