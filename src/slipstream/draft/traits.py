"""What a drafter is, as plain data: engines, policies and groups of drafters read it instead of calling it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.core.proposal import ProposalKind


@dataclass(frozen=True, kw_only=True, slots=True)
class TableGrowth:
    """Tables or caches that a drafter fills while it runs, keys and values aside, and what bounds them."""

    what: str = ""
    """What is kept and up to what, for people: 'past answers, at most 10,000'."""
    fixed_bytes: int = 0
    """The most, whatever runs."""
    bytes_per_token: int = 0
    """For each token of the texts that run."""
    max_bytes_per_text: int | None = None
    """Bound of what `bytes_per_token` comes to for one text; None is none."""
    max_bytes: int | None = None
    """The same for all texts."""
    first_bytes: int = 0
    """What the first request makes it hold, of all that."""

    def at(self, num_texts: int, num_tokens: int) -> int:
        """The most bytes while so many texts run that have `num_tokens` tokens together."""
        bounds = [self.bytes_per_token * num_tokens]
        if self.max_bytes_per_text is not None:
            bounds.append(self.max_bytes_per_text * num_texts)
        if self.max_bytes is not None:
            bounds.append(self.max_bytes)
        return self.fixed_bytes + min(bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterTraits:
    """What holds for a drafter as long as it runs. The defaults suit one without memory, weights or draft model."""

    max_nodes: int = 0
    """The most nodes that one proposal can have; the engine never requests more."""
    kinds: frozenset[ProposalKind] = frozenset({ProposalKind.ONE_HOT})
    """The proposal kinds that it may return."""
    chain_length: int | None = None
    """The longest proposal, for a drafter that answers a budget of n with n tokens in a row, each at the cost of one
    more level. None for trees, lookups and all that take the same time whatever the budget."""
    context_length: int | None = None
    """The longest text, in tokens, for which it can draft; None for any."""
    feature_layers: tuple[int, ...] = ()
    """Hidden states of the target that it reads: 0 is the embedding, i what layer i puts out, and the number of layers
    what the final norm puts out. The engine keeps them with the keys and values of every computed token;
    `KVCache.features` reads them, side by side in this order."""
    kv_bytes_per_token: int = 0
    """Bytes of keys and values of its own that one token costs."""
    tables: tuple[TableGrowth, ...] = ()
    """What else it comes to hold while it runs."""
    remembers: bool = False
    """True where what it proposes for a request may depend on other requests' texts or on what they accepted. The
    classical verifiers then draw other random numbers for each request, so a seed alone does not repeat a text."""
    ends_early: bool = False
    """True where a chain may end before its budget because the drafter lacks confidence in what follows: it has a
    `confidence_threshold`."""
    looks_up: bool = False
    """True where a proposal takes next to no time and calling for one changes nothing, so that it may be called just
    to see whether it would have been accepted."""
    observes_all: bool = True
    """False where `observe` learns nothing from sequences for which nothing of its own was checked."""
    reads_logits: bool = True
    """False where `observe` does not look at `Observation.logits`: greedy answers' may then have no columns, as a pass
    that has to find the best token of each row alone can be a good deal faster."""
    guards_itself: bool = False
    """True for a group that holds each of its drafters to the time that a call may take."""
    reads_text_only: bool = False
    """True for a drafter with a model or tables of its own that needs nothing of the target but the committed tokens:
    no logits, hidden states, weights or cache. It can draft in another process (`slipstream draft-worker`), where
    `Observation.logits` has no rows that mean anything."""
    has_own_model: bool = False
    """True for one that loads a model to its context's device and reads nothing of the target but the text, so that it
    can draft on another device (`draft_device`)."""

    def table_bytes(self, num_texts: int, num_tokens: int) -> int:
        """See `TableGrowth.at`, for all tables together."""
        return sum(table.at(num_texts, num_tokens) for table in self.tables)

    @property
    def grows_with(self) -> str:
        """What its tables keep, for people."""
        return "; ".join(table.what for table in self.tables if table.what)

    @classmethod
    def joined(cls, members: Seq[DrafterTraits]) -> DrafterTraits:
        """A guarded group of drafters, of which any may draft: what one member reads, in its own order, and of several
        every layer that some member reads, once."""
        layers = dict.fromkeys(layer for member in members for layer in member.feature_layers)
        return cls(
            max_nodes=max(member.max_nodes for member in members),
            kinds=frozenset[ProposalKind]().union(*(member.kinds for member in members)),
            feature_layers=members[0].feature_layers if len(members) == 1 else tuple(layers),
            kv_bytes_per_token=sum(member.kv_bytes_per_token for member in members),
            tables=tuple(table for member in members for table in member.tables),
            remembers=any(member.remembers for member in members),
            reads_logits=any(member.reads_logits for member in members),
            guards_itself=True,
        )
