"""Learners by name, and which one suits a drafter."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import SpeculativeConfig, reject_unknown
from slipstream.errors import ConfigError
from slipstream.learn.options import LearnerOptions

if TYPE_CHECKING:
    from slipstream.learn.learners.base import Learner

LARGEST_WHOLE = 20_000_000
"""Parameters of a draft that learns as a whole; larger ones learn adapters."""

LEARN_BY_THEMSELVES = ("ngram", "suffix", "token_recycling", "lookahead", "jacobi")
"""Drafters whose tables take in every answer as it is."""

_PLACES = {
    "whole": "slipstream.learn.learners.whole:WholeLearner",
    "low_rank": "slipstream.learn.learners.low_rank:LowRankLearner",
    "corrective": "slipstream.learn.learners.corrective:CorrectiveLearner",
}
LEARNERS = tuple(_PLACES)


def make_learner(name: str, floor: Path, options: LearnerOptions) -> Learner:
    """A learner on top of a draft model's folder; raises `ConfigError` for an unknown name."""
    reject_unknown([name], LEARNERS, "learner")
    module, _, attribute = _PLACES[name].partition(":")
    made: Learner = getattr(import_module(module), attribute)(floor, options)
    return made


def check_learns(speculative: SpeculativeConfig | None) -> str:
    """The folder of the draft that learns; raises `ConfigError` with one line for a drafter that does not."""
    method = "off" if speculative is None else speculative.method
    if method in LEARN_BY_THEMSELVES:
        raise ConfigError(
            f"drafter {method!r} learns by itself: its tables take in every answer; omit --learn, or use draft_model"
        )
    if speculative is None or method != "draft_model":
        raise ConfigError(
            f"drafter {method!r} cannot learn while it serves; --learn needs method draft_model"
        )
    return str(speculative.options["model"])


def learner_for(num_parameters: int) -> str:
    """The learner that suits a draft model of a size."""
    return "whole" if num_parameters <= LARGEST_WHOLE else "low_rank"
