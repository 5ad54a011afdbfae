"""What each drafter gains in time, one request at a time: `slipstream bench` with all of them.

On the embedded target and, where one is given, on a cost-expanded one: the same text at the price of a larger model
(`recipes.cost_expanded`). Heads are expanded with it, so that they cost what heads of such a target cost.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.drafters.lineup import Entry, without_models
from benchmarks.harness.bench import against_off
from recipes.cost_expanded.head import expand_head
from slipstream.assets import EMBEDDED_TARGET

HEADS = ("eagle", "eagle3", "medusa", "hydra")


MAX_MODEL_LEN = 1024
"""For every drafter alike, whatever it needs of the cache."""


def measure(entries: Seq[Entry], model: str | None, engine: dict[str, Any], **sizes: int) -> dict[str, Any]:
    """Every entry against off on `model`, None being the embedded target; interleaved, greedy, empty caches."""
    specs = {entry.name: entry.spec for entry in entries}
    found = against_off(model, specs, {**engine, "max_model_len": MAX_MODEL_LEN}, **sizes)
    for row in found["rows"]:
        row["speculative_config"] = without_models(specs.get(row["drafter"], {"method": "off"}))
    return {**found, "threads": engine["num_threads"]}


def expanded(entries: Seq[Entry], model: str, folder: Path) -> list[Entry]:
    """The entries for the cost-expanded `model`: heads are enlarged into `folder`, drafts stay as they are."""
    found: list[Entry] = []
    for entry in entries:
        if entry.spec["method"] in HEADS:
            output = folder / entry.trained
            if not output.is_dir():
                expand_head(entry.spec["model"], EMBEDDED_TARGET, model, output)
            entry = replace(entry, spec={**entry.spec, "model": str(output)})
        found.append(entry)
    return found
