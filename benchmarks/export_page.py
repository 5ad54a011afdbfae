"""The page of the exports that other engines ran, `docs/benchmarks/export_engines.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS
from benchmarks.harness.page import table, wrapped

HEADS_RESULT = DOCS / "export_heads.json"
"""Of `benchmarks.export_heads`, which is a section of the page."""

NAMES = {
    "llama-cpp": "llama.cpp",
    "transformers": "Transformers",
    "openvino": "OpenVINO GenAI",
    "vllm": "vLLM",
}
HEAD = (
    *("engine", "drafter", "texts as ours", "passes, ours", "passes, theirs"),
    *("accepted a pass, ours", "accepted a pass, theirs", "theirs over ours"),
)
METHODS = {"draft_model": "draft model", "eagle3": "EAGLE-3"}
TOLERANCE = 0.02
"""Acceptance there may differ from ours by this share."""


HEADS_TOLERANCE = 0.05
"""The same of `benchmarks.export_heads`, whose texts are fewer."""


def write_page(result: Path) -> None:
    """Write the page beside the result of `benchmarks.export_engines`."""
    text = page(json.loads(result.read_text(encoding="utf-8")))
    result.with_suffix(".md").write_text(text, encoding="utf-8")


def page(result: dict[str, Any]) -> str:
    """Markdown from the result of `benchmarks.export_engines`, and from `HEADS_RESULT` where that is there."""
    ran = [cell for cell in result["cells"] if "passes" in cell]
    commits = ", ".join(sorted({cell["commit"][:7] for cell in result["cells"]}))
    lines = [
        "# Exports in the engines that they are for",
        "",
        "Written by `python -m benchmarks.export_engines`; do not edit.",
        "",
        "What `slipstream export --checkpoint` writes for the embedded pair, run by the engines themselves:",
        f"{result['num_prompts']} prompts of all tasks as token ids, greedy, one at a time, a chain of "
        f"{result['depth']} draft tokens,",
        f"{result['num_tokens']:,} tokens of answers. The engines compute in float32 as far as they can.",
        "[What is written](../guides/export.md), [raw result](export_engines.json).",
        "",
        *table(HEAD, (_row(cell, result["num_prompts"]) for cell in ran)),
        "",
        "Passes are those of the target behind the prompt's own pass. In that one Transformers and Slipstream check",
        "tokens of a draft model, the others check none. Ours goes on from the tokens that theirs began with, so both",
        "check the same drafts. Acceptance is counted over the texts that are ours.",
        f"The bar is a difference of {TOLERANCE:.0%}: {_verdict(ran)}.",
    ]
    parted = [line for cell in ran for line in _differences(cell)]
    if parted:
        lines += ["", "Texts that are not ours part from them here:", "", *parted]
    refused = [cell for cell in result["cells"] if "passes" not in cell]
    if refused:
        lines += ["", "Not run:", "", *(_refusal(cell) for cell in refused)]
    machine = result["provenance"]
    lines += [
        "",
        f"Run {machine['date']} at commit {commits}. Nothing here is timed.",
        "Whether the engines' own parsers take every setting is [another result](export.json).",
    ]
    if HEADS_RESULT.exists():
        lines += ["", *_heads(json.loads(HEADS_RESULT.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def _heads(result: dict[str, Any]) -> list[str]:
    """The section of the heads that `benchmarks.export_heads` ran in llama.cpp."""
    cells, machine = result["cells"], result["provenance"]
    missed = [cell["name"] for cell in cells if abs(cell["theirs_over_ours"] - 1) > HEADS_TOLERANCE]
    rows = [
        [
            *(cell["name"], f"{cell['same_texts']} of {cell['num_prompts']}", f"{cell['num_tokens']:,}"),
            *(f"{cell['passes'][side]:,}" for side in ("ours", "theirs")),
            *(f"{cell['accepted_per_pass'][side]:.3f}" for side in ("ours", "theirs")),
            f"{cell['theirs_over_ours']:.3f}",
        ]
        for cell in cells
    ]
    verdict = f"missed by {' and '.join(missed)}" if missed else f"met by all {len(cells)}"
    commits = ", ".join(dict.fromkeys(cell["commit"][:7] for cell in cells))
    about = (
        f"Written by `python -m benchmarks.export_heads` ([raw result](export_heads.json)): llama.cpp "
        f"{cells[0]['version']}, whose wheels read EAGLE-3, DFlash and DSpark heads. Answers of up to "
        f"{result['max_tokens']} tokens, a chain of {result['depth']}. SmolLM2's head is the one that ships here, "
        "asked questions of MT-bench. The block drafters were trained for two minutes, to have something to compare, "
        "and are asked prompts of all tasks."
    )
    behind = (
        "With weights in Q4_1 llama.cpp also rounds what a layer reads, in its own way, and its texts part from ours "
        "where two tokens are nearly as likely. As above, acceptance is counted over the texts that are the same. The "
        f"bar is a difference of {HEADS_TOLERANCE:.0%}: {verdict}. Run {machine['date']}, commits {commits}."
    )
    lines = table(("target and head", HEAD[2], "tokens in them", *HEAD[3:]), rows)
    return ["## Our heads in a ready-made llama.cpp", "", wrapped(about), "", *lines, "", wrapped(behind)]


def met(cell: dict[str, Any]) -> bool:
    """Whether the acceptance of an engine is within the tolerance."""
    return abs(float(cell["theirs_over_ours"]) - 1) <= TOLERANCE


def _row(cell: dict[str, Any], num_prompts: int) -> list[str]:
    passes, accepted = cell["passes"], cell["accepted_per_pass"]
    return [
        f"{NAMES[cell['engine']]} {cell['version']}",
        METHODS[cell["method"]],
        f"{cell['same_texts']} of {num_prompts}",
        f"{passes['ours']:,}",
        f"{passes['theirs']:,}",
        f"{accepted['ours']:.3f}",
        f"{accepted['theirs']:.3f}",
        f"{cell['theirs_over_ours']:.3f}",
    ]


def _verdict(cells: list[dict[str, Any]]) -> str:
    missed = [f"{NAMES[cell['engine']]} with {METHODS[cell['method']]}" for cell in cells if not met(cell)]
    return f"missed by {' and '.join(missed)}" if missed else f"met by all {len(cells)}"


def _differences(cell: dict[str, Any]) -> list[str]:
    who = f"{NAMES[cell['engine']]} with {METHODS[cell['method']]}"
    found = []
    for one in cell["differences"]:
        margin = one.get("margin")
        how = (
            f"at token {one['position']}, where our target prefers its own by {margin:.2g} nats"
            if margin is not None
            else f"at token {one['position']}"
        )
        found.append(f"- {who}, prompt {one['prompt']}: {how}")
    return found


def _refusal(cell: dict[str, Any]) -> str:
    why = cell.get("refused") or cell.get("failed") or ""
    return f"- {NAMES[cell['engine']]} with {METHODS[cell['method']]}: {' '.join(why.split())}"
