"""Sampling: parameters, logits processors, grammars, position-keyed noise."""
