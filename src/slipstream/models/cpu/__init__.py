"""The CPU kernels and what calls them."""
