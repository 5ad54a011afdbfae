"""How long `auto` takes to find the right setting when the traffic changes."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from benchmarks.control.traffic import Question
from slipstream.control.types import NO_DRAFTER
from slipstream.core.request import RequestOptions
from slipstream.core.step import StepItem
from slipstream.engine.engine import Engine
from slipstream.sampling.params import SamplingParams

CONCURRENCY = 8
PHASES = (("sql", 0.0), ("creative", 1.2), ("sql", 0.0), ("creative", 1.2), ("sql", 0.0))
TOKENS = 3200
"""Tokens of a phase. It is to be settled within 200 tokens a request."""
WINDOW = 40
"""Tokens over which it is read who is asked for drafts."""
SAME = 0.75
"""The share of a window's tokens for which those must be asked who are asked in the second half of the phase."""


def measure_shift(make_engine: Callable[[], Engine], by_task: dict[str, list[Question]]) -> dict[str, Any]:
    """Tokens after each shift until those are asked for drafts, or nobody, who stay it; with and without task tags.

    Phases of one task have other questions and seeds, and the drafters' memory of texts is emptied between them.
    """
    found: dict[str, Any] = {}
    for tagged in (True, False):
        engine = make_engine()
        found["tagged" if tagged else "untagged"] = [
            {"task": task, "temperature": heat, **_phase(engine, number, by_task[task], heat, tagged)}
            for number, (task, heat) in enumerate(PHASES)
        ]
    return {"concurrency": CONCURRENCY, "tokens_a_phase": TOKENS, "window": WINDOW, "phases": found}


def _phase(
    engine: Engine, phase: int, asked: Seq[Question], temperature: float, tagged: bool
) -> dict[str, Any]:
    """Who is asked for the drafts of each token of a phase, in the order in which tokens come."""
    engine.reset_caches()
    drafting = engine.drafting
    who: list[str] = []
    depths: list[int] = []

    def on_observe(items: Seq[StepItem]) -> None:
        for item in items:
            choice = drafting.record.requests[item.sequence.id].choice
            parts = [drafting.names[n] for n in (choice.lookup, choice.drafter) if n != NO_DRAFTER]
            who.extend([" then ".join(parts) or "nobody"] * item.num_emitted)
            depths.extend([len(item.proposal)] * item.num_emitted)

    engine.on_observe = on_observe
    number = 0
    while len(who) < TOKENS:
        while (stats := engine.stats()).num_running + stats.num_waiting < CONCURRENCY:
            question = asked[(number + 25 * phase) % len(asked)]
            params = SamplingParams(temperature=temperature, max_tokens=96, seed=1000 * phase + number)
            engine.add_request(
                str(number), question.token_ids, params, RequestOptions(task=question.task if tagged else "")
            )
            number += 1
        engine.step()
    for request in range(number):
        engine.abort(str(request))
    settled, _ = Counter(who[TOKENS // 2 :]).most_common(1)[0]
    return {
        "asked": settled,
        "mean_draft": round(statistics.fmean(depths[TOKENS // 2 :]), 2),
        "settled_after_tokens_a_request": round(
            _settled_after([each == settled for each in who]) / CONCURRENCY
        ),
    }


def _settled_after(right: Seq[bool]) -> int:
    """The first token from which on a window's tokens are right but for a few."""
    for start in range(0, len(right) - WINDOW, WINDOW // 4):
        if statistics.fmean(right[start : start + WINDOW]) >= SAME:
            return start
    return len(right)
