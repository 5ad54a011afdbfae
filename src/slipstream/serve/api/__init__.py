"""The OpenAI-compatible interface."""
