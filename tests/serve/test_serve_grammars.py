"""Grammars are compiled beside the engine, bounded, and no more than once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from serve_cases import QUESTION, MakeApp, running, wait_until
from starlette.testclient import TestClient

from slipstream import LLM
from slipstream.sampling.grammars.compiler import MAX_SOURCE_BYTES, GrammarCompiler
from slipstream.sampling.grammars.footprint import heap_bytes
from slipstream.serve.api.constraints import MAX_GRAMMAR_BYTES

LONG = {"prompt": QUESTION, "max_tokens": 1500, "ignore_eos": True, "stream": True}


def ask(client: TestClient, **structured: Any) -> Any:
    return client.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 2, "structured_outputs": structured}
    )


def test_a_grammar_that_takes_long_holds_up_no_stream(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = GrammarCompiler._compile
    compiling, may_end = threading.Event(), threading.Event()

    def slow(self: GrammarCompiler, structured: Any, tried_bytes: int | None) -> Any:
        compiling.set()
        assert may_end.wait(120)
        return compile_(self, structured, tried_bytes)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    with running(make_app()) as (url, _), ThreadPoolExecutor(1) as pool:
        with httpx2.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as stream:
            chunks = stream.iter_lines()
            next(chunks)
            body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": "slow[0-9]"}}
            bound = pool.submit(httpx2.post, f"{url}/v1/completions", json=body, timeout=120)
            assert compiling.wait(120)
            for _ in range(40):
                next(chunks)
            assert not bound.done(), "the stream went on while the grammar was compiled"
            may_end.set()
        assert bound.result().status_code == 200
    wait_until(lambda: not drafting.engine.has_unfinished)


def test_what_was_refused_is_not_compiled_again(shared: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    try_ = GrammarCompiler._try

    def counted(self: GrammarCompiler, structured: Any) -> Any:
        compiled.append(structured.regex)
        return try_(self, structured)

    monkeypatch.setattr(GrammarCompiler, "_try", counted)
    answers = [ask(shared, regex="never-closed-(") for _ in range(3)]
    assert compiled == ["never-closed-("]
    assert [answer.status_code for answer in answers] == [400] * 3
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize(
    ("structured", "limit"),
    [
        ({"choice": ["x" * 1000] * (MAX_SOURCE_BYTES // 1000 + 1)}, MAX_SOURCE_BYTES),
        ({"regex": "x" * (MAX_SOURCE_BYTES + 1)}, MAX_SOURCE_BYTES),
        ({"json": {"const": "é" * (MAX_SOURCE_BYTES // 2)}}, MAX_SOURCE_BYTES),
        ({"grammar": 'start: "' + "x" * MAX_GRAMMAR_BYTES + '"'}, MAX_GRAMMAR_BYTES),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_too_large_is_refused_with_the_limit(
    shared: TestClient, structured: dict[str, Any], limit: int
) -> None:
    answer = ask(shared, **structured)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert f"at most {limit:,} are allowed" in answer.json()["error"]["message"]


def test_a_long_chain_of_rules_does_not_end_the_process(shared: TestClient) -> None:
    """llguidance calls itself for every rule; in a thread with the usual stack this is a segmentation fault."""
    rules = [f"a{i:x}:a{i + 1:x}" for i in range(2700)]
    assert ask(shared, grammar="\n".join(["start:a0", *rules, f'a{2700:x}:"yes"'])).status_code == 200
    schemas = {f"{i:x}": {"$ref": f"#/$defs/{i + 1:x}"} for i in range(3500)}
    assert ask(shared, json={"$defs": schemas | {f"{3500:x}": True}, "$ref": "#/$defs/0"}).status_code == 200


def test_small_hostile_expressions_are_refused_and_take_nothing(shared: TestClient) -> None:
    """Each took some 165 MB and was answered with 200: the 34th ended a server of 6 GB."""
    assert ask(shared, regex="[a-c]+").status_code == 200
    before = heap_bytes()
    for letter in "abc":
        refused = ask(shared, regex=f"({letter}{{1000}}){{1000}}")
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "structured_outputs"
        assert "regex cannot be used: lexer error: too many" in refused.json()["error"]["message"]
    assert heap_bytes() - before < 8 * 2**20
    assert ask(shared, regex="[a-d]+").status_code == 200
