"""The one cache of values in memory that forgets those used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """At most `capacity` values by key; those used longest ago are dropped."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._values: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """The value of a key; `make` computes a missing one."""
        return self.get_all([key], partial(map, make))[0]

    def get_all(self, keys: Sequence[K], make: Callable[[list[K]], Iterable[V]]) -> list[V]:
        """The values of keys in order, more than `capacity` of them if need be.

        Args:
            make: keys whose values are missing, each once -> their values. A `map` is consumed here: an error leaves
                the values before it in the cache.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._values]
        try:
            if missing:
                self._values.update(zip(missing, make(missing), strict=True))
            for key in keys:
                self._values.move_to_end(key)
            return [self._values[key] for key in keys]
        finally:  # also after an error, or a data set whose last file is broken would stay in memory whole
            while len(self._values) > self.capacity:
                self._values.popitem(last=False)
