"""What an audit sends: prompts, sampling parameters, lengths, and with what confidence it decides."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from slipstream.assets.workload.prompts import Prompt
from slipstream.assets.workload.reading import Question, Workload
from slipstream.config import check_at_least
from slipstream.errors import ConfigError, RequestError
from slipstream.sampling.noise import derive_seed
from slipstream.tools.audit.mix import Profile
from slipstream.tools.audit.records import AuditRequest

PROMPTS = 40
"""Prompts that are sent in turn, unless there are fewer: so each is sent several times, and prefixes are reused."""


@dataclass(frozen=True)
class AuditSettings:
    """The data of an audit."""

    workload: Workload
    num_answers: int = 300
    """Requests to each side."""
    max_tokens: int = 64
    num_prompts: int = PROMPTS
    seed: int = 0
    confidence: float = 0.99
    """An honest server is certified with at least this probability, as far as the tests are concerned."""
    concurrency: int = 8
    """Requests running at once."""
    tie_margin: float | None = None
    """Nats. First differences with a smaller margin are near-ties. None measures what rounding changes."""
    raw: bool = False
    """Plain prompts are not wrapped in the chat template."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters for every answer instead of a mix."""

    def __post_init__(self) -> None:
        sizes = {"answers": self.num_answers, "max_tokens": self.max_tokens, "concurrency": self.concurrency}
        check_at_least("audit", 1, **sizes)
        check_at_least("audit", 0, seed=self.seed)
        if not 0.5 <= self.confidence < 1:
            raise ConfigError(f"--confidence must be at least 0.5 and below 1, got {self.confidence}")
        if self.tie_margin is not None and not self.tie_margin >= 0:
            raise ConfigError(f"--tie-margin must be at least 0 nats, got {self.tie_margin}")

    @property
    def alpha(self) -> float:
        """Probability of a false alarm, over all tests together."""
        return 1.0 - self.confidence

    def prompts(self, fits: Callable[[Prompt], bool]) -> list[Prompt]:
        """The first prompts of each task in turn, `num_prompts` in all, that `fits` accepts.

        Raises `RequestError` where none is left.
        """
        by_task: dict[str, list[Question]] = {}
        for question in self.workload.questions:
            by_task.setdefault(question.task, []).append(question)
        chosen: list[Prompt] = []
        for place in range(max(map(len, by_task.values()), default=0)):
            for questions in by_task.values():
                if place < len(questions) and len(chosen) < self.num_prompts:
                    prompt = _prompt(questions[place], self.max_tokens)
                    if fits(prompt):
                        chosen.append(prompt)
        if not chosen:
            raise RequestError(
                f"none of the prompts of {self.workload.source} fits into the context with an answer of "
                f"{self.max_tokens} tokens; give shorter prompts or a smaller --max-tokens"
            )
        return chosen


def _prompt(question: Question, max_tokens: int) -> Prompt:
    return Prompt(question.task, question.where, max_tokens, question.text, question.messages)


def make_requests(
    settings: AuditSettings,
    prompts: Seq[Prompt],
    token_ids: Seq[Seq[int] | None],
    profiles: Seq[Profile],
    vocab_size: int,
) -> list[AuditRequest]:
    """The requests of an audit, in the order in which they are sent: prompts and profiles in turn, shuffled by the
    seed. `token_ids` are the encoded prompts, None where only text is known."""
    chance = random.Random(derive_seed(settings.seed, 2**42))
    repeat = math.lcm(len(prompts), len(profiles))  # then the same pairs would come again
    pairs = [
        (number % len(prompts), profiles[(number + number // repeat) % len(profiles)])
        for number in range(settings.num_answers)
    ]
    chance.shuffle(pairs)
    requests = []
    for number, (place, profile) in enumerate(pairs):
        prompt, ids = prompts[place], token_ids[place]
        requests.append(
            AuditRequest(
                number=number,
                prompt=place,
                task=prompt.task,
                params=_fitting(profile.make(chance, vocab_size), settings.max_tokens),
                max_tokens=settings.max_tokens,
                seed=derive_seed(settings.seed, number + 1),
                profile=profile.name,
                token_ids=None if ids is None else tuple(ids),
                text=prompt.text,
                messages=prompt.messages,
            )
        )
    return requests


def _fitting(params: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """The parameters for answers of at most `max_tokens`."""
    if "min_tokens" in params:
        params["min_tokens"] = min(params["min_tokens"], max_tokens)
    return params


def data_hash(requests: Seq[AuditRequest]) -> str:
    """SHA-256 of all that is sent: prompts, parameters and seeds."""
    digest = hashlib.sha256()
    for request in requests:
        sent = [request.token_ids or request.text or request.messages, request.params, request.seed]
        digest.update(json.dumps([*sent, request.max_tokens], sort_keys=True, default=list).encode())
    return digest.hexdigest()
