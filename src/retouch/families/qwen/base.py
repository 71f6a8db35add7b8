"""Common code of the families on Qwen-Image's networks: tokens, true guidance, conditions.

Prompts become text states in `retouch.families.qwen.text`. The transformer takes the tokens of the noisy image, then
those of the images to edit; their positions distinguish them. Guidance above 1 runs a negative prompt
beside the prompt and scales the guided prediction back, token by token, to the length of the one with the prompt.

Legend: B samples, C latent channels, h w latent sides, S text tokens, L of one sample, D widths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn

from retouch.core.schedule import FlowSchedule, Schedule
from retouch.families.diffusion import FamilyModel, pack, unpack
from retouch.families.guidance import Tensors, doubled, each_half, guided, halves, is_guided
from retouch.families.inputs import image_pixels
from retouch.families.qwen.distillation import merge_distillation_lora
from retouch.families.qwen.spec import QwenSection
from retouch.families.vae import QwenAutoencoder
from retouch.types import Condition


class QwenModel(FamilyModel):
    """Networks, latents and conditions of a family; encoding of examples is the family's own."""

    autoencoder_class = QwenAutoencoder
    on_host = frozenset({"text_mask"})

    @classmethod
    def load_network(cls, config: QwenSection, path: str, dtype: torch.dtype) -> nn.Module:
        network = super().load_network(config, path, dtype)
        merge_distillation_lora(network, config.distillation_lora)
        return network

    def input_channels(self) -> int:
        return 4 * self.spec.latent_channels

    def schedule(self, num_steps: int, size: tuple[int, int]) -> Schedule:
        """With the shift of a merged few-step LoRA in place of the scheduler's, its end value included."""
        lora = self.config.distillation_lora
        if lora is not None and lora.shift is not None:
            return FlowSchedule.make(num_steps, lora.shift)
        return super().schedule(num_steps, size)

    def encode_picture(self, picture: Image) -> Tensor:
        """An image to edit -> latents [1, C, h, w], kept for the next time.

        Raises:
            ValueError: sides that are no multiples of what the network takes.
        """
        self.require_size((picture.height, picture.width))
        return self.autoencoder.encode_once(image_pixels(picture.convert("RGB"), self.device)[None])

    def condition_on(
        self,
        text: Sequence[Tensor],
        size: tuple[int, int],
        guidance_scale: float = 1.0,
        negative: Sequence[Tensor] = (),
        pictures: Sequence[Sequence[Tensor]] = (),
    ) -> Condition:
        """A condition from given text states of any lengths.

        Args:
            text: [L, D] of each of B samples, without padding; any dtype and device.
            size: (height, width) of the generated images.
            guidance_scale: above 1 `predict` guides away from `negative`; at 1 that must be empty.
            negative: [L, D] of each sample.
            pictures: latents [1, C, h, w] of the images that each sample edits: equally many, of equal sizes.

        Raises:
            ValueError: a size or a number of samples that does not fit, or guidance without negative states.
        """
        self.require_size(size)
        if (guidance_scale > 1) != bool(negative):
            raise ValueError(
                f"guidance_scale is {guidance_scale} with {len(negative)} negative text states; above 1 every row "
                "needs one, at 1 there is nothing to guide away from"
            )
        if negative and len(negative) != len(text):
            raise ValueError(f"{len(text)} rows of text states, but {len(negative)} negative ones")
        if pictures and len(pictures) != len(text):
            raise ValueError(f"{len(text)} rows of text states, but images to edit of {len(pictures)}")
        if bool(pictures and pictures[0]) != ("source" in self.spec.needs):
            wants = "needs images to edit" if "source" in self.spec.needs else "takes no images to edit"
            raise ValueError(f"{self.spec.family} {wants}; given {len(pictures[0]) if pictures else 0} a row")
        # one length for both: they may run as one doubled batch
        longest = max(len(states) for states in (*text, *negative))
        states, mask = padded(text, longest)
        tensors = {
            "text": states,
            "text_mask": mask,
            "guidance": torch.full((len(text),), float(guidance_scale), dtype=torch.float32),
        }
        if negative:
            tensors["negative_text"], tensors["negative_text_mask"] = padded(negative, longest)
        tensors |= picture_tensors(pictures)
        return Condition(tensors, None, size, self.on_host).to(self.device)

    def predict(self, network: nn.Module, x: Tensor, t: Tensor, condition: Condition) -> Tensor:
        """Velocity [B, C, h, w] at sigma `t` [B]: by classifier-free guidance whose result is scaled back, token by
        token, to the length of the guided prediction."""
        return self._velocity(network, x, t, condition)

    def _velocity(
        self,
        network: nn.Module,
        x: Tensor,
        t: Tensor,
        condition: Condition,
        options: Callable[[Tensors], Mapping[str, Any]] = lambda _: {},
    ) -> Tensor:
        """`predict` without blending; `options` gives further inputs of the network, of the tensors of a forward."""
        c, exact = condition.tensors, self.config.exact_text_lengths
        h, w = x.shape[2:]
        images = [x, *pictures_in(c)]
        tokens = torch.cat([pack(image) for image in images], 1).to(self.dtype)
        timestep = (t * 1000).to(self.dtype) / 1000
        outputs: list[Tensor] = []
        for part in each_half(c) if exact else [c]:
            lengths = 1 if exact else BUCKET
            text, mask = without_common_padding(halves(part, "text"), halves(part, "text_mask"), lengths)
            outputs += network(
                hidden_states=doubled(tokens, part),
                timestep=doubled(timestep, part),
                encoder_hidden_states=text.to(self.dtype),
                encoder_hidden_states_mask=mask,
                img_shapes=[[(1, i.shape[2] // 2, i.shape[3] // 2) for i in images]] * len(text),
                return_dict=False,
                **options(part),
            )
        output = torch.cat(outputs)[:, : (h // 2) * (w // 2)].float()
        if is_guided(c):
            both, with_text = guided(output, c), output.chunk(2)[1]
            output = both * (with_text.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True))
        return unpack(output, h, w)


BUCKET = 32
"""Text is cut to a multiple of this many tokens: few lengths, rows of one bucket then get the same numbers whatever
they are batched with, and a compiled network is compiled for few shapes."""


def without_common_padding(states: Tensor, mask: Tensor, multiple: int = BUCKET) -> tuple[Tensor, Tensor | None]:
    """Text states [B, S, D] padded on the right, with a mask [B, S] that is best on the CPU -> [B, S', D] and [B, S']
    bool, S' the multiple of `multiple` (S at most) that holds the longest row; None in place of a mask without padding,
    which attention takes faster."""
    counts: list[int] = (mask > 0).sum(1).tolist()
    length = min(-(-max(counts) // multiple) * multiple, mask.shape[1])
    kept = None if min(counts) == length else _filled_places(tuple(counts), length, states.device)
    return states[:, :length], kept


@lru_cache(maxsize=16)
def _filled_places(counts: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    """[B, length] bool, the first of each row: kept on the device, where every step of a solver needs it again."""
    return (torch.arange(length, dtype=torch.int64) < torch.tensor(counts, dtype=torch.int64)[:, None]).to(device)


def padded(rows: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """States [L, D] of B rows -> [B, length, D] filled up with zeros, and on the CPU [B, length], 1 where there is no
    padding."""
    states = torch.stack([nn.functional.pad(row, (0, 0, 0, length - len(row))) for row in rows])
    counts = torch.tensor([[len(row)] for row in rows], dtype=torch.int64)
    return states, (torch.arange(length, dtype=torch.int64) < counts).to(states.dtype)


def picture_tensors(pictures: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
    """Latents [1, C, h, w] of the images to edit of B rows -> `picture_0` [B, C, h, w], `picture_1` ..."""
    return {f"picture_{i}": torch.cat(column) for i, column in enumerate(zip(*pictures, strict=True))}


def pictures_in(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of `picture_tensors`, in order."""
    count = sum(name.startswith("picture_") for name in tensors)
    return [tensors[f"picture_{i}"] for i in range(count)]
