"""Counting what speculation did and what it cost."""
