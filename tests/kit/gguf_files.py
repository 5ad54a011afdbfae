"""Small GGUF files, made on the spot by llama.cpp's own Python package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

QUANTISED = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}
"""Where blocks have float16 numbers."""
SPANS = {
    **{"Q4_0": 8, "Q8_0": 128, "Q2_K": 24, "Q3_K": 128, "Q4_K": 480, "Q5_K": 960, "Q6_K": 4096},
    **{"IQ4_NL": 128, "IQ4_XS": 4096},
}
"""The largest number of a block without its float16; 16 of those that are not here."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """uint8 [outputs, bytes]: random weights of some hundredths, every bit of the integers random."""
    import gguf

    size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (outputs, inputs // size, block_bytes), dtype=np.uint8)
    for place in HALVES[kind]:
        numbers = generator.uniform(0.5, 1, blocks.shape[:2]).astype(np.float16)
        numbers *= np.float16(0.1 / SPANS.get(kind, 16))
        blocks[..., place : place + 2] = numbers[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = generator.integers(118, 123, blocks.shape[:2])
    return blocks.reshape(outputs, -1)


def centre(kind: str, blocks: npt.NDArray[np.uint8]) -> None:
    """Give the groups of blocks [outputs, bytes] a mean of nothing, as those of weights have about."""
    import gguf

    middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(kind)
    if middle is None:
        return
    each = blocks.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
    first, second = HALVES[kind]
    scales = np.ascontiguousarray(each[:, first : first + 2]).view(np.float16)
    each[:, second : second + 2] = (scales * np.float16(middle)).view(np.uint8)
    if kind == "Q2_K":  # minimums are so many times their scales
        each[:, :16] = each[:, :16] & 15 | each[:, :16] << 4
    elif kind.endswith("K"):
        each[:, 8:12] = each[:, 4:8]
        each[:, 12:16] = each[:, 12:16] & 15 | each[:, 12:16] << 4


def reference(kind: str, raw: npt.NDArray[np.uint8]) -> Tensor:
    """float32 [outputs, inputs]: the numbers of blocks, by llama.cpp's own package."""
    import gguf

    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def write(file: Path, arch: str, keys: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A GGUF file. A tensor is an array of floats, or (kind, blocks); a bool, int, float, str or list a key's value."""
    import gguf

    writer = gguf.GGUFWriter(file, arch)
    for name, value in keys.items():
        adds = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        adds.get(type(value), writer.add_array)(name, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[1], raw_dtype=gguf.GGMLQuantizationType[tensor[0]])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def in_two_parts(file: Path, folder: Path) -> list[Path]:
    """The parts, in a new `folder`, of a file of a family's keys and of tensors, layers for prediction among them."""
    from slipstream.models.files.gguf import open_gguf

    whole = open_gguf(str(file))
    arch, entries = whole.architecture, {**whole.tensors, **whole.prediction}
    keys = {key: value for key, value in whole.fields.items() if key.startswith(f"{arch}.")}
    keys[f"{arch}.block_count"] += keys.get(f"{arch}.nextn_predict_layers", 0)
    folder.mkdir()
    names, parts = list(entries), []
    for number, own in enumerate((names[:7], names[7:])):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": len(names)}
        tensors: dict[str, Any] = {}
        for name in own:
            entry = entries[name]
            is_coded = entry.format.dtype is None
            tensors[name] = (entry.format.name, entry.raw.numpy()) if is_coded else entry.numbers().numpy()
        part = folder / f"x-{number + 1:05}-of-00002.gguf"
        parts.append(write(part, arch, split | ({} if number else keys), tensors))
    return parts


def requantised(file: Path, plain: Path, kind: str) -> Path:
    """A GGUF file of plain numbers whose matrices are rounded to blocks of this type, keys and tokenizer included."""
    import gguf

    from slipstream.models.files.gguf import open_gguf

    content = open_gguf(str(plain))
    tensors: dict[str, Any] = {}
    for name, entry in content.tensors.items():
        numbers = entry.numbers().numpy() if entry.format.name == "I64" else entry.numbers().float().numpy()
        wanted = gguf.GGMLQuantizationType[kind]
        is_matrix = len(entry.shape) == 2
        tensors[name] = (kind, gguf.quants.quantize(numbers, wanted)) if is_matrix else numbers
    keys = {key: value for key, value in content.fields.items() if key != "general.architecture"}
    return write(file, content.architecture, keys, tensors)


def rounded(tensor: Tensor, kind: str) -> Tensor:
    """What is left of a tensor in such a file: a matrix by blocks of this type, any other as it is."""
    import gguf

    if tensor.ndim != 2 or not tensor.is_floating_point():
        return tensor
    return reference(
        kind, gguf.quants.quantize(tensor.detach().float().numpy(), gguf.GGMLQuantizationType[kind])
    )


SCALES = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
"""Of Gemma 4's routers, which have no name of their own in llama.cpp."""


def write_model(
    file: Path,
    arch: str,
    model: Any,
    keys: dict[str, Any],
    kinds: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """A Transformers model as llama.cpp's converter writes it, in float32 or in random blocks of `kinds`.

    `kinds` gives llama.cpp's name of a tensor (or "" for all matrices) a quantised type; the model gets its numbers.
    `more` are tensors beside the model's.
    """
    import gguf

    config, tensors = model.config, {}
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    is_split = "attention.key_length_mla" in keys
    state = {
        name: part
        for name, tensor in model.state_dict().items()
        for name, tensor in renamed(name, tensor, arch, bool(keys.get("expert_count")))
        for name, part in apart(name, tensor, arch == "gpt-oss", config if is_split else None)
    }
    for seed, (name, tensor) in enumerate(state.items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer, _, scale = name.rpartition(".router.")
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if scale in SCALES:
            theirs = f"blk.{layer.rpartition('.')[2]}.{SCALES[scale]}"
        counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        count = counts.get(name.split(".")[-2])
        rotates = count is not None and arch in PERMUTED
        heads = getattr(config, str(count)) if rotates else 0
        theirs += ".weight" if theirs.endswith("sinks") else ""
        plain = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d")
        left = theirs.endswith(".bias") or any(
            part in theirs for part in plain
        )  # llama.cpp leaves these as they are
        tiled = TILES[arch](name, tensor, config) if arch in TILES else None
        is_matrix = tensor.ndim > 1 and not left
        kind = (kinds or {}).get(theirs, (kinds or {}).get("")) if is_matrix else None
        if kind is not None:
            shape = tensor.shape if tiled is None else tensor.index_select(*tiled).shape
            raw = random_blocks(kind, shape[:-1].numel(), shape[-1], seed)
            centre(kind, raw)
            values = reference(kind, raw).view(shape)
            raw = raw.reshape(*shape[:-1], -1)
            if tiled is not None:
                tensor.index_copy_(*tiled, values)
            else:
                tensor.copy_(unpermuted(values, heads) if heads else values)
            tensors[theirs] = (kind, raw)
            continue
        values = tensor.float() if tiled is None else tensor.float().index_select(*tiled)
        one_more = arch in ("gemma", "gemma2", "gemma3") or (arch in TILES and "linear_attn" not in name)
        if one_more and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("A_log"):
            values = -values.exp()
        if name.endswith(("mamba.A_log", "mamba.D")):
            values = values[:, None]
        if name.endswith("mamba.norm.weight"):
            values = values.view(config.mamba_n_groups, -1)
        tensors[theirs] = (permuted(values, heads) if heads else values).contiguous().numpy()
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": keys.get("attention.head_count_kv") or config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }
    own = {f"{arch}.{key}": value for key, value in (sizes | keys).items() if value is not None}
    return write(file, arch, own, tensors | (more or {}))


PERMUTED = ("llama", "granite", "granitehybrid", "smollm3", "mistral3")
"""Families whose rows of queries and keys llama.cpp's converter permutes."""


def renamed(name: str, tensor: Tensor, arch: str, has_experts: bool) -> list[tuple[str, Tensor]]:
    """A model's tensor under the names that the converter looks up, in the memory of the model's own."""
    layer, _, part = name.rpartition(".shared_mlp.")
    if layer:  # gate before up; without experts it is the plain MLP
        block = "mlp.shared_expert" if has_experts else "feed_forward"
        down = [(f"{layer}.{block}.down_proj.weight", tensor)]
        halves = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
        up = [(f"{layer}.{block}.{half}.weight", own) for half, own in halves]
        return up if part == "input_linear.weight" else down
    name = name.replace(".block_sparse_moe.router.", ".mlp.gate.").replace(".block_sparse_moe.", ".mlp.")
    if arch == "llama4" and name.endswith("experts.gate_up_proj"):
        halves = zip(("gate_proj", "up_proj"), tensor.transpose(1, 2).chunk(2, 1), strict=True)
        return [(name.replace("gate_up_proj", half), own) for half, own in halves]
    if arch == "llama4" and name.endswith("experts.down_proj"):
        return [(name, tensor.transpose(1, 2))]
    if name.endswith("in_proj_qkvz.weight"):  # the rows of each, by `of_each_kind`
        return [(name.replace("qkvz", part), tensor) for part in ("qkv", "z")]
    return [(name, tensor)]


def of_each_kind(name: str, tensor: Tensor, config: Any) -> tuple[int, Tensor] | None:
    """How llama.cpp's converter takes apart Qwen3-Next's matrix of queries, keys, values and gates, which has the rows
    of these four by heads of keys: see `tiles`."""
    part = name.partition(".linear_attn.")[2].partition(".")[0]
    if part not in ("in_proj_qkv", "in_proj_z"):
        return None
    keys, width = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // keys * config.linear_value_head_dim
    rows = torch.arange(len(tensor)).view(keys, -1).split([width, width, values, values], dim=1)
    kinds = rows[:3] if part == "in_proj_qkv" else rows[3:]
    return 0, torch.cat([each.flatten() for each in kinds])


def in_turns(both: Tensor) -> dict[str, Tensor]:
    return {"gate_proj": both[..., ::2], "up_proj": both[..., 1::2]}


def apart(name: str, tensor: Tensor, is_transposed: bool, latent: Any) -> list[tuple[str, Tensor]]:
    """A model's tensor as llama.cpp has it, in the memory of the model's own: gate and up of experts are two but
    for Gemma's, and so is, by the configuration `latent`, what makes keys and values of DeepSeek's latent vectors."""
    stem, _, part = name.partition(".experts.")
    if part.endswith("_bias"):  # GPT-OSS's, which has inputs before outputs, and gate and up in turns
        biases = {"down_proj": tensor} if part == "down_proj_bias" else in_turns(tensor)
        return [(f"{stem}.experts.{own}.bias", each) for own, each in biases.items()]
    if tensor.ndim == 3 and is_transposed:
        weights = {"down_proj": tensor} if part == "down_proj" else in_turns(tensor)
        return [(f"{stem}.experts.{own}.weight", each.transpose(1, 2)) for own, each in weights.items()]
    if part == "gate_up_proj" and name.split(".")[-4] != "layers":
        halves = tensor.chunk(2, dim=1)
        return [
            (f"{stem}.experts.{half}.weight", own)
            for half, own in zip(("gate_proj", "up_proj"), halves, strict=True)
        ]
    if name.endswith("kv_b_proj.weight") and latent is not None:
        heads = tensor.view(latent.num_attention_heads, -1, tensor.shape[1])
        keys, values = heads.split([latent.qk_nope_head_dim, latent.v_head_dim], 1)
        return [
            (name.replace("kv_b", "k_b"), keys.transpose(1, 2)),
            (name.replace("kv_b", "v_b"), values),
        ]
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return [(name, tensor.squeeze(1))]
    if name.endswith("dt_bias"):
        return [(name.replace("_bias", "_proj.bias"), tensor)]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("gate.moe_statics", "moe_statics").replace("_bias", ".bias"), tensor.flatten())]
    return [(f"{name}.weight" if part or name.endswith("layer_scalar") else name, tensor)]


def tiles(name: str, tensor: Tensor, config: Any) -> tuple[int, Tensor] | None:
    """How llama.cpp's converter turns the heads of values of Qwen 3.5's recurrent layers: along which dimension, and
    which of the model's each is. The model has those of one key beside each other; llama.cpp repeats the keys."""
    part = name.partition(".linear_attn.")[2].partition(".")[0]
    keys, width = config.linear_num_key_heads, config.linear_value_head_dim
    small = ("in_proj_a", "in_proj_b", "A_log", "dt_proj")
    if part not in ("in_proj_qkv", "in_proj_z", "conv1d", "out_proj", *small):
        return None
    along = int(part == "out_proj")
    before = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv", "conv1d") else 0
    width = 1 if part in small else width
    values = torch.arange(before, tensor.shape[along]).view(keys, -1, width).transpose(0, 1)
    return along, torch.cat([torch.arange(before), values.flatten()])


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As llama.cpp's converter permutes the projections of Llamas' queries and keys."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """The way back of `permuted`."""
    shape = (heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


TILES = {"qwen35": tiles, "qwen35moe": tiles, "qwen3next": of_each_kind}
