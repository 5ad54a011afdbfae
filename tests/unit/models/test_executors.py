"""Executors: found by name, asked by the engine and the drafters alike, with passes that may be recorded and padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

from slipstream import registry
from slipstream.assets import EMBEDDED_TARGET
from slipstream.core.pending import PendingNumbers
from slipstream.errors import ConfigError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.batch import Bucket, ForwardBatch
from slipstream.models.executor.base import PassOutput, ProbedModel
from slipstream.models.executor.chains import ENDED, Chains, Draw
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.executor.levels import NOT_FINITE
from slipstream.models.executor.registry import ENTRY_POINT_GROUP, EXECUTORS
from slipstream.sampling.noise import Noise
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import TEXT, VOCAB, llama, logits

# --- names and choice -------------------------------------------------------------------------------------------


@needs_kernels
def test_auto_takes_the_executor_that_the_attention_backend_names() -> None:
    assert type(llama().executor) is CpuKernels
    assert type(llama(attention_backend="packed").executor) is EagerExecutor
    eager = llama(executor="eager")
    assert type(eager.executor) is EagerExecutor
    torch.testing.assert_close(logits(eager), logits(llama()), rtol=1e-4, atol=1e-4)


def test_the_kernels_refuse_what_another_backend_attends_for() -> None:
    with pytest.raises(ConfigError, match=r"'cpu_kernels' cannot run llama: .*attention_backend"):
        llama(attention_backend="packed", executor="cpu_kernels")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagre", "unknown executor 'eagre'; did you mean 'eager'?"),
        ("slipstream.no_such:Executor", "cannot be loaded: No module named"),
        ("slipstream.models:CausalLM", "is not a subclass of .*Executor"),
    ],
)
def test_what_cannot_be_used_is_said_before_any_weight_is_read(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.loading.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match=message):
        load_model(EMBEDDED_TARGET, executor=name)


def test_an_executor_is_found_as_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("from_a_package", f"{__name__}:Recorder", ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([entry]).select(group=group))
    assert type(llama(executor="from_a_package").executor) is Recorder


# --- recorded passes --------------------------------------------------------------------------------------------


class Recorder(EagerExecutor):
    """Replays shapes that it has seen, with logits that tell that it did."""

    def __init__(self, given: ProbedModel, packs: bool = True) -> None:
        super().__init__(given, packs)
        self.recorded: dict[tuple[int, tuple[int, ...]], int] = {}

    def forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> PassOutput:
        key = (rows.num_rows, tuple(hidden_layers))
        if layers is None and key in self.recorded:
            return PassOutput(torch.full((rows.num_logit_rows, VOCAB), 7.0), {})
        if layers is None:
            self.recorded[key] = self.recorded.get(key, 0) + 1
        return super().forward(rows, pool, hidden_layers, layers)


@pytest.fixture
def recorder() -> Iterator[str]:
    EXECUTORS.register("recorder", Recorder)
    yield "recorder"
    EXECUTORS.unregister("recorder")


def test_passes_are_recorded_once_and_replayed(recorder: str) -> None:
    expected = logits(llama(executor="eager"))
    lm = llama(executor=recorder)
    assert torch.equal(logits(lm), expected)
    assert bool((logits(lm) == 7.0).all())
    assert torch.equal(logits(lm, token_ids=TEXT[:5]), logits(llama(executor="eager"), None, TEXT[:5]))
    assert isinstance(lm.executor, Recorder)
    assert lm.executor.recorded == {(12, ()): 1, (5, ()): 1}
    some = logits(lm, [0, 2])
    assert bool((some != 7.0).any()), "a pass over some of the layers is never a recorded one"


class Padded(EagerExecutor):
    """Computes passes of 8 or 16 rows: the last ones are padding, whose logits nobody wants."""

    def forward(
        self,
        rows: ForwardBatch,
        pool: KVPool,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> PassOutput:
        bucket = Bucket(-(-rows.num_rows // 8) * 8, 4, 64)
        padded = ForwardBatch(rows.groups, bucket, pool.slots[-8:])
        output = super().forward(padded, pool, hidden_layers, layers)
        hidden = {layer: states[: rows.num_rows] for layer, states in output.hidden.items()}
        return PassOutput(output.logits[: rows.num_logit_rows], hidden)


def test_a_recorded_pass_may_have_more_rows_than_the_batch() -> None:
    sizes: list[int] = []
    plain = llama(executor="eager")
    lm = llama(executor=f"{__name__}:Padded", canary=False)
    lm.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    found = []
    for model in (plain, lm):
        pool, slots = model.trial_cache(40)
        found.append(model.forward([RowGroup(slots, 0, TEXT, [3, 11])], pool, [0, 2]))
    assert sizes == [16]
    torch.testing.assert_close(found[1].logits, found[0].logits, rtol=1e-4, atol=1e-4)
    for layer in (0, 2):
        torch.testing.assert_close(found[1].hidden[layer], found[0].hidden[layer], rtol=1e-4, atol=1e-4)


# --- chains, a pass a level -------------------------------------------------------------------------------------


def chains_of(draws: Sequence[Draw], executor: str, may_pend: bool = False) -> Sequence[Sequence[int]]:
    """Chains behind as many texts, one of which has no wanted row before its last."""
    lm = llama(executor=executor)
    pool = KVPool(lm.shapes, 20 * len(draws), lm.dtype, lm.device)
    groups = [RowGroup(range(20 * i, 20 * i + 20), 0, TEXT[: 4 + i], [3 + i]) for i in range(len(draws))]
    return lm.draft_chain(groups, pool, Chains(draws, VOCAB - 1, may_pend))


DRAWS = [
    Draw(0.0, [0] * 5),
    Draw(0.8, [Noise(7, 0).key(position) for position in range(3)]),
    Draw(1.0, [Noise(8, 0).key(position) for position in range(5)], top_k=9, top_p=0.9, min_p=0.01),
    Draw(0.7, [0] * 4, greedy=True),
    Draw(0.0, [0] * 5, least_confidence=0.9),
]


@needs_kernels
def test_a_pass_a_level_draws_the_chains_that_one_call_draws() -> None:
    """The two choose by other code: the filters agree but for near ties, of which this has none."""
    found = chains_of(DRAWS, "eager")
    assert found == chains_of(DRAWS, "cpu_kernels")
    assert [len(chain) for chain in found[:4]] == [5, 3, 5, 4]
    assert found[4][-1] == ENDED


def test_chains_that_the_host_does_not_read_are_the_same() -> None:
    pending = chains_of(DRAWS[:4], "eager", may_pend=True)
    assert all(isinstance(chain, PendingNumbers) for chain in pending)
    assert list(map(list, pending)) == chains_of(DRAWS[:4], "eager")
    confident = chains_of(DRAWS, "eager", may_pend=True)
    assert confident == chains_of(DRAWS, "eager"), "one may end early, so all are read"


def test_a_chain_ends_where_logits_are_not_finite() -> None:
    chains = Chains([Draw(0.0, [0] * 3), Draw(0.9, [1] * 3), Draw(0.0, [0] * 3)], 4)
    rows = torch.tensor([[0.0, 3.0, 1.0, 0.0, 9.0], [0.0, float("nan"), 1.0, 0.0, 0.0], [0.0] * 5])
    rows[2] = float("-inf")
    assert chains.take(rows) == [0]
    assert chains.drawn == [[1], [NOT_FINITE], [NOT_FINITE]], "a token beyond the vocabulary is not drawn"
    assert chains.take(rows[:1], [0]) == [0]
    assert chains.take(rows[:1], [0]) == [], "three are drawn"
    assert chains.drawn[0] == [1, 1, 1]
