"""Which drafters are compared, by the names that tables and plots give them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.assets import EMBEDDED_DRAFT

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}
_TREE = {"num_speculative_tokens": 4, "tree_top_k": 3, "num_draft_nodes": 12}
_CHAIN = {"num_speculative_tokens": 4, "tree_top_k": 1, "num_draft_nodes": None}
_WIDE = {"num_speculative_tokens": 7, "tree_top_k": 10, "num_draft_nodes": 60}
"""The tree of EAGLE-2's and EAGLE-3's papers."""


@dataclass(frozen=True)
class Entry:
    """One drafter of the comparison."""

    name: str
    spec: dict[str, Any]
    timed: bool = True
    """False for what is there for its acceptance alone."""
    trained: str = ""
    """The folder of what was trained for it, in the output of `recipes.drafters`."""

    @property
    def is_greedy_only(self) -> bool:
        """Greedily, all verifiers and all ways to sample a chain are the same."""
        return not {"verifier", "draft_sample_method"}.isdisjoint(self.spec)


UNTRAINED = [
    Entry("ngram", {"method": "ngram"}),
    Entry("suffix", {"method": "suffix"}),
    Entry("suffix, tree of 16", {"method": "suffix", "tree": True, "num_draft_nodes": 16}, timed=False),
    Entry("token_recycling", {"method": "token_recycling"}),
    Entry("lookahead", {"method": "lookahead"}),
    Entry("jacobi", {"method": "jacobi"}),
    Entry("self, int8, chain of 3", {"method": "self", "num_speculative_tokens": 3}),
    Entry(
        "layer_skip, int8, chain of 3",
        {"method": "layer_skip", "quantization": "int8", "skip_layers": [], "num_speculative_tokens": 3},
    ),
    Entry("layer_skip, its own search", {"method": "layer_skip", "num_speculative_tokens": 3}, timed=False),
    Entry("draft_model, chain of 4", DRAFT),
    Entry("draft_model, greedy chain of 4", {**DRAFT, "draft_sample_method": "greedy"}, timed=False),
    Entry("draft_model, tree of 12", {**DRAFT, **_TREE}),
    Entry("draft_model, chain of 4, verifier rejection", {**DRAFT, "verifier": "rejection"}, timed=False),
    Entry("draft_model, chain of 4, verifier block", {**DRAFT, "verifier": "block"}, timed=False),
    Entry(
        "cascade, int8 self and draft_model",
        {"method": "cascade", "num_speculative_tokens": 6, "draft": DRAFT},
    ),
]


def trained(folder: Path) -> list[Entry]:
    """What can be drafted with what a run of the recipe left in `folder`."""
    distilled = {"method": "draft_model"}
    found = [
        *_entries(
            folder, "draft/draft", "distilled draft_model, {}", distilled, ("chain of 4", "tree of 12")
        ),
        *_entries(folder, "eagle/eagle", "eagle, {}", {"method": "eagle"}, ("chain of 4", "tree of 12")),
        *_entries(
            folder,
            "eagle3/eagle3",
            "eagle3, {}",
            {"method": "eagle3"},
            ("chain of 4", "tree of 12", "tree of 60"),
        ),
        *_entries(folder, "medusa/medusa", "medusa, {}", {"method": "medusa"}, ("tree of 12",)),
        *_entries(folder, "hydra/hydra", "hydra, {}", {"method": "hydra"}, ("tree of 12",)),
        *_entries(
            folder, "same-tokenizer/export/draft", "another draft_model, {}", distilled, ("chain of 4",)
        ),
        *_entries(folder, "other-tokenizer/export/draft", "tli, {}", {"method": "tli"}, ("chain of 4",)),
        *_entries(folder, "other-tokenizer/export/draft", "slem, {}", {"method": "slem"}, ("chain of 4",)),
    ]
    member = next((entry.spec for entry in found if entry.name == "distilled draft_model, tree of 12"), None)
    if member is not None:
        suffix = {"method": "suffix", "tree": True, "num_draft_nodes": 16}
        member = {**member, "num_draft_nodes": 16}
        spec = {"method": "ensemble", "num_draft_nodes": 16, "members": [suffix, member]}
        found += [
            Entry("distilled draft_model, tree of 16", member, timed=False),
            Entry("ensemble: suffix, distilled", spec),
        ]
    return found


def _entries(
    folder: Path, part: str, name: str, spec: dict[str, Any], shapes: tuple[str, ...]
) -> list[Entry]:
    """An entry a shape of proposal, none where `part` was not trained."""
    if not (folder / part).is_dir():
        return []
    options: dict[str, dict[str, Any]] = {"chain of 4": _CHAIN, "tree of 12": _TREE, "tree of 60": _WIDE}
    if spec["method"] == "slem":
        options = {"chain of 4": {"num_speculative_tokens": 4}}
    return [
        Entry(
            name.format(shape),
            {**spec, "model": str(folder / part), **options[shape]},
            timed=shape != "tree of 60",
            trained=part.split("/")[0],
        )
        for shape in shapes
    ]


def training_costs(folder: Path | None) -> dict[str, dict[str, Any]]:
    """By part of the recipe: minutes, threads and tokens that it took, and the weights that came out."""
    costs: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*/training.json")) if folder is not None else ():
        found = json.loads(file.read_text())
        progress, run = found["progress"], found["run"]
        costs[file.parent.name] = {
            "minutes": round(progress["elapsed_s"] / 60, 1),
            "threads": run["threads"],
            "tokens": progress["tokens"],
            "device": run["device"],
        }
    return costs


def without_models(spec: dict[str, Any]) -> dict[str, Any]:
    """The configuration without the paths of this machine."""
    plain = {key: value for key, value in spec.items() if key != "model"}
    if "members" in plain:
        plain["members"] = [without_models(member) for member in plain["members"]]
    if "draft" in plain:
        plain["draft"] = without_models(plain["draft"])
    return plain
