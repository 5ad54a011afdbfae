"""The models and drafters in the package, and their names. It imports no other room, so that any may read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PAIR = Path(__file__).parent / "pair"

EMBEDDED_TARGET = str(_PAIR / "target")
EMBEDDED_DRAFT = str(_PAIR / "draft")
EMBEDDED_EAGLE3 = str(_PAIR / "eagle3")
EMBEDDED = "embedded"
"""The embedded target, or its own drafter, where a model is named."""
EMBEDDED_NAME = "embedded-pair"
"""The embedded target's name for clients of a server."""
EMBEDDED_DRAFTERS = {"draft_model": EMBEDDED_DRAFT, "eagle3": EMBEDDED_EAGLE3}
"""Method to the embedded target's own drafter."""
SMOLLM2_NAME = "smollm2"
"""SmolLM2-135M-Instruct, which is fetched, or its own drafter, where a model is named."""
SMOLLM2_DRAFTERS = {"eagle3": str(_PAIR.parent / "smollm2" / "eagle3")}
"""Method to SmolLM2-135M-Instruct's own drafter, the best first."""
SMOLLM2_SHAPE = {"num_speculative_tokens": 2, "tree_top_k": 1, "num_draft_nodes": None}
"""What its head drafts where flags do not say: on a CPU further tokens cost more than they bring."""
OWN_DRAFTERS = {EMBEDDED: EMBEDDED_DRAFTERS, SMOLLM2_NAME: SMOLLM2_DRAFTERS}
"""Name of a target, to method, to the folder of its own drafter."""
_FOLDERS = {
    EMBEDDED: {**dict.fromkeys(("cascade", "slem", "tli"), EMBEDDED_DRAFT), **EMBEDDED_DRAFTERS},
    SMOLLM2_NAME: SMOLLM2_DRAFTERS,
}
"""Name of a drafter's `model`, to method, to the folder that is meant. Methods that run a draft model in another way
run the same one."""


def in_package(value: Any, method: str = "") -> Any:
    """Return a drafter's keys with a folder in the package where its model is `embedded` or `smollm2`.

    So are those of drafters inside it. `method` is the drafter's where the keys do not name it.
    """
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        return [in_package(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    name = str(value.get("method", method))
    return {
        key: _FOLDERS[each].get(name, each)
        if key == "model" and isinstance(each, str) and each in _FOLDERS
        else in_package(each)
        for key, each in value.items()
    }


def portable(value: Any) -> Any:
    """Undo `in_package`: another machine has the folders elsewhere."""
    if isinstance(value, Mapping):
        return {key: portable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [portable(each) for each in value]
    for name, folders in _FOLDERS.items():
        if value in folders.values():
            return name
    return value


def step_drafter_in_package(reasoning: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return `reasoning` with the folder of a draft that is called `embedded`, and with that as its name."""
    if reasoning is None or reasoning.get("model") != EMBEDDED:
        return reasoning
    found: dict[str, Any] = in_package(reasoning, "draft_model")
    return found if found["model"] == EMBEDDED else {"name": EMBEDDED, **found}
