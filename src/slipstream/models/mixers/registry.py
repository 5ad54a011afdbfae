"""Recurrences by the names of Transformers' functions, and of methods of its modules.

A method is `Class.method`, or `Class.part.method` where it is one of a part; a recurrence of a method gets the module
that has it before the arguments.

A package adds one with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.recurrences"]
    its_function = "my_package.module:MyRecurrence"

and code with `RECURRENCES.register("its_function", MyRecurrence)`.
"""

from __future__ import annotations

from slipstream.models.mixers.base import Recurrence
from slipstream.registry import Registry

RECURRENCES: Registry[Recurrence] = Registry(
    "recurrence",
    Recurrence,  # type: ignore[type-abstract]
    "slipstream.recurrences",
    {
        "causal_conv1d_fn": "slipstream.models.mixers.convolution:Convolution",
        "chunk_kimi_delta_attention": "slipstream.models.mixers.kimi_delta:KimiDelta",
        "mamba2_chunk_scan": "slipstream.models.mixers.state_space:StateSpace",
        "mamba_selective_scan": "slipstream.models.mixers.selective_scan:SelectiveScan",
        "MiniMaxLightningAttention.forward": "slipstream.models.mixers.lightning:Lightning",
        "RecurrentGemmaRecurrentBlock.conv_1d.forward": "slipstream.models.mixers.gated_unit:GatedUnitConvolution",
        "RecurrentGemmaRglru._rnn_scan": "slipstream.models.mixers.gated_unit:GatedUnit",
        "torch_chunk_gated_delta_rule": "slipstream.models.mixers.gated_delta:GatedDelta",
    },
)


def recurrences() -> dict[str, Recurrence]:
    """All of them, by the function or method that each takes the place of."""
    return {name: RECURRENCES.load(name)() for name in RECURRENCES.names()}
