"""The heads that correct a block's logits from left to right: DSpark's, DFlash2's, Domino's and XPress'."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slipstream.draft.heads.left_to_right import Embed, LeftToRightConfig, LeftToRightHead


class MarkovHead(LeftToRightHead):
    """DSpark's vanilla head: a bias on all logits that depends on the previous token (DeepSpec, 2026)."""

    reads_path = False

    def __init__(self, rank: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        return base_logits + self.markov_w2(self.markov_w1(previous)), state


class GatedMarkovHead(MarkovHead):
    """DSpark's gated head: the slot's hidden state weighs what the previous token says."""

    def __init__(self, rank: int, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__(rank, vocab_size, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        token = self.markov_w1(previous)
        gate = self.gate_proj(torch.cat([read, token], dim=-1)).sigmoid()
        return base_logits + self.markov_w2(gate * token), state


class RecurrentMarkovHead(MarkovHead):
    """DSpark's recurrent head: a state along the block, [n, rank]."""

    reads_path = True

    def __init__(self, rank: int, vocab_size: int, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__(rank, vocab_size, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def begin(self, read: Tensor, anchor: Tensor, before: Tensor, embed: Embed) -> Tensor:
        state = read.new_zeros(len(read), self.markov_w1.embedding_dim)
        return self._advance(read[:, 0], anchor, state)[1] if self.first_slot else state

    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        output, state = self._advance(read, previous, state)
        return base_logits + self.markov_w2(output), state

    def _advance(self, read: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, self.markov_w1(previous), read], dim=-1)
        gate, candidate, output = self.joint_proj(inputs).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


class CandidateSelector(LeftToRightHead):
    """DFlash2's selector: scores the likeliest tokens of a slot by how they follow the previous one; no other token can
    be drawn (z-lab, 2026)."""

    reads_path = False

    def __init__(
        self, rank: int, vocab_size: int, draft_vocab_size: int, hidden_size: int, top_k: int
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(torch.empty(draft_vocab_size, rank).normal_(std=0.02))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def read(self, hidden: Tensor) -> Tensor:
        return self.hidden_projection(hidden)  # type: ignore[no-any-return]

    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        values, candidates = base_logits.topk(min(self.top_k, base_logits.shape[-1]), dim=-1)
        scores = values + self.transitions(read, previous, candidates)
        return torch.full_like(base_logits, float("-inf")).scatter(-1, candidates, scores), state

    def transitions(self, read: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """What is added to the logits of the candidates: read [..., rank], previous [...], candidates [..., k] ->
        [..., k]"""
        context = self.predecessor_codebook[previous] * read
        return (self.successor_codebook[candidates] @ context[..., None])[..., 0]


class PrefixGru(LeftToRightHead):
    """Domino's head: a GRU over the embeddings of the anchor and the drafts, whose state [n, g] and the slot's hidden
    state give a bias on all logits (Domino, 2026)."""

    def __init__(self, config: LeftToRightConfig, draft_vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.num_uncorrected = config.num_uncorrected
        self.gru = nn.GRUCell(hidden_size, config.state_size, bias=False)
        self.down = nn.Linear(hidden_size + config.state_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, draft_vocab_size, bias=False)

    def begin(self, read: Tensor, anchor: Tensor, before: Tensor, embed: Embed) -> Tensor:
        return read.new_zeros(len(read), self.gru.hidden_size)

    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        state = self.gru(embed(previous), state)
        if slot < self.first_slot + self.num_uncorrected:
            return base_logits, state
        return base_logits + self.up(F.silu(self.down(torch.cat([read, state], dim=-1)))), state


class BlockRefiner(LeftToRightHead):
    """XPress' refiner: a causal mix along the block of tokens and hidden states, and an MLP, give a bias on all logits
    (XPress, 2026). The state [n, N, rank] holds what enters the mix, zero behind the slot."""

    def __init__(
        self,
        config: LeftToRightConfig,
        vocab_size: int,
        draft_vocab_size: int,
        hidden_size: int,
        block_size: int,
    ) -> None:
        super().__init__()
        rank, width = config.rank, config.rank * config.mlp_ratio
        self.token_embed = nn.Embedding(vocab_size, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        """[channel, slot, slot that it reads], read up to the slot itself"""
        self.mlp_gate = nn.Linear(rank, width, bias=False)
        self.mlp_up = nn.Linear(rank, width, bias=False)
        self.mlp_down = nn.Linear(width, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size, bias=False)

    def read(self, hidden: Tensor) -> Tensor:
        mean = self.down_g(hidden.mean(dim=1, keepdim=True))
        return torch.cat([self.down_h(hidden), mean.expand(-1, hidden.shape[1], -1)], dim=-1)

    def begin(self, read: Tensor, anchor: Tensor, before: Tensor, embed: Embed) -> Tensor:
        state = read.new_zeros(len(read), self.mix_l.shape[1], self.mix_l.shape[0])
        return self._advance(0, read[:, 0], before, state)[1] if self.first_slot else state

    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        entered, state = self._advance(slot, read, previous, state)
        mixed = entered + torch.einsum("cj,njc->nc", self.mix_l[:, slot, : slot + 1], state[:, : slot + 1])
        mixed = mixed + self.mlp_down(F.silu(self.mlp_gate(mixed)) * self.mlp_up(mixed))
        return base_logits + self.readout(mixed), state

    def _advance(self, slot: int, read: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        entered = self.in_proj(torch.cat([read, self.token_embed(previous)], dim=-1))
        return entered, torch.cat([state[:, :slot], entered[:, None], state[:, slot + 1 :]], dim=1)


MARKOV_KINDS = ("vanilla", "gated", "rnn")
KINDS = (*MARKOV_KINDS, "selector", "gru", "refiner")


def make_left_to_right(
    config: LeftToRightConfig,
    *,
    vocab_size: int,
    draft_vocab_size: int,
    hidden_size: int,
    block_size: int,
    first_slot: int,
) -> LeftToRightHead:
    """The head of a configuration, newly initialised; raises `ValueError` for a kind that there is not."""
    head: LeftToRightHead
    tables = (config.rank, vocab_size, draft_vocab_size)
    if config.kind == "vanilla":
        head = MarkovHead(*tables)
    elif config.kind == "gated":
        head = GatedMarkovHead(*tables, hidden_size)
    elif config.kind == "rnn":
        head = RecurrentMarkovHead(*tables, hidden_size)
    elif config.kind == "selector":
        head = CandidateSelector(*tables, hidden_size, config.top_k)
    elif config.kind == "gru":
        head = PrefixGru(config, draft_vocab_size, hidden_size)
    elif config.kind == "refiner":
        head = BlockRefiner(config, vocab_size, draft_vocab_size, hidden_size, block_size)
    else:
        raise ValueError(
            f"a left-to-right head of kind {config.kind!r} is not known; there are {', '.join(KINDS)}"
        )
    head.first_slot = first_slot
    return head
