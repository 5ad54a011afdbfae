"""Marks that many tests carry."""

from __future__ import annotations

import pytest

from slipstream.models.cpu import native

needs_kernels = pytest.mark.skipif(native.unavailable() is not None, reason="there are no native kernels")
