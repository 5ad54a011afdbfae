"""Heads on the target's hidden states: modules, files and drafters."""
