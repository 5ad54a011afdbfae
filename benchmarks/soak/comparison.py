"""Whether an answer is the lone one."""

from __future__ import annotations

from benchmarks.soak.cases import Answered
from benchmarks.soak.client import Choice, Received
from slipstream.engine.outputs import CompletionOutput

LOGPROB_TOLERANCE = 1e-4


def difference(expected: Answered, received: Received, with_token_ids: bool) -> str | None:
    """The first thing in a complete response that is not as in the lone run; None where nothing is."""
    if sorted(received.choices) != list(range(len(expected.answers))):
        return f"choices {sorted(received.choices)} instead of {len(expected.answers)}"
    for index, answer in enumerate(expected.answers):
        found = _of_choice(answer, received.choices[index], with_token_ids)
        if found is not None:
            return f"choice {index}: {found}"
    usage = received.usage or {}
    want = (expected.case.num_prompt_tokens, expected.num_output_tokens)
    have = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    if have != want or usage.get("total_tokens") != sum(want):
        return f"usage {usage} instead of {want[0]} and {want[1]} tokens"
    return None


def _of_choice(answer: CompletionOutput, choice: Choice, with_token_ids: bool) -> str | None:
    if choice.text != answer.text:
        return f"text {choice.text!r} instead of {answer.text!r}"
    if choice.finish_reason != answer.finish_reason:
        return f"ended by {choice.finish_reason} instead of {answer.finish_reason}"
    if with_token_ids and choice.token_ids != answer.token_ids:
        return f"tokens {choice.token_ids} instead of {answer.token_ids}"
    expected = [entry.logprob for entry in answer.token_logprobs or []]
    if len(choice.logprobs) != len(expected):
        return f"{len(choice.logprobs)} log-probabilities instead of {len(expected)}"
    for position, (have, want) in enumerate(zip(choice.logprobs, expected, strict=True)):
        if abs(have - max(want, -9999.0)) > LOGPROB_TOLERANCE:
            return f"log-probability {have} instead of {want} at token {position}"
    return None


def prefix_fault(expected: Answered, received: Received) -> str | None:
    """What a client that left had read must be the beginning of the lone answer."""
    for index, choice in received.choices.items():
        answer = expected.answers[index]
        if not answer.text.startswith(choice.text):
            return f"choice {index}: text {choice.text!r} does not begin {answer.text!r}"
        if choice.token_ids != answer.token_ids[: len(choice.token_ids)]:
            return f"choice {index}: tokens {choice.token_ids} do not begin {answer.token_ids}"
    return None
