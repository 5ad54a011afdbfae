"""The command line: what it answers, and how it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import slipstream
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.cli import chat as chat_verb
from slipstream.cli.flags.flags import parse_bytes, with_flags
from slipstream.cli.flags.options import (
    DEFAULT_MAX_TOKENS,
    ENGINE,
    PYTHON_ONLY,
    SAMPLING,
    SPECULATION,
    SamplingValues,
    chosen_speculation,
)
from slipstream.cli.flags.speculation import SpeculationFlags, speculative_config
from slipstream.cli.main import VERBS, app
from slipstream.cli.output.comparison import TimedComparison
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.plan.sizes import format_bytes
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.structured import StructuredOutput

PROMPT = "Write a SQL query. How many losses does the team from Hawthorn have?"
GREEDY = ["--temperature", "0", "--max-tokens", "12"]


pytestmark = pytest.mark.usefixtures("shared_engines")


def run(*args: str, stdin: str | None = None, **env: str) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin, env=env)


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the refusals need."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "no_weights").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(EMBEDDED_TARGET) / name, folder / "no_weights")
    shutil.copytree(EMBEDDED_DRAFT, folder / "other_draft")
    tokenizer = folder / "other_draft" / "tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())
    tokens = vocabulary["model"]["vocab"]
    first, second = [token for token, id_ in tokens.items() if id_ in (300, 301)]
    tokens[first], tokens[second] = tokens[second], tokens[first]
    tokenizer.write_text(json.dumps(vocabulary))
    (folder / "empty").mkdir()
    shutil.copytree(EMBEDDED_TARGET, folder / "damaged")
    weights = folder / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    (folder / "broken.json").write_text('{"method": ')
    (folder / "broken.jsonl").write_text('{"prompt": "hi"}\n{"prompt": \n')
    (folder / "wrong.jsonl").write_text('{"text": "hi"}\n')
    (folder / "ids.jsonl").write_text('{"token_ids": [5, 999999]}\n')
    (folder / "empty_message.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    (folder / "messages.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    return folder


REFUSALS = {
    "unknown drafter": (["hi", "--spec", "ngarm"], "did you mean 'ngram'?"),
    "unknown key": (
        ["hi", "--speculative-config", '{"method": "ngram", "promt_lookup_max": 3}'],
        "did you mean 'prompt_lookup_max'?",
    ),
    "no method": (["hi", "--speculative-config", '{"num_speculative_tokens": 3}'], 'needs "method"'),
    "invalid JSON": (["hi", "--speculative-config", '{"method": '], "not valid JSON"),
    "invalid JSON file": (["hi", "--speculative-config", "{files}/broken.json"], "not valid JSON"),
    "missing config file": (
        ["hi", "--speculative-config", "nowhere.json"],
        "neither a JSON object nor a file",
    ),
    "two ways": (["hi", "--spec", "ngram", "--draft", "x"], "--spec and --draft both choose a drafter"),
    "unknown verifier": (["hi", "--verifier", "couple"], "did you mean 'coupled'?"),
    "tokens without drafter": (["hi", "--spec", "off", "--num-speculative-tokens", "3"], "needs a drafter"),
    "no draft tokens": (["hi", "--num-speculative-tokens", "0"], "must be a whole number of at least 1"),
    "draft of another target": (["hi", "--model", "no/x", "--spec", "draft"], "--spec draft:PATH"),
    "head of another target": (["hi", "--model", "no/x", "--spec", "eagle3"], "--spec eagle3:PATH"),
    "nothing to compare": (["hi", "--spec", "off", "--compare"], "needs speculation to compare with"),
    "empty prompt": ([""], "the prompt is empty"),
    "blank prompt": (["  \n"], "the prompt is empty"),
    "two prompts": (["hi", "--file", "x.txt"], "not both"),
    "unquoted prompt": (["what", "is", "it"], "put quotes around the prompt"),
    "missing prompt file": (["--file", "nowhere.txt"], "there is no file 'nowhere.txt'"),
    "broken prompt file": (["--file", "{files}/broken.jsonl"], "line 2 is not valid JSON"),
    "wrong prompt file": (["--file", "{files}/wrong.jsonl"], "line 1 needs exactly one of prompt, messages"),
    "message without content": (
        ["--file", "{files}/empty_message.jsonl"],
        "empty_message.jsonl, line 1: a message is",
    ),
    "negative temperature": (["hi", "--temperature", "-1"], "temperature must be a finite number"),
    "NaN temperature": (["hi", "--temperature", "nan"], "temperature must be a finite number"),
    "infinite penalty": (["hi", "--presence-penalty", "inf"], "presence_penalty must be a finite number"),
    "top_p 0": (["hi", "--top-p", "0"], "top_p must be above 0"),
    "max_tokens 0": (["hi", "--max-tokens", "0"], "max_tokens must be a whole number of at least 1"),
    "empty stop string": (["hi", "--stop", "END", "--stop", ""], "stop must hold strings that are not empty"),
    "stop ids that are words": (["hi", "--stop-token-ids", "1,two"], "--stop-token-ids takes token ids"),
    "bias that is not JSON": (["hi", "--logit-bias", "{5: 1}"], "--logit-bias is not valid JSON"),
    "bias of a word": (["hi", "--logit-bias", '{"five": 1}'], "logit_bias token ids must be a whole number"),
    "not a number": (["hi", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
    "unknown flag": (["hi", "--temprature", "0"], "--temperature"),
    "unknown size": (["hi", "--kv-cache-bytes", "lots"], "is not a size"),
    "unknown dtype": (["hi", "--dtype", "float31"], "did you mean 'float32'?"),
    "unknown device": (["hi", "--device", "gpu", "--spec", "off"], "use auto, cpu or cuda"),
    "folder without weights": (["hi", "--model", "{files}/no_weights"], "has no weights"),
    "folder without config": (["hi", "--model", "{files}/empty"], "has no config.json"),
    "no folder": (["hi", "--model", "./nowhere"], "is not a folder"),
    "other vocabulary": (["hi", "--draft", "{files}/other_draft"], "has another vocabulary"),
    # what only the model shows
    "prompt beyond context": ([PROMPT * 150], "shorten it"),
    "prompt id out of range": (
        ["--file", "{files}/ids.jsonl"],
        "ids.jsonl, line 1: token id 999999 in the prompt is outside the vocabulary",
    ),
    "stop id out of range": (["hi", "--stop-token-ids", "4096"], "this model's ids are 0 to 4095"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_bad_request_costs_one_line(case: str, files: Path) -> None:
    args, expected = REFUSALS[case]
    result = run("generate", *[arg.replace("{files}", str(files)) for arg in args])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *before, line = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert [said.partition(" ")[0] for said in before] in ([], ["loading"])


def test_unknown_verbs_and_top_level_flags_are_refused() -> None:
    for args in (["generat"], ["--versoin"]):
        result = run(*args)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: No such")
        assert len(result.stderr.splitlines()) == 1


def test_a_fault_of_ours_is_one_line_and_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("slipstream.cli.generate.read_jobs", fail)
    result = run("generate", "hi")
    assert result.exit_code == 1
    assert result.stderr == "error: ZeroDivisionError: a fault (slipstream --debug … shows where)\n"
    result = run("--debug", "generate", "hi")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.cli.generate.read_jobs", interrupt)
    result = run("generate", "hi")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


# --- flags ----------------------------------------------------------------------------------------------------

SAMPLING_FLAGS = {
    "n": (["-n", "2"], 2),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "7"], 7),
    "top_p": (["--top-p", "0.9"], 0.9),
    "min_p": (["--min-p", "0.1"], 0.1),
    "repetition_penalty": (["--repetition-penalty", "1.1"], 1.1),
    "presence_penalty": (["--presence-penalty", "-0.5"], -0.5),
    "frequency_penalty": (["--frequency-penalty", "0.5"], 0.5),
    "logit_bias": (["--logit-bias", '{"5": 1.5}'], {5: 1.5}),
    "min_tokens": (["--min-tokens", "3"], 3),
    "max_tokens": (["--max-tokens", "30"], 30),
    "bad_words": (["--bad-words", "red", "--bad-words", "two words"], ("red", "two words")),
    "allowed_token_ids": (["--allowed-token-ids", "5,6"], (5, 6)),
    "seed": (["--seed", "9"], 9),
    "stop": (["--stop", "END", "--stop", "\n\n"], ("END", "\n\n")),
    "stop_token_ids": (["--stop-token-ids", "7"], (7,)),
    "ignore_eos": (["--ignore-eos"], True),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "logprobs": (["--logprobs", "2"], 2),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
    "structured": (["--structured", '{"regex": "[0-9]+"}'], StructuredOutput(regex="[0-9]+")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProbeFlags:
    sampling: SamplingValues


@pytest.mark.parametrize(
    "name", sorted({field.name for field in dataclasses.fields(SamplingParams)} - PYTHON_ONLY)
)
def test_every_sampling_parameter_has_a_flag(name: str) -> None:
    args, expected = SAMPLING_FLAGS[name]
    seen: list[SamplingParams] = []
    probe = typer.Typer()

    @probe.command()
    @with_flags
    def verb(flags: ProbeFlags) -> None:
        seen.append(SamplingParams.from_mapping(flags.sampling))

    result = CliRunner().invoke(probe, args)
    assert result.exit_code == 0, result.output
    assert getattr(seen[0], name) == expected
    default = SamplingParams(max_tokens=DEFAULT_MAX_TOKENS)
    assert dataclasses.replace(seen[0], **{name: getattr(default, name)}) == default


def test_every_engine_field_has_a_flag_and_every_flag_has_help() -> None:
    names = {field.name for field in ENGINE.fields()}
    assert names == {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "seed"}
    for flag_set in (ENGINE, SAMPLING, SPECULATION):
        for parameter in flag_set.parameters():
            [option] = parameter.annotation.__metadata__
            assert option.help, parameter.name


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1024", 1024),
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        ("10kb", 10_000),
        ("7b", 7),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1TiB", "1..5k", "1 k i b b", "9" * 400])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(
        ConfigError, match="is more than any machine has" if len(text) > 99 else "is not a size"
    ):
        parse_bytes(text)


# --- generate -------------------------------------------------------------------------------------------------


def test_generate_under_a_schema_or_an_expression(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for given in (str(file), json.dumps(schema)):
        result = run("generate", PROMPT, *GREEDY, "--max-tokens", "60", "--json-schema", given)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout).keys() == {"ok"}
    result = run("generate", PROMPT, *GREEDY, "--regex", "[0-9]{3}-[0-9]{4}")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}\n", result.stdout)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--regex", "("], "unclosed group"),
        (["--regex", "a", "--json-schema", "{}"], "one constraint, got --json-schema and --regex"),
        (["--json-schema", "no/such/file.json"], "no/such/file.json"),
        (["--json-schema", "{"], "json_schema is not valid JSON"),
        (["--structured", '{"regexp": "a"}'], "did you mean 'regex'"),
    ],
)
def test_generate_refuses_bad_constraints_in_one_line(args: list[str], says: str) -> None:
    result = run("generate", PROMPT, *GREEDY, *args)
    assert result.exit_code != 0
    assert says in result.stderr
    assert "Traceback" not in result.stderr
    assert "loading" not in result.stderr


def test_generate_says_where_the_context_cut_the_answer() -> None:
    limits = ("--max-model-len", "40", "--ignore-eos")
    cut = run("generate", "hi", *GREEDY, *limits, "--raw", "--max-tokens", "1000")
    assert re.search(r"note: the answer was cut after 3\d tokens, where the context is full", cut.stderr)
    whole = run("generate", "hi", *GREEDY, *limits, "--raw", "--max-tokens", "8")
    assert "the answer was cut" not in whole.stderr


def test_generate_prints_the_answer_alone_on_standard_output() -> None:
    result = run("generate", PROMPT, *GREEDY)
    assert result.exit_code == 0, result.output
    [expected] = slipstream.LLM().chat(
        [{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=12)
    )
    assert result.stdout == expected.outputs[0].text + "\n"
    for word in (
        "memory:",
        "acceptance rate α",
        "α by position",
        "acceptance length τ",
        "tokens/s",
        "first token",
    ):
        assert word in result.stderr


@pytest.mark.parametrize("way", ["file", "stdin"])
def test_the_prompt_may_come_from_a_file_or_a_pipe(way: str, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    args = ["--file", str(tmp_path / "prompt.txt")] if way == "file" else []
    result = run("generate", *args, *GREEDY, "--json", stdin=PROMPT + "\n")
    direct = run("generate", PROMPT, *GREEDY, "--json")
    [there], [here] = json.loads(result.stdout)["requests"], json.loads(direct.stdout)["requests"]
    assert there["prompt_token_ids"] == here["prompt_token_ids"]
    assert there["outputs"][0]["text"] == here["outputs"][0]["text"]


def test_json_has_everything_and_nothing_else_is_printed() -> None:
    result = run("generate", PROMPT, *GREEDY, "-n", "2", "--logprobs", "1", "--seed", "4", "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["model"] == "embedded pair"
    assert answer["labels"] == []
    assert answer["comparison"] is None
    assert answer["speculation"]["method"] == "draft_model"
    assert answer["speculation"]["verifier"] == "coupled"
    assert answer["speculation"]["num_speculative_tokens"] == 4
    [request] = answer["requests"]
    assert len(request["outputs"]) == 2
    first = request["outputs"][0]
    assert len(first["token_ids"]) == len(first["from_draft"]) == len(first["logprobs"])
    assert first["finish_reason"] in ("stop", "length")
    assert first["seed"] == 4
    metrics = first["metrics"]
    assert metrics["num_output_tokens"] == len(first["token_ids"])
    assert metrics["acceptance_length"] == pytest.approx(metrics["num_output_tokens"] / metrics["num_steps"])
    summary = answer["summary"]
    assert summary["num_answers"] == 2
    assert summary["num_output_tokens"] == sum(len(output["token_ids"]) for output in request["outputs"])


def test_a_file_of_prompts_is_one_batch_with_headings(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"task": "sql", "prompt": PROMPT},
        {
            "id": "turns",
            "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "gone"}],
        },
        {"token_ids": [5, 6, 7]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    result = run("generate", "--file", str(file), *GREEDY)
    assert result.exit_code == 0, result.output
    assert "── prompt 1 (sql)\n" in result.stdout
    assert "── prompt 2 (turns)\n" in result.stdout
    assert "── prompt 3\n" in result.stdout
    answer = json.loads(run("generate", "--file", str(file), *GREEDY, "--json").stdout)
    assert [request["label"] for request in answer["requests"]] == ["sql", "turns", ""]
    assert answer["requests"][2]["prompt_token_ids"] == [5, 6, 7]
    alone = json.loads(run("generate", "hi", *GREEDY, "--json").stdout)
    assert answer["requests"][1]["prompt_token_ids"] == alone["requests"][0]["prompt_token_ids"]


def test_log_probabilities_are_a_table_below_the_answer() -> None:
    plain = run("generate", PROMPT, *GREEDY).stdout
    result = run("generate", PROMPT, *GREEDY, "--logprobs", "2", "--prompt-logprobs", "0")
    assert result.exit_code == 0, result.output
    answer, tokens, prompt = result.stdout.split("\n\n")
    assert answer + "\n" == plain
    heading, *rows = tokens.splitlines()
    assert heading.split() == ["token", "logprob", "alternatives"]
    asked = json.loads(run("generate", PROMPT, *GREEDY, "--logprobs", "2", "--json").stdout)
    entries = asked["requests"][0]["outputs"][0]["logprobs"]
    assert len(rows) == len(entries)
    for row, entry in zip(rows, entries, strict=True):
        assert re.fullmatch(r'".*" +-?\d+\.\d{3}  ".*" -?\d+\.\d{3}  ".*" -?\d+\.\d{3}', row)
        assert f" {entry['logprob']:.3f} " in row
    heading, first, *rest = prompt.splitlines()
    assert heading.startswith("prompt token")
    assert first.endswith('"')
    assert all(re.fullmatch(r'".*" +-?\d+\.\d{3}', row) for row in rest)
    assert len(rest) == len(asked["requests"][0]["prompt_token_ids"]) - 1


def test_logit_bias_reaches_the_answer() -> None:
    token_id = json.loads(run("generate", PROMPT, *GREEDY, "--json").stdout)["requests"][0]["outputs"][0][
        "token_ids"
    ][0]
    forced = run("generate", PROMPT, *GREEDY, "--logit-bias", json.dumps({token_id: 100}), "--json")
    assert forced.exit_code == 0, forced.output
    assert set(json.loads(forced.stdout)["requests"][0]["outputs"][0]["token_ids"]) == {token_id}


@pytest.mark.parametrize(
    ("method", "full", "model"),
    [
        ("draft", "draft_model", EMBEDDED_DRAFT),
        ("draft_model", "draft_model", EMBEDDED_DRAFT),
        ("eagle3", "eagle3", EMBEDDED_EAGLE3),
    ],
)
def test_a_tree_of_the_embedded_targets_own_drafter(method: str, full: str, model: str) -> None:
    config = json.dumps({"method": method, "tree_top_k": 3})
    result = run("generate", PROMPT, *GREEDY, "--speculative-config", config, "--json")
    assert result.exit_code == 0, result.output
    speculation = json.loads(result.stdout)["speculation"]
    assert (speculation["method"], speculation["model"]) == (full, model)
    assert speculation["tree_top_k"] == 3
    elsewhere = run("generate", "hi", "--model", "no/x", "--speculative-config", config)
    assert elsewhere.exit_code == 2
    assert f"{full} needs 'model'" in elsewhere.stderr


def test_the_embedded_targets_drafters_are_known_inside_others() -> None:
    def config(**keys: Any) -> dict[str, Any]:
        return speculative_config(SpeculationFlags(speculative_config=json.dumps(keys)), None).options

    assert config(method="cascade", draft={"method": "draft"})["draft"]["model"] == EMBEDDED_DRAFT
    members = config(method="ensemble", members=[{"method": "suffix"}, {"method": "eagle3"}])["members"]
    assert members[1]["model"] == EMBEDDED_EAGLE3


@pytest.mark.parametrize(
    ("flags", "method", "model"),
    [
        (SpeculationFlags(draft="embedded"), "draft_model", EMBEDDED_DRAFT),
        (SpeculationFlags(spec="draft:embedded"), "draft_model", EMBEDDED_DRAFT),
        (SpeculationFlags(spec="eagle3:embedded"), "eagle3", EMBEDDED_EAGLE3),
    ],
)
def test_embedded_names_the_drafts_in_the_package_for_any_target(
    flags: SpeculationFlags, method: str, model: str
) -> None:
    config = speculative_config(flags, "some/target")
    assert (config.method, config.options["model"]) == (method, model)


@pytest.mark.parametrize(
    "flags",
    [
        SpeculationFlags(reasoning_draft="embedded"),
        SpeculationFlags(reasoning_draft='{"model": "embedded"}'),
        SpeculationFlags(speculative_config='{"method": "off", "reasoning": {"model": "embedded"}}'),
    ],
)
def test_embedded_names_the_draft_that_writes_steps(flags: SpeculationFlags) -> None:
    reasoning = speculative_config(flags, "some/target").reasoning
    assert reasoning == {"name": "embedded", "model": EMBEDDED_DRAFT}


def test_embedded_names_the_target_in_the_package() -> None:
    named = run("generate", PROMPT, *GREEDY, "-m", "embedded")
    assert named.exit_code == 0, named.output
    assert named.stdout == run("generate", PROMPT, *GREEDY).stdout


def test_speeds_of_batches_and_of_single_runs_are_told_apart() -> None:
    batch = run("generate", PROMPT, *GREEDY, "-n", "2").stderr
    assert re.search(r"speed +\d+\.\d tokens/s, prompts included; 2 answers in one batch\n", batch)
    single = run("generate", PROMPT, *GREEDY).stderr
    assert re.search(r"speed +\d+\.\d tokens/s, prompt included\n", single)


def test_raw_leaves_the_chat_template_out() -> None:
    raw, chat = (
        json.loads(run("generate", PROMPT, *GREEDY, flag, "--json").stdout)["requests"][0]["prompt_token_ids"]
        for flag in ("--raw", "--chat")
    )
    assert len(raw) < len(chat)


def test_raw_messages_are_lines_of_text(files: Path) -> None:
    ways = (["--file", str(files / "messages.jsonl")], ["hi\n"])
    whole, text = (
        json.loads(run("generate", *way, "--max-tokens", "1", "--raw", "--json").stdout)["requests"][0]
        for way in ways
    )
    assert whole["prompt_token_ids"] == text["prompt_token_ids"]


@pytest.mark.parametrize("spec", ["off", "ngram", "draft", "eagle3", f"draft:{EMBEDDED_DRAFT}"])
def test_every_drafter_gives_the_same_text(spec: str) -> None:
    result = run("generate", PROMPT, "--max-tokens", "16", "--seed", "1", "--spec", spec)
    assert result.exit_code == 0, result.output
    assert result.stdout == run("generate", PROMPT, "--max-tokens", "16", "--seed", "1").stdout


def test_compare_reports_a_ratio_and_identical_texts() -> None:
    args = ["generate", PROMPT, "--max-tokens", "16", "--compare", "--repeats", "2"]  # sampled, seed drawn
    result = run(*args)
    assert result.exit_code == 0, result.output
    assert re.search(r"without speculation +\d+\.\d tokens/s, median of 2 runs\n", result.stdout)
    assert re.search(
        r"with speculation +\d+\.\d tokens/s, median of 2 runs \(draft_model, 4 tokens\)", result.stdout
    )
    assert "pair 1 of 2\npair 2 of 2\n" in result.stderr
    assert re.search(
        r"ratio +\d+\.\d\d \(median of 2 pairs, quartiles \d+\.\d\d and \d+\.\d\d\)", result.stdout
    )
    assert "conclusion           none: 2 pairs are too few, raise --repeats to 6 or more\n" in result.stdout
    assert re.search(r"texts identical +yes", result.stdout)
    comparison = json.loads(run(*args, "--json").stdout)["comparison"]
    assert comparison["identical"] is True
    assert comparison["differing_prompts"] == []
    assert len(comparison["pairs"]) == 2
    low, high = comparison["ratio_quartiles"]
    assert comparison["ratio_min"] <= low <= comparison["ratio_median"] <= high <= comparison["ratio_max"]


@pytest.mark.parametrize(
    ("ratios", "conclusion"),
    [
        (
            [1.5, 1.6, 1.4, 1.7, 1.5, 1.6],
            "faster with speculation (95 % interval of the median 1.40 to 1.70)",
        ),
        (
            [0.9, 0.8, 0.9, 0.7, 0.95, 0.9],
            "slower with speculation (95 % interval of the median 0.70 to 0.95)",
        ),
        (
            [1.02, 0.93, 1.07, 1.01, 1.03, 0.99, 1.04, 1.05, 1.02],
            "no measurable difference (95 % interval of the ",
        ),
        ([2.0] * 5, "none: 5 pairs are too few, raise --repeats to 6 or more"),
    ],
)
def test_compare_concludes_no_more_than_its_pairs_allow(ratios: list[float], conclusion: str) -> None:
    pairs = [SimpleNamespace(ratio=ratio) for ratio in ratios]
    assert TimedComparison(pairs).conclusion.startswith(conclusion)


def test_compare_says_where_texts_differ() -> None:
    args = ["generate", PROMPT, "--max-tokens", "24", "--compare", "--repeats", "1", "--seed", "3"]
    result = run(*args, "--verifier", "rejection", "--temperature", "1.5")
    assert result.exit_code == 0, result.output
    assert "no: 1 of 1 prompts differ (verifier rejection preserves the distribution" in result.stdout


def test_results_of_a_cost_expanded_model_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.labels.is_cost_expanded", lambda model: True)
    result = run("generate", PROMPT, *GREEDY, "--compare", "--repeats", "1")
    assert "the target is cost-expanded" in result.stdout
    assert "the draft is cost-expanded" in result.stdout
    assert len(json.loads(run("generate", PROMPT, *GREEDY, "--json").stdout)["labels"]) == 2


def test_colours_tell_draft_tokens_from_the_targets_own() -> None:
    coloured = run("generate", PROMPT, *GREEDY, FORCE_COLOR="1").stdout
    assert "\x1b[32maccepted draft tokens" in coloured
    answer = coloured.split("\n", 1)[1]
    assert "\x1b[32m" in answer
    assert "\x1b[33m" in answer
    plain = run("generate", PROMPT, *GREEDY, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[\d+m", "", answer) == plain


# --- chat and info --------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation_and_reuses_it() -> None:
    stdin = "Can you help me to buy movie tickets?\n\nIn Berkeley.\n/stats\n/what\n/reset\nhi\n/exit\nnever read\n"
    result = run("chat", *GREEDY, stdin=stdin)
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) >= 3
    reused = [int(number) for number in re.findall(r"(\d+) of \d+ prompt tokens reused", result.stderr)]
    assert len(reused) == 3
    assert reused[1] > 16
    assert re.search(r"seed +\d+, \d+\n", result.stderr)  # two answers before /stats
    assert "acceptance length τ" in result.stderr
    assert "unknown command /what" in result.stderr


def test_chat_refuses_before_it_speaks() -> None:
    result = run("chat", "--stop-token-ids", "4096", stdin="hi\n")
    assert result.exit_code == 2
    says = "error: stop_token_ids has token id 4096; this model's ids are 0 to 4095"
    assert result.stderr == f"loading the embedded pair\n{says}\n"


def test_chat_survives_a_message_that_cannot_be_answered() -> None:
    result = run("chat", *GREEDY, stdin=f"{PROMPT * 150}\nhi\n")
    assert result.exit_code == 0, result.output
    assert "error: the prompt has" in result.stderr
    assert result.stderr.count("tokens/s") == 1


def test_chat_has_a_system_message() -> None:
    with_system = run("chat", *GREEDY, "--system", "Answer briefly.", stdin="hi\n").stderr
    without = run("chat", *GREEDY, stdin="hi\n").stderr
    lengths = [int(re.search(r"of (\d+) prompt tokens", text)[1]) for text in (with_system, without)]  # type: ignore[index]
    assert lengths[0] > lengths[1]


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = slipstream.LLM()
    conversation = chat_verb.Conversation(llm, SamplingParams(temperature=0, ignore_eos=True), None)
    num_steps = 0
    step = llm.engine.step

    def interrupted_step() -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted_step)
    conversation.answer("hi")
    assert num_steps == 4
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert llm.engine.integrity() == []


@pytest.fixture
def heeded_sigint() -> Iterator[None]:
    """The handler that an interactive shell leaves; in a background job SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_sigint")
def test_a_second_ctrl_c_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = slipstream.LLM()
    conversation = chat_verb.Conversation(llm, SamplingParams(), None)

    def two_interrupts() -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "step", two_interrupts)
    with pytest.raises(KeyboardInterrupt):
        conversation.answer("hi")
    assert llm.engine.integrity() == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_info_of_the_embedded_pair(files: Path) -> None:
    result = run("info", "--draft", EMBEDDED_DRAFT, "--kv-cache-bytes", "64MiB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["family"] == "llama"
    assert found["context_length"] == 2048
    assert found["vocabulary"] == 4096
    assert found["memory_plan"]["kv_bytes"] <= 64 * 2**20
    assert found["memory_plan"]["draft_bytes"] > 0
    assert set(found["drafters"]) >= {"off", "ngram", "suffix", "draft_model"}
    assert found["drafters"]["draft_model"].endswith(": yes")
    costs = found["drafter_costs"]
    assert costs["draft_model"]["weight_bytes"] == found["memory_plan"]["draft_bytes"]
    assert costs["draft_model"]["kv_bytes_per_token"] > 0
    assert costs["suffix"] == {
        "missing": "",
        "weight_bytes": 0,
        "kv_bytes_per_token": 0,
        "feature_bytes_per_token": 0,
        "grows_with": "past answers, at most 10,000",
    }
    assert costs["auto"]["weight_bytes"] == costs["self"]["weight_bytes"], "its copy of the target in int8"
    for about in found["drafters"].values():
        assert "guess" not in about
        assert "`" not in about
    assert costs["ensemble"]["missing"] == "needs members"
    assert (
        found["num_parameters"] < costs["self"]["weight_bytes"] < 1.1 * found["num_parameters"]
    )  # and scales
    weights = format_bytes(costs["self"]["weight_bytes"])  # packed for this processor's instructions
    assert found["drafters"]["self"].startswith(f"runs, weights {weights}, keys and values 7.5 KiB a token: ")
    text = run("info", EMBEDDED_DRAFT, "--draft-for", EMBEDDED_TARGET, "--draft", str(files / "other_draft"))
    assert text.exit_code == 0, text.output
    assert re.search(r"parameters +\d[\d,]+ in \d+ layers", text.stdout)
    assert "has another vocabulary" in text.stdout
    assert "target  yes\n" in text.stdout
    assert text.stdout.splitlines()[-1].startswith("try  --spec auto: ")


def test_info_plans_for_the_draft_that_would_run() -> None:
    result = run("info")
    assert "answers end at <|end|> (1)" in " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    assert re.search(r"tokenizer +byte-level BPE, 4,096 tokens, with chat template", result.stdout)
    assert re.search(r"--spec draft +the embedded draft, which runs by default", result.stdout)
    assert re.search(r"--spec eagle3 +the target's own head", result.stdout)
    assert result.stdout.splitlines()[-1].startswith("try  --spec draft: ")
    planned = json.loads(run("info", "--json").stdout)["memory_plan"]
    with_draft = json.loads(run("info", "--draft", EMBEDDED_DRAFT, "--json").stdout)["memory_plan"]
    assert planned["draft_bytes"] == with_draft["draft_bytes"] > 0


INFO_REFUSALS = {
    "no weights": (["{files}/no_weights"], "has no weights"),
    "damaged weights": (["{files}/damaged"], "cannot read the weights of"),
    "a draft's other vocabulary": (
        ["--tokenizer", "{files}/other_draft"],
        "has another vocabulary",
    ),
    "no GPU": (["--device", "cuda"], "PyTorch sees no GPU"),
    "no such generation_config": (["--generation-config", "{files}/empty"], "generation_config must be"),
}


@pytest.mark.parametrize("case", INFO_REFUSALS)
def test_info_refuses_what_would_not_start(
    case: str, files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args, message = INFO_REFUSALS[case]
    result = run("info", *[arg.format(files=files) for arg in args])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_info_knows_the_embedded_pair_by_name() -> None:
    plain, named = (run("info", "--draft", draft, "--json") for draft in (EMBEDDED_DRAFT, "embedded"))
    assert named.exit_code == 0, named.output
    assert json.loads(named.stdout) == json.loads(plain.stdout)
    assert json.loads(run("info", "--draft-for", "embedded", "--json").stdout)["drafts_for"] == {
        EMBEDDED_TARGET: "yes"
    }


def test_the_memory_that_is_free_is_not_asked_for_where_the_cache_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.engine.memory.available_bytes", lambda device: 1 / 0)
    assert run("info", "--kv-cache-bytes", "64MiB").exit_code == 0
    assert run("info").exit_code == 1


def test_a_fault_in_a_verbs_file_is_not_an_unknown_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home(name: str) -> None:
        raise KeyError("HOME")

    faulty = types.ModuleType("slipstream.cli.faulty")
    monkeypatch.setattr(faulty, "__getattr__", without_home, raising=False)
    monkeypatch.setitem(sys.modules, faulty.__name__, faulty)
    monkeypatch.setitem(VERBS, "faulty", "faulty")
    result = run("faulty", "--help")
    assert result.exit_code == 1
    assert "error: KeyError: 'HOME'" in result.stderr
    assert run("doctr").stderr == "error: No such command 'doctr'. Did you mean 'doctor'?\n"


def test_a_group_of_verbs_alone_says_where_they_are_listed() -> None:
    result = run("train")
    assert result.exit_code == 2
    assert result.stderr.endswith("train --help\n")
    assert "Missing command. See " in result.stderr


def test_the_bare_command_and_version() -> None:
    bare = run()
    assert bare.exit_code == 0
    assert "generate" in bare.stdout
    assert re.fullmatch(r"slipstream \d+\.\d+\.\d+\n", run("--version").stdout)


# --- as a process ---------------------------------------------------------------------------------------------


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom slipstream.cli.main import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "--temperature" in result.stdout
    assert result.stdout.endswith("False False\n")


def test_the_process_separates_answers_from_notes() -> None:
    command = [sys.executable, "-m", "slipstream.cli.main", "generate", *GREEDY, "--threads", "1"]
    result = subprocess.run(command, input=PROMPT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == run("generate", PROMPT, *GREEDY).stdout
    assert "\x1b" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_draft_is_retired_and_works_as_before() -> None:
    old = run("generate", "hi", "--draft", "embedded", *GREEDY)
    new = run("generate", "hi", "--spec", "draft:embedded", *GREEDY)
    assert old.exit_code == new.exit_code == 0
    assert old.stdout == new.stdout
    for flags, short in (
        (SpeculationFlags(draft="embedded"), "draft:embedded"),
        (SpeculationFlags(spec="auto", draft="embedded"), "auto:embedded"),
    ):
        assert speculative_config(flags, None) == speculative_config(SpeculationFlags(spec=short), None)


def test_the_warning_says_what_to_write_instead(caplog: pytest.LogCaptureFixture) -> None:
    chosen_speculation({"spec": "auto", "draft": EMBEDDED_DRAFT}, None)
    assert caplog.messages == [f"--draft is retired; write --spec auto:{EMBEDDED_DRAFT}"]
    chosen_speculation({"draft": "embedded"}, None)
    assert caplog.messages[1:] == ["--draft is retired; write --spec draft:embedded"]


def test_the_embedded_drafter_is_filled_in_under_a_retired_key_too(caplog: pytest.LogCaptureFixture) -> None:
    versions = {"method": "versions", "drafter": {"method": "draft_model"}}
    own = {"a": {"method": "draft_model"}}
    read = [
        speculative_config(SpeculationFlags(speculative_config=json.dumps({**versions, key: own})), None)
        for key in ("lanes", "versions")
    ]
    assert read[0] == read[1]
    assert read[0].options["versions"] == {"a": {"method": "draft_model", "model": EMBEDDED_DRAFT}}
    assert caplog.messages == ["versions key 'lanes' is now called 'versions'"]
