"""Who runs in the next step. No tensors."""
