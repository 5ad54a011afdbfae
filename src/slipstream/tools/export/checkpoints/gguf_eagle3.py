"""EAGLE-3 heads as GGUF files for llama.cpp (architecture `eagle3`), and back.

Unlike the folders of other engines, the file holds the draft vocabulary as *absolute* ids of the target (`d2t`), and
the target's tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.draft.methods import EAGLE3
from slipstream.errors import ModelError
from slipstream.models.files.gguf import Gguf
from slipstream.models.files.gguf_architectures import halves_order
from slipstream.models.files.gguf_rope import rope_parameters
from slipstream.tools.export.checkpoints.eagle_dialects import DIALECTS, check_head
from slipstream.tools.export.checkpoints.gguf_fields import (
    add_file_type,
    add_rope,
    add_sizes,
    add_tensor,
    gguf_package,
    read_sizes,
    refuse_rounded,
)
from slipstream.tools.export.checkpoints.gguf_models import with_neighbours
from slipstream.tools.export.checkpoints.gguf_tokenizer import add_tokenizer
from slipstream.tools.export.checkpoints.target_files import TargetFiles

ARCH = EAGLE3.name
LAYER_KEYS = ("target_layers", "extract_layers")
"""llama.cpp's key of the hidden states' numbers, now and in its first releases with EAGLE-3."""
NAMES: Mapping[str, str] = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "layer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
"""Our module's name of a tensor to the file's."""


def eagle3_writer(head: EagleHead, target: TargetFiles, tokenizer: Any, file: Path, path: str) -> Any:
    """A `gguf.GGUFWriter` of `head`, which was read from `path`; `finish` writes the `file`.

    Raises `ExportError` where llama.cpp would not run the head as it was trained.
    """
    check_head(DIALECTS["llama_cpp"], head, target, path)
    config = head.config
    writer = gguf_package().GGUFWriter(file, ARCH)
    settings = {**config.llama().to_dict(), "num_key_value_heads": config.num_key_value_heads}
    add_sizes(writer, settings)
    factors = add_rope(writer, config.rope_parameters, config.head_dim, path)
    for key in LAYER_KEYS:
        writer.add_array(f"{ARCH}.{key}", list(config.feature_layers))
    writer.add_uint32(f"{ARCH}.target_hidden_size", config.target_hidden_size)
    writer.add_bool(f"{ARCH}.norm_before_residual", config.norm_before_residual)
    writer.add_bool(f"{ARCH}.norm_before_fc", False)
    add_file_type(writer, [head.fc.weight.dtype])
    add_tokenizer(writer, tokenizer, config.vocab_size, target.path)
    if factors is not None:
        add_tensor(writer, "rope_freqs.weight", factors)
    state = head.state_dict()
    for ours, theirs in NAMES.items():
        add_tensor(writer, theirs, with_neighbours(ours, state[ours], settings))
    if head.embedding is not None:
        add_tensor(writer, "token_embd.weight", head.embedding)
    if config.draft_vocab_size < config.vocab_size:
        add_tensor(writer, "d2t", head.draft_token_ids.to(torch.int64))
    return writer


def read_eagle3(file: Gguf) -> EagleHead:
    """The head of a GGUF file; raises `ModelError` where it is none that can be run here."""
    refuse_rounded(file)
    fields, path = file.fields, file.path
    tensors = {name: entry.numbers().clone() for name, entry in file.tensors.items()}
    if fields.get(f"{ARCH}.norm_before_fc"):
        raise ModelError(
            f"{path!r} norms the target's hidden states before its layer fc, which is not supported"
        )
    layers = next((fields[f"{ARCH}.{key}"] for key in LAYER_KEYS if f"{ARCH}.{key}" in fields), None)
    missing = [theirs for theirs in NAMES.values() if theirs not in tensors]
    if layers is None or missing:
        raise ModelError(f"{path!r} is no EAGLE-3 head: it lacks {missing[0] if missing else LAYER_KEYS[0]}")
    head = EagleHead(_config(file, [int(layer) for layer in layers]))
    dtype = tensors["fc.weight"].dtype  # vectors were widened when the file was written
    state = {ours: tensors[theirs].to(dtype) for ours, theirs in NAMES.items()}
    for part, heads in (("q", head.config.num_attention_heads), ("k", head.config.num_key_value_heads)):
        name = f"layer.self_attn.{part}_proj.weight"
        state[name] = state[name][halves_order(len(state[name]), heads)]
    state["draft_token_ids"] = _draft_token_ids(tensors.get("d2t"), head.config, path)
    head.requires_grad_(False).to(dtype).load_state_dict(state)
    head.embedding = tensors.get("token_embd.weight")
    return head


def _config(file: Gguf, layers: list[int]) -> EagleConfig:
    fields, sizes = file.fields, read_sizes(file.fields, ARCH)
    vocab_size = sizes.get("vocab_size") or len(fields["tokenizer.ggml.tokens"])
    head_dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
    return EagleConfig(
        version=3,
        hidden_size=sizes["hidden_size"],
        target_hidden_size=int(fields[f"{ARCH}.target_hidden_size"]),
        vocab_size=vocab_size,
        draft_vocab_size=file.tensors["output.weight"].shape[0],
        intermediate_size=sizes["intermediate_size"],
        num_attention_heads=sizes["num_attention_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        head_dim=head_dim,
        feature_layers=tuple(layers),
        norm_before_residual=bool(fields.get(f"{ARCH}.norm_before_residual", False)),
        rms_norm_eps=float(sizes["rms_norm_eps"]),
        max_position_embeddings=sizes["max_position_embeddings"],
        rope_parameters=rope_parameters(file, head_dim),
    )


def _draft_token_ids(ids: Tensor | None, config: EagleConfig, path: str) -> Tensor:
    """[draft vocab]: the file's map is absolute already."""
    if ids is None:
        if config.draft_vocab_size != config.vocab_size:
            raise ModelError(
                f"{path!r} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no tensor d2t"
            )
        return torch.arange(config.vocab_size)
    good = len(ids) == config.draft_vocab_size and len(set(ids.tolist())) == len(ids)
    if not good or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        raise ModelError(
            f"{path!r}: d2t is not a one-to-one map of the head's {config.draft_vocab_size} tokens into the target's "
            f"{config.vocab_size}; GGUF files hold absolute ids, not offsets"
        )
    return ids.to(torch.int64)
