"""Families of models whose whole passes our kernels compute: where a Transformers class keeps its weights."""
