"""Drafters that let the target itself draft several positions at once."""
