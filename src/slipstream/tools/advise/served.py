"""The advice as a speculative configuration, and as a file for `slipstream serve --config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.tools.advise.candidates import Candidate, Setting
from slipstream.tools.advise.predict import AdvisedPlan


def speculative_of(plan: AdvisedPlan, candidates: Seq[Candidate]) -> SpeculativeConfig:
    """Off, one drafter where it is the same for every task and load, else `auto` with a fixed plan."""
    if plan.is_off:
        return SpeculativeConfig("off")
    used = {band.setting for bands in plan.bands.values() for band in bands}
    if len(used) == 1:
        [only] = used
        return candidates[only.candidate].at(only.depth)
    drafters = _drafters(plan, candidates)
    places = {key: place for place, key in enumerate(drafters)}
    rules = [
        _rule(task, band.max_requests, band.setting, places, candidates)
        for task, bands in plan.bands.items()
        for band in bands
    ]
    listed = [_written(candidates[candidate].at(depth)) for candidate, depth in drafters]
    return SpeculativeConfig("auto", options={"drafters": listed, "plan": rules})


def _drafters(plan: AdvisedPlan, candidates: Seq[Candidate]) -> list[tuple[int, int]]:
    """(candidate, depth) of each drafter that is loaded: a chain at its deepest, a lookup at each of its depths."""
    found: dict[tuple[int, int], None] = {}
    for bands in plan.bands.values():
        for band in bands:
            if not band.setting.is_off:
                found[_key(band.setting, candidates)] = None
    return list(found)


def _key(setting: Setting, candidates: Seq[Candidate]) -> tuple[int, int]:
    return setting.candidate, setting.depth if candidates[setting.candidate].is_lookup else 0


def _rule(
    task: str | None,
    max_requests: int | None,
    setting: Setting,
    places: Mapping[tuple[int, int], int],
    candidates: Seq[Candidate],
) -> dict[str, Any]:
    rule: dict[str, Any] = {}
    if not setting.is_off:
        rule["drafter"] = places[_key(setting, candidates)]
        if setting.depth:
            rule["num_speculative_tokens"] = setting.depth
    if max_requests is not None:
        rule["max_requests"] = max_requests
    if task is not None:
        rule["task"] = task
    return rule


def _written(config: SpeculativeConfig) -> dict[str, Any]:
    return {"method": config.method, **config.options}


def as_mapping(config: SpeculativeConfig) -> dict[str, Any]:
    """What `--speculative-config` takes."""
    return _written(config)


def serve_file(
    model: str | None, config: SpeculativeConfig, engine_options: Mapping[str, Any], comments: Seq[str]
) -> str:
    """TOML for `slipstream serve --config`."""
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    if model is not None:
        lines.append(f"model = {_literal(model)}")
    lines += [f"{name} = {_literal(value)}" for name, value in engine_options.items() if value is not None]
    if config.method == "off":
        lines.append('spec = "off"')
    else:
        lines.append(f"speculative_config = {_literal(as_mapping(config))}")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """A number, a truth or a text as TOML has it; anything else as a text of JSON, which flags take."""
    if not isinstance(value, str | int | float):
        value = json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
