"""Stable Diffusion 1.5 inpainting."""
