"""The table of an audit's power, from its result file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KINDS = ("shared seeds", "reference", "samples alone", "usage")


def write_page(result: Mapping[str, Any], path: Path) -> None:
    """Write the Markdown page of `result`."""
    path.write_text(page(result), encoding="utf-8")


def page(result: Mapping[str, Any]) -> str:
    """The page's text."""
    origin = result["provenance"]
    lines = [
        "# How soon an audit finds a fault",
        "",
        "Made from [audit_power.json](audit_power.json). Do not edit; run the command below.",
        "",
        f"Embedded pair, {result['num_prompts']} prompts, answers of up to {result['max_tokens']} tokens, confidence",
        f"{result['confidence']}. Each line: the median of the answers that it took over several audits of different",
        "seeds, the most that it took, and in how many of the audits the fault was found. An audit has at most",
        f"{result['num_answers']} answers, {result['num_cut_answers']:,} for cut answers, and from samples alone",
        f"{result['num_pairs']:,} of either side.",
        "",
        "| fault | kind of audit | median | most | found | by |",
        "|---|---|---:|---:|---:|---|",
    ]
    for fault, kinds in result["faults"].items():
        lines += [_row(fault, kind, kinds[kind]) for kind in KINDS if kind in kinds]
    lines += ["", "Honest engines, drafts of a model judged by shared noise and by rejection:", ""]
    lines += ["| kind of audit | audits | false alarms |", "|---|---:|---:|"]
    lines += [
        f"| {kind} | {each['num_audits']} | {each['num_false_alarms']} |"
        for kind, each in result["honest"].items()
    ]
    lines += [
        "",
        f"The honest audits of the last two kinds are drawn from pools of {result['num_pool']:,} answers a side, so",
        "some of them share answers.",
        "",
        f"`{origin['command']}`, {origin['date']}, commit {str(origin['commit'])[:12]}.",
        "",
    ]
    return "\n".join(lines)


def _row(fault: str, kind: str, audits: list[Mapping[str, Any]]) -> str:
    after = [one["after"] for one in audits if one["after"] is not None]
    signs = sorted({one["how"] for one in audits if one["how"]})
    middle = f"{statistics.median(after):g}" if after else "-"
    most = f"{max(after):,}" if after else "-"
    return f"| {fault} | {kind} | {middle} | {most} | {len(after)} of {len(audits)} | {'; '.join(signs) or '-'} |"
