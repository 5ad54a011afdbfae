"""Drafters that use the target's own predictions for several positions ahead."""
