"""`slipstream quantize`: rounding on what layers see, the folder that is written, and bad input before any work."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerBase,
)
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.errors import ModelError
from slipstream.models import load_model, load_plain, load_tokenizer
from slipstream.models.files.compressed import CompressedMatrix, CompressedSettings
from slipstream.tools.quantize.calibration import LayerDone, as_rows, round_layers
from slipstream.tools.quantize.folder import layer_tensors, packed, settings
from slipstream.tools.quantize.job import FORMATS, QuantizeOptions, quantise
from slipstream.tools.quantize.rounding import RoundedWeight, lost_share, rounded
from tests.kit.gguf_files import write
from tests.kit.logits import cached_logits

INPUTS, OUTPUTS = 96, 24


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = load_tokenizer(EMBEDDED_TARGET)
    return found


def llama(vocab_size: int, **changes: Any) -> LlamaConfig:
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaConfig(
        vocab_size=vocab_size, num_key_value_heads=2, max_position_embeddings=96, **{**shape, **changes}
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = llama(len(tokenizer), initializer_range=0.1, eos_token_id=tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"Tell me {number} things."}]} for number in range(30)
    ] + [{"text": f"The number {number} is even or odd."} for number in range(30)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def correlated(seed: int) -> tuple[Tensor, Tensor]:
    """A weight [out, in] and the correlations of inputs that depend on one another."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randn(400, 12, generator=generator) @ torch.randn(12, INPUTS, generator=generator)
    inputs = few + 0.3 * torch.randn(400, INPUTS, generator=generator)
    return torch.randn(OUTPUTS, INPUTS, generator=generator), inputs.T @ inputs / 400


# --- rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_without_correlations_each_weight_gets_its_nearest_code(bits: int, symmetric: bool) -> None:
    weight, _ = correlated(1)
    found = rounded(weight, None, bits, 32, torch.bfloat16, symmetric)
    each = found.scales.float().repeat_interleave(32, 1)
    zeros = found.zeros.float().repeat_interleave(32, 1)
    every = each[..., None] * (torch.arange(2**bits) - zeros[..., None])  # [out, in, codes]
    nearest = (every - weight[..., None]).abs().amin(-1)
    torch.testing.assert_close((found.dequantised() - weight).abs(), nearest, rtol=0, atol=1e-5)
    assert int(found.codes.max()) < 2**bits
    assert not symmetric or bool((found.zeros == 2 ** (bits - 1)).all())


def test_a_range_is_cut_where_that_errs_less() -> None:
    weight = torch.linspace(-1, 1, 1024)[None].clone()
    weight[0, 5] = 1.3
    found = rounded(weight, None, 4, 1024, torch.float16)
    assert 2 / 15 - 0.01 < float(found.scales[0, 0]) < 2.15 / 15


def test_a_constant_group_and_one_of_zeros_are_exact_enough() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 0.5
    found = rounded(weight, None, 4, 32, torch.float16).dequantised()
    assert torch.equal(found[0], weight[0])
    torch.testing.assert_close(found[1], weight[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("group", [32, INPUTS])
def test_calibration_makes_good_for_what_is_rounded_away(group: int) -> None:
    weight, correlations = correlated(2)
    plain = rounded(weight, None, 4, group, torch.float16)
    found = rounded(weight, correlations, 4, group, torch.float16)
    assert lost_share(weight, found, correlations) < 0.4 * lost_share(weight, plain, correlations)


def test_corrections_reach_over_the_blocks_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, correlations = correlated(3)
    at_once = rounded(weight, correlations, 4, INPUTS, torch.float16)
    monkeypatch.setattr("slipstream.tools.quantize.rounding.BLOCK", 7)
    parts = rounded(weight, correlations, 4, INPUTS, torch.float16)
    assert float((at_once.codes != parts.codes).float().mean()) < 0.01  # sums in another order


def test_inputs_that_are_always_alike_do_not_stop_it() -> None:
    weight, _ = correlated(4)
    assert torch.isfinite(
        rounded(weight, torch.ones(INPUTS, INPUTS), 4, 32, torch.float16).dequantised()
    ).all()
    silent = rounded(weight, torch.zeros(INPUTS, INPUTS), 4, 32, torch.float16)
    assert torch.equal(silent.codes, rounded(weight, None, 4, 32, torch.float16).codes)


def test_weights_that_are_not_finite_are_named() -> None:
    weight, _ = correlated(5)
    weight[0, 0] = math.nan
    with pytest.raises(ModelError, match="weights that are not finite"):
        rounded(weight, None, 4, 32, torch.float16)


# --- what is written --------------------------------------------------------------------------------------


def test_words_hold_the_first_code_in_their_lowest_bits() -> None:
    assert packed(torch.arange(8, dtype=torch.uint8)[None], 4).tolist() == [[0x76543210]]
    assert packed(torch.tensor([[1, 2, 3, 255]], dtype=torch.uint8), 8).tolist() == [[0xFF030201 - 2**32]]
    assert packed(torch.full((1, 9), 15, dtype=torch.uint8), 4).tolist() == [[-1, 15]]


@pytest.mark.parametrize("bits", [4, 8])
def test_our_reader_finds_the_numbers_that_were_written(bits: int) -> None:
    weight, _ = correlated(7)
    group = None if bits == 8 else 32
    found = rounded(weight, None, bits, group or INPUTS, torch.bfloat16, symmetric=group is None)
    said = CompressedSettings.read(settings(bits, group, group is None, []))
    read = CompressedMatrix("w", layer_tensors(found, symmetric=group is None), said)
    assert torch.equal(read.widened(0, OUTPUTS), found.dequantised())


def test_zeros_are_packed_along_the_outputs() -> None:
    weight, _ = correlated(6)
    found = rounded(weight, None, 4, 32, torch.float16)
    tensors = layer_tensors(found, symmetric=False)
    assert tensors["weight_zero_point"].shape == (OUTPUTS // 8, 3)
    word = int(tensors["weight_zero_point"][1, 2]) & 0xFFFFFFFF
    assert [word >> (4 * place) & 15 for place in range(8)] == found.zeros[8:16, 2].tolist()


def numbers_of(tensors: dict[str, Tensor], name: str) -> Tensor:
    """float32 [out, in]: a layer's weight out of its bytes or words, read one by one."""
    if f"{name}.weight" in tensors:
        assert tensors[f"{name}.weight"].dtype == torch.int8
        return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"].float()
    out, inputs = tensors[f"{name}.weight_shape"].tolist()
    words, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].float()
    each = words.shape[1] and -(-inputs // words.shape[1])
    bits, group = 32 // each, inputs // scales.shape[1]

    def code(of: Tensor, row: int, column: int) -> int:
        return int(of[row, column // each]) >> (bits * (column % each)) & (2**bits - 1)

    zeros = tensors.get(f"{name}.weight_zero_point")
    found = torch.empty(out, inputs)
    for row in range(out):
        for column in range(inputs):
            zero = 2 ** (bits - 1) if zeros is None else code(zeros.T, column // group, row)
            found[row, column] = scales[row, column // group] * (code(words, row, column) - zero)
    return found


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_folder_holds_the_rounded_model(
    checkpoint: Path, texts: Path, tmp_path: Path, quantization: str
) -> None:
    seen: list[LayerDone] = []
    options = QuantizeOptions(quantization, num_texts=6, length=48)
    outcome = quantise(str(checkpoint), tmp_path / "out", options, texts, seen.append)
    assert [(done.number, done.count, len(done.weights)) for done in seen] == [(1, 2, 7), (2, 2, 7)]
    assert outcome.num_tokens == 6 * 48
    assert outcome.mean_lost is not None
    assert 0 < outcome.mean_lost < (0.05 if quantization == "int4" else 1e-3)
    tensors = load_file(tmp_path / "out/model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    torch.testing.assert_close(numbers_of(tensors, name), seen[1].weights[name].dequantised())
    before = load_file(checkpoint / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], before["lm_head.weight"])
    assert torch.equal(tensors["model.norm.weight"], before["model.norm.weight"])
    assert (
        (f"{name}.weight_packed" in tensors) == (f"{name}.weight" not in tensors) == (quantization == "int4")
    )
    assert outcome.bytes_left == 0
    assert outcome.bytes_after == sum(tensor.nbytes for tensor in tensors.values())
    config = json.loads((tmp_path / "out/config.json").read_text())
    said = config["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert said["ignore"] == ["lm_head"]
    bits, group = FORMATS[quantization]
    weights, rows = (said["config_groups"]["group_0"][part] for part in ("weights", "input_activations"))
    form = "pack-quantized" if quantization == "int4" else "int-quantized"
    assert said["format"] == form
    assert (weights["num_bits"], weights["group_size"]) == (bits, group)
    assert weights["symmetric"] == (group is None) == (f"{name}.weight_zero_point" not in tensors)
    if quantization == "int8":  # what other engines ask before they take their integer products
        assert weights | {"strategy": "channel", "dynamic": False, "type": "int"} == weights
        assert rows == {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    assert (rows is None) == (quantization == "int4")
    assert load_tokenizer(str(tmp_path / "out"))("even or odd")["input_ids"]
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever reads one file reads all"


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_engine_reads_what_was_written(
    checkpoint: Path, texts: Path, tmp_path: Path, quantization: str
) -> None:
    """Kept packed in the kernels, and widened to the same numbers on request."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    source = tmp_path / "source"
    torch.manual_seed(0)
    tokenizer = load_tokenizer(str(checkpoint))
    config = llama(len(tokenizer), eos_token_id=tokenizer.eos_token_id, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
    tokenizer.save_pretrained(source)
    out = tmp_path / "out"
    numbers: dict[str, Tensor] = {}
    quantise(
        str(source), out, QuantizeOptions(quantization, num_texts=3, length=32), texts,
        lambda done: numbers.update({name: found.dequantised() for name, found in done.weights.items()}),
    )  # fmt: skip
    exact = load_plain(str(source), dtype=torch.float32, attention="eager").eval()
    for name, number in numbers.items():
        exact.get_submodule(name).weight.data.copy_(number)
    tokens = tokenizer("The number 7 is even or odd.")["input_ids"]
    with torch.inference_mode():
        expected = exact(torch.tensor([tokens])).logits[0]
    packed_lm, widened = load_model(str(out)), load_model(str(out), dtype="float32")
    torch.testing.assert_close(cached_logits(widened, tokens), expected, rtol=1e-3, atol=1e-3)
    error = cached_logits(packed_lm, tokens) - expected  # of activations rounded to 8 bits
    assert float(error.std()) < 0.03 * float(expected.std())
    assert packed_lm.weight_bytes < 0.8 * widened.weight_bytes


def test_later_layers_are_rounded_on_what_rounded_layers_give(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """With a first layer that is rounded to nothing, the second one sees the embeddings alone."""
    model = load_plain(str(checkpoint), dtype=torch.float32, attention="sdpa")
    rows = as_rows(tokenizer, ["one two three four"], 2, 8, 0)
    given: list[Tensor] = []

    def spy(weight: Tensor, correlations: Tensor | None) -> RoundedWeight:
        assert correlations is not None
        given.append(correlations)
        return rounded(torch.zeros_like(weight), None, 4, 32, torch.float16)

    list(round_layers(model, rows, spy))
    embedded = torch.nn.functional.embedding(rows, model.model.embed_tokens.weight)
    seen = model.model.layers[1].input_layernorm(embedded).flatten(0, 1)
    torch.testing.assert_close(given[7], seen.T @ seen / len(seen), rtol=1e-4, atol=1e-5)


def test_every_layer_gets_its_own_arguments(tokenizer: PreTrainedTokenizerBase) -> None:
    """Gemma 3 has two rotary bases and two masks; run one by one, its layers compute what they do together."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=3, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4, query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    rows = as_rows(tokenizer, ["one two three four five six seven eight nine ten"], 3, 12, 0)
    expected: list[Tensor] = []
    handle = model.model.layers[2].mlp.down_proj.register_forward_pre_hook(
        lambda _, given: expected.append(given[0].flatten(0, 1))
    )
    with torch.inference_mode():
        for row in rows:
            model(row[None])
    handle.remove()
    inputs = torch.cat(expected)
    given: dict[tuple[int, ...], Tensor] = {}

    def exact(weight: Tensor, correlations: Tensor | None) -> Any:
        assert correlations is not None
        given[tuple(weight.shape)] = correlations
        return Untouched(weight.clone())

    list(round_layers(model, rows, exact))
    torch.testing.assert_close(given[32, 64], inputs.T @ inputs / len(inputs), rtol=1e-3, atol=1e-4)


class Untouched:
    """A weight that is not rounded at all."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def dequantised(self) -> Tensor:
        return self._weight


def test_experts_that_stay_as_they_are_are_said_and_read_back(
    tokenizer: PreTrainedTokenizerBase, texts: Path, tmp_path: Path
) -> None:
    """As 16 bits without an option, and rounded when the folder is loaded."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, num_local_experts=3, num_experts_per_tok=2,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    options = QuantizeOptions("int4", num_texts=2, length=32)
    outcome = quantise(str(tmp_path / "source"), tmp_path / "out", options, texts, lambda done: None)
    assert outcome.bytes_left == 2 * 2 * 3 * (64 + 3 * 64 * 96)
    assert set(outcome.left) == {
        f"model.layers.{n}.mlp.{part}" for n in (0, 1) for part in ("experts", "gate")
    }
    said = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert set(said["ignore"]) == {"lm_head", *outcome.left}
    plain, rounded_too = (
        load_model(str(tmp_path / "out")),
        load_model(str(tmp_path / "out"), quantization="int8"),
    )
    assert plain.weight_bytes - rounded_too.weight_bytes > outcome.bytes_left // 3
    done = run(tmp_path / "source", tmp_path / "told", "--no-calibration")
    assert f"{outcome.bytes_left / 2**20:,.1f} MiB of experts and routers" in " ".join(done.output.split())


# --- the verb, and bad input ------------------------------------------------------------------------------


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_the_verb(checkpoint: Path, texts: Path, tmp_path: Path) -> None:
    done = run(checkpoint, tmp_path / "out", "--data", texts, "--num-texts", 2, "--length", 32)
    assert done.exit_code == 0, done.output
    assert "rounded away" in done.output
    assert "layer 2 of 2" in done.output
    assert "there was text for" not in done.output
    few = run(checkpoint, tmp_path / "few", "--data", texts, "--num-texts", 200, "--length", 32)
    assert "rows of the 200 requested" in few.output
    plain = run(checkpoint, tmp_path / "plain", "--no-calibration", "--quantization", "int4_g64")
    assert plain.exit_code == 2
    assert "has 160 inputs, which groups of 64 do not divide; use int4 or int8" in plain.output
    plain = run(checkpoint, tmp_path / "plain", "--no-calibration")
    assert plain.exit_code == 0, plain.output
    assert "rounded away" not in plain.output


def test_groups_that_do_not_divide_are_refused_before_weights_are_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.tools.quantize.job.load_plain", None)
    done = run(checkpoint, tmp_path / "out", "--quantization", "int4_g128")
    assert done.exit_code == 2, done.output
    assert "inputs, which groups of 128 do not divide" in done.stderr


def test_a_quantised_gguf_file_is_not_rounded_twice(tmp_path: Path) -> None:
    shape = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 64, "context_length": 64}
    heads = {"attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": 32}
    keys = {f"llama.{key}": value for key, value in {**shape, **heads}.items()}
    matrix = np.zeros((32, 18), np.uint8)  # blocks of Q4_0
    names = ("token_embd.weight", "blk.0.attn_q.weight")
    write(tmp_path / "model.gguf", "llama", keys, dict.fromkeys(names, ("Q4_0", matrix)))
    done = run(tmp_path / "model.gguf", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert "is quantised already" in done.stderr


def test_a_disk_that_is_full_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("slipstream.tools.quantize.folder.save_torch_state_dict", full)
    done = run(checkpoint, tmp_path / "out", "--no-calibration")
    assert done.exit_code == 2, done.output
    assert "No space left on device" in done.stderr
    assert list(tmp_path.iterdir()) == []


def quantised_twice(checkpoint: Path, folder: Path) -> list[object]:
    config = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    return [folder, folder / "out"]


def untold(checkpoint: Path, folder: Path) -> list[object]:
    (folder / "rows.jsonl").write_text('{"nothing": 1}')
    return [checkpoint, folder / "out", "--data", folder / "rows.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda model, folder: [model, folder, "--quantization", "int3"], "unknown quantization 'int3'"),
        (lambda model, folder: [model, model], "is there already; name a folder that is not"),
        (lambda model, folder: [folder / "none", folder / "out"], "is not a folder"),
        (lambda model, folder: [model, folder / "out", "--data", folder / "none"], "none"),
        (lambda model, folder: [model, folder / "out", "--num-texts", 0], "num_texts"),
        (lambda model, folder: [model, folder / "out", "--data", "x", "--no-calibration"], "--data is read for"),
        (untold, "has no messages, text or prompt to calibrate on"),
        (quantised_twice, "is quantised already"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_any_work(
    checkpoint: Path, tmp_path: Path, arguments: Callable[[Path, Path], list[object]], message: str
) -> None:
    done = run(*arguments(checkpoint, tmp_path))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    *before, line = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert [said.partition(" ")[0] for said in before] in ([], ["loading"])
    assert not (tmp_path / "out").exists()


def test_a_model_without_linear_layers_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    done = run(tmp_path / "gpt2", tmp_path / "out")
    assert done.exit_code == 2
    assert "no list of decoder layers with linear layers" in done.stderr
