"""What the dashboard's page shows: one contract for every source of figures, Slipstream's own engine or another."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Any, Protocol

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class PageData:
    """The data of one poll. None is for what the source does not know: the page then hides that part.

    Series have one number a bucket of `bucket_s` seconds, the oldest first; sums are over the same buckets.
    """

    version: str
    model: str
    method: str
    """The drafter; `off` without one."""
    uptime_s: float
    age_s: float
    """Since the source was last read."""
    is_ready: bool
    has_stopped: bool
    state: str | None = None
    """Shown instead of `live` where the source is not well, as "cannot be reached"."""
    api_url: str | None = None
    """Where the model is served, without `/v1`; None: where the page is."""
    max_num_seqs: int | None = None
    max_waiting: int | None = None
    num_under_way: int
    acceptance_length: float | None = None
    """τ of all tasks, by the source's own definition; None: emitted tokens over target passes of `tasks`."""

    bucket_s: float
    tokens_per_s: Seq[float]
    kv_usage: Seq[float]
    num_running: Seq[int]
    num_waiting: Seq[int]
    num_steps: int
    draft_s: float | None = None
    verify_s: float | None = None
    other_s: float | None = None
    reached: Seq[int]
    """By position: how often a draft token was checked after all before it were accepted."""
    accepted: Seq[int]
    batches: Mapping[int, Seq[int]] | None = None
    """Decoding sequences in a step, to the sums of such steps, of their sequences, and of the draft depths."""
    latency: Mapping[str, Json]
    """Name of a time to its `p50`, `p90`, `p99` in seconds and the number `num` of them, as `LatencyWindow` has it."""

    tasks: Seq[Json]
    speculation: Json | None = None
    learning: Json | None = None
    """Acceptance by version of a drafter that learns, what became of candidates, and what learning costs."""
    methods: Seq[Json] = ()
    replicas: Seq[Json] | None = None
    """How each replica of a fleet is; None where one engine serves."""
    alarms: Seq[Json] = ()
    cleared: Seq[Json] = ()
    with_texts: bool = False
    recent: Seq[Json] | None = None
    """The last answers; None where the source does not see answers."""
    notes: Seq[str] = ()
    """What a reader must know of where the figures come from."""

    def as_json(self) -> Json:
        """Return it as the page reads it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


class PageSource(Protocol):
    """Who has the figures. `account` is the API key's, '' where there are no keys."""

    async def data(self, account: str) -> PageData:
        """The figures of this moment; returns within about a second whatever the source does."""
        ...

    def acknowledge(self, kind: str, task: str | None, drafter: str | None, account: str) -> bool:
        """Clear an alarm: the present level is the reference from now on. False where there is no such alarm."""
        ...
