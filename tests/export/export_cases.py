"""Records to translate, drawn by hypothesis or made by hand."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from slipstream.draft.methods import MAY_NAME_MODEL, WITH_MODEL
from slipstream.tools.export.record import (
    SAMPLINGS,
    VERIFIES,
    NgramLookup,
    ScheduleRange,
    SpeculativeRecord,
    SuffixLimits,
    TreeShape,
)

TARGET, DRAFT = "org/target", "org/draft"

_PROBABILITIES = st.integers(0, 99).map(lambda percent: percent / 100)


@st.composite
def schedules(draw: st.DrawFn, depth: int) -> tuple[ScheduleRange, ...]:
    """Ranges from 1, some of them with gaps behind."""
    ranges, low = [], 1
    for _ in range(draw(st.integers(0, 4))):
        high = low + draw(st.integers(0, 40))
        ranges.append(ScheduleRange(low, high, draw(st.integers(0, depth))))
        low = high + 1
        if draw(st.booleans()):
            low += 1
    return tuple(ranges)


@st.composite
def trees(draw: st.DrawFn, depth: int) -> TreeShape | None:
    """No tree, a dynamic one, or a fixed one."""
    kind = draw(st.sampled_from(["chain", "chain", "dynamic", "fixed"]))
    if kind == "chain":
        return None
    if kind == "dynamic":
        top_k = draw(st.integers(2, 6))
        return TreeShape(top_k=top_k, num_nodes=draw(st.integers(1, top_k * depth + 3)))
    choices = [(0,) * level for level in range(1, depth + 1)] + [(1,)]
    return TreeShape(top_k=2, num_nodes=len(choices), choices=tuple(choices))


@st.composite
def records(draw: st.DrawFn) -> SpeculativeRecord:
    """Any record that a user can write."""
    method = draw(st.sampled_from(["off", "ngram", "suffix", "layer_skip", "lookahead", *MAY_NAME_MODEL]))
    depth = draw(st.integers(1, 9))
    grows = method in MAY_NAME_MODEL or method == "layer_skip"
    names_model, nowhere = method in MAY_NAME_MODEL, [] if method in WITH_MODEL else [None]
    low = draw(st.integers(1, 5))
    fields: dict[str, Any] = {
        "method": method,
        "target": draw(st.sampled_from([TARGET, "/models/target", "target.gguf"])),
        "model": draw(st.sampled_from([*nowhere, DRAFT, "./draft", "d.gguf"])) if names_model else None,
        "revision": draw(st.sampled_from([None, "v2"])) if names_model else None,
        "quantization": draw(st.sampled_from([None, "int8"])) if grows else None,
        "depth": depth if draw(st.integers(0, 9)) else None,
        "tree": draw(trees(depth)) if grows else None,
        "verify": draw(st.sampled_from(VERIFIES)),
        "draft_sampling": draw(st.sampled_from([None, *SAMPLINGS])) if grows else None,
        "confidence_threshold": draw(_PROBABILITIES) if grows else 0.0,
        "exit_layer": draw(st.sampled_from([None, 4])) if method == "layer_skip" else None,
        "schedule": draw(schedules(depth)),
        "ngram": NgramLookup(low, low + draw(st.integers(0, 4))) if method == "ngram" else None,
        "suffix": SuffixLimits(max_tree_depth=draw(st.integers(1, 64)), min_token_prob=draw(_PROBABILITIES))
        if method == "suffix"
        else None,
    }
    return SpeculativeRecord(**fields)


def draft_record(**fields: Any) -> SpeculativeRecord:
    """A chain of four tokens of a draft model, with `fields` changed."""
    usual: dict[str, Any] = {"method": "draft_model", "target": TARGET, "model": DRAFT, "depth": 4}
    return SpeculativeRecord(**{**usual, **fields})
