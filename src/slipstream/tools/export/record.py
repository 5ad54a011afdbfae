"""One neutral record of a speculative setting: what every engine's own form is translated from and to.

The root of a tree is never counted: `depth` and `TreeShape.num_nodes` are draft tokens. Layers, vocabulary maps and
norms of a head are info of its checkpoint and live in `HeadInfo`; a setting only names the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from slipstream.config import check_at_least, options_from, reject_unknown
from slipstream.draft.methods import METHODS, WITH_MODEL
from slipstream.errors import ConfigError
from slipstream.tools.export.head_info import AuxLayers, HeadInfo, HeadNorms, VocabularyMap

VERIFIES = ("any", "rejection", "block", "coupled")
"""`any` is the engine's default; each of them keeps the target's distribution."""
SAMPLINGS = ("one_hot", "sampled", "coupled")
"""How draft tokens are chosen: the most probable one, drawn independently, or drawn with the target's own noise."""


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """A tree of draft tokens instead of a chain."""

    top_k: int
    """Draft tokens kept at each level."""
    num_nodes: int
    """Draft tokens that are checked in a step; the root is not one of them."""
    choices: tuple[tuple[int, ...], ...] | None = None
    """A fixed tree, a path of ranks for each node; None grows it from the drafter's probabilities (EAGLE-2)."""

    def __post_init__(self) -> None:
        check_at_least("tree", 2 if self.choices is None else 1, top_k=self.top_k)
        check_at_least("tree", 1, num_nodes=self.num_nodes)
        if self.choices is not None:
            object.__setattr__(self, "choices", tuple(tuple(path) for path in self.choices))

    def most_nodes(self, depth: int) -> int:
        """Draft tokens that EAGLE-2 finds: k at the first level, k below each of the k best at the others."""
        return self.top_k + self.top_k**2 * (depth - 1)


@dataclass(frozen=True)
class ScheduleRange:
    """From `low` to `high` running requests, both included, chains have `depth` tokens; 0 is no speculation."""

    low: int
    high: int | None
    """None: without end."""
    depth: int


@dataclass(frozen=True)
class NgramLookup:
    """The shortest and the longest n-gram that is looked up in the text."""

    min: int
    max: int

    def __post_init__(self) -> None:
        check_at_least("ngram", 1, min=self.min, max=self.max)
        if self.min > self.max:
            raise ConfigError(f"ngram min ({self.min}) must not be above max ({self.max})")


@dataclass(frozen=True, kw_only=True)
class SuffixLimits:
    """What bounds a suffix drafter; the defaults are those of vLLM and of Slipstream."""

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


@dataclass(frozen=True, kw_only=True)
class SpeculativeRecord:
    """A speculative setting without any engine's names. Raises `ConfigError` for values that contradict each other."""

    method: str
    """One of the built-in methods, see `slipstream.draft.methods`."""
    target: str | None = None
    """Folder, file or hub id."""
    model: str | None = None
    """The draft model or head: folder, file or hub id."""
    revision: str | None = None
    """Revision of `model`."""
    quantization: str | None = None
    """Weight format of the draft, in Slipstream's names."""
    depth: int | None = None
    """Draft tokens on a path (γ); None is the engine's own default."""
    tree: TreeShape | None = None
    """None is a chain."""
    verify: str = "any"
    """One of `VERIFIES`."""
    draft_sampling: str | None = None
    """One of `SAMPLINGS`; None is the engine's own default."""
    confidence_threshold: float = 0.0
    """A chain ends where the drafter is less sure; 0 never ends it."""
    exit_layer: int | None = None
    """With `layer_skip`: layers that a draft pass runs."""
    schedule: tuple[ScheduleRange, ...] = ()
    """Depth by running requests, from 1 and without gaps; empty: the same depth always."""
    ngram: NgramLookup | None = None
    suffix: SuffixLimits | None = None
    head: HeadInfo | None = None
    draft_context: int | None = None
    """Longest text of the draft model, in tokens."""
    target_context: int | None = None

    def __post_init__(self) -> None:
        reject_unknown([self.method], METHODS, "method of a record")
        reject_unknown([self.verify], VERIFIES, "verify of a record")
        if self.draft_sampling is not None:
            reject_unknown([self.draft_sampling], SAMPLINGS, "draft_sampling of a record")
        if self.method in WITH_MODEL and not self.model:
            raise ConfigError(f"a record of method {self.method!r} needs a model")
        for name in ("depth", "exit_layer"):
            if getattr(self, name) is not None:
                check_at_least("record", 1, **{name: getattr(self, name)})
        if not 0 <= self.confidence_threshold < 1:
            raise ConfigError(
                f"confidence_threshold must be from 0 to below 1, got {self.confidence_threshold}"
            )
        object.__setattr__(self, "schedule", merged_schedule(self.schedule, self.depth))

    def setting(self) -> SpeculativeRecord:
        """The record without the info of checkpoints."""
        return replace(self, head=None, draft_context=None, target_context=None)

    def differences(self, other: SpeculativeRecord) -> set[str]:
        """Names of the fields of the settings in which the two differ."""
        mine, its = self.setting(), other.setting()
        return {field.name for field in fields(self) if getattr(mine, field.name) != getattr(its, field.name)}

    def to_mapping(self) -> dict[str, Any]:
        """JSON's types only; fields at their defaults are left out."""
        whole = asdict(self)
        defaults = {field.name: field.default for field in fields(self)}
        return {
            name: [asdict(each) for each in self.schedule] if name == "schedule" else value
            for name, value in whole.items()
            if getattr(self, name) != defaults[name]
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SpeculativeRecord:
        """The inverse of `to_mapping`; raises `ConfigError` for unknown keys and bad values."""
        given = dict(mapping)
        for name, part in (("tree", TreeShape), ("ngram", NgramLookup), ("suffix", SuffixLimits)):
            if given.get(name) is not None:
                given[name] = options_from(part, given[name], f"record {name}")
        if given.get("head") is not None:
            given["head"] = _head_from(given["head"])
        ranges = [options_from(ScheduleRange, each, "record schedule") for each in given.get("schedule", ())]
        return options_from(cls, {**given, "schedule": tuple(ranges)}, "record")


def _head_from(mapping: Mapping[str, Any]) -> HeadInfo:
    given = dict(mapping)
    for name, part in (("vocabulary", VocabularyMap), ("aux_layers", AuxLayers), ("norms", HeadNorms)):
        if given.get(name) is not None:
            given[name] = options_from(part, given[name], f"record head {name}")
    return options_from(HeadInfo, given, "record head")


def merged_schedule(ranges: Iterable[ScheduleRange], depth: int | None) -> tuple[ScheduleRange, ...]:
    """The same schedule from 1, without gaps and without neighbours of one depth; the last range has no end.

    In a gap, and after the last range, the depth before it holds, as in vLLM. A schedule that is always `depth` is
    none. Raises `ConfigError` for ranges that overlap, do not begin at 1 or are deeper than `depth`.
    """
    starts: list[ScheduleRange] = []
    end = 0
    for each in sorted(ranges, key=lambda each: each.low):
        check_at_least("schedule", 1, low=each.low)
        check_at_least("schedule", 0, depth=each.depth)
        if each.high is not None:
            check_at_least("schedule", each.low, high=each.high)
        if end is None or each.low <= end:
            raise ConfigError(f"schedule ranges overlap at {each.low} running requests")
        if not starts and each.low != 1:
            raise ConfigError(f"a schedule begins at 1 running request, got {each.low}")
        if depth is not None and each.depth > depth:
            raise ConfigError(f"the schedule has depth {each.depth}, but the setting's depth is {depth}")
        end = each.high  # type: ignore[assignment]
        if not starts or starts[-1].depth != each.depth:
            starts.append(each)
    if not starts or (len(starts) == 1 and starts[0].depth == depth):
        return ()
    highs = [after.low - 1 for after in starts[1:]]
    return tuple(
        ScheduleRange(each.low, high, each.depth) for each, high in zip(starts, [*highs, None], strict=True)
    )
