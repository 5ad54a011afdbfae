"""What the server calls of the engine that it serves, in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol, TypeVar

from slipstream.control.types import ControlReport
from slipstream.core.metrics.decoded import DecodedRow, DecodedSteps
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.metrics.step import StepReport
from slipstream.core.step import StepItem
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.client import EngineClient
from slipstream.engine.engine import Engine
from slipstream.serve.accounts import Accounts
from slipstream.serve.engine_info import EngineInfo, decoded_rows

T = TypeVar("T")

ReplicaFigures = dict[str, Any]
Take = Callable[[EngineStats, ControlReport], T]


class StepListener(Protocol):
    """A listener to an engine's steps, one at a time or several together."""

    def on_step(self, step: StepReport | None, rows: Seq[DecodedRow]) -> None:
        """Told of a step's report and of the rows that it decoded, together or one after the other."""

    def on_steps(self, decoded: DecodedSteps) -> None:
        """Told of several steps at once."""


class ServedEngine(Protocol):
    """An engine behind the routes. Requests go to its `EngineClient`; this is all else that the server calls."""

    @property
    def info(self) -> EngineInfo:
        """What does not change while it runs."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, of Transformers."""
        ...

    @property
    def client(self) -> EngineClient:
        """Return the client that requests go to."""
        ...

    @property
    def has_stopped(self) -> bool:
        """True once it serves no request any more."""
        ...

    @property
    def is_ready(self) -> bool:
        """True while it takes requests at once."""
        ...

    @property
    def num_restarts(self) -> int:
        """How often another process has taken over from one that died."""
        ...

    def replicas(self) -> Seq[ReplicaFigures] | None:
        """How each replica is that serves here, in plain values; None where there is one engine."""
        ...

    def report_to(self, listener: StepListener, accounts: Accounts) -> None:
        """Have every step reported; statistics of tasks are kept apart by `accounts`."""
        ...

    def read(self, take: Take[T]) -> Awaitable[T]:
        """What `take` makes of the engine's state; it is called where steps are reported, between two of them.

        Raises `EngineStoppedError`.
        """
        ...


class LocalEngine:
    """The engine of an `AsyncEngine`, which steps in a thread of this process."""

    def __init__(self, client: AsyncEngine) -> None:
        self.client = client
        self.info = EngineInfo.of(client.engine)
        self.tokenizer = client.engine.tokenizer
        self.num_restarts = 0

    @property
    def has_stopped(self) -> bool:
        return self.client.has_stopped

    @property
    def is_ready(self) -> bool:
        return not self.client.has_stopped

    def replicas(self) -> None:
        """None: it is one."""

    def report_to(self, listener: StepListener, accounts: Accounts) -> None:
        """As in `ServedEngine`; called in the engine's thread."""

        def on_observe(items: Seq[StepItem]) -> None:
            listener.on_step(None, decoded_rows(items, accounts.name_of))

        engine = self.client.engine
        engine.on_step = lambda step: listener.on_step(step, ())
        engine.on_observe = on_observe
        engine.group_tasks_by(accounts.name_of, accounts.task)
        engine.shares_by_account = accounts.are_kept_apart

    async def read(self, take: Take[T]) -> T:
        """As in `ServedEngine`; `take` is called in the engine's thread."""

        def ask(engine: Engine) -> T:
            return take(engine.stats(), engine.control_report())

        return await self.client.ask(ask)
