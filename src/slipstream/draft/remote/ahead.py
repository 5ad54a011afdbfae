"""The worker's side of drafting: a drafter that runs ahead of every text it was sent. No sockets, threads or clocks.

Draft tokens count as committed until the target says otherwise: the drafter is given them as if they had been
accepted, and rewound to the last token that agrees with what was really committed.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Hashable
from collections.abc import Sequence as Seq

import torch

from slipstream.core.proposal import ROOT, Proposal
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.draft.base import Observation
from slipstream.draft.guarded.guard import Guard
from slipstream.draft.remote.protocol import MAX_CONTINUATION_TOKENS, Message, PrefixHash
from slipstream.draft.remote.sampling import sampling_of
from slipstream.errors import ProtocolError
from slipstream.text.common_prefix import common_prefix_length

_NO_LOGITS = torch.zeros(1, 1)
"""What a drafter that needs the text alone is shown of the target's logits."""

Reply = tuple[Hashable, Message]
"""To whom, and what."""


class Followed:
    """One request of one engine. Its sequence holds the committed tokens and, behind them, those drafted ahead."""

    def __init__(self, owner: Hashable, number: int, sequence: Sequence, depth: int, party: Hashable) -> None:
        self.owner, self.number, self.sequence, self.party = owner, number, sequence, party
        self.max_ahead = min(2 * depth + 1, MAX_CONTINUATION_TOKENS)
        """Draft tokens: those that are being verified, the target's own, and as many again."""
        self.hash = PrefixHash()
        """Hash of the committed tokens."""
        self.hash.extend(sequence.token_ids)
        self.commit = 0
        """The number of the last message about it."""
        self.tries_left = 0
        """How often the drafter may still propose nothing for the text as it is."""

    @property
    def ahead(self) -> list[int]:
        """The draft tokens behind the committed text."""
        return self.sequence.token_ids[self.hash.length :]


class AheadDrafting:
    """Follows the texts of any number of engines and drafts for them, all in one batch."""

    def __init__(
        self,
        guard: Guard,
        *,
        vocab_size: int,
        tokens_per_round: int = 1,
        max_requests: int = 64,
        max_len: int,
        prompt_rows: int = 512,
    ) -> None:
        """`max_len` bounds a text in tokens; `prompt_rows` is how many tokens of a prompt the drafter reads a call."""
        self.guard = guard
        self.max_len = max_len
        self._vocab_size, self._prompt_rows = vocab_size, prompt_rows
        self._tokens_per_round = max(1, min(tokens_per_round, guard.drafter.traits.max_nodes))
        self._max_requests = max_requests
        self._followed: dict[tuple[Hashable, int], Followed] = {}
        self._ids = itertools.count()

    def __len__(self) -> int:
        """Requests that are followed."""
        return len(self._followed)

    # --- what engines say -------------------------------------------------------------------------------------

    def receive(self, owner: Hashable, message: Message, depth: int, party: Hashable = None) -> list[Reply]:
        """Follow a message of the engine `owner`, which requests `depth` tokens; raises `ProtocolError` for nonsense.

        Engines of one `party` have one share of the places together; an engine without one has its own.
        """
        number = message["request"]
        found = self._followed.get((owner, number))
        match message["type"]:
            case "release":
                if found is not None:
                    self._forget(found, message["finished"])
                return []
            case "open":
                if found is not None:
                    self._forget(found, finished=False)
                return self._open(owner, message, depth, owner if party is None else party)
            case "commit":
                if found is None or not self._commit(found, message):
                    if found is not None:
                        self._forget(found, finished=False)
                    return [(owner, {"type": "unknown", "request": number})]
            case other:
                raise ProtocolError(f"a {other} message to a worker")
        return []

    def drop(self, owner: Hashable) -> None:
        """Forget all of an engine that is gone."""
        for found in [each for each in self._followed.values() if each.owner == owner]:
            self._forget(found, finished=False)

    def _make_room(self, party: Hashable) -> list[Reply]:
        """Where all places are taken, take the newest request from the party that has most, unless `party` has as many
        with one more: who comes first has all, who comes later gets an equal share."""
        if len(self._followed) < self._max_requests:
            return []
        held = Counter(each.party for each in self._followed.values())
        [(largest, most)] = held.most_common(1)
        if held[party] + 1 >= most:
            return []
        left = next(each for each in reversed(self._followed.values()) if each.party == largest)
        self._forget(left, finished=False)
        return [(left.owner, {"type": "unknown", "request": left.number})]

    def _open(self, owner: Hashable, message: Message, depth: int, party: Hashable) -> list[Reply]:
        refusal: list[Reply] = [(owner, {"type": "unknown", "request": message["request"]})]
        token_ids: list[int] | None = message["tokens"]
        if token_ids is None or not 0 < len(token_ids) <= self.max_len:
            return refusal
        self._check(token_ids)
        if not message["seed"].isascii() or not message["seed"].isdigit() or len(message["seed"]) > 40:
            raise ProtocolError(f"a seed {message['seed'][:50]!r}")
        sequence = Sequence(
            id=next(self._ids),
            request_id=str(message["request"]),
            index=0,
            token_ids=list(token_ids),
            num_prompt_tokens=min(max(message["num_prompt_tokens"], 0), len(token_ids)),
            params=sampling_of(message["sampling"], self._vocab_size),
            seed=int(message["seed"]),
            options=RequestOptions(tenant=f"{owner}/{message['tenant'].hex()}"),
        )
        found = Followed(owner, message["request"], sequence, depth, party)
        if found.hash.digest() != message["hash"]:
            return refusal
        replies = self._make_room(party)
        if len(self._followed) >= self._max_requests:
            return refusal
        found.commit, found.tries_left = message["number"], self._tries(token_ids)
        self._followed[owner, message["request"]] = found
        return replies

    def _commit(self, found: Followed, message: Message) -> bool:
        """The engine has committed tokens; False where it does not speak of the text that is followed."""
        new: list[int] | None = message["tokens"]
        if new is None:
            return False
        self._check(new)
        first = found.hash.length
        if message["length"] != first + len(new) or message["length"] > self.max_len:
            return False
        if found.hash.digest(new) != message["hash"]:
            return False
        agreed = common_prefix_length(found.ahead, new)
        sequence = found.sequence
        if agreed < len(new):  # else what is ahead is still ahead
            if len(sequence.token_ids) > first + agreed:
                self._rewind(found, first + agreed)
            sequence.token_ids += new[agreed:]
            sequence.num_computed = len(sequence.token_ids) - 1
        found.hash.extend(new)
        found.commit, found.tries_left = message["number"], self._tries(new)
        return True

    def _check(self, token_ids: Seq[int]) -> None:
        if max(token_ids, default=0) >= self._vocab_size:
            raise ProtocolError(f"a token id beyond the vocabulary of {self._vocab_size:,}")

    def _tries(self, new: Seq[int]) -> int:
        """A long prompt takes a drafter several calls, which propose nothing."""
        return 2 + len(new) // max(self._prompt_rows, 1)

    def _rewind(self, found: Followed, length: int) -> None:
        del found.sequence.token_ids[length:]
        found.sequence.num_computed = min(found.sequence.num_computed, max(length - 1, 0))
        self.guard.rewind(found.sequence)

    def _forget(self, found: Followed, finished: bool) -> None:
        if found.ahead:
            self._rewind(found, found.hash.length)
        found.sequence.finish_reason = FinishReason.STOP if finished else FinishReason.ABORT
        self.guard.release(found.sequence)
        del self._followed[found.owner, found.number]

    # --- drafting ---------------------------------------------------------------------------------------------

    @property
    def wants(self) -> bool:
        """True where `draft` has anything to do."""
        return any(map(self._wants, self._followed.values()))

    def _wants(self, found: Followed) -> bool:
        num_ahead = len(found.sequence.token_ids) - found.hash.length
        return (
            num_ahead < found.max_ahead
            and found.tries_left > 0
            and len(found.sequence.token_ids) < self.max_len
            and self.guard.serves(found.sequence)
        )

    def draft(self) -> list[Reply]:
        """One round: some tokens more for everyone who may have them; returns the continuations."""
        wanting = [found for found in self._followed.values() if self._wants(found)]
        if not wanting:
            return []
        budgets = [
            min(
                self._tokens_per_round,
                found.max_ahead - len(found.ahead),
                self.max_len - len(found.sequence.token_ids),
            )
            for found in wanting
        ]
        started_s = time.perf_counter()
        proposals = self.guard.propose([found.sequence for found in wanting], budgets)
        draft_s = time.perf_counter() - started_s
        replies: list[Reply] = []
        seen: list[Observation] = []
        for found, proposal in zip(wanting, proposals, strict=True):
            sequence = found.sequence
            length, token_ids = len(sequence.token_ids), _first_path(proposal)
            if not token_ids:
                found.tries_left -= 1
                continue
            continuation = {
                "type": "tail",
                "request": found.number,
                "length": length,
                "hash": found.hash.digest(found.ahead),
                "tokens": token_ids,
                "number": found.commit,
                "draft_s": draft_s,
            }
            replies.append((found.owner, continuation))
            sequence.token_ids += token_ids
            sequence.num_computed = len(sequence.token_ids) - 1
            seen.append(Observation(sequence, proposal, len(token_ids), _NO_LOGITS, length, was_cut=True))
        if seen:
            self.guard.observe(seen)
        return replies


def _first_path(proposal: Proposal) -> list[int]:
    """The tokens from the first one down to a leaf; of a tree the siblings are left out."""
    token_ids: list[int] = []
    node = ROOT
    while node in proposal.children:
        node = proposal.children[node][0]
        token_ids.append(proposal.token_ids[node])
    return token_ids
