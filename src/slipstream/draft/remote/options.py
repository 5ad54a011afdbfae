"""What users set for engines and draft workers. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slipstream.config import check_at_least, check_types
from slipstream.draft.remote.address import Address
from slipstream.draft.remote.protocol import MAX_CONTINUATION_TOKENS
from slipstream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Keys of `speculative_config` for `method: remote`."""

    workers: str | list[Any] = "127.0.0.1:7070"
    """Address of a draft worker, or a list of them: `HOST:PORT`, `tcp://HOST:PORT` or `unix:PATH`. Requests are shared
    out among those that are connected."""
    num_speculative_tokens: int = 4
    """The most draft tokens in a step."""
    max_wait_ms: float = 0.0
    """How long a step may wait for continuations that have not arrived. 0: it never waits. The wait counts as the
    drafter's time, so `auto` prices it; a step does not wait for a continuation that usually takes longer."""
    wait_tokens: int | None = None
    """A wait ends as soon as so many draft tokens of each request are there; None is all of them."""
    key_file: str | None = None
    """File of the key that engine and worker share; None is the environment variable SLIPSTREAM_WORKER_KEY. Workers
    beyond this machine need one."""

    def __post_init__(self) -> None:
        check_types(self, "remote")
        check_at_least("remote", 1, num_speculative_tokens=self.num_speculative_tokens)
        if self.num_speculative_tokens > MAX_CONTINUATION_TOKENS // 2 - 1:
            raise ConfigError(
                f"remote num_speculative_tokens must be at most {MAX_CONTINUATION_TOKENS // 2 - 1}"
            )
        if self.wait_tokens is not None:
            check_at_least("remote", 1, wait_tokens=self.wait_tokens)
        if not 0 <= self.max_wait_ms <= 60_000:
            raise ConfigError(f"remote max_wait_ms must be from 0 to 60,000, got {self.max_wait_ms}")
        self.addresses()

    def addresses(self) -> list[Address]:
        """The workers'; raises `ConfigError` where one is none."""
        workers = [self.workers] if isinstance(self.workers, str) else self.workers
        if not isinstance(workers, (list, tuple)) or not workers:
            raise ConfigError(f"remote workers must be an address or a list of them, got {self.workers!r}")
        for worker in workers:
            if not isinstance(worker, str):
                raise ConfigError(
                    f"remote workers must be addresses such as '127.0.0.1:7070', got {worker!r}"
                )
        return [Address.parse(worker) for worker in workers]


@dataclass(frozen=True)
class ServedOptions:
    """What `slipstream draft-worker` is given in addition to target, drafter and engine."""

    max_requests: int = 32
    """The most requests, of all engines together, that are drafted for; others go without."""
    tokens_per_round: int = 1
    """Draft tokens of each call of the drafter. With 1 a worker turns to what was committed after each pass; more save
    calls of a very small draft model."""

    def __post_init__(self) -> None:
        check_at_least(
            "draft-worker", 1, max_requests=self.max_requests, tokens_per_round=self.tokens_per_round
        )
