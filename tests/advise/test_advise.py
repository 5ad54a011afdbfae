"""The verb from end to end on the embedded pair, small, and what it refuses before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.advise import JSON_NAME, PAGE_NAME, SERVE_NAME
from slipstream.cli.flags.settings import read_file
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.engine.factory import make_engine
from slipstream.errors import ConfigError
from slipstream.tools.advise import run as module
from slipstream.tools.advise.candidates import make_candidates
from slipstream.tools.advise.kept_parts import NAME, KeptParts

SMALL = [
    *("--prompts-per-task", "1", "--max-tokens", "4", "--concurrency", "2", "--minutes", "0.01"),
    *("--num-threads", "1", "--kv-cache-bytes", "128MiB", "--no-trees", "--spec", "draft"),
]


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["advise", *words])
    return done.exit_code, done.output


@pytest.mark.long
def test_the_whole_advice(tmp_path: Path, drafts_loaded_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped before the check, resumed, and its file is what an engine takes."""
    folder = tmp_path / "advice"
    monkeypatch.setattr("slipstream.tools.advise.step_costs.MIN_ROUNDS", 1)
    monkeypatch.setattr("slipstream.tools.advise.step_costs.CHECKED", (1, 4))
    monkeypatch.setattr("slipstream.tools.advise.check.MIN_PAIRS", 1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "What is {n} + 2?", "task": "{n}"}}\n' for n in (1, 2)))
    small = [*SMALL, "--workload", str(prompts)]

    def stopped(self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.AdviceWork, "checked", stopped)
        code, _ = invoke(*small, "--output", str(folder))
    assert code == 130
    parts = json.loads((folder / NAME).read_text())["parts"]
    assert set(parts) == {"recording", "costs"}

    def again(*arguments: object) -> None:
        raise AssertionError("what is finished is not done again")

    monkeypatch.setattr(module, "record", again)
    monkeypatch.setattr(module, "measure_costs", again)
    code, output = invoke(*small, "--output", str(folder), "--resume")
    assert "begins anew" not in output
    assert code == 0, output
    assert "Predicted and measured" in output
    assert not (folder / NAME).exists()

    advice = json.loads((folder / JSON_NAME).read_text())
    assert [load["concurrency"] for load in advice["loads"]] == [2]
    for load in advice["loads"]:
        names = [one["name"] for one in load["checked"]]
        assert names[0] == "off"
        assert len(names) >= 3
        assert load["setting"] in names
        assert all(one["measured_goodput"] > 0 for one in load["checked"])
    assert advice["enable"] == (advice["speculative_config"]["method"] != "off")
    assert {cell["setting"] for cell in advice["predicted"]} >= {"off", "suffix", "draft γ=6", "ngram γ=2"}
    page = (folder / PAGE_NAME).read_text()
    assert page.count("<svg") == 2
    assert "Should the embedded pair speculate?" in page
    served = read_file(folder / SERVE_NAME)
    assert served["num_threads"] == 1
    if advice["enable"]:
        config = SpeculativeConfig.from_mapping(json.loads(served["speculative_config"]))
        make_engine(None, config, {"num_threads": 1, "kv_cache_bytes": 2**27, "max_num_seqs": 2})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume"], "--resume needs the --output folder"),
        (["--concurrency", "none"], "--concurrency takes whole numbers"),
        (["--max-tokens", "0"], "--max-tokens takes a whole number"),
        (["--workload", "nothing.jsonl"], "there is no file"),
        (["--spec", "lookahead"], "'lookahead' cannot be scored on a recorded text"),
        (["--spec", "layer_skip:int8"], "it searches its layers while it runs"),
        (["--spec", "nonsense"], "unknown drafter 'nonsense'"),
    ],
)
def test_refused_before_any_work(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*arguments: object) -> None:
        raise AssertionError("nothing is loaded")

    monkeypatch.setattr(module, "make_recording_engine", loaded)
    code, output = invoke(*words)
    assert code == 2
    assert message in output


def test_a_classical_verifier_is_refused() -> None:
    with pytest.raises(ConfigError, match="coupled verifier"):
        make_candidates([SpeculativeConfig("draft_model", "rejection", {"model": "m"})], False)


def test_candidates_have_names_of_their_own() -> None:
    drafts = [SpeculativeConfig("draft_model", options={"model": f"/models/{name}"}) for name in "ab"]
    found = make_candidates([*drafts, drafts[0]], with_trees=True)
    assert [one.name for one in found] == [
        "ngram",
        "suffix",
        "draft",
        "draft tree",
        "draft b",
        "draft tree b",
    ]
    assert found[2].depths == (1, 2, 3, 4, 6)
    assert found[2].at(3).options["num_speculative_tokens"] == 3


def test_a_tree_that_is_a_default_is_written_out() -> None:
    """The plan is `auto`'s, under which an EAGLE head that names no shape drafts chains."""
    found = make_candidates([SpeculativeConfig("eagle3", options={"model": "m"})], with_trees=True)
    chain, tree = (one.speculative.options for one in found[-2:])
    assert (chain["tree_top_k"], chain["num_draft_nodes"]) == (1, None)
    assert (tree["tree_top_k"], tree["num_draft_nodes"]) == (4, 16)


def test_parts_of_another_advice_are_not_resumed(tmp_path: Path) -> None:
    kept = KeptParts(tmp_path, {"model": "a", "loads": [1]}, resume=False)
    assert kept.part("recording", list[int], lambda: [1, 2]) == [1, 2]
    again = KeptParts(tmp_path, {"model": "a", "loads": [1]}, resume=True)
    assert again.part("recording", list[int], lambda: [3]) == [1, 2]
    with pytest.raises(ConfigError, match="another loads"):
        KeptParts(tmp_path, {"model": "a", "loads": [1, 4]}, resume=True)
    for damaged in ("{", "[]", '{"settings": 1, "parts": {}}'):
        (tmp_path / NAME).write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            KeptParts(tmp_path, {"model": "a"}, resume=True)


def test_to_resume_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_job: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "advise", stopped)
    code, output = invoke(*SMALL, "--output", str(tmp_path), "--resume")
    assert code == 130
    assert "no finished parts of an advice in" in output
    assert "it begins anew" in output
    (tmp_path / NAME).write_text("{}")
    assert "begins anew" not in invoke(*SMALL, "--output", str(tmp_path), "--resume")[1]
