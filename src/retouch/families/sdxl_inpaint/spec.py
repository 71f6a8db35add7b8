"""Stable Diffusion XL inpainting in a run file, and its facts."""

from __future__ import annotations

from typing import ClassVar, Literal

from retouch.families.base import FamilySpec, ModelSection
from retouch.families.released import CLIP_BIGG, CLIP_L, autoencoder


class SdxlInpaintModel(ModelSection):
    """Stable Diffusion XL inpainting (`UNet2DConditionModel` with 9 input channels, epsilon prediction), made for
    images of about 1024 x 1024 pixels."""

    spec: ClassVar[FamilySpec] = FamilySpec(
        family="sdxl_inpaint",
        prediction="epsilon",
        latent_channels=4,
        downsampling=8,
        size_multiple=8,  # the U-Net pads what its own levels cannot halve
        guidance_scale=7.5,
        needs=frozenset({"source", "mask"}),
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),  # self- and cross-attention of every block
        network_name="unet",
        model="retouch.families.sdxl_inpaint.model:SdxlInpaint",
        pipeline="StableDiffusionXLInpaintPipeline",
        networks={
            "unet": "UNet2DConditionModel",
            "vae": "AutoencoderKL",
            "text_encoder": "CLIPTextModel",
            "text_encoder_2": "CLIPTextModelWithProjection",
        },
        released={
            "unet": {  # 2.57 B parameters
                "sample_size": 128,
                "in_channels": 9,
                "out_channels": 4,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "block_out_channels": (320, 640, 1280),
                "layers_per_block": 2,
                "transformer_layers_per_block": (1, 2, 10),
                "attention_head_dim": (5, 10, 20),
                "cross_attention_dim": 2048,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
            "vae": autoencoder(4, quant_conv=True, scaling_factor=0.13025),
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_BIGG,
        },
        hub_ids=("diffusers/stable-diffusion-xl-1.0-inpainting-0.1",),
        writes_words=False,
        doubles_for_guidance=True,
    )

    family: Literal["sdxl_inpaint"] = "sdxl_inpaint"  # pyright: ignore[reportIncompatibleVariableOverride]
    path: str = spec.hub_ids[0]
    """A hub id or a folder in the diffusers layout."""

    def text_tokens(self, size: tuple[int, int]) -> int:
        return 77  # of CLIP, padded
