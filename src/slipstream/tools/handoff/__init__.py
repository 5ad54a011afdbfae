"""A model handed to vLLM, started or attached to, and watched by its metrics."""
