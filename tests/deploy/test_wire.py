"""What is sent arrives as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest

from slipstream import RequestOptions, SamplingParams
from slipstream.deploy.protocol import CODEC, BeginRequest, QueueShare
from slipstream.rpc.frames import LENGTH_BYTES
from slipstream.serve.process.answers import params_in, params_out


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": None, "seed": 2**63 - 1, "temperature": 0.1 + 0.2, "min_p": 1 / 3},
        {"logit_bias": {5: -1.5, 7: 100.0}, "allowed_token_ids": [5, 7], "stop_token_ids": [7]},
        {"stop": ["a", "\u2028é"], "include_stop_str_in_output": True, "bad_words": ["x y"]},
        {"structured": {"json_schema": {"type": "object"}, "compact": True}},
        {"structured": {"choice": ["yes", "no"]}, "n": 3, "logprobs": 0, "prompt_logprobs": 2},
        {"detokenize": False, "ignore_eos": True, "min_tokens": 4, "max_tokens": 9, "top_k": -1},
    ],
)
def test_a_request_arrives_as_it_was(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    options = RequestOptions(tenant="a/b", task="sql", max_draft_tokens=3)
    sent = BeginRequest("mine", 1, [1, 2, 3], params_out(params), options)
    arrived = CODEC.read(CODEC.frame(sent)[LENGTH_BYTES:])
    assert isinstance(arrived, BeginRequest)
    assert (arrived.token_ids, params_in(arrived.params), arrived.options) == ([1, 2, 3], params, options)


def test_numbers_keep_their_bits() -> None:
    for value in (-math.inf, 0.1, -1e-300, 3.4028234663852886e38):
        sent = QueueShare(value, by_account=True)
        assert CODEC.read(CODEC.frame(sent)[LENGTH_BYTES:]) == sent
