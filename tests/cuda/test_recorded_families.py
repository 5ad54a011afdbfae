"""Every family's passes, replayed from poisoned buffers, against the same passes computed anew: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.core.proposal import Proposal
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.executor.choices import OwnTokens, TokenChoices
from slipstream.models.rows import tree_rows
from slipstream.sampling.params import SamplingParams
from slipstream.testing.recorded_graph import ComputedExecutor, RecordedExecutor
from tests.parity.tiny_models import FAMILIES, save_tiny

OURS = [family for family in FAMILIES if not family.startswith("falcon")]
"""Falcon's attention is not ours."""
TREE = Proposal((1, 2, 3, 4), (-1, -1, 0, 2))


def opened(folder: str, executor: str) -> tuple[CausalLM, KVCache]:
    """A model and a cache with two sequences, whose every number is NaN."""
    lm = load_model(
        folder,
        dtype="float32",
        cpu_kernels="torch",
        attention_backend="slipstream.testing.recorded_graph:TritonOnCpu",
        executor=f"slipstream.testing.recorded_graph:{executor}",
        canary=False,
    )
    cache = lm.new_cache(128)
    cache.pool.fill(float("nan"))
    for owner in range(2):
        cache.accounting.open(owner, [0] * 47)
    return lm, cache


def steps(lm: CausalLM, cache: KVCache) -> list[torch.Tensor]:
    """What passes over two sequences give: a prompt, a chunk beside a decoding one, trees, and the next token."""
    found: list[torch.Tensor] = []
    done = [0, 0]

    def step(*parts: tuple[int, int, Proposal]) -> None:
        groups: list[RowGroup] = []
        choices = TokenChoices()
        for owner, count, proposal in parts:
            tokens = [(7 * (done[owner] + i) + owner) % lm.vocab_size for i in range(count)]
            groups.append(tree_rows(cache.accounting.slots(owner), done[owner], tokens, proposal, count - 1))
            keys = [100 * owner + depth for depth in (0, *proposal.depths)]
            choices.add(OwnTokens(keys, SamplingParams(temperature=0.7 * owner)), proposal)
            cache.accounting.commit(owner, tokens)
            done[owner] += count
        if isinstance(lm.executor, ComputedExecutor):
            lm.executor.recorded.clear()  # nothing is left of the passes before
        output = lm.forward(groups, cache.pool, [0, 2], choices=choices)
        assert output.verdicts is not None
        found.extend([output.logits, output.verdicts, *(output.hidden[layer] for layer in (0, 2))])

    step((0, 9, Proposal()))
    step((1, 14, Proposal()), (0, 1, Proposal()))
    step((0, 1, TREE), (1, 1, TREE))
    step((1, 1, Proposal.chain((5, 6))), (0, 2, TREE))
    for _ in range(2):
        step((0, 1, Proposal()), (1, 1, Proposal()))
        step((0, 1, TREE), (1, 1, TREE))
    return found


@pytest.mark.parametrize("family", OURS)
def test_a_replay_has_the_bits_of_the_pass(family: str, tmp_path: Path) -> None:
    folder = str(save_tiny(FAMILIES[family](), tmp_path / family))
    recorded, cache = opened(folder, "RecordedExecutor")
    computed, other = opened(folder, "ComputedExecutor")
    for ours, theirs in zip(steps(recorded, cache), steps(computed, other), strict=True):
        assert torch.equal(ours, theirs)
    for tensor, expected in zip(cache.pool.tensors, other.pool.tensors, strict=True):
        slots = cache.pool.num_slots  # behind them lies what fills a pass
        assert torch.equal(tensor[:slots].nan_to_num(7.0), expected[:slots].nan_to_num(7.0))
    executor = recorded.executor
    assert isinstance(executor, RecordedExecutor)
    assert executor.num_replayed == 8
    [shapes] = executor.recorded.values()
    assert len(shapes) < 8, "some are replayed with other numbers than they were recorded with"
    assert not executor.eager
