"""Benchmarks, in one room per question; README.md is the map."""
