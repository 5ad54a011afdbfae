"""`slipstream export` and `slipstream import` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.engine.speculation import validate
from slipstream.export import ENGINES, from_own, to_own
from slipstream.export.record import SpeculativeRecord


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_embedded_draft_goes_to_every_engine_and_back(engine: str, tmp_path: Path) -> None:
    result = run("export", engine, "--output", str(tmp_path / "setting"))
    assert result.exit_code == 0, result.output
    written = {path.name for path in (tmp_path / "setting").iterdir()}
    assert "record.json" in written
    source = next(
        name
        for name in ("command.sh", "openvino_genai.json", "transformers_generate.json")
        if name in written
    )
    own = tmp_path / "speculative.json"
    result = run("import", engine, str(tmp_path / "setting" / source), "--output", str(own))
    assert result.exit_code == 0, result.output
    config = SpeculativeConfig.from_text(str(own))
    assert (config.method, config.options["model"]) == ("draft_model", EMBEDDED_DRAFT)
    assert config.options["num_speculative_tokens"] == 4
    validate(config)


def test_a_tree_is_refused_and_the_nearest_is_written_when_asked_for(tmp_path: Path) -> None:
    result = run("export", "vllm", "--spec", "eagle3")
    assert result.exit_code == 2
    assert (
        "the nearest that it can run is eagle3, a chain of 5 tokens (--nearest writes that)" in result.stderr
    )
    result = run("export", "vllm", "--spec", "eagle3", "--nearest", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["argv"][:3] == ["vllm", "serve", EMBEDDED_TARGET]
    config = json.loads(found["argv"][-1])
    assert config["model"] == EMBEDDED_EAGLE3
    assert config["num_speculative_tokens"] == 5


def test_the_heads_layers_go_into_the_setting_of_tensorrt() -> None:
    result = run("export", "tensorrt-llm", "--spec", "eagle3")
    assert result.exit_code == 0, result.output
    assert "eagle3_layers_to_capture:\n  - 0\n  - 2\n  - 4\n" in result.stdout


def test_a_command_finds_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("export", "tensorrt-llm", "--spec", "ngram", "--output", "out").exit_code == 0
    for folder in (tmp_path, tmp_path / "out"):
        monkeypatch.chdir(folder)
        found = run("import", "tensorrt-llm", str(tmp_path / "out" / "command.sh"), "--json")
        assert json.loads(found.stdout)["speculative_config"]["method"] == "ngram", found.output


def test_nothing_is_written_over(tmp_path: Path) -> None:
    words = ("export", "vllm", "--spec", "ngram", "--output", str(tmp_path))
    assert run(*words).exit_code == 0
    result = run(*words)
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr
    assert run(*words, "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export", "vlm", "--spec", "ngram"), "unknown engine 'vlm'; did you mean 'vllm'?"),
        (("export", "vllm", "--engine-version", "0.9"), "vllm 0.9 is not known; known versions: 0.32, 0.33"),
        (("import", "sglan", "x"), "unknown engine 'sglan'; did you mean 'sglang'?"),
        (("import", "vllm", "nowhere.json"), "there is no file 'nowhere.json'"),
        (("import", "vllm", "{"), "is neither valid JSON nor YAML"),
        (("import", "llama-cpp", "{}"), "llama.cpp is set by a command"),
        (("import", "openvino", "run it --now"), "give the program or its JSON"),
        (("export", "vllm", "--checkpoint"), "--checkpoint writes files; give --output FOLDER"),
        (("export", "vllm", "--spec", "lookahead"), "vLLM has no lookahead drafter; the nearest"),
    ],
)
def test_bad_input_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
        {"method": "suffix", "suffix_decoding_min_token_prob": 0.2},
        {"method": "draft_model", "model": "d", "draft_sample_method": "greedy", "verifier": "block"},
        {"method": "draft_model", "model": "d", "tree_choices": [[0], [1], [0, 0]]},
        {"method": "eagle3", "model": "h", "tree_top_k": 3, "num_draft_nodes": 7},
        {
            "method": "eagle",
            "model": "h",
            "tree_top_k": 1,
            "num_draft_nodes": None,
            "confidence_threshold": 0.3,
        },
        {"method": "layer_skip", "exit_layer": 3},
        {"method": "medusa", "model": "h", "quantization": "int8"},
        {"method": "off"},
    ],
)
def test_our_own_configuration_survives(config: dict[str, object]) -> None:
    record, notes = from_own(SpeculativeConfig.from_mapping(config), "t")
    assert notes == ()
    back, _ = to_own(record)
    again, _ = from_own(SpeculativeConfig.from_mapping(back), "t")
    assert again == record
    assert back.items() >= {key: value for key, value in config.items() if value is not None}.items()


def test_options_that_nobody_else_has_are_named() -> None:
    given = {"method": "suffix", "tree": True, "suffix_decoding_max_spec_offset": 2}
    _, notes = from_own(SpeculativeConfig.from_mapping(given))
    assert [note.split()[0] for note in notes] == ["suffix_decoding_max_spec_offset", "tree"]


def test_a_schedule_is_named_as_left_out() -> None:
    ranges = [[1, 4, 4], [5, 9, 0]]
    given = {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": ranges}
    text = json.dumps(given)
    result = run("import", "vllm", text, "--json")
    assert any('{"method": "auto"}' in note for note in json.loads(result.stdout)["notes"])


def test_a_record_without_its_model_is_none() -> None:
    with pytest.raises(ValueError, match="needs a model"):
        SpeculativeRecord(method="eagle3")
