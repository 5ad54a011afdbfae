"""The messages between the server's process and the engine's, and the queues before them."""

from __future__ import annotations

import math
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.metrics.decoded import DecodedRow
from slipstream.core.metrics.step import StepReport
from slipstream.core.request import EmittedTokens, RequestOptions, TokenLogprob
from slipstream.errors import ProtocolError, RequestError
from slipstream.rpc.codec import error_in, error_out
from slipstream.rpc.sockets import Outbox
from slipstream.sampling.params import SamplingParams
from slipstream.serve.process.answers import AnswerUpdate, params_in, params_out
from slipstream.serve.process.protocol import (
    CODEC,
    VERSION,
    CancelRequest,
    EngineMessage,
    Hello,
    Read,
    Steps,
    Submit,
    check_version,
    steps_of,
)

TOKENS = st.lists(st.integers(0, 2**20), max_size=6)
SUBMITS = st.builds(
    Submit,
    st.integers(1, 2**40),
    st.text(max_size=8),
    TOKENS,
    st.lists(TOKENS, max_size=2),
    st.fixed_dictionaries(
        {"temperature": st.floats(0, 2), "logit_bias": st.dictionaries(st.integers(0, 9), st.floats(-1, 1))}
    ),
    st.builds(RequestOptions, tenant=st.text("abc/", max_size=4)),
    st.none() | st.integers(-1, 2**30),
    st.lists(st.builds(EmittedTokens, TOKENS, st.just([]), st.just([])), max_size=3),
)
TO_ENGINE = st.one_of(
    SUBMITS,
    st.builds(CancelRequest, st.integers(1, 2**40), st.booleans()),
    st.builds(Read, st.integers(1, 2**40)),
)
LOGPROBS = st.builds(
    TokenLogprob, st.integers(0, 9), st.floats(allow_nan=False), st.integers(1, 2**40), st.just(((3, -0.5),))
)
UPDATES = st.builds(
    AnswerUpdate,
    st.integers(0, 3),
    TOKENS,
    st.lists(st.booleans(), max_size=6),
    st.lists(st.tuples(st.text(max_size=4), st.booleans()), max_size=3),
    st.none() | st.lists(LOGPROBS, max_size=2),
)


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of these sizes, the rest in one."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return [*pieces, data[start:]]


@settings(max_examples=60, deadline=None)
@given(st.lists(TO_ENGINE, max_size=5), st.lists(st.integers(0, 40), max_size=12))
def test_messages_come_as_they_were_sent_however_the_stream_is_cut(
    sent: list[EngineMessage], sizes: list[int]
) -> None:
    frames = CODEC.frames()
    data = b"".join(map(CODEC.frame, sent))
    got = [CODEC.read(body) for piece in cut(data, sizes) for body in frames.add(piece)]
    assert got == sent
    assert frames.num_bytes == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(UPDATES, max_size=4), st.lists(st.integers(0, 3), max_size=3))
def test_steps_keep_their_rows_apart(updates: list[AnswerUpdate], lengths: list[int]) -> None:
    reports = [StepReport(length, length, 9, 0, 0, 0.0, 0.5) for length in lengths]
    rows = [DecodedRow("a/t", "t", "off", number, 0, 0, 0, 0) for number in range(sum(lengths))]
    sent = Steps(reports, rows, lengths, list(enumerate(updates)))
    got = CODEC.read(CODEC.frame(sent)[4:])
    assert got == sent
    assert isinstance(got, Steps)
    told = list(steps_of(got))
    assert [len(mine) for _, mine in told] == lengths
    assert [row for _, mine in told for row in mine] == rows


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_what_is_no_message_is_said_in_one_line(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^a message of the other process cannot be read: [^\n]*$"):
        CODEC.read(b"\x00" + data)


def test_a_length_that_no_message_has_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(ProtocolError, match="no message of Slipstream's"):
        list(CODEC.frames().add((CODEC.max_bytes + 1).to_bytes(4, "big")))


def test_the_first_message_tells_versions_apart_for_ever() -> None:
    """A later version may say more in it, and may say it in other messages."""
    later = msgspec.msgpack.encode(["hello", VERSION + 1, "9.9", {"more": True}])
    with pytest.raises(
        ProtocolError, match=rf"speaks version {VERSION + 1} .* \(Slipstream 9.9\), this one version"
    ):
        check_version(CODEC.read(later), "0.1")
    with pytest.raises(ProtocolError, match="began with Read"):
        check_version(Read(1), "0.1")
    check_version(Hello(VERSION, "another release"), "0.1")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "max_tokens": None, "stop": ["a", "b"], "seed": 2**63 - 1},
        {
            "logit_bias": {3: 1.5},
            "n": 3,
            "stop_token_ids": [5],
            "allowed_token_ids": [1, 2],
            "bad_words": ["x"],
        },
        {"structured": {"json_schema": {"type": "object"}, "compact": True}, "logprobs": 0},
        {"structured": {"choice": ["yes", "no"]}, "ignore_eos": True, "detokenize": False},
        {"temperature": 0.1 + 0.2, "min_p": 1 / 3, "top_k": -1, "min_tokens": 4, "max_tokens": 9},
        {"stop": ["a", "\u2028é"], "include_stop_str_in_output": True, "prompt_logprobs": 2},
    ],
)
def test_parameters_arrive_as_they_were(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    options = RequestOptions(tenant="a/b", task="sql", max_draft_tokens=3)
    sent = Submit(1, "r", [1], [], params_out(params), options)
    got = CODEC.read(CODEC.frame(sent)[4:])
    assert isinstance(got, Submit)
    assert (params_in(got.params), got.options) == (params, options)


def test_numbers_keep_their_bits() -> None:
    for value in (-math.inf, 0.1, -1e-300, 3.4028234663852886e38):
        update = AnswerUpdate(0, [1], [False], logprobs=[TokenLogprob(1, value, 1)])
        sent = Steps([], [], [], [(1, update)])
        assert CODEC.read(CODEC.frame(sent)[4:]) == sent


def test_errors_keep_their_kind() -> None:
    told = error_in(*error_out(RequestError("too long")))
    assert (type(told), str(told)) == (RequestError, "too long")
    assert type(error_in(*error_out(KeyError("x")))) is RuntimeError
    assert type(error_in("SystemExit", "no error of ours")) is RuntimeError
    with pytest.raises(RequestError, match="did you mean"):
        params_in({"temprature": 1})


def test_an_outbox_is_bounded_and_keeps_the_order() -> None:
    mine, other = socket.socketpair()
    with mine, other:
        mine.setblocking(False)
        outbox = Outbox(mine, 2**20)
        sent = bytearray()
        for number in range(400):
            if outbox.is_full:
                break
            sent += (part := bytes([number % 251]) * 10_000)
            outbox.put(part)
        assert outbox.is_full
        assert 2**20 <= outbox.num_bytes < 2**20 + 10_000
        got = bytearray()
        while len(got) < len(sent):
            got += other.recv(2**16)
            outbox.flush()
        assert got == sent
        assert not outbox.num_bytes
        other.close()
        with pytest.raises(OSError, match="Broken pipe"):
            outbox.put(b"nobody reads it")
