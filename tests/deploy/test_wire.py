"""What is sent arrives as it was."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from slipstream import RequestOptions, SamplingParams
from slipstream.deploy.wire import request_from_json, request_to_json


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
    sent = json.loads(json.dumps(request_to_json([1, 2, 3], params, options)))
    prompt, arrived, arrived_options = request_from_json(sent)
    assert (prompt, arrived, arrived_options) == ([1, 2, 3], params, options)


def test_json_keeps_the_bits_of_numbers() -> None:
    for value in (-math.inf, 0.1, -1e-300, 3.4028234663852886e38):
        assert json.loads(json.dumps(value)) == value
