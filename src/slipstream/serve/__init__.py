"""The OpenAI-compatible server: HTTP in, the engine's answers out, its figures beside them."""
