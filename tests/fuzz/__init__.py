"""Mutated and generated inputs of everything that the package reads: an error that names the problem, or a value.

`make test` tries few of each; `make trust` tries at least 10,000 in all and prints how many.
"""
