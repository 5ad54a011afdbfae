"""EAGLE heads on disk: reads and writes the layouts in use.

| layout | written by | recognised by |
|---|---|---|
| `eagle` | EAGLE-1 and EAGLE-2's own code | `layers.0.*` and `fc.*`, no output layer |
| `eagle3` | EAGLE-3's own code, SpecForge, for SGLang and vLLM | `midlayer.*`, `norm`, `lm_head`, `d2t`, `t2d` |
| `speculators` | the speculators library, for vLLM | `speculators_model_type` in the configuration |

P-EAGLE heads come in the last two: the configuration names their mask token, and `mask_hidden` is a tensor more.

Layer numbers: EAGLE-3's own code, SGLang and vLLM number a hidden state by the layer that *reads* it, which is
Slipstream's number too; SpecForge's and TensorRT-LLM's count the layer that *wrote* it, one less.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.draft.heads.checkpoints import TargetShape, TargetSizes, read_checkpoint, write_checkpoint
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead, default_feature_layers
from slipstream.draft.heads.vocabulary import draft_token_ids, own_embedding, vocabulary_tensors
from slipstream.errors import ModelError
from slipstream.models.causal_lm import CausalLM
from slipstream.models.huggingface import AutoConfig

LAYER_FAMILIES = ("llama", "qwen3")
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys that may name the mask token of a P-EAGLE head; the last two are vLLM's."""


def load_eagle(path: str, target: CausalLM, *, revision: str | None = None) -> EagleHead:
    """`read_eagle`, ready to draft for `target`: on its device, in its dtype, without gradients."""
    head = read_eagle(path, target, revision=revision)
    if head.embedding is not None:
        head.embedding = head.embedding.to(target.device, target.dtype)
    return head.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)


def read_eagle(path: str, target: TargetShape, *, revision: str | None = None) -> EagleHead:
    """The head in a folder or on the hub, in float32; raises `ModelError` where it does not match `target`."""
    raw, tensors = read_checkpoint(path, revision=revision)
    config = eagle_config(raw, tensors, target, path)
    head = EagleHead(config)
    check_head(config, target, path)
    head.embedding = own_embedding(tensors.pop("embed_tokens.weight", None), target, path)
    head.load_state_dict(_renamed(tensors, head, path))
    return head


def eagle_config(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetSizes, path: str
) -> EagleConfig:
    """The configuration of a checkpoint of any layout; raises `ModelError` where it is not an EAGLE head's."""
    if "fc.weight" not in tensors:
        raise ModelError(f"{path!r} is not an EAGLE head: it has no tensor fc.weight")
    layer = _layer_config(raw, path)
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if raw.get(name) or (raw.get("eagle_config") or {}).get(name):
            raise ModelError(f"{path!r} has {name}, which EAGLE heads here have not; train one without")
    three = "lm_head.weight" in tensors or any(name.startswith("midlayer.") for name in tensors)
    hidden = _number(layer, "hidden_size", path)
    heads = _number(layer, "num_attention_heads", path)
    taps = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    taps = taps or raw.get("eagle_aux_hidden_state_layer_ids") or default_feature_layers(target.num_layers)
    rope = layer.get("rope_parameters") or _old_rope(layer)
    draft_vocab = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else target.vocab_size
    stored = {int(name.split(".")[1]) for name in tensors if name.startswith("layers.")}
    listed = layer["num_hidden_layers"] if layer is not raw else 1 + max(stored, default=0)
    return EagleConfig(
        version=3 if three else 1,
        hidden_size=hidden,
        target_hidden_size=raw.get("target_hidden_size") or target.hidden_size,
        vocab_size=_number(layer, "vocab_size", path),
        draft_vocab_size=draft_vocab,
        intermediate_size=_number(layer, "intermediate_size", path),
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        feature_layers=tuple(taps) if three else (target.num_layers,),
        num_layers=listed if three else 1,
        mask_token_id=_mask_token(raw, tensors, target.vocab_size, path),
        norm_queries=any(name.endswith("0.self_attn.q_norm.weight") for name in tensors),
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        fc_bias="fc.bias" in tensors,
        attention_bias=bool(layer.get("attention_bias", False)),
        rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=layer.get("max_position_embeddings") or target.context_length,
        rope_parameters=rope,
        hidden_act=layer.get("hidden_act", "silu"),
    )


def _layer_config(raw: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The sizes of the head's layers: `raw` itself, or what the speculators library keeps apart, with the defaults of
    the family that it leaves out."""
    kind = raw.get("speculators_model_type")
    if kind is None:
        return raw
    if kind not in ("eagle3", "peagle"):
        raise ModelError(
            f"{path!r} is a {kind!r} speculator; as an EAGLE head only eagle3 and peagle are read"
        )
    own = {"model_type": "qwen3", **(raw.get("transformer_layer_config") or {})}
    if own["model_type"] not in LAYER_FAMILIES:
        raise ModelError(
            f"{path!r} has layers of the family {own['model_type']!r}; supported are {' and '.join(LAYER_FAMILIES)}"
        )
    layer: dict[str, Any] = AutoConfig.for_model(**own).to_dict()
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ModelError(f"{path!r} has layers with a sliding window, which EAGLE heads here have not")
    return layer


def _mask_token(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab_size: int, path: str
) -> int | None:
    """The mask token of a P-EAGLE head; None of any other. Raises `ModelError` where a part of one is missing."""
    token_id = next((raw[key] for key in MASK_TOKEN_KEYS if raw.get(key) is not None), None)
    if token_id is None and (raw.get("speculators_model_type") == "peagle" or "mask_hidden" in tensors):
        raise ModelError(
            f"{path!r} is a P-EAGLE head, and its configuration has no mask_token_id; add the one that it was "
            "trained with"
        )
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < vocab_size):
        raise ModelError(
            f"{path!r}: the mask token {token_id!r} is outside the target's vocabulary of {vocab_size} tokens; set "
            "mask_token_id to the id that it was trained with"
        )
    if token_id is not None and "mask_hidden" not in tensors:
        raise ModelError(
            f"{path!r} names a mask token and has no tensor mask_hidden, which stands for the target's features there; "
            "use the whole checkpoint"
        )
    return token_id


def save_eagle(
    head: EagleHead,
    folder: str | Path,
    *,
    target: str,
    layout: str = "eagle3",
    num_speculative_tokens: int = 4,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write `head` for the target called `target`; `notes` goes into `training.json` next to it."""
    config = head.config
    fits = layout == "eagle" if config.version == 1 else layout in ("eagle3", "speculators")
    if not fits:
        raise ModelError(f"an EAGLE-{config.version} head cannot be written in the layout {layout!r}")
    if config.norm_queries and layout != "speculators":
        raise ModelError(
            "a head whose layers norm queries and keys is written in the layout 'speculators' only"
        )
    tensors = {
        _name_in_file(name, layout, config.num_layers): tensor
        for name, tensor in head.state_dict().items()
        if name != "draft_token_ids"
    }
    if head.embedding is not None:
        tensors["embed_tokens.weight"] = head.embedding
    ids = head.draft_token_ids.cpu()
    if config.draft_vocab_size < config.vocab_size:
        tensors |= vocabulary_tensors(ids, config.vocab_size)
    elif config.version == 3:  # other engines refuse a map of the whole vocabulary
        tensors["lm_head.weight"] = head.lm_head.weight[ids.argsort()]
    write_checkpoint(folder, _written(config, target, layout, num_speculative_tokens), tensors)
    if notes is not None:
        (Path(folder) / "training.json").write_text(json.dumps(notes, indent=1) + "\n")


def _name_in_file(name: str, layout: str, num_layers: int) -> str:
    """The name that a layout has for a tensor of the module."""
    part, _, rest = name.partition(".")
    if part == "layer":
        return f"midlayer.{rest}" if layout == "eagle3" and num_layers == 1 else f"layers.0.{rest}"
    if part == "upper":
        index, _, rest = rest.partition(".")
        return f"layers.{int(index) + 1}.{rest}"
    return name


def _written(config: EagleConfig, target: str, layout: str, num_speculative_tokens: int) -> dict[str, Any]:
    layer = config.llama().to_diff_dict() | {
        "model_type": "qwen3" if config.norm_queries else "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": dict(config.rope_parameters),
        "rope_theta": config.rope_parameters.get("rope_theta", 10000.0),
        "tie_word_embeddings": False,
    }
    taps = list(config.feature_layers)
    if layout == "eagle":
        return layer | {"architectures": ["LlamaForCausalLMEagle"], "bias": config.fc_bias}
    common = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
    }
    kind = "eagle3"
    if config.mask_token_id is not None:
        kind = "peagle"
        common["mask_token_id"] = config.mask_token_id
    if layout == "eagle3":
        if config.mask_token_id is not None:
            common["pard_token"] = config.mask_token_id  # the name that vLLM looks for
        aux = {"eagle_aux_hidden_state_layer_ids": taps, "use_aux_hidden_state": True}
        return layer | common | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": aux}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return common | {
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }


def _renamed(tensors: Mapping[str, Tensor], head: EagleHead, path: str) -> dict[str, Tensor]:
    """The tensors under the module's names; raises `ModelError` for missing, unknown or misshapen ones."""
    renamed: dict[str, Tensor] = {}
    offsets, known = tensors.get("d2t"), tensors.get("t2d")
    for name, tensor in tensors.items():
        for prefix in ("midlayer.", "layers.0."):
            if name.startswith(prefix):
                name = "layer." + name.removeprefix(prefix)
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            name = f"upper.{int(index) - 1}.{rest}"
        if name == "mask_hidden":
            tensor = tensor.reshape(1, 1, -1)  # some files have a dimension less
        if name not in ("d2t", "t2d") and not name.endswith("rotary_emb.inv_freq"):
            renamed[name] = tensor
    config = head.config
    renamed["draft_token_ids"] = draft_token_ids(
        offsets, known, config.draft_vocab_size, config.vocab_size, path
    )
    expected = head.state_dict()
    layout = "eagle3" if any(name.startswith("midlayer.") for name in tensors) else "speculators"
    missing, unknown = (
        sorted(_name_in_file(name, layout, head.config.num_layers) for name in names)
        for names in (expected.keys() - renamed.keys(), renamed.keys() - expected.keys())
    )
    if missing or unknown:
        raise ModelError(
            f"{path!r} is not a complete EAGLE-{head.config.version} head: "
            + "; ".join(
                f"{what} {', '.join(names[:4])}{' …' if len(names) > 4 else ''}"
                for what, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )
    for name, tensor in renamed.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"{path!r}: tensor {name} is {list(tensor.shape)}, the configuration says {list(expected[name].shape)}"
            )
    return renamed


def check_head(config: EagleConfig, target: TargetSizes, path: str) -> None:
    """Raise `ModelError` where the head was trained for another target."""
    config.check_sizes(target, path)
    if config.version == 1 and config.hidden_size != target.hidden_size:
        raise ModelError(
            f"{path!r}: an EAGLE-1 head must have its target's hidden size, {target.hidden_size}"
        )
    if any(not 0 <= layer <= target.num_layers for layer in config.feature_layers):
        raise ModelError(
            f"{path!r} reads hidden states {list(config.feature_layers)}, but the target has {target.num_layers} layers"
        )


def _number(config: Mapping[str, Any], name: str, path: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ModelError(f"{path!r}: its configuration has no {name}")
    return value


def _old_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of a configuration from before Transformers 5."""
    rope = dict(config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    return rope | {"rope_theta": config.get("rope_theta", 10000.0)}
