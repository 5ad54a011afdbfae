"""Grammars that an answer must keep to."""
