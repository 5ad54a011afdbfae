"""Drafters behind a guard: nothing that they do can harm their engine."""
