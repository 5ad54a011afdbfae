"""What runs on a CUDA GPU, how fast, and what limits it."""
