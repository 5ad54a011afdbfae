"""Tiny targets with a layer for multi-token prediction in their checkpoint, in each layout, with random weights."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.draft.heads.mtp_files import save_mtp
from slipstream.draft.heads.mtp_head import MtpForm, MtpHead
from slipstream.kv.pool import LayerShape
from slipstream.models.single_layer import SingleLayer, single_layer_config
from tests.kit.folders import kept_folder
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_level

VOCAB, LAYERS, HIDDEN = 320, 2, 32
_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1},
    **{"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_QWEN_EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 16,
}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 10},
}
"""A trunk with recurrent layers; the prediction layer attends."""
_SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("deepseek", "llama", {}),
    "deepseek": ("deepseek", "deepseek_v3", {**_EXPERTS, **_LATENT, "num_key_value_heads": 4}),
    "glm": ("deepseek", "glm4_moe", {**_EXPERTS, "use_qk_norm": True}),
    "glm-lite": (
        "deepseek",
        "glm4_moe_lite",
        {**_EXPERTS, **_LATENT, "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "qwen3-next": ("qwen", "qwen3_next", {**_HYBRID, **_QWEN_EXPERTS, "partial_rotary_factor": 0.5}),
    "qwen3.5": ("qwen", "qwen3_5_text", _HYBRID),
    "qwen3.5-moe": ("qwen", "qwen3_5_moe_text", {**_HYBRID, **_QWEN_EXPERTS}),
    "mimo": ("mimo", "qwen2", {}),
    "mimo-v2": (
        "mimo_v2",
        "mimo_v2_flash",
        {
            **{name: value for name, value in _EXPERTS.items() if name.startswith(("n_r", "num_e", "moe"))},
            **{"layer_types": _SLIDING, "mlp_layer_types": ["dense", "sparse", "dense"]},
            **{"v_head_dim": 12, "sliding_window": 6},
        },
    ),
    "qwen3": ("deepseek", "qwen3", {"attention_bias": True}),
}
"""Name to (layout, model type, options beside the sizes)."""
PREFIXES = {
    "deepseek": "model.layers.",
    "qwen": "mtp.layers.",
    "mimo": "model.mtp_layers.",
    "mimo_v2": "model.mtp.layers.",
    "speculators": "mtp_layers.",
}
_NAMES = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "mimo_v2": ("enorm", "hnorm", "eh_proj", "final_layernorm"),
    "speculators": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


@dataclass(frozen=True)
class MtpParts:
    """What a prediction layer has beside the decoder layer."""

    embedding_norm: nn.Module
    hidden_norm: nn.Module
    projection: nn.Linear
    final_norm: nn.Module


@dataclass(frozen=True)
class MtpTarget:
    """A checkpoint, and the modules that it was written from."""

    folder: str
    layout: str
    whole: Any
    """The Transformers model with more layers: those behind the target's are the prediction layers'."""
    parts: list[MtpParts]
    """Those of each prediction layer."""

    @torch.no_grad()
    def step(
        self, token_ids: list[int], states: Tensor, *, hidden_first: bool, masks_first: bool, number: int = 0
    ) -> Tensor:
        """A layer's output [rows, hidden] before its final norm, written down plainly.

        Row i pairs states[i] [hidden] with token_ids[i], at position i.
        """
        rows, own, place = len(token_ids), self.parts[number], LAYERS + number
        embeds = self.whole.get_input_embeddings()(torch.tensor(token_ids))
        if masks_first:
            embeds[0] = 0
        parts = [own.embedding_norm(embeds), own.hidden_norm(states)]
        given = own.projection(torch.cat(parts[::-1] if hidden_first else parts, dim=-1))[None]
        distance = torch.arange(rows)[:, None] - torch.arange(rows)[None]
        kind = (getattr(self.whole.config, "layer_types", None) or ["full_attention"] * (place + 1))[place]
        window = self.whole.config.sliding_window if kind == "sliding_attention" else rows
        seen = (distance >= 0) & (distance < window)
        decoder = self.whole.model
        per_kind = {"layer_type": kind} if self.layout == "mimo_v2" else {}
        output = decoder.layers[place](
            given,
            attention_mask=torch.zeros(rows, rows).masked_fill(~seen, float("-inf"))[None, None],
            position_embeddings=decoder.rotary_emb(given, torch.arange(rows)[None], **per_kind),
            position_ids=torch.arange(rows)[None],
        )
        return (output[0] if isinstance(output, tuple) else output)[0]

    @torch.no_grad()
    def logits(self, output: Tensor, number: int = 0) -> Tensor:
        """[rows, hidden] as `step` returns it -> [rows, vocab]."""
        found: Tensor = self.whole.get_output_embeddings()(self.parts[number].final_norm(output))
        return found


@functools.cache
def mtp_target(family: str, layout: str | None = None) -> MtpTarget:
    """A folder with a tokenizer; `layout` writes the layers in another one than the family's.

    There is one layer, or as many as stand behind the family's name and a star, as in `llama*2`.
    """
    family, _, count = family.partition("*")
    number = int(count or 1)
    usual, model_type, options = FAMILIES[family]
    types = {name: [*of, *of[-1:] * (number - 1)] for name, of in options.items() if name.endswith("_types")}
    options = {**options, **types}
    layout = layout or usual
    shape = sizes(HIDDEN, LAYERS + number, 4, 2, inner=48, vocab=VOCAB, context=256, spread=0.2, eos=None)
    config = AutoConfig.for_model(
        model_type, **{**shape, "head_dim": 8, "attn_implementation": "eager", **options}
    )
    config.bos_token_id = config.pad_token_id = None
    torch.manual_seed(0)
    whole: Any = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, weight in whole.named_parameters():
        if weight.ndim == 1 and name.endswith(("norm.weight", "bias", "sinks")):
            weight += 0.3 * torch.randn_like(weight)
    parts = [_parts(whole) for _ in range(number)]
    if layout == "qwen":  # which has them once
        parts = parts[:1] * number
    made = MtpTarget(str(kept_folder()), layout, whole, parts)
    _write(made)
    byte_level(VOCAB).save_pretrained(made.folder)
    return made


def _parts(whole: Any) -> MtpParts:
    norms = [_norm(whole) for _ in range(3)]
    return MtpParts(*norms[:2], _projection(), norms[2])


def _norm(whole: Any) -> nn.Module:
    like = whole.model.norm
    norm = type(like)(HIDDEN, eps=whole.config.rms_norm_eps)
    norm.weight.data = like.weight.data + 0.3 * torch.randn(HIDDEN)
    return norm.requires_grad_(False)


def _projection() -> nn.Linear:
    projection = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
    nn.init.normal_(projection.weight, std=0.2)
    return projection.requires_grad_(False)


def _write(made: MtpTarget) -> None:
    folder = Path(made.folder)
    made.whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for number, parts in enumerate(made.parts):
        _write_layer(made, number, parts, tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][:LAYERS]
    config["num_hidden_layers"] = LAYERS
    config["mtp_num_hidden_layers" if made.layout == "qwen" else "num_nextn_predict_layers"] = len(made.parts)
    file.write_text(json.dumps(config))


def _write_layer(made: MtpTarget, number: int, parts: MtpParts, tensors: dict[str, Tensor]) -> None:
    """Give the tensors of a prediction layer their names, and add its parts."""
    own = f"model.layers.{LAYERS + number}."
    prefix = f"{PREFIXES[made.layout]}{number + LAYERS * (made.layout == 'deepseek')}."
    for name in [name for name in tensors if name.startswith(own)]:
        part = name.removeprefix(own)
        if made.layout == "mimo_v2":
            part = part.replace("post_attention_layernorm", "pre_mlp_layernorm")
        tensors[prefix + part] = tensors.pop(name)
    beside = "mtp." if made.layout == "qwen" else prefix
    modules = (parts.embedding_norm, parts.hidden_norm, parts.projection, parts.final_norm)
    for name, module in zip(_NAMES[made.layout], modules, strict=True):
        tensors[f"{beside}{name}.weight"] = module.weight.data.clone()  # type: ignore[operator]
    if made.layout == "deepseek":  # copies of the target's, as DeepSeek's own checkpoint has them
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = torch.zeros(VOCAB, HIDDEN)


@functools.cache
def random_mtp(path: str, number: int = 1) -> str:
    """A folder with random layers in the layout of speculators, for the model in a folder."""
    config: Any = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    layers = []
    for _ in range(number):
        model = AutoModelForCausalLM.from_config(single_layer_config(config), dtype=torch.float32)
        layers.append(SingleLayer(model, LayerShape(1, 1, 1), frozenset()))
    head = MtpHead(layers, MtpForm(masks_first=False))
    for weight in head.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    folder = kept_folder()
    save_mtp(head, folder, target=path, config=config)
    return str(folder)
