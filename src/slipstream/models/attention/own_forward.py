"""Families whose attention layers compute everything by themselves, without the attention interface.

In a pass of ours such a layer gets a forward of ours: its own projections, and the hook for what lies between them.
Without a pass it computes what Transformers does, which the checks compare with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.attention.base import ATTENTION_NAME, LayerProbe
from slipstream.models.attention.hook import current_pass, slipstream_attention
from slipstream.models.support import unsupported


class LinearBias:
    """ALiBi: each head takes off its slope for every position that an entry lies behind a row (Press et al.,
    arXiv:2108.12409). Transformers adds what grows with the entry's position instead, which is the same to a softmax.
    """

    counts_tokens = True

    def __init__(self, of_two: Tensor) -> None:
        """`of_two` [heads, 1, 2] is what Transformers adds for two entries that follow each other."""
        self._slopes = (of_two[..., 1] - of_two[..., 0])[..., None].float()  # [heads, 1, 1]

    def __call__(self, distance: Tensor) -> Tensor:
        self._slopes = self._slopes.to(distance.device)
        return -self._slopes * distance


def loads_with(config: Any, implementation: str) -> str:
    """The name of the attention that a model is made with, where `implementation` is the one that it runs with."""
    return "eager" if config.model_type in FORWARDS and implementation == ATTENTION_NAME else implementation


def lead_forwards(model: Any) -> None:
    """Lead the attention layers of `model` to the hook, where they compute everything by themselves."""
    if model.config.model_type not in FORWARDS:
        return
    layer, make = FORWARDS[model.config.model_type]
    attend = make(model)
    for module in model.modules():
        if type(module).__name__ == layer:
            module.forward = partial(_attend, module, module.forward, attend)
    # Its classes know no other attention; a name of ours only says which masks are made.
    model.set_attn_implementation = partial(setattr, model.config, "_attn_implementation")
    model.set_attn_implementation(ATTENTION_NAME)


_Attend = Callable[..., tuple[Tensor, None]]
"""A layer's forward in a pass of ours."""


def _attend(module: nn.Module, stock: Any, ours: _Attend, *given: Any, **others: Any) -> Any:
    return (stock if current_pass() is None else partial(ours, module))(*given, **others)


def _hooked(
    module: Any,
    layer: int,
    heads: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scaling: float,
    **others: Any,
) -> Tensor:
    """[1, N, heads * dim] of queries, keys and values, [1, heads, N, dim] each.

    A mask counts where a model is tried out, and else is that of Transformers' own attention.
    """
    module.layer_idx = layer
    if not isinstance(current_pass(), LayerProbe):
        mask = None
    attended, _ = slipstream_attention(module, *heads, mask, scaling, **others)
    return attended.flatten(2)


def _bloom(model: Any) -> _Attend:
    config = model.config
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise unsupported(
            config,
            "with slow_but_exact its attention leaves the bias of its output projection out; set slow_but_exact to "
            "false in its configuration",
        )
    bias = LinearBias(model.transformer.build_alibi_tensor(torch.ones(1, 2), config.n_head, torch.float32))

    def attend(
        module: Any,
        hidden_states: Tensor,
        residual: Tensor,
        *,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        heads = module._reshape(module.query_key_value(hidden_states))
        factor = module.inv_norm_factor
        attended = _hooked(module, module.layer_idx, heads, attention_mask, factor, position_bias=bias)
        return residual + module.dense(attended), None

    return attend


def _mpt(model: Any) -> _Attend:
    bias = LinearBias(model.transformer.build_mpt_alibi_tensor(model.config.n_heads, 2))
    model.transformer.register_forward_pre_hook(_with_a_mask, with_kwargs=True)

    def attend(
        module: Any, hidden_states: Tensor, *, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        shape = (*hidden_states.shape[:2], module.n_heads, module.head_dim)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in fused.chunk(3, dim=2))
        factor = module.softmax_scale
        attended = _hooked(
            module, module.layer_idx, (query, key, value), attention_mask, factor, position_bias=bias
        )
        return module.out_proj(attended), None

    return attend


def _with_a_mask(module: Any, given: tuple[Any, ...], others: dict[str, Any]) -> Any:
    """The model reads the type of its mask, where a pass of ours has none."""
    if current_pass() is not None and module.config._attn_implementation == ATTENTION_NAME:
        others = {**others, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}
    return given, others


def _gpt_neo(_: Any) -> _Attend:
    def attend(
        module: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        query, key, value = (
            module._split_heads(project(hidden_states), module.num_heads, module.head_dim)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        is_local = module.attention_type == "local"
        window = module.config.window_size if is_local else None
        mask = None if is_local else attention_mask  # a local layer cuts its window out of it by itself
        heads = (query, key, value)
        return module.out_proj(
            _hooked(module, module.layer_id, heads, mask, 1.0, sliding_window=window)
        ), None

    return attend


FORWARDS: dict[str, tuple[str, Callable[[Any], _Attend]]] = {
    "bloom": ("BloomAttention", _bloom),
    "gpt_neo": ("GPTNeoSelfAttention", _gpt_neo),
    "mpt": ("MptAttention", _mpt),
}
"""Type of a model to the class of its attention layers, and what makes their forward in a pass of ours."""
