"""Published benchmarks: one file each, with how its data are read, how outputs are scored, and the official summary."""
