"""Passes on a CUDA device: kernels in Triton, and what a captured pass reads."""
