"""Models of the Llama family as GGUF files: targets and draft models for llama.cpp.

The tensors keep their bits; only the rows of the query and key projections change their order, where llama.cpp rotates
neighbours. Families beyond `FAMILIES` are for llama.cpp's own converter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from slipstream.models import load_config, load_tokenizer
from slipstream.models.files.gguf_architectures import ARCHITECTURES, halves_order
from slipstream.models.files.lora import has_adapter
from slipstream.models.files.shards import weight_files
from slipstream.tools.export.checkpoints.gguf_fields import (
    add_file_type,
    add_rope,
    add_sizes,
    add_tensor,
    gguf_package,
)
from slipstream.tools.export.checkpoints.gguf_tokenizer import CONVERTER, add_tokenizer
from slipstream.tools.export.refusals import ExportError

FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Transformers' `model_type` to llama.cpp's architecture."""


def model_writer(path: str, file: Path) -> Any:
    """A `gguf.GGUFWriter` of the model in the folder `path`, with its tokenizer; `finish` writes the `file`.

    Raises `ExportError` for a model that llama.cpp would not compute alike.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ExportError(
            f"{path!r} is no folder; download the model first: hf download {path} --local-dir FOLDER"
        )
    config = load_config(path)
    arch = _architecture(config, path)
    if has_adapter(folder):
        raise ExportError(
            f"{path!r} holds a LoRA adapter next to its weights, which llama.cpp would not see: merge it first"
        )
    writer = gguf_package().GGUFWriter(file, arch)
    settings = sizes_of(config)
    add_sizes(writer, settings)
    factors = add_rope(writer, settings["rope_parameters"], settings["head_dim"], path)
    add_tokenizer(writer, load_tokenizer(path), config.vocab_size, path)
    if factors is not None:
        add_tensor(writer, "rope_freqs.weight", factors)
    dtypes = set()
    for name, tensor in _tensors(folder):
        for theirs, values in _renamed(name, tensor, settings, arch, path):
            add_tensor(writer, theirs, values)
        if tensor.ndim > 1:
            dtypes.add(tensor.dtype)
    add_file_type(writer, dtypes)
    return writer


def finish(writer: Any) -> None:
    """Write all that a `gguf.GGUFWriter` has been given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sizes_of(config: Any) -> dict[str, Any]:
    """A Transformers configuration's keys, with those that it may leave out."""
    settings: dict[str, Any] = config.to_dict()
    settings["head_dim"] = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    settings["num_key_value_heads"] = settings.get("num_key_value_heads") or config.num_attention_heads
    settings["rope_parameters"] = dict(settings.get("rope_parameters") or {})
    return settings


def _architecture(config: Any, path: str) -> str:
    if config.model_type not in FAMILIES:
        raise ExportError(
            f"{path!r} is a {config.model_type} model; GGUF files are written for {', '.join(FAMILIES)}: {CONVERTER}"
        )
    odd = {
        "sliding-window attention": _slides(config),
        "biases in its MLP": getattr(config, "mlp_bias", False),
        "quantised weights": getattr(config, "quantization_config", None) is not None,
        f"the activation {config.hidden_act!r}": config.hidden_act != "silu",
    }
    for what, has in odd.items():
        if has:
            raise ExportError(f"{path!r} has {what}, which is not written as GGUF here: {CONVERTER}")
    return FAMILIES[config.model_type]


def _slides(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = weight_files(folder)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ExportError(f"{str(folder)!r} has no *.safetensors: save the model as safetensors first")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                yield name, tensors.get_tensor(name)


def _renamed(
    name: str, tensor: Tensor, settings: Mapping[str, Any], arch: str, path: str
) -> Iterator[tuple[str, Tensor]]:
    """The tensor under llama.cpp's name; nothing for one that the file does not hold."""
    if name.endswith("rotary_emb.inv_freq"):
        return
    if name == "lm_head.weight" and settings.get("tie_word_embeddings"):
        return
    gguf = gguf_package()
    kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == arch)
    names = gguf.get_tensor_name_map(kind, settings["num_hidden_layers"])
    theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if theirs is None:
        raise ExportError(f"{path!r} has a tensor that llama.cpp's {arch} models have not: {name}")
    if ARCHITECTURES[arch].rotates_neighbours:
        tensor = with_neighbours(name, tensor, settings)
    yield theirs, tensor


def with_neighbours(name: str, tensor: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """A query or key projection in llama.cpp's order; any other tensor as it is."""
    part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(part)
    return tensor if heads is None else tensor[halves_order(len(tensor), settings[heads]).argsort()]
