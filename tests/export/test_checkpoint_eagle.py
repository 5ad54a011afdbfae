"""EAGLE heads in the folders of other engines: what each reads, what it would misread, and the way back bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.draft.heads.checkpoints import read_checkpoint
from slipstream.draft.heads.eagle_files import read_eagle, save_eagle
from slipstream.draft.heads.eagle_head import EagleConfig, EagleHead
from slipstream.errors import ModelError
from slipstream.tools.export.checkpoints import convert, convert_back
from slipstream.tools.export.checkpoints.target_files import TargetFiles
from slipstream.tools.export.head_info import AuxLayers, HeadInfo, head_info
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError

SHIFTED = {"vllm": [1, 3, 5], "sglang": [0, 2, 4], "tensorrt_llm": [0, 2, 4]}


def record(model: str | Path = EMBEDDED_EAGLE3, **more: Any) -> SpeculativeRecord:
    given: dict[str, Any] = {"method": "eagle3", "target": EMBEDDED_TARGET, "depth": 4, **more}
    return SpeculativeRecord(model=str(model), **given)


def random_head(
    folder: Path, own_embedding: bool = False, target: str = EMBEDDED_TARGET, **changes: Any
) -> Path:
    """A head of random float16 weights for `target`, whose sizes it has, in EAGLE's own layout."""
    torch.manual_seed(0)
    config = EagleConfig(
        **{
            "version": 3,
            "hidden_size": 320,
            "target_hidden_size": 320,
            "vocab_size": 4096,
            "draft_vocab_size": 4096,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "feature_layers": (1, 3, 5),
            **changes,
        }
    )
    head = EagleHead(config).half().requires_grad_(False)
    for weight in head.parameters():
        weight.normal_()
    if config.draft_vocab_size < config.vocab_size:
        head.draft_token_ids = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
    if own_embedding:
        head.embedding = torch.randn(config.vocab_size, config.hidden_size).half()
    save_eagle(head, folder, target=target, layout={1: "eagle", 3: "eagle3"}[config.version])
    return folder


def equal(one: str | Path, other: str | Path) -> bool:
    """Whether two checkpoints have the same tensors: names, dtypes and bits."""
    mine, theirs = read_checkpoint(str(one))[1], read_checkpoint(str(other))[1]
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


@pytest.mark.parametrize("engine", SHIFTED)
@pytest.mark.parametrize("draft_vocab_size", [4096, 512])
def test_a_head_comes_back_bit_for_bit_and_reads_the_same_layers(
    engine: str, draft_vocab_size: int, tmp_path: Path
) -> None:
    head = random_head(tmp_path / "ours", draft_vocab_size=draft_vocab_size)
    made = convert(record(head), engine, tmp_path / engine)
    assert made.draft is not None
    config = json.loads((made.draft / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == SHIFTED[engine]
    assert config["norm_before_residual"] is False  # vLLM's default is another one
    assert (config["eos_token_id"], config["dtype"]) == (1, "float16")
    back = convert_back(record(made.draft), engine, tmp_path / "back")
    assert equal(head, str(back.draft))
    target = TargetFiles(EMBEDDED_TARGET)
    assert read_eagle(str(back.draft), target).config == read_eagle(str(head), target).config


def test_folders_hold_offsets(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", draft_vocab_size=512)
    made = convert(record(head), "vllm", tmp_path / "vllm")
    tensors = read_checkpoint(str(made.draft))[1]
    ids = read_eagle(str(head), TargetFiles(EMBEDDED_TARGET)).draft_token_ids
    assert torch.equal(tensors["d2t"] + torch.arange(512), ids)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)


def test_a_map_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    head = random_head(tmp_path / "ours", draft_vocab_size=512)
    tensors = read_checkpoint(str(head))[1]
    tensors["d2t"] = tensors["d2t"] + 4000
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match="d2t is not a one-to-one map"):
        convert(record(head), "vllm", tmp_path / "vllm")


def test_a_permuted_whole_vocabulary_is_written_in_order(tmp_path: Path) -> None:
    target = TargetFiles(EMBEDDED_TARGET)
    head = read_eagle(str(random_head(tmp_path / "ours")), target)
    head.draft_token_ids = torch.randperm(4096)
    save_eagle(head, tmp_path / "saved", target=EMBEDDED_TARGET)
    again = read_eagle(str(tmp_path / "saved"), target)
    assert torch.equal(again.lm_head.weight[head.draft_token_ids], head.lm_head.weight)


@pytest.mark.parametrize("engine", ["sglang", "tensorrt_llm", "openvino"])
def test_the_residual_after_the_norm_is_refused_where_it_would_be_ignored(
    engine: str, tmp_path: Path
) -> None:
    head = random_head(tmp_path / "ours", norm_before_residual=True)
    with pytest.raises(ExportError, match="norm_before_residual"):
        convert(record(head), engine, tmp_path / engine)
    made = convert(record(head), "vllm", tmp_path / "vllm")
    assert json.loads((Path(str(made.draft)) / "config.json").read_text())["norm_before_residual"] is True


@pytest.mark.parametrize("engine", ["sglang", "openvino"])
def test_an_own_embedding_is_refused_where_it_would_be_replaced(engine: str, tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", own_embedding=True)
    with pytest.raises(ExportError, match="embedding of its own"):
        convert(record(head), engine, tmp_path / engine)
    made = convert(record(head), "vllm", tmp_path / "vllm")
    assert equal(head, str(made.draft))


def test_eagle_1_has_the_bias_that_each_engine_expects(tmp_path: Path) -> None:
    plain = random_head(tmp_path / "plain", version=1, feature_layers=(6,))
    made = convert(record(plain, method="eagle"), "vllm", tmp_path / "vllm")
    config, tensors = read_checkpoint(str(made.draft))
    assert config["architectures"] == ["EagleLlamaForCausalLM"]
    assert "fc.bias" not in tensors
    made = convert(record(plain, method="eagle"), "sglang", tmp_path / "sglang")
    config, tensors = read_checkpoint(str(made.draft))
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert not tensors["fc.bias"].any()
    biased = random_head(tmp_path / "biased", version=1, feature_layers=(6,), fc_bias=True)
    with pytest.raises(ExportError, match="fc has a bias"):
        convert(record(biased, method="eagle"), "vllm", tmp_path / "refused")
    for engine in ("tensorrt_llm", "openvino", "llama_cpp"):
        with pytest.raises(ExportError, match="train"):
            convert(record(plain, method="eagle"), engine, tmp_path / engine)


def test_the_last_hidden_state_is_refused(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", feature_layers=(1, 3, 6))
    with pytest.raises(ExportError, match="after the final norm"):
        convert(record(head), "vllm", tmp_path / "vllm")


def test_a_head_without_an_output_layer_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    head = random_head(tmp_path / "ours")
    tensors = read_checkpoint(str(head))[1]
    del tensors["lm_head.weight"]
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(ModelError, match="lm_head"):
        convert(record(head), "vllm", tmp_path / "vllm")


def test_settings_say_which_layers_a_head_for_tensorrt_reads(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours")
    info = HeadInfo(layout="eagle3", version=3, aux_layers=AuxLayers((0, 1, 3), "after_layer"))
    back = convert_back(replace(record(head), head=info), "tensorrt_llm", tmp_path / "back")
    assert read_eagle(str(back.draft), TargetFiles(EMBEDDED_TARGET)).config.feature_layers == (1, 2, 4)


def test_what_our_head_has_not_is_refused_on_the_way_back(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours")
    file = head / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "norm_output": True}))
    with pytest.raises(ModelError, match="norm_output"):
        convert_back(record(head), "vllm", tmp_path / "back")


def test_the_speculators_layout_comes_back(tmp_path: Path) -> None:
    head = random_head(tmp_path / "ours", draft_vocab_size=512)
    made = convert(record(head), "vllm", tmp_path / "vllm", layout="speculators")
    config = json.loads((Path(str(made.draft)) / "config.json").read_text())
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    back = convert_back(record(str(made.draft)), "vllm", tmp_path / "back")
    target = TargetFiles(EMBEDDED_TARGET)
    assert read_eagle(str(back.draft), target).config == read_eagle(str(head), target).config
    with pytest.raises(ExportError, match="speculators"):
        convert(record(head), "sglang", tmp_path / "sglang", layout="speculators")


def test_openvino_gets_all_tensors_and_the_numbers_of_the_layers(tmp_path: Path) -> None:
    made = convert(record(), "openvino", tmp_path)
    _, tensors = read_checkpoint(str(tmp_path / "head"))
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()
    assert "embed_tokens.weight" in tensors  # what is missing is filled at random there
    script = (tmp_path / "convert.sh").read_text()
    assert '<hidden_layers_list value="0 2 4" />' in script
    assert script.count("optimum-cli") == 2
    assert (made.target, made.draft) == (tmp_path / "target", tmp_path / "draft")


def test_a_head_that_reads_masks_is_written_for_vllm_only(tmp_path: Path) -> None:
    target = TargetFiles(EMBEDDED_TARGET)
    head = random_head(tmp_path / "ours", num_layers=2, mask_token_id=5)
    given = record(head, method="peagle")
    for layout in ("eagle3", "speculators"):
        convert(given, "vllm", tmp_path / layout, layout=layout)
        info = head_info(tmp_path / layout)
        assert info is not None
        assert (info.method, info.num_layers) == ("peagle", 2)
        again = read_eagle(str(tmp_path / layout), target)
        assert again.config == read_eagle(str(head), target).config
    for engine in ("sglang", "tensorrt_llm"):
        with pytest.raises(ExportError, match="has 2 layers, for which"):
            convert(given, engine, tmp_path / engine)
