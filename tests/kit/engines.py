"""What tests of the engine ask for by name: a maker of engines, and the drafter that knows the answer."""

from __future__ import annotations

from collections.abc import Callable

from slipstream import LLM

ORACLE = "slipstream.testing.stub_drafters:OracleDrafter"

MakeLLM = Callable[..., LLM]
