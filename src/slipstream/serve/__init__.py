"""The OpenAI-compatible server: HTTP requests to an engine, its answers, and metrics."""
