"""Versions of a drafter's weights: on disk, in the drafter, and whose they are."""
