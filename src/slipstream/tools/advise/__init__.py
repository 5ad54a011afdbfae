"""Advice before deploying: which drafter, how deep, at which load, and whether at all."""
