"""Tiny bases trained from random weights on a CPU, and the synthetic data they learn from."""
