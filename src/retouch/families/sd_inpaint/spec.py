"""Stable Diffusion 1.5 inpainting in a run file, and its facts."""

from __future__ import annotations

from typing import ClassVar, Literal

from retouch.families.base import FamilySpec, ModelSection
from retouch.families.facts import AdapterFacts
from retouch.families.released import CLIP_H, CLIP_L, autoencoder


class SdInpaintModel(ModelSection):
    """Stable Diffusion 1.5 inpainting (`UNet2DConditionModel` with 9 input channels, epsilon prediction)."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="sd_inpaint",
        prediction="epsilon",
        latent_channels=4,
        downsampling=8,
        size_multiple=8,  # the U-Net pads what its own levels cannot halve
        guidance_scale=7.5,
        needs=frozenset({"source", "mask"}),
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),  # self- and cross-attention of every block
        network_name="unet",
        model="retouch.families.sd_inpaint.model:SdInpaint",
        pipeline="StableDiffusionInpaintPipeline",
        networks={"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"},
        released={
            "unet": {  # 859.5 M parameters
                "sample_size": 64,
                "in_channels": 9,
                "out_channels": 4,
                "down_block_types": (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
                "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
                "block_out_channels": (320, 640, 1280, 1280),
                "layers_per_block": 2,
                "attention_head_dim": 8,
                "cross_attention_dim": 768,
            },
            "vae": autoencoder(4, quant_conv=True, scaling_factor=0.18215),
            "text_encoder": CLIP_L,
        },
        hub_ids=("stable-diffusion-v1-5/stable-diffusion-inpainting",),
        writes_words=False,
        doubles_for_guidance=True,
        adapter=AdapterFacts(
            network="UNet2DConditionModel",
            host="retouch.families.sd_inpaint.host:UnetHost",
            head="linear",
            tokens=4,
            image_encoder="laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
            width=1024,
            encoder=CLIP_H,
            normalizes_values=False,
        ),
    )

    family: Literal["sd_inpaint"] = "sd_inpaint"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout; "tiny" is the base that comes with the package."""

    def text_tokens(self, size: tuple[int, int]) -> int:
        return 77  # of CLIP, padded
