"""Shared parts of the families on a Qwen3 text encoder."""
