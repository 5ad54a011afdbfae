"""A smaller model of the same vocabulary drafts a chain or a tree (Leviathan et al. 2023; Chen et al. 2023).

The draft keeps its own key and value cache, and drafts for all sequences in one batch. It needs no special case for
what it has not seen: whatever committed tokens lie behind its cache (its own last guess after full acceptance, a
stretch decoded without speculation, a whole prompt) are fed before the first guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.config import DTYPES, QUANTIZATIONS, check_at_least, check_types, reject_unknown
from slipstream.core import EMPTY_PROPOSAL, ROOT, Proposal, ProposalKind, Sequence
from slipstream.draft.base import DraftContext, Drafter
from slipstream.draft.vocabulary import check_same_vocabulary
from slipstream.errors import ConfigError
from slipstream.kv.cache import KVCache
from slipstream.models import RowGroup, load_model, load_tokenizer
from slipstream.sampling.noise import Noise, Stream
from slipstream.sampling.processors import LogitsProcessor

SAMPLE_METHODS = ("auto", "greedy", "coupled", "probabilistic")


@dataclass(frozen=True)
class DraftModelOptions:
    """Keys of `speculative_config` for `method: draft_model`."""

    model: str
    """Folder or hub id of the draft model; its vocabulary must be the target's."""
    num_speculative_tokens: int = 4
    """Depth: draft tokens in a chain, levels in a tree."""
    tree_top_k: int = 1
    """Guesses kept at each level; 1 is a chain."""
    num_draft_nodes: int | None = None
    """Nodes of a tree; None is `num_speculative_tokens * tree_top_k`."""
    draft_sample_method: str = "auto"
    """`greedy`: the draft's most probable tokens. `coupled`: drawn with the target's own noise. `probabilistic`:
    drawn independently, for the classical verifiers, chains only. `auto` suits the verifier."""
    dtype: str = "auto"
    quantization: str | None = None
    """`int8`: the draft's weights as 8-bit integers, on a CPU. None: as the target's. The text stays the target's."""
    device: str = "auto"
    revision: str | None = None

    def __post_init__(self) -> None:
        check_types(self, "draft_model")
        check_at_least(
            "draft_model", 1, num_speculative_tokens=self.num_speculative_tokens, tree_top_k=self.tree_top_k
        )
        if self.num_draft_nodes is not None:
            check_at_least("draft_model", 1, num_draft_nodes=self.num_draft_nodes)
        if self.num_draft_nodes is not None and self.tree_top_k == 1:
            raise ConfigError("draft_model num_draft_nodes is for trees; set tree_top_k above 1")
        reject_unknown([self.draft_sample_method], SAMPLE_METHODS, "draft_sample_method")
        reject_unknown([self.dtype], DTYPES, "draft_model dtype")
        if self.quantization is not None:
            reject_unknown([self.quantization], QUANTIZATIONS, "draft_model quantization")
        if self.draft_sample_method == "probabilistic" and self.tree_top_k > 1:
            raise ConfigError("probabilistic drafts are chains; set tree_top_k to 1 or sample coupled")


@dataclass(slots=True)
class _Node:
    """A guess. `score` is the product of the draft's confidences on its path, as a logarithm."""

    token_id: int
    parent: _Node | None
    depth: int
    score: float
    stored: int | None = None
    """Which of the entries behind the committed ones holds it; None while it has not been fed."""
    probs: Tensor | None = None
    """[vocab]: what it was drawn from, if it was drawn."""

    def path(self) -> list[_Node]:
        return [*(self.parent.path() if self.parent else []), self]

    def token_ids(self) -> list[int]:
        return [node.token_id for node in self.path()]


@dataclass(slots=True)
class _Draft:
    """One sequence's tree while it grows."""

    sequence: Sequence
    max_nodes: int
    max_depth: int
    processor: LogitsProcessor
    noise: Noise
    start: int
    """Where the sequence's segment began when the entries of the tree were written."""
    nodes: list[_Node] = field(default_factory=list)
    frontier: list[_Node | None] = field(default_factory=lambda: [None])
    """The nodes whose logits come next; None stands for the committed text."""
    stored: list[_Node] = field(default_factory=list)


class DraftModelDrafter(Drafter):
    """Drafts with a small causal language model."""

    Options = DraftModelOptions
    kinds = frozenset({ProposalKind.ONE_HOT, ProposalKind.COUPLED, ProposalKind.SAMPLED_IID})
    options: DraftModelOptions

    def __init__(self, options: DraftModelOptions, context: DraftContext) -> None:
        super().__init__(options, context)
        trust = context.engine_config.trust_remote_code
        method = options.draft_sample_method
        if method == "auto":
            classical = "probabilistic" if options.tree_top_k == 1 else "greedy"
            method = "coupled" if context.verifier == "coupled" else classical
        if method == "coupled" and context.verifier != "coupled":
            raise ConfigError(
                f"verifier {context.verifier!r} cannot judge coupled drafts; "
                "set draft_sample_method to probabilistic or greedy"
            )
        self._method = method
        tokenizer = load_tokenizer(options.model, revision=options.revision, trust_remote_code=trust)
        check_same_vocabulary(context.tokenizer, tokenizer, options.model)
        self.model = load_model(
            options.model,
            dtype=options.dtype,
            device=str(context.device) if options.device == "auto" else options.device,
            revision=options.revision,
            trust_remote_code=trust,
            quantization=options.quantization or context.engine_config.quantization,
            cpu_kernels=context.engine_config.cpu_kernels,
        )
        self._cache: KVCache | None = None
        self._processors: dict[int, LogitsProcessor] = {}
        self._trees: dict[int, _Draft] = {}
        """The last proposal of each sequence, until its verdict has been observed."""

    # --- the contract -----------------------------------------------------------------------------------------

    def max_nodes(self) -> int:
        options = self.options
        return options.num_draft_nodes or options.num_speculative_tokens * options.tree_top_k

    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token

    def allocate(self, num_tokens: int) -> None:
        self._cache = KVCache(
            self.model.shapes,
            num_tokens,
            self.model.dtype,
            self.model.device,
            self.context.engine_config.enable_prefix_caching,
        )

    def memory_bytes(self) -> int:
        return self.model.weight_bytes + (self.cache.memory_bytes() if self._cache else 0)

    @property
    def cache(self) -> KVCache:
        """The draft's own keys and values."""
        assert self._cache is not None, "allocate() comes before the first proposal"
        return self._cache

    @torch.inference_mode()
    def propose(self, sequences: Seq[Sequence], budgets: Seq[int]) -> list[Proposal]:
        # Room for all first: making room for one may move another's entries.
        roomy = [self._has_room(sequence) for sequence in sequences]
        drafts = {
            sequence.id: self._begin(sequence, budget)
            for sequence, budget, fits in zip(sequences, budgets, roomy, strict=True)
            if fits
        }
        growing = self._catch_up(list(drafts.values()))
        while growing:
            growing = [draft for draft in growing if draft.frontier]
            self._feed(growing)
        for draft in drafts.values():
            if draft.nodes:
                self._trees[draft.sequence.id] = draft
        return [
            self._proposal(drafts[sequence.id]) if sequence.id in drafts else EMPTY_PROPOSAL
            for sequence in sequences
        ]

    def observe(self, sequences: Seq[Sequence], num_accepted: Seq[int]) -> None:
        """Keep the entries of the accepted path; the last guess of a path was never fed and is not among them."""
        for sequence, accepted in zip(sequences, num_accepted, strict=True):
            draft = self._trees.pop(sequence.id, None)
            if draft is None or sequence.id not in self.cache.accounting:
                continue
            segment = self.cache.accounting.segment(sequence.id)
            if segment.start != draft.start:
                continue  # moved since: only the committed entries came along
            first = len(segment.token_ids)
            by_path = {tuple(node.token_ids()): node.stored for node in draft.stored}
            token_ids = sequence.token_ids[first : first + accepted]
            kept: list[int] = []
            while len(kept) < accepted:
                stored = by_path.get(tuple(token_ids[: len(kept) + 1]))
                if stored is None:
                    break
                kept.append(stored)
            self.cache.commit(sequence.id, token_ids[: len(kept)], kept)

    def release(self, sequence: Sequence) -> None:
        self._trees.pop(sequence.id, None)
        self._processors.pop(sequence.id, None)
        if sequence.id in self.cache.accounting:
            self.cache.accounting.close(sequence.id)

    def reset(self) -> None:
        self.cache.accounting.clear()

    def num_held(self) -> int:
        return max(self.cache.accounting.num_owners, len(self._processors), len(self._trees))

    def integrity(self) -> list[str]:
        accounting = self.cache.accounting
        return [f"draft: {fault}" for fault in accounting.integrity()]

    # --- drafting ---------------------------------------------------------------------------------------------

    def _has_room(self, sequence: Sequence) -> bool:
        """True when the draft can hold the committed text and its guesses, in its context and in its cache."""
        length = len(sequence.token_ids)
        if length + self.options.num_speculative_tokens > self.model.context_length:
            return False
        accounting = self.cache.accounting
        opened = sequence.id in accounting
        seen = len(accounting.segment(sequence.id).token_ids) if opened else 0
        if max(sequence.token_ids[seen:], default=0) >= self.model.vocab_size:
            return False  # the target's embedding is wider than the draft's
        if not opened and accounting.open(sequence.id, sequence.token_ids, sequence.tenant) is None:
            return False
        fed_levels = self.options.num_speculative_tokens - 1
        return accounting.reserve(sequence.id, length + fed_levels * self.options.tree_top_k)

    def _begin(self, sequence: Sequence, budget: int) -> _Draft:
        self._trees.pop(sequence.id, None)
        greedy = sequence.params.temperature == 0
        if sequence.id not in self._processors:
            params = sequence.params
            if greedy and self.options.tree_top_k > 1:
                # A one-hot distribution has no second guess: rank by the draft's own probabilities.
                params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            self._processors[sequence.id] = LogitsProcessor(params, prompt, (), (), self.vocab_size)
        return _Draft(
            sequence,
            max_nodes=budget,
            max_depth=min(budget, self.options.num_speculative_tokens),
            processor=self._processors[sequence.id],
            noise=Noise(sequence.seed, len(sequence.token_ids), greedy),
            start=self.cache.accounting.segment(sequence.id).start,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that target and draft both have logits for; padding beyond the vocabulary may differ."""
        return min(self.model.vocab_size, self.context.vocab_size)

    def _catch_up(self, drafts: list[_Draft]) -> list[_Draft]:
        """Feed the committed tokens that the draft has not seen; returns the drafts that made their first guesses.

        The rows of one call are bounded as a target step's are, so that a long prompt delays nobody for long: a
        sequence that is not through proposes nothing in this step.
        """
        rows_left = self.context.engine_config.max_num_batched_tokens
        groups: list[RowGroup] = []
        fed: list[tuple[_Draft, int]] = []
        for draft in drafts:
            sequence = draft.sequence
            segment = self.cache.accounting.segment(sequence.id)
            seen = len(segment.token_ids)
            past = min(
                seen, len(sequence.token_ids) - 1
            )  # the last row is fed again when the engine asks again
            token_ids = sequence.token_ids[past : past + rows_left]
            if not token_ids:
                continue
            rows_left -= len(token_ids)
            reaches_end = past + len(token_ids) == len(sequence.token_ids)
            wanted = [len(token_ids) - 1] if reaches_end and draft.max_nodes else []
            groups.append(RowGroup(segment.start, past, token_ids, wanted))
            fed.append((draft, past + len(token_ids) - seen))
        if not groups:
            return []
        logits = self.model.forward(groups, self.cache.pool).logits[:, : self.vocab_size]
        ready: list[_Draft] = []
        for (draft, num_new), group in zip(fed, groups, strict=True):
            self.cache.accounting.commit(draft.sequence.id, group.token_ids[len(group.token_ids) - num_new :])
            if group.logit_rows:
                self._grow(draft, logits[len(ready) : len(ready) + 1])
                ready.append(draft)
        return ready

    def _feed(self, drafts: list[_Draft]) -> None:
        """Feed the frontiers, one level of every tree in one pass, and grow the next level."""
        if not drafts:
            return
        groups = [self._frontier_rows(draft) for draft in drafts]
        logits = self.model.forward(groups, self.cache.pool).logits[:, : self.vocab_size]
        end = 0
        for draft, group in zip(drafts, groups, strict=True):
            begin, end = end, end + len(group.token_ids)
            self._grow(draft, logits[begin:end])

    def _frontier_rows(self, draft: _Draft) -> RowGroup:
        segment = self.cache.accounting.segment(draft.sequence.id)
        past = len(segment.token_ids)
        nodes = [node for node in draft.frontier if node is not None]
        earlier = list(draft.stored)
        for node in nodes:
            node.stored = len(draft.stored)
            draft.stored.append(node)
        token_ids = [node.token_id for node in nodes]
        if self.options.tree_top_k == 1:
            return RowGroup(segment.start, past + len(earlier), token_ids, [0])
        visible = torch.zeros(len(nodes), len(draft.stored), dtype=torch.bool)
        for row, node in enumerate(nodes):
            visible[row, [ancestor.stored for ancestor in node.path()]] = True
        return RowGroup(
            segment.start,
            past,
            token_ids,
            range(len(nodes)),
            positions=[past + node.depth - 1 for node in nodes],
            stored_positions=[past + node.depth - 1 for node in earlier],
            tail_visible=visible,
        )

    def _grow(self, draft: _Draft, logits: Tensor) -> None:
        """Add the guesses below the frontier, `logits` [frontier, vocab], and choose the next frontier."""
        parents = draft.frontier
        paths = [node.token_ids() if node else [] for node in parents]
        depth = len(paths[0]) + 1
        log_probs = logits  # of which only the argmax counts
        if not draft.processor.is_plain_greedy:
            log_probs = draft.processor.log_probs(logits, draft.sequence.output_token_ids, paths)
        if self.options.tree_top_k == 1:
            children = [self._single(draft, parents[0], log_probs[0], depth)]
        else:
            children = self._best(draft, parents, log_probs, depth)
        draft.nodes.extend(children)
        children.sort(key=lambda node: -node.score)
        draft.frontier = [] if depth >= draft.max_depth else list(children[: self.options.tree_top_k])

    def _single(self, draft: _Draft, parent: _Node | None, log_probs: Tensor, depth: int) -> _Node:
        """The one guess of a chain, from `log_probs` [vocab]."""
        position = len(draft.sequence.token_ids) + depth - 1
        if self._method == "greedy" or draft.noise.greedy:
            return _Node(int(log_probs.argmax()), parent, depth, 0.0)
        if self._method == "coupled":
            return _Node(int(draft.noise.choose(log_probs[None], [position])), parent, depth, 0.0)
        token_id = draft.noise.draw(log_probs, position, Stream.DRAFT)
        return _Node(token_id, parent, depth, 0.0, probs=log_probs.exp())

    def _best(self, draft: _Draft, parents: Seq[_Node | None], log_probs: Tensor, depth: int) -> list[_Node]:
        """The best guesses below each parent. Coupled, the target's noise is added before they are compared."""
        if self._method == "coupled":
            positions = [len(draft.sequence.token_ids) + depth - 1] * len(parents)
            log_probs = torch.log_softmax(draft.noise.perturb(log_probs, positions), dim=-1)
        top = log_probs.topk(min(self.options.tree_top_k, log_probs.shape[1]), dim=-1)
        children: list[_Node] = []
        for parent, scores, tokens in zip(parents, top.values.tolist(), top.indices.tolist(), strict=True):
            above = parent.score if parent else 0.0
            children.extend(
                _Node(token, parent, depth, above + score)
                for token, score in zip(tokens, scores, strict=True)
                if score > float("-inf")
            )
        return children

    def _proposal(self, draft: _Draft) -> Proposal:
        """The best nodes of the tree. A child never scores above its parent, so they are connected."""
        best = sorted(draft.nodes, key=lambda node: (-node.score, node.depth))[: draft.max_nodes]
        best.sort(key=lambda node: (node.depth, -node.score))
        index = {id(node): number for number, node in enumerate(best)}
        token_ids = tuple(node.token_id for node in best)
        parents = tuple(index[id(node.parent)] if node.parent else ROOT for node in best)
        if self._method == "coupled":
            return Proposal(token_ids, parents, ProposalKind.COUPLED)
        probs = [node.probs for node in best if node.probs is not None]
        if not probs:
            return Proposal(token_ids, parents)
        return Proposal(token_ids, parents, ProposalKind.SAMPLED_IID, torch.stack(probs))
