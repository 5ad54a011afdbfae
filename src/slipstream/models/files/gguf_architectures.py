"""llama.cpp's families in Transformers' terms: the names of tensors, and the configuration that a file's keys say."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf import Gguf
from slipstream.models.files.gguf_rope import rope_parameters
from slipstream.models.huggingface import AutoConfig

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_AROUND = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **_AFTER}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_OUTPUT = {"attn_output": "self_attn.o_proj"}
_ATTENTION = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **_OUTPUT,
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

_NEXTN = {
    **{name: name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{"shared_head_norm": "shared_head.norm", "shared_head_head": "shared_head.head"},
}
"""Parts of a layer for multi-token prediction beside the usual ones."""

NO_WEIGHTS = frozenset({"rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"})
"""Tensors that say how positions are rotated; a Transformers model has no weights of these names."""

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""GGUF's key after the family's name to Transformers' key. Every file has these."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a file's family."""

    file: Gguf

    def __contains__(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file.fields

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

    def size(self, key: str) -> int:
        """A positive number that is the same in all layers; raises `ModelError` for any other value."""
        value = self.get(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.file.path!r}: the layers differ in {key}, which is not supported")
            value = value[0]
        if type(value) is not int or value < 1:
            raise ModelError(
                f"{self.file.path!r} does not say the model's sizes: {self.file.architecture}.{key} is {value!r:.40}"
            )
        return value


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
    norm_epsilon: str = "rms_norm_eps"
    more: Callable[[Keys, Mapping[str, Any]], dict[str, Any]] = field(default=lambda keys, sizes: {})
    """What a configuration needs beyond the sizes."""

    def name(self, theirs: str) -> str | None:
        """Transformers' name of a tensor; None for one that models of this family have not."""
        stem, _, ending = theirs.rpartition(".")
        if stem in _ENDS:
            return f"{_ENDS[stem]}.{ending}"
        parts = stem.split(".")
        known = {**self.layer, **self.experts}
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in known:
            return f"model.layers.{parts[1]}.{known[parts[2]]}.{ending}"
        return None

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
        return any(theirs.endswith(f".{stack}.weight") for stack in self.experts)


def _granite(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": keys.number("attention.scale", 1.0),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _gemma(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.size("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _attention_scalar(sizes, largest=46),
    }


def _gemma3(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Five layers with a window, then one without; only the latter has scaled positions."""
    theta = float(keys.number("rope.freq_base_swa") or 10000.0)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.size("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _attention_scalar(sizes, largest=62),
        "rope_parameters": {
            "full_attention": sizes["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }


def _attention_scalar(sizes: Mapping[str, Any], largest: int) -> int:
    """Which of Gemma's models has another scale than its head's width is in no key: it is known by its layers."""
    if sizes["num_hidden_layers"] == largest:
        return int(sizes["hidden_size"] // sizes["num_attention_heads"])
    return int(sizes["head_dim"])


def _phi3(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    def size(key: str, otherwise: int | None) -> int | None:
        return keys.size(key) if key in keys else otherwise

    rotated = size("rope.dimension_count", None) or sizes["head_dim"]
    window = keys.get("attention.sliding_window")  # 0 says that there is none
    return {
        "sliding_window": keys.size("attention.sliding_window") if window else None,
        "original_max_position_embeddings": size(
            "rope.scaling.original_context_length", sizes["max_position_embeddings"]
        ),
        "rope_parameters": {
            **sizes["rope_parameters"],
            "partial_rotary_factor": rotated / sizes["head_dim"],
        },
    }


def _starcoder2(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": True, "sliding_window": None}  # llama.cpp computes it without its window


def _mixtral(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "sliding_window": None,
    }


def _qwen3_moe(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "moe_intermediate_size": keys.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Every other layer has a window, the first among them. No key says that YaRN's ends are not rounded."""
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "sliding_window": keys.size("attention.sliding_window"),
        "rope_parameters": {**sizes["rope_parameters"], "truncate": False},
    }


_LLAMA = _NORMS | _ATTENTION | _MLP
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", _LLAMA, rotates_neighbours=True),
    "qwen2": GgufArchitecture("qwen2", _LLAMA),
    "qwen3": GgufArchitecture("qwen3", _LLAMA | _HEAD_NORMS),
    "gemma": GgufArchitecture("gemma", _LLAMA, norms_hold_one_more=True, more=_gemma),
    "gemma2": GgufArchitecture("gemma2", _AROUND | _ATTENTION | _MLP, norms_hold_one_more=True, more=_gemma2),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        _AROUND | _ATTENTION | _MLP | _HEAD_NORMS,
        norms_hold_one_more=True,
        more=_gemma3,
    ),
    "phi3": GgufArchitecture(
        "phi3",
        _NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
        | _OUTPUT,
        more=_phi3,
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        _NORMS | _ATTENTION | _HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        experts=_EXPERTS,
        more=_qwen3_moe,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | _ATTENTION
        | {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        experts=_EXPERTS,
        more=_gpt_oss,
    ),
    "granite": GgufArchitecture("granite", _LLAMA, rotates_neighbours=True, more=_granite),
    "olmo2": GgufArchitecture("olmo2", _AFTER | _ATTENTION | _MLP | _HEAD_NORMS),
    "smollm3": GgufArchitecture("smollm3", _LLAMA, rotates_neighbours=True),
    "starcoder2": GgufArchitecture(
        "starcoder2",
        _NORMS | _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_epsilon="norm_epsilon",
        more=_starcoder2,
    ),
}
"""By `general.architecture`. Mistral's models are llama's."""

_MIXTRAL = GgufArchitecture(
    "mixtral",
    _NORMS | _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
    rotates_neighbours=True,
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    more=_mixtral,
)
"""What a file of the architecture `llama` holds where it has experts."""


def architecture_of(file: Gguf) -> GgufArchitecture:
    """The family of a file; raises `ModelError` for one that is not read."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise ModelError(
            f"{file.path!r} holds a {file.architecture or 'nameless'} model; of GGUF files these are read: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if not Keys(file).get("expert_count") or found.experts:
        return found
    if file.architecture != "llama":
        raise ModelError(
            f"{file.path!r} holds a {file.architecture} model with experts, which GGUF files are read for of llama "
            "(Mixtral), qwen3moe and gpt-oss only"
        )
    return _MIXTRAL


def read_config(file: Gguf) -> Any:
    """The Transformers configuration of a file's model.

    Raises `ModelError` where its keys and tensors disagree, so that nothing is made of sizes that are not there.
    """
    architecture, keys = architecture_of(file), Keys(file)
    sizes: dict[str, Any] = {name: keys.size(key) for key, name in _SIZES.items()}
    sizes["num_key_value_heads"] = (
        keys.size("attention.head_count_kv")
        if "attention.head_count_kv" in keys
        else sizes["num_attention_heads"]
    )
    if "attention.key_length" in keys:
        sizes["head_dim"] = keys.size("attention.key_length")
    elif sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ModelError(f"{file.path!r} does not say how wide its heads are")
    else:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if keys.get("attention.value_length", sizes["head_dim"]) != sizes["head_dim"]:
        raise ModelError(f"{file.path!r}: its values are narrower or wider than its keys")
    _check_shapes(file, sizes)
    _check_vocabulary(file)
    sizes["rope_parameters"] = rope_parameters(file, sizes["head_dim"])
    epsilon = keys.get("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon"))
    if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
        raise ModelError(f"{file.path!r} does not say the epsilon of its norms")
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if architecture.model_type not in ("llama", "granite", "smollm3", "olmo2"):
        biases = {}
    config: Any = AutoConfig.for_model(
        architecture.model_type,
        **copy.deepcopy(sizes),  # a configuration writes into the dictionaries that it is given
        **{architecture.norm_epsilon: epsilon},
        **biases,
        **_tokens(file),
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=stored_dtype(file),
    )
    for name, value in architecture.more(keys, sizes).items():
        setattr(config, name, value)
    if file.prediction:
        config.num_nextn_predict_layers = keys.size("nextn_predict_layers")
    return config


def stored_dtype(file: Gguf) -> torch.dtype | None:
    """The type of a file's matrices; None where they are quantised or differ. Routers are in 32 bits everywhere."""
    found = {
        tensor.format.dtype
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and "ffn_gate_inp" not in name
    }
    return found.pop() if len(found) == 1 else None


def halves_order(num_rows: int, num_heads: int) -> Tensor:
    """int64 [rows]: where llama.cpp keeps each row of queries or keys, for families that rotate neighbours."""
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _check_shapes(file: Gguf, sizes: Mapping[str, Any]) -> None:
    """Raise `ModelError` where a matrix has another shape than the keys say."""
    hidden, heads, kv = (
        sizes[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    numbers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if numbers != {str(layer) for layer in range(min(sizes["num_hidden_layers"], len(numbers) + 1))}:
        raise ModelError(
            f"{file.path!r} has tensors of {len(numbers)} layers, and its keys say {sizes['num_hidden_layers']}"
        )
    if heads % kv:
        raise ModelError(f"{file.path!r}: {heads} heads cannot share {kv} heads of keys and values")
    expected: dict[str, tuple[int | None, ...]] = {"token_embd": (None, hidden), "output": (None, hidden)}
    architecture, keys, inner = architecture_of(file), Keys(file), sizes["intermediate_size"]
    width, kv_width = heads * sizes["head_dim"], kv * sizes["head_dim"]
    shapes = {
        "attn_q": (width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_qkv": (width + 2 * kv_width, hidden),
        "attn_output": (hidden, width),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner if architecture.layer.get("ffn_up") != "mlp.gate_up_proj" else 2 * inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if architecture.experts:
        number = keys.size("expert_count")
        if keys.size("expert_used_count") > number:
            raise ModelError(f"{file.path!r} uses more experts for a token than the {number} that it has")
        if "expert_feed_forward_length" in keys:
            inner = keys.size("expert_feed_forward_length")
        stacks = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes |= {f"ffn_{part}_exps": (number, *shape) for part, shape in stacks.items()}  # type: ignore[misc]
    expected |= {f"blk.{layer}.{part}": shape for layer in sorted(numbers) for part, shape in shapes.items()}
    for stem, shape in expected.items():
        tensor = file.tensors.get(f"{stem}.weight")
        if tensor is None and stem == "token_embd":
            raise ModelError(f"{file.path!r} has no weights of a model: token_embd.weight is missing")
        if tensor is None:
            continue
        fits = len(tensor.shape) == len(shape) and all(
            want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            wanted = " x ".join("any" if want is None else str(want) for want in shape)
            raise ModelError(
                f"{file.path!r}: {tensor.name} is {' x '.join(map(str, tensor.shape))}, and the keys say {wanted}"
            )


def _check_vocabulary(file: Gguf) -> None:
    """Raise `ModelError` for a tokenizer with more or fewer tokens than the embedding has rows, as llama.cpp does."""
    tokens, rows = file.fields.get("tokenizer.ggml.tokens"), file.tensors["token_embd.weight"].shape[0]
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ModelError(
            f"{file.path!r} has {len(tokens)} tokens, and rows for {rows} in its token_embd.weight"
        )


def _tokens(file: Gguf) -> dict[str, Any]:
    """The numbers of tokens with a role; an answer ends at each of the end tokens that a file names."""

    def number(role: str) -> int | None:
        found = file.fields.get(f"tokenizer.ggml.{role}_token_id")
        return found if type(found) is int else None

    ends = [number(role) for role in ("eos", "eot", "eom")]
    named = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": number("bos"),
        "eos_token_id": named[0] if len(named) == 1 else named or None,
        "pad_token_id": number("padding"),
    }
