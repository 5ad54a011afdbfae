"""States that are a matrix for each head, to which every token adds an outer product.

Gated linear attention in all its forms: state = decay * state + key ⊗ update, output = state · query. With the delta
rule the update is what the decayed state does not yet say for the key, value - state · key, times beta (Yang et al.,
"Gated Delta Networks", arXiv:2412.06464); else it is the value itself (Dao and Gu, "Transformers are SSMs",
arXiv:2405.21060).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kv.walk import Walk
from slipstream.models.mixers.steps import states_behind


@dataclass(frozen=True, slots=True)
class OuterProducts:
    """What the steps of a walk put into such states, all float32."""

    query: Tensor
    """[steps, key_heads, key_dim]; of as many heads each, one after the other."""
    key: Tensor
    """[steps, key_heads, key_dim]"""
    value: Tensor
    """[steps, heads, value_dim]"""
    decay: Tensor
    """[steps, heads, 1 or key_dim, 1 or value_dim]: what the state is multiplied with before."""
    beta: Tensor | None = None
    """[steps, heads]: the share of the update, with the delta rule; None: without."""
    rates: Tensor | None = None
    """[heads, key_dim, value_dim], none above 0: the state is multiplied with exp(rates * decay) instead, and decay is
    [steps, heads, 1, value_dim]."""

    def run(self, walk: Walk, states: Tensor) -> Tensor:
        """Go the walk over states [slots, heads, key_dim, value_dim]; returns [steps, heads, value_dim]."""
        output = torch.empty_like(self.value)
        for step, state in states_behind(walk, states, self._step):
            output[step] = (state * self._of_heads(self.query[step])).sum(dim=1)
        return output

    def _of_heads(self, of_keys: Tensor) -> Tensor:
        """[key_heads, key_dim] -> [heads, key_dim, 1]"""
        return of_keys.repeat_interleave(self.value.shape[1] // len(of_keys), dim=0)[..., None]

    def _step(self, step: int, state: Tensor) -> Tensor:
        """The state [heads, key_dim, value_dim] behind a step."""
        key, update = self._of_heads(self.key[step]), self.value[step, :, None]
        decay = self.decay[step]
        state = state * (decay if self.rates is None else (self.rates * decay).exp())
        if self.beta is not None:
            update = (update - (state * key).sum(dim=1, keepdim=True)) * self.beta[step, :, None, None]
        return state + key * update
