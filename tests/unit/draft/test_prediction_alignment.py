"""Predictions: read, followed in bytes, found again after differences, and drafted for little where they are wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slipstream.assets import EMBEDDED_TARGET
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.combine.merging import depth_along
from slipstream.draft.lookup.alignment import Alignment, num_found
from slipstream.draft.lookup.prediction import (
    EARNED_BY_ACCEPTED,
    EARNED_BY_TEXT,
    FIRST_CREDIT,
    PredictionDrafter,
    PredictionOptions,
)
from slipstream.errors import PredictionError
from slipstream.models.tokenizer import load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.testing.conformance import check_drafter
from slipstream.testing.stub_drafters import draft_context
from slipstream.text.block_index import BlockIndex
from slipstream.text.expected import ExpectedText, PredictionEncoder
from slipstream.text.prediction import parse_prediction

PARAMS = SamplingParams()
CONTEXT = draft_context(vocab_size=5000)
TEXT = (
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"
    "    return area(width, height) * depth\n\n\nprint(area(3, 4), volume(3, 4, 5))\n"
)


@pytest.fixture(scope="module")
def encoder() -> PredictionEncoder:
    return PredictionEncoder(load_tokenizer(EMBEDDED_TARGET), 1 << 16, 1024)


def steps(expected: ExpectedText, answer: list[int], context: Any = CONTEXT) -> tuple[int, int, list[int]]:
    """Target passes and rejected draft tokens that an answer takes, and how many tokens each pass made."""
    drafter = PredictionDrafter(PredictionOptions(), context)
    sequence = Sequence(0, "0", 0, [0], 1, PARAMS, 0, expected=expected)
    made: list[int] = []
    rejected = 0
    while (num := sequence.num_output_tokens) < len(answer):
        [proposal] = drafter.propose([sequence], [min(64, len(answer) - num - 1)])
        accepted = depth_along(proposal, answer[num:])
        made.append(accepted + 1)
        rejected += len(proposal) - accepted
        sequence.token_ids += answer[num : num + accepted + 1]
        drafter.observe([Observation(sequence, proposal, accepted, None)])  # type: ignore[arg-type]
    drafter.release(sequence)
    assert drafter.num_held() == 0
    return len(made), rejected, made


# --- what callers write -----------------------------------------------------------------------------------------


def test_text_token_ids_and_openais_form_are_read() -> None:
    assert parse_prediction("a b") == "a b"
    assert parse_prediction([3, 5]) == (3, 5)
    assert parse_prediction({"type": "content", "content": "a"}) == "a"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_prediction({"type": "content", "content": parts}) == "ab"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "got int"),
        (b"a", "got bytes"),
        ("", "is empty"),
        ([], "is empty"),
        ([1.5], "got list"),
        ("a\ud800", "the prediction"),
        ({"type": "content"}, "'type'"),
        ({"type": "text", "content": "a"}, "keys"),
        (
            {"type": "content", "content": [{"type": "image_url"}]},
            "'image_url'; it may have parts of text only",
        ),
        ({"type": "content", "content": []}, "is empty"),
    ],
    ids=str,
)
def test_anything_else_is_refused(value: Any, says: str) -> None:
    with pytest.raises(PredictionError, match=says):
        RequestOptions(prediction=value)


def test_what_the_model_cannot_have_is_refused(encoder: PredictionEncoder) -> None:
    with pytest.raises(PredictionError, match=r"has 2000 tokens, .* may have 1024; shorten it"):
        encoder.encode((1,) * 2000)
    with pytest.raises(PredictionError, match=r"the prediction has \d+ (tokens|bytes)"):
        encoder.encode("a word and " * 100_000)
    with pytest.raises(PredictionError, match="token id 70000 in the prediction"):
        encoder.encode((70000,))


# --- where the answer is in it ----------------------------------------------------------------------------------


def test_other_tokens_of_the_same_bytes_are_followed_and_the_seam_is_mended(
    encoder: PredictionEncoder,
) -> None:
    """The target spells the first word letter by letter; from within a token the text goes on in new tokens."""
    expected = encoder.encode(TEXT)
    alignment = Alignment(expected)
    for length in range(1, 12):
        spelled = [encoder.encode(letter).token_ids for letter in TEXT[:length]]
        alignment = Alignment(expected)
        alignment.read([token for token_ids in spelled for token in token_ids])
        assert alignment.followed
        [place] = alignment.places()
        assert place.offset == length
        rest = expected.tokens_from(place.offset, 500)
        assert b"".join(map(expected.bytes_of, rest)).decode() == TEXT[length:]


EDITS = {
    "replaced": ("volume(width", "space(width"),
    "inserted": ("return area(", "return 2 * area("),
    "deleted": (", volume(3, 4, 5)", ""),
    "a passage inserted": ("\n\nprint", "\n\nclass Shape:\n    sides = 4\n    name = None\n\n\nprint"),
    "a passage deleted": (
        "def volume(width, height, depth):\n    return area(width, height) * depth\n\n\n",
        "",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_differences_are_survived(encoder: PredictionEncoder, edit: str) -> None:
    expected = encoder.encode(TEXT)
    old, new = EDITS[edit]
    assert old in TEXT
    answer = list(encoder.encode(TEXT.replace(old, new, 1)).token_ids)
    untouched, _, made = steps(expected, list(expected.token_ids))
    assert untouched <= 5, made
    num_steps, _, made = steps(expected, answer)
    num_new = len(encoder.encode(new).token_ids) if new else 0
    assert num_steps <= untouched + 4 + num_new, made


def test_a_moved_passage_is_found_again(encoder: PredictionEncoder) -> None:
    first, second = TEXT.split("\n\n\n")[:2]
    expected = encoder.encode(f"{first}\n\n\n{second}\n")
    num_steps, _, made = steps(expected, list(encoder.encode(f"{second}\n\n\n{first}\n").token_ids))
    assert num_steps < len(expected) / 2, made


def test_chains_grow_while_they_hold() -> None:
    answer = [random.Random(1).randrange(5000) for _ in range(300)]
    _, rejected, made = steps(ExpectedText(answer), answer)
    assert rejected == 0
    assert made[0] < made[1] < made[2] <= 65
    assert len(made) < 12


def test_a_wrong_prediction_costs_its_credit_only(encoder: PredictionEncoder) -> None:
    """All of it other tokens, and all of it the same common words in another order."""
    rng = random.Random(2)
    answer = [rng.randrange(2000) for _ in range(400)]
    strange = ExpectedText([2000 + rng.randrange(2000) for _ in range(400)])
    num_steps, rejected, _ = steps(strange, answer)
    assert num_steps == 400
    assert 4 < rejected <= FIRST_CREDIT + len(answer) * EARNED_BY_TEXT
    words = TEXT.split(" ")
    rng.shuffle(words)
    text = list(encoder.encode(TEXT * 4).token_ids)
    num_steps, rejected, _ = steps(encoder.encode(" ".join(words)), text)
    saved = len(text) - num_steps
    assert rejected <= FIRST_CREDIT + len(text) * EARNED_BY_TEXT + EARNED_BY_ACCEPTED * saved


def test_the_tokens_that_the_answer_has_are_counted() -> None:
    expected = ExpectedText([11, 12, 13, 14, 15, 16, 17, 18])
    assert num_found(expected, [11, 12, 13, 14, 15, 16, 17, 18]) == 8
    assert num_found(expected, [11, 12, 13]) == 3
    assert num_found(expected, [11, 12, 13, 99, 15, 16, 17, 18]) == 7
    assert num_found(expected, [21, 22, 23]) == 0
    assert num_found(expected, [11, 12, 13, 14, 11, 12, 13, 14]) == 4  # no token counts twice


# --- the contract -----------------------------------------------------------------------------------------------


def test_it_keeps_the_contract_and_serves_only_those_who_expect_something() -> None:
    rng = random.Random(3)
    predictions = [(), *(tuple(rng.randrange(6) for _ in range(40)) for _ in range(3))]
    context = draft_context(vocab_size=6)
    check_drafter(
        lambda: PredictionDrafter(PredictionOptions(12), context), vocab_size=6, predictions=predictions
    )
    drafter = PredictionDrafter(PredictionOptions(), context)
    mine = Sequence(1, "1", 0, [0], 1, PARAMS, 0, expected=ExpectedText([1, 2, 3]))
    theirs = Sequence(2, "2", 0, [0], 1, PARAMS, 0)
    assert [len(proposal) for proposal in drafter.propose([mine, theirs], [8, 8])] == [3, 0]


def test_the_first_token_may_begin_with_a_space_that_is_not_shown(encoder: PredictionEncoder) -> None:
    alignment = Alignment(encoder.encode("two words"))
    alignment.read(encoder.encode(" two").token_ids)
    assert alignment.followed


def test_a_passage_is_found_in_a_long_text_without_reading_all_of_it() -> None:
    """Against `bytes.find`: behind the beginning first, else from the start; a repeated block is looked at in part."""
    rng = random.Random(1)
    data = bytes(rng.choice(b"ab \n") for _ in range(40_000)) + b"-" * 20_000 + b"the end of a long text"
    text = ExpectedText(range(len(data)), lambda token: data[token : token + 1])
    for _ in range(300):
        begin, at = rng.randrange(len(data)), rng.randrange(40_000)
        passage = data[at : at + 24] if rng.random() < 0.7 else bytes(rng.choice(b"ab \n") for _ in range(24))
        behind = data.find(passage, begin)
        assert text.find(passage, begin) == (behind if behind >= 0 else data.find(passage))
    looked_up = BlockIndex(data)
    assert data.startswith(b"-" * 24, looked_up.find(b"-" * 24))
    assert looked_up.find(b"-" * 23 + b"x") == -1
    assert looked_up.find(data[-23:]) == len(data) - 23
    with pytest.raises(ValueError, match="at least 23 bytes, got 22"):
        looked_up.find(data[:22])


def test_a_passage_far_away_in_a_long_expected_text_is_followed() -> None:
    rng = random.Random(2)
    tokens = [rng.randrange(1000) for _ in range(20_000)]
    expected = ExpectedText(tokens)
    alignment = Alignment(expected)
    alignment.read([*tokens[:50], *tokens[15_000:15_040]])
    assert alignment.followed
    assert alignment.offset == expected.starts[15_040]
    alignment.read([*tokens[:50], *tokens[15_000:15_040], *tokens[100:140]])
    assert alignment.offset == expected.starts[140]
