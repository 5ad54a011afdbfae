"""Attention backends: found by name, chosen by what a model and a device can."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from slipstream import registry
from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, adapt, load_model
from slipstream.models.attention.base import ATTENTION_NAME, ModelTraits
from slipstream.models.attention.cache_adapter import CacheAdapterBackend
from slipstream.models.attention.native import NativeBackend
from slipstream.models.attention.native_layers import NativeLayersBackend
from slipstream.models.attention.packed import PackedAttention, PackedBackend
from slipstream.models.attention.registry import ATTENTION, ENTRY_POINT_GROUP, choose_backend
from slipstream.models.batch import ForwardBatch
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.testing.paged import PagedBackend
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import VOCAB, llama, logits


def traits(family: str, *, kernels: bool = True, device: str = "cpu") -> ModelTraits:
    config = SimpleNamespace(
        model_type=family, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True
    )
    return ModelTraits(config, torch.device(device), torch.float32, kernels)


# --- names and choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "backend"),
    [
        ("llama", {}, NativeBackend),
        ("llama", {"kernels": False}, PackedBackend),
        ("llama", {"device": "meta"}, PackedBackend),
        ("falcon", {}, CacheAdapterBackend),
        ("falcon", {"kernels": False}, CacheAdapterBackend),
    ],
)
def test_auto_takes_the_best_that_can_run_the_model(family: str, options: Any, backend: type) -> None:
    assert type(choose_backend("auto", traits(family, **options))) is backend


@pytest.mark.parametrize(
    ("name", "asked", "message"),
    [
        (
            "cache_adapter",
            traits("llama"),
            "'cache_adapter' cannot run llama: only codegen, falcon, .* is known to .*; use 'auto'",
        ),
        ("packed", traits("falcon"), "'packed' cannot run falcon: its attention reads keys from a cache"),
        ("native", traits("llama", kernels=False), "'native' cannot run llama: .*cpu_kernels"),
        ("native", traits("llama", device="meta"), "'native' cannot run llama"),
        ("paked", traits("llama"), "unknown attention backend 'paked'; did you mean 'packed'?"),
        ("atuo", traits("llama"), "unknown attention backend 'atuo'; did you mean 'auto'?"),
        ("slipstream.no_such:Backend", traits("llama"), "cannot be loaded: No module named"),
        ("slipstream.models:CausalLM", traits("llama"), "is not a subclass of .*AttentionBackend"),
    ],
)
def test_what_cannot_be_used_is_said(name: str, asked: ModelTraits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_backend(name, asked)


def test_a_backend_is_found_as_an_entry_point_by_registration_and_by_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "slipstream.testing.paged:PagedBackend"
    entry = EntryPoint("from_a_package", place, ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints([entry]).select(group=group))
    ATTENTION.register("from_code", PagedBackend)
    try:
        for name in ("from_a_package", "from_code", place):
            assert type(choose_backend(name, traits("llama"))) is PagedBackend
    finally:
        ATTENTION.unregister("from_code")
    assert "from_a_package" in ATTENTION.names()


def test_an_unknown_backend_is_refused_before_any_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.loading.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ConfigError, match="did you mean 'packed'"):
        load_model(EMBEDDED_TARGET, attention_backend="pakced")


@needs_kernels
def test_the_native_backend_computes_whole_passes() -> None:
    for name in ("auto", "native"):
        lm = llama(attention_backend=name)
        assert isinstance(lm.executor, CpuKernels)
        assert type(lm.backend) is NativeBackend
    lm = llama(attention_backend="packed")
    assert not isinstance(lm.executor, CpuKernels)
    torch.testing.assert_close(logits(lm), logits(llama()), rtol=1e-4, atol=1e-4)


@needs_kernels
def test_a_model_that_the_kernels_do_not_know() -> None:
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, attn_implementation=ATTENTION_NAME)
    with pytest.raises(
        ConfigError, match=r"'native' cannot run gpt2: the fused decoder knows arcee, cwm, .*llama"
    ):
        adapt(GPT2LMHeadModel(config).eval(), attention_backend="native")
    lm = adapt(GPT2LMHeadModel(config).eval())
    assert not isinstance(lm.executor, CpuKernels)
    assert type(lm.backend) is NativeLayersBackend
    plain = adapt(GPT2LMHeadModel(config).eval(), attention_backend="packed")
    assert type(plain.backend) is PackedBackend


@needs_kernels
def test_the_native_kernels_refuse_slots_that_are_not_contiguous() -> None:
    lm = llama()
    pool = KVPool(lm.shapes, 20, lm.dtype, lm.device)
    with pytest.raises(ValueError, match="contiguous"):
        lm.forward([RowGroup([3, 1, 2], 0, [5, 6, 7], [2])], pool)


def test_too_few_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="2 slots for 3 entries"):
        ForwardBatch([RowGroup(range(2), 0, [5, 6, 7], [2])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stored_positions": [3]}, "no stored entries before it"),
        (
            {"stored_positions": [3], "tail_seen": [[0, 1], [0, 2]], "num_chain": 1},
            "no stored entries before it",
        ),
        ({"positions": [3, 4, 4], "tail_seen": [[0], [1]]}, "tail_seen of 2 rows for 3 behind the chain"),
        ({"positions": [3, 4, 4], "tail_seen": [[0]], "num_chain": 1}, "tail_seen of 1 rows for 2"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardBatch([RowGroup(range(9), 3, [5, 6, 7], [2], **options)])


class Altered(PackedBackend):
    """Attends as for other rows than those that are computed."""

    @staticmethod
    def alter(group: RowGroup, first: RowGroup) -> RowGroup:
        raise NotImplementedError

    def prepare(self, rows: ForwardBatch, pool: KVPool) -> PackedAttention:
        return PackedAttention(
            ForwardBatch([self.alter(group, rows.groups[0]) for group in rows.groups]), pool
        )


class AllChains(Altered):
    @staticmethod
    def alter(group: RowGroup, first: RowGroup) -> RowGroup:
        past = group.num_before
        return replace(group, num_past=past, positions=None, stored_positions=(), tail_seen=None, num_chain=0)


class NothingStored(Altered):
    @staticmethod
    def alter(group: RowGroup, first: RowGroup) -> RowGroup:
        if group.tail_seen is None:
            return group
        stored = len(group.stored_positions)
        return replace(
            group, tail_seen=[[entry for entry in seen if entry >= stored] for seen in group.tail_seen]
        )


class OneSequence(Altered):
    @staticmethod
    def alter(group: RowGroup, first: RowGroup) -> RowGroup:
        return replace(group, slots=first.slots)


@pytest.mark.parametrize("backend", [AllChains, NothingStored, OneSequence])
def test_a_backend_that_is_wrong_in_trees_or_beside_others_is_refused(backend: type) -> None:
    with pytest.raises(UnsupportedModelError, match="its attention would be computed wrongly"):
        llama(attention_backend=f"{__name__}:{backend.__name__}")


# --- one model, several threads ---------------------------------------------------------------------------------


def test_no_pass_runs_while_another_one_has_taken_layers_out() -> None:
    lm = llama(attention_backend="packed")
    whole, some = logits(lm), logits(lm, [0, 2])
    assert not torch.allclose(whole, some)
    inside, go_on = threading.Event(), threading.Event()
    found: dict[str, Tensor] = {}

    def wait(*_: Any) -> None:
        if threading.current_thread().name == "some":
            inside.set()
            assert go_on.wait(60)

    def run(name: str, layers: Sequence[int] | None) -> None:
        found[name] = logits(lm, layers)

    hook = lm.model.model.embed_tokens.register_forward_hook(wait)
    first = threading.Thread(target=run, args=("some", [0, 2]), name="some")
    second = threading.Thread(target=run, args=("whole", None), name="whole")
    first.start()
    assert inside.wait(60)
    second.start()
    second.join(0.3)
    waits = second.is_alive()
    go_on.set()
    first.join()
    second.join()
    hook.remove()
    assert waits, "it may not run before the layers are back"
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["some"], some)


def test_the_name_of_the_release_before_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(choose_backend("posed", traits("falcon")), CacheAdapterBackend)
    assert caplog.messages == ["attention backend 'posed' is now called 'cache_adapter'"]
