"""LoRA adapters: merged where they are given or lie beside the model, and never left out without a word."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.errors import ModelError
from slipstream.kv.pool import KVPool
from slipstream.models import RowGroup, load_model
from slipstream.models.files import lora
from slipstream.models.outline import outline_model
from slipstream.train.attention import block_diagonal_mask
from slipstream.train.target import load_model as load_for_training
from tests.kit.small_llama import sizes

peft = pytest.importorskip("peft")
TEXT = list(range(2, 14))
SHAPE: dict[str, Any] = sizes(16, 2, 4, 2, vocab=64, inner=32, context=48)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, use_rslora=True
    )
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.fixture
def expected(base: Path, adapter: Path) -> torch.Tensor:
    """What the package that wrote the adapter computes, without merging."""
    model = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([TEXT])).logits[0]
    return logits


def logits(folder: Path, **options: Any) -> torch.Tensor:
    lm = load_model(str(folder), **options)
    pool = KVPool(lm.shapes, len(TEXT), lm.dtype, lm.device)
    return lm.forward([RowGroup(pool.slots, 0, TEXT, range(len(TEXT)))], pool).logits


def test_an_adapter_is_merged(base: Path, adapter: Path, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits(base, lora=str(adapter)), expected, atol=1e-5, rtol=1e-4)
    assert (logits(base) - expected).abs().max() > 1e-3


def test_an_adapter_beside_the_weights_is_merged(base: Path, adapter: Path, expected: torch.Tensor) -> None:
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, base)
    torch.testing.assert_close(logits(base), expected, atol=1e-5, rtol=1e-4)
    (base / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights"):
        load_model(str(base))


@pytest.mark.parametrize(
    "learned",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:Setting `save_embedding_layers`")
def test_tied_embeddings_are_changed_where_the_adapter_changes_them(
    learned: dict[str, Any], tmp_path: Path
) -> None:
    """The input and output layers share their weights, and an adapter of one is none of the other."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, init_lora_weights=False, **learned)
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(tmp_path / "base"), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TEXT])).logits[0]
    ours = logits(tmp_path / "base", lora=str(tmp_path / "adapter"))
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_of_two_adapters_none_is_left_out(base: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "other")
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, base)
    with pytest.raises(
        ModelError, match=r"two LoRA adapters: .*other' is asked for, and another lies next to"
    ):
        load_model(str(base), lora=str(tmp_path / "other"))
    assert load_model(str(base), lora=f"{base}/.").family == "llama"


def test_an_adapter_in_a_repository_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"owner/both": "cached/adapter_config.json"}
    monkeypatch.setattr(lora, "find_adapter_config_file", lambda path, revision: found.get(path))
    with pytest.raises(ModelError, match=r"holds a LoRA adapter next to its weights, .* from a folder only"):
        lora.chosen_adapter("owner/both", None, None)
    assert lora.chosen_adapter("owner/model", None, None) is None


def test_training_sees_the_merged_weights(base: Path, adapter: Path, expected: torch.Tensor) -> None:
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, base)
    model = load_for_training(str(base), torch.device("cpu"))
    assert not any("lora" in name for name, _ in model.named_parameters())  # they would be saved alone
    length = len(TEXT)
    mask = block_diagonal_mask(torch.zeros(1, length, dtype=torch.long), torch.float32)
    ours = model(input_ids=torch.tensor([TEXT]), attention_mask=mask).logits[0]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    ours.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_an_adapters_folder_is_no_model(adapter: Path) -> None:
    with pytest.raises(
        ModelError, match=r"is an adapter, not a model; give the model .*base.* and --lora"
    ) as caught:
        load_model(str(adapter))
    assert "\n" not in str(caught.value)


def test_an_adapter_of_another_model_is_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    odd = {**weights, name.replace("layers.1", "layers.5"): weights[name].clone()}
    save_file(odd, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not fit the model: it has unknown weights: .*layers\.5"):
        load_model(str(base), lora=str(adapter))
    del weights[name]
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not fit the model: it lacks weights: .*layers\.1"):
        load_model(str(base), lora=str(adapter))


def test_what_is_no_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is no LoRA adapter: it has no adapter_config\.json"):
        load_model(str(base), lora=str(tmp_path / "nothing"))
    (tmp_path / "bare").mkdir()
    shutil.copy(adapter / "adapter_config.json", tmp_path / "bare")
    for take in (load_model, outline_model):
        with pytest.raises(
            ModelError, match=r"has no weights: no adapter_model\.safetensors or adapter_model\.bin"
        ):
            take(str(base), lora=str(tmp_path / "bare"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ModelError, match="adapter of type IA3; only LORA"):
        load_model(str(base), lora=str(adapter))
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="it must be a JSON object"):
        load_model(str(base), lora=str(adapter))
