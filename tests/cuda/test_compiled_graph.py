"""`torch.compile` makes one graph of the pass of every family, without a break."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.core.proposal import Proposal
from slipstream.models import load_model
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.compiled_graph import CompiledGraphExecutor
from slipstream.models.rows import tree_rows
from tests.parity.tiny_models import FAMILIES, save_tiny

OURS = [family for family in FAMILIES if not (family.startswith("falcon") or family.endswith("-odd"))]
"""Falcon's attention is not ours; the odd ones differ in sizes and scales from families that are here."""
QUICK = ("llama-gqa", "gemma2")


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.long) for family in OURS]
)
def test_a_compiled_pass_is_the_pass(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of passes over a tree at two places of the text: a graph must not know its numbers."""
    monkeypatch.setattr(CompiledGraphExecutor, "compiler", "aot_eager")  # no C++ compiler is asked
    lm = load_model(
        str(save_tiny(FAMILIES[family](), tmp_path / family)),
        dtype="float32",
        cpu_kernels="torch",
        attention_backend="slipstream.testing.recorded_graph:TritonOnCpu",
        executor="compiled_graph",
        canary=False,
    )
    executor = lm.executor
    assert isinstance(executor, CompiledGraphExecutor)
    pool, slots = lm.trial_cache(40)
    call = executor.callable()
    for past in (0, 15):
        tokens = [(7 * token + past) % lm.vocab_size for token in range(15)]
        group = tree_rows(slots, past, tokens, Proposal((1, 2, 3), (-1, -1, 0)), 0)
        with torch.inference_mode():
            rows = ForwardBatch([group])
            attention = executor.backend.prepare(rows, pool)
            plain = executor.run(rows, attention, [0, 2])
            compiled = executor.run(rows, attention, [0, 2], call)
        torch.testing.assert_close(compiled.logits, plain.logits)
        torch.testing.assert_close(compiled.hidden[2], plain.hidden[2])
