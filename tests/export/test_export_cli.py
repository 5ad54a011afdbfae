"""`slipstream export` and `slipstream import` as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.engine.speculation import ParsedSpeculation
from slipstream.errors import ConfigError
from slipstream.tools.export import ENGINES, from_own, to_own
from slipstream.tools.export.converting import converted
from slipstream.tools.export.record import ScheduleRange, SpeculativeRecord, TreeShape


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
    ParsedSpeculation.of(config)


def test_a_tree_is_refused_and_the_nearest_is_written_when_asked_for(tmp_path: Path) -> None:
    result = run("export", "vllm", "--spec", "eagle3")
    assert result.exit_code == 2
    assert (
        "the nearest that it can run is eagle3, a chain of 5 tokens (--nearest takes that)" in result.stderr
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


def test_a_schedule_becomes_a_plan_of_auto_and_goes_out_again() -> None:
    ranges = [[1, 4, 4], [5, 9, 2], [10, 64, 0]]
    given = {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": ranges}
    result = run("import", "vllm", json.dumps(given), "--json")
    config = json.loads(result.stdout)["speculative_config"]
    assert config["method"] == "auto"
    assert [drafter["num_speculative_tokens"] for drafter in config["drafters"]] == [4, 2]
    assert config["plan"] == [
        {"drafter": 0, "num_speculative_tokens": 4, "max_requests": 4},
        {"drafter": 1, "num_speculative_tokens": 2, "max_requests": 9},
        {},
    ]
    result = run("export", "vllm", "--speculative-config", json.dumps(config), "--json")
    again = json.loads(json.loads(result.stdout)["argv"][-1])["num_speculative_tokens_per_batch_size"]
    assert [entry[::2] for entry in again] == [[1, 4], [5, 2], [10, 0]]


def test_a_tree_keeps_no_schedule() -> None:
    tree = TreeShape(top_k=2, num_nodes=6)
    schedule = (ScheduleRange(1, 4, 3), ScheduleRange(5, None, 1))
    record = SpeculativeRecord(method="eagle3", model="h", depth=3, tree=tree, schedule=schedule)
    config, notes = to_own(record)
    assert config["method"] == "eagle3"
    assert "the schedule by running requests is left out: a tree stays as it is at any load" in notes


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        ([{"drafter": 0, "num_speculative_tokens": 4}], ()),
        ([{"drafter": 0, "num_speculative_tokens": 9, "max_requests": 8}], [(1, 8, 6), (9, None, 0)]),
        ([{}, {"drafter": 0, "max_requests": 2}, {"drafter": 0, "task": "code"}], [(1, 2, 6), (3, None, 0)]),
    ],
)
def test_plans_as_advise_writes_them(plan: list[dict[str, object]], schedule: Any) -> None:
    drafter = {"method": "draft_model", "model": "d", "num_speculative_tokens": 6}
    config = SpeculativeConfig.from_mapping({"method": "auto", "drafters": [drafter], "plan": plan})
    record, notes = from_own(config, "t")
    assert record.method == "draft_model"
    assert record.schedule == tuple(ScheduleRange(*each) for each in schedule)
    assert record.depth == (4 if not schedule else 6)
    assert any("code" in note for note in notes) == ("task" in plan[-1])


def test_a_plan_of_two_drafters_is_refused() -> None:
    drafters = [{"method": "ngram"}, {"method": "suffix"}]
    rules = [{"drafter": 0, "max_requests": 4}, {"drafter": 1}]
    given = {"method": "auto", "drafters": drafters, "plan": rules}
    with pytest.raises(ConfigError, match="more than one drafter"):
        from_own(SpeculativeConfig.from_mapping(given))


def test_a_record_without_its_model_is_none() -> None:
    with pytest.raises(ValueError, match="needs a model"):
        SpeculativeRecord(method="eagle3")


@pytest.mark.parametrize(
    ("engine", "files", "layers"),
    [
        ("vllm", {"config.json", "model.safetensors"}, [1, 3, 5]),
        ("sglang", {"config.json", "model.safetensors"}, [0, 2, 4]),
        ("tensorrt-llm", {"config.json", "model.safetensors"}, [0, 2, 4]),
        ("openvino", {"convert.sh", "head"}, None),
    ],
)
def test_setting_and_checkpoint_together(
    engine: str, files: set[str], layers: list[int] | None, tmp_path: Path
) -> None:
    words = ("export", engine, "--spec", "eagle3", "--nearest", "--checkpoint", "--output")
    result = run(*words, str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    place = tmp_path / "out" / "checkpoint"
    assert {path.name for path in place.iterdir()} == files
    source = "command.sh" if engine != "openvino" else "openvino_genai.json"
    assert str(place) in (
        (tmp_path / "out" / source).read_text() + (tmp_path / "out" / "record.json").read_text()
    )
    if layers is not None:
        config = json.loads((place / "config.json").read_text())
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == layers
        back = run(
            "import", engine, str(tmp_path / "out" / source), "--checkpoint", str(tmp_path / "back"), "--json"
        )
        assert back.exit_code == 0, back.output
        head = json.loads(back.stdout)["speculative_config"]["model"]
        theirs = json.loads((Path(head) / "config.json").read_text())["eagle_config"]
        assert theirs["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    if engine == "tensorrt-llm":
        assert (
            "eagle3_layers_to_capture:\n  - 0\n  - 2\n  - 4\n"
            in (tmp_path / "out" / "config.yaml").read_text()
        )


def test_checkpoints_are_never_written_over(tmp_path: Path) -> None:
    head = tmp_path / "out" / "checkpoint"
    shutil.copytree(EMBEDDED_EAGLE3, head)
    before = {path.name: path.read_bytes() for path in head.iterdir()}
    words = ["export", "vllm", "--checkpoint", "--output", str(tmp_path / "out"), "--spec"]
    for spec, more in ((f"eagle3:{head}", ["--overwrite"]), ("eagle3", [])):
        result = run(*words, spec, "--nearest", *more)
        assert result.exit_code == 2, result.output
        assert "over itself" in result.stderr if more else "there are files already" in result.stderr
    assert {path.name: path.read_bytes() for path in head.iterdir()} == before
    assert run(*words, "eagle3", "--nearest", "--overwrite").exit_code == 0


def test_a_converted_head_has_no_revision(tmp_path: Path) -> None:
    record = SpeculativeRecord(
        method="eagle3", target=EMBEDDED_TARGET, model=EMBEDDED_EAGLE3, depth=4, revision="v2"
    )
    made, _ = converted(record, "sglang", tmp_path / "checkpoint")
    assert (made.model, made.revision) == (str(tmp_path / "checkpoint"), None)
    assert made.head is not None
    assert made.head.aux_layers is not None
    assert made.head.aux_layers.as_convention("before_layer").ids == (1, 3, 5)
