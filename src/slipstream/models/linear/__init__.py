"""Linear layers and the formats of their weights."""
