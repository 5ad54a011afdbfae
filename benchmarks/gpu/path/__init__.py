"""The CUDA path on a GPU: what it costs, and whether its bits are what they must be."""
