"""How drafters with probabilities grow a proposal: a chain, a fixed tree or a dynamic tree.

Level by level: the drafter computes logits for the frontier, `DraftTree.grow` adds draft tokens below it and chooses
the next frontier, `DraftTree.proposal` selects the best nodes within the budget. Drafters differ only in how they
compute the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.core.pending import PendingNumbers
from slipstream.core.pending_tree import PendingTree
from slipstream.core.proposal import ROOT, Proposal, ProposalKind
from slipstream.core.sequence import Sequence
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.kv.slots import SlotMap
from slipstream.models.executor.chains import ENDED, Draw
from slipstream.models.executor.levels import NOT_FINITE
from slipstream.models.rows import RowGroup
from slipstream.sampling.noise import Noise, Stream
from slipstream.sampling.processors import LogitsProcessor


class NotFiniteError(ArithmeticError):
    """A drafter's logits are not finite: its arithmetic overflowed, or its weights are damaged."""

    def __init__(self, sequence_id: int) -> None:
        super().__init__("the draft's logits are not finite (an overflow of its type, or damaged weights)")
        self.sequence_id = sequence_id


@dataclass(slots=True)
class DraftNode:
    """A draft token. `score` is the log of the product of the drafter's probabilities on its path, weighted with the
    acceptance that it expects where it says so."""

    token_id: int
    parent: DraftNode | None
    depth: int
    score: float
    ranks: tuple[int, ...] = ()
    """Its rank among its siblings, behind those of its ancestors; fixed trees only."""
    stored: int | None = None
    """Index of its cache entry behind the committed ones; None while it has not been fed."""
    probs: Tensor | None = None
    """[vocab]: the distribution that it was sampled from; None if it was not sampled."""
    state: Any = None
    """The drafter's own state for this node."""

    def path(self) -> list[DraftNode]:
        """The nodes from the top of the tree down to this one."""
        return [*(self.parent.path() if self.parent else []), self]

    def stored_path(self) -> list[int]:
        """Which entries hold the nodes of `path`, all of which were fed."""
        return [node.stored for node in self.path() if node.stored is not None]

    def token_ids(self) -> list[int]:
        """The tokens of `path`."""
        return [node.token_id for node in self.path()]


@dataclass(frozen=True, slots=True)
class Peaks:
    """The maximum of each row of logits and its token, on the host.

    Reading them for the rows of all sequences at once synchronises with the device once.
    """

    logits: list[float]
    """NaN for a row that has one."""
    token_ids: list[int]
    """Empty where no tree takes the argmax."""

    @classmethod
    def of(cls, logits: Tensor, trees: Seq[DraftTree]) -> Peaks:
        """The peaks of `logits` [rows, vocab], as far as the `trees` need them."""
        if not len(logits):  # nothing to wait for
            return cls([], [])
        peaks = logits.amax(-1)
        if not any(tree.takes_argmax for tree in trees):
            return cls(peaks.tolist(), [])
        token_ids = logits.argmax(-1)
        if not logits.is_cuda:
            return cls(peaks.tolist(), token_ids.tolist())
        values, tokens = torch.stack((peaks.double(), token_ids.double())).tolist()
        return cls(values, [int(token) for token in tokens])

    def rows(self, begin: int, end: int) -> Peaks:
        """The peaks of some of the rows."""
        return Peaks(self.logits[begin:end], self.token_ids[begin:end])


@dataclass(slots=True)
class DraftTree:
    """One sequence's tree while it grows. In `frontier`, None represents the end of the committed text."""

    sequence: Sequence
    shape: ProposalShape
    max_nodes: int
    max_depth: int
    processor: LogitsProcessor
    noise: Noise
    slots: SlotMap = ()
    """Where the sequence's entries lay when those of the tree were written."""
    length: int = 0
    """Length of the committed text then, in the drafter's own tokens."""
    nodes: list[DraftNode] = field(default_factory=list)
    frontier: list[DraftNode | None] = field(default_factory=lambda: [None])
    """The nodes whose logits are computed next."""
    stored: list[DraftNode] = field(default_factory=list)
    state: Any = None
    """As `DraftNode.state`, for the committed text."""
    confidence_threshold: float = 0.0
    """A chain ends before `confidence` falls below this."""
    confidence: float = 1.0
    """Product of the highest probability at each level so far."""
    pending: Proposal | None = None
    """The whole chain or tree, where the host has not read it."""
    _fed: Seq[int] = ()

    @property
    def takes_argmax(self) -> bool:
        """True where the next token is the argmax of the raw logits."""
        shape = self.shape
        if shape.widths is not None or not shape.is_chain or not self.processor.is_plain_greedy:
            return False
        return shape.method == "greedy" or self.noise.greedy

    def draw(self) -> Draw | None:
        """How the kernels can draw the whole chain; None where they cannot.

        They cannot where a token depends on the text in another way than through the logits, or where the probabilities
        that it was drawn with are to be given (`probabilistic`): of other methods a verifier compares the tokens alone.
        """
        shape, params = self.shape, self.processor.filters_only
        if shape.widths is not None or not shape.is_chain or params is None:
            return None
        least, no_keys, tail = self.confidence_threshold, [0] * self.max_depth, self.sequence.tail
        shift = None if tail is None else tail.shift
        if self.noise.greedy:
            return Draw(0.0, no_keys, least_confidence=least, shift=shift)
        if shape.method not in ("greedy", "coupled"):
            return None
        greedy, first = shape.method == "greedy", len(self.sequence.token_ids)
        keys = no_keys if greedy else [self.noise.key(first + level) for level in range(self.max_depth)]
        filters = max(params.top_k, 0), params.top_p, params.min_p
        before = 0 if greedy or tail is None else tail.most - 1
        earlier = [self.noise.key(position) for position in range(first - before, first)]
        return Draw(params.temperature, keys, *filters, least, earlier, shift, greedy)

    def take_chain(self, token_ids: Seq[int]) -> None:
        """Take what `Chains.tokens` says of a whole chain. All its tokens but the last were fed, and that one too where
        the chain ended behind it for lack of confidence. Those that are pending have no nodes until `resolve`."""
        self.frontier = []
        if isinstance(token_ids, PendingNumbers) and token_ids.is_pending:
            kind = ProposalKind.COUPLED if self.shape.method == "coupled" else ProposalKind.ONE_HOT
            self.pending = Proposal(token_ids, tuple(range(ROOT, len(token_ids) - 1)), kind)
            return
        if NOT_FINITE in token_ids:
            raise NotFiniteError(self.sequence.id)
        for token_id in token_ids:
            parent = self.nodes[-1] if self.nodes else None
            if parent is not None:
                parent.stored = len(self.stored)
                self.stored.append(parent)
            if token_id == ENDED:
                break
            self.nodes.append(DraftNode(token_id, parent, len(self.nodes) + 1, 0.0))

    def resolve(self) -> None:
        """Make the nodes of pending tokens, which the target has checked meanwhile; raises `NotFiniteError`."""
        if self.pending is None:
            return
        known, is_tree = self.pending.known(), isinstance(self.pending, PendingTree)
        self.pending = None
        if not is_tree:
            self.take_chain(known.token_ids)
            return
        if NOT_FINITE in known.token_ids:
            raise NotFiniteError(self.sequence.id)
        ranks = [0] * (known.depth + 1)
        for token_id, parent, depth in zip(known.token_ids, known.parents, known.depths, strict=True):
            node = DraftNode(token_id, None if parent == ROOT else self.nodes[parent], depth, 0.0)
            self.nodes.append(node)
            if depth <= len(self._fed) and ranks[depth] < self._fed[depth - 1]:
                node.stored = len(self.stored)
                self.stored.append(node)
            ranks[depth] += 1

    def take_pending(self, proposal: PendingTree, fed: Seq[int]) -> None:
        """Take a whole tree. So many of the best nodes of each level were fed, level after level."""
        self.frontier, self.pending, self._fed = [], proposal, fed

    def grow(
        self, logits: Tensor, peaks: Peaks | None = None, likely: Seq[float] | None = None
    ) -> list[DraftNode]:
        """Add draft tokens below the frontier, from `logits` [frontier, vocab], and choose the next frontier.

        `peaks` are those of `logits`, where the caller has read them. `likely` is how probable it is that a token below
        each frontier node is accepted, where something else than the logits says so; it must not depend on that token.
        A chain may end by it, and a dynamic tree's scores are weighted with it. Returns the new nodes, best first.
        Raises `NotFiniteError` where a row has a NaN or an infinity, or is minus infinity throughout.
        """
        parents = self.frontier
        if not parents:
            return []
        peaks = Peaks.of(logits, [self]) if peaks is None else peaks
        if not all(map(math.isfinite, peaks.logits)):
            raise NotFiniteError(self.sequence.id)
        paths = [node.token_ids() if node else [] for node in parents]
        depth = len(paths[0]) + 1
        log_probs = logits  # for plain greedy decoding only the argmax matters
        if not self.processor.is_plain_greedy:
            log_probs = self.processor.log_probs(logits, self.sequence.output_token_ids, paths)
            # A row in which the request's limits allow none of the drafter's tokens gets no child. Such a row becomes a
            # stop only in the target.
            log_probs = log_probs.masked_fill(logits == float("-inf"), float("-inf"))
            alive = [row for row, best in enumerate(log_probs.amax(-1).tolist()) if best > float("-inf")]
            if len(alive) < len(parents):
                parents, log_probs = [parents[row] for row in alive], log_probs[alive]
                likely = None if likely is None else [likely[row] for row in alive]
        if not parents:
            self.frontier = []
            return []
        if self.shape.widths is not None:
            children = self._fixed(parents, log_probs, depth)
        elif self.shape.is_chain:
            if self.loses_confidence(log_probs[0], None if likely is None else likely[0]):
                self.frontier = []
                return []
            if self.takes_argmax:
                children = [DraftNode(peaks.token_ids[0], parents[0], depth, 0.0)]
            else:
                children = [self._single(parents[0], log_probs[0], depth)]
        else:
            children = self._best(parents, log_probs, [self.shape.top_k] * len(parents), depth, likely)
        self.nodes.extend(children)
        children.sort(key=lambda node: -node.score)
        self.frontier = [] if depth >= self.max_depth else self._next_frontier(children)
        return children

    def frontier_tokens(self) -> list[int]:
        """The token of each frontier node; the last committed one for the end of the committed text."""
        return [node.token_id if node else self.sequence.token_ids[-1] for node in self.frontier]

    def states_above(self) -> list[Any]:
        """What `keep_states` kept above each frontier node, or `state` where that is the committed text."""
        return [node.parent.state if node and node.parent else self.state for node in self.frontier]

    def keep_states(self, states: Iterable[Any]) -> None:
        """Keep a state for each frontier node, which the nodes below it start from."""
        for node, state in zip(self.frontier, states, strict=True):
            if node is None:
                self.state = state
            else:
                node.state = state

    def store_frontier(
        self, slots: SlotMap, past: int, own_id: Callable[[int], int] = lambda token_id: token_id
    ) -> RowGroup:
        """The frontier's rows, whose entries are stored behind those of the earlier levels.

        `past` entries of the committed text lie before the tree's, in the first of `slots`. `own_id` maps a target's
        token id to the drafter's.
        """
        nodes = [node for node in self.frontier if node is not None]
        earlier = list(self.stored)
        for node in nodes:
            node.stored = len(self.stored)
            self.stored.append(node)
        token_ids = [own_id(node.token_id) for node in nodes]
        if self.shape.is_chain:
            rows = RowGroup(slots, past + len(earlier), token_ids, [0])
            rows.num_certain, rows.owner = past, self.sequence.id
            return rows
        return RowGroup(
            slots,
            past,
            token_ids,
            range(len(nodes)),
            num_certain=past,
            owner=self.sequence.id,
            positions=[past + node.depth - 1 for node in nodes],
            stored_positions=[past + node.depth - 1 for node in earlier],
            tail_seen=[node.stored_path() for node in nodes],
        )

    def _next_frontier(self, children: list[DraftNode]) -> list[DraftNode | None]:
        if self.shape.widths is not None:
            return [node for node in children if node.ranks in self.shape.widths]
        return list(children[: self.shape.top_k])

    def loses_confidence(self, log_probs: Tensor, likely: float | None) -> bool:
        """True when the chain ends here. Decided before this level is sampled, so that every verifier stays exact."""
        if not self.confidence_threshold:
            return False
        if likely is None:
            likely = math.exp(float(log_probs.max() - log_probs.logsumexp(-1)))
        self.confidence *= likely
        return self.confidence < self.confidence_threshold

    def _single(self, parent: DraftNode | None, log_probs: Tensor, depth: int) -> DraftNode:
        """The next token of a chain, from `log_probs` [vocab]."""
        position = len(self.sequence.token_ids) + depth - 1
        if self.shape.method == "greedy" or self.noise.greedy:
            return DraftNode(int(log_probs.argmax()), parent, depth, 0.0)
        if self.shape.method == "coupled":
            return DraftNode(int(self.noise.choose(log_probs[None], [position])), parent, depth, 0.0)
        token_id = self.noise.draw(log_probs, position, Stream.DRAFT)
        return DraftNode(token_id, parent, depth, 0.0, probs=log_probs.exp())

    def _fixed(self, parents: Seq[DraftNode | None], log_probs: Tensor, depth: int) -> list[DraftNode]:
        """The children that the fixed tree has below each parent."""
        assert self.shape.widths is not None
        widths = [self.shape.widths[node.ranks if node else ()] for node in parents]
        if self.shape.method != "probabilistic" or self.noise.greedy:
            return self._best(parents, log_probs, widths, depth)
        children: list[DraftNode] = []
        position = len(self.sequence.token_ids) + depth - 1
        for parent, row, width in zip(parents, log_probs, widths, strict=True):
            index = 0 if parent is None else 1 + self.nodes.index(parent)
            tokens = self.noise.draw_without_replacement(row, width, position, index)
            probs = row.exp()
            for rank, token in enumerate(tokens):
                ranks = (*(parent.ranks if parent else ()), rank)
                children.append(DraftNode(token, parent, depth, 0.0, ranks, probs=probs))
        return children

    def _best(
        self,
        parents: Seq[DraftNode | None],
        log_probs: Tensor,
        widths: list[int],
        depth: int,
        likely: Seq[float] | None = None,
    ) -> list[DraftNode]:
        """The best tokens below each parent; with `coupled`, after adding the target's noise."""
        if self.shape.method == "coupled":
            positions = [len(self.sequence.token_ids) + depth - 1] * len(parents)
            log_probs = torch.log_softmax(self.noise.perturb(log_probs, positions), dim=-1)
        top = log_probs.topk(min(max(widths), log_probs.shape[1]), dim=-1)
        weights = [0.0] * len(parents) if likely is None else log_weights(likely)
        rows = zip(parents, top.values.tolist(), top.indices.tolist(), widths, weights, strict=True)
        children: list[DraftNode] = []
        for parent, scores, tokens, width, weight in rows:
            above, ranks = (parent.score + weight, parent.ranks) if parent else (weight, ())
            for rank, (token, score) in enumerate(zip(tokens[:width], scores[:width], strict=True)):
                if above + score > float("-inf"):
                    children.append(DraftNode(token, parent, depth, above + score, (*ranks, rank)))
        return children

    def proposal(self) -> Proposal:
        """The best nodes within the budget. A child never scores above its parent, so they form a tree."""
        if self.pending is not None:
            return self.pending
        if any(node.probs is not None for node in self.nodes):
            best = self.nodes[
                : self.max_nodes
            ]  # sampled: which nodes are dropped must not depend on the sample
        else:
            best = sorted(self.nodes, key=lambda node: (-node.score, node.depth))[: self.max_nodes]
            best.sort(key=lambda node: (node.depth, -node.score))
        index = {id(node): number for number, node in enumerate(best)}
        token_ids = tuple(node.token_id for node in best)
        parents = tuple(index[id(node.parent)] if node.parent else ROOT for node in best)
        if self.shape.method == "coupled":
            return Proposal(token_ids, parents, ProposalKind.COUPLED)
        probs = [node.probs for node in best if node.probs is not None]
        if not probs:
            return Proposal(token_ids, parents)
        kind = ProposalKind.SAMPLED_IID if self.shape.is_chain else ProposalKind.SAMPLED_WITHOUT_REPLACEMENT
        return Proposal(token_ids, parents, kind, torch.stack(probs))


def log_weights(likely: Seq[float]) -> list[float]:
    """What a score gains where a token is accepted with each of these chances: minus infinity where with none."""
    return [math.log(chance) if chance > 0 else -math.inf for chance in likely]


def whole_chains(trees: Iterable[DraftTree]) -> dict[int, Draw]:
    """Return, by sequence, how the kernels draw its whole chain; for the trees that need no level of their own.

    These are computed apart from the others, so that no sequence's draft depends on who else is in the batch.
    """
    draws = ((tree.sequence.id, tree.draw()) for tree in trees)
    return {sequence_id: draw for sequence_id, draw in draws if draw is not None}
