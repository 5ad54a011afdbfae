"""The steps of an answer as a state machine: told apart in any tokens, drafted once at most, and never lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError, RequestError
from slipstream.reasoning.config import ReasoningConfig
from slipstream.reasoning.options import StepOptions, parse_step_options
from slipstream.reasoning.record import StepAuthor, StepScore, StepVerdict
from slipstream.reasoning.steps import AnswerPhase, StepMarks, StepStage, StepTracker

MARKS = StepMarks(b"\n\n", b"</think>")
TAGGED = StepMarks(b"\n\n", b"</think>", b"<think>")
GOOD, BAD = StepScore(8.0), StepScore(2.0)


def tracker(marks: StepMarks = MARKS, unfit: str = "", **options: object) -> StepTracker:
    return StepTracker(marks, StepOptions(**{"protect_first_steps": 0, **options}), unfit)  # type: ignore[arg-type]


def write(steps: StepTracker, text: str, size: int = 3, kept: bool = False) -> None:
    data = text.encode()
    for begin in range(0, len(data), size):
        steps.push(data[begin : begin + size], kept)


def draft(steps: StepTracker, text: str, size: int = 3) -> StepStage:
    steps.begin_draft()
    data = text.encode()
    for begin in range(0, len(data), size):
        if steps.push_draft(data[begin : begin + size]) is not StepStage.DRAFTING:
            break
    return steps.stage


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_steps_are_told_apart_however_the_text_is_cut_into_tokens(size: int) -> None:
    steps = tracker(TAGGED, protect_first_steps=9)
    write(steps, "Hello <think>one\n\ntwo\n\n\n\nthree</think>The answer.\n\nIs it", size)
    steps.end()
    assert steps.phase is AnswerPhase.ANSWERING
    if size < 10:  # one token for all of it is one step
        assert [record.number for record in steps.log] == [0, 1, 2]
    assert all(record.verdict is StepVerdict.PROTECTED for record in steps.log)


def test_thinking_that_the_prompt_has_begun() -> None:
    steps = tracker(TAGGED)
    steps.read_prompt(b"<think>old</think> A question <think>\n")
    assert steps.phase is AnswerPhase.THINKING
    ended = tracker(TAGGED)
    ended.read_prompt(b"<think>old</think> A question")
    assert ended.phase is AnswerPhase.BEFORE


def test_a_step_is_drafted_behind_its_first_token_and_kept() -> None:
    steps = tracker(protect_first_steps=1)
    write(steps, "first\n\n", 1)
    assert not steps.may_draft, "no token of the step is the target's own yet"
    write(steps, "s")
    assert draft(steps, "econd\n\n") is StepStage.DRAFTED
    steps.judge(GOOD, keep=True)
    write(steps, "econd\n\n", 3, kept=True)
    first, second = steps.log
    assert (first.author, first.verdict) == (StepAuthor.TARGET, StepVerdict.PROTECTED)
    assert (second.author, second.verdict, second.num_drafted) == (StepAuthor.DRAFT, StepVerdict.KEPT, 3)
    assert second.as_json() == {
        "step": 1, "author": "draft", "verdict": "kept", "tokens": 4, "drafted": 3, "score": 8.0
    }  # fmt: skip


def test_a_refused_step_is_rewritten_and_not_drafted_again() -> None:
    steps = tracker()
    write(steps, "s")
    draft(steps, "tep\n\n")
    steps.judge(BAD, keep=False)
    assert not steps.may_draft
    write(steps, "omething else\n\n")
    [record] = steps.log
    assert (record.author, record.verdict, record.score) == (StepAuthor.TARGET, StepVerdict.REWRITTEN, BAD)
    write(steps, "n")
    assert steps.may_draft


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("on and on and on and on and on", "no separator within max_step_tokens 8"),
        ("a </think>\n\n", "the draft wrote '</think>' inside the step"),
        ("a <think> b\n\n", "the draft wrote '<think>' inside the step"),
    ],
)
def test_a_bad_draft_falls_back_to_the_targets_own(text: str, reason: str) -> None:
    steps = tracker(TAGGED, max_step_tokens=8)
    write(steps, "<think>x", 1)
    assert draft(steps, text) is StepStage.OWN
    write(steps, "own\n\n")
    [record] = steps.log
    assert (record.author, record.verdict, record.reason) == (StepAuthor.TARGET, StepVerdict.OWN, reason)


def test_a_draft_that_ends_and_a_draft_that_is_never_good() -> None:
    steps = tracker(give_up_after=2)
    write(steps, "a")
    steps.begin_draft()
    assert steps.push_draft(b"", is_end=True) is StepStage.OWN
    write(steps, "b\n\nc")
    draft(steps, "d\n\n")
    steps.judge(StepScore(9.0, is_sure=False), keep=False)
    write(steps, "e\n\nf", 1)
    assert steps.has_given_up
    assert not steps.may_draft
    write(steps, "g\n\n")
    assert [record.reason for record in steps.log] == [
        "the draft ended its text",
        "the judge gave no mark",
        "given up after 2 drafted steps that were not kept",
    ]


def test_a_kept_step_forgives_earlier_ones() -> None:
    steps = tracker(give_up_after=2)
    for keep in (False, True, False):
        write(steps, "a")
        draft(steps, "b\n\n")
        steps.judge(GOOD, keep)
        write(steps, "b\n\n", 3, kept=keep)
    assert not steps.has_given_up


def test_the_end_of_the_thinking_is_never_drafted() -> None:
    steps = tracker()
    write(steps, "one\n\n<", 1)
    assert not steps.may_draft, "it may be the beginning of </think>"
    write(steps, "/think>answer\n\nmore", 1)
    assert steps.phase is AnswerPhase.ANSWERING
    assert not steps.may_draft
    assert len(steps.log) == 1
    assert tracker().may_end(b"</thi")
    assert tracker().may_end(b"\n</think>x")
    assert not tracker().may_end(b"a")


def test_an_unfit_draft_and_a_long_step_are_said() -> None:
    unfit = tracker(unfit="the draft has not the template")
    write(unfit, "a")
    assert not unfit.may_draft
    write(unfit, "\n\n")
    assert unfit.log[0].reason == "the draft has not the template"
    long = tracker(max_step_tokens=4, protect_first_steps=0)
    write(long, "0123456789\n\n", 1)
    assert long.log[0].reason == "longer than max_step_tokens 4"


def test_calls_out_of_turn_are_refused() -> None:
    steps = tracker()
    for call in (steps.begin_draft, lambda: steps.push_draft(b"a"), lambda: steps.judge(GOOD, True)):
        with pytest.raises(ValueError, match=r"draft|judge"):
            call()


PIECES = st.sampled_from(["a", " b", "\n", "\n\n", "x\n\ny", "</think>", "<think>", "</", " ", "."])


@settings(max_examples=150)
@given(data=st.data())
def test_any_history(data: st.DataObject) -> None:
    """Whatever is written, drafted and judged: protected steps are the target's, every token of the thinking is in
    one step, kept tokens are in kept steps, and nothing is drafted behind the thinking."""
    protect = data.draw(st.integers(0, 2))
    steps = tracker(
        protect_first_steps=protect, max_step_tokens=data.draw(st.integers(2, 9)), give_up_after=3
    )
    drafted_steps = 0
    for _ in range(data.draw(st.integers(1, 40))):
        if steps.may_draft and data.draw(st.booleans()):
            assert steps.phase is AnswerPhase.THINKING
            assert len(steps.log) >= protect
            steps.begin_draft()
            drafted_steps += 1
            written = list[str]()
            while steps.stage is StepStage.DRAFTING:
                written.append(data.draw(PIECES))
                steps.push_draft(written[-1].encode())
            if steps.stage is StepStage.DRAFTED:
                keep = data.draw(st.booleans())
                steps.judge(GOOD, keep)
                number = len(steps.log)
                if keep:
                    for piece in written:
                        steps.push(piece.encode(), kept=True)
                    assert steps.log[number].verdict is StepVerdict.KEPT
                    assert len(steps.log) == number + 1
        else:
            steps.push(data.draw(PIECES).encode())
    steps.end()
    log = steps.log
    assert [record.number for record in log] == list(range(len(log)))
    assert all(record.author is StepAuthor.TARGET for record in log[:protect])
    assert sum(record.num_drafted > 0 for record in log) == drafted_steps
    for record in log:
        assert (record.author is StepAuthor.DRAFT) == (record.verdict is StepVerdict.KEPT)
        assert record.num_tokens > 0
        assert record.reason or record.verdict is not StepVerdict.OWN


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("yes", "reasoning must be an object"),
        ({"judg": "score"}, "did you mean 'judge'"),
        ({"judge": "vibes"}, "judge must be 'score' or 'logprob'"),
        ({"mode": "token"}, "mode must be 'step'"),
        ({"threshold": 10}, r"threshold must be a number within \[0, 9\]"),
        ({"threshold": float("nan")}, "threshold"),
        ({"judge": "logprob", "threshold": 1}, "threshold"),
        ({"max_entropy": 2}, "max_entropy is for judge 'logprob'"),
        ({"max_step_tokens": 1}, "max_step_tokens must be a whole number of at least 2"),
        ({"protect_first_steps": True}, "protect_first_steps must be a whole number"),
        ({"protect_last_step": 1}, "protect_last_step must be true or false"),
        ({"draft": 7}, "draft must be a name"),
    ],
)
def test_bad_options_are_refused_in_a_line(value: object, said: str) -> None:
    with pytest.raises(RequestError, match=said) as error:
        parse_step_options(value)
    assert "\n" not in str(error.value)


def test_defaults() -> None:
    assert parse_step_options(True).least == 7
    assert parse_step_options({"judge": "logprob"}).least == -0.5
    assert ReasoningConfig.from_mapping({"model": "a/b/small"}).name == "small"
    for bad in ({"separator": ""}, {"num_speculative_tokens": 3}, {"question": ""}, {"chunk_tokens": 0}):
        with pytest.raises(ConfigError):
            ReasoningConfig.from_mapping(bad)
