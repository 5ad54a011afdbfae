"""Learners by name, and which one suits a drafter."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import SpeculativeConfig, reject_unknown
from slipstream.errors import ConfigError, LearnError
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
    "eagle": "slipstream.learn.learners.eagle:EagleLearner",
}
LEARNERS = tuple(_PLACES)


HEADS = {"eagle3": "eagle"}
"""Methods whose drafter is a head, and what learns there."""

WITH_WEIGHTS = ("draft_model", *HEADS)
"""Methods that learn while they serve."""


def make_learner(name: str, floor: Path, options: LearnerOptions, target: str | None = None) -> Learner:
    """A learner on top of a draft's folder; a head's needs the `target` too. Raises `ConfigError` for an unknown name,
    and for a head without a target."""
    reject_unknown([name], LEARNERS, "learner")
    module, _, attribute = _PLACES[name].partition(":")
    if name in HEADS.values():
        if target is None:
            raise ConfigError(f"learner {name!r} needs the target that the head drafts for")
        given: tuple[str, ...] = (target,)
    else:
        given = ()
    made: Learner = getattr(import_module(module), attribute)(floor, options, *given)
    return made


def check_learns(speculative: SpeculativeConfig | None, learner: str | None = None) -> str:
    """The folder of the draft that learns. Raises `LearnError` with one line for a drafter that does not, which may
    serve all the same, and `ConfigError` for a `learner` by which it does not."""
    method = "off" if speculative is None else speculative.method
    learning = " and ".join(WITH_WEIGHTS)
    if method in LEARN_BY_THEMSELVES:
        raise LearnError(
            f"drafter {method!r} learns by itself: its tables take in every answer; --learn is for {learning}"
        )
    if speculative is None or method not in WITH_WEIGHTS:
        what = (
            "without a drafter there is none that learns"
            if method == "off"
            else f"drafter {method!r} does not"
        )
        raise LearnError(f"{what}; --learn is for {learning}")
    if learner is not None and (method in HEADS) != (learner in HEADS.values()):
        fitting = (
            [HEADS[method]] if method in HEADS else [one for one in LEARNERS if one not in HEADS.values()]
        )
        raise ConfigError(f"drafter {method!r} learns by {' or '.join(fitting)}, not by {learner!r}")
    return str(speculative.options["model"])


def learner_for(method: str, num_parameters: int) -> str:
    """The learner that suits a drafter, and a draft model of a size."""
    if method in HEADS:
        return HEADS[method]
    return "whole" if num_parameters <= LARGEST_WHOLE else "low_rank"
