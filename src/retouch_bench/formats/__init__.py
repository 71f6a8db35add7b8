"""Data formats of published benchmarks."""
