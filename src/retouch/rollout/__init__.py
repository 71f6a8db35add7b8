"""Sampling, and the two computations that sampling and training share."""
