"""Options of block drafters' training. The command line makes its flags of this class, so no torch is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import check_at_least, check_types, reject_unknown
from slipstream.draft.methods import DFLASH
from slipstream.errors import ConfigError
from slipstream.train.options import parse_weights

DSPARK = "dspark"
"""A DFlash head with parts of its own: another verb, the same method."""

LAYOUTS = ("mask", "anchor")
FILE_LAYOUTS = ("z-lab", "speculators", "deepspec")
CORRECTIONS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn", "selector": "selector", "gru": "gru"}
"""What `left_to_right` may name besides none: the kind in the head's own configuration."""
BLOCK_LOSSES = ("hard", "forward_kl", "total_variation", "confidence")
POSITION_WEIGHTS = ("decay", "uniform", "dpace")

PRESETS: Mapping[str, Mapping[str, Any]] = {
    DFLASH.name: {"block_size": 8, "layout": "mask", "left_to_right": "none", "loss": "hard=1"},
    DSPARK: {
        "block_size": 7,
        "layout": "anchor",
        "left_to_right": "markov",
        "loss": "hard=0.1,total_variation=1.8,confidence=1",
    },
}
"""What a method's authors chose, where neither an option nor the head to continue from says otherwise."""


@dataclass(frozen=True)
class BlockTrainOptions:
    """The shape of a block drafter and its training."""

    init: str | None = None
    """Folder or hub id of a head of this target to continue from: a block drafter, or an EAGLE-3 head, whose layer
    gives the first one what fits. Its shape is taken too where no option changes it; what was taken is said."""
    block_size: int | None = None
    """Rows of a draft pass, the last committed token's included: 8 for DFlash, 7 for DSpark."""
    num_layers: int | None = None
    """Layers of the head; by default one for every fifteen of the target, at least one and at most the five of DFlash's
    authors, so that a draft pass costs about a tenth of the target's."""
    intermediate_size: int | None = None
    """Width of the layers' MLP; the target's by default."""
    layout: str | None = None
    """mask: a row at position p drafts the token at p (DFlash, JetSpec); anchor: the token behind it, so that the last
    committed token's row drafts too (DSpark)."""
    causal: bool | None = None
    """A row sees only the rows of its block before it (JetSpec)."""
    window: int | None = None
    """How many committed tokens before the block its rows see; all by default."""
    left_to_right: str | None = None
    """What corrects the draft by the tokens before, from left to right: none (DFlash), markov (DSpark), gated, rnn,
    selector (DFlash2) or gru (Domino)."""
    rank: int | None = None
    """Width of what corrects; by default a quarter of the target's width, at most the 256 of its authors."""
    draft_vocab_size: int | None = None
    """Size of the draft vocabulary, the most frequent tokens of the data's answers. All by default."""
    mask_token: str | None = None
    """Text or id of the token that stands for a mask; by default the tokenizer's own mask token, or else one that the
    data do not use."""
    feature_layers: str | None = None
    """The hidden states that the head reads, as in 2,9,16,23,28 (0 is the embedding, i the output of layer i). By
    default five, evenly from a low to a high one."""
    file_layout: str = "z-lab"
    """z-lab (of DFlash's authors and SGLang, any head), speculators (vLLM) or deepspec (DSpark's own)."""
    num_anchors: int = 64
    """The most blocks in a row of tokens, at random places of answers. The default is one in eight tokens of a row, as
    DSpark has."""
    loss: str | None = None
    """A weighted sum of hard (cross-entropy with the text's tokens), forward_kl, total_variation (1 minus what
    rejection sampling accepts; half the sum of absolute differences) and confidence (of a head that says how much that
    is). hard=1 for DFlash; hard=0.1,total_variation=1.8,confidence=1 for DSpark; JetSpec has forward_kl=1."""
    position_weights: str = "decay"
    """Weights along a block: decay (exp(-k / --gamma), k drafts after the first), uniform (JetSpec), or dpace (by how
    probable the head finds the text so far)."""
    gamma: float = 4.0
    """How slowly weights decay: a larger block wants a larger one; DFlash's authors have 7 for 16 rows."""
    dpace_alpha: float = 0.5
    """How much of each probability dpace takes as 1."""
    selector_weight: float = 1.0
    """Weight of the selector's own cross-entropy, over its candidates."""
    base_until: float = 0.5
    """With gru: fraction of the budget over which the weight of the layers' own logits falls from 1 to 0."""

    def __post_init__(self) -> None:
        check_types(self, "block drafter")
        for name in ("num_layers", "intermediate_size", "window", "rank", "draft_vocab_size", "num_anchors"):
            if getattr(self, name) is not None:
                check_at_least("block drafter", 1, **{name: getattr(self, name)})
        shapes = {"layout": LAYOUTS, "left_to_right": ("none", *CORRECTIONS), "file_layout": FILE_LAYOUTS}
        for name, known in shapes.items():
            if getattr(self, name) is not None:
                reject_unknown([getattr(self, name)], known, name)
        reject_unknown([self.position_weights], POSITION_WEIGHTS, "position_weights")
        if self.loss is not None:
            reject_unknown(self.losses, BLOCK_LOSSES, "loss")
        if self.left_to_right == "selector" and "confidence" in self.losses:
            raise ConfigError(
                "a selector leaves out most tokens, which a confidence head does not know; omit one"
            )
        if self.block_size is not None:
            check_at_least("block drafter", 1 if self.layout == "anchor" else 2, block_size=self.block_size)
        for name in ("gamma", "selector_weight"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        for name in ("dpace_alpha", "base_until"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be in [0, 1], got {getattr(self, name)}")

    @property
    def losses(self) -> dict[str, float]:
        """Loss to weight; raises `ConfigError`."""
        text = self.loss or ""
        return parse_weights(text if "=" in text or not text else f"{text}=1", "--loss")
