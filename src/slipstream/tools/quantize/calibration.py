"""Reads text to calibrate on, runs a model layer by layer over it, and rounds each layer on the inputs that it sees.

A layer's inputs come from the layers before it as they were rounded, so that it can make good for them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.assets import sample_prompts
from slipstream.errors import ConfigError, ModelError, RequestError
from slipstream.text.jsonl import check_messages, read_rows
from slipstream.text.prompts import encode_conversation
from slipstream.tools.quantize.rounding import RoundedWeight, lost_share


def read_texts(file: Path | None) -> list[Any]:
    """The `messages`, `text` or `prompt` of JSON lines; without a file, the bundled sample conversations.

    Raises `RequestError`, which names the line, for one that has none of them.
    """
    if file is None:
        return [row["messages"] for row in sample_prompts()]
    found: list[Any] = []
    for where, row in read_rows(file):
        text = row.get("text", row.get("prompt"))
        if not isinstance(text, str) and "messages" not in row:
            raise RequestError(f"{where} has no messages, text or prompt to calibrate on")
        found.append(text if isinstance(text, str) else check_messages(row["messages"], where))
    if not found:
        raise ConfigError(f"{file} is empty; write one JSON object with messages, text or prompt a line")
    return found


def as_rows(tokenizer: Any, texts: Seq[Any], num_rows: int, length: int, seed: int) -> Tensor:
    """int64 [rows, length]: the texts as the chat template writes them, behind one another in an order drawn by `seed`.

    Fewer than `num_rows` where there is not so much text; one at least, of all of it again where it is shorter.
    Raises `ConfigError` for texts without a token.
    """
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens: list[int] = []
    for number in order:
        text = texts[number]
        tokens += _encoded(tokenizer, text)
        if len(tokens) >= num_rows * length:
            break
    if not tokens:
        raise ConfigError("the texts to calibrate on have no tokens")
    if len(tokens) < length:
        tokens = (tokens * -(-length // len(tokens)))[:length]
    count = min(num_rows, len(tokens) // length)
    return torch.tensor(tokens[: count * length]).view(count, length)


def _encoded(tokenizer: Any, text: Any) -> list[int]:
    if isinstance(text, str):
        ids: list[int] = tokenizer(text, add_special_tokens=True)["input_ids"]
        return ids
    return encode_conversation(tokenizer, text)


Round = Callable[[Tensor, Tensor | None], RoundedWeight]
"""(weight [out, in], correlations of its inputs [in, in]) -> the weight rounded."""


@dataclass(frozen=True, slots=True)
class LayerDone:
    """One decoder layer whose linear layers are rounded."""

    number: int
    """From 1."""
    count: int
    weights: dict[str, RoundedWeight]
    """By the linear layer's name in the model."""
    lost: dict[str, float]
    """See `lost_share`; by the same names. Empty without calibration."""


def decoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The model's list of decoder layers and its dotted name; raises `ConfigError` where it is not found."""
    count = getattr(model.config, "num_hidden_layers", None)
    found = [
        (name, child)
        for name, child in model.named_modules()
        if isinstance(child, nn.ModuleList) and len(child) == count and linear_layers(child)
    ]
    if not found:
        raise ConfigError("the model has no list of decoder layers with linear layers in them to quantise")
    return found[0]


@torch.inference_mode()
def round_layers(model: nn.Module, rows: Tensor | None, round_weight: Round) -> Iterator[LayerDone]:
    """Round every linear layer of the decoder's layers; the model's own weights become the rounded ones.

    `rows` int64 [texts, length] is the text to calibrate on, a token everywhere; None rounds without.
    """
    name, layers = decoder_layers(model)
    inputs, arguments = ([], []) if rows is None else _first_inputs(model, layers, rows)
    for number, layer in enumerate(layers):
        kind = next(layer.parameters()).dtype
        layer.float()
        linears = {f"{name}.{number}.{part}": linear for part, linear in linear_layers(layer).items()}
        seen = _correlations(layer, linears, inputs, arguments[number]) if inputs else {}
        weights, lost = {}, {}
        for part, linear in linears.items():
            try:
                found = round_weight(linear.weight, seen.get(part))
            except ModelError as error:
                raise ModelError(f"{part} cannot be rounded: {error}") from None
            if part in seen:
                lost[part] = lost_share(linear.weight, found, seen[part])
            linear.weight.copy_(found.dequantised())
            weights[part] = found
        inputs = [_hidden(layer(hidden, **arguments[number])) for hidden in inputs]
        layer.to(kind)
        yield LayerDone(number + 1, len(layers), weights, lost)


def unrounded(model: nn.Module) -> dict[str, int]:
    """Bytes of the matrices in the decoder's layers that are no plain linear layer's, by the modules that have them.

    They are those of experts in stacks, and of their routers.
    """
    name, layers = decoder_layers(model)
    found: dict[str, int] = {}
    for part, module in layers.named_modules():
        matrices = [each for each in module.parameters(recurse=False) if each.ndim > 1]
        if matrices and type(module) is not nn.Linear:
            found[f"{name}.{part}"] = sum(each.nbytes for each in matrices)
    return found


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """The plain ones within a module, by name."""
    return {name: part for name, part in module.named_modules() if type(part) is nn.Linear}


def _hidden(output: Any) -> Tensor:
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


class _Recorder(nn.Module):
    """Replaces a layer for a while: hands its input on, and keeps what else it was called with."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # not a child: its weights must not be seen twice
        self.calls: list[tuple[Tensor, dict[str, Any]]] = []

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        self.calls.append((hidden_states, arguments))
        return hidden_states

    def __getattr__(self, name: str) -> Any:
        """Some models read a layer's kind."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._layer[0], name)


def _first_inputs(
    model: nn.Module, layers: nn.ModuleList, rows: Tensor
) -> tuple[list[Tensor], Seq[dict[str, Any]]]:
    """The first layer's inputs, one text each, and each layer's other arguments, which all texts of a length share."""
    kept = list(layers)
    recorders = [_Recorder(layer) for layer in kept]
    base: Any = getattr(model, "base_model", model)
    try:
        for number, recorder in enumerate(recorders):
            layers[number] = recorder
        for row in rows:
            base(input_ids=row[None], use_cache=False)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"the model's layers cannot be run one by one: {str(error).splitlines()[0]}"
        ) from None
    finally:
        for number, layer in enumerate(kept):
            layers[number] = layer
    arguments = [_floats(recorder.calls[0][1]) for recorder in recorders]
    return [hidden.float() for hidden, _ in recorders[0].calls], arguments


def _floats(value: Any) -> Any:
    """The same arguments for a layer that computes in float32."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _floats(part) for key, part in value.items()}
    return tuple(_floats(part) for part in value) if isinstance(value, tuple) else value


def _correlations(
    layer: nn.Module, linears: dict[str, nn.Linear], inputs: Seq[Tensor], arguments: dict[str, Any]
) -> dict[str, Tensor]:
    """float32 [in, in] by linear layer: the mean outer product of the rows that it reads. Layers that read the same
    rows share one; one that read none (an expert that nothing chose) has none."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    last: list[tuple[Tensor, Tensor]] = []

    def reader(name: str) -> Callable[..., None]:
        def read(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            if last and last[0][0] is given[0]:
                product = last[0][1]
            else:
                flat = given[0].reshape(-1, given[0].shape[-1])
                product = flat.T @ flat
                last[:] = [(given[0], product)]
            counts[name] = counts.get(name, 0) + given[0].numel() // given[0].shape[-1]
            sums[name] = sums[name] + product if name in sums else product

        return read

    handles = [linear.register_forward_pre_hook(reader(name)) for name, linear in linears.items()]
    try:
        for hidden in inputs:
            layer(hidden, **arguments)
    finally:
        for handle in handles:
            handle.remove()
    return {name: total / counts[name] for name, total in sums.items() if counts[name]}
