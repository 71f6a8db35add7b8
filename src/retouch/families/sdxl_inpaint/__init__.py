"""Stable Diffusion XL inpainting."""
