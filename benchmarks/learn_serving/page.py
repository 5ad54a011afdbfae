"""The page of `benchmarks.learn_serving`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.page import machine

INTRODUCTION = """\
# While the drafter learns

Written by `python -m benchmarks.learn_serving`; do not edit. [Raw result](learn_serving.json).
[What learning is](../guides/learning.md).

A server with `--learn` and the embedded pair. Its base drafter is the embedded draft with noise, so that the learner
has something to gain. Requests come over HTTP, but where a section says otherwise.
"""


def page(result: Mapping[str, Any]) -> str:
    """The page's text, of the parts that are there."""
    sections = {"answers": _answers, "kills": _kills, "broken": _broken, "latency": _latency}
    found = [INTRODUCTION]
    for name, write in sections.items():
        if name in result:
            found.append("\n".join([*write(result[name]), "", f"{machine(result[name]['provenance'])}.", ""]))
    return "\n".join(found)


def _answers(part: Mapping[str, Any]) -> list[str]:
    acts, metrics, memory, tenants = part["acts"], part["metrics"], part["memory"], part["tenants"]
    privacy = part["privacy"]["ended"]["found_in"]
    running = part["privacy"]["while it runs"]["found_in"]
    out = [name for name in privacy if "opted out" in name]
    leaks = sorted({file for name in out for file in [*privacy[name], *running[name]]})
    return [
        "## Answers, memory, privacy",
        "",
        f"{part['answers']:,} answers of {part['tokens']:,} tokens, 32 at a time, greedy and at 0.8, while an",
        "operator promotes, damages, rolls back and forgets versions and the server does so by itself. Three of ten",
        "requests opt out: by `learn: false`, as a tenant, by an API key.",
        "",
        "| | |",
        "|---|---|",
        f"| answers that differ from those without speculation | {part['differing']} (bar 0) |",
        f"| answers drafted by a version other than the base drafter | {part['answers'] - part['answers_by_base']:,}, "
        f"by {part['versions_that_drafted']} versions |",
        f"| by hand: promoted, of these broken, damaged | "
        f"{sum(num for name, num in acts.items() if name.startswith('promote_'))}, "
        f"{acts.get('promote_broken', 0)}, {acts.get('damage', 0)} |",
        f"| by hand: rolled back, forgot a tenant | {acts.get('roll_back', 0)}, {acts.get('forget', 0)} |",
        "| by the server: promoted, rolled back, refused | "
        + ", ".join(
            str(int(metrics.get(f'versions_total{{outcome="{name}"}}', 0)))
            for name in ("promoted", "rolled_back", "refused")
        )
        + " |",
        f"| answers drafted by a version of one tenant alone | {tenants['answers']:,}, "
        f"by {tenants['versions']} versions |",
        f"| answers of other tenants among them | {tenants['of_others']} (bar 0) |",
        *_steps(part["steps"]),
        f"| server's resident memory by fifths of the run, MiB | {_joined(memory['server_mib'])} |",
        f"| learner's, the most in each fifth, MiB | {_joined(memory['learner_most_mib'])} |",
        f"| files in which something of those who opted out is found | {len(leaks)} (bar 0) {' '.join(leaks)} |",
        f"| files in which the others' prompts are found, to show that the search finds | "
        f"{len(privacy['prompts of the others'])} |",
    ]


def _steps(steps: Mapping[str, Any]) -> list[str]:
    """What a swap is to a request that runs; nothing where no swap met one."""
    if "typical_ms" not in steps:
        return []
    return [
        f"| steps apart from swaps: typical (median), 99 % at most, longest | {steps['typical_ms']:.1f} ms, "
        f"{steps['p99_ms']:.1f} ms, {steps['longest_ms']:.1f} ms |",
        f"| the longest that versions came or went between two steps, of {steps['swaps']:,} swaps | "
        f"{steps['longest_change_ms']:.1f} ms |",
        f"| a swap's longest step, from its loading to {steps['near']} steps later: median, longest | "
        f"{steps['median_at_swaps_ms']:.1f} ms, {steps['longest_at_swaps_ms']:.1f} ms |",
        f"| the longest while a version was loaded, in the {steps['near']} steps after | "
        f"{steps['longest_while_loading_ms']:.1f} ms, {steps['longest_after_ms']:.1f} ms |",
        f"| the longest delay at a swap over a typical step, in typical steps | "
        f"{steps['longest_delay_steps']:.1f} (bar {steps['bar']:g}) |",
        f"| swaps with a delay over the bar; the same of any {steps['near']} other steps in a row | "
        f"{steps['share_over_bar']:.1%}, {steps['share_over_bar_elsewhere']:.1%} |",
    ]


def _kills(part: Mapping[str, Any]) -> list[str]:
    counts = part["counts"]
    return [
        "## Killed at random instants",
        "",
        f"SIGKILL of the server, of its learner or of both at {part['instants']} instants under traffic, one of eight",
        "starts included. After each the ring is read, all versions' sha256 are compared, what serves is loaded, and",
        "all that a reader had seen before must be there. The answers are compared with those without speculation.",
        "",
        "| | |",
        "|---|---|",
        f"| faults | {len(part['faults'])} (bar 0) |",
        *(f"| {name} | {counts[name]:,} |" for name in sorted(counts)),
        f"| records that were appended, versions that were seen | {part['records']:,}, {part['versions']} |",
    ]


def _broken(part: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Versions that break",
        "",
        "In the process, without HTTP; the base drafter is the embedded draft without noise. *In memory*: a good",
        "version serves for a while, then its weights in memory become noise. *At once*: all files are whole and the",
        "weights are noise.",
        "",
        "| broken | tries | rolled back | alarm | requests until then: median, most |",
        "|---|---|---|---|---|",
    ]
    for way in dict.fromkeys(one["way"] for one in part["tries"]):
        tries = [one for one in part["tries"] if one["way"] == way]
        needed = sorted(one["requests"] for one in tries)
        lines.append(
            f"| {way} | {len(tries)} | {sum(one['rolled_back'] for one in tries)} | "
            f"{sum(one['alarm'] for one in tries)} | {needed[len(needed) // 2]}, {needed[-1]} (bar {part['bar']}) |"
        )
    disk = part["damaged_on_disk"]
    lines += [
        "",
        f"A bit of the file flipped between two runs of the server, {len(disk)} tries: "
        f"{sum(not one['served_by_it'] and one['retired'] for one in disk)} were never served, with "
        f"{sum(one['alarm'] for one in disk)} alarms.",
    ]
    return lines


def _latency(part: Mapping[str, Any]) -> list[str]:
    full = part["full_load"]
    cpu_s = sum(one["learner_cpu_s"] for one in part["rounds"])
    share = cpu_s / (len(part["rounds"]) * part["window_s"])
    low, high = part["ratio_quartiles"]
    return [
        "## Latency",
        "",
        f"{part['half_rate']} requests a second at random instants, half of what the server without learning answers",
        f"at full load; {len(part['rounds'])} rounds of {part['window_s']:g} s, the same requests in turns to a server",
        "that learns and to one that does not. The learner always has something to learn.",
        "",
        "| | |",
        "|---|---|",
        f"| p95 with learning, without | {part['p95_s']['on'] * 1e3:.0f} ms, {part['p95_s']['off'] * 1e3:.0f} ms |",
        f"| their ratio, all {part['requests']:,} requests together | {part['p95_ratio']:.3f} (bar 1.03) |",
        f"| the rounds' ratios: median, quartiles | {part['ratio_median']:.3f}, {low:.3f} to {high:.3f} |",
        f"| the learner's share of a core meanwhile | {share:.2f} |",
        f"| at full load: processor time of the learner in {full['seconds']:.0f} s, but for the first two | "
        f"{full['learner_cpu_s_after']:.2f} s |",
    ]


def _joined(values: list[float]) -> str:
    return ", ".join(f"{one:,.0f}" for one in values)
