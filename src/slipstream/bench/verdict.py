"""What a benchmark shows, in a sentence: no more than its intervals allow."""

from __future__ import annotations

from slipstream.bench.grid import at_once, interval, number
from slipstream.bench.result import BenchResult, Comparison, Figures
from slipstream.bench.statistics import FEW


def verdicts(result: BenchResult) -> list[str]:
    """One at each concurrency; none where nothing was measured."""
    several = len(result.concurrencies) > 1
    found: list[str] = []
    for concurrency in result.concurrencies:
        text = _verdict(result, concurrency)
        if text:
            heading = at_once(concurrency)
            found.append(f"{heading[0].upper()}{heading[1:]}: {text}" if several else text)
    return found


def _verdict(result: BenchResult, concurrency: int) -> str:
    cells = [result.of(configuration.name, concurrency) for configuration in result.configurations]
    measured = [figures for figures in cells if figures is not None and figures.speedup is not None]
    if not measured:
        return ""
    best = max(measured, key=lambda figures: figures.speedup or 0)
    sentences = [_against_off(best, _next(result, best))]
    if best.speedup_interval is not None and (best.num_pairs or 0) < FEW:
        sentences.append(f"{_what(best)} are few: another handful may say something else.")
    same = best.identity
    if same is not None:
        sentences.append(f"{same.num_identical} of {same.num_compared} texts are identical.")
    return " ".join(sentences)


def _against_off(best: Figures, following: Comparison | None) -> str:
    name, bounds = best.configuration, best.speedup_interval
    speed = f"{number(best.speedup)} times the speed of speculation off"
    if bounds is None:
        return f"No conclusion: {name} ran at {speed}, but {_what(best)} are too few for an interval."
    speed += f" (95 % interval {interval(bounds)}, {_what(best)})"
    if bounds.holds_one:
        return f"No measurable difference: {name} ran at {speed}."
    if bounds.high < 1:
        return f"Speculation off is fastest: {name}, the best of the others, ran at {speed}."
    if following is None:
        return f"{name} is fastest, at {speed}."
    next_bounds = following.speedup_interval
    against = f"{number(following.speedup)} times its speed, 95 % interval {interval(next_bounds)}"
    if next_bounds is None or next_bounds.low <= 1:
        return (
            f"{name} ran at {speed}; no measurable difference between it and {following.other} ({against})."
        )
    return f"{name} is fastest, at {speed}; the next is {following.other} ({against})."


def _next(result: BenchResult, best: Figures) -> Comparison | None:
    """The best one against the runner-up."""
    return next(
        (
            comparison
            for comparison in result.comparisons
            if (comparison.configuration, comparison.concurrency) == (best.configuration, best.concurrency)
        ),
        None,
    )


def _what(figures: Figures) -> str:
    """What the figures rest on."""
    unit = "prompt" if figures.concurrency == 1 else "batch"
    plural = "prompts" if figures.concurrency == 1 else "batches"
    return f"{figures.num_pairs} {unit if figures.num_pairs == 1 else plural}"
