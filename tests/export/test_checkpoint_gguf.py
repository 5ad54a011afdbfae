"""GGUF files for llama.cpp: read back by its own package, and made folders again bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.draft.heads.eagle_files import read_eagle
from slipstream.errors import ModelError
from slipstream.models import load_tokenizer
from slipstream.models.files.gguf_rope import llama3_factors
from slipstream.tools.export.checkpoints import convert, convert_back
from slipstream.tools.export.checkpoints.head_folders import ConvertedCheckpoint
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError
from tests.export.test_checkpoint_eagle import equal, random_head, record
from tests.kit.gguf_files import requantised, rounded
from tests.kit.small_llama import sizes
from tests.kit.tokenizer_families import byte_fallback, byte_level, save_model

gguf = pytest.importorskip("gguf", reason="the extra `export` is not installed")
TEXT = "Show me tar.  1234 don't\n\té 日本 👍 <|end|><|user|>x"


def contents_of(path: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the file's keys, its tensors)."""
    reader = gguf.GGUFReader(str(path))
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {entry.name: entry for entry in reader.tensors}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> ConvertedCheckpoint:
    """The embedded target and EAGLE-3 head."""
    return convert(record(), "llama_cpp", tmp_path_factory.mktemp("embedded"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a short vocabulary, for what does not depend on the target."""
    return save_model(byte_level(), tmp_path_factory.mktemp("small"), num_layers=6)


def small_head(folder: Path, target: str, **changes: Any) -> Path:
    sizes = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "vocab_size": len(byte_level()),
        "draft_vocab_size": 64,
    }
    return random_head(folder, target=target, **{**sizes, **changes})


def test_a_pair_comes_back_bit_for_bit(tmp_path: Path) -> None:
    made = convert(record(EMBEDDED_DRAFT, method="draft_model"), "llama_cpp", tmp_path / "gguf")
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


def test_the_files_say_what_llama_cpp_reads(embedded: ConvertedCheckpoint) -> None:
    (target, weights), (head, tensors) = contents_of(embedded.target), contents_of(embedded.draft)
    assert target["general.architecture"] == "llama"
    assert target["tokenizer.ggml.pre"] == "smollm"  # digits one by one
    assert target["tokenizer.ggml.eos_token_id"] == 1
    assert target["tokenizer.ggml.add_bos_token"] is False
    assert "output.weight" not in weights  # tied to the embedding
    assert head["general.architecture"] == "eagle3"
    assert head["eagle3.target_layers"] == [1, 3, 5]
    assert head["eagle3.norm_before_residual"] is False
    assert head["eagle3.target_hidden_size"] == 320
    for name in ("tokens", "token_type", "merges", "eos_token_id", "bos_token_id"):
        assert head[f"tokenizer.ggml.{name}"] == target[f"tokenizer.ggml.{name}"]
    assert "d2t" not in tensors
    assert "token_embd.weight" not in tensors
    assert all(entry.tensor_type.name == "F32" for entry in tensors.values() if len(entry.shape) == 1)


def test_a_target_that_is_a_gguf_file_stays_as_it_is(embedded: ConvertedCheckpoint, tmp_path: Path) -> None:
    made = convert(record(target=str(embedded.target)), "llama_cpp", tmp_path)
    assert (made.target, made.files) == (None, (made.draft,))
    assert "the target is loaded as it is" in made.notes
    assert list(tmp_path.iterdir()) == [made.draft]
    (keys, mine), (others, theirs) = contents_of(made.draft), contents_of(embedded.draft)
    assert keys == others
    assert mine.keys() == theirs.keys()
    assert all((entry.data == theirs[name].data).all() for name, entry in mine.items())


@pytest.mark.parametrize("more", [{}, {"own_embedding": True, "norm_before_residual": True}])
def test_a_pruned_head_has_absolute_ids_and_is_read_as_it_is(
    more: dict[str, Any], small: str, tmp_path: Path
) -> None:
    head = small_head(tmp_path / "ours", small, **more)
    made = convert(record(head, target=small), "llama_cpp", tmp_path / "gguf")
    ours = read_eagle(str(head), TargetFiles(small))
    d2t = contents_of(made.draft)[1]["d2t"]
    assert d2t.tensor_type.name == "I64"
    assert d2t.data.tolist() == ours.draft_token_ids.tolist()  # not offsets
    back = convert_back(record(str(made.draft), target=small), "llama_cpp", tmp_path / "back")
    assert (back.draft, back.notes) == (None, ("Slipstream loads the checkpoints as they are",))
    same_head(read_eagle(str(made.draft), TargetFiles(small)), ours)


def same_head(mine: Any, theirs: Any) -> None:
    """Two heads have the same configuration and bits."""
    assert mine.config == theirs.config
    state = theirs.state_dict()
    assert mine.state_dict().keys() == state.keys()
    assert all(torch.equal(found, state[name]) for name, found in mine.state_dict().items())
    assert (mine.embedding is None) == (theirs.embedding is None)
    assert mine.embedding is None or torch.equal(mine.embedding, theirs.embedding)


def test_offsets_in_a_gguf_file_are_refused(small: str, tmp_path: Path) -> None:
    head = small_head(tmp_path / "ours", small)
    made = convert(record(head, target=small), "llama_cpp", tmp_path / "gguf")
    reader = gguf.GGUFReader(str(made.draft), "r+")
    entry = next(entry for entry in reader.tensors if entry.name == "d2t")
    entry.data[:] = entry.data - range(64)
    del reader
    with pytest.raises(ModelError, match="absolute ids, not offsets"):
        convert_back(record(str(made.draft), target=small), "llama_cpp", tmp_path / "back")


def test_heads_of_two_layers_numbers_are_refused(small: str, tmp_path: Path) -> None:
    head = small_head(tmp_path / "ours", small, feature_layers=(1, 3))
    with pytest.raises(ExportError, match="reads 2 hidden states"):
        convert(record(head, target=small), "llama_cpp", tmp_path / "gguf")


def test_bfloat16_and_biases_keep_their_bits(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**sizes(64, 2, 4, 2, inner=96, vocab=len(byte_level()), eos=1, tied=False))
    torch.manual_seed(0)
    folder = tmp_path / "qwen"
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    byte_level().save_pretrained(folder)
    alone = SpeculativeRecord(method="ngram", target=str(folder), depth=4)
    made = convert(alone, "llama_cpp", tmp_path / "gguf")
    back = convert_back(replace(alone, target=str(made.target)), "llama_cpp", tmp_path / "back")
    assert equal(folder, str(back.target))
    assert contents_of(made.target)[1]["blk.0.attn_q.weight"].tensor_type.name == "BF16"


def test_rotary_scaling_of_llama_3_comes_back(small: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    config = json.loads((folder / "config.json").read_text())
    theta = float(config["rope_parameters"]["rope_theta"])
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    alone = SpeculativeRecord(method="ngram", target=str(folder), depth=4)
    made = convert(alone, "llama_cpp", tmp_path / "gguf")
    back = convert_back(replace(alone, target=str(made.target)), "llama_cpp", tmp_path / "back")
    assert equal(folder, str(back.target))
    assert json.loads((Path(str(back.target)) / "config.json").read_text())["rope_parameters"] == rope


def test_what_llama_cpp_would_read_differently_is_refused(small: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small, folder)
    config = json.loads((folder / "config.json").read_text())
    pair = record(small, method="draft_model", target=str(folder))
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
    assert not (tmp_path / "gguf").exists()  # not the draft model either, which could be written


def test_a_file_that_is_no_gguf_is_refused(embedded: ConvertedCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"none")
    for path, what in ((tmp_path / "x.gguf", "no GGUF file"), (tmp_path / "y.gguf", "there is no file")):
        with pytest.raises(ModelError, match=what):
            convert_back(record(path), "llama_cpp", tmp_path / "back")
    with pytest.raises(ModelError, match="holds a llama model"):
        convert_back(record(str(embedded.target)), "llama_cpp", tmp_path / "back")


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


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_embedded_head_drafts_from_its_file(
    kind: str, embedded: ConvertedCheckpoint, tmp_path: Path
) -> None:
    file = str(embedded.draft)
    ours, files = read_eagle(EMBEDDED_EAGLE3, TargetFiles(EMBEDDED_TARGET)), TargetFiles(EMBEDDED_TARGET)
    if kind == "F32":
        same_head(read_eagle(file, files), ours)
    else:
        file = str(requantised(tmp_path / "rounded.gguf", Path(file), kind))
        found = read_eagle(file, files).state_dict()
        for name, tensor in ours.state_dict().items():
            assert torch.equal(found[name], rounded(tensor, kind)), name
    params = SamplingParams(temperature=0, max_tokens=24)
    spec = {"method": "eagle3", "model": file, "num_speculative_tokens": 3}
    texts, drafted = [], []
    for speculative in (None, spec, {**spec, "model": EMBEDDED_EAGLE3}):
        llm = LLM(EMBEDDED_TARGET, speculative_config=speculative)
        answer = llm.generate(["Show me the command tar."], params)[0]
        texts.append(answer.outputs[0].token_ids)
        drafted.append(answer.metrics.num_accepted_tokens)
    assert texts[0] == texts[1] == texts[2]
    assert drafted[1] == drafted[2] > 0


def test_a_head_in_a_file_goes_to_vllm_as_a_folder(embedded: ConvertedCheckpoint, tmp_path: Path) -> None:
    made = convert(record(str(embedded.draft)), "vllm", tmp_path / "vllm")
    same_head(
        *(read_eagle(path, TargetFiles(EMBEDDED_TARGET)) for path in (str(made.draft), EMBEDDED_EAGLE3))
    )
