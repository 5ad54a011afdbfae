"""Drafters that look up what followed the same tokens earlier."""
