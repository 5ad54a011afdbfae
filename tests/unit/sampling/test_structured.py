"""Answers under a constraint: what may be asked, which tokens may follow, where the answer ends, what is drafted."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from slipstream import LLM, SamplingParams, StructuredOutput
from slipstream.core.proposal import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind
from slipstream.draft.base import Observation
from slipstream.draft.lookup.ngram import NgramDrafter
from slipstream.engine.forced import under_grammar
from slipstream.errors import RequestError
from slipstream.sampling.grammars import compiler as grammars
from slipstream.sampling.grammars.compiler import GrammarCompiler
from slipstream.sampling.grammars.grammar import Grammar
from slipstream.sampling.processors import LogitsProcessor
from tests.kit.tokenizer_families import FAMILIES

EOS = 1
"""The embedded pair's end token."""
SILENT = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 90, "prompt_lookup_max": 90}
"""A drafter that has room for drafts and never a guess."""
PERSON = {
    "type": "object",
    "properties": {"given_name": {"type": "string", "maxLength": 8}, "member": {"type": "boolean"}},
    "required": ["given_name", "member"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": PERSON},
    "compact": {"json_schema": PERSON, "compact": True},
    "object": {"json_object": True},
    "regex": {"regex": r"(a|ab)+c?[0-9]{2,4}"},
    "grammar": {"grammar": 'start: ("(" start ")")* | "x"'},
    "choice": {"choice": ["yes", "yes, of course", 'a "quoted" \\ text', "👍 naïve"]},
}


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(kv_cache_bytes=64 * 2**20)


@pytest.fixture(scope="module")
def silent() -> LLM:
    return LLM(speculative_config=SILENT, kv_cache_bytes=64 * 2**20)


@pytest.fixture(autouse=True)
def books(plain: LLM, silent: LLM) -> Iterator[None]:
    yield
    assert plain.engine.integrity() == silent.engine.integrity() == []


@pytest.fixture
def tokenizer(plain: LLM) -> Any:
    return plain.engine.tokenizer


@pytest.fixture
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, 4096, [EOS])


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def tokens_of(mask: int) -> list[int]:
    return [token for token in range(mask.bit_length()) if mask >> token & 1]


# ---- what may be asked


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "exactly one of json_schema, json_object, regex, grammar, choice, got none of them"),
        ({"regex": "a", "json_object": True}, "got json_object and regex"),
        ({"regexp": "a"}, "structured output key"),
        ({"regex": ""}, "regex must be a string that is not empty"),
        ({"grammar": 5}, "grammar must be a string"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": "[1]"}, "json_schema must be an object or true"),
        ({"json_schema": {"a": object()}}, "json_schema is not valid JSON"),
        ({"json_schema": False}, "allows nothing"),
        ({"json_object": 1}, "json_object must be true or false"),
        ({"choice": "yes"}, "choice must be a list of strings"),
        ({"choice": []}, "choice must hold strings"),
        ({"choice": ["a", ""]}, "choice must hold strings"),
        ({"regex": "a", "compact": True}, "compact is for json_schema and json_object, not for regex"),
    ],
)
def test_bad_constraints_are_refused_in_one_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        StructuredOutput(**values)
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError):
        SamplingParams(structured=values)


def test_equal_constraints_are_equal() -> None:
    written = StructuredOutput(json_schema=json.dumps(PERSON))
    assert written == StructuredOutput(json_schema=PERSON)
    assert hash(written) == hash(StructuredOutput(json_schema=PERSON))
    assert StructuredOutput(choice=["a", "b"]) == StructuredOutput(choice=("a", "b"))
    assert SamplingParams(structured={"json_schema": PERSON}).structured == written
    assert SamplingParams.from_mapping({"structured": {"json_schema": PERSON}}).structured == written
    assert StructuredOutput(json_schema={}).json_schema == "{}"
    with pytest.raises(RequestError, match="must be a StructuredOutput or an object"):
        SamplingParams(structured="json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"json_schema": {"type": "thing"}}, "json_schema cannot be used: Invalid type: thing"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json_schema": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"regex": "[a-z]+("}, "regex cannot be used"),
        ({"regex": "(?=a)a"}, "regex cannot be used"),
        ({"grammar": "start: missing"}, "grammar cannot be used"),
        ({"regex": r"[^\s\S]"}, "regex allows no text"),
        ({"regex": "()"}, "regex allows no text but the empty one"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_any_work(
    plain: LLM, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(says)) as caught:
        plain.engine.add_request("bad", "text", SamplingParams(structured=values))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not plain.engine.has_unfinished


class Matchers:
    """Stands in for llguidance's class: notes what is made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, vocabulary: Any, source: str, **options: Any) -> LLMatcher:
        self.made.append(source)
        return LLMatcher(vocabulary, source, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(LLMatcher, name)


def test_compiled_grammars_are_kept_and_bounded(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llguidance.LLMatcher", matchers := Matchers())
    monkeypatch.setattr(grammars, "MAX_COMPILED", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):  # b makes room for c
        compiler.compile(StructuredOutput(regex=regex), [EOS])
    assert len(matchers.made) == 4


def test_an_account_that_asks_for_many_forms_drives_out_its_own(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_ = GrammarCompiler._compile

    def counted(self: GrammarCompiler, key: Any, tried_bytes: int | None) -> Any:
        compiled.append(key[0])
        return compile_(self, key, tried_bytes)

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)
    monkeypatch.setattr(grammars, "MAX_COMPILED", 6)
    own = [StructuredOutput(regex=text) for text in ("quiet", "still")]
    for form in own:
        compiler.compile(form, [], "b/ann")
    for number in range(12):
        compiler.compile(StructuredOutput(regex=f"loud{number}"), [], f"a/{number}")
    assert compiler.num_kept == 6
    compiled.clear()
    for form in own:
        compiler.compile(form, [], "b/ann")
    assert compiled == []
    compiler.compile(StructuredOutput(regex="loud11"), [], "a/11")
    compiler.compile(StructuredOutput(regex="loud0"), [], "a/0")
    assert compiled == ["a/0"], "the least recently used ones are gone"


def test_a_grammar_that_is_too_complex_is_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LLParserLimits(max_lexer_states=2, verbose_errors=False)
    monkeypatch.setattr(grammars, "parser_limits", lambda: limits)
    for _ in range(2):
        with pytest.raises(RequestError, match="regex cannot be used: lexer error: too many states"):
            compiler.compile(StructuredOutput(regex="[a-z]+x|y"), [EOS])


def test_without_a_constraint_nothing_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(kv_cache_bytes=64 * 2**20)
    num_reads = 0
    read_tokenizer = GrammarCompiler.read_tokenizer

    def counted(self: GrammarCompiler) -> Any:
        nonlocal num_reads
        num_reads += 1
        return read_tokenizer(self)

    monkeypatch.setattr(GrammarCompiler, "read_tokenizer", counted)
    llm.generate("text", SamplingParams(max_tokens=2))
    assert num_reads == 0
    llm.generate("text", SamplingParams(max_tokens=2, structured={"regex": "[a-z]+"}))
    assert num_reads


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_of_every_family(family: str) -> None:
    """Every text that is walked at random is one that the expression matches, in the tokenizer's own words."""
    tokenizer = FAMILIES[family]()
    end = tokenizer.eos_token_id
    compiler = GrammarCompiler(tokenizer, len(tokenizer) + 7, [end])
    grammar = compiler.compile(StructuredOutput(regex=r"[a-zé日]{2,6} \{[0-9]+\}"), [end])
    rng = random.Random(0)
    for _ in range(20):
        text: list[int] = []
        while not grammar.ended(text):
            text.append(rng.choice([token for token in tokens_of(grammar.mask(text)) if token != end]))
            assert max(text) < len(tokenizer)
        # A first word in front, because decoders take the space off the beginning of a text.
        before = encode(tokenizer, "dog")
        said = tokenizer.decode(before + text).removeprefix(tokenizer.decode(before))
        assert re.fullmatch(r"[a-zé日]{2,6} \{[0-9]+\}", said), said


def test_a_tokenizer_that_cannot_be_read_is_one_error() -> None:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    for tokenizer in (object(), PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")):
        compiler = GrammarCompiler(tokenizer, 10, [1])
        with pytest.raises(RequestError, match="not possible with this model's tokenizer") as caught:
            compiler.compile(StructuredOutput(regex="a"), [1])
        assert "\n" not in str(caught.value)


# ---- which tokens may follow


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_depend_on_the_text_alone(compiler: GrammarCompiler, name: str) -> None:
    """However the matcher came there: in any order, on any branch, a mask is the one that a fresh matcher gives."""
    asked = compiler.compile(StructuredOutput(**CONSTRAINTS[name]), [EOS])
    rng = random.Random(name)
    output: list[int] = []
    for _ in range(25):
        paths: list[list[int]] = [[]]
        for _ in range(6):
            path = rng.choice(paths)
            following = tokens_of(asked.mask(output, path)) or [EOS]
            paths.append([*path, rng.choice(following) if rng.random() < 0.8 else rng.randrange(4096)])
        rng.shuffle(paths)
        for path in paths:
            fresh = compiler.compile(StructuredOutput(**CONSTRAINTS[name]), [EOS])
            assert asked.mask(output, path) == fresh.mask([*output, *path])
        best = max(paths, key=lambda path: (asked.mask(output, path) != 0, len(path)))
        output = [*output, *best[: rng.randint(1, 3)]] if rng.random() < 0.8 else output[: len(output) // 2]
        if asked.ended(output):
            output = []


def test_stop_tokens_are_allowed_exactly_where_the_text_is_complete(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    stop = encode(tokenizer, "b")[0]
    grammar = compiler.compile(StructuredOutput(regex="[ab]{2}|ab[ab]{2}"), [EOS, stop])
    texts = {"": False, "a": False, "aa": True, "a" * 3: False}
    for text, complete in texts.items():
        mask = grammar.mask(encode(tokenizer, text))
        assert bool(mask >> EOS & 1) == complete
        assert bool(mask >> stop & 1) == complete, "a stop token is never text"
    assert grammar.mask(encode(tokenizer, "aa"), [EOS]) == 0
    assert grammar.mask([], encode(tokenizer, "xyz")) == 0
    assert grammar.ended(encode(tokenizer, "xyz"))
    endless = compiler.compile(StructuredOutput(regex="a+"), [])
    assert not endless.mask(encode(tokenizer, "aa")) >> EOS & 1, "the model's end token is no text"
    assert not endless.ended(encode(tokenizer, "aa"))


def test_a_long_text_is_met_at_once(compiler: GrammarCompiler, tokenizer: Any) -> None:
    grammar = compiler.compile(StructuredOutput(regex="[ab]+"), [EOS])
    a = encode(tokenizer, "a")[0]
    assert not grammar.ended([a] * 3000)
    assert grammar.mask([a] * 3000) == grammar.mask([a])


def test_rows_are_masked_and_none_is_nan(compiler: GrammarCompiler, tokenizer: Any) -> None:
    params = SamplingParams(structured={"regex": "ab*"}, temperature=0.7, top_p=0.9, presence_penalty=0.5)
    grammar = compiler.compile(params.structured, [EOS])  # type: ignore[arg-type]
    a, b, x = (encode(tokenizer, letter)[0] for letter in "abx")
    logits = torch.randn(6, 4096, generator=torch.Generator().manual_seed(0))
    paths = [(), (a,), (a, b), (x,), (x, a), (a, EOS)]
    rows = LogitsProcessor(params, [5], [EOS], (), 4096, grammar).log_probs(logits, (), paths)
    assert not rows.isnan().any()
    for row, path in zip(rows[:3], paths, strict=False):
        assert set(row.isfinite().nonzero()[:, 0].tolist()) <= set(tokens_of(grammar.mask((), path)))
    assert float(rows.exp().sum(-1).sub(1).abs().max()) < 1e-5
    greedy = LogitsProcessor(SamplingParams(temperature=0), [5], [EOS], (), 4096, grammar)
    assert not greedy.is_plain_greedy
    narrow = grammar.allowed((), paths, 50)
    assert narrow.shape == (6, 50)
    assert torch.equal(narrow, grammar.allowed((), paths, 4096)[:, :50])


def test_a_matcher_that_fails_ends_the_text(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        """Follows one token, then gives up."""

        def __init__(self, num_consumed: int = 0) -> None:
            self.num_consumed = num_consumed

        def deep_copy(self) -> Failing:
            return Failing(self.num_consumed)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.num_consumed += len(tokens)
            return len(tokens)

        def compute_bitmask(self) -> bytes:
            return b"\xff" * 2

        def is_accepting(self) -> bool:
            return False

        def is_error(self) -> bool:
            return self.num_consumed > 1

        def get_error(self) -> str:
            return "too complex"

    grammar = Grammar(Failing(), [1], [1], 10)  # type: ignore[arg-type]
    assert not grammar.ended([5])
    with caplog.at_level(logging.WARNING):
        assert grammar.ended([5, 6])
    assert "too complex" in caplog.text
    assert not grammar.accepts([5, 6])
    assert grammar.mask([5], [6, 7]) == 0
    assert not grammar.ended([5])


@pytest.mark.parametrize(
    ("between", "spaced", "compact"),
    [
        ("", True, True),
        (" ", True, False),
        ("\n", True, False),
        ("\n\t\t", True, False),
        ("\n" + 40 * " ", True, False),
        ("  ", False, False),
        ("\n\n", False, False),
        ("\n" + 41 * " ", False, False),
    ],
)
def test_whitespace_in_json(
    compiler: GrammarCompiler, tokenizer: Any, between: str, spaced: bool, compact: bool
) -> None:
    for allowed, is_compact in ((spaced, False), (compact, True)):
        structured = StructuredOutput(json_schema={"type": "array"}, compact=is_compact)
        grammar = compiler.compile(structured, [EOS])
        assert bool(grammar.mask(encode(tokenizer, f"[1,{between}2"))) == allowed


def test_a_schema_may_say_itself_what_whitespace_it_allows(compiler: GrammarCompiler, tokenizer: Any) -> None:
    schema = {"type": "array", "x-guidance": {"whitespace_pattern": "_"}}
    grammar = compiler.compile(StructuredOutput(json_schema=schema), [EOS])
    assert grammar.mask(encode(tokenizer, "[1,_2"))
    assert not grammar.mask(encode(tokenizer, "[1, 2"))


# ---- where an answer ends


def answer(llm: LLM, structured: dict[str, Any], prompt: str = "An example:", **values: Any) -> Any:
    values = {"temperature": 0, "max_tokens": 60} | values
    [output] = llm.generate(prompt, SamplingParams(structured=structured, **values))
    return output.outputs[0], output.metrics


@pytest.mark.parametrize("values", [{}, {"ignore_eos": True}, {"min_tokens": 50}, {"temperature": 1.0}])
def test_an_answer_that_can_only_end_ends(plain: LLM, values: dict[str, Any]) -> None:
    made, _ = answer(plain, CONSTRAINTS["compact"], **values)
    assert (made.finish_reason, made.stop_reason) == ("stop", None)
    assert EOS not in made.token_ids
    assert set(json.loads(made.text)) == {"given_name", "member"}


def test_limits_cut_as_everywhere(plain: LLM) -> None:
    cut, _ = answer(plain, CONSTRAINTS["compact"], max_tokens=5)
    assert cut.finish_reason == "length"
    assert len(cut.token_ids) == 5
    stopped, _ = answer(plain, CONSTRAINTS["compact"], stop=["member"])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "member")


def test_an_answer_that_may_go_on_is_ended_by_the_model(plain: LLM) -> None:
    made, _ = answer(plain, {"regex": "[a-z ]+"}, logit_bias={EOS: 100.0})
    assert made.finish_reason == "stop"
    assert made.token_ids[-1] == EOS


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("regex", "reason", "text"),
    [
        ("yes", "error", ""),
        ("[ac]{2}b+", "error", "aa"),
        ("[ac]{2}b*", "stop", "aa"),
        ("a{3}b{0,2}", "stop", "aaa"),
    ],
)
def test_a_form_that_other_rules_cut_short_is_no_stop_unless_it_is_whole(
    plain: LLM, silent: LLM, regex: str, reason: str, text: str, temperature: float, ignore_eos: bool
) -> None:
    only = {"allowed_token_ids": encode(plain.engine.tokenizer, "a"), "stop_token_ids": []}
    for llm in (plain, silent):
        made, _ = answer(llm, {"regex": regex}, temperature=temperature, ignore_eos=ignore_eos, **only)
        assert (made.finish_reason, made.stop_reason, made.text) == (reason, None, text)
        rest = made.token_ids[len(text) :]
        assert rest == ([] if ignore_eos else [EOS]), "what ends it is no text of the model's"


def test_a_form_is_not_left_where_the_model_may_not_end(plain: LLM) -> None:
    """With `ignore_eos` an answer goes on as long as its form does, and no longer."""
    structured = {"grammar": 'start: "a" ("b" start)?'}
    bias = dict.fromkeys(encode(plain.engine.tokenizer, "q"), 100.0)
    ids = [encode(plain.engine.tokenizer, letter)[0] for letter in "abq"]
    values = {"ignore_eos": True, "logit_bias": bias, "allowed_token_ids": ids}
    made, _ = answer(plain, structured, max_tokens=20, **values)
    assert (made.finish_reason, len(made.token_ids)) == ("length", 20)
    assert made.text == "ab" * 10
    made, _ = answer(plain, structured, max_tokens=20, **values | {"bad_words": ["b"]})
    assert (made.finish_reason, made.text) == ("stop", "a")


def test_answers_of_one_request_and_of_a_batch_do_not_meet(plain: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=12)
    bound = SamplingParams(structured=CONSTRAINTS["compact"], temperature=1.0, seed=5, max_tokens=60, n=3)
    choice = SamplingParams(structured=CONSTRAINTS["choice"], temperature=0, max_tokens=60)
    prompts = ["One two three", "An example:", "Is it true?"]
    together = plain.generate(prompts, [free, bound, choice])
    alone = [plain.generate(*job)[0] for job in zip(prompts, [free, bound, choice], strict=True)]
    for left, right in zip(together, alone, strict=True):
        assert [made.token_ids for made in left.outputs] == [made.token_ids for made in right.outputs]
    assert all(set(json.loads(made.text)) == {"given_name", "member"} for made in together[1].outputs)
    assert together[2].outputs[0].text in CONSTRAINTS["choice"]["choice"]


def test_a_preempted_answer_comes_back_to_where_it_was(plain: LLM) -> None:
    prompts = [f"{number} examples, each of them with its name:" for number in range(6)]
    structured = {"regex": "([a-z]{2,5} [0-9]{1,2}, )+"}
    params = [
        SamplingParams(
            structured=structured, temperature=1.0, seed=number, max_tokens=100, logit_bias={EOS: -100}
        )
        for number in range(6)
    ]
    wanted = plain.generate(prompts, params)
    room = 300 * plain.engine.model.kv_bytes_per_token
    scarce = LLM(speculative_config={"method": "suffix"}, kv_cache_bytes=room, max_model_len=128)
    outputs = scarce.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert [out.outputs[0].token_ids for out in outputs] == [out.outputs[0].token_ids for out in wanted]
    assert scarce.engine.integrity() == []


# ---- what is drafted


FORCED = {
    "json_schema": {
        "type": "object",
        "properties": {
            "a_rather_long_property_name": {"const": "and a value that is always the same"},
            "another_property": {"enum": ["first", "second"]},
        },
        "required": ["a_rather_long_property_name", "another_property"],
        "additionalProperties": False,
    },
    "compact": True,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_drafted_and_always_accepted(plain: LLM, silent: LLM, temperature: float) -> None:
    off, steps_off = answer(plain, FORCED, temperature=temperature, seed=3)
    forced, steps = answer(silent, FORCED, temperature=temperature, seed=3)
    assert forced.token_ids == off.token_ids
    assert steps.acceptance_rate == 1.0
    assert steps.num_steps < steps_off.num_steps / 4


def test_max_draft_tokens_0_forces_nothing(silent: LLM) -> None:
    params = SamplingParams(structured=FORCED, temperature=0, max_tokens=60)
    [output] = silent.generate("An example:", params, max_draft_tokens=0)
    assert output.metrics.num_draft_tokens == 0


class TestUnderGrammar:
    """The embedded tokenizer has one token for each letter."""

    @pytest.fixture(autouse=True)
    def letters(self, compiler: GrammarCompiler, tokenizer: Any) -> None:
        self.compiler = compiler
        self.ids = {letter: encode(tokenizer, letter)[0] for letter in "abqzxj"}

    def tree(self, text: str, *parents: int) -> Proposal:
        return Proposal(tuple(self.ids[letter] for letter in text), parents)

    def grammar(self, regex: str) -> Grammar:
        return self.compiler.compile(StructuredOutput(regex=regex), [EOS])

    def read(self, proposal: Proposal) -> set[str]:
        names = {token: letter for letter, token in self.ids.items()}
        return {
            "".join(names[proposal.token_ids[step]] for step in proposal.path(node))
            for node in range(len(proposal))
        }

    def test_forced_tokens_go_down_from_the_text_and_from_every_leaf(self) -> None:
        grammar = self.grammar("qz(xj|jx)q")
        grown = under_grammar(EMPTY_PROPOSAL, grammar, (), 8)
        assert self.read(grown) == {"q", "qz"}
        assert grown.kind is ProposalKind.ONE_HOT
        guessed = self.tree("qzx", ROOT, 0, 1)
        assert self.read(under_grammar(guessed, grammar, (), 8)) == {"q", "qz", "qzx", "qzxj", "qzxjq"}
        both = self.tree("qzxj", ROOT, 0, 1, 1)
        assert {"qzxjq", "qzjxq"} <= self.read(under_grammar(both, grammar, (), 8))
        assert len(under_grammar(both, grammar, (), 5)) == 5

    def test_what_is_refused_goes_with_all_below_it(self) -> None:
        grammar = self.grammar("[qz][xj]{2,5}")
        guessed = self.tree("qazxqx", ROOT, ROOT, ROOT, 0, 1, 2)
        assert self.read(under_grammar(guessed, grammar, (), 9)) == {"q", "z", "qx", "zx"}

    def test_forced_tokens_come_before_guesses_that_do_not_fit(self) -> None:
        grown = under_grammar(self.tree("xxx", ROOT, 0, 1), self.grammar("qzqz(xj|jx)"), (), 3)
        assert self.read(grown) == {"q", "qz", "qzq"}

    def test_what_needs_no_change_is_given_back(self) -> None:
        guessed = self.tree("qzx", ROOT, 0, 1)
        assert under_grammar(guessed, self.grammar("[qz]{2}[xj]{3}"), (), 3) is guessed

    def test_what_was_drawn_stays_as_it_was_drawn(self) -> None:
        drawn = Proposal((self.ids["a"],), (ROOT,), ProposalKind.SAMPLED_IID, torch.full((1, 4096), 1 / 4096))
        assert under_grammar(drawn, self.grammar("qz"), (), 8) is drawn

    def test_coupled_stays_coupled(self) -> None:
        coupled = Proposal((self.ids["a"],), (ROOT,), ProposalKind.COUPLED)
        assert under_grammar(coupled, self.grammar("qz"), (), 8).kind is ProposalKind.COUPLED


def test_a_drafter_is_told_of_its_own_guesses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the grammar added or took away, with the logits behind what is left of them."""
    told: list[Observation] = []
    lengths: list[int] = []

    def propose(self: NgramDrafter, sequences: Any, budgets: Any) -> list[Proposal]:
        if min(budgets) == 0:
            return [EMPTY_PROPOSAL] * len(sequences)
        lengths.extend(len(sequence.token_ids) for sequence in sequences)
        return [Proposal((7, 9), (ROOT, ROOT))] * len(sequences)

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    monkeypatch.setattr(NgramDrafter, "observe", lambda self, seen: told.extend(seen))
    llm = LLM(speculative_config={"method": "ngram"}, kv_cache_bytes=64 * 2**20)
    answer(llm, FORCED)
    assert llm.engine.stats().num_draft_failures == 0
    changed = [seen for seen in told if seen.num_before is not None]
    assert [seen.num_before for seen in changed] == lengths[: len(changed)]
    assert len(changed) > 3
    for seen in changed:
        assert set(seen.proposal.token_ids) <= {7, 9}
        assert len(seen.logits) == 1 + len(seen.proposal)
        assert seen.num_accepted <= len(seen.proposal)
