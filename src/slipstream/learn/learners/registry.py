"""Learners by name, and which one suits a drafter."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from slipstream.config import SpeculativeConfig, reject_unknown
from slipstream.draft.methods import DRAFT_MODEL, HEADS, LAYER_SKIP, LEARNING, METHODS, OFF
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.learners.learner_options import LearnerOptions

if TYPE_CHECKING:
    from slipstream.learn.learners.base import Learner
    from slipstream.learn.learners.base_draft import BaseDraft

LARGEST_WHOLE = 20_000_000
"""Parameters of a draft that learns as a whole; larger ones learn adapters."""

_PLACES = {
    "whole": "slipstream.learn.learners.whole:WholeLearner",
    "low_rank": "slipstream.learn.learners.low_rank:LowRankLearner",
    "corrective": "slipstream.learn.learners.corrective:CorrectiveLearner",
    "eagle": "slipstream.learn.learners.eagle:EagleLearner",
}
_OF_HEADS = {"corrective": "slipstream.learn.learners.corrective:CorrectiveHeadLearner"}
"""Learners that are others where a head drafts."""
LEARNERS = tuple(_PLACES)


def make_learner(name: str, base: BaseDraft, options: LearnerOptions) -> Learner:
    """A learner on top of a drafter. Raises `ConfigError` for an unknown name, for one by which such a drafter does not
    learn, and for a head without a target."""
    reject_unknown([name], LEARNERS, "learner")
    _check_fits(base.method, name)
    place = _OF_HEADS.get(name, _PLACES[name]) if base.method in HEADS else _PLACES[name]
    module, _, attribute = place.partition(":")
    made: Learner = getattr(import_module(module), attribute)(base, options)
    return made


def check_learns(speculative: SpeculativeConfig | None, learner: str | None = None) -> None:
    """Raise `LearnError` with one line for a drafter that does not learn, which may serve all the same, and
    `ConfigError` for a `learner` by which it does not."""
    method = OFF.name if speculative is None else speculative.method
    spec = METHODS.get(method)
    learning = f"{', '.join(LEARNING[:-1])} and {LEARNING[-1]}"
    if spec is not None and spec.learns_by_itself:
        raise LearnError(
            f"drafter {method!r} learns by itself: its tables take in every answer; --learn is for {learning}"
        )
    if speculative is None or method not in LEARNING:
        what = (
            "without a drafter there is none that learns" if spec is OFF else f"drafter {method!r} does not"
        )
        raise LearnError(f"{what}; --learn is for {learning}")
    given = speculative.options
    if spec is LAYER_SKIP and given.get("exit_layer") is None and given.get("skip_layers") is None:
        raise LearnError("layer_skip learns with layers that do not change; give exit_layer or skip_layers")
    if spec is LAYER_SKIP and given.get("quantization") is not None:
        raise LearnError("layer_skip learns with the target's own weights only; omit its quantization")
    if learner is not None:
        _check_fits(method, learner)


def learner_for(method: str, num_parameters: int) -> str:
    """The learner that suits a drafter, and a draft model of a size."""
    if method == DRAFT_MODEL.name:
        return "whole" if num_parameters <= LARGEST_WHOLE else "low_rank"
    return METHODS[method].learners[0]


def _check_fits(method: str, learner: str) -> None:
    fitting = METHODS[method].learners if method in METHODS else ()
    if learner not in fitting:
        raise ConfigError(
            f"drafter {method!r} learns by {' or '.join(fitting) or 'nothing'}, not by {learner!r}"
        )
