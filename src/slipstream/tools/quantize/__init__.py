"""Saves a checkpoint with weights of 4 or 8 bits, in the layout of compressed-tensors."""
