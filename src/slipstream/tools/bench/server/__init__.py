"""Benchmarks of servers through their clients."""
