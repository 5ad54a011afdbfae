"""Slipstream's own configuration as a neutral record, and back. Schedules are fixed plans of `auto`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft.combine.rules import PlanRule
from slipstream.draft.methods import (
    AUTO,
    CHAINS,
    EAGLE,
    EAGLE3,
    HEADS,
    LOOKUPS,
    MAY_NAME_MODEL,
    METHODS,
    OFF,
    WITH_MODEL,
)
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError
from slipstream.tools.export.head_info import context_length, head_info
from slipstream.tools.export.keys import Key, fields_found, written
from slipstream.tools.export.record import ScheduleRange, SpeculativeRecord, SuffixLimits, TreeShape

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
        depth = 0 if rule.drafter is None else _depth_by(drafters[rule.drafter], rule)
        if depth is None:
            return None
        ranges.append(ScheduleRange(low, rule.max_requests, depth))
        if rule.max_requests is None:
            break
        low = rule.max_requests + 1
    else:
        ranges.append(ScheduleRange(low, None, 0))
    return next(drafters[rule.drafter] for rule in general if rule.drafter is not None), tuple(ranges)


def _depth_by(drafter: SpeculativeConfig, rule: PlanRule) -> int | None:
    """None for a drafter without a depth."""
    configured: int | None = drafter.options.get(DEPTH)
    if configured is None or drafter.method in LOOKUPS or rule.num_speculative_tokens is None:
        return configured
    return min(configured, rule.num_speculative_tokens)


def _without_depth(config: SpeculativeConfig) -> str:
    return repr(
        (config.method, sorted((key, value) for key, value in config.options.items() if key != DEPTH))
    )


_SAMPLINGS = {"greedy": "one_hot", "probabilistic": "sampled", "coupled": "coupled"}
_VERIFIERS = {"any": "coupled", "coupled": "coupled", "rejection": "rejection", "block": "block"}
TABLE = (
    Key("model", "model", methods=MAY_NAME_MODEL),
    Key("revision", "revision", methods=MAY_NAME_MODEL),
    Key("quantization", "quantization"),
    Key("confidence_threshold", "confidence_threshold"),
    Key("prompt_lookup_min", "ngram.min"),
    Key("prompt_lookup_max", "ngram.max"),
    *(
        Key(f"suffix_decoding_{limit.name}", f"suffix.{limit.name}")
        for limit in dataclasses.fields(SuffixLimits)
    ),
    Key("exit_layer", "exit_layer"),
)
"""Options that are each a field of the record; the shape of a draft and its sampling are not."""
_ORDER = (
    *("method", "model", "revision", "quantization", "tree_choices", "num_speculative_tokens"),
    *("tree_top_k", "num_draft_nodes", "confidence_threshold", "draft_sample_method"),
    *(key.name for key in TABLE[4:]),
    "verifier",
)
"""In which a configuration is written."""


def from_own(
    config: SpeculativeConfig, target: str | None = None
) -> tuple[SpeculativeRecord, tuple[str, ...]]:
    """(the record of a configuration for `target`, notes on options that no other engine has).

    Defaults are written out. Reads configurations and names of tensors of local folders, no weights. Raises
    `ConfigError` for an invalid configuration and `ModelError` for a damaged checkpoint.
    """
    if config.method not in METHODS:
        raise ConfigError(f"drafter {config.method!r} is a package's own; no other engine has it")
    if config.verifier not in _VERIFIERS:
        raise ConfigError(
            f"verifier {config.verifier!r} is a package's own; export with coupled, rejection or block"
        )
    options = ParsedSpeculation.of(config).options
    if config.method == AUTO.name and options.plan is not None:
        return _from_plan(config, options, target)
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    unused = sorted(
        name
        for name, value in values.items()
        if name not in _ORDER and value != defaults[name] and config.method in _CARRIED
    )
    found = fields_found(values, TABLE, config.method)
    found["model"] = found.get("model") or None  # empty: the layer is in the target's checkpoint
    record = SpeculativeRecord(
        method=config.method,
        target=target,
        depth=_depth(values),
        tree=_tree(values),
        verify=config.verifier,
        draft_sampling=_sampling(config, values),
        **found,
        **_of_checkpoints(config.method, found.get("model"), target),
    )
    return record, tuple(f"{name} is left out: no other engine has it" for name in unused)


def _from_plan(
    config: SpeculativeConfig, options: Any, target: str | None
) -> tuple[SpeculativeRecord, tuple[str, ...]]:
    """The record of `auto` with a fixed plan; raises `ConfigError` where no schedule of one drafter says the same."""
    rules = options.rules()
    found = of_plan([_with_depth(each) for each in options.configs()], rules)
    if found is None:
        raise ConfigError(
            "this plan has more than one drafter for requests without a task, or none; other engines run one: "
            "export that with --spec"
        )
    drafter, schedule = found
    record, notes = from_own(dataclasses.replace(drafter, verifier=config.verifier), target)
    named = sorted({rule.task for rule in rules if rule.task is not None})
    if named:
        notes += (f"rules for tasks are left out ({', '.join(named)}): no other engine has tasks",)
    if record.tree is not None:  # which is as configured at any load
        schedule = tuple(
            dataclasses.replace(each, depth=min(each.depth, 1) * (record.depth or 1)) for each in schedule
        )
    deepest = max(each.depth for each in schedule)
    return dataclasses.replace(record, depth=deepest, schedule=schedule), notes


def _with_depth(config: SpeculativeConfig) -> SpeculativeConfig:
    """Return it with the default of a depth that is left out."""
    options = ParsedSpeculation.of(config).options
    depth = getattr(options, DEPTH, None)
    return config if depth is None else dataclasses.replace(config, options={DEPTH: depth, **config.options})


_CARRIED = frozenset({*WITH_MODEL, *(name for name, spec in METHODS.items() if spec.elsewhere)})
"""Methods that some other engine runs."""


def _depth(values: Mapping[str, Any]) -> int | None:
    if choices := values.get("tree_choices"):
        return max(map(len, choices))
    depth: int | None = values.get("num_speculative_tokens")
    return depth


def _tree(values: Mapping[str, Any]) -> TreeShape | None:
    if choices := values.get("tree_choices"):
        widest = max(rank for path in choices for rank in path) + 1
        return TreeShape(top_k=widest, num_nodes=len(choices), choices=tuple(tuple(path) for path in choices))
    top_k = values.get("tree_top_k", 1)
    if top_k > 1:
        nodes = values.get("num_draft_nodes") or values["num_speculative_tokens"] * top_k
        return TreeShape(top_k=top_k, num_nodes=nodes)
    return None


def _sampling(config: SpeculativeConfig, values: Mapping[str, Any]) -> str | None:
    """What `auto` comes to, since other engines have other defaults."""
    method = values.get("draft_sample_method")
    if method is None:
        return None
    if method != "auto":
        return _SAMPLINGS[method]
    if config.verifier == "coupled":
        return "coupled"
    return "one_hot" if values.get("tree_top_k", 1) > 1 else "sampled"


def _of_checkpoints(method: str, model: str | None, target: str | None) -> dict[str, Any]:
    return {
        "head": head_info(model) if model and method in HEADS else None,
        "draft_context": context_length(model),
        "target_context": context_length(target),
    }


def to_own(record: SpeculativeRecord) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(what `--speculative-config` takes, notes on what it cannot say); the configuration is checked.

    Raises `ConfigError` for a record that is no valid configuration, such as a group of drafters.
    """
    if METHODS[record.method].inner:
        raise ConfigError(
            f"a record of {record.method!r} does not name its drafters; write the configuration"
        )
    config: dict[str, Any] = {"method": record.method}
    notes: list[str] = []
    if record.method == OFF.name:
        return config, ()
    config |= written(record, TABLE) | _shape(record)
    if record.verify not in ("any", "coupled"):
        config["verifier"] = record.verify
        notes.append(
            f"verifier {record.verify} as in the setting; omit it, and a seed gives the same text always"
        )
    config = {name: config[name] for name in _ORDER if name in config}
    names = _option_names(config)
    unknown = [key for key in config if key not in names]
    for key in unknown:
        del config[key]
        notes.append(f"{key} is left out: {record.method} has no such option here")
    if record.schedule:
        config = _planned(record, config, notes)
    ParsedSpeculation.of(SpeculativeConfig.from_mapping(config))
    return config, tuple(notes)


def _planned(record: SpeculativeRecord, config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """`config` by the record's schedule, where the depth can follow it."""
    try:
        if record.tree is not None:
            raise ConfigError("a tree stays as it is at any load")
        return as_plan(config, record.schedule)
    except ConfigError as error:
        notes.append(f"the schedule by running requests is left out: {error}")
        return config


def _shape(record: SpeculativeRecord) -> dict[str, Any]:
    shape: dict[str, Any] = {}
    tree = record.tree
    if tree is not None and tree.choices is not None:
        shape["tree_choices"] = [list(path) for path in tree.choices]
    elif record.depth is not None:
        shape["num_speculative_tokens"] = record.depth
    if tree is not None and tree.choices is None:
        shape |= {"tree_top_k": tree.top_k, "num_draft_nodes": tree.num_nodes}
    elif record.method in (EAGLE.name, EAGLE3.name):  # whose own default is a tree
        shape |= {"tree_top_k": 1, "num_draft_nodes": None}
    if record.draft_sampling is not None:
        theirs = {value: key for key, value in _SAMPLINGS.items()}
        shape["draft_sample_method"] = theirs[record.draft_sampling]
    return shape


def _option_names(config: Mapping[str, Any]) -> frozenset[str]:
    from slipstream.draft.registry import DRAFTERS

    own = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    options = {field.name for field in dataclasses.fields(DRAFTERS.load(config["method"]).Options)}
    return frozenset(own | options)
