"""The target in plain PyTorch, for batches of hundreds: a Llama without biases, whose output layer is its embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.smollm2_head.gguf_weights import EOS, read_gguf


@dataclass
class Layer:
    attn_norm: Tensor
    qkv: Tensor
    out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass
class Cache:
    """Keys and values of a batch whose texts end at the same entry (they are padded on the left)."""

    keys: list[Tensor]
    """A layer: [texts, kv heads, entries, dim]."""
    values: list[Tensor]
    seen: Tensor
    """bool [texts, entries]: False for padding and for entries that are not written yet."""
    length: int = 0

    def keep(self, rows: Tensor) -> None:
        """Drop all texts but these."""
        self.keys = [each[rows] for each in self.keys]
        self.values = [each[rows] for each in self.values]
        self.seen = self.seen[rows]


class Target:
    """Weights in `dtype` on `device`; norms and rotary angles in float32."""

    def __init__(self, parts: Sequence[Path], device: str, dtype: torch.dtype) -> None:
        """`parts` are the GGUF file, or its parts in order."""
        fields, weights = read_gguf(parts)
        size = {
            key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")
        }
        self.device, self.dtype = torch.device(device), dtype
        self.num_layers: int = size["block_count"]
        self.num_heads: int = size["attention.head_count"]
        self.num_kv_heads: int = size["attention.head_count_kv"]
        self.hidden_size: int = size["embedding_length"]
        self.head_dim = self.hidden_size // self.num_heads
        self.vocab_size: int = size["vocab_size"]
        self.eps: float = size["attention.layer_norm_rms_epsilon"]
        self.rope_theta: float = size["rope.freq_base"]
        self.eos_token_id: int = fields.get(EOS, -1)
        self.embedding = self._put(weights["token_embd.weight"])
        self.norm = self._put(weights["output_norm.weight"])
        self.layers = [self._layer(weights, f"blk.{number}.") for number in range(self.num_layers)]
        exponents = torch.arange(0, self.head_dim, 2, device=self.device).float() / self.head_dim
        self.frequencies = self.rope_theta**-exponents

    def _put(self, weight: Tensor) -> Tensor:
        return weight.to(self.device, self.dtype)

    def _layer(self, weights: dict[str, Tensor], at: str) -> Layer:
        def named(name: str) -> Tensor:
            return weights[f"{at}{name}.weight"]

        queries = self._half_rotary(named("attn_q"), self.num_heads)
        keys = self._half_rotary(named("attn_k"), self.num_kv_heads)
        return Layer(
            attn_norm=self._put(named("attn_norm")),
            qkv=self._put(torch.cat([queries, keys, named("attn_v")])),
            out=self._put(named("attn_output")),
            ffn_norm=self._put(named("ffn_norm")),
            gate_up=self._put(torch.cat([named("ffn_gate"), named("ffn_up")])),
            down=self._put(named("ffn_down")),
        )

    def _half_rotary(self, weight: Tensor, num_heads: int) -> Tensor:
        """GGUF files pair neighbouring channels for the rotary embedding; Transformers pairs the two halves."""
        pairs = weight.reshape(num_heads, self.head_dim // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(weight.shape)

    def new_cache(self, num_texts: int, num_entries: int) -> Cache:
        shape = (num_texts, self.num_kv_heads, num_entries, self.head_dim)

        def empty() -> list[Tensor]:
            return [torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in self.layers]

        seen = torch.zeros(num_texts, num_entries, dtype=torch.bool, device=self.device)
        return Cache(empty(), empty(), seen)

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(states, (self.hidden_size,), weight, self.eps)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, N] -> cosines and sines [B, N, dim]"""
        angles = positions[..., None].float() * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """One pass over [B, N] tokens behind the cache's: what the final norm puts out, [B, N, hidden]."""
        num_rows = token_ids.shape[1]
        begin, end = cache.length, cache.length + num_rows
        mask = cache.seen[:, None, :end].expand(-1, num_rows, -1)
        if num_rows > 1:
            causal = torch.ones(num_rows, end, dtype=torch.bool, device=self.device).tril(begin)
            # A padded row sees itself, since a row that sees nothing has no softmax.
            own = torch.eye(num_rows, end, dtype=torch.bool, device=self.device).roll(begin, 1)
            mask = mask & causal | own
        cosines, sines = (each[:, :, None] for each in self.rotary(positions))
        states = F.embedding(token_ids, self.embedding)
        for number, layer in enumerate(self.layers):
            normed = self._normed(states, layer.attn_norm)
            heads = F.linear(normed, layer.qkv).unflatten(-1, (-1, self.head_dim))
            turned = heads[:, :, : self.num_heads + self.num_kv_heads]
            half = self.head_dim // 2
            swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
            turned = turned * cosines + swapped * sines
            cache.keys[number][:, :, begin:end] = turned[:, :, self.num_heads :].transpose(1, 2)
            cache.values[number][:, :, begin:end] = heads[:, :, -self.num_kv_heads :].transpose(1, 2)
            read = self._attend(turned[:, :, : self.num_heads], cache, number, mask, end)
            states = states + F.linear(read, layer.out)
            gate, up = F.linear(self._normed(states, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
            states = states + F.linear(F.silu(gate) * up, layer.down)
        cache.length = end
        return self._normed(states, self.norm)

    def _attend(self, queries: Tensor, cache: Cache, layer: int, mask: Tensor, end: int) -> Tensor:
        """queries [B, N, heads, dim] -> [B, N, heads * dim]; the heads of a group are rows of one attention."""
        num_texts, num_rows = queries.shape[:2]
        group = self.num_heads // self.num_kv_heads
        rows = queries.unflatten(2, (self.num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        keys, values = cache.keys[layer][:, :, :end], cache.values[layer][:, :, :end]
        read = F.scaled_dot_product_attention(rows, keys, values, mask[:, None].repeat(1, 1, group, 1))
        read = read.unflatten(2, (group, num_rows)).permute(0, 3, 1, 2, 4)
        return read.reshape(num_texts, num_rows, -1)

    def logits(self, states: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]"""
        return F.linear(states, self.embedding)
