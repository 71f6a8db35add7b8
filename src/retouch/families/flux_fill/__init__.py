"""FLUX.1-Fill."""
