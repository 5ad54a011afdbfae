"""Tests that bet (`betting`), a shift of a mean (`shift`), and paired comparisons (`paired`). No tensors.

Whatever else a room needs of statistics it takes from SciPy.
"""
