"""Prometheus text to rates, and what client and server say differently."""

from __future__ import annotations

import dataclasses

import pytest

from slipstream.errors import RemoteError
from slipstream.tools.bench.server.counters import (
    ClientCounts,
    Counters,
    disagreements,
    growth,
    parse_counters,
)

TEXT = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="other"} 900.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 45.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 18.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 0.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 40.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 2.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
"""


def test_a_worked_reading() -> None:
    counters = parse_counters(TEXT, "m")
    assert counters == Counters(15, 45, 18, 40, None, 5, [12, 6, 0])
    a = counters.acceptance
    assert a is not None
    assert a.rate == pytest.approx(18 / 45)
    assert a.length == pytest.approx(1 + 18 / 15)
    assert a.conditional == pytest.approx([12 / 15, 6 / 12, 0.0])
    assert a.num_wasted_tokens == 27


def test_our_own_prefix_comes_first() -> None:
    both = TEXT + TEXT.replace("vllm:", "slipstream_").replace(" 45.0", " 46.0")
    counters = parse_counters(both, "m")
    assert counters is not None
    assert counters.num_draft_tokens == 46


def test_nothing_known_and_nothing_readable() -> None:
    assert parse_counters("", "m") is None
    assert parse_counters("# TYPE up gauge\nup 1\n", "m") is None
    with pytest.raises(RemoteError, match="not in Prometheus' text form"):
        parse_counters("<html>not metrics</html>", "m")


def test_growth() -> None:
    before, after = Counters(10, 30, 12, 100, None, 4, [8]), Counters(15, 45, 18, 140, 9, 6, [12, 6])
    assert growth(before, after) == Counters(5, 15, 6, 40, 9, 2, [4, 6])
    assert growth(after, before) is None
    assert growth(Counters(accepted_per_position=[5]), Counters(accepted_per_position=[4])) is None


def test_no_drafts_no_rates() -> None:
    assert Counters().acceptance is None
    assert Counters(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0).acceptance is None
    never = Counters(5, 10, 0, 5, None, None, [0, 0]).acceptance
    assert never is not None
    assert (never.rate, never.length, never.conditional) == (0.0, 1.0, [0.0])  # position 2 was never reached


def test_a_position_of_deeper_drafts_before_is_not_shown() -> None:
    """Three drafts of two tokens; an earlier load had drafts of four."""
    before, after = Counters(10, 40, 30, accepted_per_position=[9, 8, 7, 6]), Counters(13, 46, 35)
    grown = growth(before, dataclasses.replace(after, accepted_per_position=[12, 10, 7, 6]))
    assert grown is not None
    assert grown.acceptance is not None
    assert grown.acceptance.conditional == pytest.approx([3 / 3, 2 / 3])


def test_agreement_is_silent() -> None:
    client = ClientCounts(
        num_requests=5, num_failed=0, num_prompt_tokens=7, num_output_tokens=40, num_chunks=20
    )
    assert disagreements(client, None) == []
    assert disagreements(client, Counters(num_output_tokens=40, num_prompt_tokens=7, num_requests=5)) == []
    assert disagreements(client, Counters()) == []
    cut = Counters(num_drafts=10, num_accepted_tokens=35, num_output_tokens=40, num_requests=5)
    assert disagreements(client, cut) == []  # every answer may end among accepted tokens


def test_disagreements_name_the_numbers_and_a_cause() -> None:
    client = ClientCounts(
        num_requests=5, num_failed=2, num_prompt_tokens=None, num_output_tokens=40, num_chunks=41
    )
    found = disagreements(
        client,
        Counters(
            num_drafts=20, num_accepted_tokens=35, num_output_tokens=50, num_prompt_tokens=9, num_requests=4
        ),
    )
    chunks, tokens, requests, overrun = found
    assert "41 pieces of text were streamed, but usage counts only 40" in chunks
    assert "counted 40 output tokens, the server 50 (+25.0%)" in tokens
    assert "the 2 requests that failed here" in tokens
    assert "counted 5 finished requests, the server 4 (-20.0%)" in requests
    assert "which makes 55 tokens, but only 50 generated" in overrun
