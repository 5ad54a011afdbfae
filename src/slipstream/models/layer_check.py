"""Whether the fused decoder computes a model's layers: each by itself, on the states that Transformers gives it.

While the Transformers model runs over the trial text, every layer is packed in floating point, run by the kernels on
the same states, and dropped again. So a wrong name in a family's description, norm, scale, cap or rotary embedding is
found in the layer where it is, whatever format the model is packed in afterwards. Errors do not add up over layers, and
no row is rounded. `WeightCheck` collects what the packed weights must be on the way.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.kv.pool import KVPool, LayerShape
from slipstream.models.cpu.layer_trial import NUM_TRIAL_LAYERS, LayerTrial
from slipstream.models.cpu.pages import forget, trim_heap
from slipstream.models.cpu.structs import LayerStruct, NormStruct
from slipstream.models.families.inputs import GivenInputs
from slipstream.models.families.parts import LayerParts, outputs
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.rows import RowGroup
from slipstream.models.support import unsupported
from slipstream.models.trial import num_trial_slots, trial_passes
from slipstream.models.weight_check import WeightCheck

_TOLERANCE = 1e-3
"""Largest error of what a layer adds to its states, of what it adds. float32 arithmetic is off by some 1e-6."""
_PACKED_TOLERANCE = 0.5
"""The same of half of the rows, where weights and rows are rounded: usual are 0.01 to 0.1. That weights are right,
`WeightCheck` knows; this is whether they are used."""
_HEAD_OUTPUTS = 512
"""So many logits are compared: the output layer's own weights are compared whole."""
_NUM_TIES = 3
"""Rows of a layer with experts that may be wrong: a near-tie of its router may send a row to another expert."""

_SAME = ("attention_norm", "mlp_norm", "attended_norm", "mlp_out_norm", "query_norm", "key_norm", "sinks")
_BESIDE = ("router_norm", "input_norm", "mlp_out_norm", "output_norm", "scales")
_VECTORS = {
    **{name: name for name in _SAME},
    "inputs.norm": "input_norm",
    **{f"beside.{name}": f"mixture.{name}" for name in _BESIDE},
}
"""What no format rounds: where `LayerParts` has it, and where the struct."""
_NUMBERS = (
    "reach",
    "rotary",
    "num_kv_heads",
    "head_dim",
    "rotary_dim",
    "projected",
    "norms_values",
    "scale",
)


class LayerCheck:
    """Compares the layers of one model; see `following`."""

    def __init__(
        self,
        config: Any,
        trial: LayerTrial,
        shapes: Sequence[LayerShape],
        weights: WeightCheck,
        tokens: Sequence[int],
        far: Sequence[int],
    ) -> None:
        """`tokens` are those of the near text, `far` are the positions at which it is repeated, see `trial_passes`."""
        self._config, self._trial, self._shapes, self._weights = config, trial, shapes, weights
        self._tokens, self._far = tokens, far
        self.states: list[Tensor] = []
        """float32 [tokens, hidden]: what each layer is given, and what the last one makes."""
        self.given: list[GivenInputs | None] = []
        """What each layer is given besides."""
        self._pools: dict[int, KVPool] = {}
        """The entries of layers that others read."""
        self._inputs: Tensor | None = None
        """float32 [tokens, layers * width]: `given`, as the kernels compute it."""
        self._rest: list[LayerRest] = []
        self._final_norm: list[bytes | None] = []

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Compare each layer when the pass of the Transformers model within the body has left it.

        Raises `UnsupportedModelError` that names the layer. Layers that a file holds quantised are widened one at a
        time, once for the pass and the comparison.
        """
        handles = []
        for number, layer in enumerate(self._trial.layers):
            visit = _Visit(self, number)
            handles.append(layer.register_forward_pre_hook(visit.before, with_kwargs=True))
            handles.append(layer.register_forward_hook(visit.behind, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def check_logits(self, logits: Tensor) -> None:
        """Compare the final norm and the first outputs of the output layer with `logits` [tokens, vocab]."""
        head, states = self._trial.head, self.states[-1]
        count = min(_HEAD_OUTPUTS, head.out_features)
        part = outputs(head, 0, count)
        plain = part.widened() if isinstance(part, GroupedLinear) else part
        ours = self._trial.logits(plain, states)
        self._final_norm = _numbers(self._trial.final_norm, states.shape[1])
        wanted = logits[:, :count]
        spread = (wanted - wanted.mean(dim=-1, keepdim=True)).norm(dim=-1)
        self._refuse("its output layer", (ours - wanted).norm(dim=-1) / spread.clamp_min(1e-6), _TOLERANCE)

    def check_packed(self, layers: Sequence[LayerStruct], final_norm: NormStruct) -> None:
        """Compare the layers as they were packed, with weights and rows that are rounded, and the norm behind them."""
        if _numbers(final_norm, self.states[-1].shape[1]) != self._final_norm:
            raise unsupported(self._config, "the final norm is not the checkpoint's as it is packed")
        for number, (layer, rest) in enumerate(zip(layers, self._rest, strict=True)):
            odd = rest.odd_part(layer)
            if odd is not None:
                raise unsupported(
                    self._config, f"{odd} of layer {number} is not the checkpoint's as it is packed"
                )
            errors = self._errors(layer, number)
            self._refuse(f"its layer {number} as it is packed", errors.median()[None], _PACKED_TOLERANCE)

    def compare(self, number: int, layer: nn.Module, was_grouped: set[int]) -> None:
        """A layer whose weights are plain numbers, between the last two of `states`."""
        parts = self._trial.family.layer_parts(layer)
        packed = self._trial.pack(number, parts)
        self._compare_inputs(number, packed)
        errors = self._errors(packed, number)
        if parts.experts is not None:
            errors = errors.sort().values[:-_NUM_TIES]
        self._refuse(f"its layer {number}", errors, _TOLERANCE)
        self._weights.add_layer(parts, was_grouped)
        self._rest.append(LayerRest(packed, parts))

    def take_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take what the next layer is given besides the states, from the arguments that it is called with."""
        names = self._trial.family.inputs
        given = None if names is None else args[1] if len(args) > 1 else kwargs[names.argument]
        self.given.append(None if given is None else GivenInputs.of(given, NUM_TRIAL_LAYERS))

    def _compare_inputs(self, number: int, packed: LayerStruct) -> None:
        """Compare what a layer is given besides the states; `packed` is the one that is compared."""
        given, parts = self.given[number], self._trial.input_parts
        if given is None or parts is None:
            return
        if self._inputs is None:
            states = self.states[0]
            tokens = [*self._tokens] * (len(states) // len(self._tokens))
            self._inputs = self._trial.inputs(parts, tokens, states, packed)
            self._weights.add_inputs(parts)
        ours, theirs = self._inputs.view(len(self._inputs), -1, given.width)[:, number], given.of_layer
        errors = _relative(ours, theirs)
        self._refuse(f"what its layer {number} is given", errors, _TOLERANCE)

    def check_packed_inputs(self, ours: Tensor) -> None:
        """Compare rows [near tokens, layers * width] that packed weights have given."""
        given = [each.of_layer for each in self.given if each is not None]
        theirs = torch.cat(given, dim=1)[: len(ours)]
        errors = _relative(ours, theirs)
        self._refuse("what its layers are given, as it is packed,", errors.median()[None], _PACKED_TOLERANCE)

    def leave(self, layer: nn.Module) -> None:
        """Give back what the comparison of a layer took: its packed copy, and pages of the file that were read."""
        self._trial.clear()
        for parameter in layer.parameters():
            forget(parameter)
        trim_heap()

    def _errors(self, layer: LayerStruct, number: int) -> Tensor:
        """[wanted rows]"""
        given, made = self.states[number], self.states[number + 1]
        passes = trial_passes(range(len(given)), len(given) - 1, range(num_trial_slots()), self._far)
        places = [place for each in passes for place in each.places]
        groups = [each.groups for each in passes]
        ours = self._trial.outputs(layer, self._pool(number, groups), given, groups, self.given[number])
        added = (made - given)[places].norm(dim=-1)
        # What a layer adds to large states has no more digits than they have.
        size = torch.maximum(added, 1e-3 * made[places].norm(dim=-1)).clamp_min(1e-6)
        errors: Tensor = (ours - made[places]).norm(dim=-1) / size
        return errors

    def _pool(self, number: int, passes: Sequence[Sequence[RowGroup]]) -> KVPool:
        """What a layer keeps its entries in, or the entries that another one has kept of these passes.

        No pass writes over those of an earlier one.
        """
        shape = self._shapes[number]
        if shape.source is not None:
            return self._pools[shape.source]
        last = max(group.slots[-1] for groups in passes for group in groups)
        pool = KVPool([shape], last + 1, torch.float32, torch.device("cpu"))
        if any(other.source == number for other in self._shapes):
            self._pools[number] = pool
        return pool

    def _refuse(self, what: str, errors: Tensor, bound: float) -> None:
        error = float(errors.max())
        if not error <= bound:  # NaN is refused too
            raise unsupported(
                self._config,
                f"{what} is not what the fused decoder computes: over a dozen rows it is off by {error:.2g} of what it "
                'adds; cpu_kernels="torch" runs it without the decoder',
            )


class LayerRest:
    """What a packed layer has besides matrices, none of which any format rounds: norms, sinks, window and rotation."""

    def __init__(self, layer: LayerStruct, parts: LayerParts) -> None:
        """`layer` is packed of `parts`, and only read here."""
        found = {name: _found(parts, name) for name in _VECTORS}
        self._widths = {name: vector.numel() for name, vector in found.items() if vector is not None}
        self._found = self._of(layer)

    def odd_part(self, layer: LayerStruct) -> str | None:
        """What another packing of the layer has otherwise; None where it is the same, bit for bit."""
        found = self._of(layer)
        return next((name for name, value in self._found.items() if found[name] != value), None)

    def _of(self, layer: LayerStruct) -> dict[str, Any]:
        found: dict[str, Any] = {name: getattr(layer, name) for name in _NUMBERS}
        for name, field_name in _VECTORS.items():
            field = attrgetter(field_name)(layer)
            field = field if isinstance(field, NormStruct) else NormStruct(weight=field)
            found[name] = _numbers(field, self._widths.get(name, 0))
        return found


def _found(parts: LayerParts, name: str) -> Tensor | None:
    """The vector of this name in `_VECTORS`; None where the layer has none."""
    found: Any = parts
    for each in name.split("."):
        found = None if found is None else getattr(found, each)
    vector: Tensor | None = getattr(found, "weight", found)
    return vector


def _numbers(norm: NormStruct, width: int) -> list[bytes | None]:
    """Weight and bias."""
    num_bytes = torch.float32.itemsize * width
    return [None if at is None else ctypes.string_at(at, num_bytes) for at in (norm.weight, norm.bias)]


class _Visit:
    """One layer of the pass: widened before it runs, compared behind it."""

    def __init__(self, check: LayerCheck, number: int) -> None:
        self._check, self._number = check, number
        self._grouped: dict[str, GroupedLinear] = {}

    def before(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["hidden_states"]
        if self._number == 0:
            self._check.states, self._check.given = [_flat(given)], []
        self._check.take_inputs(args, kwargs)
        self._grouped = {
            name: part for name, part in layer.named_modules() if isinstance(part, GroupedLinear)
        }
        for name, part in self._grouped.items():
            layer.set_submodule(name, part.widened())

    def behind(self, layer: nn.Module, _: Any, __: Any, output: Any) -> None:
        try:
            if output is None:  # the layer has raised
                return
            self._check.states.append(_flat(output[0] if isinstance(output, tuple) else output))
            widened = {id(layer.get_submodule(name)) for name in self._grouped}
            self._check.compare(self._number, layer, widened)
        finally:
            for name, part in self._grouped.items():
                layer.set_submodule(name, part)
            self._grouped = {}
            self._check.leave(layer)


def _flat(states: Tensor) -> Tensor:
    """[..., tokens, hidden] -> float32 [all tokens, hidden], a copy."""
    return states.detach().reshape(-1, states.shape[-1]).float().clone().contiguous()


def _relative(ours: Tensor, theirs: Tensor) -> Tensor:
    """Length of each row's error, as a part of the row's own."""
    errors: Tensor = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-6)
    return errors
