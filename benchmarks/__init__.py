"""Benchmarks of the operators: `python -m benchmarks.report`, or `pytest benchmarks --benchmark-only`."""
