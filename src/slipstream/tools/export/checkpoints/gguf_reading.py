"""Reads GGUF files: a model of the Llama family as a folder that Slipstream loads, or an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.draft.heads.checkpoints import write_checkpoint
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_tokenizer import read_tokenizer
from slipstream.models.huggingface import AutoConfig
from slipstream.tools.export.checkpoints.gguf_models import FAMILIES
from slipstream.tools.export.checkpoints.gguf_shape import read_rope, read_sizes
from slipstream.tools.export.checkpoints.gguf_tensors import halves, read_tensors, rotated_heads, tensor_names
from slipstream.tools.export.refusals import ExportError


@dataclass(frozen=True)
class GgufFile:
    """What is in a GGUF file."""

    path: str
    arch: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def read_gguf(path: str) -> GgufFile:
    """Keys and tensors; raises `ModelError` for a file that is none, or whose weights are quantised."""
    file = open_gguf(path)
    return GgufFile(path, file.architecture, file.fields, read_tensors(file))


def write_folder(file: GgufFile, folder: Path) -> None:
    """Write a model of the Llama family with its tokenizer as a folder in Hugging Face's form.

    Raises `ExportError` for another family, and for a tokenizer or rotary positions that cannot be restored.
    """
    model_type = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}.get(file.arch)
    if model_type is None:
        raise ExportError(
            f"{file.path!r} holds a {file.arch} model; read are llama, qwen2, qwen3 and eagle3: import the "
            "checkpoint that it was made from"
        )
    tokenizer = read_tokenizer(file.fields, file.path)
    rope = read_rope(file.fields, file.arch, file.tensors.get("rope_freqs.weight"), file.path)
    sizes = read_sizes(file.fields, file.arch)
    config = AutoConfig.for_model(
        model_type,
        **{**sizes, "vocab_size": len(file.tensors["token_embd.weight"])},
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=str(file.tensors["token_embd.weight"].dtype).removeprefix("torch."),
        architectures=[{"llama": "LlamaForCausalLM"}.get(model_type, f"{model_type.title()}ForCausalLM")],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    write_checkpoint(folder, config.to_dict(), _tensors(file, config))


def _tensors(file: GgufFile, config: Any) -> dict[str, Tensor]:
    """Return the tensors under Transformers' names, vectors in the dtype of the matrices."""
    names, sizes = tensor_names(file.arch, config.num_hidden_layers), config.to_dict()
    wanted = [f"model.layers.{layer}.{part}" for layer in range(config.num_hidden_layers) for part in _PARTS]
    theirs = {names.get_name(name): name for name in [*wanted, *_ENDS]}
    dtype = file.tensors["token_embd.weight"].dtype
    tensors = {}
    for name, tensor in file.tensors.items():
        stem, _, ending = name.rpartition(".")
        if stem not in theirs:
            raise ExportError(f"{file.path!r} has a tensor that {config.model_type} models have not: {name}")
        ours = theirs[stem]
        heads = rotated_heads(ours, sizes)
        if heads is not None and FAMILIES[config.model_type].rotates_neighbours:
            tensor = halves(tensor, heads)
        tensors[f"{ours}.{ending}"] = tensor.to(dtype) if tensor.ndim == 1 else tensor
    return tensors


_ENDS = ("model.embed_tokens", "model.norm", "lm_head")
_PARTS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
)
