"""Qwen-Image-2.1."""
