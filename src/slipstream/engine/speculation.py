"""Whether a speculative configuration is right as a whole, before anything is loaded for it."""

from __future__ import annotations

from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft import registry as drafters
from slipstream.draft.base import Drafter
from slipstream.errors import ConfigError
from slipstream.reasoning.config import ReasoningConfig
from slipstream.verify.registry import VERIFIERS


def validate(config: SpeculativeConfig, allow_lossy: bool = True) -> tuple[type[Drafter], Any]:
    """The drafter's class and its parsed options.

    Raises `ConfigError` for an unknown verifier or drafter, for wrong options, where the verifier can judge nothing
    of what the drafter makes, and for a draft of whole steps in an engine that may not be lossy. Loads no model.
    """
    if config.reasoning is not None:
        if not allow_lossy:
            raise ConfigError(
                "reasoning in speculative_config drafts steps that may change the text; set allow_lossy "
                "(--allow-lossy) to allow that, or leave it out"
            )
        ReasoningConfig.from_mapping(config.reasoning)
    return drafters.validate(config, VERIFIERS.load(config.verifier).traits())
