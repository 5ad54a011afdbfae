"""`slipstream plan`, as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.cli.main import app

BASE = ["plan", "--process-memory", "400MiB", "--memory", "2GiB"]


def run(*words: str) -> Any:
    return CliRunner().invoke(app, [*BASE, *words])


def test_a_table_says_what_fits() -> None:
    result = run("--batch", "4", "--context", "512")
    assert result.exit_code == 0, result.output
    for part in ("weights, float16", "draft weights", "keys and values", "activations", "logits", "process"):
        assert part in result.stdout
    assert "fits: 4 at once of 512 tokens" in result.stdout
    assert "--max-num-seqs 4 --max-model-len 512 --kv-cache-bytes" in result.stdout
    assert run("--max-num-seqs", "4", "--max-model-len", "512").stdout == result.stdout


def test_what_does_not_fit_exits_with_3_and_says_what_to_change(tmp_path: Path) -> None:
    picture = tmp_path / "bytes.svg"
    result = run("--batch", "32", "--memory", "700MiB", "--kv-cache-dtype", "float32", "--plot", str(picture))
    assert result.exit_code == 3
    assert "does not fit" in result.stdout
    assert "to hold just this" not in result.stdout
    assert result.stdout.count("Costs:") == 3
    assert picture.stat().st_size > 1000
    none = run("--memory", "100MiB", "--batch", "1")
    assert none.exit_code == 3
    assert "take a smaller model or more memory" in none.stdout


def test_json_has_every_byte() -> None:
    result = run("--batch", "2", "--context", "256", "--spec", "suffix", "--json")
    told = json.loads(result.stdout)
    plan = told["plan"]
    assert told["fits"] is True
    assert sum(part["num_bytes"] for part in plan["parts"]) == plan["running_bytes"]
    assert sum(plan["by_kind"].values()) == plan["running_bytes"]
    assert max(plan["running_bytes"], plan["loading_bytes"]) == plan["peak_bytes"]
    assert {"longest_contexts", "largest_batches", "changes", "flags"} <= told.keys()


def _folder(tmp_path: Path, config: object) -> str:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


_LED = {"model_type": "led", "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
_EMBEDDED = json.loads((Path(EMBEDDED_TARGET) / "config.json").read_text())
_HQQ = {**_EMBEDDED, "quantization_config": {"quant_method": "hqq", "bits": 4}}


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"model_type": "nothing-like-it"}, "cannot read the configuration"),
        ({}, "cannot read the configuration"),
        ("{", "cannot read the configuration"),
        (_LED, "cannot be decoded"),
        ({"model_type": "reformer"}, "cannot be decoded"),
        ({**_EMBEDDED, "num_attention_heads": 0}, ""),
        (_HQQ, "HQQ"),
    ],
)
def test_configurations_that_cannot_be_planned(tmp_path: Path, config: object, complaint: str) -> None:
    result = run(_folder(tmp_path, config))
    assert result.exit_code == 2
    error = [line for line in result.stderr.strip().splitlines() if not line.startswith("planning for ")]
    assert len(error) == 1, error
    assert error[0].startswith("error: ")
    assert complaint in error[0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["./no/such/folder"], "is not a folder"),
        (["model.gguf"], "there is no file"),
        (["--memory", "much"], "is not a size"),
        (["--process-memory", "-1"], "is not a size"),
        (["--memory", "8"], "--memory 8 is 8 bytes, less than 1 MiB; write a unit, as in 8GiB"),
        (["--process-memory", "400"], "--process-memory 400 is 400 bytes"),
        (["--batch", "0"], "plan batch must be a whole number of at least 1"),
        (["--context", "0"], "plan context must be a whole number of at least 1"),
        (["--context", "9999"], "beyond the model's 2048"),
        (["--quantization", "int9"], "unknown quantization 'int9'; formats: bfloat16"),
        (["--spec", "draft:./nowhere"], "is not a folder"),
        (["--plot", "bytes.txt"], "has another suffix"),
        (["--device", "tpu:0"], "unknown device"),
    ],
)
def test_bad_input_costs_one_line(words: list[str], complaint: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    error = [line for line in result.stderr.strip().splitlines() if not line.startswith("planning for ")]
    assert len(error) == 1, error
    assert complaint in error[0]


def test_a_draft_of_another_vocabulary_is_refused_as_the_engine_refuses_it(tmp_path: Path) -> None:
    other, bare = tmp_path / "other", tmp_path / "bare"
    shutil.copytree(EMBEDDED_DRAFT, other)
    described = json.loads((other / "tokenizer.json").read_text())
    tokens = described["model"]["vocab"]
    first, second = [token for token, index in tokens.items() if index in (300, 301)]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    (other / "tokenizer.json").write_text(json.dumps(described))
    result = run("--batch", "1", "--draft", str(other))
    assert result.exit_code == 2
    assert f"error: draft {str(other)!r} has another vocabulary" in result.stderr
    assert "use method tli or slem" in result.stderr
    assert run("--batch", "1", "--spec", f"tli:{other}").exit_code == 0
    assert "vocabulary" not in run("--batch", "1").stdout
    bare.mkdir()
    shutil.copy(Path(EMBEDDED_DRAFT) / "config.json", bare)
    assert "vocabulary was not looked at" in run("--batch", "1", "--draft", str(bare)).stdout


def test_where_a_merged_adapter_does_not_fit_quantising_first_is_offered(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET)
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj"])
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    small = ("--memory", "100MiB", "--batch", "1", "--context", "64", "--spec", "off")
    assert "`slipstream quantize` and give --lora" in run(*small, "--lora", str(tmp_path)).stdout
    assert "slipstream quantize" not in run(*small).stdout


def test_the_memory_of_a_gpu_that_is_not_here_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    result = CliRunner().invoke(app, ["plan", "--process-memory", "400MiB", "--device", "cuda:1"])
    assert result.exit_code == 2
    assert "this machine has no 'cuda:1'" in result.stderr
    assert run("--device", "cuda:1", "--batch", "1", "--context", "64").exit_code == 0


def test_a_batch_that_was_not_looked_beyond_says_so() -> None:
    found = " ".join(run("--batch", "5000", "--context", "512", "--memory", "9999GiB").stdout.split())
    assert "512 tokens: 4,096 or more" in found
    less = run("--batch", "5000", "--context", "512", "--memory", "20GiB", "--spec", "off", "--json")
    changes = [each["plan"]["batch"] for each in json.loads(less.stdout)["changes"]]
    assert any(4096 < batch < 5000 for batch in changes), changes


def test_fast_prompts_are_counted_and_refused_as_the_engine_refuses_them() -> None:
    plans = [
        json.loads(run("--batch", "2", "--context", "512", "--json", *more).stdout)["plan"]
        for more in ([], ["--fast-prompts"])
    ]
    plain, fast = ({part["name"]: part["num_bytes"] for part in plan["parts"]} for plan in plans)
    assert fast["activations"] > plain["activations"]
    assert fast["draft activations"] == plain["draft activations"]
    refused = run("--fast-prompts", "--quantization", "int8")
    assert refused.exit_code == 2
    assert "fast_prompts is for weights kept in bfloat16 or float16" in refused.stderr
