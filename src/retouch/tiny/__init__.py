"""Tiny bases trained from nothing on a CPU, and the synthetic data they learn from."""
