"""Schedules by running requests as fixed plans of `auto`, and back. `slipstream advise` writes such plans too."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft.combine.rules import PlanRule
from slipstream.draft.methods import CHAINS, LOOKUPS, OFF
from slipstream.errors import ConfigError
from slipstream.tools.export.record import ScheduleRange

DEPTH = "num_speculative_tokens"


def as_plan(config: Mapping[str, Any], schedule: Seq[ScheduleRange]) -> dict[str, Any]:
    """`auto` with the one drafter that `config` is, by the schedule; raises `ConfigError` for any other method."""
    method = config["method"]
    if method not in (*CHAINS, *LOOKUPS):
        raise ConfigError(f"the depth of {method} does not change with the load")
    drafter = {key: value for key, value in config.items() if key != "verifier"}
    # Lookups draft as configured: a plan has one for each depth.
    depths = sorted({each.depth for each in schedule if each.depth}, reverse=True)
    listed = [{**drafter, DEPTH: depth} for depth in (depths if method in LOOKUPS else depths[:1])]
    if not listed:
        return {"method": OFF.name}
    rules: list[dict[str, Any]] = []
    for each in schedule:
        rule: dict[str, Any] = {}
        if each.depth:
            rule = {"drafter": depths.index(each.depth) if method in LOOKUPS else 0, DEPTH: each.depth}
        rules.append(rule if each.high is None else {**rule, "max_requests": each.high})
    shared = {"verifier": config["verifier"]} if "verifier" in config else {}
    return {"method": "auto", **shared, "drafters": listed, "plan": rules}


def of_plan(
    drafters: Seq[SpeculativeConfig], rules: Seq[PlanRule]
) -> tuple[SpeculativeConfig, tuple[ScheduleRange, ...]] | None:
    """(the drafter, the schedule) of the rules that hold for all tasks; the drafters' options name their depths.

    None where no schedule says the same: where they take more than one drafter, or draft nothing.
    """
    general = [rule for rule in rules if rule.task is None]
    general.sort(key=lambda rule: float("inf") if rule.max_requests is None else rule.max_requests)
    used = {_without_depth(drafters[rule.drafter]) for rule in general if rule.drafter is not None}
    if len(used) != 1:
        return None
    ranges: list[ScheduleRange] = []
    low = 1
    for rule in general:
        if rule.max_requests is not None and rule.max_requests < low:
            continue  # the same load again: the first rule holds
        depth = 0 if rule.drafter is None else _depth(drafters[rule.drafter], rule)
        if depth is None:
            return None
        ranges.append(ScheduleRange(low, rule.max_requests, depth))
        if rule.max_requests is None:
            break
        low = rule.max_requests + 1
    else:
        ranges.append(ScheduleRange(low, None, 0))
    return next(drafters[rule.drafter] for rule in general if rule.drafter is not None), tuple(ranges)


def _depth(drafter: SpeculativeConfig, rule: PlanRule) -> int | None:
    """None for a drafter without a depth."""
    configured: int | None = drafter.options.get(DEPTH)
    if configured is None or drafter.method in LOOKUPS or rule.num_speculative_tokens is None:
        return configured
    return min(configured, rule.num_speculative_tokens)


def _without_depth(config: SpeculativeConfig) -> str:
    return repr(
        (config.method, sorted((key, value) for key, value in config.options.items() if key != DEPTH))
    )
