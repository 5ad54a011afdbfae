"""llama.cpp's families in which some layers convolve instead of attending."""

from __future__ import annotations

from typing import Any

from slipstream.errors import ModelError
from slipstream.models.files.gguf_family import ENDS, GgufArchitecture, Keys

_CONVOLUTION = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
_ATTENTION = {
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")},
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in ("q", "k")},
    "attn_output": "self_attn.out_proj",
}


def _lfm2_sizes(keys: Keys) -> dict[str, Any]:
    """A layer that convolves has no heads of keys."""
    num_layers, heads = keys.size("block_count"), keys.get("attention.head_count_kv")
    found = set(heads) - {0} if isinstance(heads, list) else set()
    if not isinstance(heads, list) or len(heads) != num_layers or len(found) != 1:
        raise ModelError(
            f"{keys.file.path!r} does not say which of its {num_layers} layers attend, with which heads"
        )
    number = found.pop()
    if type(number) is not int or number < 0:
        raise ModelError(f"{keys.file.path!r}: {number!r:.40} heads of keys and values")
    return {
        "num_key_value_heads": number,
        "head_dim": keys.size("embedding_length") // keys.size("attention.head_count"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
        "conv_L_cache": keys.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_lacks(keys: Keys, layer: int) -> dict[str, str]:
    return _ATTENTION if not keys.get("attention.head_count_kv")[layer] else _CONVOLUTION


LFM2 = GgufArchitecture(
    "lfm2",
    {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    | _ATTENTION
    | _CONVOLUTION
    | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    lacks=_lfm2_lacks,
    ends=ENDS | dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm"),
    norm_epsilon="norm_eps",
    sizes=_lfm2_sizes,
    shapes=lambda keys, sizes, layer: {
        "shortconv.conv": (sizes["hidden_size"], sizes["conv_L_cache"]),
        "shortconv.in_proj": (3 * sizes["hidden_size"], sizes["hidden_size"]),
        "shortconv.out_proj": (sizes["hidden_size"], sizes["hidden_size"]),
    },
)
