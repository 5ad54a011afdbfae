"""What an engine needs to know for step-level speculation: who drafts, and how steps are separated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from slipstream.config import SpeculativeConfig, check_types
from slipstream.draft.methods import DRAFT_MODEL
from slipstream.errors import ConfigError

CHUNK_TOKENS = 8
"""Draft tokens that are written between two of the target's passes, by default."""


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """The value of `reasoning` in `speculative_config`. Other keys are the drafter's, as in `speculative_config`."""

    method: str = DRAFT_MODEL.name
    """The drafter that writes the steps: one that drafts chains of the target's vocabulary."""
    name: str = ""
    """By which requests may choose this draft; empty: the last part of the path of its `model`, else the method."""
    separator: str = "\n\n"
    """Text that ends a step."""
    think_start: str | None = None
    """Text behind which the thinking begins, such as `<think>`; it may be in the prompt. None: with the answer."""
    think_end: str = "</think>"
    """Text that ends the thinking; what follows is the answer, which is never drafted in steps."""
    question: str | None = None
    """The question behind a step for its mark, as text of the target's tokens, up to where the digit follows. None: a
    further turn of the model's chat template, or plain text where it has none."""
    chunk_tokens: int = CHUNK_TOKENS
    """Draft tokens of each step under way that are written between two of the target's passes."""
    check_template: bool = True
    """Whether a draft with another chat template than the target's writes no steps. False trusts it anyway."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The drafter's own keys, such as `model` and `quantization`."""

    def __post_init__(self) -> None:
        check_types(self, "reasoning")
        for name in ("separator", "think_end"):
            if not getattr(self, name):
                raise ConfigError(f"reasoning {name} must not be empty")
        if self.question == "":
            raise ConfigError("reasoning question must not be empty; leave it out for the default")
        if self.chunk_tokens < 1:
            raise ConfigError(f"reasoning chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not self.name:
            model = str(self.options.get("model", ""))
            object.__setattr__(self, "name", PurePath(model).name or self.method)

    def step_drafter(self, speculative: SpeculativeConfig) -> SpeculativeConfig:
        """The configuration of the drafter that writes the steps, in an engine of `speculative`."""
        return SpeculativeConfig(
            self.method,
            speculative.verifier,
            {**self.options, "num_speculative_tokens": self.chunk_tokens},
            draft_device=speculative.draft_device,
            draft_timeout_s=speculative.draft_timeout_s,
        )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ReasoningConfig:
        """From one flat mapping: `{"model": "PATH", "separator": "\\n\\n"}`. Raises `ConfigError`."""
        own = {each.name for each in dataclasses.fields(cls)} - {"options"}
        options = {key: value for key, value in mapping.items() if key not in own}
        if "num_speculative_tokens" in options:
            raise ConfigError(
                "reasoning has no num_speculative_tokens; chunk_tokens is how many are written at a time"
            )
        return cls(**{key: mapping[key] for key in own & set(mapping)}, options=options)
