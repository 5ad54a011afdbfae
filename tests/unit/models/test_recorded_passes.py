"""Recorded passes as an operator sees them: counted, warned of, planned for, and refused where they cannot be."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import FalconConfig, Gemma4TextConfig, LlamaConfig, PretrainedConfig

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.core.metrics.passes import LEAST_PASSES
from slipstream.errors import ConfigError
from slipstream.models import CausalLM, RowGroup, load_model
from slipstream.models.attention import triton
from slipstream.models.attention.base import ModelTraits, Probed
from slipstream.models.attention.packed import PackedBackend
from slipstream.models.attention.registry import choose_backend
from slipstream.models.attention.triton import TritonBackend
from slipstream.models.executor import registry
from slipstream.models.executor.base import LargestPass, PassOutput, ProbedModel
from slipstream.models.executor.choices import TokenChoices
from slipstream.models.executor.cuda_graph import CudaGraphExecutor
from slipstream.models.executor.cuda_kernels import CudaKernels
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.executor.pass_memory import graph_bytes, output_bytes
from slipstream.models.executor.recording import RecordedPass
from slipstream.models.linear.formats import checked_format
from slipstream.profiling.pass_times import Survey, measure
from slipstream.testing.recorded_graph import RecordedExecutor, RecordedGraph
from tests.kit.small_llama import TEXT, llama, logits

RECORDED: dict[str, Any] = {
    "attention_backend": "slipstream.testing.recorded_graph:TritonOnCpu",
    "executor": "slipstream.testing.recorded_graph:RecordedExecutor",
}
DRAFT: dict[str, Any] = {"method": "draft_model", "model": "embedded", "num_speculative_tokens": 3}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def recorded_llama() -> CausalLM:
    return llama(native=False, **RECORDED)


def executor_of(lm: CausalLM) -> RecordedExecutor:
    assert isinstance(lm.executor, RecordedExecutor)
    return lm.executor


# --- what is counted --------------------------------------------------------------------------------------------


def test_an_engine_tells_the_passes_of_its_models() -> None:
    llm = LLM(speculative_config=DRAFT, cpu_kernels="torch", max_model_len=128, max_num_seqs=3, **RECORDED)
    before = llm.engine.stats().passes
    llm.generate(["The capital of France", "A list of"], PARAMS)
    passes = llm.engine.stats().passes
    assert set(passes) == {"target", "draft"}
    for role in passes:
        new = passes[role].since(before[role])  # trial passes of loading are counted too
        assert new.num_replayed == new.num_passes > 0


def test_a_target_that_drafts_with_some_of_its_layers_counts_once() -> None:
    options = {"cpu_kernels": "torch", "max_model_len": 128, "max_num_seqs": 3, **RECORDED}
    llm = LLM(speculative_config={"method": "layer_skip", "exit_layer": 2}, **options)
    llm.generate(["The capital of France"], PARAMS)
    passes = llm.engine.stats().passes
    assert set(passes) == {"target"}
    assert passes["target"].eager["some layers only"] > 0


def test_an_engine_without_recorded_passes_tells_none() -> None:
    assert LLM(max_model_len=64).engine.stats().passes == {}


def test_answers_that_share_a_prefix_run_in_the_graphs_of_those_that_do_not() -> None:
    llm = LLM(cpu_kernels="torch", max_model_len=128, max_num_seqs=3, **RECORDED)
    before = llm.engine.stats().passes["target"]
    llm.generate(["The capital of " * 9, "Her name was " * 9], PARAMS)
    llm.generate(["The capital of France " * 9], SamplingParams(n=3, temperature=0.5, seed=1, max_tokens=4))
    new = llm.engine.stats().passes["target"].since(before)
    assert new.num_replayed == new.num_passes > 0


def test_a_models_passes_are_timed_in_their_graphs() -> None:
    lm = recorded_llama()
    survey = Survey((1, 2), (8,), budget_s=0.01, array_bytes=2**20, max_repeats=3)
    [profile] = measure([lm], survey, lambda done, total: None)
    assert {time.rows for time in profile.step_times} == {1, 2}
    assert executor_of(lm).pass_counts.num_replayed >= 6
    assert profile.key.kernels == "recorded", "not a profile of eager passes"


def test_it_is_warned_once_where_too_many_passes_run_outside_a_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lm = recorded_llama()
    executor = executor_of(lm)
    executor.num_replayed, executor.eager["too many rows"] = LEAST_PASSES, 9
    pool, _ = lm.trial_cache(12)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            lm.forward([RowGroup([3, 1, 2], 0, TEXT[:3], [0])], pool)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("llama: 1.1% of 1,011 passes ran outside a recorded graph")
    assert "the commonest reason: too many rows (9)" in line


# --- what cannot be recorded ------------------------------------------------------------------------------------


class ReadsTheHost(nn.Module):
    """A layer whose forward asks the device for a number."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(hidden)
        return found * (1.0 if float(found.abs().max()) >= 0 else 0.0)


def test_a_model_that_cannot_be_recorded_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    lm = recorded_llama()
    expected = logits(lm)
    lm.model.model.layers[1].mlp = ReadsTheHost(lm.model.model.layers[1].mlp)
    executor = executor_of(lm)
    replayed = executor.num_replayed
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            torch.testing.assert_close(logits(lm), expected, rtol=1e-5, atol=1e-5)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "passes of llama are not recorded: item cannot be recorded"
    assert executor.pass_counts.eager == {"item cannot be recorded": 3}
    assert executor.num_replayed == replayed


@pytest.mark.parametrize("is_hidden", [False, True], ids=["said", "hidden"])
def test_a_device_without_memory_for_a_graph(
    is_hidden: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = recorded_llama()
    expected = logits(lm)
    pool, slots = lm.trial_cache(12)
    group = RowGroup(slots, 0, TEXT, range(len(TEXT)))
    lm.forward([group], pool)
    held = executor_of(lm).recorded[pool]

    def record(self: RecordedGraph, compute: Any) -> Any:
        full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")
        if not is_hidden:
            raise full
        try:
            raise full
        finally:  # what leaving the recording says
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(RecordedGraph, "record", record)
    with caplog.at_level(logging.WARNING):
        found = logits(lm)
        lm.forward([group], pool)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("passes of llama are not recorded: the device has no memory left for a graph")
    assert executor_of(lm).pass_counts.num_eager == 2
    assert held, "it was recorded"
    assert not executor_of(lm).recorded, "and its memory is given back"


# --- why there are no graphs ------------------------------------------------------------------------------------


def cuda_traits(family: type[PretrainedConfig] = LlamaConfig, **config: Any) -> ModelTraits:
    return ModelTraits(family(**config), torch.device("cuda"), torch.float16, native=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with Triton and a recent GPU, as far as is asked."""
    monkeypatch.setattr(triton.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: object())
    registry.warn_of_eager_passes.cache_clear()
    yield monkeypatch
    registry.warn_of_eager_passes.cache_clear()


def take_away(gpu: pytest.MonkeyPatch, what: str) -> None:
    if what == "triton":
        gpu.setattr(triton.importlib.util, "find_spec", lambda name: None)
    if what == "capability":
        gpu.setattr(triton.torch.cuda, "get_device_capability", lambda device: (7, 5))


LACKS = {
    "triton": "Triton is not installed",
    "capability": "our Triton kernels need a device of compute capability 8.0 or newer",
}


@pytest.mark.parametrize("lacks", LACKS)
def test_a_machine_that_lacks_something_says_so_once(
    lacks: str, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    traits = cuda_traits()
    assert type(choose_backend("auto", traits)) is TritonBackend
    take_away(gpu, lacks)
    backend = choose_backend("auto", traits)
    assert type(backend) is PackedBackend
    with pytest.raises(ConfigError, match=LACKS[lacks]):
        choose_backend("triton", traits)
    with pytest.raises(ConfigError, match=LACKS[lacks]) as caught:
        registry.check_attention("cuda_graph", backend)
    assert "\n" not in str(caught.value)
    given = probed(backend)
    with caplog.at_level(logging.WARNING):
        assert registry.choose_executor("auto", given) is EagerExecutor
        assert registry.choose_executor("auto", given) is EagerExecutor
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"passes of llama are not recorded as CUDA graphs, which is slower: {LACKS[lacks]}"


def test_a_model_whose_attention_is_not_ours_says_so(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = choose_backend("auto", cuda_traits(FalconConfig))
    with caplog.at_level(logging.WARNING):
        registry.choose_executor("auto", probed(backend))
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("slower: its attention reads keys from a cache, not the attention interface")


@pytest.mark.parametrize(
    ("config", "is_ours"),
    [
        ({"hidden_size": 4096, "num_attention_heads": 16}, True),
        ({"hidden_size": 4096, "num_attention_heads": 8}, False),
        ({"hidden_size": 4096, "num_attention_heads": 8, "head_dim": 128}, True),
        ({"hidden_size": 4096, "num_attention_heads": 8, "head_dim": 256, "global_head_dim": 512}, False),
    ],
)
def test_heads_that_are_too_wide_are_left_to_pytorch(
    config: dict[str, int], is_ours: bool, gpu: pytest.MonkeyPatch
) -> None:
    reason = TritonBackend.refusal(cuda_traits(**config))
    assert reason == (None if is_ours else "our Triton kernels take heads of at most 256 numbers")


@pytest.mark.parametrize(("widest", "is_ours"), [(256, True), (512, False)])
def test_configurations_whose_layers_differ_are_read_layer_by_layer(
    widest: int, is_ours: bool, gpu: pytest.MonkeyPatch
) -> None:
    traits = cuda_traits(Gemma4TextConfig, head_dim=128, global_head_dim=widest, num_hidden_layers=6)
    assert (TritonBackend.refusal(traits) is None) == is_ours


def test_with_graphs_or_with_eager_passes_on_request_nothing_is_said(
    gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, packed = TritonBackend(cuda_traits()), PackedBackend(cuda_traits())
    for reason, chosen in ((None, CudaKernels), ("a test", CudaGraphExecutor)):
        gpu.setattr(CudaKernels, "refusal", classmethod(lambda *_, reason=reason: reason))
        assert registry.choose_executor("auto", probed(ours)) is chosen
    assert registry.choose_executor("eager", probed(packed)) is EagerExecutor
    assert caplog.records == []


def probed(backend: Any) -> ProbedModel:
    model = SimpleNamespace(config=backend.traits.config, device=backend.traits.device)
    fmt = checked_format(None, torch.device("cpu"), torch.float32)
    return ProbedModel(model, backend, Probed([], [], 8, frozenset()), fmt, torch.float16, native=False)


def test_graphs_without_a_gpu_are_refused_before_any_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.loading.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="'cuda_graph' cannot run llama: our Triton kernels run on a CUDA"):
        load_model(EMBEDDED_TARGET, executor="cuda_graph")


# --- what they hold ---------------------------------------------------------------------------------------------


def test_graphs_hold_what_is_planned_for_them() -> None:
    lm = recorded_llama()
    executor = executor_of(lm)
    pool, slots = lm.trial_cache(60)
    assert len(pool.keys[0][0]) == pool.num_slots + executor.num_scratch_slots
    for count in (1, 12, 40):
        chosen = TokenChoices()
        chosen.skip(count)
        for choices in (None, chosen):
            token_ids = [TEXT[row % len(TEXT)] for row in range(count)]
            layers = [0, 2] if count == 12 else []
            lm.forward([RowGroup(slots, 0, token_ids, range(count))], pool, layers, choices=choices)
    recorded = executor.recorded[pool]
    assert len(recorded) == 6
    outputs = {None: executor.outputs[None], **{layer: executor.outputs[layer] for layer in (0, 2)}}
    for shape, graph in recorded.items():
        output = graph.output
        assert output is not None
        held = graph.buffer.nbytes + (0 if output.verdicts is None else output.verdicts.nbytes)
        assert graph_bytes(shape) == held
        assert output.logits.data_ptr() == outputs[None].data_ptr(), "it holds none of its own"
        assert all(states.data_ptr() == outputs[layer].data_ptr() for layer, states in output.hidden.items())
    largest = LargestPass(
        40, 60, lm.vocab_size, 4, 2, 8, 4, False, row_bytes=0, tap_bytes=2 * 4 * lm.hidden_size
    )
    assert output_bytes(largest) == sum(tensor.nbytes for tensor in outputs.values())


def test_more_rows_longer_texts_and_wider_vocabularies_take_more() -> None:
    def planned(rows: int = 100, context: int = 1000, vocab: int = 5000) -> int:
        return CudaGraphExecutor.recorded_bytes(LargestPass(rows, context, vocab, 8, 2, 64, 2, False, 4096))

    assert planned() < min(planned(rows=200), planned(context=4000), planned(vocab=6000))
    assert planned(rows=100) == planned(rows=128) < planned(rows=2048) == planned(rows=9000)
    assert EagerExecutor.recorded_bytes(LargestPass(100, 1000, 5000, 8, 2, 64, 2, False, 4096)) == 0


class KeepsNothing:
    """A graph that holds no Python object, as CUDA's does."""

    def record(self, compute: Callable[[], PassOutput]) -> PassOutput:
        return compute()

    def replay(self) -> None:
        return


def test_a_cache_ends_though_passes_over_it_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedExecutor, "graph", KeepsNothing)
    lm = recorded_llama()
    pool, slots = lm.trial_cache(8)
    lm.forward([RowGroup(slots, 0, [1, 2, 3], [2])], pool)
    assert executor_of(lm).num_replayed > 0
    kept = weakref.ref(pool)
    del pool, slots
    gc.collect()
    assert kept() is None


def test_a_recording_that_was_broken_off_is_made_again() -> None:
    tries = 0

    def compute(buffer: torch.Tensor) -> torch.Tensor:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise TypeError("does not compile")
        return buffer + 1

    recorded = RecordedPass(RecordedGraph(), 2, torch.device("cpu"), compute)
    with pytest.raises(TypeError, match="does not compile"):
        recorded.replay(torch.tensor([1, 2]))
    assert recorded.replay(torch.tensor([3, 4])).tolist() == [4, 5]


def test_layers_are_tried_without_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replayed trial would compare a pass with itself."""
    lm = recorded_llama()
    replayed = executor_of(lm).num_replayed
    with torch.inference_mode():
        lm.check_layers()
    assert executor_of(lm).num_replayed == replayed
