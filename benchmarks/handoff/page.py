"""The page of a recorded hand-off."""

from __future__ import annotations

from typing import Any


def page(result: dict[str, Any]) -> str:
    """Markdown."""
    origin, certificate, alarm = result["provenance"], result.get("certificate"), result.get("alarm")
    lines = [
        "# A recorded hand-off to vLLM",
        "",
        "```sh",
        origin["command"],
        "```",
        "",
        f"On {origin['date']} at commit {str(origin['commit'])[:7]}: the embedded pair,",
        f"handed to vLLM {result['vllm']} on {origin['num_cores']} cores ({origin['cpu']}) by",
        "[`slipstream handoff vllm`](../guides/handoff.md). A second instance without speculation is the off side.",
        f"{result.get('remark', '')}Raw result: [handoff.json](handoff.json).".strip(),
        "",
        "| step | what came of it |",
        "|---|---|",
        f"| start | both instances healthy after {result['start_s']:.0f} s |",
        *_bench("bench", "bench_on", result),
        *_bench("bench of the off side", "bench_off", result),
        *_load(result),
        *_dashboard(result["dashboard"]),
        f"| paired probes | {_speedup(result['realised'])} |",
    ]
    if alarm is not None:
        raised = "; ".join(one["message"] for one in alarm["alarms"]) or "none was raised"
        lines.append(
            f"| alarm | after {alarm['requests_at_temperature_0']} requests at temperature 0 the drift test was "
            f"{alarm['learned']['state']}; then {alarm['requests_at_temperature_1.6']} requests at temperature 1.6: "
            f"{raised} |"
        )
    if held := result.get("unreachable"):
        raised = "; ".join(one["message"] for one in held["alarms"]) or "none was raised"
        after = f", cleared once it went on: {'yes' if held['cleared'] else 'no'}" if held["alarms"] else ""
        lines.append(
            f"| alarm of a held server | its process was stopped for {held['after_s']:.0f} s: {raised}{after} |"
        )
    if certificate is not None:
        reasons = "; ".join(certificate["reasons"])
        lines.append(
            f"| audit, on against off | {certificate['decision']}{f': {reasons}' if reasons else ''} |"
        )
    stop = result["stop"]
    lines.append(
        f"| stop | Ctrl-C: exit code {stop['exit_code']}, {stop['left']} of {stop['processes']} processes left |"
    )
    return "\n".join(lines) + "\n"


def _bench(name: str, key: str, result: dict[str, Any]) -> list[str]:
    rows = []
    for figures in result[key]["figures"]:
        server = figures["server"] or {}
        acceptance = server.get("acceptance")
        drafted = f", α {acceptance['rate']:.2f}, τ {acceptance['length']:.2f}" if acceptance else ""
        rows.append(
            f"| {name}, {figures['concurrency']} at once | {figures['num_requests']} answers, {figures['num_failed']} "
            f"failed, {figures['tokens_per_s']:.1f} tokens a second{drafted} |"
        )
    return rows


def _load(result: dict[str, Any]) -> list[str]:
    [figures] = result["load"]["figures"]
    first = figures["time_to_first_token_s"]
    return [
        f"| load, 4 at once | {figures['num_requests']} answers, {figures['num_failed']} failed, "
        f"{figures['tokens_per_s']:.1f} tokens a second, first token after {first['p50']:.2f} s (p50) |"
    ]


def _dashboard(shown: dict[str, Any]) -> list[str]:
    [task] = shown["tasks"]
    positions = ", ".join(f"{a / r:.2f}" for a, r in zip(shown["accepted"], shown["reached"], strict=False))
    times = "; ".join(
        f"{name} {told['p50']:.2f} s (p50), {told['p99']:.2f} s (p99)"
        for name, told in shown["latency"].items()
    )
    return [
        f"| dashboard: acceptance | α {task['num_accepted'] / task['num_drafted']:.2f}, τ "
        f"{shown['acceptance_length']:.2f}; by position {positions} |",
        f"| dashboard: latency | {times} |",
        f"| dashboard: queue and cache | at most {shown['most_running']} running, {shown['most_waiting']} waiting, "
        f"{shown['most_kv_usage']:.1%} of the cache |",
    ]


def _speedup(realised: dict[str, Any] | None) -> str:
    if realised is None:
        return "too few pairs"
    return (
        f"{realised['ratio']:.2f} times the speed without speculation (95 %: {realised['low']:.2f} to "
        f"{realised['high']:.2f}, {realised['num_pairs']} pairs)"
    )
