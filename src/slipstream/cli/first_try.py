"""What to try first with a model on this machine: a rule from what is known of both, no measurement of speed."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.profiling.break_even import break_even

CHAIN = 4
"""Draft tokens of the chain that is reckoned with."""
HEAD_COST = 0.06
"""c of an EAGLE-3 head with a pruned vocabulary: a draft token over a target step, as usual on CPUs."""


@dataclass(frozen=True)
class KnownModel:
    """What decides."""

    is_embedded: bool
    """The target of the package, which has a draft model of its own."""
    stored_as: str
    """How a file holds its weights, quantised; empty where it does not."""
    copy_pays: bool
    """Whether the target in int8 can draft for itself."""
    draft: str | None = None
    """A draft model with the same vocabulary that the user has."""
    verify_cost: float | None = None
    """v of `CHAIN + 1` rows, where the machine was measured."""
    round_cost: float | None = None
    """γ·c + v of a chain with that draft model, where both were measured."""
    head: str | None = None
    """The method of a head that ships for it."""


def first_try(known: KnownModel) -> str:
    """One line: flags, and why."""
    v = known.verify_cost
    if v is not None and break_even(CHAIN, v) is None:
        return (
            f"--spec off: checking {CHAIN + 1} rows costs {v:.2f} steps of one row here, more than {CHAIN} draft "
            "tokens can save"
        )
    if known.is_embedded:
        return "--spec draft: the embedded target's own draft model, which runs by default"
    if known.draft is not None:
        return _with_draft(known.draft, known.round_cost)
    if known.head is not None:
        return f"--spec auto: suffix and the {known.head} head that ships for this model, each where it gains"
    if known.copy_pays:
        return "--spec auto: suffix for text that repeats, and the target itself in int8, each where it gains"
    held = f"the target in int8 would read as much as {known.stored_as}" if known.stored_as else "no model"
    return f"--spec auto: suffix, where text repeats ({held}); all other text needs {_head(v)}"


def _with_draft(path: str, cost: float | None) -> str:
    if cost is None:
        return f"--spec auto:{path}: suffix and this draft model, each where it gains; `bench` says what"
    rate = break_even(CHAIN, cost)
    if rate is None:
        return (
            f"--spec auto: drafting {CHAIN} tokens with {path} and checking them costs {cost:.2f} steps, more than "
            "they can save; suffix where text repeats"
        )
    return f"--spec auto:{path}: it gains from an acceptance rate of {rate:.2f} on; `bench` measures it"


def _head(v: float | None) -> str:
    """What must be had, and from when on it gains."""
    what = "a smaller draft model or a trained head (slipstream train eagle3)"
    if v is None:
        return f"{what}; info --measure says from when on one gains"
    return f"{what}, which gains from {v + CHAIN * HEAD_COST:.2f} tokens a pass on"
