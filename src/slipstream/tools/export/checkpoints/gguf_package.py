"""The package that reads and writes GGUF files, imported where it is needed."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ConfigError


def gguf_package() -> Any:
    """llama.cpp's own Python package; raises `ConfigError` where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise ConfigError('GGUF files need the package gguf: pip install "slipstream-llm[export]"') from None
    return gguf
