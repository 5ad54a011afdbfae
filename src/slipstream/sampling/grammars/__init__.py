"""Structured output: grammars that constrain an answer."""
