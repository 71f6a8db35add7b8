"""The nouns that every layer shares. Nothing here imports torch at run time.

Legend: B rows (images), K rollouts of one example (a group), T steps, S trained steps, C H W latent dims.
Convention: sigma in [0, 1] and 1 is noise; x = (1 - sigma) x0 + sigma noise; v = noise - x0.
Outside `retouch.families` latents are [B, C, H, W] and regions [B, 1, H, W]; packing into tokens happens in `predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from retouch.errors import Diverged as Diverged
from retouch.errors import Stopped as Stopped

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from PIL.Image import Image
    from torch import Tensor, nn

    from retouch.core.schedule import Schedule
    from retouch.families.base import FamilySpec
    from retouch.families.text import TextEncoders

Prediction = Literal["flow", "epsilon"]


@dataclass(frozen=True)
class Example:
    """One training or test item; all its images have one size: that of the run, or one of its shapes.

    Attributes:
        id: stable integer within the data set; the key of groups, seeds and reports.
        prompt: text condition of the model.
        source: RGB image to repaint or edit, or None for text-to-image.
        mask: mode "L", 255 = repaint, 0 = keep.
        target: RGB ground truth; None where there is none (RL needs none).
        reference: RGB style reference of any size.
        metadata: further fields of the item; `text` is the text to write.
        win, lose: RGB images of which the first is preferred; pairs of offline DPO.
        size: (height, width) in pixels to generate at where there is no source.
        strip: RGB, as wide as the source: in-context reference above it, which only the model receives.
        embedding_path: a file with the text encoders' output for the prompt; only the FLUX.1 families read it.
        more_images: RGB source images beside `source`, of its size, which the model reads and no reward, mask or grid
            refers to.
    """

    id: int
    prompt: str
    source: Image | None = None
    mask: Image | None = None
    target: Image | None = None
    reference: Image | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    win: Image | None = None
    lose: Image | None = None
    size: tuple[int, int] | None = None
    strip: Image | None = None
    embedding_path: Path | None = None
    more_images: tuple[Image, ...] = ()

    @property
    def shape(self) -> tuple[int, int] | None:
        """(height, width) of the image that is generated; None without a source and a size."""
        return self.size if self.source is None else (self.source.height, self.source.width)


@dataclass(frozen=True)
class Condition:
    """An encoded batch of examples: the inputs of `predict` and the objectives other than x and t.

    Attributes:
        tensors: named tensors, each [B, ...]; the names belong to the family. Those that begin with `negative_` are of
            the negative prompt of classifier-free guidance; a prediction without them is the conditional one.
        mask: [B, 1, H, W] in pixels, 1 = repaint; None for text-to-image.
        size: (height, width) of the images in pixels.
        on_host: names, without `negative_`, of tensors that stay on the CPU: `predict` shapes its inputs by them, and
            would wait for the device in every forward.
    """

    tensors: Mapping[str, Tensor]
    mask: Tensor | None
    size: tuple[int, int]
    on_host: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def select(self, rows: Tensor | Sequence[int] | slice) -> Condition:
        """The given rows, repeats allowed, as a new condition. A tensor of rows is best on the CPU (`on_host`)."""
        tensors: dict[str, Any] = {**self.tensors, "": self.mask}
        devices = {t.device for t in tensors.values() if t is not None}
        index: dict[Any, Any] = {d: rows if isinstance(rows, slice | Sequence) else rows.to(d) for d in devices}
        chosen = {name: None if t is None else t[index[t.device]] for name, t in tensors.items()}
        return replace(self, mask=chosen.pop(""), tensors=chosen)

    def repeated(self, count: int) -> Condition:
        """Every row `count` times, a row's copies together. No index is copied to the device, as `select` does."""
        mask = None if self.mask is None else self.mask.repeat_interleave(count, 0)
        tensors = {name: t.repeat_interleave(count, 0) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, mask=mask)

    def without_negative(self) -> Condition:
        """The condition of the conditional prediction alone."""
        return replace(self, tensors={k: t for k, t in self.tensors.items() if not k.startswith("negative_")})

    def to(self, device: Any) -> Condition:
        mask = None if self.mask is None else self.mask.to(device)
        tensors = {
            name: t if name.removeprefix("negative_") in self.on_host else t.to(device)
            for name, t in self.tensors.items()
        }
        return replace(self, tensors=tensors, mask=mask)


class Processes(Protocol):
    """The processes of a run."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def gather_list(self, values: Sequence[Any], /) -> list[Any]: ...


class DiffusionModel(Protocol):
    """A model family: only what differs between families. LoRA, EMA, devices and checkpoints are not its business."""

    @property
    def spec(self) -> FamilySpec: ...

    @property
    def prompts(self) -> TextEncoders | None:
        """The text encoders; None in a family whose text encoder also reads images."""
        ...

    @property
    def network(self) -> nn.Module:
        """The network that is trained, before the engine wraps it."""
        ...

    def schedule(self, num_steps: int, size: tuple[int, int]) -> Schedule:
        """The times of a sampling run of `num_steps` at an image size (height, width) in pixels."""
        ...

    def encode(self, examples: Sequence[Example], guidance_scale: float) -> Condition:
        """Text, mask and masked image of a batch of one size -> condition on the model's device."""
        ...

    def encoding(self) -> AbstractContextManager[None]:
        """Inside, frozen networks that wait on the CPU between uses are moved to the device once for many uses: text
        encoders, autoencoder and image encoder."""
        ...

    def encode_images(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> clean latents [B, C, h, w] fp32."""
        ...

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """The one forward of the policy, for rollout and training.

        Args:
            network: what the engine returned for `self.network`.
            x: [B, C, h, w] fp32 latents.
            t: [B] times of the schedule.

        Returns:
            [B, C, h, w] fp32: velocity (flow) or noise (epsilon).
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """[B, C, h, w] clean latents -> [B, 3, H, W] fp32 in [-1, 1]."""
        ...

    def latent_gradient(
        self, latents: Tensor, pixel_gradient: Callable[[Tensor], Tensor], *, checkpointing: bool = False
    ) -> Tensor:
        """The gradient of a function of the decoded images by their latents, [B, C, h, w] fp32.

        Args:
            pixel_gradient: the decoded images [B, 3, H, W] fp32, not clamped to [-1, 1] -> the gradient by them.
            checkpointing: less memory for one more decode.
        """
        ...

    def to(self, device: Any) -> None:
        """Move everything but the network, which the engine places."""
        ...


@dataclass(frozen=True)
class Trajectory:
    """The recorded part of a rollout's path through the latents, in fp32.

    Attributes:
        final: [B, C, H, W] clean latents.
        times: [T + 1] of the schedule.
        first_step: index of the first trained step; the S trained steps are consecutive.
        latents: [B, S + 1, C, H, W], the states around the trained steps; with S = 0 the clean latents alone.
        log_probs: [B, S] recorded by the sampler.
        means: [B, S, C, H, W] of the trained steps, where an objective needs them.
    """

    final: Tensor
    times: Tensor
    first_step: int
    latents: Tensor
    log_probs: Tensor
    means: Tensor | None = None


@dataclass(frozen=True)
class Score:
    """A reward that succeeded: a finite value, and what it was made of."""

    value: float
    detail: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Failure:
    """A reward that failed. It is never a number and never trains.

    Attributes:
        code: one of those that docs/rewards.md explains.
        retryable: whether the same request may succeed later.
    """

    code: str
    message: str
    retryable: bool = False


Outcome = Score | Failure


@dataclass(frozen=True)
class Gate:
    """A gate: the value of one reward scales or blocks another.

    Attributes:
        reward: name of the reward whose value opens the gate.
        threshold: the gate is open from this value on and closed below it; None opens it by the value, clamped to
            [0, 1].
        floor: the gated value if the gate is closed.
    """

    reward: str
    threshold: float | None = None
    floor: float = 0.0

    def opening(self, value: float) -> float:
        """Opening of the gate in [0, 1]."""
        if self.threshold is None:
            return min(1.0, max(0.0, value))
        return 1.0 if value >= self.threshold else 0.0

    def apply(self, outcome: Outcome, by: Outcome) -> Outcome:
        """floor + opening * (value - floor), and never more than the value.

        A failure of either is a failure: an OCR error does not mean that the text is illegible.
        """
        if isinstance(outcome, Failure):
            return outcome
        if isinstance(by, Failure):
            return Failure(by.code, f"its gate {self.reward} failed: {by.message}", by.retryable)
        opening = self.opening(by.value)
        held = self.floor + opening * (outcome.value - self.floor)
        return Score(min(outcome.value, held), {**outcome.detail, "ungated": outcome.value, "gate": opening})
