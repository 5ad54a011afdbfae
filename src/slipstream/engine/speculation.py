"""A speculative configuration that is right as a whole, before anything is loaded for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft import registry
from slipstream.draft.base import Drafter
from slipstream.errors import ConfigError
from slipstream.reasoning.config import ReasoningConfig
from slipstream.verify.registry import VERIFIERS


@dataclass(frozen=True, slots=True)
class ParsedSpeculation:
    """What a speculative configuration names, found and read: from here on nothing in it needs to be checked again."""

    config: SpeculativeConfig
    drafter: type[Drafter]
    options: Any
    """The drafter's own `Options`."""
    reasoning: ReasoningConfig | None = None
    """How whole steps of thinking are drafted; None where they are not."""
    step_drafter: ParsedSpeculation | None = None
    """Who drafts them."""

    @classmethod
    def of(cls, config: SpeculativeConfig, allow_lossy: bool = True) -> ParsedSpeculation:
        """Read a configuration. Loads no model.

        Raises `ConfigError` for an unknown verifier or drafter, for wrong options, where the verifier can judge nothing
        of what the drafter makes, and for a draft of whole steps in an engine that may not be lossy.
        """
        reasoning = None
        if config.reasoning is not None:
            if not allow_lossy:
                raise ConfigError(
                    "reasoning in speculative_config drafts steps that may change the text; set allow_lossy "
                    "(--allow-lossy) to allow that, or leave it out"
                )
            reasoning = ReasoningConfig.from_mapping(config.reasoning)
        drafter, options = registry.validate(config, VERIFIERS.load(config.verifier).traits())
        step_drafter = None if reasoning is None else cls.of(reasoning.step_drafter(config))
        return cls(config, drafter, options, reasoning, step_drafter)
