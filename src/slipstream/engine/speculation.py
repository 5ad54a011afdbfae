"""Whether a speculative configuration is right as a whole, before anything is loaded for it."""

from __future__ import annotations

from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft import registry as drafters
from slipstream.draft.base import Drafter
from slipstream.verify.registry import VERIFIERS


def validate(config: SpeculativeConfig) -> tuple[type[Drafter], Any]:
    """The drafter's class and its parsed options.

    Raises `ConfigError` for an unknown verifier or drafter, for wrong options, and where the verifier can judge nothing
    of what the drafter makes. Loads no model.
    """
    return drafters.validate(config, VERIFIERS.load(config.verifier).traits())
