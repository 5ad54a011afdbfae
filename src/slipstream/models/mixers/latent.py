"""Latent attention: the cache holds what keys and values are made of, and not the keys and values.

Families after DeepSeek V2 make the keys and values of all heads out of one *latent* a token, and give all heads one
rotated key beside it (DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434, section 2.1). A head's score is
`(W_k c)·q + r·p = c·(W_kᵀ q) + r·p`, with the latent c, the rotated key r and the parts q and p of the query. So `W_kᵀ`
goes into the query, every head attends over the same entries [c, r], the values are the entries' first numbers, and
`W_v` goes into what was attended to. Each layer keeps `kv_lora_rank + qk_rope_head_dim` numbers a token.

Projections, norms and rotation stay Transformers' modules: its classes make keys and values in one method, `expand_kv`,
which hands over the entries instead where our attention is called. The model's own attention, which the checks compare
with ours, still has the expanded heads.

Nothing but the attention reads `kv_b_proj`, [heads · (nope + value), rank]. It is not packed, whatever the weight
format, and keeps the checkpoint's numbers in the type of the model's matrices. Where a file holds it quantised it is
widened to float32, an adapter's change added.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.linear.grouped import GroupedLinear

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class LatentHeads(nn.Module):
    """An attention layer of a Transformers model whose cache holds latents; `hold_latents` makes it of the layer.

    A layer's own class comes behind this one, so that all but the method that makes keys and values is the layer's.
    """

    config: Any
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    kv_b_proj: nn.Linear
    hook: str
    """The beginning of the names under which our attention is called."""
    native_threads: int
    """Threads of the CPU kernels; 0: PyTorch's operators compute."""

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """[1, 1, N, rank] and [1, 1, N, rope] -> entries [1, 1, N, rank + rope] and the values in them."""
        if not self.config._attn_implementation.startswith(self.hook):
            expanded: tuple[Tensor, Tensor] = super().expand_kv(kv_nope, k_rot)  # type: ignore[misc]
            return expanded
        return torch.cat([kv_nope, k_rot], dim=-1), kv_nope

    @property
    def weights(self) -> Tensor:
        """[heads, nope + value, rank]: those that make keys of a latent, then those that make values."""
        return self.kv_b_proj.weight.detach().view(
            -1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank
        )

    def absorb(self, query: Tensor) -> Tensor:
        """[1, heads, N, nope + rope] -> [1, heads, N, rank + rope], what the entries are multiplied with."""
        plain, rotated = query.tensor_split([self.qk_nope_head_dim], dim=-1)
        weights = self.weights[:, : self.qk_nope_head_dim].to(query.dtype)
        return torch.cat([plain @ weights, rotated], dim=-1)

    def expand(self, attended: Tensor) -> Tensor:
        """Latents [1, N, heads, rank] that were attended to -> [1, N, heads, value]."""
        weights = self.weights[:, self.qk_nope_head_dim :].to(attended.dtype)
        return (attended.transpose(1, 2) @ weights.transpose(1, 2)).transpose(1, 2).contiguous()


def hold_latents(model: nn.Module, hook: str, num_threads: int = 0) -> None:
    """Let the layers of a model that make keys and values out of latents hand these to our attention, called `hook`.

    With `num_threads` the CPU kernels compute it, where they have a layer's widths.
    """
    modules: list[Any] = list(model.modules())
    for module in modules:
        if isinstance(module, LatentHeads) or not _makes_keys_of_latents(module):
            continue
        if isinstance(module.kv_b_proj, GroupedLinear):
            module.kv_b_proj = module.kv_b_proj.widened()
        module.hook = hook
        module.native_threads = num_threads if module.kv_lora_rank % 16 == 0 else 0
        # The same object, which others may hold.
        module.__class__ = _with_latents(type(module))  # type: ignore[arg-type]


def attends_in_the_kernels(model: nn.Module) -> bool:
    """Whether a model has layers that attend over latents, all in the CPU kernels."""
    threads = [part.native_threads for part in model.modules() if isinstance(part, LatentHeads)]
    return bool(threads) and min(threads) > 0


def latent_projections(model: nn.Module) -> list[nn.Linear | GroupedLinear]:
    """The layers of a model that the attention over latents reads, and no pass calls."""
    return [part.kv_b_proj for part in model.modules() if isinstance(part, LatentHeads)]


def _makes_keys_of_latents(module: nn.Module) -> bool:
    projection = getattr(module, "kv_b_proj", None)
    if not hasattr(module, "expand_kv") or not all(hasattr(module, name) for name in _SIZES):
        return False
    return isinstance(projection, nn.Linear | GroupedLinear) and projection.bias is None


@functools.cache
def _with_latents(layer: Any) -> type[LatentHeads]:
    return type(f"{layer.__name__}OverLatents", (LatentHeads, layer), {})
