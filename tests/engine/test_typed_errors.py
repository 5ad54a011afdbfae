"""Whatever a caller passes, the answer is one line that says what was wrong, of the right type."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.errors import ConfigError, RequestError, SlipstreamError

WRONG_OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"kv_memory_fraction": value}, "kv_memory_fraction") for value in ("0.3", None, True, 0, -1, 1.5)),
    *(({"seed": value}, "seed") for value in ("a", -1, 1.5, True)),
    *(({"enable_prefix_caching": value}, "enable_prefix_caching") for value in ("no", 1)),
    *(({"max_num_seqs": value}, "max_num_seqs") for value in ("3", 2.0, True)),
    *(({"max_model_len": value}, "max_model_len") for value in ("100", 0, 1.5)),
    *(({"kv_cache_bytes": value}, "kv_cache_bytes") for value in ("1G", 0, 1e6)),
    *(({"dtype": value}, "dtype") for value in (None, 32, ["float32"])),
    *(({"tokenizer": value}, "tokenizer") for value in (5, b"x")),
    ({"model": 5}, "model"),
    ({"trust_remote_code": "yes"}, "trust_remote_code"),
    ({"num_threads": "2"}, "num_threads"),
]

WRONG_SPECULATION: list[tuple[Any, str]] = [
    ("ngram", "speculative_config"),
    (5, "speculative_config"),
    (["ngram"], "speculative_config"),
    ({}, "method"),
    ({"method": 3}, "method"),
    ({"method": None}, "method"),
    ({"method": ["ngram"]}, "method"),
    ({"method": ""}, "drafter"),
    ({"method": "ngram", "verifier": None}, "verifier"),
    ({"method": "ngram", "verifier": 1}, "verifier"),
    ({"method": "ngram", "verifier": ["block"]}, "verifier"),
    ({"method": "no.such.module:Class"}, "no.such.module"),
    ({"method": "slipstream.draft.lookup.ngram:NgramIndex"}, "NgramIndex"),
    *(
        ({**spec, "num_speculative_tokens": value}, "num_speculative_tokens")
        for spec in (
            {"method": "ngram"},
            {"method": "suffix"},
            {"method": "draft_model", "model": EMBEDDED_DRAFT},
        )
        for value in ("4", 0, -1, 2.5, True, None)
    ),
    *(({"method": "ngram", name: "2"}, name) for name in ("prompt_lookup_min", "prompt_lookup_max")),
    ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_min"),
    *(
        ({"method": "suffix", name: value}, name)
        for name, value in (
            ("tree", "yes"),
            ("tree", 1),
            ("num_draft_nodes", "8"),
            ("num_draft_nodes", 0),
            ("suffix_decoding_max_tree_depth", None),
            ("suffix_decoding_max_cached_requests", -1),
            ("suffix_decoding_max_spec_factor", "1"),
            ("suffix_decoding_max_spec_factor", float("nan")),
            ("suffix_decoding_min_token_prob", 1.5),
            ("suffix_decoding_min_token_prob", True),
            ("suffix_decoding_cache_file", 5),
        )
    ),
    *(
        ({"method": "draft_model", "model": EMBEDDED_DRAFT, name: value}, name)
        for name, value in (
            ("tree_top_k", "3"),
            ("tree_top_k", 0),
            ("num_draft_nodes", "8"),
            ("num_draft_nodes", 5),
            ("draft_sample_method", None),
            ("draft_sample_method", "gready"),
            ("dtype", 16),
            ("dtype", "float8"),
            ("device", 0),
            ("revision", 1),
        )
    ),
    ({"method": "suffix", "suffix_decoding_cache_file": "/no/such/file"}, "/no/such/file"),
    ({"method": "draft_model", "model": None}, "model"),
    ({"method": "draft_model", "model": 5}, "model"),
]

WRONG_REQUESTS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    *(((prompt,), {}, "prompt") for prompt in (None, 5, 5.0, b"x", {"a": 1}, [None], [[None]], ["x", 5])),
    *(((prompt,), {}, "prompt") for prompt in ([5, "x"], [True], [[True]], [[1, 2.0]])),
    (("x", {"temperature": 0}), {}, "SamplingParams"),
    (("x", "greedy"), {}, "sampling parameters"),
    (("x", 5), {}, "parameters"),
    (("x", [{"temperature": 0}]), {}, "SamplingParams"),
    (("x", [None, None]), {}, "2 sampling parameters for 1"),
    (("x",), {"tenant": 5}, "tenant"),
    (("x",), {"tenant": None}, "tenant"),
    *((("x",), {"task": value}, "task") for value in (5, None, ["a", "b"], [5])),
    *((("x",), {"max_draft_tokens": value}, "max_draft_tokens") for value in ("3", -1, 1.5, True)),
]


def one_line(error: BaseException, says: str) -> None:
    assert "\n" not in str(error)
    assert says in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(("options", "says"), WRONG_OPTIONS, ids=str)
def test_engine_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**options)
    one_line(caught.value, says)


@pytest.mark.parametrize(("speculation", "says"), WRONG_SPECULATION, ids=str)
def test_speculation(speculation: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(speculative_config=speculation)
    one_line(caught.value, says)


@pytest.mark.parametrize(("arguments", "keywords", "says"), WRONG_REQUESTS, ids=str)
def test_requests(plain: LLM, arguments: tuple[Any, ...], keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        plain.generate(*arguments, **keywords)
    one_line(caught.value, says)
    assert not plain.engine.has_unfinished
    assert plain.engine.integrity() == []


@pytest.mark.parametrize(
    "conversation",
    [
        None,
        5,
        [],
        [[]],
        [[{"role": "user", "content": "x"}], None],
        "hello",
        ["hello"],
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
    ],
    ids=str,
)
def test_conversations(plain: LLM, conversation: Any) -> None:
    with pytest.raises(SlipstreamError) as caught:
        plain.chat(conversation, SamplingParams(max_tokens=1))
    assert isinstance(caught.value, RequestError)
    assert "\n" not in str(caught.value)
    assert plain.engine.integrity() == []
