"""Counters and times of one answer: steps, draft tokens, acceptance, seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, zip_longest
from typing import Any


@dataclass(slots=True)
class RequestMetrics:
    """Counters of one sequence. All counts are of *emitted* work: tokens cut off by a stop rule are not accepted.

    A step's seconds count in full for every sequence that took part in it, since each of them waited so long.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were reused instead of computed."""
    num_output_tokens: int = 0
    num_resumed_tokens: int = 0
    """Output tokens among them that came with the request: no step here made them."""
    num_steps: int = 0
    """Target passes that yielded at least one token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    proposed_per_position: list[int] = field(default_factory=list)
    """Entry i: steps whose proposal had a node at depth i + 1."""
    reached_per_position: list[int] = field(default_factory=list)
    """Entry i: steps that proposed depth i + 1 below an accepted path, the denominator of the conditional rate."""
    accepted_per_position: list[int] = field(default_factory=list)
    """Entry i: steps that accepted a token at depth i + 1."""
    acceptance_histogram: list[int] = field(default_factory=list)
    """Entry k: steps that accepted exactly k draft tokens."""
    num_cut_steps: int = 0
    """Steps without a token of the target's own: the answer ended at a draft token, or its masks left no token."""
    num_accepted_prediction_tokens: int = 0
    """Tokens of the request's prediction that the finished answer has, drafted or not."""
    num_rejected_prediction_tokens: int = 0
    """Those that it has not."""
    lossy: bool = False
    """Whether the request chose step-level speculation, so that its text may not be the target's own."""
    num_drafted_steps: int = 0
    """Steps of thinking for which a draft wrote something."""
    num_kept_steps: int = 0
    """Those that the judge kept."""
    num_lossy_tokens: int = 0
    """Draft tokens in them."""
    reasoning_log: list[dict[str, Any]] = field(default_factory=list)
    """One entry a step: its author, mark and verdict; see `reasoning.record.StepRecord`."""
    num_preemptions: int = 0
    queue_s: float = 0.0
    """From arrival to the first step."""
    draft_s: float = 0.0
    verify_s: float = 0.0
    """Target passes and verdicts, the prompt's included."""
    other_s: float = 0.0
    """The rest of `total_s`: scheduling, text, waiting for steps that it was not part of."""
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0
    seed: int = 0
    draft_version: str = ""
    """The version that drafted last, where a drafter's versions are learned while serving; empty for the base
    drafter."""
    reproducible: bool = True
    """Whether the seed gives the same answer again."""

    def record_step(
        self, proposed_depth: int, num_proposed: int, num_reached: int, num_accepted: int
    ) -> None:
        """Count one decoding step.

        `proposed_depth` is the depth of the proposed tree, `num_proposed` its nodes, `num_reached` the positions
        that the target judged (one more than `num_accepted` unless the accepted path ended at a leaf or was cut), and
        `num_accepted` the accepted draft tokens that were emitted.
        """
        self.num_steps += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        add_to_first(self.proposed_per_position, proposed_depth)
        add_to_first(self.reached_per_position, num_reached)
        add_to_first(self.accepted_per_position, num_accepted)
        while len(self.acceptance_histogram) <= num_accepted:
            self.acceptance_histogram.append(0)
        self.acceptance_histogram[num_accepted] += 1

    @classmethod
    def merged(cls, parts: Sequence[RequestMetrics]) -> RequestMetrics:
        """Several answers of one request as one.

        Counts add up. What belongs to the prompt, and the seed, are the first answer's, the only one that computed
        the prompt. Times are those of the slowest answer, but the first token came when any answer's came.
        """
        slowest = max(parts, key=lambda part: part.total_s)
        merged = cls()
        for field_ in fields(cls):
            values = [getattr(part, field_.name) for part in parts]
            if field_.name in ("num_prompt_tokens", "num_cached_tokens", "seed", "draft_version"):
                setattr(merged, field_.name, values[0])
            elif field_.name == "lossy":
                merged.lossy = any(values)
            elif isinstance(values[0], bool):
                setattr(merged, field_.name, all(values))
            elif field_.name.endswith("_s"):
                setattr(merged, field_.name, getattr(slowest, field_.name))
            elif field_.name == "reasoning_log":
                setattr(merged, field_.name, list(chain.from_iterable(values)))
            elif isinstance(values[0], list):
                setattr(merged, field_.name, [sum(v) for v in zip_longest(*values, fillvalue=0)])
            else:
                setattr(merged, field_.name, sum(values))
        merged.time_to_first_token_s = min(part.time_to_first_token_s for part in parts)
        return merged

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens (pooled α); 0 when nothing was proposed."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def conditional_acceptance(self) -> list[float]:
        """Entry i: accepted at position i + 1 over the steps that reached and proposed it."""
        pairs = zip_longest(self.accepted_per_position, self.reached_per_position, fillvalue=0)
        return [accepted / reached for accepted, reached in pairs]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens committed per target pass (τ), the target's own token included."""
        return self.num_new_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def num_new_tokens(self) -> int:
        """Output tokens that were made here."""
        return self.num_output_tokens - self.num_resumed_tokens

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens over the time since the request arrived."""
        return self.num_new_tokens / self.total_s if self.total_s else 0.0


def add_to_first(counts: list[int], num: int, times: int = 1) -> None:
    """Add `times` to each of the first `num` entries, lengthening the list where needed."""
    counts.extend([0] * (num - len(counts)))
    for position in range(num):
        counts[position] += times
