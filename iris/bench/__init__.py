"""Timing, and what the benchmarks share."""
