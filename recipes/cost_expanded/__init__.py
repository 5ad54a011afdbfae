"""Targets and heads at the cost of a larger model: the same text, the same acceptance, more time and memory."""
