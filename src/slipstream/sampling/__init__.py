"""Turning logits into tokens: processors, position-keyed noise."""
