"""Shared parts of the FLUX.1 families."""
