"""Flags and what is read from them."""
