"""What follows from the rates: from which load, acceptance and length on it pays, and what would make it pay."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.profiling.break_even import acceptance_length, break_even
from slipstream.tools.advise.candidates import OFF, Candidate, Setting, setting_name, settings
from slipstream.tools.advise.costs import StepCosts
from slipstream.tools.advise.predict import MIN_GAIN, AdvisedPlan, Band, Rates
from slipstream.tools.advise.recording import Recorded


@dataclass(frozen=True, slots=True)
class BreakEven:
    """When one chain pays at one load: a summary for people, from the measured cost of its steps."""

    setting: str
    concurrency: int
    cost: float
    """γ·c + v: a step that drafts and checks all γ tokens, over one of off, at this load."""
    acceptance: float | None
    """α from which on it pays if each token is accepted independently; None where even 1 does not."""
    tau: float
    """Counted tokens a step."""
    needed_tau: float
    """From which on it pays, by at least the least gain that is worth a drafter."""


@dataclass(frozen=True, slots=True)
class AdviceFindings:
    """What a reader wants to know in addition to the plan."""

    break_even_batch: int | None
    """Requests at once from which on no setting pays; None where one pays at the largest measured load."""
    max_batch: int
    """The largest number of requests at once whose costs were measured."""
    shortest_answer: int | None
    """Tokens of an answer from which on the recommended setting pays for one request; None where it never does."""
    break_evens: tuple[BreakEven, ...]
    """Break-even of the fastest chain at each load."""
    remedy: str
    """What would make it pay; empty where it does."""


def find(
    rates: Rates,
    candidates: Seq[Candidate],
    costs: StepCosts,
    recorded: Recorded,
    plan: AdvisedPlan,
    loads: Seq[int],
) -> AdviceFindings:
    """The findings for a plan."""
    largest = max(loads)
    chains = [setting for setting in settings(candidates) if setting.depth]
    best = [_best_chain(rates, chains, load) for load in loads] if chains else []
    break_evens = [
        _break_even(rates, candidates, setting, load) for setting, load in zip(best, loads, strict=False)
    ]
    return AdviceFindings(
        break_even_batch=_break_even_batch(plan, largest),
        max_batch=largest,
        shortest_answer=_shortest_answer(rates, candidates, costs, recorded, plan),
        break_evens=tuple(break_evens),
        remedy=_remedy(rates, candidates, chains) if plan.is_off else "",
    )


def _best_chain(rates: Rates, chains: Seq[Setting], load: int) -> Setting:
    return max(chains, key=lambda setting: rates.rate(setting, None, load))


def _break_even(rates: Rates, candidates: Seq[Candidate], setting: Setting, load: int) -> BreakEven:
    off_s = rates.step_s(OFF, None, load)
    cost = rates.full_step_s(setting, None, load) / off_s
    return BreakEven(
        setting=setting_name(setting, candidates),
        concurrency=load,
        cost=cost,
        acceptance=break_even(setting.depth, cost),
        tau=rates.counts(setting, None).tokens_per_step,
        needed_tau=rates.step_s(setting, None, load) / off_s * MIN_GAIN,
    )


def _break_even_batch(plan: AdvisedPlan, largest: int) -> int | None:
    """The first load from which on nothing is drafted, for any task."""
    ends = [_off_from(bands) for bands in plan.bands.values()]
    known = [end for end in ends if end is not None]
    last = max(known, default=1)
    return last if len(known) == len(ends) and last <= largest else None


def _off_from(bands: Seq[Band]) -> int | None:
    """The load from which on bands are off to the end; None where the last one drafts."""
    first: int | None = None
    begin = 1
    for band in bands:
        if not band.setting.is_off:
            first = None
        elif first is None:
            first = begin
        if band.max_requests is not None:
            begin = band.max_requests + 1
    return first


def _shortest_answer(
    rates: Rates, candidates: Seq[Candidate], costs: StepCosts, recorded: Recorded, plan: AdvisedPlan
) -> int | None:
    """For one request at a time: what the drafter's pass over the prompt costs, over what each token saves."""
    setting = plan.choose("", 1)
    if setting.is_off:
        return None
    rows = [request.num_prompt_rows for request in recorded.requests]
    once_s = costs.draft_prompt_s(candidates[setting.candidate].name, sum(rows) / len(rows))
    saved_s = 1 / rates.rate(OFF, None, 1) - 1 / rates.rate(setting, None, 1)
    return None if saved_s <= 0 else max(2, int(once_s / saved_s) + 2)


def _remedy(rates: Rates, candidates: Seq[Candidate], chains: Seq[Setting]) -> str:
    """The acceptance length that the chain nearest to paying would need, for one request at a time.

    Lookups are left out: no training makes a text repeat itself, and no model drafts as cheaply.
    """
    trained = [setting for setting in chains if not candidates[setting.candidate].is_lookup]
    if not trained:
        return (
            "Only drafters that look text up were considered. A small draft model may pay where they do not: "
            "--spec draft:PATH considers one, slipstream train draft makes one."
        )
    needs = [_break_even(rates, candidates, setting, 1) for setting in trained]
    within = [
        (need, setting)
        for need, setting in zip(needs, trained, strict=True)
        if need.needed_tau < setting.depth + 1
    ]
    if not within:
        return (
            "No draft model or head that was considered could pay here even if every draft token were accepted: "
            "a cheaper drafter is needed, or a slower target."
        )
    need, setting = min(within, key=lambda pair: pair[0].needed_tau / pair[0].tau)
    alpha = _acceptance_for(need.needed_tau, setting.depth)
    return (
        f"It would pay with a drafter as cheap as {need.setting} whose acceptance length τ is at least "
        f"{need.needed_tau:.2f} (α about {alpha:.2f}); now τ is {need.tau:.2f}. Distilling a draft on these prompts "
        "raises it: slipstream train draft."
    )


def _acceptance_for(tau: float, depth: int) -> float:
    """α of independently accepted tokens that gives τ at this depth."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if acceptance_length(middle, depth) < tau:
            low = middle
        else:
            high = middle
    return high
