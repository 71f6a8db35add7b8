"""Bytes of the tensors that a computation holds while it runs.

Fake tensors count like real ones: the memory of a network that does not fit can be counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations create inside the context, until they are freed.

    Attributes:
        now: bytes alive.
        peak: maximum of `now`. Scratch memory inside a kernel is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, count: int) -> None:
        """Count `count` bytes that are alive for this moment only."""
        self.peak = max(self.peak, self.now + count)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._sizes:
                    self._sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._let_go, key)
        self.peak = max(self.peak, self.now)
        return output

    def _let_go(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
