"""DFlash heads as GGUF files for llama.cpp (architecture `dflash`).

The numbers of the target's layers are ours, which is one more than in the folders of DFlash's authors. The file holds
the draft vocabulary as *absolute* ids of the target (`d2t`), and the target's tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.dflash_files import read_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.methods import DFLASH
from slipstream.tools.export.checkpoints.gguf_fields import (
    add_file_type,
    add_rope,
    add_sizes,
    add_tensor,
    gguf_package,
)
from slipstream.tools.export.checkpoints.gguf_tokenizer import add_tokenizer
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.refusals import ExportError

ARCH = DFLASH.name
NAMES = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "confidence_head": "conf_proj",
    "left_to_right.markov_w1": "markov_w1",
    "left_to_right.markov_w2": "markov_w2",
    "left_to_right.hidden_projection": "selector_hidden",
}
"""Our module's name of a tensor, before its last part, to the file's."""
WHOLE_NAMES = {
    "left_to_right.predecessor_codebook": "selector_predecessor.weight",
    "left_to_right.successor_codebook": "selector_successor.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
CONVOLUTIONS = {"attention_conv.base_kernel": "attn_conv_base", "mlp_conv.base_kernel": "ffn_conv_base"}


def dflash_writer(
    target: TargetFiles, tokenizer: Any, file: Path, path: str, revision: str | None = None
) -> Any:
    """A `gguf.GGUFWriter` of the head in the folder `path`; `finish` writes the `file`.

    Raises `ExportError` where llama.cpp would not run the head as it was trained, `ModelError` where it is none.
    """
    _, tensors = read_checkpoint(path, revision=revision)
    head = read_dflash(path, target, revision=revision).requires_grad_(False)
    kinds = (tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    head = head.to(functools.reduce(torch.promote_types, kinds))
    config = head.config
    check_head(config, target, path)
    writer = gguf_package().GGUFWriter(file, ARCH)
    add_sizes(writer, {**config.llama().to_dict(), "num_key_value_heads": config.num_key_value_heads})
    factors = add_rope(writer, config.rope_parameters, config.head_dim, path)
    if factors is not None:
        raise ExportError(
            f"llama.cpp cannot run {path!r}: it has no place for rotary positions of kind llama3"
        )
    writer.add_array(f"{ARCH}.target_layers", list(config.feature_layers))
    writer.add_uint32(f"{ARCH}.block_size", config.block_size)
    writer.add_bool(f"{ARCH}.sample_from_anchor", config.from_anchor)
    if (window := next((each for each in config.windows if each), None)) is not None:
        writer.add_uint32(f"{ARCH}.attention.sliding_window", window)
        writer.add_array(
            f"{ARCH}.attention.sliding_window_pattern", [each is not None for each in config.windows]
        )
    if config.left_to_right is not None and config.convolution_taps:
        writer.add_uint32(f"{ARCH}.conv_kernel_size", config.convolution_taps)
        writer.add_uint32(f"{ARCH}.conv_group_size", config.convolution_group)
        writer.add_uint32(f"{ARCH}.selector_rank", config.left_to_right.rank)
        writer.add_uint32(f"{ARCH}.selector_top_k", config.left_to_right.top_k)
    add_file_type(writer, [head.fc.weight.dtype])
    add_tokenizer(writer, tokenizer, config.vocab_size, target.path)
    writer.add_mask_token_id(config.mask_token_id)
    for name, tensor in _tensors(head):
        add_tensor(writer, name, tensor)
    return writer


def _tensors(head: DFlashHead) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the file's names."""
    for name, tensor in head.state_dict().items():
        part, _, last = name.rpartition(".")
        if name in WHOLE_NAMES:
            yield WHOLE_NAMES[name], tensor
        elif part in NAMES:
            yield f"{NAMES[part]}.{last}", tensor
        elif name.startswith("layers."):
            _, index, inner = name.split(".", 2)
            if inner in CONVOLUTIONS:  # added to numbers in float32
                yield f"blk.{index}.{CONVOLUTIONS[inner]}", tensor.float()
            else:
                yield f"blk.{index}.{LAYER_NAMES[inner.rpartition('.')[0]]}.{last}", tensor
    if head.embedding is not None:
        yield "token_embd.weight", head.embedding
    if head.config.draft_vocab_size < head.config.vocab_size:
        yield "d2t", head.draft_token_ids.to(torch.int64)


def check_head(config: DFlashConfig, target: TargetFiles, path: str) -> None:
    """Raise `ExportError`, with the reason, where llama.cpp cannot run the head as trained."""
    correction = config.left_to_right
    kind = None if correction is None else correction.kind
    top_k = 0 if correction is None or kind != "selector" else correction.top_k
    reasons = {
        f"its {kind} head": kind not in (None, "vanilla", "selector"),
        "convolutions without a selector, or a selector without them": bool(config.convolution_taps)
        != (kind == "selector"),
        f"a selector among {top_k} tokens in a hidden size of {config.hidden_size}": config.hidden_size
        < top_k * (top_k + 1),
        "a confidence head that does not read the previous token": config.confidence == "hidden",
        "rows that see earlier rows only": any(config.causal),
        "a draft by the anchor's row without a Markov head": config.from_anchor and kind != "vanilla",
        "another hidden size than its target's": config.target_hidden_size != config.hidden_size,
        "scaled embeddings or logits": (config.embedding_scale, config.logit_scale) != (1.0, 1.0)
        or config.logit_softcap is not None,
        "biases in its attention": config.attention_bias,
        "the target's last hidden state, after the final norm,": target.num_layers in config.feature_layers,
    }
    if why := next((reason for reason, holds in reasons.items() if holds), None):
        raise ExportError(
            f"llama.cpp cannot run {path!r}: it has no place for {why}; vLLM or SGLang may, or use it here"
        )
