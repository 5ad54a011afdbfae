"""DFlash heads as GGUF files for llama.cpp (architecture `dflash`).

`draft.heads.gguf_heads` has the names of the tensors, and reads such files. A file holds the target's tokenizer too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.dflash_files import name_in_file, read_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.dflash_layouts import ZLAB
from slipstream.draft.heads.gguf_heads import DFLASH_NAMES, LAYER_KEYS, dflash_name
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
    writer.add_array(f"{ARCH}.{LAYER_KEYS[0]}", list(config.feature_layers))
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
        if name == "draft_token_ids":
            continue
        # A convolution's kernel is added to numbers in float32.
        is_kernel = name.endswith(".base_kernel")
        yield dflash_name(name_in_file(name, head, ZLAB)), tensor.float() if is_kernel else tensor
    if head.embedding is not None:
        yield DFLASH_NAMES["embed_tokens.weight"], head.embedding
    if head.config.draft_vocab_size < head.config.vocab_size:
        yield DFLASH_NAMES["d2t"], head.draft_token_ids.to(torch.int64)


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
