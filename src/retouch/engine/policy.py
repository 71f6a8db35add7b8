"""The trained weights and their named snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Policy:
    """Everything that is trained, by parameter name, and copies of it: "ema", "reference", "old".

    Only trained weights are copied: under LoRA a snapshot is as small as the adapter, and no second network exists.
    The reference is a snapshot from the start of RL, not "adapter off": after a warm-up these differ.
    """

    def __init__(self, network: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in network.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("nothing is trained: no parameter of the network requires a gradient")
        self.snapshots: dict[str, dict[str, Tensor]] = {}

    @property
    def size(self) -> int:
        """Number of trained scalars."""
        return sum(p.numel() for p in self.parameters.values())

    def snapshot(self, name: str) -> None:
        """Copy the current weights under a name, replacing what stood there."""
        self.snapshots[name] = {n: p.detach().clone() for n, p in self.parameters.items()}

    def blend(self, name: str, decay: float) -> None:
        """snapshot <- decay · snapshot + (1 - decay) · weights."""
        with torch.no_grad():
            for n, average in self.snapshots[name].items():
                average.lerp_(self.parameters[n].detach().to(average.dtype), 1 - decay)

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Run the block without gradients on a snapshot's weights (None: the current ones), then put the active back.

        Never between a forward of the policy and its backward: the swap writes to the weights that the graph saved.
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
        """Weights by parameter name: the current ones, or a snapshot."""
        if name is None:
            return {n: p.detach() for n, p in self.parameters.items()}
        return self.snapshots[name]

    def load(self, state: Mapping[str, Tensor], name: str | None = None) -> None:
        """Fill the current weights or a snapshot.

        Raises:
            ValueError: names or shapes that do not match exactly.
        """
        check_state(state, self.parameters)
        if name is not None:
            self.snapshots[name] = {n: state[n].to(p.device, p.dtype).clone() for n, p in self.parameters.items()}
            return
        with torch.no_grad():
            for n, p in self.parameters.items():
                p.copy_(state[n])

    def _swap(self, name: str) -> None:
        for n, other in self.snapshots[name].items():
            mine = self.parameters[n].data.clone()
            self.parameters[n].data.copy_(other)
            other.copy_(mine)


def check_state(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Names and shapes must match exactly.

    Raises:
        ValueError: with the first names that are missing, unexpected or of another shape.
    """
    missing = sorted(expected.keys() - state.keys())
    extra = sorted(state.keys() - expected.keys())
    shapes = [n for n in expected.keys() & state.keys() if expected[n].shape != state[n].shape]
    problems = [
        f"{what}: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
        for what, names in (("missing", missing), ("unexpected", extra), ("of another shape", sorted(shapes)))
        if names
    ]
    if problems:
        raise ValueError(f"weights do not fit ({len(expected)} expected): " + "; ".join(problems))
