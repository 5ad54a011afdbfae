"""Calls of tools as text: every format is written, held to by its grammar, and read again, however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import AddedToken, AutoTokenizer

from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ConfigError
from slipstream.sampling.grammars.compiler import GrammarCompiler, check_followed
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.serve.api.schema import ChatBody
from slipstream.serve.tools.calls import ID_LENGTH, CallReader
from slipstream.serve.tools.formats import DEFAULT, FORMATS, ToolFormat, shows_tools, tool_format
from slipstream.serve.tools.tools import ToolUse, tool_use

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
                "additionalProperties": False,
            },
        },
    }
    for name, key in (("get", "city"), ("get_all", "tag"))
]
CALLS = [("get", '{"city": "}\\"]{[ Ä\\\\"}'), ("get_all", '{"tag": ""}')]
TRAPS = ("<tool", "{", '{"name"', "[TOOL_", "a [TOOL_CALLS", "1 < 2")

BY_NAME = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


def use(form: ToolFormat, **values: Any) -> ToolUse:
    body = ChatBody.model_validate({"messages": [], "tools": TOOLS, **values})
    found = tool_use(body, form)
    assert found is not None
    return found


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]], CallReader]:
    """Text and calls, put together from a stream's parts as a client does it."""
    reader, text, calls = CallReader(form), "", dict[int, list[str]]()
    for number, piece in enumerate(pieces):
        content, parts = reader.feed(piece, last=number == len(pieces) - 1)
        text += content
        for part in parts:
            function = part["function"]
            if part["index"] not in calls:
                assert part["type"] == "function"
                assert len(part["id"]) == ID_LENGTH
                calls[part["index"]] = [function["name"], ""]
            else:
                assert part.keys() == {"index", "function"}
                assert function.keys() == {"arguments"}
            calls[part["index"]][1] += function["arguments"]
    assert list(calls) == list(range(len(calls)))
    return text, [(name, arguments) for name, arguments in calls.values()], reader


@BY_NAME
def test_calls_are_read_however_the_text_is_cut(form: ToolFormat) -> None:
    calls = CALLS if form.between is not None else CALLS[:1]
    before = "Let me see < {.\n" if form.anywhere else ""
    whole = before + form.written(calls)
    expected = (before, calls)
    draw = random.Random(5)
    cuts = [[*whole], [whole]] + [[whole[:cut], whole[cut:]] for cut in range(len(whole))]
    for _ in range(30):
        places = sorted(draw.sample(range(len(whole)), 4))
        cuts.append([whole[i:j] for i, j in zip([0, *places], [*places, len(whole)], strict=True)])
    for pieces in cuts:
        text, found, reader = read(form, pieces)
        assert (text, found) == expected
        assert [(call.name, call.arguments) for call in reader.calls] == calls
        assert len({call.id for call in reader.calls}) == len(calls)


@BY_NAME
@pytest.mark.parametrize("text", ["", "No call.", *TRAPS, *("Text " + trap for trap in TRAPS)])
def test_free_text_stays_text(form: ToolFormat, text: str) -> None:
    for pieces in ([*text] or [""], [text]):
        assert read(form, pieces)[:2] == (text, [])


@BY_NAME
def test_an_answer_that_is_cut_off_tells_what_it_has(form: ToolFormat) -> None:
    whole = form.written(CALLS[:1])
    begin = whole.index('{"city"')
    for length in range(len(form.mark), len(whole)):
        text, calls, _ = read(form, [*whole[:length]])
        assert text == ""
        if length < begin:
            assert calls == []
        else:
            assert calls == [("get", whole[begin : min(length, begin + len(CALLS[0][1]))])]


@pytest.fixture(scope="module")
def spelled() -> Any:
    """A tokenizer that has no tokens of its own for any format."""
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


@pytest.fixture(scope="module")
def marked() -> Any:
    """One that has: some are special, as Mistral's, some are not, as Qwen's."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    plain = ["<tool_call>", "</tool_call>", "<think>"]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    tokenizer.add_tokens(["[TOOL_CALLS]", "[ARGS]"], special_tokens=True)
    return tokenizer


def compiled(tokenizer: Any, found: ToolUse, answer_schema: str | None = None) -> Grammar:
    structured = found.grammar(tokenizer.get_added_vocab(), answer_schema)
    check_followed(structured)
    return GrammarCompiler(tokenizer, len(tokenizer), [1]).compile(structured, {1})


def follows(grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Whether the grammar lets `text` be said, up to its end or on."""
    output = tokenizer(text, add_special_tokens=False).input_ids
    return all(grammar.mask(output[:n]) >> token & 1 for n, token in enumerate(output))


def may_end(grammar: Grammar, tokenizer: Any, text: str) -> bool:
    output = tokenizer(text, add_special_tokens=False).input_ids
    return follows(grammar, tokenizer, text) and bool(grammar.mask(output) >> 1 & 1)


@BY_NAME
@pytest.mark.parametrize("tokens", ["spelled", "marked"])
def test_grammars_allow_right_calls_only(
    request: pytest.FixtureRequest, form: ToolFormat, tokens: str
) -> None:
    tokenizer = request.getfixturevalue(tokens)
    one, two = form.written(CALLS[:1]), form.written(CALLS)
    wrong = [
        form.written([("got", '{"city": ""}')]),
        form.written([("get", '{"tag": ""}')]),
        form.written([("get_all", '{"city": ""}')]),
        form.written([("get", "{}")]),
    ]
    auto = compiled(tokenizer, use(form))
    required = compiled(tokenizer, use(form, tool_choice="required"))
    single = compiled(tokenizer, use(form, tool_choice="required", parallel_tool_calls=False))
    named = {"type": "function", "function": {"name": "get"}}
    forced = compiled(tokenizer, use(form, tool_choice=named))
    for grammar in (auto, required, single, forced):
        assert may_end(grammar, tokenizer, one)
        assert not any(follows(grammar, tokenizer, text) for text in wrong)
    if form.between is not None:
        assert may_end(auto, tokenizer, two)
        assert may_end(required, tokenizer, two)
    assert not follows(single, tokenizer, two)
    assert not follows(forced, tokenizer, form.written(CALLS[1:]))
    for text in ("", "Hello", "<tool", "{"):
        assert may_end(auto, tokenizer, text)
        for grammar in (required, single, forced):
            assert not may_end(grammar, tokenizer, text)
    assert may_end(auto, tokenizer, "Hello " + one)
    for number in range(1, len(tokenizer(one, add_special_tokens=False).input_ids)):
        output = tokenizer(one, add_special_tokens=False).input_ids[:number]
        inside = form.mark in tokenizer.decode(output)
        assert bool(auto.mask(output) >> 1 & 1) is not inside, "a call that has begun ends as a call"


def test_other_added_tokens_stay_free_text(marked: Any) -> None:
    auto = compiled(marked, use(DEFAULT))
    assert may_end(auto, marked, "<think>Hm, [TOOL_CALLS] or not?")
    assert may_end(auto, marked, "<think>Hm.\n\n" + DEFAULT.written(CALLS))


def test_an_answer_under_a_schema_or_a_call(spelled: Any) -> None:
    grammar = compiled(spelled, use(DEFAULT), '{"enum": [17]}')
    assert may_end(grammar, spelled, "17")
    assert may_end(grammar, spelled, DEFAULT.written(CALLS))
    assert not follows(grammar, spelled, "Hello")
    assert not follows(grammar, spelled, "17" + DEFAULT.written(CALLS))


def test_arguments_may_have_the_whitespace_that_structured_output_has(spelled: Any) -> None:
    grammar = compiled(spelled, use(DEFAULT, tool_choice="required"))
    assert may_end(grammar, spelled, DEFAULT.written([("get", '{\n  "city": "Rome"\n}')]))
    assert not follows(grammar, spelled, DEFAULT.written([("get", '{   "city": "Rome"}')]))


def test_formats_are_known_by_their_templates() -> None:
    templates = {
        "hermes": "{% if tools %}<tools>...</tools> within <tool_call></tool_call>{% endif %}",
        "llama3_json": "{{ '<|start_header_id|>ipython<|end_header_id|>' }}{% if tools %}",
        "mistral": '{{- "[TOOL_CALLS] [" }}{% if tools %}',
        "mistral_tekken": "{{- '[TOOL_CALLS][' }}{% if tools %}",
        "mistral_args": "{{- '[TOOL_CALLS]' + name + '[ARGS]' }}{% if tools %}",
    }
    assert {form.name for form in FORMATS} == set(templates)
    for name, template in templates.items():
        assert tool_format(None, template).name == name
        assert tool_format("hermes", template) is DEFAULT
        assert shows_tools(template)
    assert tool_format(None, "{{ message.content }}") is DEFAULT
    assert not shows_tools("{{ message.content }}")
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        tool_format("hermse", "")


@BY_NAME
def test_formats_are_consistent(form: ToolFormat) -> None:
    assert (form.begin + form.head).startswith(form.mark)
    first = form.written([("f", "{}")])
    assert first == f"{form.begin}{form.head}f{form.middle}{{}}{form.tail}{form.end}"
    if form.name != "mistral_args":
        last = first[first.index("{") : first.rindex("}") + 1]
        assert json.loads(last)["name"] == "f"
