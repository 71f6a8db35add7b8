"""One component of each kind: reward, step rule, data format, algorithm, model family. See docs/extending.md."""
