"""Training of draft models and heads: data, losses, the training loop, evaluation."""
