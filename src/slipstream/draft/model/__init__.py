"""Drafters that run a draft model, or the target's own layers."""
