"""An adapter of a model that is not loaded: which it would be, and what it takes beside quantised weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from slipstream.models.cpu.families import find_family
from slipstream.models.cpu.packed_weight import packed_adapter_bytes
from slipstream.models.cpu.parts import LayerParts
from slipstream.models.files.lora import chosen_adapter
from slipstream.models.files.stored import StoredEmbedding, quantised_layers
from slipstream.models.linear.grouped import GroupedLinear
from slipstream.models.quiet import one_line, silenced


def planned_adapter(path: str, revision: str | None, lora: str | None) -> str | None:
    """The adapter that the engine would take; one beside the weights of a hub id is not looked for."""
    if lora is None and not Path(path).is_dir():
        return None
    with one_line(f"cannot look for an adapter beside {path!r}"), silenced():
        return chosen_adapter(path, revision, lora)


def held_adapter_bytes(model: Any, is_native: bool, layers: Sequence[LayerParts]) -> int:
    """What the changes of quantised layers take: packed with these, or as they are read where PyTorch computes.

    `layers` are those of a model of which whole passes are computed in the kernels; `is_native` is the model's.
    """
    if not is_native:
        changes = [layer.change for layer in quantised_layers(model)]
        return sum(change.nbytes for change in changes if change is not None)
    if layers:
        family = find_family(model)
        assert family is not None
        stacks: list[tuple[Sequence[nn.Module], bool]] = [([family.part(model, family.head)], False)]
        for parts in layers:
            stacks += [(parts.ordered_qkv, False), ([parts.output], False)]
            if parts.down is not None:
                stacks += [(parts.ordered_gate_up, parts.is_gated), ([parts.down], False)]
        return sum(packed_adapter_bytes(_grouped(stack), alternates) for stack, alternates in stacks)
    table = model.get_input_embeddings()
    # A tied table's rows are read out of the layer as it was before it was packed.
    change = table.linear.change if isinstance(table, StoredEmbedding) else None
    packed = sum(packed_adapter_bytes([layer]) for layer in _grouped(model.modules()))
    return packed + (0 if change is None else change.nbytes)


def _grouped(parts: Iterable[nn.Module]) -> list[GroupedLinear]:
    """Those that a file holds quantised."""
    return [part for part in parts if isinstance(part, GroupedLinear)]
