"""What drafts with Gemma 4's assistant (`assistant_head` says what it is): `mtp`, where `model` names one."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from slipstream.draft.base import DraftContext
from slipstream.draft.footprint import Footprint
from slipstream.draft.heads.assistant_config import output_table, read_layers
from slipstream.draft.heads.assistant_head import load_assistant
from slipstream.draft.heads.checkpoints import held_bytes, outline_checkpoint, stored_bytes
from slipstream.draft.proposers.draft_tree import DraftTree, Peaks
from slipstream.draft.proposers.parallel import HeadOptions, StateDrafter, target_of
from slipstream.draft.proposers.proposal_shape import ProposalShape
from slipstream.errors import ConfigError
from slipstream.models import load_config
from slipstream.models.attention.base import Variant
from slipstream.models.attention.gpu import without_cudnn
from slipstream.models.attention.packed import attend

SLIDING = "sliding_attention"


class AssistantDrafter(StateDrafter):
    """Drafts level by level over the target's own keys and values; chains, fixed trees and dynamic trees.

    It keeps nothing of a text, and writes nothing: entries of rows that are to be computed again are never read.
    """

    def __init__(self, options: HeadOptions, context: DraftContext) -> None:
        target = target_of(options, context)
        path, revision = options.model, options.revision
        config = load_config(path, revision=revision)
        self.layers = read_layers(config, target, path)
        """By type of the assistant's layers the target's layer whose keys and values they read."""
        shapes = {kind: target.shapes[layer] for kind, layer in self.layers.items()}
        self.head = load_assistant(path, config, shapes, revision)
        super().__init__(options, context)
        self.take(self.head)
        text = config.text_config
        self._rotary: Any = Gemma4TextRotaryEmbedding(text, device=target.device)
        self._sliding_window: int = text.sliding_window

    @classmethod
    def footprint(cls, options: Any, context: DraftContext) -> Footprint:
        """Return its weights, as the header of the file has them, and the hidden state that it reads."""
        target = context.target_outline
        if target is None:
            raise ConfigError("an assistant reads the target's keys and values; give the target with it")
        config = load_config(options.model, revision=options.revision)
        read_layers(config, target, options.model)
        _, tensors = outline_checkpoint(options.model, revision=options.revision)
        text = config.text_config
        width = 2 * config.backbone_hidden_size + 3 * text.intermediate_size + 6 * text.hidden_size
        own_table = 0
        if config.use_ordered_embeddings:
            # Its output layer is looked up by token, so it is not packed, and has an order of tokens beside it.
            tensors.pop(output_table(config), None)
            own_table = text.vocab_size * (text.hidden_size * target.dtype.itemsize + 8)
            # The vectors of all tokens that are scored.
            scored = config.centroid_intermediate_top_k * text.vocab_size // config.num_centroids
            width += scored * (text.hidden_size + 2)
        return Footprint(
            traits=replace(cls.configured(options, context), feature_layers=(target.num_layers,)),
            head_bytes=held_bytes(tensors, target, options.quantization) + own_table,
            head_stored_bytes=stored_bytes(tensors),
            head_bytes_per_row=width * target.dtype.itemsize,
            logit_rows=ProposalShape.of(options, context.verifier).logit_rows,
        )

    def grow(self, trees: list[DraftTree]) -> None:
        for tree, state in zip(trees, self.states(trees), strict=True):
            tree.state = state
        while trees:
            states, logits = self._run(trees)
            peaks, end = Peaks.of(logits, trees), 0
            for tree in trees:
                begin, end = end, end + len(tree.frontier)
                tree.keep_states(states[begin:end])
                tree.grow(logits[begin:end], peaks.rows(begin, end))
            trees = [tree for tree in trees if tree.frontier]

    def _run(self, trees: Seq[DraftTree]) -> tuple[Tensor, Tensor]:
        """A pass over the frontiers of all trees: the states behind their rows, and logits."""
        device = self.target.device
        above = torch.stack([state for tree in trees for state in tree.states_above()])
        tokens = [token for tree in trees for token in tree.frontier_tokens()]
        places = [tree.sequence.num_computed for tree in trees for _ in tree.frontier]
        embeds = self.target.embed(torch.tensor(tokens, device=device))
        positions = torch.tensor([places], device=device)
        rotary = {
            kind: tuple(part[0] for part in self._rotary(above, positions, kind)) for kind in self.layers
        }
        with without_cudnn(device):
            found: tuple[Tensor, Tensor] = self.head(
                embeds, above, rotary, lambda kind, query: self._attend(trees, kind, query)
            )
        return found

    def _attend(self, trees: Seq[DraftTree], kind: str, query: Tensor) -> Tensor:
        """query [rows, heads, dim] over what the target has computed of each row's text -> [rows, heads, dim]."""
        assert self.target_cache is not None, "attach() comes before the first proposal"
        cache, layer = self.target_cache, self.layers[kind]
        outputs: list[Tensor] = []
        sizes = [len(tree.frontier) for tree in trees]
        for tree, rows in zip(trees, query.split_with_sizes(sizes), strict=True):
            end = tree.sequence.num_computed
            first = max(end - self._sliding_window - 1, 0) if kind == SLIDING else 0
            slots = cache.accounting.slots(tree.sequence.id)[first:end]
            keys, values = cache.pool.read(layer, cache.pool.index(slots))
            outputs.append(attend(rows.transpose(0, 1), keys, values, None, Variant(scaling=1.0)))
        return torch.cat(outputs, dim=1).transpose(0, 1)
