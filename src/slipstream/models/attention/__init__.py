"""Attention backends over Slipstream's own cache."""
