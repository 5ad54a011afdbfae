"""What computes passes: Transformers' code, our CPU kernels, or what a package brings."""
