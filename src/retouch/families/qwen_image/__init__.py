"""Qwen-Image."""
