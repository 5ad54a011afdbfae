"""What an engine is made of; `engine.factory` makes it from a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.base import Drafter
from slipstream.engine.drafting import Drafting
from slipstream.engine.extension import StepExtension
from slipstream.engine.memory import MemoryPlan
from slipstream.engine.runner import ModelRunner
from slipstream.models import CausalLM
from slipstream.schedule.scheduler import Scheduler
from slipstream.verify.base import Verifier


@dataclass(frozen=True)
class EngineParts:
    """A loaded target with all that its steps need."""

    config: EngineConfig
    speculative: SpeculativeConfig
    model: CausalLM
    tokenizer: Any
    sampling_defaults: dict[str, Any]
    """What the checkpoint recommends, as names and values of `SamplingParams`."""
    end_token_ids: frozenset[int]
    """The tokens with which the model ends an answer."""
    drafter: Drafter
    verifier: Verifier
    extension: StepExtension
    memory_plan: MemoryPlan
    scheduler: Scheduler
    drafting: Drafting
    runner: ModelRunner

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its answer."""
        return self.memory_plan.max_model_len
