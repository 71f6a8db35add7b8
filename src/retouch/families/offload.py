"""Frozen networks that wait on the CPU between uses (`model.offload_text_encoders`, `model.offload_vae`).

They are copied to the device for a use, and leave it without a copy back: those on the CPU are kept, because frozen
weights do not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class OffloadedNetworks:
    """The networks of a part of a model, and where they are.

    Args:
        networks: each once, though encoders may share one.
        waits: whether they are on the CPU between uses; else `to` moves them, and they stay.

    Attributes:
        networks: to be cleared by a part that releases them.
        moves: how often they were moved to the device for a use.
    """

    def __init__(self, networks: Iterable[nn.Module], waits: bool) -> None:
        self.device = torch.device("cpu")
        self.waits = waits
        self.moves = 0
        self.networks = list(dict.fromkeys(networks))
        self._on_host: list[tuple[nn.Module, str, Tensor]] = []
        self._uses = 0
        self._on_device = False

    def to(self, device: torch.device | str) -> None:
        """Set the device of the next use."""
        self.device = torch.device(device)
        if not self.waits:
            self._place(self.device)

    @contextmanager
    def kept_on_device(self) -> Iterator[None]:
        """Inside, networks that a use moved to the device stay there: they are moved once for many uses."""
        self._uses += 1
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """With the networks on the device."""
        with self.kept_on_device():
            if self.waits and not self._on_device:
                self._on_device = True
                self.moves += 1
                if self.device.type != "cpu":
                    self._on_host = [part for network in self.networks for part in _on_host(network)]
                try:
                    self._place(self.device)
                except BaseException:  # the memory of the device ended halfway
                    self._leave()
                    raise
            yield

    def _leave(self) -> None:
        if not self._on_device:
            return
        for module, name, tensor in self._on_host:
            if name in module._parameters:
                module._parameters[name].data = tensor  # type: ignore[union-attr]
            else:
                module._buffers[name] = tensor
        self._place("cpu")  # what was not on the CPU before, too
        self._on_host, self._on_device = [], False

    def _place(self, device: torch.device | str) -> None:
        for network in self.networks:
            network.to(device)


def _on_host(network: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each weight and buffer that is on the CPU."""
    for module in network.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and tensor.device.type == "cpu":
                yield module, name, tensor.data
