"""Drafts that come from workers: other processes, on this machine or another one.

While the target verifies, the worker drafts the next tokens on the assumption that all it has drafted is accepted (as
PEARL does: Liu et al., "PEARL: Parallel speculative decoding with adaptive draft length", ICLR 2025). What was accepted
keeps the rest of the draft alive, anything else drops it. A continuation that has not arrived when the next step begins
is the empty proposal: the engine does not wait, unless it is set how long it may.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.metrics.worker import WorkerStats
from slipstream.core.proposal import EMPTY_PROPOSAL, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.base import DraftContext, Drafter, Observation
from slipstream.draft.footprint import Footprint
from slipstream.draft.remote.continuation import Continuation
from slipstream.draft.remote.handshake import KEY_VARIABLE, fingerprint, read_key
from slipstream.draft.remote.link import CONNECT_TIMEOUT_S, Link, LinkTerms, SocketLink
from slipstream.draft.remote.options import RemoteOptions
from slipstream.draft.remote.protocol import MAX_CONTINUATION_TOKENS, Message
from slipstream.draft.remote.sampling import sampling_message
from slipstream.draft.traits import DrafterTraits
from slipstream.errors import ConfigError

logger = logging.getLogger(__name__)

KINDS = frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED})
"""What can be sent as token ids alone; sampled drafts would need the distributions that they were drawn from."""
QUIET_AFTER = 16
"""Steps in which a request wants no draft, after which a worker is sent no more of it until it does."""
REOPEN_AFTER = 64
"""Steps before a worker that did not take a request is given it again."""
PATIENCE = 4
"""Waits in a row that may bring no continuation of use; then a worker is not waited for until it has sent one."""
CONTINUATION_MEMORY = 0.9
"""Weight of the past in the average time of a continuation."""


@dataclass(eq=False)
class WorkerAccount:
    """A worker's link, and what has come of it."""

    link: Link
    num_continuations: int = 0
    num_stale: int = 0
    num_late: int = 0
    continuation_s: float | None = None
    """From what was committed to the first continuation for it, on average of late."""
    num_vain_waits: int = 0
    """In a row, without a continuation that was of any use."""

    def note_continuation_time(self, seconds: float) -> None:
        """A continuation has come so long after what it is for."""
        past = self.continuation_s
        self.continuation_s = (
            seconds if past is None else CONTINUATION_MEMORY * past + (1 - CONTINUATION_MEMORY) * seconds
        )

    def stats(self) -> WorkerStats:
        """All of it."""
        return WorkerStats(
            self.link.name,
            *self.link.state(),
            round_trip_s=self.link.round_trip_s(),
            continuation_s=self.continuation_s,
            num_continuations=self.num_continuations,
            num_stale_continuations=self.num_stale,
            num_late_continuations=self.num_late,
            num_connections=self.link.generation,
        )


class RemoteRequest:
    """A sequence that is drafted for elsewhere."""

    def __init__(self, number: int) -> None:
        self.number = number
        """Its name in messages."""
        self.continuation = Continuation()
        self.worker: WorkerAccount | None = None
        self.generation = 0
        """Generation of the connection in which it was opened."""
        self.steps_to_reopen = 0
        """Before a worker that did not know it is given it again."""
        self.num_told = 0
        """Committed tokens that were sent to the worker."""
        self.told_s = 0.0
        self.commit = 0
        """The number of the last message about it."""
        self.idle_steps = 0
        """Since the request last wanted a draft."""

    @property
    def is_open(self) -> bool:
        """Whether its worker knows it, as far as the engine can tell."""
        if self.worker is None:
            return False
        link = self.worker.link
        return link.connected and link.generation == self.generation


class RemoteDrafter(Drafter):
    """Gets its drafts from `slipstream draft-worker` processes."""

    Options = RemoteOptions
    # It remembers, as how much has arrived depends on the load.
    traits = DrafterTraits(kinds=KINDS, remembers=True, reads_logits=False)

    @classmethod
    def configured(cls, options: Any, context: DraftContext) -> DrafterTraits:
        """A worker that makes other proposals than the verifier can judge is refused."""
        return replace(super().configured(options, context), kinds=KINDS & context.verifier.kinds)

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """It holds nothing here; a worker must run."""
        return Footprint(
            traits=cls.configured(options, context),
            missing="needs a running draft worker",
            note="draft workers hold their weights elsewhere",
        )

    def __init__(self, options: RemoteOptions, context: DraftContext) -> None:
        """Raises `ConfigError` where a worker refuses, or must be refused; one that is not there is tried again."""
        super().__init__(options, context)
        if options.max_wait_ms / 1000 >= context.draft_timeout_s:
            raise ConfigError(
                f"remote max_wait_ms ({options.max_wait_ms:g}) must be below draft_timeout_s "
                f"({context.draft_timeout_s:g} s), after which a drafter is taken for hung"
            )
        self._arrived = threading.Condition()
        self._workers = [WorkerAccount(link) for link in self._make_links()]
        self._finalizer = weakref.finalize(self, _close, [worker.link for worker in self._workers])
        self._requests: dict[int, RemoteRequest] = self.by_sequence()
        """By sequence id."""
        self._numbers = itertools.count(1)
        self._by_number: dict[int, RemoteRequest] = {}

    def _make_links(self) -> list[Link]:
        """A link to every worker, each tried once."""
        addresses, key = self.options.addresses(), read_key(self.options.key_file)
        for address in addresses:
            if not address.is_local and not key:
                raise ConfigError(
                    f"draft worker {address} is not on this machine, so it needs a shared key: set key_file or "
                    f"{KEY_VARIABLE}"
                )
        terms = LinkTerms(
            vocabulary=fingerprint(self.context.tokenizer),
            vocab_size=self.context.vocab_size,
            kinds=frozenset(str(kind) for kind in self.traits.kinds),
            depth=self.options.num_speculative_tokens,
            key=key,
        )
        links = [SocketLink(address, terms, self._arrived) for address in addresses]
        for link in links:
            link.wait_tried(3 * CONNECT_TIMEOUT_S)
        for link in links:
            state, why = link.state()
            if state == "refused":
                _close(links)
                raise ConfigError(f"draft worker {link.name} cannot be used: {why}")
        return list(links)

    # --- the contract -----------------------------------------------------------------------------------------

    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        """What has arrived for each text, up to its budget."""
        requests = [self._request(sequence) for sequence in sequences]
        limits = [min(budget, self.traits.max_nodes) for budget in budgets]
        self._take()
        if self.options.max_wait_ms:
            self._wait(requests, limits)
        return [self._proposal(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def observe(self, observations: Seq[Observation]) -> None:
        """Tell the workers what was committed, at once: they go on while the target computes."""
        for seen in observations:
            request = self._requests.get(seen.sequence.id)
            if request is None:
                continue
            request.idle_steps += 1
            if request.idle_steps <= QUIET_AFTER and not seen.sequence.finished:
                self._tell(request, seen.sequence)

    def rewind(self, sequence: Sequence) -> None:
        self._drop(sequence, finished=False)

    def release(self, sequence: Sequence) -> None:
        self._drop(sequence, finished=sequence.finished)

    def worker_stats(self) -> list[WorkerStats]:
        """What is known of each worker."""
        return [worker.stats() for worker in self._workers]

    def integrity(self) -> list[str]:
        faults = super().integrity()
        faults += [
            f"remote: a request's draft has {len(request.continuation.drafted)} tokens"
            for request in self._requests.values()
            if len(request.continuation.drafted) > MAX_CONTINUATION_TOKENS
        ]
        if len(self._requests) != len(self._by_number):
            faults.append(f"remote: {len(self._requests)} requests have {len(self._by_number)} numbers")
        return faults

    def close(self) -> None:
        """End the connections. Idempotent; they end with the drafter too."""
        self._finalizer()

    # --- telling ----------------------------------------------------------------------------------------------

    def _request(self, sequence: Sequence) -> RemoteRequest:
        """The sequence's request, of which some worker knows the whole text by now, if one is connected."""
        request = self._requests.get(sequence.id)
        if request is None:
            request = self._requests[sequence.id] = RemoteRequest(next(self._numbers))
            self._by_number[request.number] = request
        request.idle_steps = 0
        self._tell(request, sequence)
        return request

    def _tell(self, request: RemoteRequest, sequence: Sequence) -> None:
        """Send what was not sent to the worker yet; the whole text where it is another one, or connected anew."""
        continuation = request.continuation
        continuation.follow(sequence.token_ids)
        if not request.is_open:
            self._open(request, sequence)
            return
        if request.num_told == len(continuation.token_ids):
            return
        self._send(
            request,
            {
                "type": "commit",
                "length": len(continuation.token_ids),
                "tokens": continuation.token_ids[request.num_told :],
                "hash": continuation.digest,
            },
        )

    def _open(self, request: RemoteRequest, sequence: Sequence) -> None:
        """Give the request to the connected worker with the fewest."""
        request.continuation.forget()
        request.worker = None
        request.steps_to_reopen -= 1
        connected = [worker for worker in self._workers if worker.link.connected]
        if not connected or request.steps_to_reopen > 0:
            return
        request.worker = min(connected, key=self._load)
        request.generation = request.worker.link.generation
        draws = request.worker.link.kind is ProposalKind.COUPLED
        self._send(
            request,
            {
                "type": "open",
                "tokens": request.continuation.token_ids,
                "hash": request.continuation.digest,
                "num_prompt_tokens": sequence.num_prompt_tokens,
                "seed": str(sequence.seed) if draws else "0",  # a worker gets only what it can use
                "tenant": hashlib.sha256(sequence.tenant.encode("utf-8", "surrogatepass")).digest(),
                "sampling": sampling_message(sequence.params),
            },
        )

    def _load(self, worker: WorkerAccount) -> int:
        return sum(request.worker is worker for request in self._requests.values())

    def _send(self, request: RemoteRequest, message: Message) -> None:
        assert request.worker is not None
        request.commit += 1
        request.num_told, request.told_s = len(request.continuation.token_ids), time.perf_counter()
        request.worker.link.send({**message, "request": request.number, "number": request.commit})

    def _drop(self, sequence: Sequence, finished: bool) -> None:
        request = self._requests.pop(sequence.id, None)
        if request is None:
            return
        del self._by_number[request.number]
        if request.is_open and request.worker is not None:
            request.worker.link.send({"type": "release", "request": request.number, "finished": finished})

    # --- taking -----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Sort what has arrived."""
        for worker in self._workers:
            for message in worker.link.take():
                request = self._by_number.get(message["request"])
                known = request is not None and request.worker is worker
                if message["type"] == "unknown":
                    if known and request is not None:
                        request.generation, request.steps_to_reopen = -1, REOPEN_AFTER
                    continue
                worker.num_continuations += 1
                if not known or request is None or not self._take_continuation(request, message):
                    worker.num_stale += 1
                    continue
                worker.num_vain_waits = 0
                if message["number"] == request.commit and request.told_s:
                    worker.note_continuation_time(message["arrived_s"] - request.told_s)
                    request.told_s = 0.0

    def _take_continuation(self, request: RemoteRequest, message: Message) -> bool:
        token_ids = message["tokens"]
        if not 0 < len(token_ids) <= MAX_CONTINUATION_TOKENS or max(token_ids) >= self.context.vocab_size:
            return False
        joined = message["length"] + len(token_ids) - len(request.continuation.token_ids)
        return joined <= MAX_CONTINUATION_TOKENS and request.continuation.take(
            message["length"], message["hash"], token_ids
        )

    def _wait(self, requests: Seq[RemoteRequest], limits: Seq[int]) -> None:
        """Wait for the continuations that are under way, as long as the options allow."""
        deadline_s = time.perf_counter() + self.options.max_wait_ms / 1000
        least = self.options.wait_tokens or self.traits.max_nodes
        pairs = list(zip(requests, limits, strict=True))
        while awaited := [request for request, limit in pairs if self._is_awaited(request, limit, least)]:
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                for worker in {request.worker for request in awaited}:
                    if worker is not None:
                        worker.num_vain_waits += 1
                return
            with self._arrived:
                self._await(left_s)
            self._take()

    def _await(self, timeout_s: float) -> None:
        """Wait until something has arrived; the condition is held."""
        if not any(worker.link.pending for worker in self._workers):
            self._arrived.wait(timeout_s)

    def _is_awaited(self, request: RemoteRequest, limit: int, least: int) -> bool:
        if len(request.continuation.drafted) >= min(limit, least) or not request.is_open:
            return False
        worker = request.worker
        if worker is None or (worker.num_vain_waits >= PATIENCE and not self.context.is_priced):
            return False
        return worker.continuation_s is None or worker.continuation_s <= self.options.max_wait_ms / 1000

    def _proposal(self, request: RemoteRequest, limit: int) -> Proposal:
        if limit <= 0:
            return EMPTY_PROPOSAL
        token_ids = request.continuation.drafted[:limit]
        if request.worker is None:
            return EMPTY_PROPOSAL
        if token_ids:
            return Proposal.chain(token_ids, request.worker.link.kind)
        request.worker.num_late += request.is_open
        return EMPTY_PROPOSAL


def _close(links: Seq[Link]) -> None:
    for link in links:
        link.close()
