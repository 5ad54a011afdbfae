"""Enlarge a T5 or Whisper checkpoint without changing its function, as `target` does a Llama.

    python -m recipes.cost_expanded encoder-decoder SOURCE TARGET --times-wider 6 --decoder-layers 12

A hidden state of the result is the source's, so many times in a row: mean and mean square stay, so that its norms need
no correction. What writes into the state is repeated; what reads it reads the first copy. New heads and intermediate
units read all copies by random weights and have zeros where they would write, and so has an added layer. The output
layer adds up the copies, which the norm before it divides out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from recipes.cost_expanded.target import check_new, copy_other_files, place, share, source_layer
from slipstream.errors import ConfigError, ModelError

WRITERS = ("o", "wo", "out_proj", "fc2")
READERS = ("q", "k", "v", "wi", "wi_0", "wi_1", "q_proj", "k_proj", "v_proj", "fc1")
_DECODER_LAYER = re.compile(r"(decoder\.(?:block|layers)\.)(\d+)\.")


@dataclass(frozen=True)
class Growth:
    """How much larger a checkpoint becomes."""

    times_wider: int = 1
    """Hidden size and number of heads, of encoder and decoder; a head keeps its width."""
    decoder_layers: int | None = None
    """None leaves the number as it is."""
    intermediate_size: int | None = None
    """Of encoder and decoder; None keeps its ratio to the hidden size."""

    def config(self, config: Any) -> Any:
        """The configuration of the enlarged model; raises `ConfigError` where something would shrink."""
        is_t5, times = config.model_type == "t5", self.times_wider
        names = ("num_heads",) if is_t5 else ("encoder_attention_heads", "decoder_attention_heads")
        widths = ("d_ff",) if is_t5 else ("encoder_ffn_dim", "decoder_ffn_dim")
        depth = "num_decoder_layers" if is_t5 else "decoder_layers"
        changes = {name: getattr(config, name) * times for name in ("d_model", *names)}
        changes |= {name: self.intermediate_size or getattr(config, name) * times for name in widths}
        changes[depth] = self.decoder_layers or getattr(config, depth)
        if shrunk := [name for name, size in changes.items() if size < getattr(config, name)]:
            said = ", ".join(f"{name} {changes[name]} is below {getattr(config, name)}" for name in shrunk)
            raise ConfigError(f"cannot enlarge: {said}")
        values = {name: value for name, value in config.to_dict().items() if name not in ("dtype",)}
        return type(config)(**values | changes)


def expand(source: str | Path, target: str | Path, growth: Growth, seed: int = 0) -> int:
    """Write `source` enlarged into the new folder `target`, in float32; returns the number of its parameters.

    Raises `ModelError` for a checkpoint of another kind, or a folder that is not empty.
    """
    source, target = Path(source), Path(target)
    check_new(target)
    config = _checked(source)
    auto: Any = AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForSeq2SeqLM
    old = auto.from_pretrained(source, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        new = auto.from_config(growth.config(config), dtype=torch.float32)
        _fill(new, old, growth.times_wider)
    num_parameters = sum(parameter.numel() for parameter in new.parameters())
    new.config.cost_expanded = {"from": source.resolve().name, "parameters": num_parameters}
    new.generation_config = old.generation_config
    new.save_pretrained(target)
    copy_other_files(source, target)
    share(target)
    return num_parameters


def _checked(source: Path) -> Any:
    if not (source / "config.json").is_file():
        raise ModelError(f"{str(source)!r} is no folder of a checkpoint")
    kind = json.loads((source / "config.json").read_text()).get("model_type")
    if kind not in ("t5", "whisper"):
        raise ModelError(f"{str(source)!r} holds a {kind} model; only t5 and whisper can be enlarged so")
    config = AutoConfig.from_pretrained(source)
    if getattr(config, "scale_embedding", False):
        raise ModelError(f"{str(source)!r} scales its embedding by its width, so it cannot be widened")
    return config


def _fill(new: Any, old: Any, times: int) -> None:
    """Write the old weights into the new model, and zeros wherever new weights would change its state."""
    held = dict(old.named_parameters())
    small, large = _depth(held), _depth(dict(new.named_parameters()))
    for name, parameter in new.named_parameters():
        kind = name.split(".")[-2]
        found = held.get(_source_name(name, small, large))
        if found is None:
            if kind in WRITERS:
                parameter.zero_()
        elif kind == "relative_attention_bias":  # [buckets, heads]
            parameter[:, : found.shape[1]] = found
        elif kind in WRITERS:
            _write(parameter, found, times)
        elif kind in READERS:
            _read(parameter, found)
        elif kind == "conv2" and found.ndim == 3:  # [out, in, 3]: it reads the state and writes it
            parameter.zero_()
            parameter[:, : found.shape[1]] = found.repeat(times, 1, 1)
        elif kind.startswith("conv"):
            parameter.copy_(found.repeat(times, *[1] * (found.ndim - 1)))
        else:  # embeddings and norms
            parameter.copy_(found.repeat(*[1] * (found.ndim - 1), times))
    decoder = new.get_decoder()
    last = decoder.final_layer_norm if hasattr(decoder, "final_layer_norm") else decoder.layer_norm
    is_scaled = getattr(new.config, "scale_decoder_outputs", False)  # by 1 / sqrt(hidden size)
    for parameter in last.parameters():
        parameter /= times**0.5 if is_scaled else times


def _depth(named: dict[str, Any]) -> int:
    """Layers of the decoder."""
    return 1 + max(int(found[2]) for name in named if (found := _DECODER_LAYER.search(name)))


def _source_name(name: str, small: int, large: int) -> str:
    """What the source calls this parameter; a name that it has not for one of an added layer."""
    found = _DECODER_LAYER.search(name)
    if found is None or "relative_attention_bias" in name:  # the first layer's, for all layers
        return name
    return _DECODER_LAYER.sub(rf"\g<1>{source_layer(int(found[2]), small, large)}.", name)


def _write(new: Tensor, old: Tensor, times: int) -> None:
    """A matrix [hidden, in] or a bias [hidden] whose outputs are added to every copy of the state."""
    if old.ndim == 1:
        new.copy_(old.repeat(times))
        return
    new.zero_()
    new[:, : old.shape[1]] = old.repeat(times, 1)


def _read(new: Tensor, old: Tensor) -> None:
    """A matrix [out, hidden] that reads the first copy, or its bias [out]; the random weights of new outputs stay."""
    if old.ndim == 1:
        new[: len(old)] = old
    else:
        place(new, old)
