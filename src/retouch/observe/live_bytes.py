"""Bytes that a computation holds while it runs: of every storage that an operation made and nobody has let go of yet.

It counts tensors with data and without (torch's fake ones) alike, so that what a network of any size would take can be
counted where it does not fit.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Inside, what operations make is counted; what was there before is not.

    Attributes:
        now: bytes that are alive.
        peak: the most that was alive at a time. Scratch memory inside a kernel does not show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def add(self, count: int) -> None:
        """As if `count` bytes had come and gone at this moment."""
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
