"""docs/benchmarks/deploy.md, from the results that are there: python -m benchmarks.deploy.page."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.command import DOCS
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.page import machine
from benchmarks.harness.pictures import drawing

FOLDER = DOCS
RESULTS = ("soak", "routing", "scaling", "affinity", "simulation")
SOAK_BAR = 2000, 40
"""Requests and disruptions."""
ADDED_BAR_MS, SCALING_BAR, SHARE_BAR = 2.0, 1.8, 0.9

Result = Mapping[str, Any]


def write_page() -> None:
    """Renew the page from the results of this checkout."""
    (FOLDER / "deploy.md").write_text(page(read_results()), encoding="utf-8")


def finish(kept: Kept, result: Result) -> None:
    """Write the result and, where it is this checkout's, the page; say what the cells came to."""
    kept.finish(result)
    for name, cell in result["cells"].items():
        say(f"{name}: {cell}")
    if kept.result.parent == FOLDER:
        write_page()


def read_results() -> dict[str, Result]:
    """By name; those that were never measured are absent."""
    files = {name: FOLDER / f"deploy_{name}.json" for name in RESULTS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def page(results: Mapping[str, Result]) -> str:
    """The page's text."""
    parts = [
        _HEAD,
        _soak(results["soak"]),
        _routing(results.get("routing")),
        _scaling(results.get("scaling")),
        _affinity(results.get("affinity")),
    ]
    return "\n".join(map(_filled, [*parts, _simulation(results["simulation"])]))


def _filled(text: str) -> str:
    """The text with the lines of its paragraphs filled; headings, tables and commands as they are."""
    blocks = text.strip().split("\n\n")
    return (
        "\n\n".join(
            block
            if block.startswith(("#", "|", "`", "!"))
            else textwrap.fill(block, 118, break_on_hyphens=False)
            for block in blocks
        )
        + "\n"
    )


def _model(result: Result) -> str:
    if not result.get("expand"):
        return "The embedded target"
    form = f" in {result['quantization']}" if result.get("quantization") else ""
    return f"The embedded target at the cost of {result['expand']} parameters{form}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _soak(result: Result) -> str:
    cells = list(result["cells"].values())
    requests, disruptions = cells[0]["requests"], sum(cells[0]["disruptions"].values())
    rows, gaps = [], []
    for cell in cells:
        ended = f"{cell['lost']}, {cell['ended_twice']}, {len(cell['errors'])}"
        again = sum(number for moves, number in cell["moves_of_a_request"].items() if int(moves) > 1)
        rows.append(
            f"| {cell['replicas']} | {cell['equal']} of {cell['requests']} | {ended} | {cell['moved']} | {again} |"
        )
        gap = cell["longest_gap_s"]
        gaps.append(f"{gap['median']:.1f} s and {gap['p99']:.0f} s with {cell['replicas']} replicas")
    whole = requests >= SOAK_BAR[0] and disruptions >= SOAK_BAR[1]
    equal = all(cell["equal"] == cell["requests"] and not cell["lost"] for cell in cells)
    bar = _met(equal) if whole else "left: fewer were tried"
    return f"""## Soak

Streams over replicas of this machine (processes, the embedded target, with and without its draft), sixteen at once, of
eight kinds: greedy, sampled, two answers, log-probabilities, penalties, stop strings, a schema, long ones. A third of
the disruptions is SIGKILL, a third SIGSTOP until the router has given the replica up and then SIGCONT, so that it goes
on talking, a third SIGTERM, at which it drains. Each stream is compared with what one engine says alone: tokens, text,
log-probabilities, ends and counts.

With {requests:,} requests and {disruptions} disruptions each time ([figures](deploy_soak.json);
{machine(result["provenance"])}):

| replicas | equal to the lone run | lost, ended twice, errors | moves | requests moved more than once |
|---|---|---|---|---|
{chr(10).join(rows)}

The bar is {SOAK_BAR[0]:,} requests and {SOAK_BAR[1]} disruptions with every answer equal, none lost, none twice:
{bar}. The longest gap of a stream, at the median and at the 99th percentile, was
{" and ".join(gaps)}: replicas were being loaded meanwhile.

```sh
python -m benchmarks.deploy.soak
```
"""


def _routing(result: Result | None) -> str:
    text = f"""## What routing adds

The same stream through router and relay, and from the same replica over one connection without them: in pairs, each
first in turns, new prompts, nothing cached. The routed one has prefix hashes, queue, placement, what is kept for a
move, and the whole output on top. Bar: {ADDED_BAR_MS:g} ms at the median, here of the whole stream.
"""
    if result is None:
        text += "\nNot measured yet.\n"
    else:
        rows = []
        for streams, cell in result["cells"].items():
            added = [_interval(cell[name], 2) for name in _ADDED]
            share = f"{cell['equal']} of {cell['pairs']}"
            met = _met(cell["stream_added_ms"]["median"] <= ADDED_BAR_MS)
            rows.append(f"| {streams} | {share} | {' | '.join(added)} | {met} |")
        text += f"""
{_model(result)} ({machine(result["provenance"])}; [figures](deploy_routing.json)), medians in ms, with their 95 %
intervals:

| streams at once | pairs with equal tokens | added to the first token | to a later token | to the stream | bar |
|---|---|---|---|---|---|
{chr(10).join(rows)}
"""
    return text + "\n```sh\npython -m benchmarks.deploy.routing\n```\n"


_ADDED = "first_token_added_ms", "token_added_ms", "stream_added_ms"


def _interval(value: Mapping[str, float], digits: int) -> str:
    return f"{value['median']:.{digits}f} ({value['low']:.{digits}f} to {value['high']:.{digits}f})"


def _scaling(result: Result | None) -> str:
    text = f"""## Two replicas against one

The same number of requests through a front that knows one replica and through one that knows two, in turns; each
replica has a core of its own. Bar: {SCALING_BAR:g} times, where cores allow.
"""
    if result is None:
        text += "\nNot measured yet.\n"
    else:
        cell = result["cell"]
        ratio = cell["two_over_one"]
        front = "of its own" if cell["front_has_a_core"] else "of none: it takes its time from the replicas"
        text += f"""
{_model(result)} ({machine(result["provenance"])}; [figures](deploy_scaling.json)), {cell["rounds"]} rounds of
{cell["requests"]} requests: {cell["one_tokens_per_s"]["median"]:.0f} tokens/s with one,
{cell["two_tokens_per_s"]["median"]:.0f} with two: {_interval(ratio, 2)} times, {_met(ratio["median"] >= SCALING_BAR)}.
The front has a core {front}.
"""
    return text + "\n```sh\npython -m benchmarks.deploy.scaling\n```\n"


def _affinity(result: Result | None) -> str:
    text = f"""## What is found in real caches

The same turns of conversations, of several tenants with a system prompt each, through replicas behind the router and
through one replica whose cache is as large as all of theirs. Each says with an answer how many of the prompt's tokens
it found in its cache. Bar: {SHARE_BAR:g} of what the one finds. It measures no time.
"""
    if result is None:
        text += "\nNot measured yet.\n"
    else:
        traffic, rows = result["traffic"], []
        for cell in result["cells"].values():
            fleet, one, share = cell["fleet"], cell["one_cache"], cell["share_of_one_cache"]
            shares = f"{100 * fleet['share']:.1f} % | {100 * one['share']:.1f} % | {share:.3f}"
            equal = "yes" if cell["equal_answers"] else "no"
            met = _met(share >= SHARE_BAR)
            rows.append(f"| {cell['replicas']} | {fleet['num_slots']:,} | {shares} | {equal} | {met} |")
        requests = next(iter(result["cells"].values()))["requests"]
        text += f"""
The embedded target, {requests:,} turns of {traffic["tenants"] * traffic["conversations"]} conversations of
{traffic["tenants"]} tenants, {traffic["streams"]} at once
({machine(result["provenance"])}; [figures](deploy_affinity.json)):

| replicas | tokens that all caches hold | found of prompts' tokens | by one cache | share of it | equal answers | bar |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

Each is one run. Which turns run at once depends on when others end, so a share moves by a few hundredths from run to
run.
"""
    return text + "\n```sh\npython -m benchmarks.deploy.affinity\n```\n"


def _simulation(result: Result) -> str:
    cell = result["cells"]["million"]
    world, pause, load = cell["world"], cell["pause_s"], cell["load_max_over_mean"]
    sweep = {
        bound: [
            one["share_of_one_cache"]
            for name, one in result["cells"].items()
            if name.startswith(f"sweep {bound:g} ")
        ]
        for bound in (0.0, 0.125, 0.25)
    }
    at = {bound: sum(values) / len(values) for bound, values in sweep.items()}
    bad = f"{cell['lost']} lost, {cell['refused']} refused, {cell['failed']} failed"
    known = f"{100 * cell['hit_share']:.1f} %"
    would = f"{100 * cell['one_cache_hit_share']:.1f} %"
    share = cell["share_of_one_cache"]
    return f"""## A million requests to a thousand replicas

The router has no clock and no sockets of its own, so its code can be simulated: here every decision is real, and the
replicas are not. Each steps {world["capacity"]} answers at once and holds {world["num_slots"]:,} tokens. Requests are
turns of conversations of {world["num_tenants"]} tenants, at nominally {100 * world["utilisation"]:.0f} % of the
capacity (what is cached makes it less: the mean wait was {cell["wait_s"]["mean"]:.2g} s). In the
{cell["virtual_s"]:.0f} simulated seconds {world["kills"]} replicas were killed one by one and a tenth of all at one
moment, {world["hangs"]} hung for 2 to 20 s, {world["drains"]} were drained ([figures](deploy_simulation.json)).

| | |
|---|---|
| requests, answered whole | {cell["requests"]:,}, {cell["answered"] - cell["wrong_length"]:,}; {bad} |
| moved to another replica under way | {cell["moved"]:,}; pause {pause["median"]:.2f} s at the median, \
{pause["p99"]:.1f} s at the 99th percentile (5 s until one counts as hung) |
| prompt blocks found in the chosen replica's cache | {known}; one cache of the size of all would find {would}: \
{share:.3f} of it (bar {SHARE_BAR:g}: {_met(share >= SHARE_BAR)}) |
| fullest replica over the mean | {load["median"]:.2f} at the median, {load["p99"]:.2f} at the 99th percentile of \
moments |
| a decision | {cell["submit_us"]["median"]:.0f} µs at the median |

![What of one big cache is found, and how uneven the load is](deploy_simulation.svg)

With 100 replicas and shorter runs (60,000 requests, so that more conversations are new) the share found depends on the
bound on imbalance more than on the load: {at[0.0]:.2f} at 0, {at[0.125]:.2f} at 0.125, {at[0.25]:.2f} at 0.25 (the
default), on average over the loads.

```sh
python -m benchmarks.deploy.simulation
```
"""


def draw(cells: dict[str, Any], path: Path) -> None:
    """What of one big cache is found, and how uneven the load is, over the load and the bound on imbalance."""
    with drawing(path, 9, 3.4) as figure:
        left, right = figure.subplots(1, 2)
        for imbalance in sorted({cell["world"]["max_imbalance"] for cell in cells.values()}):
            own = sorted(
                (cell for name, cell in cells.items() if name.startswith("sweep") and cell["world"]["affine"]
                 and cell["world"]["max_imbalance"] == imbalance),
                key=lambda cell: cell["world"]["utilisation"],
            )  # fmt: skip
            if own:
                loads = [cell["world"]["utilisation"] for cell in own]
                label = f"max_imbalance {imbalance:g}"
                left.plot(loads, [100 * cell["share_of_one_cache"] for cell in own], "o-", label=label)
                right.plot(loads, [cell["load_max_over_mean"]["median"] for cell in own], "o-", label=label)
        left.axhline(90, color="grey", linewidth=0.8, linestyle=":")
        left.set(
            xlabel="share of the capacity asked for",
            ylabel="% of what one big cache would find",
            ylim=(0, 101),
        )
        right.set(
            xlabel="share of the capacity asked for", ylabel="fullest replica over the mean", ylim=(0.9, None)
        )
        left.legend(fontsize=8)
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)


_HEAD = """# Replicas

Written by `python -m benchmarks.deploy.page`, which each of these benchmarks runs at its end; do not edit.

Four questions: is an answer still the lone run's where its replica is lost under way, what does a router in front of
replicas cost, does it send prompts to where they are cached, and does it hold up at a size that no machine here has?
[How to deploy](../guides/replicas.md).
"""

if __name__ == "__main__":
    write_page()
