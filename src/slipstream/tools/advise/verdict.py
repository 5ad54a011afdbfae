"""The advice in sentences, for the console and at the head of the page."""

from __future__ import annotations

from collections.abc import Iterator

from slipstream.tools.advise.advice import Advice, LoadAdvice
from slipstream.tools.advise.check import CheckedSetting
from slipstream.tools.bench.report.grid import at_once, interval

DO_NOT_ENABLE = "Do not enable speculation"


def verdict(advice: Advice) -> str:
    """One or two sentences: whether, and what."""
    if not advice.enable:
        return f"{DO_NOT_ENABLE}: nothing that was considered gains 2 % or more at any measured load."
    parts = [_gain(load) for load in advice.loads if load.setting != "off"]
    off = [load.concurrency for load in advice.loads if load.setting == "off"]
    some = [number for number in off if _pays_for_some(advice, number)]
    without = [number for number in off if number not in some]
    text = f"Enable speculation: {'; '.join(parts)}." if parts else "Enable speculation for some tasks only."
    if some:
        text += f" At {_listed(some)} it pays for some tasks only, and for all together gains too little or loses."
    if without:
        text += f" {DO_NOT_ENABLE} at {_listed(without)}: it gains too little or loses."
    return text


def _pays_for_some(advice: Advice, number: int) -> bool:
    """Whether a task has rules of its own that draft at a load of `number` requests."""
    tasks = [task for task in advice.plan.bands if task is not None]
    return any(not advice.plan.choose(task, number).is_off for task in tasks)


def _gain(load: LoadAdvice) -> str:
    own = load.own
    if own is None or own.measured_speedup is None or own.weighed_speedup is None:
        return (
            f"{load.setting} at {at_once(load.concurrency)}, predicted {load.predicted_speedup:.2f} times off"
        )
    sure = "" if own.interval is None else f", {interval(own.interval)}"
    return (
        f"{load.setting} at {at_once(load.concurrency)}, {own.weighed_speedup:.2f} times off (measured "
        f"{own.measured_speedup:.2f}{sure}, predicted {own.predicted_speedup:.2f})"
    )


def _listed(numbers: list[int]) -> str:
    """'4 and 16 requests at once'."""
    listed = " and ".join(map(str, numbers)) if len(numbers) < 3 else ", ".join(map(str, numbers))
    return at_once(numbers[0]) if len(numbers) == 1 else f"{listed} requests at once"


def remarks(advice: Advice) -> list[str]:
    """What else follows, a sentence each."""
    return [*_findings(advice), *_accuracy(advice), *_of_trace(advice), *advice.labels, *advice.notes]


def _findings(advice: Advice) -> Iterator[str]:
    found = advice.findings
    if advice.enable:
        if found.break_even_batch is None:
            off = [load.concurrency for load in advice.loads if load.setting == "off"]
            whom = ", for some tasks only" if found.max_batch in off else ""
            yield f"Speculation pays at the largest load that was measured, {at_once(found.max_batch)}{whom}."
        else:
            yield f"Break-even batch: from {at_once(found.break_even_batch)} on nothing pays."
    for one in found.break_evens:
        if one.acceptance is None:
            yield (
                f"{one.setting} at {at_once(one.concurrency)} cannot pay: its step takes {one.cost:.2f} steps of off."
            )
        else:
            yield (
                f"{one.setting} at {at_once(one.concurrency)}: its step takes {one.cost:.2f} steps of off, so it pays "
                f"from an acceptance rate of {one.acceptance:.2f} on; counted {one.tau:.2f} tokens a step."
            )
    if found.shortest_answer is not None:
        yield f"Shortest answer that pays, one request at a time: {found.shortest_answer} tokens."
    if found.remedy:
        yield found.remedy


def _accuracy(advice: Advice) -> Iterator[str]:
    """How far the predictions were from the measurements."""
    checked = [one for load in advice.loads for one in load.checked if one.measured_speedup is not None]
    if checked:
        worst = max(checked, key=lambda one: abs(one.error))
        within = sum(abs(one.error) <= 0.1 for one in checked)
        yield (
            f"{within} of {len(checked)} measured speedups are within 10 % of the prediction; the farthest is "
            f"{_off_by(worst)}."
        )


def _off_by(one: CheckedSetting) -> str:
    return f"{one.name} at {at_once(one.concurrency)}, {one.error:+.0%}"


def _of_trace(advice: Advice) -> Iterator[str]:
    trace = advice.trace
    if trace is not None:
        yield (
            f"The trace, predicted with the recorded answers: {trace.num_requests} requests in "
            f"{trace.duration_s:.0f} s, {trace.mean_in_flight:.1f} at once while there are any; median latency "
            f"{trace.latency_off_s:.2f} s without speculation, {trace.latency_s:.2f} s with this advice."
        )
