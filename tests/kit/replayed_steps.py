"""Passes of a model over two sequences, replayed and computed anew, to be compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from slipstream.core.proposal import Proposal
from slipstream.kv.cache import KVCache
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.executor.choices import OwnTokens, TokenChoices
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.rows import tree_rows
from slipstream.sampling.params import SamplingParams

ON_CPU = "slipstream.testing.recorded_graph"
TREE = Proposal((1, 2, 3, 4), (-1, -1, 0, 2))
Step = Seq[tuple[int, int, Proposal]]
"""Of each sequence that takes part its number, how many tokens, and the tree behind them."""


def opened(folder: str, executor: str) -> tuple[CausalLM, KVCache]:
    """A model and a cache with two sequences, whose every number is NaN."""
    lm = load_model(
        folder,
        dtype="float32",
        cpu_kernels="torch",
        attention_backend=f"{ON_CPU}:TritonOnCpu",
        executor=f"{ON_CPU}:{executor}",
        canary=False,
    )
    cache = lm.new_cache(128)
    cache.pool.fill(float("nan"))
    for owner in range(2):
        cache.accounting.open(owner, [0] * 47)
    return lm, cache


def outcomes(
    lm: CausalLM, cache: KVCache, steps: Seq[Step], layers: Seq[int], forgets: bool
) -> list[torch.Tensor]:
    """Logits, verdicts and states of `layers` of each step; with `forgets` nothing is left of the passes before."""
    found: list[torch.Tensor] = []
    done = [0, 0]
    for step in steps:
        groups: list[RowGroup] = []
        choices = TokenChoices()
        for owner, count, proposal in step:
            tokens = [(7 * (done[owner] + i) + owner) % lm.vocab_size for i in range(count)]
            groups.append(tree_rows(cache.accounting.slots(owner), done[owner], tokens, proposal, count - 1))
            keys = [100 * owner + depth for depth in (0, *proposal.depths)]
            choices.add(OwnTokens(keys, SamplingParams(temperature=0.7 * owner)), proposal)
            cache.accounting.commit(owner, tokens)
            done[owner] += count
        assert isinstance(lm.executor, CudaGraphExecutor)
        if forgets:
            lm.executor.recorded.clear()
        output = lm.forward(groups, cache.pool, layers, choices=choices)
        assert output.verdicts is not None
        found.extend([output.logits, output.verdicts, *(output.hidden[layer] for layer in layers)])
    return found


def check_replays(folder: str, recorded: str, computed: str, steps: Seq[Step], last_layer: bool) -> None:
    """What the executor called `recorded` replays has the bits of what `computed` makes anew, in the cache too."""
    lm, cache = opened(folder, recorded)
    other_lm, other = opened(folder, computed)
    layers = [0, 2, *([lm.num_layers] if last_layer else [])]
    ours, theirs = outcomes(lm, cache, steps, layers, False), outcomes(other_lm, other, steps, layers, True)
    for one, another in zip(ours, theirs, strict=True):
        assert torch.equal(one, another)
    for tensor, expected in zip(cache.pool.tensors, other.pool.tensors, strict=True):
        slots = cache.pool.num_slots  # behind them lies what fills a pass
        assert torch.equal(tensor[:slots].nan_to_num(7.0), expected[:slots].nan_to_num(7.0))
    executor = lm.executor
    assert isinstance(executor, CudaGraphExecutor)
    assert (type(executor).__name__, type(other_lm.executor).__name__) == (recorded, computed)
    assert executor.num_replayed == len(steps)
    [shapes] = executor.recorded.values()
    assert len(shapes) < len(steps), "some are replayed with other numbers than they were recorded with"
    assert not executor.eager
