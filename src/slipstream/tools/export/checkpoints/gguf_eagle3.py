"""EAGLE-3 heads as GGUF files for llama.cpp (architecture `eagle3`).

`draft.heads.gguf_heads` has the names of the tensors, and reads such files. A file holds the target's tokenizer too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slipstream.draft.heads.eagle_head import EagleHead
from slipstream.draft.heads.gguf_heads import EAGLE3_NAMES, LAYER_KEYS
from slipstream.draft.methods import EAGLE3
from slipstream.tools.export.checkpoints.eagle_dialects import DIALECTS, check_head
from slipstream.tools.export.checkpoints.gguf_fields import (
    add_file_type,
    add_rope,
    add_sizes,
    add_tensor,
    gguf_package,
)
from slipstream.tools.export.checkpoints.gguf_models import with_neighbours
from slipstream.tools.export.checkpoints.gguf_tokenizer import add_tokenizer
from slipstream.tools.export.checkpoints.target_files import TargetFiles

ARCH = EAGLE3.name


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
    for name, theirs in EAGLE3_NAMES.items():
        ours = name.removeprefix("mid")  # `layer` in the module, `midlayer` in EAGLE's own files
        if ours in state:
            add_tensor(writer, theirs, with_neighbours(ours, state[ours], settings))
    if head.embedding is not None:
        add_tensor(writer, EAGLE3_NAMES["embed_tokens.weight"], head.embedding)
    if config.draft_vocab_size < config.vocab_size:
        add_tensor(writer, EAGLE3_NAMES["d2t"], head.draft_token_ids.to(torch.int64))
    return writer
