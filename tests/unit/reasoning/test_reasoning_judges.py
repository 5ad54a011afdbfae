"""Judges of a drafted step, on logits made by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoTokenizer

from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ConfigError
from slipstream.reasoning.judges import LogprobJudge, ScoreJudge
from slipstream.reasoning.options import StepOptions
from slipstream.reasoning.question import digit_token_ids, question_text, question_token_ids


def logits_of(rows: list[dict[int, float]], width: int = 16) -> torch.Tensor:
    """Rows with these probabilities; the rest of each is spread evenly."""
    probs = torch.zeros(len(rows), width)
    for row, given in enumerate(rows):
        left = 1 - sum(given.values())
        probs[row] = left / (width - len(given))
        for token, probability in given.items():
            probs[row, token] = probability
    return probs.log()


def test_the_mark_is_the_mean_of_the_digits() -> None:
    judge = ScoreJudge([5, 6], {1: 9, 2: 9, 3: 0})
    rows = [{}, {}, {}, {1: 0.4, 2: 0.2, 3: 0.2}]  # a step of one token, a question of two
    score = judge.score(logits_of(rows), [4])
    assert score.value == pytest.approx(9 * 0.6 / 0.8, rel=1e-5)
    assert judge.keeps(score, StepOptions(threshold=6.7))
    assert not judge.keeps(score, StepOptions(threshold=6.8))


def test_a_judge_that_does_not_answer_keeps_nothing() -> None:
    judge = ScoreJudge([5], {1: 9})
    score = judge.score(logits_of([{}, {}, {1: 0.4}]), [4])
    assert score.value == 9
    assert not score.is_sure
    assert not judge.keeps(score, StepOptions(threshold=0))


def test_the_mean_log_probability_and_entropy_of_the_step() -> None:
    judge = LogprobJudge()
    rows = [{3: 0.5}, {4: 0.25}, {}]  # the last row follows the step, and says nothing of it
    logits = logits_of(rows)
    score = judge.score(logits, [3, 4])
    assert score.value == pytest.approx((math.log(0.5) + math.log(0.25)) / 2, rel=1e-5)
    probs = logits[:2].exp()
    assert score.entropy == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-5)
    assert judge.keeps(score, StepOptions(judge="logprob", threshold=-1.1))
    assert not judge.keeps(score, StepOptions(judge="logprob", threshold=-1.0))
    assert not judge.keeps(score, StepOptions(judge="logprob", threshold=-9, max_entropy=0.5))


def test_forbidden_tokens_do_not_spoil_the_entropy() -> None:
    logits = logits_of([{3: 0.5}, {}])
    logits[0, 7] = -math.inf
    score = LogprobJudge().score(logits, [3])
    assert score.entropy is not None
    assert math.isfinite(score.entropy)
    assert score.is_sure


def test_the_question_is_a_turn_of_the_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    text = question_text(tokenizer)
    assert text.startswith("<|end|><|user|>Evaluate")
    assert text.endswith("<|assistant|>The mark from 0 to 9 is ")
    assert tokenizer.decode(question_token_ids(tokenizer, None)) == text
    assert question_token_ids(tokenizer, "Right?") == tokenizer("Right?").input_ids
    digits = digit_token_ids(tokenizer)
    assert set(digits.values()) == set(range(10))
    assert all(tokenizer.decode([token]).strip() == str(digit) for token, digit in digits.items())
    tokenizer.chat_template = None
    assert question_text(tokenizer).startswith("\n\n(Evaluate")


def test_a_tokenizer_without_digits_gives_no_marks() -> None:
    class Pairs:
        """Every text is two tokens."""

        def __call__(self, text: str, **_: object) -> object:
            return type("Encoded", (), {"input_ids": [1, 2]})

    with pytest.raises(ConfigError, match="no single token for the digit 0"):
        digit_token_ids(Pairs())
