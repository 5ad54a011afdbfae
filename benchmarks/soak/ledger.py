"""The soak's own counts, and their comparison with the server's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

WHOLE, BROKEN = "soak-whole", "soak-broken"
"""Tasks of requests that are read to their end, and of those whose client leaves: the server counts them apart."""

_ALLOWED = {"num_objects": 4000, "num_blocks": 20_000, "malloc_bytes": 4 * 2**20, "rss_bytes": 48 * 2**20}
"""What the second half may leave behind: connections on their way out, texts in bounded caches, holes in the heap,
bounded histories that are not full yet. One object a request would be 5,000 of 10,000."""

_SHOWN = 20
"""Faults that the report tells in words."""

_P = "slipstream_"
Samples = dict[str, float]


@dataclass(slots=True)
class Ledger:
    """What was sent and received."""

    num_sent: Counter[str] = field(default_factory=Counter)
    """By how it was delivered."""
    statuses: Counter[int] = field(default_factory=Counter)
    """Statuses of responses that arrived whole."""
    refusals: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    """Finish reasons of answers that were read to their end."""
    num_answers: Counter[str] = field(default_factory=Counter)
    """Requested answers by task."""
    num_tokens: int = 0
    """Tokens of answers that were read to their end, counted from what was sent."""
    num_broken_tokens: int = 0
    """At least so many were generated for clients that left."""
    most_broken_tokens: int = 0
    """And at most so many."""
    num_prompt_tokens: int = 0
    most_prompt_tokens: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.num_sent.values())

    @property
    def faults(self) -> int:
        return len(self.lost) + len(self.wrong) + len(self.misshapen)


def samples(exposition: str) -> Samples:
    """Sample name with its labels, but the model's, to value."""
    found: Samples = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            labels = [f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name"]
            found[",".join([sample.name.removeprefix(_P), *labels])] = sample.value
    return found


def growth(before: Samples, after: Samples) -> Samples:
    """What the counters grew by."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def check(
    ledger: Ledger, before: Samples, after: Samples, halfway: Mapping[str, Any], books: Mapping[str, Any]
) -> dict[str, Any]:
    """Each demand by name: whether it is met, and the figures that say so."""
    grown = growth(before, after)
    whole = sum(v for k, v in grown.items() if k.startswith("task_generation") and f"task={WHOLE}" in k)
    broken = sum(v for k, v in grown.items() if k.startswith("task_generation") and f"task={BROKEN}" in k)
    tokens, prompts = grown["generation_tokens_total"], grown["prompt_tokens_total"]
    drafted = grown["spec_decode_num_draft_tokens_total"]
    accepted = grown["spec_decode_num_accepted_tokens_total"]
    wasted = grown["spec_decode_num_wasted_tokens_total"]
    by_position = _sum(grown, "spec_decode_num_accepted_tokens_per_pos_total")
    ends = {k.partition("=")[2]: v for k, v in grown.items() if k.startswith("request_success_total")}
    http = {int(k.partition("=")[2]): v for k, v in grown.items() if k.startswith("http_responses_total")}
    answers = ledger.num_answers[WHOLE]
    all_ends, all_answers = sum(ends.values()), sum(ledger.num_answers.values())
    own_4xx = {status: n for status, n in ledger.statuses.items() if status != 200}
    server_4xx = {status: n for status, n in http.items() if n and status not in (200, 499)}
    idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    gauges = {name: after[name] for name in idle}
    return {
        "nothing lost": _demand(not ledger.lost, lost=len(ledger.lost)),
        "nothing wrong": _demand(not ledger.wrong, wrong=len(ledger.wrong)),
        "errors in shape": _demand(not ledger.misshapen, misshapen=len(ledger.misshapen)),
        "books whole": _demand(
            not books["faults"] and not books["num_held_slots"] and not books["has_unfinished"], **books
        ),
        "gauges idle": _demand(gauges == idle, **gauges),
        "tokens as counted": _demand(whole == ledger.num_tokens, server=whole, clients=ledger.num_tokens),
        "broken tokens within bounds": _between(broken, ledger.num_broken_tokens, ledger.most_broken_tokens),
        "tasks add up": _demand(whole + broken == tokens, tasks=whole + broken, all=tokens),
        "prompt tokens within bounds": _between(prompts, ledger.num_prompt_tokens, ledger.most_prompt_tokens),
        "ends as counted": _demand(
            all(ends.get(reason, 0) >= n for reason, n in ledger.ends.items())
            and answers <= all_ends <= all_answers,
            server=ends,
            clients=dict(ledger.ends),
            at_most=all_answers,
        ),
        "drafts add up": _demand(
            accepted + wasted == drafted and by_position == accepted and accepted <= tokens,
            drafted=drafted,
            accepted=accepted,
            wasted=wasted,
            by_position=by_position,
        ),
        "statuses as counted": _demand(own_4xx == server_4xx, server=server_4xx, clients=own_4xx),
        "memory flat": memory(halfway, books, ledger.total // 2),
    }


def memory(halfway: Mapping[str, Any], books: Mapping[str, Any], num_requests: int) -> dict[str, Any]:
    """What the second half, `num_requests` of them, left behind when all was idle again.

    The first half fills what is meant to be filled: caches, pools, the tables of drafters.
    """
    grown = {name: (books[name] or 0) - (halfway[name] or 0) for name in _ALLOWED}
    return _demand(
        all(grown[name] <= allowed for name, allowed in _ALLOWED.items()),
        num_requests=num_requests,
        **{f"grown_{name}": value for name, value in grown.items()},
        **{f"allowed_{name}": value for name, value in _ALLOWED.items()},
        rss_bytes=books["rss_bytes"],
    )


def told(faults: list[str]) -> list[str]:
    """As many as a report needs."""
    return faults[:_SHOWN]


def _sum(grown: Samples, name: str) -> float:
    return sum(value for key, value in grown.items() if key.split(",")[0] == name)


def _between(value: float, least: int, most: int) -> dict[str, Any]:
    return _demand(least <= value <= most, server=value, at_least=least, at_most=most)


def _demand(met: bool, **figures: Any) -> dict[str, Any]:
    return {"met": bool(met)} | figures
