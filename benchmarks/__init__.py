"""Benchmarks of the operators: `python -m benchmarks.ops.report`, or `pytest benchmarks --benchmark-only`."""
