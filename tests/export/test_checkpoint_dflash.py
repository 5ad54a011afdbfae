"""DFlash heads go to other engines as they are, or as GGUF files; what one would misread is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.assets import EMBEDDED_TARGET
from slipstream.draft.heads.dflash_files import save_dflash
from slipstream.draft.heads.dflash_head import DFlashConfig, DFlashHead
from slipstream.draft.heads.left_to_right import LeftToRightConfig
from slipstream.draft.methods import DFLASH
from slipstream.models.files.gguf import open_gguf
from slipstream.tools.export.checkpoints import convert
from slipstream.tools.export.refusals import ExportError
from tests.export.test_checkpoint_eagle import record


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm"])
def test_engines_with_folders_load_the_head_as_it_is(engine: str, tmp_path: Path) -> None:
    made = convert(record("head", method=DFLASH.name), engine, tmp_path / "out")
    assert (made.target, made.draft, made.files) == (None, None, ())
    assert made.notes == ("the target and the head are loaded as they are",)


def test_openvino_runs_none(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="not dflash heads"):
        convert(record("head", method=DFLASH.name), "openvino", tmp_path / "out")


def saved(folder: Path, **options: Any) -> tuple[DFlashHead, str]:
    """A random head for the embedded target."""
    torch.manual_seed(0)
    flags = {"causal": (False, False), "windows": (None, None), "draft_vocab_size": 4096} | options
    config = DFlashConfig(
        hidden_size=320,
        target_hidden_size=320,
        vocab_size=4096,
        intermediate_size=64,
        num_layers=2,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        feature_layers=(1, 3, 5),
        block_size=8,
        mask_token_id=4095,
        **flags,
    )
    head = DFlashHead(config)
    for parameter in head.parameters():
        if parameter.ndim != 2:  # norms and kernels begin alike
            parameter.data += 0.1 * torch.randn(parameter.shape)
    if config.draft_vocab_size < config.vocab_size:
        head.lm_head = torch.nn.Linear(320, config.draft_vocab_size, bias=False)
        head.draft_token_ids = 2 * torch.arange(config.draft_vocab_size)
    save_dflash(head, folder, target=str(EMBEDDED_TARGET))
    return head, str(folder)


def written(tmp_path: Path, **options: Any) -> tuple[DFlashHead, dict[str, Any], dict[str, Any]]:
    """The head, and the keys and tensors of its GGUF file."""
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    head, path = saved(tmp_path / "head", **options)
    made = convert(record(path, method=DFLASH.name), "llama_cpp", tmp_path / "gguf")
    assert [file.name for file in made.files] == ["target.gguf", "dflash.gguf"]
    file = open_gguf(str(made.draft))
    return head, dict(file.fields), {name: entry.numbers() for name, entry in file.tensors.items()}


def test_a_file_for_llama_cpp_has_its_names_and_numbers(tmp_path: Path) -> None:
    head, keys, tensors = written(tmp_path, windows=(None, 64))
    assert keys["general.architecture"] == "dflash"
    assert list(keys["dflash.target_layers"]) == [1, 3, 5]
    assert (keys["dflash.block_size"], keys["dflash.sample_from_anchor"]) == (8, False)
    assert keys["tokenizer.ggml.mask_token_id"] == 4095
    assert keys["dflash.attention.sliding_window"] == 64
    assert list(keys["dflash.attention.sliding_window_pattern"]) == [False, True]
    state = head.state_dict()
    assert len(tensors) == len(state) - 1, "all but the whole vocabulary's map"
    assert torch.equal(tensors["enc.output_norm.weight"], state["hidden_norm.weight"])
    assert torch.equal(tensors["blk.1.attn_k.weight"], state["layers.1.self_attn.k_proj.weight"])
    assert torch.equal(tensors["blk.0.attn_q_norm.weight"], state["layers.0.self_attn.q_norm.weight"])
    assert torch.equal(tensors["blk.0.attn_norm.weight"], state["layers.0.input_layernorm.weight"])
    assert torch.equal(tensors["output_norm.weight"], state["norm.weight"])


def test_dspark_s_heads_and_a_reduced_vocabulary_are_written(tmp_path: Path) -> None:
    vanilla = LeftToRightConfig(kind="vanilla", rank=32)
    options = {"from_anchor": True, "left_to_right": vanilla, "confidence": "hidden+token"}
    head, keys, tensors = written(tmp_path, draft_vocab_size=1000, **options)
    assert keys["dflash.sample_from_anchor"] is True
    assert tensors["markov_w1.weight"].shape == (4096, 32)
    assert tensors["markov_w2.weight"].shape == (1000, 32)
    assert tensors["conf_proj.weight"].shape == (1, 352)
    assert tensors["conf_proj.bias"].shape == (1,)
    assert torch.equal(tensors["d2t"], head.draft_token_ids)


def test_dflash2_s_convolutions_and_selector_are_written(tmp_path: Path) -> None:
    selector = LeftToRightConfig(kind="selector", rank=32, top_k=16)
    _, keys, tensors = written(tmp_path, convolution_taps=2, left_to_right=selector)
    sizes = [
        keys[f"dflash.{name}"]
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    ]
    assert sizes == [2, 16, 32, 16]
    assert tensors["blk.0.attn_conv_base"].shape == (2, 2, 320)
    assert tensors["blk.1.ffn_conv_proj.weight"].shape == (80, 320)
    assert tensors["selector_hidden.weight"].shape == (32, 320)
    assert tensors["selector_predecessor.weight"].shape == (4096, 32)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"left_to_right": LeftToRightConfig(kind="rnn", rank=8), "from_anchor": True}, "its rnn head"),
        ({"left_to_right": LeftToRightConfig(kind="gru", rank=8, state_size=8)}, "its gru head"),
        ({"causal": (True, True)}, "rows that see earlier rows only"),
        ({"from_anchor": True}, "a draft by the anchor's row without a Markov head"),
        ({"confidence": "hidden"}, "a confidence head that does not read the previous token"),
        ({"convolution_taps": 2}, "convolutions without a selector"),
    ],
)
def test_what_llama_cpp_would_misread_is_refused(
    options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    _, path = saved(tmp_path / "head", **options)
    with pytest.raises(ExportError, match=f"llama.cpp cannot run .*: it has no place for {complaint}"):
        convert(record(path, method=DFLASH.name), "llama_cpp", tmp_path / "gguf")
    assert not (tmp_path / "gguf").exists()
