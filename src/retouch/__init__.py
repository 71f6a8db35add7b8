"""Reinforcement-learning post-training for image inpainting, editing and generation models."""

__version__ = "0.1.0"
