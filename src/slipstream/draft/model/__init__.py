"""Drafters that run a model."""
