"""What is known of a family of llama.cpp's: Transformers' names of its tensors, and how its keys are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf import Gguf
from slipstream.models.files.gguf_rope import rope_parameters

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
AROUND = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **AFTER}
BEFORE_BOTH = {name: NORMS.get(name) or AFTER[name] for name in ("attn_norm", "post_attention_norm")}
"""As `NORMS`, for families in which the second one is named by what is before it."""
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
OUTPUT = {"attn_output": "self_attn.o_proj"}
ATTENTION = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **OUTPUT,
}
EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
GATE_AND_UP, APART = "ffn_gate_up_exps", ("ffn_gate_exps", "ffn_up_exps")
"""A stack of experts whose gates' outputs come before those of up, and what it is in two."""
LATENT_PARTS = ("attn_k_b", "attn_v_b")
"""The two parts of a matrix of DeepSeek's that makes keys and values of a latent vector: the first one transposed."""
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

_NEXTN = {
    **{name: name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{"shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head"},
}
"""Parts of a layer for multi-token prediction beside the usual ones."""

NO_WEIGHTS = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"})
"""Tensors that say how positions are rotated; a Transformers model has no weights of these names."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file's family."""

    file: Gguf

    def __contains__(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file.fields

    def check(self, known: Collection[str]) -> None:
        """Raise `ModelError` for a key that is none of these."""
        family = f"{self.file.architecture}."
        own = [key for key in self.file.fields if key.startswith(family)]
        unknown = sorted(key for key in own if key.removeprefix(family) not in known)
        if unknown:
            raise ModelError(
                f"{self.file.path!r} has the key {unknown[0]}, which is not known of this family and may change what "
                "the model computes"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; a float32 as it is usually written."""
        value = self.file.fields.get(f"{self.file.architecture}.{key}", default)
        return float(f"{value:.7g}") if isinstance(value, float) else value

    def number(self, key: str, default: float | None = None) -> float | None:
        """A finite number; raises `ModelError` for any other value."""
        value = self.get(key, default)
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise ModelError(
                f"{self.file.path!r}: {self.file.architecture}.{key} is {value!r:.40}; it must be a number"
            )
        return value

    def has(self, tensor: str) -> bool:
        """Whether some layer has such a tensor: 'attn_q.bias'."""
        return any(name.endswith(f".{tensor}") for name in self.file.tensors)

    def choice(self, key: str, default: bool) -> bool:
        """A truth value; raises `ModelError` for any other value."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(
                f"{self.file.path!r}: {self.file.architecture}.{key} is {value!r:.40}; it must be true or false"
            )
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 on; raises `ModelError` for any other value."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise ModelError(
                f"{self.file.path!r}: {self.file.architecture}.{key} is {value!r:.40}; it must be a number from 0 on"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive number that is the same in all layers; raises `ModelError` for any other value."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.file.path!r}: the layers differ in {key}, which is not supported")
            value = value[0]
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{self.file.path!r} does not say the model's sizes: {self.file.architecture}.{key} is {value!r:.40}"
            )
        return value


USUAL_KEYS = frozenset(
    {
        *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
        *(f"attention.{part}" for part in ("head_count", "head_count_kv", "key_length", "value_length")),
        *("attention.layer_norm_rms_epsilon", "expert_count", "expert_used_count"),
        *(f"rope.{part}" for part in ("dimension_count", "freq_base", "scale_linear")),
        *(f"rope.scaling.{part}" for part in ("type", "factor", "original_context_length", "finetuned")),
        *(f"rope.scaling.{part}" for part in ("attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
    }
)
"""Keys that every family's file may have: those that are read for all, or that change nothing."""


def partly_rotated(keys: Keys, sizes: Mapping[str, Any], otherwise: int) -> dict[str, Any]:
    """`rope_parameters` of heads that are rotated in part: `otherwise` numbers of each where no key says how many."""
    rotated = keys.size("rope.dimension_count", otherwise)
    return {**sizes["rope_parameters"], "partial_rotary_factor": rotated / sizes["head_dim"]}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """A family of llama.cpp's."""

    model_type: str
    """Model type of Transformers' configuration."""
    layer: Mapping[str, str]
    """Names of a layer's parts: llama.cpp's to Transformers'."""
    rotates_neighbours: bool = False
    """Rows of queries and keys are permuted: llama.cpp rotates neighbours, Transformers the halves of a head."""
    norms_hold_one_more: bool = False
    """Norms are stored as the factor itself, where Transformers adds 1 to what it has."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's stacks of experts: llama.cpp's to those of one expert's parts, `{}` for its number."""
    lacks: Callable[[Keys, int], Collection[str]] = field(default=lambda keys, layer: ())
    """Which parts, of `layer` and `experts`, the layer of this number has not."""
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Matrices of Transformers' whose rows a file has in several parts, in this order: its name to llama.cpp's."""
    keys: Collection[str] | None = None
    """All keys that a file may have: any other might change what the model computes. None: they are not checked."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """As `layer`, for parts whose names end otherwise: 'exp_probs_b.bias'."""
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)
    """Names of what is in no layer."""
    norm_epsilon: str = "rms_norm_eps"
    sizes: Callable[[Keys], dict[str, Any]] = field(default=lambda keys: {})
    """Sizes that are not under the usual keys, by Transformers' names."""
    shapes: Callable[[Keys, Mapping[str, Any], int], Mapping[str, tuple[int, ...]]] = field(
        default=lambda keys, sizes, layer: {}
    )
    """Shapes of the matrices of a layer that are not the usual ones, by the names of its parts."""
    rows: Callable[[str, Any], Tensor | None] = field(default=lambda part, config: None)
    """Which row of a part in the file each row of the model's is, by its configuration; None: the same."""
    columns: Callable[[str, Any], Tensor | None] = field(default=lambda part, config: None)
    """As `rows`, of columns."""
    numbers: Callable[[str, Tensor], Tensor] = field(default=lambda part, tensor: tensor)
    """A part's plain numbers as the model has them."""
    rope: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = field(
        default=lambda keys, sizes: rope_parameters(keys.file, sizes["head_dim"])
    )
    """Transformers' `rope_parameters`."""
    more: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = field(default=lambda keys, sizes: {})
    """What a configuration needs beyond the sizes."""

    def name(self, theirs: str) -> str | None:
        """Transformers' name of a tensor; None for one that models of this family have not."""
        stem, _, ending = theirs.rpartition(".")
        if stem in self.ends:
            return f"{self.ends[stem]}.{ending}"
        blk, *number_and_part = theirs.split(".", 2)
        if blk != "blk" or len(number_and_part) != 2:
            return None
        number, part = number_and_part
        if part in self.whole:
            return f"model.layers.{number}.{self.whole[part]}"
        part, _, ending = part.rpartition(".")
        known = {**self.layer, **self.experts}
        return f"model.layers.{number}.{known[part]}.{ending}" if part in known else None

    def prediction_name(self, theirs: str) -> str | None:
        """As `name`, of a tensor of a layer for multi-token prediction: as DeepSeek-V3's checkpoint names it."""
        stem, _, ending = theirs.rpartition(".")
        before, nextn, part = stem.partition(".nextn.")
        if not nextn:
            return self.name(theirs)
        number = before.removeprefix("blk.")
        return f"model.layers.{number}.{_NEXTN[part]}.{ending}" if part in _NEXTN else None

    def has_experts_in(self, theirs: str) -> bool:
        """Whether a tensor holds a part of all experts of a layer."""
        stacks = {*self.experts, GATE_AND_UP} if self.experts else ()
        return any(theirs.endswith(f".{stack}.weight") for stack in stacks)
