"""How a proposal arises: level by level from a model or head, or from the target's last state in one pass."""
