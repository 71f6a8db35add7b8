"""Variants of a released model, each with its own hub ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

Variant = TypeVar("Variant", bound=str)


def require_variant(path: str, variant: Variant, released: Mapping[Variant, Sequence[str]]) -> None:
    """Refuse a hub id of another variant.

    Args:
        released: variant -> its hub ids; of variants with as many, the same place is the same size.

    Raises:
        ValueError: "path: given ..., but model.variant is ...; set ...".
    """
    for other, hub_ids in released.items():
        if path in hub_ids and other != variant:
            own = released[variant]
            fitting = own[hub_ids.index(path)] if len(own) == len(hub_ids) else own[-1]
            raise ValueError(
                f"path: given {path!r}, but model.variant is {variant!r}; set model.variant={other}, or "
                f"model.path={fitting}"
            )
