"""Official scorers of published benchmarks."""
