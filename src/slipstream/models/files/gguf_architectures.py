"""llama.cpp's families in Transformers' terms: the names of tensors, and the configuration that a file's keys say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.files.gguf import Gguf
from slipstream.models.files.gguf_family import (
    AFTER,
    ATTENTION,
    BEFORE_BOTH,
    EXPERTS,
    GATE_AND_UP,
    HEAD_NORMS,
    MLP,
    NORMS,
    OUTPUT,
    GgufArchitecture,
    Keys,
    partly_rotated,
)
from slipstream.models.files.gguf_gemma import GEMMA, GEMMA2, GEMMA3, GEMMA4, gemma4
from slipstream.models.files.gguf_granite import GRANITE, GRANITE_HYBRID, granite_hybrid
from slipstream.models.files.gguf_hybrids import LFM2, QWEN3_NEXT, QWEN35, QWEN35_MOE
from slipstream.models.files.gguf_mixtures import (
    DEEPSEEK_V3,
    ERNIE_MOE,
    GLM4_MOE,
    LLAMA4,
    deepseek,
    qwen_experts,
)
from slipstream.models.files.gguf_rope import rope_parameters
from slipstream.models.huggingface import AutoConfig

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""GGUF's key after the family's name to Transformers' key. Every file has these."""


def _phi3(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")  # 0 says that there is none
    return {
        "sliding_window": keys.size("attention.sliding_window") if window else None,
        "original_max_position_embeddings": keys.size(
            "rope.scaling.original_context_length", sizes["max_position_embeddings"]
        ),
        "rope_parameters": partly_rotated(keys, sizes, sizes["head_dim"]),
    }


def _starcoder2(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": True, "sliding_window": None}  # llama.cpp computes it without its window


def _mixtral(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "sliding_window": None,
    }


def _seed_oss(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": keys.has("attn_output.bias")}


def _glm4(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    if "rope.dimension_sections" in keys:
        raise ModelError(
            f"{keys.file.path!r} holds the text part of a GLM that reads images, whose heads are in another order"
        )
    return {
        "attention_bias": keys.has("attn_q.bias"),
        "rope_parameters": partly_rotated(keys, sizes, sizes["head_dim"] // 2),
    }


def _cohere(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": keys.has("attn_q.bias"), "logit_scale": keys.number("logit_scale", 1.0)}


def _cohere2(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Three layers with a window, then one without, whose positions are not rotated."""
    return _cohere(keys, sizes) | {"sliding_window": keys.size("attention.sliding_window")}


def _ernie(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": keys.has("attn_q.bias")}


def _olmo3_rope(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Only layers without a window have scaled positions."""
    found = rope_parameters(keys.file, sizes["head_dim"])
    theta = keys.number("rope.freq_base_swa") or found["rope_theta"]
    return {
        "full_attention": found,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def _olmo3(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    windows = keys.get(
        "attention.sliding_window_pattern", [True, True, True, False] * sizes["num_hidden_layers"]
    )
    if not isinstance(windows, list) or len(windows) < sizes["num_hidden_layers"]:
        raise ModelError(f"{keys.file.path!r} does not say which of its layers have a window")
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return {
        "sliding_window": keys.size("attention.sliding_window"),
        "layer_types": kinds[: sizes["num_hidden_layers"]],
    }


def _ministral3_rope(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN, and scores that grow slowly beyond the length of the texts that the model was first trained on."""
    found = rope_parameters(keys.file, sizes["head_dim"])
    if found["rope_type"] != "yarn":
        raise ModelError(
            f"{keys.file.path!r} has rotary positions of kind {found['rope_type']!r}; a Ministral 3 has yarn"
        )
    found.pop("attention_factor", None)
    scale = keys.number("rope.scaling.yarn_log_multiplier", 1.0)
    beta = keys.number("attention.temperature_scale")
    return found | {"mscale": scale, "mscale_all_dim": scale, "llama_4_scaling_beta": beta}


def _gpt_oss(keys: Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Every other layer has a window, the first among them. No key says that YaRN's ends are not rounded."""
    return {
        "num_local_experts": keys.size("expert_count"),
        "num_experts_per_tok": keys.size("expert_used_count"),
        "sliding_window": keys.size("attention.sliding_window"),
        "rope_parameters": {**sizes["rope_parameters"], "truncate": False},
    }


_LLAMA = NORMS | ATTENTION | MLP
_COHERE = {"attn_norm": NORMS["attn_norm"]} | ATTENTION | MLP

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", _LLAMA, rotates_neighbours=True),
    "qwen2": GgufArchitecture("qwen2", _LLAMA),
    "qwen3": GgufArchitecture("qwen3", _LLAMA | HEAD_NORMS),
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gemma4": GEMMA4,
    "phi3": GgufArchitecture(
        "phi3",
        NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
        | OUTPUT,
        more=_phi3,
    ),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe",
        NORMS | ATTENTION | HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"},
        experts=EXPERTS,
        more=qwen_experts,
    ),
    "glm4": GgufArchitecture(
        "glm4",
        NORMS
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        | ATTENTION,
        more=_glm4,
    ),
    "command-r": GgufArchitecture("cohere", _COHERE, norm_epsilon="layer_norm_eps", more=_cohere),
    "cohere2": GgufArchitecture("cohere2", _COHERE, norm_epsilon="layer_norm_eps", more=_cohere2),
    "glm4moe": GLM4_MOE,
    "deepseek2": DEEPSEEK_V3,
    "lfm2": LFM2,
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": QWEN3_NEXT,
    "llama4": LLAMA4,
    "seed_oss": GgufArchitecture(
        "seed_oss",
        BEFORE_BOTH | ATTENTION | MLP,
        more=_seed_oss,
    ),
    "ernie4_5": GgufArchitecture("ernie4_5", _LLAMA, more=_ernie),
    "ernie4_5-moe": ERNIE_MOE,
    "mistral3": GgufArchitecture("ministral3", _LLAMA, rotates_neighbours=True, rope=_ministral3_rope),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        BEFORE_BOTH | ATTENTION | {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
        experts=EXPERTS,
        more=_gpt_oss,
    ),
    "granite": GRANITE,
    "granitehybrid": GRANITE_HYBRID,
    "olmo2": GgufArchitecture("olmo2", AFTER | ATTENTION | MLP | HEAD_NORMS),
    "smollm3": GgufArchitecture("smollm3", _LLAMA, rotates_neighbours=True),
    "starcoder2": GgufArchitecture(
        "starcoder2",
        NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        norm_epsilon="norm_epsilon",
        more=_starcoder2,
    ),
}
ARCHITECTURES |= {"qwen3vl": ARCHITECTURES["qwen3"], "qwen3vlmoe": ARCHITECTURES["qwen3moe"]}
"""By `general.architecture`. Mistral's models are llama's. Of models that read images, files hold what decodes text."""

_MIXTRAL = GgufArchitecture(
    "mixtral",
    NORMS | ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
    rotates_neighbours=True,
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
    more=_mixtral,
)
"""What a file of the architecture `llama` holds where it has experts."""


_OLMO3 = replace(ARCHITECTURES["olmo2"], model_type="olmo3", rope=_olmo3_rope, more=_olmo3)
"""What a file of the architecture `olmo2` holds where its layers have windows."""


def _llama(keys: Keys) -> GgufArchitecture:
    return _MIXTRAL if keys.get("expert_count") else ARCHITECTURES["llama"]


def _mistral3(keys: Keys) -> GgufArchitecture:
    """Those before Ministral 3 have no temperature that falls along the text."""
    has_temperature = "attention.temperature_scale" in keys
    return (
        ARCHITECTURES["mistral3"]
        if has_temperature
        else GgufArchitecture("mistral", _LLAMA, rotates_neighbours=True)
    )


def _olmo(keys: Keys) -> GgufArchitecture:
    return _OLMO3 if keys.get("attention.sliding_window") else ARCHITECTURES["olmo2"]


_BY_KEYS: Mapping[str, Callable[[Keys], GgufArchitecture]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "deepseek2": deepseek,
    "gemma4": gemma4,
    "granitehybrid": granite_hybrid,
    "olmo2": _olmo,
}
"""Architectures that are of several families, which keys tell apart."""


def architecture_of(file: Gguf) -> GgufArchitecture:
    """The family of a file; raises `ModelError` for one that is not read."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise ModelError(
            f"{file.path!r} holds a {file.architecture or 'nameless'} model; of GGUF files these are read: "
            f"{', '.join(ARCHITECTURES)}"
        )
    keys = Keys(file)
    found = _BY_KEYS[file.architecture](keys) if file.architecture in _BY_KEYS else found
    if keys.get("expert_count") and not found.experts:
        raise ModelError(
            f"{file.path!r} holds a {file.architecture} model with experts, which is read without them only"
        )
    if found.keys is not None:
        keys.check(found.keys)
    return found


def read_config(file: Gguf) -> Any:
    """The Transformers configuration of a file's model.

    Raises `ModelError` where its keys and tensors disagree, so that nothing is made of sizes that are not there.
    """
    architecture, keys = architecture_of(file), Keys(file)
    sizes = _sizes(architecture, keys)
    _check_shapes(file, sizes)
    _check_vocabulary(file)
    sizes["rope_parameters"] = architecture.rope(keys, sizes)
    epsilon = keys.get("attention.layer_norm_rms_epsilon", keys.get("attention.layer_norm_epsilon"))
    if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
        raise ModelError(f"{file.path!r} does not say the epsilon of its norms")
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    if architecture.model_type not in ("llama", "granite", "smollm3", "olmo2", "seed_oss"):
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


def _sizes(architecture: GgufArchitecture, keys: Keys) -> dict[str, Any]:
    """The model's sizes, by Transformers' names."""
    own, path = architecture.sizes(keys), keys.file.path
    sizes: dict[str, Any] = {name: keys.size(key) for key, name in _SIZES.items() if name not in own} | own
    if "num_key_value_heads" not in own:
        sizes["num_key_value_heads"] = keys.size("attention.head_count_kv", sizes["num_attention_heads"])
    if "head_dim" in own:
        return sizes
    if "attention.key_length" in keys:
        sizes["head_dim"] = keys.size("attention.key_length")
    elif sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ModelError(f"{path!r} does not say how wide its heads are")
    else:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if keys.get("attention.value_length", sizes["head_dim"]) != sizes["head_dim"]:
        raise ModelError(f"{path!r}: its values are narrower or wider than its keys")
    return sizes


_ALWAYS_WIDE = {"ffn_gate_inp", "ffn_gate_inp_shexp", "conv", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm"}
"""Parts with two dimensions that llama.cpp keeps in 32 bits in every file."""


def stored_dtype(file: Gguf) -> torch.dtype | None:
    """The type of a file's matrices; None where they are quantised or differ."""
    found = {
        tensor.format.dtype
        for name, tensor in file.tensors.items()
        if len(tensor.shape) > 1 and name.removesuffix(".weight").rpartition(".")[2] not in _ALWAYS_WIDE
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
    architecture, keys = architecture_of(file), Keys(file)
    usual = _usual_shapes(architecture, keys, sizes)
    for layer in sorted(map(int, numbers)):
        own = architecture.shapes(keys, sizes, layer)
        expected |= {f"blk.{layer}.{part}": shape for part, shape in {**usual, **own}.items()}
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


def _usual_shapes(
    architecture: GgufArchitecture, keys: Keys, sizes: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's matrices, by the names of its parts."""
    heads, kv = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    width, kv_width = heads * sizes["head_dim"], kv * sizes["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_qkv": (width + 2 * kv_width, hidden),
        "attn_output": (hidden, width),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner if architecture.layer.get("ffn_up") != "mlp.gate_up_proj" else 2 * inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if not architecture.experts:
        return shapes
    number = keys.size("expert_count")
    if keys.size("expert_used_count") > number:
        raise ModelError(f"{keys.file.path!r} uses more experts for a token than the {number} that it has")
    inner = keys.size("expert_feed_forward_length", inner)
    shared = inner * keys.count("expert_shared_count", 0)
    for part in ("gate", "up", "down"):
        own, of_shared = ((hidden, wide) if part == "down" else (wide, hidden) for wide in (inner, shared))
        shapes |= {f"ffn_{part}_exps": (number, *own), f"ffn_{part}_shexp": of_shared}
    return shapes | {GATE_AND_UP: (number, 2 * inner, hidden)}


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
