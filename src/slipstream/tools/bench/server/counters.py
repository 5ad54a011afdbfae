"""A server's own counters, read from its Prometheus metrics, and their growth during a benchmark.

Supported are vLLM's names (`vllm:…`) and the same ones with Slipstream's prefix (`slipstream_…`):
`spec_decode_num_drafts`, `spec_decode_num_draft_tokens`, `spec_decode_num_accepted_tokens`,
`spec_decode_num_accepted_tokens_per_pos` (label `position`, from 0), `generation_tokens`, `prompt_tokens` and
`request_success`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from slipstream.core.metrics.request import RequestMetrics
from slipstream.errors import RemoteError
from slipstream.tools.bench.result import PooledAcceptance

PREFIXES = ("slipstream_", "vllm:")
"""In order of preference, for a server that has both."""

_NAMES = {
    "num_drafts": "spec_decode_num_drafts",
    "num_draft_tokens": "spec_decode_num_draft_tokens",
    "num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "num_output_tokens": "generation_tokens",
    "num_prompt_tokens": "prompt_tokens",
    "num_requests": "request_success",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True, slots=True)
class Counters:
    """A reading of the counters, or the growth between two; None for what the server does not expose."""

    num_drafts: int | None = None
    """Steps that proposed something."""
    num_draft_tokens: int | None = None
    num_accepted_tokens: int | None = None
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_requests: int | None = None
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> PooledAcceptance | None:
        """α, τ and α by position; None where nothing was drafted.

        The counters cover only steps with drafts, so τ is 1 + accepted / drafts without the other steps. They do not
        give the depth of each draft, so α by position is accepted at i + 1 over accepted at i: a lower bound for drafts
        of varying depth.
        """
        if not self.num_drafts or not self.num_draft_tokens or self.num_accepted_tokens is None:
            return None
        accepted = list(self.accepted_per_position)
        # A position of which nothing was accepted may come from an earlier load with deeper drafts. It is one of this
        # load only where some draft must have been that deep.
        while (
            accepted and not accepted[-1] and self.num_draft_tokens <= (len(accepted) - 1) * self.num_drafts
        ):
            accepted.pop()
        reached = [reach for reach in [self.num_drafts, *accepted][: len(accepted)] if reach]
        return PooledAcceptance.of(
            RequestMetrics(
                num_output_tokens=self.num_drafts + self.num_accepted_tokens,
                num_steps=self.num_drafts,
                num_draft_tokens=self.num_draft_tokens,
                num_accepted_tokens=self.num_accepted_tokens,
                reached_per_position=reached,
                accepted_per_position=accepted[: len(reached)],
            )
        )


def parse_counters(text: str, model: str) -> Counters | None:
    """The counters of `model` in Prometheus text; None where there are no supported ones.

    Samples of other models (label `model_name`) are ignored, those of several engines added up. Raises `RemoteError`
    for text that is not in Prometheus' format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = defaultdict(float)
    by_position: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if sample.labels.get("model_name", model) != model:
                    continue
                if name.endswith(_PER_POSITION):
                    by_position[name][int(sample.labels["position"])] += sample.value
                else:
                    sums[name] += sample.value
    except (ValueError, KeyError) as error:
        raise RemoteError(f"the server's metrics are not in Prometheus' text format: {error}") from None
    for prefix in PREFIXES:
        found = {field_: int(sums[prefix + name]) for field_, name in _NAMES.items() if prefix + name in sums}
        if found:
            positions = by_position.get(prefix + _PER_POSITION, {})
            per_position = [int(positions.get(i, 0)) for i in range(max(positions, default=-1) + 1)]
            return Counters(**found, accepted_per_position=per_position)
    return None


def growth(before: Counters, after: Counters) -> Counters | None:
    """The growth between two readings; None when a counter decreased, as it does when a server restarts.

    A counter that is only in the second reading started at 0: servers create counters when they first count.
    """
    grown: dict[str, int | None] = {}
    for name in _NAMES:
        first, last = getattr(before, name), getattr(after, name)
        grown[name] = None if last is None else last - (first or 0)
    pairs = [
        last - (before.accepted_per_position[i] if i < len(before.accepted_per_position) else 0)
        for i, last in enumerate(after.accepted_per_position)
    ]
    if any(value is not None and value < 0 for value in [*grown.values(), *pairs]):
        return None
    return Counters(**grown, accepted_per_position=pairs)


@dataclass(frozen=True, slots=True)
class ClientCounts:
    """The clients' counts during the same time."""

    num_requests: int
    """Number of complete answers."""
    num_failed: int
    num_prompt_tokens: int | None
    """From `usage`; None where some answer lacks it."""
    num_output_tokens: int | None
    num_chunks: int
    """Number of streamed pieces of text."""


def disagreements(client: ClientCounts, server: Counters | None) -> list[str]:
    """Messages about differences between the client's and the server's counts, and contradictions within either."""
    found: list[str] = []
    if client.num_output_tokens is not None and client.num_chunks > client.num_output_tokens:
        found.append(
            f"{client.num_chunks:,} pieces of text were streamed, but usage counts only "
            f"{client.num_output_tokens:,} output tokens"
        )
    if server is None:
        return found
    for name in ("num_output_tokens", "num_prompt_tokens", "num_requests"):
        counted, seen = getattr(server, name), getattr(client, name)
        if counted is not None and seen is not None and counted != seen:
            found.append(_difference(_WORDS[name], seen, counted, client.num_failed))
    made = server.num_output_tokens
    if made is not None and server.num_drafts is not None and server.num_accepted_tokens is not None:
        claimed = server.num_drafts + server.num_accepted_tokens
        cut = server.num_requests or 0  # an answer that ends at an accepted token lacks the target's own one
        if claimed > made + cut:
            found.append(
                f"the server counts {server.num_accepted_tokens:,} accepted tokens in {server.num_drafts:,} drafts, "
                f"which makes {claimed:,} tokens, but only {made:,} generated ones: it seems to count "
                "accepted tokens past the end of answers, so α and τ are too high"
            )
    return found


_WORDS = {
    "num_output_tokens": "output tokens",
    "num_prompt_tokens": "prompt tokens",
    "num_requests": "finished requests",
}


def _difference(what: str, seen: int, counted: int, num_failed: int) -> str:
    share = f" ({(counted - seen) / seen:+.1%})" if seen else ""
    if counted < seen:
        why = "the server's counters miss some of its answers"
    elif num_failed:
        why = f"other traffic, or the {num_failed} requests that failed here"
    else:
        why = "other traffic on the server, or tokens that it counted but did not send"
    return f"the clients counted {seen:,} {what}, the server {counted:,}{share}: {why}"
