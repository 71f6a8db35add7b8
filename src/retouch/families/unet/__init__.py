"""Shared parts of the inpainting families on U-Nets."""
