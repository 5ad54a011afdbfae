"""What a request says of step-level speculation."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import reject_unknown
from slipstream.errors import ConfigError, ReasoningError

JUDGES = ("score", "logprob")
DEFAULT_THRESHOLDS = {"score": 7.0, "logprob": -0.5}
MAX_STEP_TOKENS = 1024
"""The longest step that a request may allow: it is checked in one pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """A request's own settings of step-level speculation. Setting them allows the text to change.

    Raises `ReasoningError` for a value that no engine can serve.
    """

    mode: str = "step"
    """The only one there is."""
    draft: str | None = None
    """The name of the draft that writes the steps; None: the engine's."""
    judge: str = "score"
    """`score`: the target gives the step a mark from 0 to 9, in one pass over the step and a short question. `logprob`:
    the mean log-probability that the target gives the step's tokens, in nats."""
    threshold: float | None = None
    """A step is kept from this mark or mean log-probability on; None: 7 or -0.5."""
    max_entropy: float | None = None
    """With `logprob`: a step is kept only if the target's mean entropy along it is at most this, in nats."""
    max_step_tokens: int = 128
    """A step that has no separator after so many tokens is the target's own."""
    protect_first_steps: int = 2
    """So many steps at the beginning are always the target's own."""
    protect_last_step: bool = True
    """The step behind which the target ends its thinking is always its own, as is the end itself."""
    give_up_after: int = 4
    """So many drafted steps in a row that were not kept: then the rest of the answer is the target's own."""

    def __post_init__(self) -> None:
        if self.mode != "step":
            raise ReasoningError(f"reasoning mode must be 'step', got {self.mode!r}")
        if self.judge not in JUDGES:
            raise ReasoningError(
                f"reasoning judge must be {' or '.join(map(repr, JUDGES))}, got {self.judge!r}"
            )
        if not isinstance(self.draft, str | None):
            raise ReasoningError(f"reasoning draft must be a name, got {self.draft!r}")
        if not isinstance(self.protect_last_step, bool):
            raise ReasoningError(
                f"reasoning protect_last_step must be true or false, got {self.protect_last_step!r}"
            )
        for name, least, most in (
            ("max_step_tokens", 2, MAX_STEP_TOKENS),
            ("protect_first_steps", 0, None),
            ("give_up_after", 1, None),
        ):
            _check_whole(name, getattr(self, name), least, most)
        threshold = DEFAULT_THRESHOLDS[self.judge] if self.threshold is None else self.threshold
        bounds = (0.0, 9.0) if self.judge == "score" else (-math.inf, 0.0)
        object.__setattr__(self, "threshold", _number("threshold", threshold, *bounds))
        if self.max_entropy is not None:
            if self.judge != "logprob":
                raise ReasoningError(
                    "reasoning max_entropy is for judge 'logprob'; leave it out with 'score'"
                )
            object.__setattr__(self, "max_entropy", _number("max_entropy", self.max_entropy, 0.0, math.inf))

    @property
    def least(self) -> float:
        """The threshold, the default where none was given."""
        assert self.threshold is not None  # set on construction
        return self.threshold


def parse_step_options(value: Any) -> StepOptions:
    """From what a caller wrote: `StepOptions`, their fields as an object, or True for the defaults.

    Raises `ReasoningError` for anything else.
    """
    if isinstance(value, StepOptions):
        return value
    if value is True:
        return StepOptions()
    if not isinstance(value, Mapping):
        raise ReasoningError(
            f'reasoning must be an object such as {{"judge": "score", "threshold": 7}}, got {value!r}'
        )
    try:
        reject_unknown(value, [field.name for field in dataclasses.fields(StepOptions)], "reasoning key")
    except ConfigError as error:
        raise ReasoningError(str(error)) from None
    return StepOptions(**value)


def _check_whole(name: str, value: Any, least: int, most: int | None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise ReasoningError(
            f"reasoning {name} must be a whole number of at least {least}{bound}, got {value!r}"
        )


def _number(name: str, value: Any, low: float, high: float) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or math.isinf(value):
        raise ReasoningError(f"reasoning {name} must be a number within [{low:g}, {high:g}], got {value!r}")
    return float(value)
