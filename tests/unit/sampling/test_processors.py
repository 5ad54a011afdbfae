"""Processed distributions: rule by rule against plain Python, path by path, row by row, and against Transformers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.errors import RequestError
from slipstream.sampling import processors
from slipstream.sampling.params import (
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
    SamplingParams,
)
from slipstream.sampling.processors import LogitsProcessor

VOCAB = 31
PROMPT = (3, 5, 3, 8)
STOP = (1, 2)
BAD_WORDS = ((7,), (3, 8, 9), (4, 4), (9, 10))

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.3},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "min_p_top_p": {"min_p": 0.15, "top_p": 0.8},
    "filters": {"temperature": 1.4, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": -0.6},
    "penalties": {"repetition_penalty": 0.7, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"logit_bias": {0: 3, 4: -2, 7: 100}},
    "min_tokens": {"min_tokens": 4},
    "allowed": {"allowed_token_ids": [1, 4, 7, 9, 10, 30]},
    "all": {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 2.0},
        "min_tokens": 3,
        "allowed_token_ids": list(range(25)),
    },
}


def make(vocab: int = VOCAB, bad_words: Seq[Seq[int]] = BAD_WORDS, **values: Any) -> LogitsProcessor:
    return LogitsProcessor(SamplingParams(**values), PROMPT, STOP, bad_words, vocab)


def random_logits(
    rows: int, vocab: int = VOCAB, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def reference(values: dict[str, Any], logits: Seq[float], output: Seq[int]) -> list[float]:
    """The documented rules, one token at a time in plain Python; probabilities."""
    params = SamplingParams(**values)
    text = [*PROMPT, *output]
    scores = list(logits)
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    for token in range(len(scores)):
        too_early = token in STOP and len(output) < params.min_tokens
        bad = any(
            word[-1] == token and (len(word) == 1 or tuple(text[-len(word) + 1 :]) == word[:-1])
            for word in BAD_WORDS
        )
        if (
            too_early
            or bad
            or (params.allowed_token_ids is not None and token not in params.allowed_token_ids)
        ):
            scores[token] = -math.inf
    for token in range(len(scores)):
        if token in text:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] -= params.presence_penalty * (token in output)
    if params.greedy:
        return [float(token == scores.index(max(scores))) for token in range(len(scores))]
    scores = [score / params.temperature for score in scores]
    weights = [math.exp(score - max(scores)) for score in scores]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    if params.top_k > 0:
        line = sorted(weights)[-params.top_k]
        weights = [weight if weight >= line else 0.0 for weight in weights]
    probs = [weight / sum(weights) for weight in weights]
    mass, kept = 0.0, set[int]()
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if mass < params.top_p:
            kept.add(token)
        mass += probs[token]
    probs = [p if token in kept else 0.0 for token, p in enumerate(probs)]
    return [p / sum(probs) for p in probs]


def random_texts(count: int, longest: int = 6) -> list[tuple[int, ...]]:
    """Short texts over few tokens, so that bad words and repetitions come about."""
    generator = random.Random(5)
    texts = [
        tuple(generator.choices((3, 4, 8, 9), k=generator.randrange(longest + 1))) for _ in range(count - 4)
    ]
    return [(), (9,), (4,), (3, 8), *texts]


@pytest.mark.parametrize("name", PARAMS)
def test_against_the_rules_in_plain_python(name: str) -> None:
    processor = make(**PARAMS[name])
    for seed, output in enumerate(random_texts(25)):
        logits = random_logits(1, seed=seed, dtype=torch.float64)
        probs = processor.log_probs(logits, output, [()])[0].exp()
        assert probs.dtype == torch.float64
        assert probs.tolist() == pytest.approx(reference(PARAMS[name], logits[0].tolist(), output), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PARAMS)
def test_a_row_on_a_path_equals_the_committed_text(name: str, dtype: torch.dtype) -> None:
    processor = make(**PARAMS[name])
    paths = random_texts(40)
    logits = random_logits(len(paths), dtype=dtype)
    for output in ((), (9, 3), (4, 9, 9, 3, 8)):
        rows = processor.log_probs(logits, output, paths)
        for row, path in enumerate(paths):
            committed = processor.log_probs(logits[row : row + 1], (*output, *path), [()])[0]
            assert torch.equal(rows[row], committed)


SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64)
"""Numbers of rows around those at which vectorised loops change; all others are left to the long tests."""


@pytest.mark.parametrize(
    "sizes", [SIZES, pytest.param(range(6, 65, 5), marks=pytest.mark.long)], ids=["some", "more"]
)
@pytest.mark.parametrize("vocab", [VOCAB, 3000])
@pytest.mark.parametrize("name", PARAMS)
def test_no_row_depends_on_another(name: str, vocab: int, sizes: Seq[int]) -> None:
    """The first rows stay the same bits, whatever the number of rows."""
    processor = make(vocab, **PARAMS[name])
    paths = random_texts(65)
    logits = random_logits(65, vocab)
    together = processor.log_probs(logits, (9,), paths)
    for rows in sizes:
        assert torch.equal(processor.log_probs(logits[:rows], (9,), paths[:rows]), together[:rows])
    order = torch.randperm(65, generator=torch.Generator().manual_seed(2)).tolist()
    shuffled = processor.log_probs(logits[order], (9,), [paths[row] for row in order])
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", PARAMS)
def test_rows_are_normalised_and_the_logits_untouched(name: str, dtype: torch.dtype) -> None:
    logits = random_logits(9, dtype=dtype)
    before = logits.clone()
    log_probs = make(**PARAMS[name]).log_probs(logits, (9, 3), random_texts(9))
    assert torch.equal(logits, before)
    assert log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not log_probs.isnan().any()
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(9, dtype=log_probs.dtype), atol=1e-6)


@pytest.mark.parametrize(
    ("values", "theirs"),
    [
        ({"temperature": 0.7}, lambda: TemperatureLogitsWarper(0.7)),
        ({"top_k": 5}, lambda: TopKLogitsWarper(5)),
        ({"top_p": 0.8}, lambda: TopPLogitsWarper(0.8)),
        ({"min_p": 0.07}, lambda: MinPLogitsWarper(0.07)),
        ({"repetition_penalty": 1.3}, lambda: RepetitionPenaltyLogitsProcessor(1.3)),
        ({"repetition_penalty": 0.8}, lambda: RepetitionPenaltyLogitsProcessor(0.8)),
    ],
)
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_against_transformers(values: dict[str, Any], theirs: Any, vocab: int) -> None:
    logits = random_logits(20, vocab)
    output = (9, 3, 11)
    text = torch.tensor([[*PROMPT, *output]] * 20)
    expected = theirs()(text, logits.clone()).log_softmax(-1)
    ours = make(vocab, bad_words=(), **values).log_probs(logits, output, [()] * 20)
    assert torch.equal(ours.isinf(), expected.isinf())
    assert torch.allclose(ours, expected, atol=1e-5)


def test_min_p_comes_before_top_p() -> None:
    """From 0.5, 0.3, 0.2 min-p leaves 0.625 and 0.375, top-p the first alone. In Transformers' order two stay."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    ours = LogitsProcessor(SamplingParams(min_p=0.5, top_p=0.6), (), (), (), 3).log_probs(logits, (), [()])
    assert ours.exp().tolist() == [[1.0, 0.0, 0.0]]
    text = torch.tensor([[0]])
    theirs = MinPLogitsWarper(0.5)(text, TopPLogitsWarper(0.6)(text, logits)).softmax(-1)
    assert theirs[0].tolist() == pytest.approx([0.625, 0.375, 0.0])


def test_top_p_looks_beyond_its_candidates_when_they_fall_short(monkeypatch: pytest.MonkeyPatch) -> None:
    sharp, flat = random_logits(1, 200) * 3, random_logits(1, 200) * 0.01
    processor = make(200, top_p=0.9, bad_words=())
    rows = torch.cat([sharp, flat])
    expected = processor.log_probs(rows, (), [(), ()])
    monkeypatch.setattr(processors, "NUM_NUCLEUS_CANDIDATES", 20)
    assert torch.equal(processor.log_probs(rows, (), [(), ()]), expected)
    assert torch.equal(processor.log_probs(sharp, (), [()]), expected[:1])
    assert int(expected[1].isfinite().sum()) > 150


def test_ties_on_the_line_all_stay() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    for values in ({"top_k": 2}, {"top_p": 0.3}):
        kept = LogitsProcessor(SamplingParams(**values), (), (), (), 5).log_probs(logits, (), [()])
        assert kept[0].isfinite().tolist() == [False, True, True, True, False]
    greedy = LogitsProcessor(SamplingParams(temperature=0), (), (), (), 5).log_probs(logits, (), [()])
    assert greedy.tolist() == [[-math.inf, 0.0, -math.inf, -math.inf, -math.inf]]


def test_bad_words_reach_over_prompt_answer_and_path() -> None:
    """(3, 8, 9) with 3, 8 at the end of the prompt, across each border, and inside a path."""
    processor = LogitsProcessor(SamplingParams(), (5, 3, 8), (), [(3, 8, 9)], VOCAB)
    across = LogitsProcessor(SamplingParams(), (5, 3), (), [(3, 8, 9)], VOCAB)
    logits = random_logits(1)
    for forbids, active, output, path in (
        (True, processor, (), ()),
        (False, processor, (4,), ()),
        (True, across, (8,), ()),
        (True, across, (), (8,)),
        (True, across, (4, 3), (8,)),
        (True, across, (4,), (3, 8)),
        (False, across, (4,), (3, 8, 3)),
        (False, across, (), ()),
    ):
        assert bool(active.log_probs(logits, output, [path])[0, 9].isinf()) == forbids, (output, path)


def test_min_tokens_counts_the_path() -> None:
    rows = make(min_tokens=3).log_probs(random_logits(3), (9,), [(), (4,), (4, 5)])
    assert rows[:, list(STOP)].isinf().all(-1).tolist() == [True, True, False]


def test_a_row_with_nothing_left_becomes_a_stop() -> None:
    allowed, forbidden = [5, 6], [(5,), (9, 6)]
    logits = random_logits(2, dtype=torch.float64)
    processor = LogitsProcessor(SamplingParams(allowed_token_ids=allowed), (), STOP, forbidden, VOCAB)
    rows = processor.log_probs(logits, (), [(), (9,)]).exp()
    assert rows[0].nonzero()[:, 0].tolist() == [6]
    assert rows[1].nonzero()[:, 0].tolist() == list(STOP)
    assert rows[1, list(STOP)].tolist() == pytest.approx([0.5, 0.5])
    early = LogitsProcessor(
        SamplingParams(allowed_token_ids=[*allowed, 1], min_tokens=9, temperature=0),
        (),
        STOP,
        [(5,), (6,)],
        VOCAB,
    )
    assert early.log_probs(logits, (), [(), ()])[0].argmax() == STOP[0]  # stopping early beats saying nothing
    endless = LogitsProcessor(SamplingParams(allowed_token_ids=allowed), (), (), [(5,), (6,)], VOCAB)
    rows = endless.log_probs(logits, (), [(), ()]).exp()
    assert rows.argmax(-1).tolist() == [0, 0]
    assert rows.sum(-1).tolist() == [1, 1]
    assert not endless.permits((), 0), "whoever draws it knows that nothing was left"


def test_extreme_values_give_no_nan() -> None:
    logits = random_logits(3) * 1e4
    logits[0, 5:] = -math.inf
    cases: list[dict[str, Any]] = [
        {"temperature": 1e-5},
        {"temperature": 1e6},
        {"top_p": 1e-9},
        {"top_p": 1 - 1e-12},
        {"min_p": 1.0},
    ]
    for values in cases:
        rows = make(**values).log_probs(logits, (3,), [(), (), ()])
        assert not rows.isnan().any(), values
        assert torch.allclose(rows.exp().sum(-1), torch.ones(3), atol=1e-5), values


@pytest.mark.parametrize("name", PARAMS)
def test_plain_greedy_is_the_argmax_of_the_raw_logits(name: str) -> None:
    values = {**PARAMS[name], "temperature": 0}
    plain = LogitsProcessor(SamplingParams(**values), PROMPT, STOP, (), VOCAB)
    touches_logits = {
        "repetition",
        "presence",
        "frequency",
        "penalties",
        "bias",
        "min_tokens",
        "allowed",
        "all",
    }
    assert plain.is_plain_greedy == (name not in touches_logits)
    assert not make(**values).is_plain_greedy  # bad words
    assert not LogitsProcessor(SamplingParams(), (), (), (), VOCAB).is_plain_greedy
    if plain.is_plain_greedy:
        logits = random_logits(8)
        assert torch.equal(plain.log_probs(logits, (3,), [()] * 8).argmax(-1), logits.argmax(-1))


def test_min_tokens_without_any_stop_token_is_plain() -> None:
    params = SamplingParams(temperature=0, min_tokens=4)
    assert LogitsProcessor(params, (), (), (), VOCAB).is_plain_greedy


def test_token_ids_past_the_vocabulary_are_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        make(logit_bias={VOCAB: 1.0})


EXTREMES: list[dict[str, Any]] = [
    {"temperature": MAX_TEMPERATURE},
    {"temperature": MIN_TEMPERATURE},
    {"repetition_penalty": MAX_REPETITION_PENALTY},
    {"repetition_penalty": MIN_REPETITION_PENALTY},
    {"repetition_penalty": MAX_REPETITION_PENALTY, "temperature": MIN_TEMPERATURE},
    {"repetition_penalty": MIN_REPETITION_PENALTY, "temperature": MIN_TEMPERATURE},
    {"presence_penalty": -2, "frequency_penalty": -2, "temperature": MIN_TEMPERATURE},
    {"presence_penalty": 2, "frequency_penalty": 2, "temperature": MIN_TEMPERATURE},
    {"min_p": 5e-324, "top_p": 5e-324},
    {"min_p": 1, "top_p": 1, "top_k": 10**30},
    {"logit_bias": {4: 100, 7: -100}, "temperature": MIN_TEMPERATURE},
]


@pytest.mark.parametrize("values", EXTREMES)
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_value_within_bounds_makes_a_row_that_is_not_a_number(
    values: dict[str, Any], scale: float
) -> None:
    """In float32, under a mask: all probability is on what is allowed."""
    allowed = [3, 4, 7, 9]
    processor = LogitsProcessor(
        SamplingParams(allowed_token_ids=allowed, **values), PROMPT, (), BAD_WORDS, VOCAB
    )
    logits = random_logits(3) * scale
    probs = processor.log_probs(logits, (3, 4, 4), [(), (4,), (9, 9)]).exp()
    assert probs.isfinite().all()
    assert probs.sum(-1).tolist() == pytest.approx([1.0] * 3, abs=1e-5)
    assert probs[:, allowed].sum(-1).tolist() == pytest.approx([1.0] * 3, abs=1e-5)


def test_tokens_beyond_the_logits_are_left_out() -> None:
    """A tokenizer may have more tokens than the model has logits."""
    values: dict[str, Any] = {"min_tokens": 5, "allowed_token_ids": [1, 4, 9], "temperature": 0}
    ours = LogitsProcessor(
        SamplingParams(**values),
        PROMPT,
        (*STOP, VOCAB, VOCAB + 9),
        [*BAD_WORDS, (VOCAB,), (4, VOCAB + 2), (VOCAB + 2, 4)],
        VOCAB,
    )
    within = LogitsProcessor(SamplingParams(**values), PROMPT, STOP, BAD_WORDS, VOCAB)
    logits = random_logits(2)
    for paths in ([(), (4,)], [(9,), (4, 4, 4, 4, 4)]):
        assert torch.equal(ours.log_probs(logits, (), paths), within.log_probs(logits, (), paths))
    silent = LogitsProcessor(SamplingParams(min_tokens=5, temperature=0), PROMPT, (VOCAB,), (), VOCAB)
    assert silent.is_plain_greedy


def test_a_vocabulary_of_stop_tokens_and_many_bad_words_cost_one_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No step makes a list of the vocabulary, or goes through all bad words."""
    vocab = 50_000
    words = [(number, number + 1, number + 2) for number in range(4000)]
    processor = LogitsProcessor(
        SamplingParams(min_tokens=9), PROMPT, list(range(10, vocab)), [*words, (7, 8)], vocab
    )
    logits = random_logits(2, vocab)
    first = processor.log_probs(logits, (7,), [(), (8,)])
    made: list[int] = []
    tensor = torch.tensor

    def counted(values: Any, **options: Any) -> torch.Tensor:
        made.append(len(values))
        return tensor(values, **options)

    monkeypatch.setattr(torch, "tensor", counted)
    assert torch.equal(processor.log_probs(logits, (7,), [(), (8,)]), first)
    assert max(made) <= 4
    assert (first.exp() > 0).sum(-1).tolist() == [9, 9]  # not 8 after 7; not 9 after 7, 8, but that is a stop
    # Kept by their beginnings: a row looks up one beginning a length, however many words there are.
    assert len(processor._phrases) == 4001
    assert len(processor._beginnings) == 2
