"""GGUF files of Qwen3-Next, Qwen 3.5's mixture, Granite 4 and Llama 4: what is particular of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.request import RequestOptions
from slipstream.errors import ModelError
from slipstream.models import load_config, load_model
from slipstream.models.files.gguf import open_gguf
from slipstream.models.files.gguf_architectures import read_config
from slipstream.models.outline import outline_model
from tests.kit.gguf_files import write, write_model
from tests.kit.gguf_hybrids import HYBRIDS
from tests.kit.logits import cached_logits, eager_logits, relative_error
from tests.kit.marks import needs_kernels
from tests.kit.tokenizer_families import byte_level
from tests.unit.models.test_gguf_models import tiny
from tests.unit.models.test_gguf_newer_models import made, refused

pytest.importorskip("gguf", reason="the extra `export` is not installed")

IDS = [number * 7 % 96 for number in range(1, 41)]
logits = partial(eager_logits, token_ids=IDS)
NEW = ("qwen3next", "qwen35moe", "granitehybrid", "granitehybrid with experts", "llama4")


def rewritten(file: Path, changes: dict[str, Any], drop: tuple[str, ...] = (), **keys: Any) -> Path:
    """The same file with other tensors and keys, and without those tensors that these end the names of."""
    content = open_gguf(str(file))
    arch = content.architecture
    own = {name: value for name, value in content.fields.items() if name.startswith(f"{arch}.")}
    own |= {f"{arch}.{key}": value for key, value in keys.items()}
    plain = {name: each.numbers().numpy().copy() for name, each in content.tensors.items()}
    kept = {name: each for name, each in plain.items() if not name.endswith(drop)} if drop else plain
    return write(file.with_name("y.gguf"), arch, own, kept | changes)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_hybrid_of_granite_stays_packed(kind: str, tmp_path: Path) -> None:
    """Gate and up are two tensors of a file and one matrix of the model."""
    arch, family, changes, keys = HYBRIDS["granitehybrid"]
    wide = {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256, "mamba_d_head": 64}
    model = tiny(family, changes | wide)
    keys = keys | {"ssm.inner_size": 512, "rope.dimension_count": 64}
    with torch.no_grad():
        file = str(write_model(tmp_path / "x.gguf", arch, model, keys, {"": kind}))
    lm, planned = load_model(file), outline_model(file)
    assert lm.kernels == "native"
    assert lm.weight_type == kind
    assert relative_error(cached_logits(lm, IDS), logits(model)) < 0.04
    assert planned.held.total_bytes == lm.weight_bytes
    assert lm.weight_bytes < (1.3 if kind == "Q8_0" else 0.8) * lm.num_parameters
    assert torch.equal(logits(load_model(file, dtype="float32", pack=False).model), logits(model))


@needs_kernels
def test_rows_of_two_types_are_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No kernel holds a matrix whose rows have blocks of two types."""
    model = made("granitehybrid", tmp_path / "x.gguf", {"": "Q8_0", "blk.0.ffn_up.weight": "Q4_0"})
    lm = load_model(str(tmp_path / "x.gguf"))
    assert "holds Q8_0/Q4_0 weights, which are converted" in caplog.text
    assert relative_error(cached_logits(lm, IDS), logits(model)) < 0.04
    wide = load_model(str(tmp_path / "x.gguf"), dtype="float32", pack=False).model
    name = "model.layers.0.shared_mlp.input_linear.weight"
    assert torch.equal(wide.state_dict()[name], model.state_dict()[name])


@pytest.mark.parametrize("case", NEW)
def test_texts_with_drafts_are_the_models(case: str, tmp_path: Path) -> None:
    arch, family, changes, keys = HYBRIDS[case]
    tokenizer = byte_level(320)
    tokenizer.save_pretrained(tmp_path)
    own = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "tie_word_embeddings": False}
    model = tiny(family, changes | own)
    with torch.no_grad():
        file = write_model(tmp_path / "x.gguf", arch, model, keys, {"": "Q8_0"})
    llm = LLM(str(file), dtype="float32", speculative_config={"method": "ngram"})
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with torch.inference_mode():
        expected = model.generate(torch.tensor([IDS]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    wanted = expected[0, len(IDS) :].tolist()
    guess = [token if place % 5 else token - 1 for place, token in enumerate(wanted, start=1)]
    [answer] = llm.generate([IDS], params, options=[RequestOptions(prediction=guess)])
    assert list(answer.outputs[0].token_ids) == wanted
    assert 4 < answer.metrics.num_accepted_tokens < answer.metrics.num_draft_tokens
    assert len(set(wanted)) > 4


def test_experts_that_no_kernel_holds_are_refused_by_name(tmp_path: Path) -> None:
    made("granitehybrid with experts", tmp_path / "x.gguf", {"": "Q8_0"})
    with pytest.raises(
        ModelError, match=r"layers\.0\.block_sparse_moe\.experts\), .* widens the whole model"
    ):
        load_model(str(tmp_path / "x.gguf"))


def test_the_oldest_files_of_qwen3_next_have_one_matrix(tmp_path: Path) -> None:
    model = made("qwen3next", tmp_path / "x.gguf")
    state = model.state_dict()
    whole = {
        f"blk.{layer}.ssm_in.weight": state[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].numpy()
        for layer in (0, 2)
    }
    file = rewritten(tmp_path / "x.gguf", whole, ("attn_qkv.weight", "attn_gate.weight"))
    read = load_model(str(file), pack=False, canary=False).model
    torch.testing.assert_close(logits(read), logits(model), rtol=1e-5, atol=1e-5)
    file = rewritten(tmp_path / "x.gguf", whole)
    with pytest.raises(ModelError, match=r"has a matrix twice: blk\.0\.attn_gate\.weight, blk\.0\.attn_qkv"):
        load_model(str(file))


@pytest.mark.parametrize("case", ["qwen3next", "qwen35moe"])
def test_stacks_of_gate_and_up_together_and_gates_of_one_dimension(case: str, tmp_path: Path) -> None:
    model = made(case, tmp_path / "x.gguf")
    state = model.state_dict()
    changes = {}
    for layer in range(3):
        name, mlp = f"blk.{layer}", f"model.layers.{layer}.mlp"
        changes[f"{name}.ffn_gate_up_exps.weight"] = state[f"{mlp}.experts.gate_up_proj"].numpy()
        changes[f"{name}.ffn_gate_inp_shexp.weight"] = state[f"{mlp}.shared_expert_gate.weight"][0].numpy()
    file = rewritten(tmp_path / "x.gguf", changes, ("ffn_gate_exps.weight", "ffn_up_exps.weight"))
    read = load_model(str(file), pack=False, canary=False).model
    torch.testing.assert_close(logits(read), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [*NEW, "lfm2", "qwen35"])
def test_files_of_16_bits_are_such_whatever_llama_cpp_keeps_wide(case: str, tmp_path: Path) -> None:
    made(case, tmp_path / "x.gguf")
    wide = (
        "ffn_gate_inp",
        "ffn_gate_inp_shexp",
        "ssm_conv1d",
        "shortconv.conv",
        "ssm_a",
        "ssm_d",
        "ssm_norm",
    )
    half = {
        name: entry.numbers().numpy().astype(np.float16)
        for name, entry in open_gguf(str(tmp_path / "x.gguf")).tensors.items()
        if len(entry.shape) > 1 and not name.removesuffix(".weight").endswith(wide)
    }
    file = str(rewritten(tmp_path / "x.gguf", half))
    assert load_config(file).dtype == torch.float16
    lm, plain = load_model(file), load_model(file, dtype="float32", pack=False).model
    torch.testing.assert_close(cached_logits(lm, IDS), logits(plain), rtol=1e-4, atol=1e-4)
    assert outline_model(file).held.total_bytes == lm.weight_bytes


def test_files_may_say_of_each_layer_whether_it_is_recurrent(tmp_path: Path) -> None:
    made("qwen3next", tmp_path / "x.gguf")
    says: dict[str, Any] = {"attention.recurrent_layers": [True, False, True], "full_attention_interval": 4}
    config = read_config(open_gguf(str(rewritten(tmp_path / "x.gguf", {}, **says))))
    assert config.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    says["attention.recurrent_layers"] = [True]
    with pytest.raises(ModelError, match="does not say of all its layers which are recurrent"):
        read_config(open_gguf(str(rewritten(tmp_path / "x.gguf", {}, **says))))


def test_llama4_has_the_constants_of_llama_cpp(tmp_path: Path) -> None:
    made("llama4", tmp_path / "x.gguf")
    config = read_config(open_gguf(str(tmp_path / "x.gguf")))
    assert config.no_rope_layers == [1, 1, 1, 0]
    assert config.layer_types == ["chunked_attention"] * 3 + ["full_attention"]
    assert config.moe_layers == [1, 3]
    assert (config.attention_chunk_size, config.floor_scale, config.attn_scale) == (8192, 8192, 0.1)
    assert config.attn_temperature_tuning
    assert config.use_qk_norm


def test_llama4_with_128_experts_has_no_norms_of_heads(tmp_path: Path) -> None:
    arch, family, changes, keys = HYBRIDS["llama4"]
    model = tiny(family, changes | {"num_local_experts": 128, "use_qk_norm": False})
    file = write_model(tmp_path / "x.gguf", arch, model, keys | {"expert_count": 128})
    read = load_model(str(file), pack=False, canary=False).model
    assert torch.equal(logits(read), logits(model))


def test_llama4_divides_long_waves_alone(tmp_path: Path) -> None:
    rope = {
        **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    }
    arch, family, changes, keys = HYBRIDS["llama4"]
    model = tiny(family, changes | {"rope_parameters": rope})
    write_model(tmp_path / "x.gguf", arch, model, keys)
    waves = 2 * np.pi * 5e5 ** (np.arange(0, 32, 2) / 32)
    factors = np.where(waves < 8192, 1, 16).astype(np.float32)
    assert 0 < (factors == 1).sum() < 16
    file = rewritten(tmp_path / "x.gguf", {"rope_freqs.weight": factors})
    read = load_model(str(file), pack=False, canary=False).model
    assert read.config.rope_parameters == rope
    assert torch.equal(logits(read), logits(model))


def test_what_files_lack_or_say_besides_is_refused(tmp_path: Path) -> None:
    say = partial(refused, tmp_path)
    for case, key, value in (
        ("qwen3next", "expert_weights_scale", 2.5),
        ("qwen35moe", "expert_group_count", 4),
        ("granitehybrid", "attention.sliding_window", 64),
        ("llama4", "attention.sliding_window", 0),
        ("llama4", "expert_gating_func", 1),
    ):
        arch = HYBRIDS[case][0]
        assert f"has the key {arch}.{key}, which is not known of this family" in say(case, {key: value})
    for case, drop, what in (
        ("qwen3next", "blk.0.attn_gate.weight", "linear_attn.in_proj_qkvz.weight (blk.0.attn_gate.weight)"),
        ("qwen3next", "blk.2.ssm_ba.weight", "model.layers.2.linear_attn.in_proj_ba.weight (blk.2.ssm_ba"),
        ("qwen3next", "blk.0.ssm_a", "model.layers.0.linear_attn.A_log"),
        ("qwen35moe", "blk.1.ffn_gate_inp_shexp.weight", "model.layers.1.mlp.shared_expert_gate.weight"),
        (
            "granitehybrid",
            "blk.1.ffn_up.weight",
            "model.layers.1.shared_mlp.input_linear.weight (blk.1.ffn_up",
        ),
        ("granitehybrid", "blk.0.ssm_d", "model.layers.0.mamba.D"),
        ("granitehybrid", "blk.0.ssm_dt.bias", "model.layers.0.mamba.dt_bias"),
        (
            "granitehybrid with experts",
            "blk.0.ffn_down_shexp.weight",
            "shared_mlp.output_linear.weight (blk.0.",
        ),
        (
            "llama4",
            "blk.1.ffn_gate_shexp.weight",
            "model.layers.1.feed_forward.shared_expert.gate_proj.weight",
        ),
        ("llama4", "blk.3.ffn_down_exps.weight", "layers.3.feed_forward.experts.0.down_proj.weight (blk.3."),
    ):
        message = say(case, {}, drop)
        assert "lacks weights: " in message
        assert what in message
    assert "rotates 8 of the 16 numbers of a head, as Bamba does" in say(
        "granitehybrid", {"rope.scaling.finetuned": True, "rope.dimension_count": 8}
    )
    assert "7 groups and states of 64 numbers do not fit" in say("granitehybrid", {"ssm.group_count": 7})
    assert "which of its 3 layers attend" in say("granitehybrid", {"attention.head_count_kv": 2})
    assert "blk.0.ssm_in.weight is 360 x 64, and the keys say 344 x 64" in say(
        "granitehybrid", {"ssm.state_size": 20}
    )
    assert "ffn_gate_shexp.weight is 32 x 64, and the keys say 96 x 64" in say(
        "qwen3next", {"expert_shared_feed_forward_length": None}
    )
    assert "Llama 4 rotates all" in say("llama4", {"rope.dimension_count": 8})
    odd = np.linspace(1, 3, 16, dtype=np.float32)
    assert "not those of a Llama 3 or 4" in say("llama4", {}, **{"rope_freqs.weight": odd})
