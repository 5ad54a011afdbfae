"""What a block drafter may have behind its layers: a small head that reads the draft tokens from left to right.

The layers of a block drafter give each slot logits that know nothing of the tokens drawn for the slots before it. Such
a head corrects them, slot by slot, with the token before. The softmax of what it returns is the distribution that the
next token is drawn from, so that verification is exact as for any chain; a tree's node gets its logits from its
parent's token and state in the same way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]
"""int64 [...] -> [..., hidden]: the embedding that the block's own tokens are embedded with"""


@dataclass(frozen=True, kw_only=True)
class LeftToRightConfig:
    """The kind and the sizes of such a head."""

    kind: str
    """`vanilla`, `gated` or `rnn`: Markov heads of DSpark. `selector`: DFlash2's.
    `gru`: Domino's. `refiner`: XPress'."""
    rank: int
    """Width between a token and the logits."""
    top_k: int = 16
    """How many tokens a selector's slot chooses from."""
    state_size: int = 0
    """Width of a GRU's state."""
    num_uncorrected: int = 0
    """How many of the first drafts keep the logits of the layers before a GRU."""
    mlp_ratio: int = 2
    """Width of a refiner's MLP over the rank."""
    num_passes: int = 6
    """How often other engines repeat a refiner over a whole block; here each slot is computed once, in order,
    which is what the repetition converges to."""


class LeftToRightHead(nn.Module, ABC):
    """Corrects the logits of a block's slots by the tokens that were drawn before them.

    Its state is a tensor with a row for each path of draft tokens, and can be indexed by rows: the children of a tree's
    node begin with their parent's. Token ids are the target's; logits are over the draft vocabulary.
    """

    reads_path: ClassVar[bool] = True
    """Whether a slot depends on tokens before the previous one; False: the state is empty, and all slots of a known
    text can be computed at once."""
    first_slot: int = 0
    """The first slot of a block that predicts a token: 1 where the anchor's row predicts none."""

    def read(self, hidden: Tensor) -> Tensor:
        """What it uses of the hidden states of whole blocks [n, N, hidden], for all slots: [n, N, width]."""
        return hidden

    def begin(self, read: Tensor, anchor: Tensor, before: Tensor, embed: Embed) -> Tensor:
        """The state of n blocks of which no token is drawn yet, [n, ...].

        `read` is what `read` gave, `anchor` [n] the blocks' first tokens, `before` [n] the committed tokens before
        those (the anchors again, where there are none).
        """
        return read.new_zeros(len(read), 0)

    @abstractmethod
    def step(
        self, slot: int, read: Tensor, base_logits: Tensor, previous: Tensor, state: Tensor, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """The logits of one slot of n paths, [n, draft vocab], and their next state.

        `read` [n, width] and `base_logits` [n, draft vocab] are the slot's, `previous` [n] the tokens before it.
        """

    def forward(
        self, hidden: Tensor, base_logits: Tensor, tokens: Tensor, before: Tensor, embed: Embed
    ) -> Tensor:
        """The logits of all predicting slots of known texts, [n, drafts, draft vocab].

        `hidden` [n, N, hidden] are all rows of the blocks, `base_logits` [n, drafts, draft vocab] those of the slots
        that predict, `tokens` [n, N] the texts from the anchors on, `before` [n] as for `begin`.
        """
        read, first = self.read(hidden), self.first_slot
        state = self.begin(read, tokens[:, 0], before, embed)
        if not self.reads_path:
            previous = tokens[:, : base_logits.shape[1]]
            return self.step(first, read[:, first:], base_logits, previous, state, embed)[0]
        found = []
        for draft in range(base_logits.shape[1]):
            slot = first + draft
            logits, state = self.step(
                slot, read[:, slot], base_logits[:, draft], tokens[:, draft], state, embed
            )
            found.append(logits)
        return torch.stack(found, dim=1)
