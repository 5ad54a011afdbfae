"""GGUF files for llama.cpp: read back by its own package, and made folders again bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.eagle_files import read_eagle
from slipstream.errors import ModelError
from slipstream.export.checkpoints import convert, convert_back
from slipstream.export.checkpoints.gguf_shape import llama3_factors
from slipstream.export.checkpoints.target_files import TargetFiles
from slipstream.export.contract import ExportError
from slipstream.models import load_tokenizer
from tests.export.test_checkpoint_eagle import equal, random_head, record

gguf = pytest.importorskip("gguf", reason="the extra `export` is not installed")
TEXT = "Show me tar.  1234 don't\n\té 日本 👍 <|end|><|user|>x"


def fields_of(path: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(str(path)).fields.items()}


def tensors_of(path: Any) -> dict[str, Any]:
    return {entry.name: entry for entry in gguf.GGUFReader(str(path)).tensors}


def test_a_pair_comes_back_bit_for_bit(tmp_path: Path) -> None:
    pair = record(EMBEDDED_DRAFT, method="draft_model")
    made = convert(pair, "llama_cpp", tmp_path / "gguf")
    theirs = record(str(made.draft), method="draft_model", target=str(made.target))
    back = convert_back(theirs, "llama_cpp", tmp_path / "back")
    assert equal(EMBEDDED_TARGET, str(back.target))
    assert equal(EMBEDDED_DRAFT, str(back.draft))
    mine, its = load_tokenizer(EMBEDDED_TARGET), load_tokenizer(str(back.target))
    assert its(TEXT).input_ids == mine(TEXT).input_ids
    assert its.decode(its(TEXT).input_ids) == mine.decode(mine(TEXT).input_ids)
    assert its.chat_template == mine.chat_template
    config = json.loads((Path(str(back.target)) / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-06
    prompt = "Show me the command tar."
    accepted = []
    for target, draft in ((EMBEDDED_TARGET, EMBEDDED_DRAFT), (str(back.target), str(back.draft))):
        spec = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
        params = SamplingParams(temperature=0, max_tokens=24)
        answer = LLM(target, speculative_config=spec).generate([prompt], params)[0]
        accepted.append((answer.outputs[0].token_ids, answer.metrics.num_accepted_tokens))
    assert accepted[0] == accepted[1]


def test_the_files_say_what_llama_cpp_reads(tmp_path: Path) -> None:
    made = convert(record(), "llama_cpp", tmp_path)
    target, head = fields_of(made.target), fields_of(made.draft)
    assert target["general.architecture"] == "llama"
    assert target["tokenizer.ggml.pre"] == "smollm"  # digits one by one
    assert target["tokenizer.ggml.eos_token_id"] == 1
    assert target["tokenizer.ggml.add_bos_token"] is False
    assert "output.weight" not in tensors_of(made.target)  # tied to the embedding
    assert head["general.architecture"] == "eagle3"
    assert head["eagle3.target_layers"] == [1, 3, 5]
    assert head["eagle3.norm_before_residual"] is False
    assert head["eagle3.target_hidden_size"] == 320
    for name in ("tokens", "token_type", "merges", "eos_token_id", "bos_token_id"):
        assert head[f"tokenizer.ggml.{name}"] == target[f"tokenizer.ggml.{name}"]
    tensors = tensors_of(made.draft)
    assert "d2t" not in tensors
    assert "token_embd.weight" not in tensors
    assert all(entry.tensor_type.name == "F32" for entry in tensors.values() if len(entry.shape) == 1)


@pytest.mark.parametrize("more", [{}, {"own_embedding": True, "norm_before_residual": True}])
def test_a_pruned_head_has_absolute_ids_and_comes_back(more: dict[str, Any], tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", draft_vocab_size=512, **more)
    made = convert(record(head), "llama_cpp", tmp_path / "gguf")
    ours = read_eagle(str(head), TargetFiles(EMBEDDED_TARGET))
    d2t = tensors_of(made.draft)["d2t"]
    assert d2t.tensor_type.name == "I64"
    assert d2t.data.tolist() == ours.draft_token_ids.tolist()  # not offsets
    back = convert_back(record(str(made.draft)), "llama_cpp", tmp_path / "back")
    assert equal(head, str(back.draft))
    assert read_eagle(str(back.draft), TargetFiles(EMBEDDED_TARGET)).config == ours.config


def test_offsets_in_a_gguf_file_are_refused(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", draft_vocab_size=512)
    made = convert(record(head), "llama_cpp", tmp_path / "gguf")
    reader = gguf.GGUFReader(str(made.draft), "r+")
    entry = next(entry for entry in reader.tensors if entry.name == "d2t")
    entry.data[:] = entry.data - range(512)
    del reader
    with pytest.raises(ModelError, match="absolute ids, not offsets"):
        convert_back(record(str(made.draft)), "llama_cpp", tmp_path / "back")


def test_heads_of_two_layers_numbers_are_refused(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", feature_layers=(1, 3))
    with pytest.raises(ExportError, match="reads 2 hidden states"):
        convert(record(head), "llama_cpp", tmp_path / "gguf")


def test_bfloat16_and_biases_keep_their_bits(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4096,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    folder = tmp_path / "qwen"
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    load_tokenizer(EMBEDDED_TARGET).save_pretrained(folder)
    off = record(EMBEDDED_DRAFT, method="draft_model", target=str(folder))
    made = convert(off, "llama_cpp", tmp_path / "gguf")
    theirs = record(str(made.draft), method="draft_model", target=str(made.target))
    back = convert_back(theirs, "llama_cpp", tmp_path / "back")
    assert equal(folder, str(back.target))
    assert tensors_of(made.target)["blk.0.attn_q.weight"].tensor_type.name == "BF16"


def test_what_llama_cpp_would_read_differently_is_refused(tmp_path: Path) -> None:
    from tests.unit.tokenizer_families import byte_fallback

    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(EMBEDDED_TARGET).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    pair = record(EMBEDDED_DRAFT, method="draft_model", target=str(folder))
    for changes, what in (
        ({"model_type": "mistral", "sliding_window": 64}, "sliding-window"),
        ({"model_type": "gemma"}, "gemma"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ExportError, match=what):
            convert(pair, "llama_cpp", tmp_path / "gguf")
    (folder / "config.json").write_text(json.dumps(config))
    byte_fallback().save_pretrained(folder)
    with pytest.raises(ExportError, match="bytes as a fallback"):
        convert(pair, "llama_cpp", tmp_path / "gguf")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"none")
    for path, what in ((tmp_path / "x.gguf", "no GGUF file"), (tmp_path / "y.gguf", "there is no file")):
        with pytest.raises(ModelError, match=what):
            convert_back(record(path), "llama_cpp", tmp_path / "back")
    made = convert(record(), "llama_cpp", tmp_path)
    with pytest.raises(ModelError, match="holds a llama model"):
        convert_back(record(str(made.target)), "llama_cpp", tmp_path / "back")


def test_frequency_factors_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(plain / llama3_factors(rope, 128), theirs)


def test_the_embedded_head_drafts_alike_after_the_round_trip(tmp_path: Path) -> None:
    made = convert(record(), "llama_cpp", tmp_path / "gguf")
    back = convert_back(record(str(made.draft)), "llama_cpp", tmp_path / "back")
    assert equal(EMBEDDED_EAGLE3, str(back.draft))
    assert read_checkpoint(str(back.draft))[0]["norm_before_residual"] is False
