"""The part of a catalogue that the command line asks for."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from benchmarks.peers.catalog import PEERS, Catalog
from benchmarks.peers.conditions import Condition
from slipstream.config import check_at_least, reject_unknown
from slipstream.errors import ConfigError

QUICK = {"prompts_per_task": 1, "max_tokens": 24, "rounds": 1}


def selected(catalog: Catalog, options: argparse.Namespace) -> Catalog:
    """What is left of `catalog`; raises `ConfigError` for names that are not there."""
    models = _chosen(options.models, [model.name for model in catalog.models], "model")
    peers = _chosen(options.peers, list(PEERS), "peer")
    names = {name for mode in catalog.modes for name in (mode.name, mode.kind, mode.weights, mode.key)}
    wanted = {
        "modes": _chosen(options.modes, sorted(names), "mode"),
        "weights": _chosen(
            options.weights, sorted({w for m in catalog.modes for w in (m.weights, m.precision)}), "weights"
        ),
        "caches": _chosen(options.caches, sorted({m.cache for m in catalog.modes if m.cache}), "cache"),
    }
    modes = [
        mode
        for mode in catalog.modes
        if mode.peer in peers
        and {mode.name, mode.kind, mode.weights, mode.key} & set(wanted["modes"])
        and {mode.weights, mode.precision} & set(wanted["weights"])
        and mode.cache in ("", *wanted["caches"])
    ]
    if not modes:
        raise ConfigError("no mode is left; --peers, --modes, --weights and --caches exclude each other")
    changes: dict[str, Any] = dict(QUICK) if options.quick else {}
    given = {name: getattr(options, name) for name in ("prompts_per_task", "max_tokens", "rounds")}
    changes = {**changes, **{name: value for name, value in given.items() if value is not None}}
    check_at_least("--", 1, **changes)
    if options.contexts:
        changes |= {"contexts": tuple(lengths(options.contexts)), "conditions": conditions(options)}
    elif options.neighbours is not None or options.quota is not None:
        raise ConfigError("--neighbours and --quota go with --contexts")
    kept = [dataclasses.replace(model, **changes) for model in catalog.models if model.name in models]
    return Catalog(kept, modes)


def lengths(text: str) -> list[int]:
    """`128,1536` as ascending numbers of prompt tokens."""
    try:
        numbers = sorted({int(word.replace("_", "")) for word in text.split(",") if word.strip()})
    except ValueError:
        raise ConfigError(
            f"--contexts takes numbers of tokens with commas, like 128,1536, got {text!r}"
        ) from None
    if not numbers or numbers[0] < 16:
        raise ConfigError(f"--contexts takes prompts of at least 16 tokens, got {text!r}")
    return numbers


def conditions(options: argparse.Namespace) -> tuple[Condition, ...]:
    """Alone, unless the command line has more: each number of neighbours, and the quota."""
    try:
        counts = [int(word) for word in (options.neighbours or "0").split(",")]
    except ValueError:
        counts = [-1]
    if min(counts) < 0:
        raise ConfigError(
            f"--neighbours takes numbers of busy loops with commas, like 0,1, got {options.neighbours!r}"
        )
    made = [Condition(neighbours=count) for count in dict.fromkeys(counts)]
    if options.quota is not None:
        made.append(Condition(quota_cores=options.quota))
    return tuple(made)


def _chosen(text: str | None, valid: list[str], what: str) -> list[str]:
    if text is None:
        return valid
    names = [name.strip() for name in text.split(",") if name.strip()]
    reject_unknown(names, valid, what)
    return names
