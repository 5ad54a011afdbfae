"""Modes that one process serves."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.catalog import KINDS, PRECISIONS, Mode

KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}
PRECISION_ORDER = {"float32": 0, "bfloat16": 1}
"""Integer formats come last, together, for they are compared with each other."""


@dataclass
class Group:
    """Modes that one process serves."""

    peer: str
    weights: str
    load: dict[str, Any]
    modes: list[Mode] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Groups that are compared with each other come together: by precision, then by kind."""
        order = PRECISION_ORDER.get(PRECISIONS[self.weights], len(PRECISION_ORDER))
        return (order, min(KIND_ORDER[mode.kind] for mode in self.modes))


def grouped(modes: Iterable[Mode]) -> list[Group]:
    """Modes of one peer that load the same thing, together."""
    groups: dict[str, Group] = {}
    for mode in modes:
        key = json.dumps([mode.peer, mode.weights, mode.load], sort_keys=True)
        groups.setdefault(key, Group(mode.peer, mode.weights, mode.load)).modes.append(mode)
    return list(groups.values())
