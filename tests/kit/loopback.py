"""A draft worker inside the process, for tests: every message goes through the protocol's bytes, none through a socket.

`{"method": "tests.kit.loopback:LoopbackDrafter", "draft": {"method": "draft_model", "model": ...}}`. It drafts
as far as it may before each answer, so what it proposes is what the drafter itself would propose.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.core.proposal import ProposalKind
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.registry import create_drafter, validate
from slipstream.draft.remote.ahead import AheadDrafting
from slipstream.draft.remote.drafter import RemoteDrafter
from slipstream.draft.remote.link import Link
from slipstream.draft.remote.options import RemoteOptions
from slipstream.draft.remote.protocol import MAX_FRAME_BYTES, Message, checked, encode
from slipstream.draft.remote.serving import ANY_VERIFIER
from slipstream.rpc.frames import Frames


@dataclass(frozen=True, kw_only=True)
class LoopbackOptions(RemoteOptions):
    """The served drafter, and how many tokens a round it drafts."""

    draft: Mapping[str, Any]
    """A `speculative_config` of its own."""
    tokens_per_round: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(SpeculativeConfig.from_mapping(self.draft))


class LoopbackLink(Link):
    """A link to `drafting`, through encoded frames."""

    name = "loopback"
    generation = 1

    def __init__(self, drafting: AheadDrafting, kind: ProposalKind, depth: int, owner: int = 1) -> None:
        """`owner` tells engines apart that share `drafting`."""
        self.kind = kind
        self.drafting, self._depth, self._owner = drafting, depth, owner
        self._replies: list[Message] = []

    @property
    def connected(self) -> bool:
        return True

    @property
    def pending(self) -> bool:
        return bool(self._replies) or self.drafting.wants

    def send(self, message: Message) -> None:
        [sent] = _through_bytes([message])
        self._replies += [reply for _, reply in self.drafting.receive(self._owner, sent, self._depth)]

    def take(self) -> list[Message]:
        while self.drafting.wants:
            self._replies += [reply for _, reply in self.drafting.draft()]
        replies = _through_bytes(self._replies)
        self._replies.clear()
        now_s = time.perf_counter()
        return [message | {"arrived_s": now_s} for message in replies]


def _through_bytes(messages: list[Message]) -> list[Message]:
    """The messages as they come out of their frames."""
    return [checked(body) for body in Frames(MAX_FRAME_BYTES).add(b"".join(map(encode, messages)))]


class LoopbackDrafter(RemoteDrafter):
    """A `remote` drafter whose worker is in the same thread."""

    Options = LoopbackOptions  # type: ignore[assignment]

    def __init__(self, options: LoopbackOptions, context: DraftContext) -> None:
        inside = replace(context, verifier=ANY_VERIFIER, target=None)
        self.inner: Drafter = create_drafter(SpeculativeConfig.from_mapping(options.draft), inside)
        kinds = self.inner.traits.kinds
        self.drafting = AheadDrafting(
            Guard(self.inner, context.vocab_size, kinds),
            vocab_size=context.vocab_size,
            tokens_per_round=options.tokens_per_round,
            max_len=context.max_model_len,
            prompt_rows=context.engine_config.max_num_batched_tokens,
        )
        self._kind = next(iter(kinds))
        super().__init__(options, context)
        self.traits = replace(self.traits, kv_bytes_per_token=self.inner.traits.kv_bytes_per_token)

    @property
    def parts(self) -> list[Drafter]:
        """The served drafter: it is in this process."""
        return [self.inner]

    def _make_links(self) -> list[Link]:
        return [LoopbackLink(self.drafting, self._kind, self.options.num_speculative_tokens)]

    def allocate(self, num_tokens: int) -> None:
        """As for the served drafter, with room for what it drafts ahead."""
        self.inner.allocate(num_tokens + 64 * self.context.engine_config.max_num_seqs)

    def num_held(self) -> int:
        return max(super().num_held(), len(self.drafting))


class FaultyLink(LoopbackLink):
    """A loopback whose worker is slow and mortal, as `rng` says: it drafts some rounds between two looks, messages
    arrive late and in parts, and now and then it dies with all that it knew and all that was under way."""

    def __init__(
        self, drafting: AheadDrafting, kind: ProposalKind, depth: int, owner: int, rng: random.Random
    ) -> None:
        super().__init__(drafting, kind, depth, owner)
        self._rng = rng
        self._away_looks = 0
        self.num_deaths = 0

    @property
    def connected(self) -> bool:
        return self._away_looks == 0

    def send(self, message: Message) -> None:
        if self.connected:
            super().send(message)

    def take(self) -> list[Message]:
        rng = self._rng
        if self._away_looks:
            self._away_looks -= 1
            self.generation += not self._away_looks
            return []
        if rng.random() < 0.03:
            self.num_deaths += 1
            self._away_looks = rng.randint(1, 6)
            self._replies.clear()
            self.drafting.drop(self._owner)
            return []
        for _ in range(rng.randint(0, 3)):
            self._replies += [reply for _, reply in self.drafting.draft()]
        number = rng.randint(0, len(self._replies))
        arrived, self._replies = self._replies[:number], self._replies[number:]
        return [message | {"arrived_s": 0.0} for message in arrived]
