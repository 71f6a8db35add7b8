"""Kernels of attention that diffusers dispatches to (`model.attention`)."""

from __future__ import annotations

import logging
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry  # pyright: ignore[reportPrivateUsage]

from retouch.config.errors import ConfigError
from retouch.errors import first_line
from retouch.families.base import Attention

logger = logging.getLogger(__name__)

NAMES: dict[Attention, str] = {
    "math": "_native_math",
    "torch_flash": "_native_flash",
    "flash": "flash",
    "flash3": "_flash_3",
}
"""`model.attention` -> the name in diffusers."""


def set_attention(network: Any, kernel: Attention | None) -> None:
    """Set the attention kernel of a diffusers network, in place; None is torch's choice.

    diffusers also makes it the default of every network of the process; that is undone, as is a default that the
    environment sets (DIFFUSERS_ATTN_BACKEND), with a warning: one run file would give two runs.

    Raises:
        ConfigError: the package is too old or missing.
    """
    default = AttentionBackendName.NATIVE
    active = AttentionBackendName(Registry.get_active_backend()[0])
    if active != default:
        logger.warning(
            "diffusers' attention %s of the environment has no effect: model.attention decides", active.value
        )
    log = logging.getLogger("diffusers.models.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns that backends are experimental
    try:
        if kernel is not None:
            network.set_attention_backend(NAMES[kernel])
    except RuntimeError as error:
        raise ConfigError(f"model.attention: given {kernel!r}; {first_line(error)}; or leave attention out") from None
    finally:
        log.setLevel(level)
        Registry.set_active_backend(default)  # type: ignore[arg-type]
