"""Sampling parameters: what is refused, in which words, and what is normalised."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slipstream.errors import RequestError
from slipstream.sampling.params import RequestOutputKind, SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.sampling.structured_outputs import StructuredOutputsParams

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "1", None, [1]]

BAD: list[tuple[str, Any]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in [*NOT_NUMBERS, -0.1]),
    *(
        (name, value)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for value in NOT_NUMBERS
    ),
    *((name, value) for name in ("n", "max_tokens") for value in (0, -1, 1.0, True, "2")),
    ("n", None),
    *((name, value) for name in ("min_tokens",) for value in (-1, 0.5, False, None)),
    *((name, value) for name in ("top_k",) for value in (-2, 1.5, True, None)),
    *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5, True, "1")),
    *((name, value) for name in ("seed",) for value in (-2, -1.0, 2**63, 1.0, True, "7")),
    *((name, value) for name in ("ignore_eos", "include_stop_str_in_output") for value in (1, None, "yes")),
    ("skip_special_tokens", 0),
    ("temperature", 1e-6),
    ("temperature", 1.1e6),
    ("temperature", 1e39),
    pytest.param("temperature", 10**5000, id="temperature-huge"),
    pytest.param("n", 10**5000, id="n-huge"),
    ("n", 16385),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", 9e-5),
    ("repetition_penalty", 1.1e4),
    ("repetition_penalty", 1e39),
    pytest.param("stop", ["a"] * 257, id="stop-many"),
    pytest.param("stop", ["a" * 8192, "b" * 8193], id="stop-long"),
    pytest.param("bad_words", ["a"] * 4097, id="bad_words-many"),
    pytest.param("bad_words", ["a" * 257], id="bad_words-long"),
    pytest.param("bad_words", ["a" * 256] * 257, id="bad_words-all"),
    ("stop", "a\ud800"),
    ("bad_words", ["fine", "\udfff"]),
    ("top_p", 0),
    ("top_p", 1.01),
    ("min_p", 1.01),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("min_tokens", 17),
    ("detokenize", 1),
    ("output_kind", 2),
    ("extra_args", [1]),
    ("structured_outputs", "json"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", b"a"),
    ("bad_words", [""]),
    ("bad_words", [3]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [1.0]),
    ("stop_token_ids", "12"),
    ("stop_token_ids", 5),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [True]),
    ("logit_bias", [1, 2]),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {1: "2"}),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_value_is_refused_in_one_line_that_names_it(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert name in message
    assert "\n" not in message
    assert any(word in message for word in ("must", "omit it"))
    assert len(message) < 250
    message.encode()


GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1e-5},
    {"top_k": -1, "top_p": 1, "min_p": 1},
    {"temperature": 1e6, "repetition_penalty": 1e4, "n": 16384},
    {"stop": ["a" * 8192, "b" * 8192], "bad_words": ["a" * 256] * 256},
    {"stop": ["👍" * 200], "bad_words": "naïve"},
    {"repetition_penalty": 0.1, "presence_penalty": -2, "frequency_penalty": 2},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"logprobs": 0, "prompt_logprobs": 5},
    {"logprobs": -1, "prompt_logprobs": -1, "max_tokens": None, "min_tokens": 300},
    {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY, "extra_args": {"mine": 1}},
    {"structured_outputs": {"regex": "a+"}},
    {"min_tokens": 3, "max_tokens": 3},
    {"stop": "end", "bad_words": ["no"], "stop_token_ids": [3], "allowed_token_ids": [0]},
    {"logit_bias": {0: -100, 5: 100}},
    {"stop": None, "bad_words": None, "stop_token_ids": None},
    {"n": np.int64(2), "temperature": np.float32(0.5)},
]


@pytest.mark.parametrize("values", GOOD)
def test_good_values_survive_copies(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert SamplingParams.from_mapping(values) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert dataclasses.replace(params, n=3).n == 3


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.skip_special_tokens
    assert not params.greedy
    assert SamplingParams(temperature=0).greedy


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], temperature=1, logit_bias={3: 1})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert isinstance(params.temperature, float)
    assert params.logit_bias == {3: 1.0}
    assert SamplingParams(stop_token_ids=[7, 1, 7, np.int64(1)]).stop_token_ids == (7, 1)


def test_a_set_attribute_is_checked_like_an_argument() -> None:
    """vLLM's scripts take the default parameters and change them."""
    params = SamplingParams(stop="end")
    params.max_tokens, params.stop, params.temperature = 5, "over", 1  # type: ignore[assignment]
    assert params == SamplingParams(max_tokens=5, stop=["over"], temperature=1.0)
    for name, value, told in (
        ("n", 0, "n must be"),
        ("min_tokens", 6, "min_tokens"),
        ("max_token", 3, "max_tokens"),
    ):
        with pytest.raises(RequestError, match=told):
            setattr(params, name, value)
    assert params == SamplingParams(max_tokens=5, stop=["over"], temperature=1.0)


def test_a_clone_is_its_own() -> None:
    params = SamplingParams(logit_bias={3: 1.0}, extra_args={"mine": 1})
    other = params.clone()
    assert other == params
    other.n, other.logit_bias[3] = 2, 5.0  # type: ignore[index]
    assert (params.n, params.logit_bias) == (1, {3: 1.0})


def test_structured_outputs_are_vllms_words_for_structured() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}))
    assert params.structured == StructuredOutput(json_schema={"type": "object"})
    params.structured_outputs = {"choice": ["a", "b"]}
    assert params.structured == StructuredOutput(choice=["a", "b"])
    assert dataclasses.replace(params, structured=None).structured is None
    params.structured = {"regex": "a"}
    assert params.structured == StructuredOutput(regex="a")
    with pytest.raises(RequestError, match="structured and structured_outputs differ"):
        SamplingParams(structured={"regex": "a"}, structured_outputs={"regex": "b"})
    for values, told in (
        ({"json": "{}", "regex": "a"}, "got json and regex"),
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none of them"),
        ({"json": False}, "allows nothing"),
        ({"regex": "a", "whitespace_pattern": " "}, "disable_any_whitespace"),
        ({"regx": "a"}, "did you mean 'regex'"),
        ({"grammar": "root ::= ("}, "neither Lark nor GBNF"),
    ):
        with pytest.raises(RequestError, match=told):
            StructuredOutputsParams(**values)  # type: ignore[arg-type]


def test_vllms_names_are_taken_at_the_value_that_asks_for_nothing() -> None:
    assert SamplingParams(best_of=1, use_beam_search=False, logits_processors=None) == SamplingParams()  # type: ignore[call-arg]
    for values, told in (
        ({"best_of": 2}, "best_of=2 is vLLM's and is not available here; ask for n answers"),
        ({"logits_processors": [len]}, "logit_bias"),
        ({"stop": "a", "detokenize": False}, "stop needs detokenize"),
    ):
        with pytest.raises(RequestError, match=told):
            SamplingParams(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [lambda values: SamplingParams(**values), SamplingParams.from_mapping])
def test_unknown_name_gets_the_nearest_valid_one(make: Callable[[dict[str, Any]], SamplingParams]) -> None:
    with pytest.raises(RequestError, match=r"'temprature'; did you mean 'temperature'"):
        make({"temprature": 1})


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("max_draft_tokens", 0, r"a field of RequestOptions and of request bodies \(max_draft_tokens=…\)"),
        ("tenant", "a", "a keyword of generate and chat"),
        ("max_model_len", 64, r"it belongs to the engine, as in LLM\(max_model_len=…\)"),
        ("num_speculative_tokens", 2, r'LLM\(speculative_config=\{"num_speculative_tokens": …\}\)'),
    ],
)
def test_a_name_that_belongs_elsewhere_says_where(name: str, value: Any, place: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} is no sampling parameter: .*{place}"):
        SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=place):
        setattr(SamplingParams(), name, value)


def test_from_mapping() -> None:
    assert SamplingParams.from_mapping({"logit_bias": {"12": 1.5}}).logit_bias == {12: 1.5}
    with pytest.raises(RequestError, match="must be an object"):
        SamplingParams.from_mapping([1])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_mapping({"logit_bias": {"x": 1.5}})


@pytest.mark.parametrize(
    "values",
    [{"allowed_token_ids": [5, 10]}, {"logit_bias": {10: 1}}, {"stop_token_ids": [10]}, {"logprobs": 11}],
)
def test_what_only_the_vocabulary_shows(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    params.check_vocabulary(11)
    with pytest.raises(RequestError, match=next(iter(values))):
        params.check_vocabulary(10)
