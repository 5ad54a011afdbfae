"""The picture of formats: which points it has, and that it is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.formats_picture import draw, points


def quality(weights: str, cache: str, ratio: float) -> dict[str, Any]:
    return {"weights": weights, "cache": cache, "conversations": {"ratio": ratio}}


def test_points_pair_quality_with_the_pass_at_the_shortest_context(tmp_path: Path) -> None:
    speeds = [("int8", 128, 12.0), ("int8", 1536, 20.0), ("int4", 128, 8.0), ("bfloat16", 128, 18.0)]
    found = points(
        {
            "rows": [
                quality("int8", "float32", 1.001),
                quality("int8", "int8", 1.5),
                quality("int4", "float32", 1.02),
                quality("int4 calibrated", "float32", 1.01),
                quality("int4_g64", "float32", 1.03),
            ]
        },
        {"rows": [{"weights": name, "context": context, "step_ms": ms} for name, context, ms in speeds]},
    )
    assert [(point.name, point.step_ms, round(point.lost, 6)) for point in found] == [
        ("int4 calibrated", 8.0, 1.0),
        ("int4", 8.0, 2.0),
        ("int8", 12.0, 0.1),
        ("bfloat16, as stored", 18.0, 0.0),
    ]
    draw(found, "0.3 G", tmp_path / "formats.svg")
    assert "<svg" in (tmp_path / "formats.svg").read_text()
