"""Facts of each released family that tests of every family read. They stand in the family's own test file, as `FACTS`:
a new family changes no table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec


@dataclass(frozen=True)
class Facts:
    """What is known of a family from its publication, not from this project.

    Attributes:
        parameters: of the released network.
        lora_modules: weights that LoRA adapts by default.
        guidance_scale: of the model card or the pipeline.
        hub_id: of the released model.
        other_hub_ids: those of published run files with another name, by that name.
        outside_blocks: largest share of the network's weights that are not in matrices of its repeated blocks.
        text_length: tokens of a prompt in tests where the default would be padding, and take most of a test's time.
    """

    parameters: float
    lora_modules: int
    guidance_scale: float
    hub_id: str
    other_hub_ids: Mapping[str, str] = field(default_factory=dict)
    outside_blocks: float = 0.01
    text_length: int | None = None


def facts_of(family: str) -> Facts:
    return import_module(f"tests.families.test_{family}").FACTS


def text_length(family: object) -> int | None:
    """`Facts.text_length`; None also of a family of a plug-in, or of none."""
    return facts_of(str(family)).text_length if find_spec(f"tests.families.test_{family}") else None
