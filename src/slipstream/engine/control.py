"""Makes the controller of an engine: who can draft, and what a pass of the target should take."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import SpeculativeConfig
from slipstream.control.choice import Member
from slipstream.control.controller import Controller
from slipstream.core import ProposalKind
from slipstream.draft.base import Drafter
from slipstream.draft.combine.auto import AutoDrafter
from slipstream.models import CausalLM
from slipstream.profiling.floors import profile_key, time_passes
from slipstream.profiling.profile import interpolate, isotonic
from slipstream.profiling.store import find

AUTO_PROBE_SHARE = 0.005
ROW_COUNTS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 64, 128, 256)
TIMING_BUDGET_S = 1.0
USUAL_CONTEXT = 256
"""Cached tokens for which a stored profile is read: what a pass takes depends on its rows far more."""


def create_controller(speculative: SpeculativeConfig, drafter: Drafter, model: CausalLM) -> Controller | None:
    """The controller that `speculative` asks for; None where nothing is to be chosen or probed."""
    adaptive = isinstance(drafter, AutoDrafter)
    share = speculative.probe_share
    if share is None:
        share = AUTO_PROBE_SHARE if adaptive else 0.0
    if not adaptive:
        if share == 0 or drafter.max_nodes() == 0:
            return None
        return Controller([_member(speculative.method, drafter)], adaptive=False, probe_share=share)
    assert isinstance(drafter, AutoDrafter)
    members = [
        _member(name, guard.drafter) for name, guard in zip(drafter.names, drafter.members, strict=True)
    ]
    return Controller(members, adaptive=True, probe_share=share, pass_s=_pass_s(model))


def _member(name: str, drafter: Drafter) -> Member:
    length = drafter.chain_length()
    depth = drafter.max_nodes() if length is None else length
    # Whether a lookup's guess is taken depends on its length, which must not be what a random draw came to.
    draws = bool(drafter.kinds_made() - {ProposalKind.ONE_HOT, ProposalKind.COUPLED})
    return Member(name, depth, length is not None, drafter.looks_up and not draws)


def _pass_s(model: CausalLM) -> Callable[[float], float]:
    """Seconds of a pass by rows: from the profile that `slipstream info --measure` left, else timed now, briefly."""
    if (profile := find(profile_key(model))) is not None:
        return lambda rows: profile.step_s(max(rows, 1.0), USUAL_CONTEXT)
    times_s = time_passes(model, ROW_COUNTS, min(USUAL_CONTEXT, model.context_length // 2), TIMING_BUDGET_S)
    points, values = list(times_s), isotonic(list(times_s.values()))
    return lambda rows: interpolate(points, values, max(rows, 1.0))
