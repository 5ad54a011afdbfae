"""Learners by name, and which one suits a drafter."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from slipstream.config import SpeculativeConfig, reject_unknown
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.options import LearnerOptions

if TYPE_CHECKING:
    from slipstream.learn.learners.base import Learner
    from slipstream.learn.learners.floor import DraftFloor

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
_OF_HEADS = {"corrective": "slipstream.learn.learners.corrective:CorrectiveHeadLearner"}
"""Learners that are others where a head drafts."""
LEARNERS = tuple(_PLACES)

HEADS = ("eagle", "eagle3")
"""Methods whose drafter reads the target's hidden states."""

_LEARN_BY = {
    "draft_model": ("whole", "low_rank", "corrective"),
    "eagle3": ("eagle", "corrective"),
    "eagle": ("corrective",),
    "self": ("corrective",),
    "layer_skip": ("corrective",),
}
"""Methods that learn while they serve, and by what; for all but draft models the first suits best."""


def make_learner(name: str, floor: DraftFloor, options: LearnerOptions) -> Learner:
    """A learner on top of a drafter. Raises `ConfigError` for an unknown name, for one by which such a drafter does not
    learn, and for a head without a target."""
    reject_unknown([name], LEARNERS, "learner")
    _check_fits(floor.method, name)
    place = _OF_HEADS.get(name, _PLACES[name]) if floor.method in HEADS else _PLACES[name]
    module, _, attribute = place.partition(":")
    made: Learner = getattr(import_module(module), attribute)(floor, options)
    return made


def check_learns(speculative: SpeculativeConfig | None, learner: str | None = None) -> None:
    """Raise `LearnError` with one line for a drafter that does not learn, which may serve all the same, and
    `ConfigError` for a `learner` by which it does not."""
    method = "off" if speculative is None else speculative.method
    learning = f"{', '.join(tuple(_LEARN_BY)[:-1])} and {tuple(_LEARN_BY)[-1]}"
    if method in LEARN_BY_THEMSELVES:
        raise LearnError(
            f"drafter {method!r} learns by itself: its tables take in every answer; --learn is for {learning}"
        )
    if speculative is None or method not in _LEARN_BY:
        what = (
            "without a drafter there is none that learns"
            if method == "off"
            else f"drafter {method!r} does not"
        )
        raise LearnError(f"{what}; --learn is for {learning}")
    given = speculative.options
    if method == "layer_skip" and given.get("exit_layer") is None and given.get("skip_layers") is None:
        raise LearnError("layer_skip learns with layers that do not change; give exit_layer or skip_layers")
    if method == "layer_skip" and given.get("quantization") is not None:
        raise LearnError("layer_skip learns with the target's own weights only; omit its quantization")
    if learner is not None:
        _check_fits(method, learner)


def learner_for(method: str, num_parameters: int) -> str:
    """The learner that suits a drafter, and a draft model of a size."""
    if method == "draft_model":
        return "whole" if num_parameters <= LARGEST_WHOLE else "low_rank"
    return _LEARN_BY[method][0]


def _check_fits(method: str, learner: str) -> None:
    fitting = _LEARN_BY.get(method, ())
    if learner not in fitting:
        raise ConfigError(
            f"drafter {method!r} learns by {' or '.join(fitting) or 'nothing'}, not by {learner!r}"
        )
