"""Makes the policy of an engine: who can draft, and what a pass of the target should take."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import SpeculativeConfig
from slipstream.control.fixed import FixedPlan
from slipstream.control.policy import Policy
from slipstream.control.types import PolicyDrafter
from slipstream.core.proposal import ProposalKind
from slipstream.draft.base import Drafter
from slipstream.draft.combine.auto import AutoDrafter
from slipstream.models import CausalLM
from slipstream.profiling.pass_times import profile_key, time_passes
from slipstream.profiling.profile import interpolate, isotonic
from slipstream.profiling.store import find

AUTO_PROBE_SHARE = 0.005
ROW_COUNTS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 64, 128, 256)
TIMING_BUDGET_S = 1.0
USUAL_CONTEXT = 256
"""Cached tokens for which a stored profile is read: what a pass takes depends on its rows far more."""


def create_policy(speculative: SpeculativeConfig, drafter: Drafter, model: CausalLM) -> Policy | None:
    """The policy of `speculative`; None where nothing is to be chosen or probed."""
    share = speculative.probe_share
    if isinstance(drafter, AutoDrafter):
        members = zip(drafter.names, drafter.members, strict=True)
        traits = [_traits(name, guard.drafter) for name, guard in members]
        share = AUTO_PROBE_SHARE if share is None else share
        if rules := drafter.options.rules():
            fixed = FixedPlan(rules, traits)
            return Policy(traits, adaptive=False, probe_share=share, pass_s=_unmeasured_s, fixed=fixed)
        return Policy(traits, adaptive=True, probe_share=share, pass_s=_pass_s(model))
    if not share or drafter.traits.max_nodes == 0:
        return None
    traits = [_traits(speculative.method, drafter)]
    return Policy(traits, adaptive=False, probe_share=share, pass_s=_unmeasured_s)


def _traits(name: str, drafter: Drafter) -> PolicyDrafter:
    traits = drafter.traits
    depth = traits.max_nodes if traits.chain_length is None else traits.chain_length
    # Whether a lookup's proposal is used depends on its length, which must not be what a random draw came to.
    draws = bool(traits.kinds - {ProposalKind.ONE_HOT, ProposalKind.COUPLED})
    return PolicyDrafter(name, depth, traits.chain_length is not None, traits.looks_up and not draws)


def _unmeasured_s(rows: float) -> float:
    """Seconds of a pass where nothing is chosen by it: a sense of proportion."""
    return 0.01 + 0.001 * rows


def _pass_s(model: CausalLM) -> Callable[[float], float]:
    """Seconds of a pass by rows: from the profile that `slipstream info --measure` left, else timed now, briefly."""
    if (profile := find(profile_key(model))) is not None:
        return lambda rows: profile.step_s(max(rows, 1.0), USUAL_CONTEXT)
    times_s = time_passes(model, ROW_COUNTS, min(USUAL_CONTEXT, model.context_length // 2), TIMING_BUDGET_S)
    points, values = list(times_s), isotonic(list(times_s.values()))
    return lambda rows: interpolate(points, values, max(rows, 1.0))
