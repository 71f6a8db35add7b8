"""FLUX.1-dev."""
