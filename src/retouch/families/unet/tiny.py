"""Parts of the U-Net families at toy sizes; see `retouch.families.tiny`."""

from __future__ import annotations

from typing import Any

from diffusers import DDIMScheduler, UNet2DConditionModel


def unet(widths: tuple[int, int], heads: Any, text_width: int, **options: Any) -> Any:
    """A U-Net of two levels, with attention in the second.

    Args:
        heads: of attention, of all levels or of each.
    """
    sizes: Any = widths
    down: Any = ("DownBlock2D", "CrossAttnDownBlock2D")
    up: Any = ("CrossAttnUpBlock2D", "UpBlock2D")
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=9,
        out_channels=4,
        down_block_types=down,
        up_block_types=up,
        block_out_channels=sizes,
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=heads,
        cross_attention_dim=text_width,
        **options,
    )


def scheduler() -> Any:
    """With the noise levels of the released models."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
