"""The fleet in the place of the server's engine: what the routes call, for all replicas together."""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from slipstream.control.types import ControlReport
from slipstream.core.metrics.decoded import DecodedSteps
from slipstream.core.metrics.engine import EngineStats
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.deploy.fleet import Health
from slipstream.deploy.relay import Relay
from slipstream.deploy.routed import Item as RoutedItem
from slipstream.deploy.routed import RoutedEngine
from slipstream.engine.client import EngineClient, RequestHandle
from slipstream.engine.engine import Engine
from slipstream.engine.mailbox import Put
from slipstream.engine.requests import request_options
from slipstream.errors import DeployError, OverloadedError, RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput
from slipstream.serve.accounts import Accounts
from slipstream.serve.api.errors import ApiError
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.engines import StepListener, Take
from slipstream.text.prompts import Prompt, encode_chat

T = TypeVar("T")


@dataclass(slots=True)
class RequestClaims:
    """What the headers of an HTTP request set, and what is said of its answers."""

    timeout_s: float | None = None
    num_moves: int = 0
    crossed_unlike: bool = False


CLAIMS: contextvars.ContextVar[RequestClaims | None] = contextvars.ContextVar("claims", default=None)
"""Claims of the request that the running task serves."""


def engine_info(engine: Engine) -> dict[str, Any]:
    """What fronts must know of a replica's engine, as plain values."""
    return {**asdict(EngineInfo.of(engine)), "process": os.getpid()}


class ServedFleet(EngineClient):
    """The replicas behind a relay, as a `ServedEngine`."""

    def __init__(self, relay: Relay, tokenizer: Any, about: Mapping[str, Any]) -> None:
        """`about` are the `engine_info` of the first replica; the others compute the same."""
        self.relay = relay
        self.tokenizer = tokenizer
        self.routed = RoutedEngine(relay, tokenizer)
        known = {field.name for field in fields(EngineInfo)}
        info = EngineInfo(**{name: value for name, value in about.items() if name in known})
        self.info = replace(info, max_num_seqs=10**6)  # the router bounds what waits, for all replicas
        self.num_restarts = 0
        self._is_closed = False

    # --- as `ServedEngine` ------------------------------------------------------------------------------------

    @property
    def client(self) -> EngineClient:
        """Itself."""
        return self

    @property
    def has_stopped(self) -> bool:
        return self._is_closed

    @property
    def is_ready(self) -> bool:
        """What comes while no replica is ready waits for one."""
        return not self._is_closed

    def report_to(self, listener: StepListener, accounts: Accounts) -> None:
        """As in `ServedEngine`: the steps of all replicas, of requests from other fronts too."""

        def pass_on(steps: DecodedSteps) -> None:
            named = [
                (row._replace(group=accounts.name(row.group, row.task)), times) for row, times in steps.rows
            ]
            listener.on_steps(replace(steps, rows=named))

        self.relay.by_account = accounts.are_kept_apart
        self.relay.on_steps = pass_on

    async def read(self, take: Take[T]) -> T:
        """As in `ServedEngine`. Of controllers nothing is said: each replica has its own, which plans for itself."""
        report = ControlReport(False, self.info.drafts, False, None, None, 0.0, (), (), ())
        return take(self._stats(), report)

    # --- as `EngineClient` ------------------------------------------------------------------------------------

    async def begin(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        put: Put,
        *,
        request_id: str | None = None,
        options: RequestOptions | None = None,
        emitted: Seq[EmittedTokens] = (),
    ) -> RequestHandle:
        """As in `EngineClient`, of token ids; raises `ApiError` 429 and 504 where the router does not take it."""
        if isinstance(prompt, str | Mapping):
            raise RequestError("a fleet takes token ids; the server encodes prompts")
        if emitted:
            raise RequestError("a fleet continues answers by itself")
        claims = CLAIMS.get()

        def receive(item: RoutedItem) -> None:
            put(as_api_error(item) if isinstance(item, DeployError) else item)

        def on_seam(num_moves: int, crossed_unlike: bool) -> None:
            if claims is not None:
                claims.num_moves += num_moves
                claims.crossed_unlike |= crossed_unlike

        try:
            return self.routed.begin(
                prompt,
                SamplingParams() if params is None else params,
                receive,
                request_id=request_id,
                options=request_options(options),
                timeout_s=None if claims is None else claims.timeout_s,
                on_seam=on_seam,
            )
        except DeployError as error:
            raise as_api_error(error) from None

    def encode_chat(self, messages: Seq[dict[str, Any]]) -> list[int]:
        return encode_chat(self.tokenizer, messages)

    async def check_grammar(self, structured: StructuredOutput, tenant: str = "") -> None:
        """Nothing: the replica that compiles the whole constraint refuses what cannot be followed."""

    async def abort(self, request_id: str) -> None:
        """As in `EngineClient`; the last update comes from here, without the replica's counts."""
        self.routed.abort(request_id)

    async def stats(self) -> EngineStats:
        """Sums over the replicas, of what they reported last; requests that wait here among them."""
        return self._stats()

    def close(self) -> None:
        """Nothing is served any more; the relay is closed by the task that runs it."""
        self._is_closed = True

    # --- state ------------------------------------------------------------------------------------------------

    def _stats(self) -> EngineStats:
        router, num_slots = self.relay.router, self.info.num_slots
        states = list(router.fleet)
        slots = max(len(states), 1) * num_slots
        return EngineStats(
            num_running=sum(state.report.num_running for state in states),
            num_waiting=sum(state.report.num_waiting for state in states) + router.queue.num_answers,
            num_paused=router.num_paused,
            num_slots=slots,
            num_held_slots=round(sum(state.report.cache_usage * num_slots for state in states)),
            num_retained_slots=sum(state.report.num_retained_slots for state in states),
            cache_bytes=max(len(states), 1) * self.info.kv_bytes,
            num_preemptions=router.ledger.total.num_preemptions,
            num_drafted_sequences=sum(state.report.num_drafted_sequences for state in states),
            num_draft_failures=router.ledger.total.num_draft_failures,
            retired_drafters=tuple(
                sorted({name for state in states for name in state.report.retired_drafters})
            ),
        )

    def replicas(self) -> list[dict[str, Any]]:
        """Each replica as the dashboard shows it."""
        router, now_s = self.relay.router, time.monotonic()
        return [
            {
                "replica": state.id,
                "process": self.relay.about_of(state.id).get("process"),
                "health": str(state.health),
                "load": state.load,
                "capacity": state.info.capacity,
                "running": state.report.num_running,
                "waiting": state.report.num_waiting,
                "cache_usage": round(state.report.cache_usage, 4),
                "tokens_per_s": round(state.report.tokens_per_s, 1),
                "acceptance_length": round(state.report.acceptance_length, 3),
                "known_prefix_tokens": router.chooser.prefixes.num_blocks(state.id)
                * router.config.block_tokens,
                "given": state.num_given,
                "heard_s_ago": round(now_s - state.heard_s, 2),
                "retired_drafters": list(state.report.retired_drafters),
                "counts": asdict(router.ledger.of(state.id)),
                "arithmetic": state.info.fingerprint.arithmetic[:12],
            }
            for state in router.fleet
        ]

    @property
    def num_ready(self) -> int:
        """Replicas that take requests."""
        return sum(state.health is Health.READY for state in self.relay.router.fleet)


def as_api_error(error: DeployError) -> ApiError:
    """The HTTP error for what the router says."""
    if isinstance(error, OverloadedError):
        headers = {"Retry-After": str(error.retry_after_s)}
        if error.is_deadline:
            return ApiError(504, str(error), kind="server_error", code="deadline", headers=headers)
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    return ApiError(503, str(error), kind="server_error", code="unavailable", headers={"Retry-After": "1"})
