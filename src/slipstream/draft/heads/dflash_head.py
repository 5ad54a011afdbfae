"""DFlash's draft head: a few layers that propose a whole block of tokens in one pass.

The block is the last committed token, called the anchor, and mask tokens behind it. Its rows attend to each other and
to the committed tokens before the anchor, whose keys and values are projected from the target's own hidden states
(Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026). DSpark, Domino, XPress, DFlash2 and
JetSpec have the same layers; their differences are flags of `DFlashConfig` and a head that reads the draft tokens
from left to right.

The module serves both drafting, over cached entries, and training, over whole texts; only `attend` differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from slipstream.draft.heads.corrections import MARKOV_KINDS, MarkovHead, make_left_to_right
from slipstream.draft.heads.head_config import Attend, HeadConfig
from slipstream.draft.heads.left_to_right import LeftToRightConfig, LeftToRightHead


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """Sizes and options of a head."""

    block_size: int
    """Rows of a draft pass, the anchor's included."""
    mask_token_id: int
    from_anchor: bool = False
    """True: the row at position p predicts the token at p + 1, the anchor's row included, so that a pass drafts
    `block_size` tokens. False: it predicts the token at p, the anchor's row predicts nothing, and a pass drafts one
    token less."""
    causal: tuple[bool, ...]
    """For each layer, whether a row of the block sees only the rows before it, and itself."""
    windows: tuple[int | None, ...]
    """For each layer, how many of the committed tokens before the anchor its rows see; None is all of them."""
    convolution_taps: int = 0
    """Length of DFlash2's convolutions around each sublayer; 0 has none."""
    convolution_group: int = 16
    """Neighbouring channels that share a convolution's coefficients."""
    left_to_right: LeftToRightConfig | None = None
    """The head that corrects the logits by the tokens drawn before, if there is one."""
    confidence: str | None = None
    """What a confidence head reads: `hidden`, or `hidden+token`, the previous token as the Markov head embeds it."""
    embedding_scale: float = 1.0
    """What the embeddings of a block are multiplied by, beyond what the target itself does."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Logits are scaled, and then held within ± this by a hyperbolic tangent."""

    @property
    def first_slot(self) -> int:
        """The first row of the block that predicts a token."""
        return 0 if self.from_anchor else 1

    @property
    def num_drafts(self) -> int:
        """The most tokens that a pass drafts."""
        return self.block_size - self.first_slot


def spread_feature_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The layers that DFlash's authors read of a target: `count` of them, evenly from layer 2 to the third from last.

    A target too shallow for that is read in as many different layers as there are between the ends.
    """
    first, last = 2, num_layers - 2
    if count == 1 or last <= first:
        return (num_layers // 2 + 1,)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


class DFlashAttention(nn.Module):
    """Grouped-query attention with normed queries and keys, and rotary positions."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = (
            n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)
        )
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=bias)
        self.q_norm: nn.Module = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm: nn.Module = LlamaRMSNorm(config.head_dim, config.rms_norm_eps)

    def entries(self, inputs: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """inputs [B, N, hidden] -> keys and values [B, kv_heads, N, dim], of the context and of the block alike"""
        key = self.k_norm(self._split(self.k_proj(inputs))).transpose(1, 2)
        value = self._split(self.v_proj(inputs)).transpose(1, 2)
        return apply_rotary_pos_emb(key, key, *rotary)[1], value

    def forward(
        self,
        inputs: Tensor,
        rotary: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """inputs [B, N, hidden] -> [B, N, hidden]"""
        query = self.q_norm(self._split(self.q_proj(inputs))).transpose(1, 2)
        query = apply_rotary_pos_emb(query, query, *rotary)[0]
        key, value = self.entries(inputs, rotary)
        return self.o_proj(attend(query, key, value).flatten(2))  # type: ignore[no-any-return]

    def _split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:-1], -1, self.head_dim)


class LocalConvolution(nn.Module):
    """DFlash2's pair of short convolutions along a block, before and after a sublayer; initialised as the identity.

    A channel's coefficients are learned constants, and a change that the row itself says, the same for each group of
    neighbouring channels.
    """

    def __init__(self, hidden_size: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * taps * (hidden_size // group), bias=False)
        nn.init.ones_(self.base_kernel[:, 0])
        nn.init.zeros_(self.kernel_projection.weight)

    def around(self, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """inputs [B, N, hidden], each of B a block -> the sublayer's output, both convolved, [B, N, hidden]"""
        sides, taps, _ = self.base_kernel.shape
        changes = self.kernel_projection(inputs).unflatten(-1, (sides, taps, -1))
        before, after = changes.repeat_interleave(self.group, dim=-1).add(self.base_kernel).unbind(-3)
        return _convolved(sublayer(_convolved(inputs, before)), after)


def _convolved(rows: Tensor, kernel: Tensor) -> Tensor:
    """rows [B, N, hidden], kernel [B, N, taps, hidden]; tap t reads the row t places before, zeros before the first."""
    shifted = [nn.functional.pad(rows, (0, 0, tap, 0))[:, : rows.shape[1]] for tap in range(kernel.shape[-2])]
    return (torch.stack(shifted, dim=-2) * kernel).sum(-2)


class DFlashLayer(nn.Module):
    """A Qwen3 layer over a block, with DFlash2's convolutions where the configuration has them."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp: nn.Module = LlamaMLP(config.llama())  # type: ignore[no-untyped-call]
        self.input_layernorm: nn.Module = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm: nn.Module = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention_conv: LocalConvolution | None = None
        self.mlp_conv: LocalConvolution | None = None
        if config.convolution_taps:
            sizes = (config.hidden_size, config.convolution_taps, config.convolution_group)
            self.attention_conv, self.mlp_conv = LocalConvolution(*sizes), LocalConvolution(*sizes)

    def forward(
        self, rows: Tensor, rotary: tuple[Tensor, Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """[B, N, hidden] -> [B, N, hidden]"""

        def attention(inputs: Tensor) -> Tensor:
            return self.self_attn(inputs, rotary, attend)  # type: ignore[no-any-return]

        rows = rows + _around(self.attention_conv, self.input_layernorm(rows), attention)
        return rows + _around(self.mlp_conv, self.post_attention_layernorm(rows), self.mlp)


def _around(
    convolution: LocalConvolution | None, inputs: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    return sublayer(inputs) if convolution is None else convolution.around(inputs, sublayer)


class DFlashHead(nn.Module):
    """A DFlash draft head; the embedding and the output layer are the target's unless it brings its own."""

    draft_token_ids: Tensor

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        width = len(config.feature_layers) * config.target_hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm: nn.Module = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm: nn.Module = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config.llama())
        self.register_buffer("draft_token_ids", torch.arange(config.draft_vocab_size))
        """[draft vocab]: the target's id of each draft token."""
        self.embedding: Tensor | None = None
        """[vocab, hidden]: a table of its own; None reads the target's."""
        self.lm_head: nn.Linear | None = None
        """hidden -> draft vocab: an output layer of its own; None uses the target's, for all of its tokens."""
        self.left_to_right: LeftToRightHead | None = None
        if config.left_to_right is not None:
            self.left_to_right = make_left_to_right(
                config.left_to_right,
                vocab_size=config.vocab_size,
                draft_vocab_size=config.draft_vocab_size,
                hidden_size=config.hidden_size,
                block_size=config.block_size,
                first_slot=config.first_slot,
            )
        self.confidence_head: nn.Linear | None = None
        if config.confidence is not None:
            self.confidence_head = nn.Linear(config.hidden_size + self._confidence_rank(), 1)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def encode(self, features: Tensor) -> Tensor:
        """The context of committed tokens from the target's features: [..., feature layers * target hidden] ->
        [..., hidden]."""
        return self.hidden_norm(self.fc(features))  # type: ignore[no-any-return]

    def context_entries(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each layer the keys and values [B, kv_heads, N, dim] of committed tokens.

        `context` [B, N, hidden] is what `encode` gave for them, `positions` [B, N]. They depend on nothing else, so
        that a cache may hold them.
        """
        rotary = self.rotary(context, positions)
        return [layer.self_attn.entries(context, rotary) for layer in self._layers()]

    def forward(self, embeds: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One pass: embeds [B, N, hidden] of B blocks (the anchor, then masks), positions [B, N] -> the hidden states
        [B, N, hidden] behind the final norm.

        `attend` gets the keys and values of the blocks' own rows. It adds those of the context, and decides what each
        row sees; `config.causal` and `config.windows` say what the head was trained for.
        """
        rotary = self.rotary(embeds, positions)
        scale = self.config.embedding_scale
        rows = embeds if scale == 1.0 else embeds * scale
        for index, layer in enumerate(self._layers()):

            def seen(query: Tensor, key: Tensor, value: Tensor, index: int = index) -> Tensor:
                return attend(index, query, key, value)

            rows = layer(rows, rotary, seen)
        return self.norm(rows)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, project: Callable[[Tensor], Tensor]) -> Tensor:
        """[..., hidden] -> [..., draft vocab]; `project` is the target's output layer, unused where it has its own."""
        logits = project(hidden) if self.lm_head is None else self.lm_head(hidden)
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor | None:
        """Log-odds [...] that the draft of a slot is accepted if all before it are; None without such a head.

        `hidden` [..., hidden] are the slots' hidden states, `previous` int64 [...] the tokens before them. Nothing that
        is drawn at a slot enters into what is said of it.
        """
        if self.confidence_head is None:
            return None
        if isinstance(self.left_to_right, MarkovHead) and self._confidence_rank():
            hidden = torch.cat([hidden, self.left_to_right.markov_w1(previous)], dim=-1)
        return self.confidence_head(hidden)[..., 0]  # type: ignore[no-any-return]

    def num_parameters(self) -> int:
        """Number of the head's own weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def _confidence_rank(self) -> int:
        """Width of what the confidence head reads of the previous token."""
        correction = self.config.left_to_right
        if self.config.confidence != "hidden+token":
            return 0
        if correction is None or correction.kind not in MARKOV_KINDS:
            raise ValueError(
                "a confidence head that reads the previous token needs a Markov head, which embeds it"
            )
        return correction.rank

    def _layers(self) -> list[DFlashLayer]:
        return [layer for layer in self.layers if isinstance(layer, DFlashLayer)]
