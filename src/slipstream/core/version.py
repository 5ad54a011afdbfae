"""The version of the package, in a file that imports nothing."""

__version__ = "0.1.0"
"""The release, as in `pip show slipstream-llm`."""
