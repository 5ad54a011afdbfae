"""What an answer says of itself against its own text: usage, finish reasons, lengths, stop strings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slipstream.tools.audit.findings import AuditCheck
from slipstream.tools.audit.records import AuditAnswer, AuditReply, AuditRequest

MAX_RETOKENISED_SHARE = 0.1
"""Tokens that encoding an answer's text again may lose or gain, as a share, before `usage` is called wrong."""
MIN_RETOKENISED = 3
"""The same, in tokens."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known of the audited side in addition to its answers."""

    end_tokens: frozenset[int] | None = None
    """The model's end tokens; None where they are not known."""
    count: Callable[[str], int] | None = None
    """Counts the tokens of a text; None without a tokenizer."""


def account(
    requests: Mapping[int, AuditRequest], replies: Mapping[int, AuditReply], known: Knowledge
) -> list[AuditCheck]:
    """The checks of every reply that came."""
    usage = AuditCheck("usage", "`usage` against the tokens of the prompt and of the answers themselves")
    ends = AuditCheck("finish reasons", "finish reasons against lengths, end tokens and stop strings")
    stops = AuditCheck("stop strings", "texts against the stop strings that they may not hold")
    for number, reply in sorted(replies.items()):
        if reply.error is not None or number not in requests:
            continue
        request = requests[number]
        _check_usage(usage, request, reply, known)
        if len(reply.answers) != request.num_answers:
            ends.violate(
                f"request {number} has {len(reply.answers)} answers, {request.num_answers} were requested",
                number,
            )
        for answer in reply.answers:
            _check_end(ends, request, answer, known)
            _check_stop(stops, request, answer)
    for check in (usage, ends, stops):
        if not check.num_compared:
            check.skipped = "no answer tells enough of itself" if replies else "there are no answers"
    return [usage, ends, stops]


def _check_usage(check: AuditCheck, request: AuditRequest, reply: AuditReply, known: Knowledge) -> None:
    number, reported = request.number, reply.num_output_tokens
    prompt = reply.prompt_token_ids or request.token_ids
    if prompt is not None and reply.num_prompt_tokens is not None:
        check.expect(
            reply.num_prompt_tokens == len(prompt),
            f"request {number}: usage counts {reply.num_prompt_tokens} prompt tokens, the prompt has {len(prompt)}",
            number,
        )
    if reported is None:
        return
    if reply.num_total_tokens is not None and reply.num_prompt_tokens is not None:
        check.expect(
            reply.num_total_tokens == reported + reply.num_prompt_tokens,
            f"request {number}: usage's total of {reply.num_total_tokens} tokens is not the sum of its parts",
            number,
        )
    most = request.max_tokens * request.num_answers
    check.expect(
        reported <= most,
        f"request {number}: usage counts {reported} tokens, at most {most} were requested",
        number,
    )
    counts = [answer.num_tokens for answer in reply.answers]
    exact = [one for one in counts if one is not None]
    if len(exact) == len(counts):
        hidden = sum(answer.num_hidden for answer in reply.answers)
        check.expect(
            sum(exact) <= reported <= sum(exact) + hidden,
            f"request {number}: usage counts {reported} tokens, the answers have {sum(exact)}",
            number,
        )
    elif known.count is not None:
        encoded = sum(known.count(answer.text) for answer in reply.answers)
        room = max(MIN_RETOKENISED, MAX_RETOKENISED_SHARE * encoded)
        check.expect(
            abs(reported - encoded) <= room + len(reply.answers),  # an end token each has no text
            f"request {number}: usage counts {reported} tokens, the text encodes to {encoded}",
            number,
        )


def _check_end(check: AuditCheck, request: AuditRequest, answer: AuditAnswer, known: Knowledge) -> None:
    number, most, length = request.number, request.max_tokens, answer.num_tokens
    reason = answer.finish_reason
    if reason is None:
        check.expect(False, f"request {number}: an answer has no finish reason", number)
        return
    if length is None:
        return
    what = f"request {number}: an answer of {length} of at most {most} tokens ended with {reason!r}"
    ends = _may_end(request, answer, known)
    if reason == "length":
        check.expect(length <= most <= length + answer.num_hidden, f"{what} before its length", number)
    elif reason == "stop":
        check.expect(length <= most, what, number)
        if ends is not None:
            check.expect(ends, f"{what}, without an end token and without a stop string", number)
    else:
        check.expect(False, f"{what}: it did not come to its end", number)


def _may_end(request: AuditRequest, answer: AuditAnswer, known: Knowledge) -> bool | None:
    """Whether something is there that an answer may stop at; None where that is not known."""
    params = request.params
    if params.get("structured") is not None:
        return True
    if params.get("stop"):
        return True if answer.stop_reason is None or isinstance(answer.stop_reason, str) else None
    if params.get("stop_token_ids") and not answer.token_ids:
        return None
    if params.get("ignore_eos") and not params.get("stop_token_ids"):
        return False
    if answer.token_ids is None or known.end_tokens is None:
        return None
    last = answer.token_ids[-1] if answer.token_ids else None
    return last in known.end_tokens or last in (params.get("stop_token_ids") or ())


def _check_stop(check: AuditCheck, request: AuditRequest, answer: AuditAnswer) -> None:
    stops = request.params.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else stops
    if not stops or request.params.get("min_tokens"):
        return
    kept = bool(request.params.get("include_stop_str_in_output"))
    for stop in stops:
        place = answer.text.find(stop)
        fine = place < 0 or (
            kept and answer.finish_reason == "stop" and place + len(stop) == len(answer.text)
        )
        check.expect(
            fine,
            f"request {request.number}: the text goes on behind the stop string {stop!r}",
            request.number,
        )
