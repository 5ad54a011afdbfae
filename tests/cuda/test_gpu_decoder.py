"""The fused decoder of a GPU: its operators, and every dense family against Transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import layer_cases
import pytest
import torch
import transformers as tf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton_process import interpreted

from slipstream import LLM, EngineConfig
from slipstream.assets import EMBEDDED_DRAFT, sample_prompts
from slipstream.core.proposal import Proposal
from slipstream.errors import ConfigError, UnsupportedModelError
from slipstream.models import CausalLM, RowGroup
from slipstream.models.cuda.linear import DeviceWeight
from slipstream.models.families.registry import FAMILIES as KNOWN
from slipstream.models.load_options import LoadOptions
from slipstream.models.loading import adapt
from slipstream.models.rows import tree_rows
from slipstream.sampling.params import SamplingParams
from slipstream.testing.recorded_graph import ComputedKernels, RecordedExecutor, RecordedKernels
from slipstream.testing.wait_audit import WaitAudit
from tests.kit.replayed_steps import ON_CPU, TREE, check_replays, opened
from tests.parity.tiny_models import FAMILIES, LIKE_OTHERS, randomise, save_tiny

CONFIGS = {**FAMILIES, **LIKE_OTHERS}
TEXT = [(7 * i + 3) % 128 for i in range(15)]


DECODED = [
    name
    for name in CONFIGS
    if CONFIGS[name]().model_type in KNOWN.names()
    and not KNOWN.load(CONFIGS[name]().model_type).is_of_cpu_kernels()
    and name not in ("qwen3-moe-mixed", "olmoe-clipped")
]
OTHERS = [
    "gpt2",
    "olmoe-clipped",
    "qwen3-moe-mixed",
    *(name for name in CONFIGS if name.startswith("gemma4")),
]
"""Families that it does not know, or only the CPU's."""
MIXTURES = [name for name in DECODED if KNOWN.load(CONFIGS[name]().model_type).experts is not None]
LIKE_LLAMA = ("cwm", "internlm3", "iquestcoder", "ministral", "seed-oss")
"""Whose bits are those of a family that is tested."""


# --- the operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_in_pytorch(dtype: torch.dtype) -> None:
    for width, kind in ((44, False), (300, True)):
        layer_cases.check_norm(dtype, width, kind)
    for behind, before in ((False, True), (True, False)):
        norms = [layer_cases.random_norm(44, kind, kind, 1) for kind in (behind, before)]
        layer_cases.check_sums(dtype, 44, *norms)
    layer_cases.check_sums(dtype, 44, None, None)
    layer_cases.check_rotation(dtype, 16, 8, norms=False)
    layer_cases.check_rotation(dtype, 22, 6, norms=True)
    for kind in layer_cases.ACTIVATIONS:
        layer_cases.check_activation(dtype, kind, is_gated=kind != 1)
    layer_cases.check_bits(dtype)


def test_the_kernels_interpreted() -> None:
    done = interpreted("interpreted_decoder.py")
    assert done.returncode == 0, done.stdout


# --- against Transformers ---------------------------------------------------------------------------------------


def tiny(name: str, dtype: torch.dtype) -> Any:
    """A model of Transformers; its weights are the same numbers in any type."""
    config = CONFIGS[name]()
    config._attn_implementation = "slipstream"
    torch.manual_seed(0)  # what `randomise` adds to
    model = tf.AutoModelForCausalLM.from_config(config)
    randomise(model)
    return model.to(torch.bfloat16).to(dtype).eval()


def all_states(lm: CausalLM) -> list[Tensor]:
    """Hidden states by layer and logits over a text."""
    pool, slots = lm.trial_cache(len(TEXT))
    layers = range(lm.num_layers + 1)
    output = lm.forward([RowGroup(slots, 0, TEXT, range(len(TEXT)))], pool, layers)
    return [*(output.hidden[layer] for layer in layers), output.logits]


def all_expected(model: Any) -> list[Tensor]:
    """The same by Transformers alone."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        output = model(input_ids=torch.tensor([TEXT]), use_cache=False, output_hidden_states=True)
    return [*(states[0] for states in output.hidden_states), output.logits[0]]


def error(ours: Tensor, expected: Tensor) -> float:
    """Relative to what is expected, in the mean over rows."""
    return float((ours.double() - expected.double()).norm() / expected.double().norm())


def in_decoder(model: Any, **options: Any) -> CausalLM:
    lm = adapt(
        model,
        native=False,
        attention_backend=f"{ON_CPU}:TritonOnCpu",
        executor=f"{ON_CPU}:ComputedKernels",
        **options,
    )
    assert isinstance(lm.executor, ComputedKernels)
    return lm


@pytest.mark.parametrize("name", DECODED)
def test_a_family_is_transformers_own(name: str) -> None:
    expected = all_expected(tiny(name, torch.float32))
    ours = all_states(in_decoder(tiny(name, torch.float32), canary=False))
    assert max(map(error, ours, expected)) < 1e-5
    if name in MIXTURES:
        return  # after a rounding a row may be sent to another expert
    exact = all_expected(tiny(name, torch.float64))
    theirs = all_expected(tiny(name, torch.bfloat16))
    ours = all_states(in_decoder(tiny(name, torch.bfloat16), canary=False))
    for layer, (our, their, true) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert our.dtype == torch.bfloat16
        assert error(our, true) <= 1.5 * error(their, true), layer


@pytest.mark.parametrize("reproducible", [True, False])
def test_pytorch_multiplies_where_bits_need_not_be_reproducible(
    reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plain matrices of 16 bits; the bias of a layer among them."""
    name = "qwen2"
    exact, theirs = (all_expected(tiny(name, dtype)) for dtype in (torch.float64, torch.bfloat16))
    lm = in_decoder(tiny(name, torch.bfloat16), canary=False, reproducible=reproducible)
    calls = Counter[int]()
    multiply = torch.nn.functional.linear

    def counted(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls[bias is not None] += 1
        return multiply(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    ours = all_states(lm)
    passes = 0 if reproducible else 2  # recorded, and replayed
    assert calls[True] == passes * lm.num_layers
    assert calls[False] == passes * (3 * lm.num_layers + 1)
    assert error(ours[-1], exact[-1]) <= 1.5 * error(theirs[-1], exact[-1])
    assert LoadOptions.of(EngineConfig("x", reproducible=reproducible)).reproducible == reproducible


# --- recorded passes --------------------------------------------------------------------------------------------


STEPS = [
    [(0, 9, Proposal())],
    [(1, 14, Proposal()), (0, 1, Proposal())],
    *(
        2
        * [
            [(0, 1, TREE), (1, 1, TREE)],
            [(1, 1, Proposal.chain((5, 6))), (0, 2, TREE)],
            [(0, 1, Proposal()), (1, 1, Proposal())],
        ]
    ),
]
"""A prompt, a chunk beside a decoding sequence, trees, chains and next tokens."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LIKE_LLAMA else name for name in DECODED]
)
def test_a_replay_has_the_bits_of_the_pass(name: str, tmp_path: Path) -> None:
    folder = str(save_tiny(CONFIGS[name](), tmp_path / name))
    check_replays(folder, "RecordedKernels", "ComputedKernels", STEPS, last_layer=True)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt-neox", "olmo2"])
def test_drafts_change_no_bit_of_a_row(name: str, tmp_path: Path) -> None:
    """The rows of a tree's paths, and the same tokens as a chain and one by one."""
    folder = str(save_tiny(CONFIGS[name](), tmp_path / name))
    lm, _ = opened(folder, "RecordedKernels")
    text, nodes = TEXT[:11], (50, 60, 70, 80)

    def rows(tokens: list[int], proposal: Proposal, past: int, pool: Any, slots: Any) -> Tensor:
        return lm.forward([tree_rows(slots, past, tokens, proposal, len(tokens) - 1)], pool).logits

    tree = rows(text, Proposal(nodes, (-1, -1, 1, 2)), 0, *lm.trial_cache(40))
    pool, slots = lm.trial_cache(40)
    plain = [rows(text, Proposal(), 0, pool, slots)]
    path = [nodes[1], nodes[2], nodes[3]]
    for done, token in enumerate(path):
        plain.append(rows([token], Proposal(), len(text) + done, pool, slots))
    chain = rows(text, Proposal.chain(path), 0, *lm.trial_cache(40))
    assert torch.equal(chain, torch.cat(plain))
    assert torch.equal(tree[[0, 2, 3, 4]], chain)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How often each of our operators is called within the body."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "slipstream":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_is_few_operators() -> None:
    lm = in_decoder(tiny("qwen3", torch.float32), canary=False)
    pool, slots = lm.trial_cache(40)
    with Counted() as counted:
        lm.forward([RowGroup([*slots][::-1], 0, TEXT, [14])], pool)
    counted.calls.pop("linear", None)
    counted.calls.pop("tree_attention", None)  # slots that are not consecutive attend otherwise
    assert counted.calls == {"norm": 1, "rotate": 3, "add_norm": 6, "activate": 3}


# --- some layers, something added, other routes -------------------------------------------------------------------


def test_some_layers_alone_and_something_added() -> None:
    ours = in_decoder(tiny("gemma2", torch.float32), canary=False)
    theirs = adapt(tiny("gemma2", torch.float32), native=False, attention_backend="packed", executor="eager")
    added = layer_cases.random_rows(len(TEXT), 32)
    found = []
    for lm in (ours, theirs):
        pool, slots = lm.trial_cache(40)
        group = RowGroup(slots, 0, TEXT, [3, 14])
        some = lm.forward([group], pool, layers=[0, 2]).logits
        found.append((some, lm.forward([group], pool, added=added).logits, lm.forward([group], pool).logits))
    for one, other in zip(*found, strict=True):
        assert error(one, other) < 1e-5
    assert not torch.equal(found[0][0], found[0][2])


def test_slots_that_are_not_consecutive() -> None:
    lm = in_decoder(tiny("qwen3", torch.float32), canary=False)
    pool, slots = lm.trial_cache(40)
    expected = lm.forward([RowGroup(slots, 0, TEXT, range(15))], pool).logits
    apart = lm.forward([RowGroup([*range(20, 40, 2), *range(9)], 0, TEXT, range(15))], pool).logits
    assert error(apart, expected) < 1e-5
    executor = lm.executor
    assert isinstance(executor, ComputedKernels)
    assert dict(executor.eager) == {"slots that are not consecutive": 1}


def test_embedding_and_output_layer() -> None:
    for name in ("gemma", "granite"):
        ours = in_decoder(tiny(name, torch.bfloat16), canary=False)
        model = tiny(name, torch.bfloat16)
        ids = torch.tensor([[3, 5], [7, 9]])
        assert torch.equal(ours.embed(ids), model.get_input_embeddings()(ids))
        states = layer_cases.random_rows(2, 3, 32, dtype=torch.bfloat16)
        torch.testing.assert_close(ours.project(states), model.lm_head(states))


# --- loading ----------------------------------------------------------------------------------------------------


def test_the_model_and_the_decoder_share_their_weights() -> None:
    model = tiny("llama-gqa", torch.float32)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    lm = in_decoder(model)
    assert lm.was_compared
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    held = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes()
        for weight in model.parameters()
    }
    plain = sum(weight.nbytes for weight in model.parameters())
    assert sum(held.values()) == plain, "what became one is held once"
    assert lm.weight_bytes == plain, "norms are float32 already"
    assert lm.executor.reads.number == sum(w.numel() for w in model.parameters() if w.ndim == 2)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.zero_()
        model.model.layers[0].mlp.up_proj.weight.zero_()
    assert error(all_states(lm)[-1], all_expected(model)[-1]) < 1e-5


@pytest.mark.parametrize("name", ["llama-gqa", "gemma", "phi3", "gpt-neox"])
def test_packed_weights_are_compared_and_the_models_own_freed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = tiny(name, torch.float32), torch.tensor([3, 70])
    lm = in_decoder(model, quantization="int8")
    assert lm.was_compared
    assert error(all_states(lm)[-1], all_expected(tiny(name, torch.float32))[-1]) < 0.1
    table = tiny(name, torch.float32).get_input_embeddings()
    assert error(lm.embed(ids).detach(), table(ids).detach()) < 0.02
    is_tied = model.get_output_embeddings().weight is table.weight or model.config.tie_word_embeddings
    assert model.device == torch.device("cpu")
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    held = [weight for weight in matrices if weight.untyped_storage().nbytes() > 4]
    assert len(held) == (0 if is_tied else 1), "the embedding"
    pack = DeviceWeight.of

    def swapped(layers: Any, dtype: torch.dtype, fmt: Any = None, device: Any = None) -> Any:
        parts = layers[::-1] if fmt is not None else layers
        return pack(parts, dtype, fmt, device)

    monkeypatch.setattr(DeviceWeight, "of", swapped)
    if name != "phi3" and name != "gpt-neox":
        with pytest.raises(
            UnsupportedModelError, match="packed weights of a stack of 3 linear layers are not the"
        ):
            in_decoder(tiny(name, torch.float32), quantization="int8")


def test_experts_are_counted() -> None:
    """As Transformers' own modules are, but for the norms, of which there is a copy."""
    theirs = adapt(
        tiny("qwen3-moe", torch.float32), native=False, attention_backend="packed", executor="eager"
    )
    ours = in_decoder(tiny("qwen3-moe", torch.float32))
    assert ours.executor.reads.number == theirs.executor.reads.number
    assert ours.weight_bytes == theirs.weight_bytes
    assert ours.executor.reads.num_bytes == theirs.executor.reads.num_bytes


def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family says that its norms add something to their weights, and they do not."""
    monkeypatch.setattr(KNOWN.load("qwen3"), "norm_offset", 0.1)


def test_a_model_that_the_decoder_computes_otherwise_is_run_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong(monkeypatch)
    lm = adapt(tiny("qwen3", torch.float32), native=False, attention_backend=f"{ON_CPU}:KernelsOnCpu")
    assert type(lm.executor) is RecordedExecutor
    assert lm.fell_back
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "executor cuda_kernels is not used" in line
    assert error(all_states(lm)[-1], all_expected(tiny("qwen3", torch.float32))[-1]) < 1e-5
    with pytest.raises(UnsupportedModelError, match="the fused decoder computes something else"):
        in_decoder(tiny("qwen3", torch.float32))


def test_a_kernel_that_asks_too_much_of_a_gpu_has_another_executor_compute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.errors import OutOfResources

    def fails(*_: Any) -> Any:
        raise OutOfResources(300_000, 232_448, "shared memory")  # type: ignore[no-untyped-call]

    monkeypatch.setattr(DeviceWeight, "product_of", fails)
    lm = adapt(tiny("qwen3", torch.float32), native=False, attention_backend=f"{ON_CPU}:KernelsOnCpu")
    assert type(lm.executor) is RecordedExecutor
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "executor cuda_kernels is not used: qwen3 cannot be decoded: out of resource" in line
    with pytest.raises(UnsupportedModelError, match="out of resource"):
        in_decoder(tiny("qwen3", torch.float32))


def test_a_model_that_is_compared_stays() -> None:
    lm = adapt(tiny("qwen3", torch.float32), native=False, attention_backend=f"{ON_CPU}:KernelsOnCpu")
    assert type(lm.executor) is RecordedKernels
    assert lm.was_compared
    assert not lm.fell_back
    assert lm.kernels == "decoder"


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_run_by_another(name: str) -> None:
    lm = adapt(tiny(name, torch.float32), native=False, attention_backend=f"{ON_CPU}:KernelsOnCpu")
    assert type(lm.executor) is RecordedExecutor
    with pytest.raises(
        ConfigError,
        match=r"cannot run \w+: (the fused decoder knows|its queries, keys|it lacks a part|the fused decoder of a GPU)",
    ):
        in_decoder(tiny(name, torch.float32))


def test_layers_that_differ_in_width_are_run_by_another() -> None:
    model = tiny("llama", torch.float32)
    mlp = model.model.layers[1].mlp
    for name, shape in (("gate_proj", (32, 60)), ("up_proj", (32, 60)), ("down_proj", (60, 32))):
        setattr(mlp, name, torch.nn.Linear(*shape, bias=False))
    with pytest.raises(ConfigError, match="its layers differ in width"):
        in_decoder(model)


# --- the engine -------------------------------------------------------------------------------------------------

DRAFT: dict[str, Any] = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 4}


PROMPTS = [row["messages"] for row in sample_prompts()[:4]]


def engine(spec: dict[str, Any] | None) -> LLM:
    return LLM(
        speculative_config=spec,
        attention_backend=f"{ON_CPU}:TritonOnCpu",
        executor=f"{ON_CPU}:RecordedKernels",
        cpu_kernels="torch",
        max_model_len=512,
        max_num_batched_tokens=128,
    )


def texts(llm: LLM) -> list[list[int]]:
    """Of greedy requests and sampled ones."""
    params = [
        SamplingParams(max_tokens=12, seed=n, ignore_eos=True, temperature=0.8 * (n % 2)) for n in range(4)
    ]
    outputs = llm.chat(PROMPTS, params)
    assert llm.engine.integrity() == []
    for counts in llm.engine.stats().passes.values():
        assert counts.num_replayed == counts.num_passes > 0
    return [output.outputs[0].token_ids for output in outputs]


def test_drafts_change_no_text_and_a_step_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    off, chain, tree = engine(None), engine(DRAFT), engine({**DRAFT, "tree_top_k": 3})
    expected = texts(off)
    assert texts(chain) == expected
    assert texts(tree) == expected
    audit, step, num_steps = WaitAudit(), tree.engine.step, 0

    def audited() -> Any:
        nonlocal num_steps
        num_steps += 1
        with audit:
            return step()

    monkeypatch.setattr(tree.engine, "step", audited)
    assert texts(tree) == expected
    assert 0 < sum(audit.waits.values()) <= num_steps, audit.waits
    assert sum(audit.uploads.values()) == 0, audit.uploads
