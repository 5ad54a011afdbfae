"""Models in GGUF files: every family's logits are those of the Transformers model that the file was made from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.draft.heads.checkpoints import held_bytes
from slipstream.engine.description import describe
from slipstream.errors import ModelError
from slipstream.models import load_config, load_model, load_tokenizer
from slipstream.models.executor.cpu_kernels import CpuKernels
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_architectures import read_config
from slipstream.models.files.gguf_rope import llama3_factors
from slipstream.models.linear.formats import weight_format
from slipstream.models.load_options import LoadOptions
from slipstream.models.outline import outline_model
from slipstream.tools.export.checkpoints.gguf_models import finish, model_writer
from tests.kit.gguf_files import QUANTISED, in_two_parts, write, write_model
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_level

gguf = pytest.importorskip("gguf", reason="the extra `export` is not installed")

IDS = [number * 7 % 96 for number in range(1, 41)]
logits = partial(eager_logits, token_ids=IDS)
packed_logits = partial(cached_logits, token_ids=IDS)
SIZES = sizes(64, 3, 4, 2, inner=96, vocab=96, context=128, bos=None, eos=1, pad=None)
WINDOW = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "tie_word_embeddings": True}, {"rope.freq_base": 10000.0}),
    "qwen2": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope.freq_base": 1e6},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}),
    "qwen3moe": (
        "qwen3_moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 64,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
        {
            **WINDOW,
            "expert_count": 5,
            "expert_used_count": 2,
            "expert_feed_forward_length": 96,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2},
        {"expert_count": 3, "expert_used_count": 2, "rope.freq_base": 1e6},
    ),
    "gemma": ("gemma", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8},
        WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        WINDOW | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "phi3": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
        {"attention.scale": 0.25, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 2.0},
    ),
    "olmo2": ("olmo2", {}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}, {"rope.freq_base": 2e6}),
    "starcoder2": (
        "starcoder2",
        {"sliding_window": None, "norm_epsilon": 1e-6},
        {"attention.layer_norm_epsilon": 1e-6},
    ),
}
ARCHS = {"mixtral": "llama"}
"""Names of families that llama.cpp has no name of their own for."""
WITH_EXPERTS = ("mixtral", "qwen3moe", "gpt-oss")


def tiny(model_type: str, changes: dict[str, Any]) -> Any:
    """A random Transformers model; its norms and biases are random too."""
    torch.manual_seed(19)
    config: Any = AutoConfig.for_model(model_type, **SIZES | {"rms_norm_eps": 1e-6} | changes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_has_the_logits_of_its_model(arch: str, tmp_path: Path) -> None:
    model_type, changes, keys = FAMILIES[arch]
    model = tiny(model_type, changes)
    file = write_model(
        tmp_path / "x.gguf", ARCHS.get(arch, arch), model, keys | {"tokenizer.ggml.eos_token_id": 1}
    )
    read = load_model(str(file), pack=False, canary=False).model
    assert type(read) is type(model)
    assert torch.equal(logits(read), logits(model)) or arch.startswith(
        "gemma"
    )  # norms are stored as 1 + weight
    torch.testing.assert_close(logits(read), logits(model), rtol=1e-4, atol=1e-4)


def quantised(kinds: dict[str, str], tmp_path: Path, **changes: Any) -> tuple[Path, Any]:
    """A tiny Llama in random blocks, and the Transformers model with the same numbers."""
    model = tiny("llama", {"hidden_size": 256, "intermediate_size": 512} | changes)
    with torch.no_grad():
        return write_model(tmp_path / "x.gguf", "llama", model, {}, kinds), model


MIXED = {
    "": "Q4_K",
    "blk.0.attn_v.weight": "Q6_K",
    "blk.1.ffn_up.weight": "Q8_0",
    "token_embd.weight": "Q6_K",
}
"""As llama.cpp's own mixtures: types differ within a stack of layers."""
KINDS = [(kind, number % 2 == 0) for number, kind in enumerate(QUANTISED)] + [
    ("mixed", False),
    ("mixed", True),
]
"""Every kind, every other one in a file whose embedding is its head as well."""


@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_quantised_files_have_the_logits_of_their_numbers(kind: str, tied: bool, tmp_path: Path) -> None:
    kinds = MIXED if kind == "mixed" else {"": kind}
    file, model = quantised(kinds, tmp_path, tie_word_embeddings=tied)
    expected = logits(model)
    plain = load_model(str(file), cpu_kernels="torch")
    torch.testing.assert_close(logits(plain.model), expected, rtol=1e-4, atol=1e-4)
    assert plain.weight_type == ("Q6_K, Q4_K, Q8_0" if kind == "mixed" else kind)
    wide = load_model(str(file), dtype="float32", pack=False, canary=False)
    assert torch.equal(logits(wide.model), expected)


MOST_BYTES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"), 0.7),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q8_0", "Q5_K", "Q6_K"), 1.25),
    **{"Q2_K": 0.8, "mixed": 0.85},
}
"""A weight, its part of scales and padding included."""
TOLERANCES = dict.fromkeys(QUANTISED, 0.03) | {"mixed": 0.03, "Q4_0": 0.01}
"""Errors of logits over their spread: rows are rounded to 8 bits before they are multiplied. Measured: 0.009 to 0.02,
with Q4_0, whose codes have a mean, 0.005."""


@needs_kernels
@pytest.mark.parametrize(("kind", "tied"), [(kind, not tied) for kind, tied in KINDS])
def test_quantised_files_stay_packed(kind: str, tied: bool, tmp_path: Path) -> None:
    file, model = quantised(MIXED if kind == "mixed" else {"": kind}, tmp_path, tie_word_embeddings=tied)
    lm = load_model(str(file))
    assert lm.kernels == "decoder"
    assert relative_error(packed_logits(lm), logits(model)) < TOLERANCES[kind]
    assert outline_model(str(file)).held.total_bytes == lm.weight_bytes
    assert lm.weight_bytes < MOST_BYTES[kind] * lm.num_parameters


@needs_kernels
def test_a_format_that_is_asked_for_beside_quantised_layers_is_told_alike(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, _ = quantised({"": "Q4_0"}, tmp_path)
    load_model(str(file), quantization="int8")
    [loaded] = [line for line in caplog.messages if "is for all others" in line]
    caplog.clear()
    config = EngineConfig(str(file), tokenizer=EMBEDDED_TARGET, quantization="int8")
    described = describe(config, SpeculativeConfig())
    assert [line for line in caplog.messages if "is for all others" in line] == [loaded]
    assert described.model.weight_type == "Q4_0"


@needs_kernels
def test_heads_beside_quantised_layers_have_eight_bits(tmp_path: Path) -> None:
    """In float32 a small head would read more than half as much as its target does."""
    file, _ = quantised({"": "Q4_0"}, tmp_path)
    weights = {"weight": torch.empty(8, 64), "norm": torch.empty(64)}
    for options, expected in (
        ({}, "int8"),
        ({"quantization": "bfloat16"}, "bfloat16"),
        ({"cpu_kernels": "torch"}, "float32"),
    ):
        lm = load_model(str(file), **options)
        outline = outline_model(str(file), LoadOptions(**options))
        assert lm.head_format(None).name == outline.head_format(None).name == expected
        assert lm.head_format("float32").name == "float32"
        held = weight_format(expected).num_bytes(8 * 64, 8) + 4 * 64
        assert held_bytes(weights, outline, None) == held


@needs_kernels
@pytest.mark.parametrize("arch", [arch for arch in FAMILIES if arch not in WITH_EXPERTS])
def test_quantised_files_of_every_family_stay_packed(arch: str, tmp_path: Path) -> None:
    model_type, changes, keys = FAMILIES[arch]
    model = tiny(model_type, changes)
    with torch.no_grad():
        file = write_model(tmp_path / "x.gguf", arch, model, keys, {"": "Q4_0"})
    lm = load_model(str(file))
    assert lm.kernels == "decoder"
    assert relative_error(packed_logits(lm), logits(model)) < 0.03
    assert outline_model(str(file)).held.total_bytes == lm.weight_bytes


@needs_kernels
@pytest.mark.parametrize("kind", QUANTISED)
def test_packed_numbers_are_the_files(kind: str, tmp_path: Path) -> None:
    file, model = quantised({"": kind}, tmp_path)
    lm = load_model(str(file), canary=False)
    assert isinstance(lm.executor, CpuKernels)
    theirs = model.lm_head.weight.detach()
    ours = lm.executor.head.unpack(torch.arange(len(theirs)))
    if kind in ("Q4_0", "Q5_0", "Q8_0", "Q4_K", "IQ4_NL", "MXFP4"):
        assert torch.equal(ours, theirs)
    else:  # a scale and a zero of 11 bits
        assert float((ours - theirs).norm() / theirs.norm()) < 5e-4


@needs_kernels
def test_a_file_in_parts_is_the_whole_one(tmp_path: Path) -> None:
    file, _ = quantised({"": "Q4_0"}, tmp_path)
    parts = in_two_parts(file, tmp_path / "folder")
    for path in (parts[1], tmp_path / "folder"):
        lm = load_model(str(path))
        assert torch.equal(packed_logits(lm), packed_logits(load_model(str(file))))
        assert outline_model(str(path)).held.total_bytes == lm.weight_bytes
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"there is no file .*00002-of-00002\.gguf': it is part 2 of the 2"):
        outline_model(str(tmp_path / "folder"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as a GGUF file in float16."""
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    finish(model_writer(EMBEDDED_TARGET, file))
    return file


def test_a_file_answers_as_its_folder_does_also_as_a_draft(target: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    chat = [{"role": "user", "content": "Show me the command tar."}]
    answers = [LLM(str(path)).chat([chat], params)[0].outputs[0] for path in (target, EMBEDDED_TARGET)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].text == answers[1].text
    spec = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3}
    drafted = LLM(EMBEDDED_TARGET, speculative_config=spec).chat([chat], params)[0]
    assert drafted.outputs[0].token_ids == answers[0].token_ids
    assert drafted.metrics.acceptance_rate == 1.0


def test_a_file_is_kept_as_it_is_stored(target: Path) -> None:
    lm = load_model(str(target))
    assert lm.weight_format.name == "float16"
    assert lm.kernels in ("decoder", "torch")
    assert load_config(str(target)).dtype == torch.float16


def rope_of(tmp_path: Path, keys: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    model = tiny("llama", {})
    file = write_model(tmp_path / "x.gguf", "llama", model, keys)
    if tensors:
        content = open_gguf(str(file))
        plain = {name: each.numbers().numpy() for name, each in content.tensors.items()}
        write(
            file, "llama", {k: v for k, v in content.fields.items() if k.startswith("llama")}, plain | tensors
        )
    found: dict[str, Any] = read_config(open_gguf(str(file))).rope_parameters
    return found


def test_rotary_positions_are_those_of_the_file(tmp_path: Path) -> None:
    theta = {"rope.freq_base": 5e5}
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_factors(llama3, 16).numpy()
    assert rope_of(tmp_path, theta, {"rope_freqs.weight": factors}) == llama3
    with pytest.raises(ModelError, match="not those of a Llama 3"):
        rope_of(tmp_path, theta, {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)})
    for keys in (
        {"rope.scale_linear": 2.0},  # the key of the first files
        {"rope.scaling.factor": 2.0},  # a factor without a kind
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0, "rope.scale_linear": 2.0},
    ):
        linear = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
        assert rope_of(tmp_path, theta | keys, {}) == linear
    for keys in (
        {"rope.scaling.type": "linear"},
        {"rope.scaling.type": "yarn"},
        {"rope.scaling.type": "none", "rope.scaling.factor": 2.0},
        {"rope.scaling.factor": 0.0},
        {"rope.scaling.factor": 1.0},
    ):
        assert rope_of(tmp_path, theta | keys, {}) == {"rope_type": "default", "rope_theta": 5e5}
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    found = rope_of(tmp_path, yarn, {})
    assert (found["rope_type"], found["factor"], found["original_max_position_embeddings"]) == (
        "yarn",
        4.0,
        64,
    )
    with pytest.raises(ModelError, match="positions of kind 'longrope'"):
        rope_of(tmp_path, {"rope.scaling.type": "longrope"}, {})
    del yarn["rope.scaling.original_context_length"]  # then it is the context length
    assert rope_of(tmp_path, yarn, {})["original_max_position_embeddings"] == 128
    for kind in (None, "linear", "yarn", "longrope"):
        keys = {"rope.scaling.factor": 2.0} | ({} if kind is None else {"rope.scaling.type": kind})
        with pytest.raises(ModelError, match=f"a scaling of them of kind '{kind or 'linear'}' as well"):
            rope_of(tmp_path, theta | keys, {"rope_freqs.weight": factors})
    unscaled = theta | {"rope.scaling.type": "none", "rope.scaling.factor": 2.0}
    assert rope_of(tmp_path, unscaled, {"rope_freqs.weight": factors}) == llama3
    for name, value in (("freq_base", "much"), ("scaling.factor", -1.0), ("scale_linear", float("nan"))):
        with pytest.raises(ModelError, match=f"llama.rope.{name} is .*; it must be a number from 0 on"):
            rope_of(tmp_path, {f"rope.{name}": value}, {})


def test_rotary_positions_of_each_layer_type_are_a_dictionary_of_their_own(tmp_path: Path) -> None:
    model_type, changes, keys = FAMILIES["gemma3"]
    file = write_model(tmp_path / "x.gguf", "gemma3", tiny(model_type, changes), keys)
    assert read_config(open_gguf(str(file))).rope_parameters == changes["rope_parameters"]


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_files_that_disagree_with_themselves_are_refused(tmp_path: Path) -> None:
    file, model = tmp_path / "x.gguf", tiny("llama", {})
    for keys, what in (
        ({"embedding_length": 128}, "token_embd.weight is 96 x 64, and the keys say any x 128"),
        ({"block_count": 2**31}, "tensors of 3 layers, and its keys say 2147483648"),
        ({"block_count": 2}, "tensors of 3 layers, and its keys say 2"),
        ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"attention.head_count_kv": 3}, "4 heads cannot share 3 heads"),
        ({"attention.key_length": 32}, "blk.0.attn_q.weight is 64 x 64, and the keys say 128 x 64"),
        ({"feed_forward_length": [96, 96, 80]}, "the layers differ in feed_forward_length"),
        ({"expert_count": 4}, "llama.expert_used_count is None"),
    ):
        assert what in refusal(write_model(file, "llama", model, keys))
    content = open_gguf(str(write_model(file, "llama", model, {})))
    plain = {name: each.numbers().numpy().copy() for name, each in content.tensors.items()}
    fields = {name: value for name, value in content.fields.items() if name.startswith("llama")}
    short = plain | {"blk.1.ffn_up.weight": plain["blk.1.ffn_up.weight"][:80]}
    assert "blk.1.ffn_up.weight is 80 x 64, and the keys say 96 x 64" in refusal(
        write(file, "llama", fields, short)
    )
    norm = plain | {"blk.1.ffn_norm.weight": plain["blk.1.ffn_norm.weight"][:32]}
    assert "misshapen weights: model.layers.1.post_attention_layernorm.weight" in refusal(
        write(file, "llama", fields, norm)
    )
    lacking = {name: value for name, value in plain.items() if name != "blk.2.attn_v.weight"}
    assert "lacks weights: model.layers.2.self_attn.v_proj.weight" in refusal(
        write(file, "llama", fields, lacking)
    )
    other = plain | {"blk.1.ssm_in.weight": np.ones((2, 2), dtype=np.float32)}
    assert "a tensor that llama models have not: blk.1.ssm_in.weight" in refusal(
        write(file, "llama", fields, other)
    )
    assert "holds a mamba model; of GGUF files these are read: llama, " in refusal(
        write(file, "mamba", {}, plain)
    )
    assert "no weights of a model" in refusal(
        write(file, "llama", fields, {"blk.0.x": np.ones(2), "blk.1.x": np.ones(2), "blk.2.x": np.ones(2)})
    )


HUGE = 2**31


@pytest.mark.parametrize(
    ("arch", "keys", "changes", "what"),
    [  # sizes that nothing in the file has: without these weights nothing else would tell
        (
            "llama",
            {"feed_forward_length": HUGE},
            {"blk.1.ffn_down": (64, 96)},
            "ffn_gate.weight is 96 x 64, and",
        ),
        *(
            ("llama", {"feed_forward_length": HUGE}, dict.fromkeys(drops), "lacks weights: model.layers.")
            for drops in [[f"blk.{n}.ffn_{part}" for n in range(3) for part in ("gate", "up", "down")]]
        ),
        (
            "llama",
            {"attention.key_length": HUGE, "attention.value_length": HUGE},
            dict.fromkeys(f"blk.{n}.attn_{part}" for n in range(3) for part in ("q", "k", "v", "output")),
            "lacks weights: model.layers.0.self_attn.q_proj.weight (blk.0.attn_q.weight)",
        ),
        ("llama", {}, {"odd": (4,)}, "a tensor that llama models have not: odd"),
        ("llama", {}, {"token_embd": (64,)}, "token_embd.weight is 64, and the keys say any x 64"),
        ("llama", {}, {"output": (2, 3, 64)}, "output.weight is 2 x 3 x 64, and the keys say any x 64"),
        ("llama", {}, {"rope_freqs": (4097,)}, "lacks rope_freqs.weight, or it is no list"),
        ("llama", {"attention.layer_norm_rms_epsilon": float("nan")}, {}, "does not say the epsilon"),
        ("llama", {"context_length": "x" * 99}, {}, "llama.context_length is 'xxxx"),
        ("llama", {"embedding_length": ["x" * 99]}, {}, "llama.embedding_length is 'xxxx"),
        ("granite", {"attention.scale": "x"}, {}, "granite.attention.scale is 'x'; it must be a number"),
        ("granite", {"logit_scale": float("inf")}, {}, "granite.logit_scale is inf; it must be a number"),
        (
            "granite",
            {"rope.scaling.finetuned": False},
            {},
            "rotates no positions (granite.rope.scaling.finetuned",
        ),
        (
            "llama",
            {"rope.scaling.attn_factor": 2.0},
            {},
            "multiplies attention by 2 (rope.scaling.attn_factor)",
        ),
        ("phi3", {"rope.dimension_count": "x"}, {}, "phi3.rope.dimension_count is 'x'"),
        ("qwen3moe", {"expert_used_count": 6}, {}, "uses more experts for a token than the 5 that it has"),
    ],
)
def test_hostile_models_are_refused_before_anything_is_made_of_their_sizes(
    arch: str, keys: dict[str, Any], changes: dict[str, Any], what: str, tmp_path: Path
) -> None:
    model_type, settings, own = FAMILIES[arch]
    file = write_model(tmp_path / "x.gguf", arch, tiny(model_type, settings), own | keys)
    content = open_gguf(str(file))
    plain: dict[str, Any] = {name: each.numbers().numpy().copy() for name, each in content.tensors.items()}
    for name, shape in changes.items():
        ending = "odd" if name == "odd" else f"{name}.weight"
        if shape is None:
            plain.pop(ending)
        else:
            plain[ending] = np.ones(shape, dtype=np.float32)
    fields = {name: value for name, value in content.fields.items() if name.startswith(arch)}
    message = refusal(write(file, arch, fields, plain))
    assert what in message
    assert len(message) < 250 + len(str(file))


@pytest.mark.parametrize("num_tokens", [95, 97])
def test_a_vocabulary_of_another_size_than_the_embedding_is_refused(num_tokens: int, tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.tokens": [str(number) for number in range(num_tokens)]}
    file = write_model(tmp_path / "x.gguf", "llama", tiny("llama", {}), {})
    content = open_gguf(str(file))
    plain = {name: each.numbers().numpy() for name, each in content.tensors.items()}
    fields = {name: value for name, value in content.fields.items() if name.startswith("llama")}
    write(file, "llama", fields | keys, plain)
    assert f"has {num_tokens} tokens, and rows for 96 in its token_embd.weight" in refusal(file)


def test_names_that_lead_nowhere_are_refused(tmp_path: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "none.gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "its header ends in the middle" in refusal(tmp_path / "a.gguf")
    assert f"give one of them, as '{tmp_path / 'a.gguf'}'" in refusal(tmp_path)


def test_a_hub_name_is_downloaded(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, file: str, revision: str | None) -> str:
        asked.append((repo, file, revision))
        return str(target)

    monkeypatch.setattr("slipstream.models.files.gguf_model.hf_hub_download", download)
    assert load_config("some-one/Model-GGUF:quants/model.gguf", revision="main").hidden_size == 320
    assert asked == [("some-one/Model-GGUF", "quants/model.gguf", "main")]
    asked.clear()
    load_config("some-one/Model-GGUF:model-00002-of-00003.gguf")
    assert [file for _, file, _ in asked] == [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


TEXT = "Show me tar.  1234 don't\n\té 日本 👍 <|end|><|user|>x"


def test_the_tokenizer_beside_is_taken_where_it_is_the_models(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    file.symlink_to(target)
    own, whole = load_tokenizer(str(file)), load_tokenizer(EMBEDDED_TARGET)
    assert own(TEXT).input_ids == whole(TEXT).input_ids
    assert own.chat_template == whole.chat_template
    whole.chat_template = None
    whole.add_tokens(["<|more|>"])
    whole.save_pretrained(tmp_path)
    beside = load_tokenizer(str(file))
    assert "<|more|>" in beside.get_vocab()
    assert beside.chat_template == own.chat_template  # the file's, where there is none beside it
    byte_level().save_pretrained(tmp_path)
    assert load_tokenizer(str(file))(TEXT).input_ids == own(TEXT).input_ids
