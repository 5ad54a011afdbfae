"""Folders that are no checkpoints, weights that are not the model's, what a loaded model says of itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config

from slipstream.engine.labels import is_cost_expanded
from slipstream.errors import ConfigError, ModelError, UnsupportedModelError
from slipstream.models import load_config, load_model, load_tokenizer
from slipstream.models.files.quantized import resolve_quantized
from slipstream.models.resolve import resolve_device, resolve_dtype
from slipstream.models.support import context_length
from tests.kit.small_llama import sizes


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    LlamaForCausalLM(tiny_config()).save_pretrained(folder)
    return folder


def tiny_config() -> LlamaConfig:
    return LlamaConfig(**sizes(16, 2, 4, 2, vocab=64, inner=32, context=48, tied=True))


def refusal(folder: Path | str) -> str:
    """The one line with which a folder is refused."""
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    message = str(caught.value)
    assert "\n" not in message
    error = caught.value  # the user is not shown where Transformers gave up
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    return message


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    weights = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_loaded_model(checkpoint: Path) -> None:
    lm = load_model(str(checkpoint), pack=False)
    assert (lm.family, lm.vocab_size, lm.context_length) == ("llama", 64, 48)
    assert (lm.dtype, lm.device.type) == (torch.float32, "cpu" if not torch.cuda.is_available() else "cuda")
    assert lm.kv_bytes_per_token == 2 * 2 * (4 + 4) * 4  # layers, key heads, key and value width, bytes
    assert lm.weight_bytes == 4 * lm.num_parameters
    assert not is_cost_expanded(lm)
    assert load_model(str(checkpoint), dtype="bfloat16", cpu_kernels="torch").dtype == torch.bfloat16


def test_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder; give a checkpoint folder" in refusal(tmp_path / "nothing")
    assert "is not a folder; give a checkpoint folder" in refusal(tmp_path / "file")
    assert "has no config.json" in refusal(tmp_path)


def test_a_configuration_that_cannot_be_read(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{not json")
    assert refusal(checkpoint).startswith("cannot read the configuration of")
    (checkpoint / "config.json").write_text('{"model_type": "no_such_family"}')
    assert "no_such_family" in refusal(checkpoint)
    (checkpoint / "config.json").write_text("[]")
    assert refusal(checkpoint).startswith("cannot read the configuration of")


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_a_name_that_is_no_folder_is_said_to_be_taken_as_a_hub_id(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[str], Any]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no connection")

    monkeypatch.setattr("slipstream.models.configuration.AutoConfig.from_pretrained", fail)
    monkeypatch.setattr("slipstream.models.tokenizer.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ModelError, match=r"'no/such-model' \(no folder of that name, so taken as a hub id\)"):
        load("no/such-model")


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert "has no weights" in refusal(checkpoint)


def sharded(folder: Path, suffix: str = "safetensors", **index: Any) -> torch.Tensor:
    """Cut a folder's weights into two files with an index, beside the older file; returns the newer embedding."""
    older = load_file(folder / "model.safetensors")
    weights = {name: weight + 1 for name, weight in older.items()}
    names = sorted(weights)
    stem, where = "model" if suffix == "safetensors" else "pytorch_model", {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"{stem}-0000{number}-of-00002.{suffix}"
        content = {name: weights[name] for name in part}
        if suffix == "safetensors":
            save_file(content, folder / file, metadata={"format": "pt"})
        else:
            torch.save(content, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": where, **index}))
    if suffix == "bin":
        torch.save(older, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return weights["model.embed_tokens.weight"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("index", [{}, {"metadata": None}, {"metadata": {"total_size": 1}}])
def test_the_index_says_which_weights_count(checkpoint: Path, suffix: str, index: dict[str, Any]) -> None:
    newer = sharded(checkpoint, suffix, **index)
    files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    read = load_model(str(checkpoint), pack=False, canary=False).model.get_input_embeddings().weight
    assert torch.equal(read, newer)
    assert {file.name: file.read_bytes() for file in checkpoint.iterdir()} == files


@pytest.mark.parametrize("index", [{}, {"metadata": {"total_size": 1}}])
def test_the_index_of_a_hub_id_says_which_weights_count(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: dict[str, Any]
) -> None:
    newer = sharded(checkpoint, **index)
    repository, commit = tmp_path / "hub/models--org--tiny", "0123456789" * 4
    shutil.copytree(checkpoint, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    read = load_model("org/tiny", pack=False, canary=False).model.get_input_embeddings().weight
    assert torch.equal(read, newer)


def test_pickled_shards_do_not_count_beside_safetensors(checkpoint: Path) -> None:
    older = load_file(checkpoint / "model.safetensors")
    sharded(checkpoint, "bin")
    save_file(older, checkpoint / "model.safetensors", metadata={"format": "pt"})
    read = load_model(str(checkpoint), pack=False, canary=False).model.get_input_embeddings().weight
    assert torch.equal(read, older["model.embed_tokens.weight"])


def test_an_index_that_leads_nowhere(checkpoint: Path) -> None:
    sharded(checkpoint)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    what = "has no model-00002-of-00002.safetensors, which model.safetensors.index.json names"
    assert what in refusal(checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    for content in ("", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../model.safetensors"}}'):
        index.write_text(content)
        assert "model.safetensors.index.json" in refusal(checkpoint)


def test_truncated_weights(checkpoint: Path) -> None:
    weights = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert refusal(checkpoint).startswith("cannot load the weights of")


def test_missing_weights_are_not_made_up(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.layers.1.mlp.up_proj.weight": None})
    assert "lacks weights: model.layers.1.mlp.up_proj.weight" in refusal(checkpoint)
    edit_weights(checkpoint, **{"model.norm.weight": None})
    assert refusal(checkpoint).endswith("and 1 more")


def test_unknown_weights_are_not_dropped(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.layers.2.mlp.up_proj.weight": torch.zeros(32, 16)})
    assert "has unknown weights: model.layers.2.mlp.up_proj.weight" in refusal(checkpoint)


def test_misshapen_weights(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.norm.weight": torch.zeros(17)})
    assert "has misshapen weights: model.norm.weight" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("quantization", "what"),
    [
        ({"quant_method": "hqq", "bits": 4, "group_size": 128}, "HQQ weights (4 bits, groups of 128)"),
        ({"quant_method": "torchao"}, "torchao weights"),
        ({"quant_method": "exl3", "bits": 4.0}, "EXL3 weights"),
        ({"quant_method": "fp_quant"}, "FP-Quant weights"),
        ({"quant_method": "quark"}, "Quark weights"),
        ({"quant_method": "newest"}, "newest-quantised weights"),
    ],
)
def test_quantised_weights_that_cannot_run_here(
    quantization: dict[str, Any], what: str, checkpoint: Path
) -> None:
    edit_config(checkpoint, quantization_config=quantization)
    message = refusal(checkpoint)
    assert (
        f"holds {what}, which Slipstream cannot read; use the checkpoint that they were made from" in message
    )
    assert "pip install" not in message


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_what_is_said_to_be_widened_is_widened_on_every_device(method: str) -> None:
    """On new GPUs Transformers would keep such weights, in layers that are not plain products."""
    pytest.importorskip("accelerate")
    config = LlamaConfig(quantization_config={"quant_method": method, "weight_block_size": [128, 128]})
    assert resolve_quantized("here", config, by_transformers=True) is None
    assert config.quantization_config["dequantize"] is True
    assert config.quantization_config["weight_block_size"] == [128, 128]


def test_no_context_length(checkpoint: Path) -> None:
    edit_config(checkpoint, max_position_embeddings=0)
    with pytest.raises(UnsupportedModelError, match="how long its context is"):
        load_model(str(checkpoint))


def test_a_context_is_held_to_the_length_at_which_longrope_switches() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters=rope,
        pad_token_id=0,
    )
    assert context_length(config) == context_length(config, 128) == 128
    assert context_length(config, 129) == 512
    assert context_length(tiny_config()) == 48


def test_tokenizer(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="has no tokenizer; pass --tokenizer"):
        load_tokenizer(str(checkpoint))
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot load the tokenizer") as caught:
        load_tokenizer(str(checkpoint))
    assert "\n" not in str(caught.value)


def test_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    config.dtype = torch.bfloat16
    assert resolve_dtype("auto", torch.device("cpu"), config) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda"), config) == torch.bfloat16
    assert resolve_dtype("float16", torch.device("cpu"), config) == torch.float16
    for unknown in ("abacus", "mps"):
        with pytest.raises(ConfigError, match=f"unknown device '{unknown}'; use auto, cpu or cuda"):
            resolve_device(unknown)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="PyTorch sees no GPU"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="'cuda:2' was requested but the last GPU is 'cuda:1'"):
        resolve_device("cuda:2")


def test_load_config(checkpoint: Path) -> None:
    assert load_config(str(checkpoint)).hidden_size == 16
