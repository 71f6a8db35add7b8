"""Shared parts of the FLUX.2 families."""
