"""The result as tables, into the page between its marks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from benchmarks.harness.page import table, wrapped, write_between

BEGIN = "<!-- measured: python -m benchmarks.gpu -->"
END = "<!-- end of what was measured -->"


def write(result: dict[str, Any], file: Path) -> None:
    """Replace what stands between the marks; a page that is not there gets a title and the tables."""
    if not file.exists():
        file.write_text(f"# On a GPU\n\n{BEGIN}\n{END}\n", encoding="utf-8")
    write_between(file, BEGIN, END, tables(result))


def tables(result: dict[str, Any]) -> str:
    """Every section that was measured."""
    writers: dict[str, Callable[[Any], str]] = {
        "device": _device,
        "tests": _tests,
        "speed": _speed,
        "step": _step,
        "transfers": _transfers,
    }
    parts = [writer(result[name]) for name, writer in writers.items() if name in result]
    if result.get("self"):
        parts.insert(-2, f"Self-drafting in int8 does not run here: {result['self']}.")
    ran = result.get("provenance", {})
    if ran:
        parts.append(
            f"{ran['date']}, commit {ran['commit']}: `{ran['command']}`. Raw result: [gpu.json](gpu.json)."
        )
    return "\n\n".join(map(wrapped, parts))


def _device(found: dict[str, Any]) -> str:
    return (
        f"{found['name']}, {found['memory_bytes'] / 2**30:.0f} GiB, "
        f"driver {found['driver']}, PyTorch {found['torch']}: "
        f"copies {found['copy_gb_per_s']:,.0f} GB/s (bytes read and written), "
        f"{found['bfloat16_tflop_per_s']:.0f} TFLOP/s in bfloat16 (products of {found['matrix_size']:,} squared), "
        f"{found['launch_us']:.1f} µs to launch one small kernel from Python."
    )


def _tests(found: dict[str, Any]) -> str:
    failed = "".join(f"\n- {name}" for name in found["failed"])
    passed = (
        f"`tests/gpu`: {found['passed']} passed, {len(found['failed'])} failed, {found['skipped']} skipped"
    )
    return f"{passed}, {found['seconds']:.0f} s.{failed}"


def _speed(found: Seq[dict[str, Any]]) -> str:
    head = ("target", "requests", "drafter", "tokens/s", "over off", "95 % interval", "τ", "texts identical")
    rows = []
    for cell in found:
        for row in cell["rows"]:
            interval = row["speedup_interval"]
            rows.append(
                (
                    f"{cell['model']}, {cell['dtype']}",
                    cell["concurrency"],
                    row["drafter"],
                    f"{row['tokens_per_s']:.0f}",
                    "" if row["speedup"] is None else f"{row['speedup']:.2f}",
                    "" if interval is None else f"{interval['low']:.2f} to {interval['high']:.2f}",
                    f"{row['tau']:.2f}",
                    "" if row["num_compared"] is None else f"{row['num_identical']} of {row['num_compared']}",
                )
            )
    return f"## Speed\n\n{chr(10).join(table(head, rows))}"


def _step(found: dict[str, Any]) -> str:
    head = (
        "context",
        "rows",
        "step, ms",
        "memory roofline, ms",
        "GPU busy, ms",
        "GPU idle",
        "kernels a step",
    )
    rows = [
        (
            f"{cell['context']:,}",
            cell["rows"],
            f"{cell['step_ms']:.1f}",
            f"{cell['roofline_ms']:.2f}",
            f"{cell['device_ms']:.2f}",
            f"{cell['host_share']:.0%}",
            f"{cell['kernels']:.0f}",
        )
        for cell in found["cells"]
    ]
    size = f"{found['num_parameters'] / 1e9:.2f} G parameters, {found['dtype']}"
    return f"## A target step ({size})\n\n{chr(10).join(table(head, rows))}"


def _transfers(found: Seq[dict[str, Any]]) -> str:
    head = ("step of", "ms", "of it drafting, ms", "GPU idle", "kernels", "copies", "waits for the GPU")
    rows = [
        (
            cell["scenario"],
            f"{cell['step_ms']:.1f}",
            f"{cell['draft_ms']:.1f}",
            f"{cell['host_share']:.0%}",
            f"{cell['kernels']:.0f}",
            f"{sum(cell['copies'].values()):.0f}",
            f"{cell['waits']:.0f}",
        )
        for cell in found
    ]
    return f"## What a step asks of the GPU\n\n{chr(10).join(table(head, rows))}"
