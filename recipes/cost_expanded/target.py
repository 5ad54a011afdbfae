"""Enlarge a Llama checkpoint without changing its function, to measure speed at a larger size without training.

    python -m recipes.cost_expanded target SOURCE TARGET --parameters 300M

The result takes as much time and memory as a trained model of its size and generates the source's text, with
the same draft acceptance, so that quality and speed can be measured on one pair of models. The added weights
compute on real numbers and contribute zero: new layers read the new part of the hidden state, which stays zero;
new heads and new intermediate units have a zero column in `o_proj` and `down_proj`. No two matrices of a wider
model are equal, since an engine that stores equal constants once would read fewer bytes. RMSNorm divides by the
mean square over all dimensions, which the zeros lower by h/H; its weights are scaled by sqrt(h/H) and its epsilon
by h/H.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_config, load_model, load_tokenizer
from slipstream.models.files.lora import has_adapter

IDEAL_LAYERS = 24
INTERMEDIATE_RATIO = 2.75
"""Intermediate over hidden size where only a number of parameters is given: 1024 goes with 2816, as usual."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama model that can be enlarged."""

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """A model's own sizes."""
        return cls(
            config.hidden_size,
            config.num_hidden_layers,
            config.intermediate_size,
            config.num_attention_heads,
        )

    def layer_parameters(self, config: Any) -> int:
        """Weights of one layer, with the heads' width and sharing of `config`."""
        query = self.num_heads * config.head_dim
        key_value = 2 * query * config.num_key_value_heads // config.num_attention_heads
        weights: int = self.hidden_size * (2 * query + key_value + 3 * self.intermediate_size + 2)
        return weights

    def parameters(self, config: Any) -> int:
        """Weights of the whole model: the layers, the last norm and the embeddings."""
        others: int = self.hidden_size * (config.vocab_size * (1 if config.tie_word_embeddings else 2) + 1)
        return self.num_layers * self.layer_parameters(config) + others


def expand(
    source: str | Path,
    target: str | Path,
    *,
    target_parameters: int | None = None,
    dtype: str = "float32",
    seed: int = 0,
    **sizes: int | None,
) -> int:
    """Write an enlarged checkpoint of the same function to the folder `target`; returns its parameter count.

    `sizes` are fields of `ModelShape`; those that are not given, or None, stay as they are, or follow from
    `target_parameters`. Tokenizer files are copied along, and the configuration says `cost_expanded`. Raises
    `ConfigError` for sizes that cannot be reached or add nothing, and `ModelError` for a source that is not a plain
    Llama checkpoint or a target that is not empty.
    """
    source, target = Path(source), Path(target)
    config = check_source(source)
    check_new(target)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype must be float32 or bfloat16, got {dtype!r}")
    small = ModelShape.of(config)
    default = small if target_parameters is None else shape_for(config, target_parameters)
    large = replace(default, **{name: size for name, size in sizes.items() if size is not None})
    _check_shapes(config, small, large)
    if large == small:
        raise ConfigError(
            "nothing would be larger than in the source; give a number of parameters or larger sizes"
        )

    old = load_model(str(source), dtype="float32", device="cpu", canary=False, pack=False).model
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        # In the stored type from the start: 8 G weights would take 32 GB otherwise. What is not filled stays random.
        llama: Any = LlamaForCausalLM
        new = llama._from_config(_large_config(config, large), dtype=getattr(torch, dtype))
        _fill(new, old, small, large)
    num_parameters: int = sum(parameter.numel() for parameter in new.parameters())
    new.config.cost_expanded = {"from": source.resolve().name, "parameters": num_parameters}
    new.save_pretrained(target)
    copy_other_files(source, target)
    share(target)
    return num_parameters


def shape_for(config: Any, target_parameters: int) -> ModelShape:
    """A usual shape of about `target_parameters` weights: close to 24 layers, hidden size in steps of 128."""
    best: ModelShape | None = None
    for least in _usual_shapes(config):
        others = least.parameters(config) - least.num_layers * least.layer_parameters(config)
        num_layers = round((target_parameters - others) / least.layer_parameters(config))
        shape = replace(least, num_layers=num_layers)
        if num_layers >= least.num_layers and (best is None or _oddity(shape) < _oddity(best)):
            best = shape
    if best is None:
        least_parameters = min(shape.parameters(config) for shape in _usual_shapes(config))
        raise ConfigError(
            f"no usual shape of {target_parameters:,} parameters is larger than the source, which has "
            f"{ModelShape.of(config).parameters(config):,}; ask for at least {least_parameters:,}"
        )
    return best


def _usual_shapes(config: Any) -> Iterator[ModelShape]:
    """Every hidden size that can hold the source, with no more layers than the source has."""
    small = ModelShape.of(config)
    for hidden_size in range(128, 16385, 128):
        intermediate_size = int(hidden_size * INTERMEDIATE_RATIO)
        shape = ModelShape(hidden_size, small.num_layers, intermediate_size, hidden_size // config.head_dim)
        if shape.num_heads and not misfits(config, small, shape):
            yield shape


def _oddity(shape: ModelShape) -> int:
    """Distance of its depth from the ideal."""
    return abs(shape.num_layers - IDEAL_LAYERS)


def check_new(folder: Path) -> None:
    """Raise `ModelError` unless the output folder is new or empty."""
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{str(folder)!r} is not empty; give a new folder")


def check_source(source: Path) -> Any:
    """The configuration of a model that can be enlarged; raises `ModelError` for any other."""
    if not source.is_dir() and (source.suffix != ".gguf" or not source.is_file()):
        raise ModelError(f"{str(source)!r} is neither a folder nor a GGUF file")
    config = load_config(str(source))
    if config.model_type != "llama":
        raise ModelError(f"{str(source)!r} holds a {config.model_type} model; only llama can be enlarged")
    if config.attention_bias or config.mlp_bias or getattr(config, "quantization_config", None):
        raise ModelError(f"{str(source)!r} has biases or quantised weights, which cannot be enlarged")
    if has_adapter(source):
        raise ModelError(f"{str(source)!r} has a LoRA adapter next to its weights; merge it into them first")
    return config


def misfits(config: Any, small: ModelShape, large: ModelShape) -> list[str]:
    """Reasons why a model of sizes `small` cannot be part of one of sizes `large`."""
    faults = [
        f"{name} {getattr(large, name)} is below the source's {getattr(small, name)}"
        for name in ("hidden_size", "num_layers", "intermediate_size", "num_heads")
        if getattr(large, name) < getattr(small, name)
    ]
    group = config.num_attention_heads // config.num_key_value_heads
    if large.num_heads % group:
        faults.append(
            f"num_heads {large.num_heads} is not a multiple of {group}, as in the source's key heads"
        )
    if large.hidden_size % large.num_heads:
        faults.append(f"hidden_size {large.hidden_size} is not a multiple of num_heads {large.num_heads}")
    return faults


def _check_shapes(config: Any, small: ModelShape, large: ModelShape) -> None:
    if faults := misfits(config, small, large):
        raise ConfigError(f"cannot enlarge: {'; '.join(faults)}")


def _large_config(config: Any, large: ModelShape) -> LlamaConfig:
    values = {key: value for key, value in config.to_dict().items() if key not in ("dtype", "architectures")}
    group = config.num_attention_heads // config.num_key_value_heads
    values.update(
        hidden_size=large.hidden_size,
        num_hidden_layers=large.num_layers,
        intermediate_size=large.intermediate_size,
        num_attention_heads=large.num_heads,
        num_key_value_heads=large.num_heads // group,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps * config.hidden_size / large.hidden_size,
    )
    return LlamaConfig(**values)


def _fill(new: Any, old: Any, small: ModelShape, large: ModelShape) -> None:
    """Write the old weights into the new model, and zeros wherever new weights would change its state."""
    place(new.model.embed_tokens.weight, old.model.embed_tokens.weight)
    if not old.config.tie_word_embeddings:
        place(new.lm_head.weight, old.lm_head.weight)
    place_norm(new.model.norm, old.model.norm)
    for index, layer in enumerate(new.model.layers):
        source_index = source_layer(index, small.num_layers, large.num_layers)
        if source_index is None:
            _silence(layer, small, large)
            continue
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
        source = old.model.layers[source_index]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            place(getattr(layer.self_attn, name).weight, getattr(source.self_attn, name).weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            place(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight)
        for name in ("input_layernorm", "post_attention_layernorm"):
            place_norm(getattr(layer, name), getattr(source, name))


def _silence(layer: Any, small: ModelShape, large: ModelShape) -> None:
    """Make a new layer contribute zero: its values are computed from the zero part of the state only."""
    if large.hidden_size > small.hidden_size:
        layer.self_attn.v_proj.weight[:, : small.hidden_size] = 0
        layer.mlp.up_proj.weight[:, : small.hidden_size] = 0
    else:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)


def source_layer(index: int, small: int, large: int) -> int | None:
    """The old layer at new index `index`; None for an added one. The old layers are spread evenly."""
    before, after = index * small // large, (index + 1) * small // large
    return before if after > before else None


def place(new: Tensor, old: Tensor) -> None:
    """Write `old` into the top left corner, with zeros beside it; the random weights below are kept."""
    rows, columns = old.shape
    new[:rows] = 0
    new[:rows, :columns] = old


def place_norm(new: Any, old: Any) -> None:
    """Scale the weights to compensate the zeros in the mean square; `rms_norm_eps` must be scaled likewise."""
    small, large = len(old.weight), len(new.weight)
    new.weight[:small] = old.weight * (small / large) ** 0.5


def copy_other_files(source: Path, target: Path) -> None:
    """The tokenizer's files, the generation settings, and whatever else is not weights or configuration. Out of a GGUF
    file only the tokenizer is written."""
    if source.is_file():
        load_tokenizer(str(source)).save_pretrained(target)
        return
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copyfile(file, target / file.name)


def share(folder: Path) -> None:
    """Give the weights, which are written readable for their owner only, the configuration's permissions."""
    mode = (folder / "config.json").stat().st_mode & 0o777
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


def parse_count(text: str) -> int:
    """`300M`, `1G` or plain digits."""
    units = {"K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        return round(float(number) * unit)
    except ValueError:
        raise ConfigError(f"cannot read {text!r} as a number of parameters; write 300M or 1G") from None
