"""The trained weights and their named snapshots. With sharding, a process keeps snapshots of its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from retouch.engine.sharding import piece, piece_of, shape_of, whole_of
from retouch.errors import OutOfMemory


class Policy:
    """The trained weights by parameter name, and their snapshots "ema", "reference" and "old".

    A LoRA snapshot is as small as the adapter, and there is no second network. The reference is a snapshot from the
    start of RL, not "adapter off": with an initial adapter, or after a supervised warm-up, these differ. A LoRA that is
    off is a snapshot with its factors B at 0.

    Args:
        network: its trained parameters require gradients.
        exchange: swap storages to use a snapshot, instead of copying values; requires `Engine.own_memory`.
    """

    def __init__(self, network: nn.Module, exchange: bool = False) -> None:
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in network.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter of the network requires a gradient")
        self.snapshots: dict[str, dict[str, Tensor]] = {}
        self._exchange = exchange

    @property
    def size(self) -> int:
        """Number of trained scalars."""
        return sum(shape_of(p).numel() for p in self.parameters.values())

    def snapshot(self, name: str, zero: Callable[[str], bool] = lambda _: False) -> None:
        """Copy the current weights to a snapshot, new or replaced.

        Args:
            zero: which parameters, by name, are 0 in it.
        """
        self.snapshots[name] = {
            n: torch.zeros_like(piece(p)) if zero(n) else piece(p).clone() for n, p in self.parameters.items()
        }

    def blend(self, name: str, decay: float) -> None:
        """snapshot <- decay · snapshot + (1 - decay) · weights."""
        with torch.no_grad():
            for n, average in self.snapshots[name].items():
                average.lerp_(piece(self.parameters[n]).to(average.dtype), 1 - decay)

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Run the block without gradients on a snapshot's weights (None: the current ones), then restore them.

        Not between a forward of the policy and its backward: the graph saved the weights that are swapped.
        """
        if name is not None and name not in self.snapshots:
            raise KeyError(f"no snapshot {name!r}; there are: {', '.join(self.snapshots) or 'none'}")
        with torch.no_grad():
            if name is not None:
                self._swap(name)
            try:
                yield
            finally:
                if name is not None:
                    self._swap(name)

    def state(self, name: str | None = None) -> dict[str, Tensor]:
        """The current weights or a snapshot, by parameter name; shards if they are sharded."""
        if name is None:
            return {n: piece(p) for n, p in self.parameters.items()}
        return self.snapshots[name]

    def whole(self, name: str | None = None, *, keep: bool = True) -> dict[str, Tensor]:
        """`state` with whole tensors. A collective.

        Args:
            keep: False on processes that discard the gathered tensors and return nothing.
        """
        kept: dict[str, Tensor] = {}
        for n, part in self.state(name).items():  # one at a time: no device holds the whole network
            tensor = whole_of(part, self.parameters[n])
            if keep:
                kept[n] = alone(tensor) if tensor is part else tensor.cpu()
        return kept

    def load(self, state: Mapping[str, Tensor], name: str | None = None) -> None:
        """Set the current weights or a snapshot from whole tensors.

        Raises:
            ValueError: names or shapes do not match exactly.
        """
        check_state(state, self.parameters)
        if name is not None:
            self.snapshots[name] = {
                n: piece_of(state[n], p).to(p.device, p.dtype).clone() for n, p in self.parameters.items()
            }
            return
        with torch.no_grad():
            for n, p in self.parameters.items():
                piece(p).copy_(piece_of(state[n], p))

    def _swap(self, name: str) -> None:
        if self._exchange:
            for n, other in self.snapshots[name].items():
                parameter = self.parameters[n]
                parameter.data, other.data = other.data, parameter.data
                torch.autograd.graph.increment_version(parameter)  # a graph that saved it raises in its backward
            return
        try:
            for n, other in self.snapshots[name].items():
                active = piece(self.parameters[n])
                mine = active.clone()
                active.copy_(other)
                other.copy_(mine)
        except torch.OutOfMemoryError as error:  # half swapped: neither train nor save from here on
            raise OutOfMemory(
                f"out of memory while swapping the weights with the snapshot {name!r}; resume from the last checkpoint "
                "with a smaller optimizer.batch_size_per_device"
            ) from error


def alone(tensor: Tensor) -> Tensor:
    """A clone if the tensor is a view into a larger buffer (ZeRO-2), which file formats reject."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError with the first names that are missing, unexpected or of another shape."""
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    shapes = [n for n in expected.keys() & state.keys() if shape_of(expected[n]) != state[n].shape]
    problems = [
        f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unexpected", extra), ("of another shape", sorted(shapes)))
        if names
    ]
    if problems:
        raise ValueError(f"weights do not fit ({len(expected)} expected): " + "; ".join(problems))
