"""Benchmarks of engines in this process."""
