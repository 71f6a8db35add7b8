"""Stable Diffusion 3.5."""
