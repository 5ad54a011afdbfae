"""The engine for the routes: requests are admitted, timed, counted, and aborted when their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import aclosing, asynccontextmanager

from slipstream.core.model_path import model_id
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.client import EngineClient, RequestHandle
from slipstream.engine.outputs import Update
from slipstream.engine.unread import UnreadUpdates
from slipstream.errors import ConfigError, PredictionError, RequestError
from slipstream.models.audio import AudioReader
from slipstream.serve.accounts import Accounts, TaskLabels
from slipstream.serve.api.errors import ApiError
from slipstream.serve.api.sampling import Limits
from slipstream.serve.api.tokens import Tokens
from slipstream.serve.config import ServeConfig
from slipstream.serve.engines import LocalEngine, ReplicaFigures, ServedEngine
from slipstream.serve.job import Job
from slipstream.serve.learning import Learning
from slipstream.serve.limits import Admission
from slipstream.serve.metrics.metrics import Metrics
from slipstream.serve.observer import EngineObserver

PromptUpdate = tuple[int, Update]
"""The number of the prompt in its request, and an update of one of its answers."""


class Service:
    """An engine with the server's state. Used from one event loop; the engine steps in its own thread or process."""

    def __init__(self, engine: AsyncEngine | ServedEngine, config: ServeConfig, model_name: str) -> None:
        served = LocalEngine(engine) if isinstance(engine, AsyncEngine) else engine
        info = served.info
        self.info = info
        self._served = served
        self.engine: EngineClient = served.client
        self.config = config
        self.model_name = config.served_model_name or model_id(model_name)
        # Clients may also name the model as the operator did who gave it no other name.
        self._names = (self.model_name,) if config.served_model_name else (self.model_name, model_name)
        self.model_root = info.model
        self.method = info.method
        self.speculation = {
            "method": self.method,
            "verifier": info.verifier,
            "lossy": info.lossy,
        }
        self.methods = info.draft_methods
        self.reproduces = info.reproduces
        self.num_speculative_tokens = info.num_speculative_tokens
        self.limits = Limits(info.max_model_len, info.vocab_size, config, info.sampling_defaults)
        if config.max_prompt_tokens is not None and config.max_prompt_tokens >= info.max_model_len:
            raise ConfigError(
                f"serve max_prompt_tokens must be below the context of {info.max_model_len} tokens, "
                f"got {config.max_prompt_tokens}"
            )
        self.tokenizer = served.tokenizer
        hears = info.encoder_texts is not None and info.encoder_texts.speech is not None
        self.audio_reader = AudioReader(info.model, info.revision) if hears else None
        """What makes sounds of files, for a speech model."""
        self.tokens = Tokens(
            served.tokenizer,
            info.vocab_size,
            info.max_model_len,
            config.max_prompt_tokens,
            config.tool_call_parser,
        )
        self.admission = Admission(info.max_num_seqs, config.max_waiting)
        # The metrics need no key, unlike the dashboard's data.
        num_public = 0 if config.task_labels or config.api_key else config.max_task_labels
        self.metrics = Metrics(
            self.model_name, TaskLabels(config.task_labels, num_public), config.metrics_alias
        )
        self.metrics.describe_cache(info)
        accounts = Accounts(
            bool(config.api_key), lambda: TaskLabels(config.task_labels, config.max_task_labels)
        )
        self.learning = Learning(engine, config) if config.learn is not None else None
        self.observer = EngineObserver(served, self.metrics, accounts, config.dashboard_texts, self.learning)

    @property
    def is_ready(self) -> bool:
        return not self.admission.draining and self._served.is_ready

    def num_begun(self, prompt: Seq[int]) -> int:
        """Tokens that a text begins with: the prompt, or of an encoder-decoder what its answers begin with."""
        texts = self.info.encoder_texts
        return len(prompt) if texts is None else 1 + len(texts.forced)

    def replicas(self) -> Seq[ReplicaFigures] | None:
        """How each replica is that serves here; None where there is one engine."""
        return self._served.replicas()

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` 404 unless `name` is the served model, by its name or as it was given, or None."""
        if name is not None and name not in self._names:
            message = f"the model {name!r} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    @asynccontextmanager
    async def answering(self, job: Job, deadline_s: float) -> AsyncIterator[AsyncIterator[PromptUpdate]]:
        """The job's updates; leaving the context aborts what is still under way.

        The iterator raises what the engine raises, or `ApiError` 504 at `deadline_s` of the event loop's clock.
        """
        async with aclosing(self._updates(job, deadline_s)) as updates:
            yield updates

    @asynccontextmanager
    async def until(self, deadline_s: float) -> AsyncIterator[None]:
        """Raises `ApiError` 504 at the deadline."""
        deadline = asyncio.timeout_at(deadline_s)
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():
                raise  # somebody else's
            raise _too_late(self.config.request_timeout_s) from None

    @asynccontextmanager
    async def tokenizing(self, account: str) -> AsyncIterator[None]:
        """Admission and a deadline for requests of `account` that only tokenise.

        Raises `ApiError` as `admit` and `until` do.
        """
        deadline_s = asyncio.get_running_loop().time() + self.config.request_timeout_s
        with self.admission.admit(1, account):
            async with self.until(deadline_s):
                yield

    async def _updates(self, job: Job, deadline_s: float) -> AsyncGenerator[PromptUpdate, None]:
        """The updates of all prompts as they come."""
        arrived = UnreadUpdates[PromptUpdate | Exception]()
        # One timer a request: a timer for every update would cost more than the rest of the loop.
        late = _too_late(self.config.request_timeout_s)
        timer = asyncio.get_running_loop().call_at(deadline_s, arrived.put, late)
        watch = self.metrics.clock(job.num_answers, job.params)
        follower = self.observer.follow(job)
        under_way: dict[int, RequestHandle] = {}  # by prompt
        try:
            async with self.until(deadline_s):
                for number in range(len(job.prompts)):
                    under_way[number] = await self._begin(job, number, arrived)
            while under_way:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                number, update = item
                if update.output is not None:
                    del under_way[number]
                watch.add(number, update)
                follower.add(number, update)
                yield item
        except RequestError as error:  # all other fields of a job have been checked
            watch.refuse()
            if job.constraint is None or isinstance(error, PredictionError):
                raise
            raise job.constraint.refusal(error) from None
        finally:
            timer.cancel()
            for request in under_way.values():
                request.leave()
            watch.close()

    async def _begin(
        self, job: Job, number: int, arrived: UnreadUpdates[PromptUpdate | Exception]
    ) -> RequestHandle:
        """Have the engine put the updates of one prompt into `arrived`."""

        def put(item: Update | Exception) -> None:
            if isinstance(item, Exception):
                arrived.put(item)
            else:
                arrived.put((number, item), len(item.token_ids))

        request = await self.engine.begin(
            job.prompts[number] if job.inputs is None else job.inputs[number],
            job.params_of(number),
            put,
            request_id=f"{job.id}-{number}",
            options=job.options,
        )
        arrived.of(request)
        return request


def _too_late(limit_s: float) -> ApiError:
    message = f"the answer was not complete within {limit_s:g} s"
    return ApiError(504, message, kind="server_error", code="timeout")
