"""Enlarged checkpoints compute what their source computes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from recipes.cost_expanded.__main__ import main
from recipes.cost_expanded.target import ModelShape, expand, parse_count, shape_for
from slipstream.assets import EMBEDDED_TARGET
from slipstream.engine.labels import is_cost_expanded
from slipstream.errors import ConfigError, ModelError
from slipstream.models import load_config, load_model, load_tokenizer
from slipstream.tools.export.checkpoints.gguf_models import finish, model_writer
from tests.kit.small_llama import sizes

IDS = torch.tensor([[(13 * i * i + 7 * i) % 96 for i in range(24)]])


@pytest.fixture(autouse=True)
def progress_bars_as_before() -> Iterator[None]:
    """The command line turns them off for its process."""
    before = transformers.utils.logging.is_progress_bar_enabled()
    yield
    if before:
        transformers.utils.logging.enable_progress_bar()


def save_llama(folder: Path, **changes: Any) -> Path:
    """A tiny random Llama whose weights are large enough for mistakes to show."""
    shape = sizes(24, 3, 4, 2, vocab=96, inner=40, head_dim=8, rms_norm_eps=1e-2, context=64, tied=True)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 2 else 1))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def stock_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 64},
        {"num_layers": 8},
        {"intermediate_size": 56},
        {"num_heads": 6},
        {"hidden_size": 50, "num_layers": 7, "intermediate_size": 96, "num_heads": 10},
        {"target_parameters": 5_000_000},
    ],
    ids=["hidden", "layers", "intermediate", "heads", "all", "preset"],
)
def test_same_function(tmp_path: Path, sizes: dict[str, int], tied: bool) -> None:
    source, target = save_llama(tmp_path / "source", tie_word_embeddings=tied), tmp_path / "target"
    num_parameters = expand(source, target, **sizes)
    small, large = stock_model(source), stock_model(target)
    with torch.inference_mode():
        expected, logits = small(IDS).logits, large(IDS).logits
    assert float(expected.std()) > 0.3
    assert float((logits - expected).abs().max()) <= 1e-4
    greedy = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    assert small.generate(IDS, **greedy).tolist() == large.generate(IDS, **greedy).tolist()
    assert sum(p.numel() for p in large.parameters()) == num_parameters > small.num_parameters()


def test_what_is_added_is_not_a_row_of_zeros(tmp_path: Path) -> None:
    expand(save_llama(tmp_path / "source"), tmp_path / "target", num_layers=6)
    layers = stock_model(tmp_path / "target").model.layers
    added = [layer for layer in layers if not layer.self_attn.o_proj.weight.any()]
    assert len(added) == 3
    assert all(layer.self_attn.q_proj.weight.all() and layer.mlp.up_proj.weight.all() for layer in added)


def test_no_two_matrices_of_a_wider_model_are_equal(tmp_path: Path) -> None:
    expand(save_llama(tmp_path / "source"), tmp_path / "target", num_layers=6, hidden_size=48)
    weights = [w for w in stock_model(tmp_path / "target").parameters() if w.ndim == 2]
    assert len({weight.detach().numpy().tobytes() for weight in weights}) == len(weights)


def test_the_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    source = save_llama(tmp_path / "source")
    num_parameters = expand(source, tmp_path / "target", hidden_size=32)
    assert (tmp_path / "target" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["cost_expanded"] == {"from": "source", "parameters": num_parameters}
    assert is_cost_expanded(load_model(str(tmp_path / "target")))
    assert not is_cost_expanded(load_model(str(source)))


def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="the extra `export` is not installed")
    file, target = tmp_path / "source.gguf", tmp_path / "target"
    finish(model_writer(EMBEDDED_TARGET, file))
    num_layers = load_config(str(file)).num_hidden_layers
    expand(file, target, num_layers=num_layers + 2)
    ids = load_tokenizer(EMBEDDED_TARGET)("Show me the command tar.").input_ids
    assert load_tokenizer(str(target))("Show me the command tar.").input_ids == ids
    with torch.inference_mode():
        small, large = (stock_model(path)(torch.tensor([ids])).logits for path in (EMBEDDED_TARGET, target))
    assert float((large - small).abs().max()) <= 1e-2 * float(small.std())
    assert json.loads((target / "config.json").read_text())["cost_expanded"]["from"] == "source.gguf"


def test_bfloat16(tmp_path: Path) -> None:
    expand(save_llama(tmp_path / "source"), tmp_path / "target", hidden_size=48, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size 16 is below the source's 24"),
        ({"num_heads": 7}, "hidden_size 24 is not a multiple of num_heads 7"),
        ({"num_heads": 5}, "num_heads 5 is not a multiple of 2"),
        ({"target_parameters": 1000}, "no usual shape of 1,000 parameters.* ask for at least 566,144"),
        ({}, "nothing would be larger than in the source"),
        ({"num_layers": 3}, "nothing would be larger than in the source"),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16"),
    ],
)
def test_sizes_that_cannot_be_reached(tmp_path: Path, sizes: dict[str, Any], message: str) -> None:
    source = save_llama(tmp_path / "source")
    with pytest.raises(ConfigError, match=message):
        expand(source, tmp_path / "target", **sizes)
    assert not (tmp_path / "target").exists()


def test_folders_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_llama(tmp_path / "source")
    with pytest.raises(ModelError, match="is neither a folder nor a GGUF file"):
        expand(tmp_path / "nothing", tmp_path / "target")
    with pytest.raises(ModelError, match="is not empty"):
        expand(source, source)
    adapted = save_llama(tmp_path / "adapted")
    (adapted / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="has a LoRA adapter next to its weights; merge it"):
        expand(adapted, tmp_path / "target", num_layers=8)
    capsys.readouterr()
    assert main(["target", str(tmp_path / "nothing"), str(tmp_path / "target"), "--parameters", "1M"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["target", str(source), str(tmp_path / "target"), "--num-layers", "many"])
    assert capsys.readouterr().err == "error: argument --num-layers: invalid int value: 'many'\n"


def test_the_least_number_of_parameters_is_enough(tmp_path: Path) -> None:
    assert expand(save_llama(tmp_path / "source"), tmp_path / "target", target_parameters=566_144) == 566_144


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_llama(tmp_path / "source")
    capsys.readouterr()
    assert (
        main(["target", str(source), str(tmp_path / "target"), "--parameters", "2M", "--num-layers", "4"])
        == 0
    )
    assert re.fullmatch(r"[\d,]+ parameters\n", capsys.readouterr().err)
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "target").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]
    assert stock_model(tmp_path / "target").config.num_hidden_layers == 4


def test_parse_count() -> None:
    assert [parse_count(text) for text in ("300M", "1g", "1.5B", "2000")] == [
        3 * 10**8,
        10**9,
        15 * 10**8,
        2000,
    ]
    with pytest.raises(ConfigError, match="write 300M or 1G"):
        parse_count("many")


@pytest.mark.parametrize(
    ("target_parameters", "expected"),
    [(300_000_000, ModelShape(1024, 23, 2816, 16)), (1_000_000_000, ModelShape(1792, 25, 4928, 28))],
)
def test_usual_shapes(target_parameters: int, expected: ModelShape) -> None:
    config = LlamaConfig(**sizes(320, 6, 5, 5, vocab=4096, inner=864, tied=True))
    shape = shape_for(config, target_parameters)
    weights = shape.layer_parameters(config) * shape.num_layers + 4096 * shape.hidden_size
    assert abs(weights / target_parameters - 1) < 0.03
    assert shape == expected
