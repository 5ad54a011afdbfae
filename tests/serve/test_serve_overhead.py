"""The benchmark of the server's overhead: both sides say the same, and the arithmetic is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.overhead.client import read_answer
from benchmarks.overhead.rounds import Plan, Side, measure, summary

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are modules of the checkout."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    plan = Plan(specs=("draft",), streams=3, rounds=2, requests=5, max_tokens=6, kv_cache_bytes=40 * 2**20)
    one, two = measure(plan, "draft")["servers"]
    assert (one["processes"], two["processes"]) == (1, 2)
    for cell in (one, two):
        assert cell["texts_that_differ"] == 0
        assert 2 * 5 < cell["num_tokens"] <= 2 * 5 * 6
        assert len(cell["rounds"]) == 2
        assert all(rate > 0 for rate in cell["tokens_per_s"].values())
    assert one["cpu_us_per_token"]["front"] == 0 < two["cpu_us_per_token"]["front"]


def side(num_tokens: int, seconds: float, text: str = "same") -> Side:
    return Side(num_tokens, seconds, cpu_s=seconds, client_cpu_s=0.1, texts=[text])


def test_overhead_is_the_lost_part_of_the_rate() -> None:
    pairs = [
        (side(90, 1.0), side(100, 1.0)),
        (side(100, 1.25), side(100, 1.0)),
        (side(97, 1.0, "other"), side(100, 1.0)),
    ]
    found = summary(pairs)
    overhead = found["overhead"]
    assert overhead["median"] == pytest.approx(0.1)
    assert (overhead["least"], overhead["most"]) == (pytest.approx(0.03), pytest.approx(0.2))
    assert overhead["together"] == pytest.approx(1 - (287 / 3.25) / 100, abs=1e-4)
    low, high = overhead["interval"]
    assert low < overhead["together"] < high
    assert found["texts_that_differ"] == 1
    assert found["cpu_us_per_token"]["client"] == pytest.approx(1e6 * 0.3 / 287, abs=0.1)


def response(*events: str, pieces: int = 1) -> bytes:
    """A chunked response; every event is cut into so many chunks."""
    chunks = []
    for event in events:
        data = f"data: {event}\n\n".encode()
        size = -(-len(data) // pieces)
        chunks += [data[start : start + size] for start in range(0, len(data), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_stream_is_read_whole(pieces: int) -> None:
    events = (
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a\\r\\n"}}]}',
        '{"choices": [{"delta": {"content": "ü"}}]}',
        '{"choices": [], "usage": {"completion_tokens": 7}}',
    )
    assert read_answer(response(*events, "[DONE]", pieces=pieces)) == ("a\r\nü", 7, 4)
    with pytest.raises(RuntimeError, match="broke off"):
        read_answer(response(*events, pieces=pieces))
