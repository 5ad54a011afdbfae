"""How the router places requests, how long it waits, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.config import check_at_least, check_types, reject_unknown
from slipstream.errors import ConfigError

UNLIKE = ("refuse", "say")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The router's bounds. Times are in seconds, lengths in tokens."""

    max_waiting: int = 1024
    """Most answers that wait in front of the replicas or are paused because they are not read; a request with more is
    refused with 429. While replicas have places to spare, so many more may be paused."""
    max_imbalance: float = 0.25
    """How much more of its capacity a replica that knows a prompt's beginning may be using than the least loaded one,
    and still be chosen."""
    block_tokens: int = 32
    """The grain in which prompts are compared."""
    hang_timeout_s: float = 10.0
    """A replica that is not heard of for so long is taken for hung: its requests go on elsewhere. It must exceed the
    longest step."""
    stall_timeout_s: float = 120.0
    """A request without a token for so long goes on elsewhere although its replica is heard of, unless it is paused, or
    waits for its turn at a full replica and the others are full as well."""
    failover_timeout_s: float = 300.0
    """How long a request waits for a replica that can go on with it before it ends with an error."""
    max_fruitless_attempts: int = 8
    """A request that has lost so many replicas without a new token in between ends with an error: it may be what stops
    them."""
    unlike_replicas: str = "refuse"
    """Replicas of other arithmetic may differ at near-ties. `refuse`: an answer goes on among replicas of equal
    arithmetic only. `say`: it goes on anywhere, and the response says so."""

    def __post_init__(self) -> None:
        check_types(self, "router")
        check_at_least("router", 0, max_waiting=self.max_waiting)
        check_at_least("router", 1, block_tokens=self.block_tokens)
        check_at_least("router", 1, max_fruitless_attempts=self.max_fruitless_attempts)
        if not self.max_imbalance >= 0:
            raise ConfigError(f"router max_imbalance must be at least 0, got {self.max_imbalance}")
        for name in ("hang_timeout_s", "stall_timeout_s", "failover_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"router {name} must be above 0, got {getattr(self, name)}")
        reject_unknown([self.unlike_replicas], UNLIKE, "unlike_replicas")


ROUTER_FIELDS = tuple(field.name for field in fields(RouterConfig))
