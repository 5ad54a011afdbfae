"""Benchmarks: speculative configurations paired with speculation off, and servers measured by their clients."""
