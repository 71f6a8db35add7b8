"""What is trained on top of a network, and the files it is kept in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.adapters.ip_adapter import StyleAdapter


def load(path: str | Path) -> StyleAdapter:
    """A style adapter from a file of any of the layouts: `load(path).attach(pipe)`; see `retouch.adapters.ip_adapter`.

    Raises:
        AdapterFileError: not a whole adapter, or a pickle that holds more than tensors.
    """
    from retouch.adapters.ip_adapter import load as read

    return read(path)
