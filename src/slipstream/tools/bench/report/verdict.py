"""A benchmark's conclusion in a sentence, as far as its intervals support one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.tools.bench.report.grid import at_once, interval, number
from slipstream.tools.bench.result import BenchResult, Comparison, EngineFigures
from slipstream.tools.bench.statistics import FEW


def verdicts(result: BenchResult) -> list[str]:
    """One sentence at each concurrency; none without measurements."""
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
    if _loses(best):  # another one, measured less well, may still be as fast as speculation off
        best = next((figures for figures in measured if not _loses(figures)), best)
    sentences = [_against_off(best, _others(result, best))]
    if len(measured) > 1:
        sentences.append(
            f"An interval is for one comparison; of {len(measured)} settings, chance favours the best."
        )
    if best.speedup_interval is not None and (best.num_pairs or 0) < FEW:
        sentences.append(f"{_what(best)} are few: another handful may say something else.")
    same = best.identity
    if same is not None:
        sentences.append(f"{same.num_identical} of {same.num_compared} texts are identical.")
    return " ".join(sentences)


def _against_off(best: EngineFigures, others: Seq[Comparison]) -> str:
    name, bounds = best.configuration, best.speedup_interval
    speed = f"{number(best.speedup)} times the speed of speculation off"
    if bounds is None:
        return f"No conclusion: {name} ran at {speed}, but {_what(best)} are too few for an interval."
    speed += f" (95 % interval {interval(bounds)}, {_what(best)})"
    if bounds.holds_one:
        return f"No measurable difference: {name} ran at {speed}."
    if bounds.high < 1:
        return f"Speculation off is fastest: {name}, the best of the others, ran at {speed}."
    alike = [other for other in others if other.speedup_interval is None or other.speedup_interval.low <= 1]
    if alike:
        names = " or ".join(map(_compared, alike))
        return f"{name} ran at {speed}; no measurable difference between it and {names}."
    following = f"; the next is {_compared(others[0])}" if others else ""
    return f"{name} is fastest, at {speed}{following}."


def _loses(figures: EngineFigures) -> bool:
    return figures.speedup_interval is not None and figures.speedup_interval.high < 1


def _compared(other: Comparison) -> str:
    bounds = interval(other.speedup_interval)
    return f"{other.other} ({number(other.speedup)} times its speed, 95 % interval {bounds})"


def _others(result: BenchResult, best: EngineFigures) -> list[Comparison]:
    """The best one against each of the others, in the order of their speed."""
    place = (best.configuration, best.concurrency)
    return [each for each in result.comparisons if (each.configuration, each.concurrency) == place]


def _what(figures: EngineFigures) -> str:
    """What the figures rest on."""
    unit = "prompt" if figures.concurrency == 1 else "batch"
    plural = "prompts" if figures.concurrency == 1 else "batches"
    return f"{figures.num_pairs} {unit if figures.num_pairs == 1 else plural}"
