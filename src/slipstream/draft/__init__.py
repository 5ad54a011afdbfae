"""Drafters: one file each, in a room by how they draft."""
