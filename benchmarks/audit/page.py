"""The table of an audit's power, from its result file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

KINDS = ("shared seeds", "reference", "samples alone", "usage")


def page(result: Mapping[str, Any]) -> str:
    """The page's text."""
    origin = result["provenance"]
    lines = [
        "# How soon an audit finds a fault",
        "",
        "Made from [audit_power.json](audit_power.json). Do not edit; run the command below.",
        "",
        f"Embedded pair, {result['num_prompts']} prompts, answers of up to {result['max_tokens']} tokens, confidence",
        f"{result['confidence']}. What each fault is: `benchmarks/audit/faults.py`.",
        "",
        *([f"**Not measured yet:** {', '.join(missing)}.", ""] if (missing := result["missing"]) else []),
        "## Through the statistics",
        "",
        "Answers come from a faulty engine, and the tests of `slipstream audit` see one after the other. Each line:",
        "the median of the answers that it took over several audits of different seeds, the most that it took, and",
        "in how many of the audits the fault was found. Each test has a quarter of the chance of a false alarm, as in",
        "the command, where up to four share it. An audit has at most",
        f"{result['num_answers']} answers, {result['num_cut_answers']:,} for cut answers, and from samples alone",
        f"{result['num_pairs']:,} of either side.",
        "Under shared seeds the first 25 answers are greedy. The reference scores sampled answers only.",
        "",
        "| fault | kind of audit | median | most | found | by |",
        "|---|---|---:|---:|---:|---|",
    ]
    for fault, kinds in result["faults"].items():
        kinds = {**kinds, **result.get("slow", {}).get(fault, {})}
        if samples := result.get("samples", {}).get(fault):
            kinds["samples alone"] = samples
        lines += [_row(fault, kind, kinds[kind]) for kind in KINDS if kind in kinds]
    if honest := result.get("honest"):
        lines += _honest(honest, result["num_pool"])
    lines += [*_COMMAND, *map(_verb_row, result.get("verb", ()))]
    lines += [
        "",
        f"`{origin['command']}`, {origin['date']}; {_measured_at(result['commits'])}.",
        "",
    ]
    return "\n".join(lines)


_COMMAND = [
    "",
    "## Through the command",
    "",
    "The same faults in a server of ours, over HTTP, audited by what `slipstream audit URL --against URL` and",
    "`slipstream audit URL --reference embedded` run, one audit each. The other URL is ours without speculation:",
    "with shared seeds where both draw alike, else from samples alone. Parameters are the command's own mix, so",
    "each set of them has fewer answers than above.",
    "",
    "| server | kind of audit | asked | answered | tokens each | decision | by |",
    "|---|---|---:|---:|---:|---|---|",
]


def _honest(honest: Mapping[str, Any], num_pool: int) -> list[str]:
    lines = [
        "",
        "## Honest engines",
        "",
        "Drafts of a model, judged by shared noise (shared seeds) and by rejection (the others), also through the",
        "statistics:",
        "",
        "| kind of audit | audits | false alarms |",
        "|---|---:|---:|",
    ]
    lines += [
        f"| {kind} | {each['num_audits']} | {each['num_false_alarms']} |" for kind, each in honest.items()
    ]
    return [
        *lines,
        "",
        f"All but those under shared seeds are drawn from pools of {num_pool:,} answers a side (half as many",
        "more with top_p for the reference), so some of them share answers and they are not independent. Those under",
        "shared seeds have answers of their own each; there is no chance in them.",
    ]


def _measured_at(commits: Mapping[str, str]) -> str:
    """One commit where all parts were measured at the same."""
    found = {part: str(commit)[:7] for part, commit in commits.items()}
    same = set(found.values())
    if len(same) == 1:
        return f"measured with what landed as {same.pop()}"
    return "measured with what landed as " + ", ".join(f"{commit} ({part})" for part, commit in found.items())


def _verb_row(each: Mapping[str, Any]) -> str:
    kind = each["kind"]
    if kind == "against":
        kind = (
            "samples alone" if any(name.startswith("samples") for name in each["tests"]) else "shared seeds"
        )
    wrong = "" if each["is_right"] else " (wrong)"
    return (
        f"| {each['fault']} | {kind} | {each['num_asked']:,} | {each['num_answers']:,} | {each['max_tokens']} | "
        f"{each['decision']}{wrong} | {'; '.join(each['signs']) or '-'} |"
    )


def _row(fault: str, kind: str, audits: list[Mapping[str, Any]]) -> str:
    after = [one["after"] for one in audits if one["after"] is not None]
    signs = sorted({one["how"] for one in audits if one["how"]})
    middle = f"{statistics.median(after):g}" if after else "-"
    most = f"{max(after):,}" if after else "-"
    return f"| {fault} | {kind} | {middle} | {most} | {len(after)} of {len(audits)} | {'; '.join(signs) or '-'} |"
