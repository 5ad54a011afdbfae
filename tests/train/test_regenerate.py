"""Regenerated data: the target's own words, every conversation once, and nothing lost when a run is killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.engine.llm import LLM
from slipstream.errors import ConfigError, RemoteError, RequestError
from slipstream.rpc.client import ServerAddress
from slipstream.train.answerers import EngineAnswerer, ServerAnswerer, TargetAnswer
from slipstream.train.journal import Journal
from slipstream.train.options import RegenerateOptions, parse_weights
from slipstream.train.prompts import choose, read_scripts
from slipstream.train.regenerate import Tally, regenerate
from tests.kit.fake_http import QuietHandler, served

USER, BOT, SYSTEM = "user", "assistant", "system"


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS: list[dict[str, Any]] = [
    {"task": "chat", "messages": [said(USER, "hi"), said(BOT, "old"), said(USER, "why?"), said(BOT, "old")]},
    {"task": "chat", "source": "a", "messages": [said(SYSTEM, "Be brief."), said(USER, "Tell me a story.")]},
    {"task": "sql", "prompt": "Write a SQL query. How many rows?"},
    {"task": "sql", "turns": ["Write a SQL query.", "Another one."]},
    {"task": "math", "prompt": "What is 2 + 3?"},
    {"task": "math", "messages": [said(BOT, "Hello."), said(USER, "What is 1 + 1?"), said(USER, "Well?")]},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.fixture
def llm(shared_engines: None) -> LLM:
    import slipstream.engine.llm

    return slipstream.engine.llm.LLM(None, max_num_seqs=4)


def made(file: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({row["line"] for row in rows}) == len(rows)
    return {row["line"]: row for row in rows}


OPTIONS = RegenerateOptions(max_tokens=8, temperature="0,1")


def run(data: Path, output: Path, llm: LLM, **more: Any) -> Tally:
    return regenerate(data, output, OPTIONS, EngineAnswerer(llm.engine), {"model": "m"}, **more)


def test_every_turn_is_the_models_own(data: Path, tmp_path: Path, llm: LLM) -> None:
    output = tmp_path / "out.jsonl"
    tally = run(data, output, llm)
    rows = made(output)
    assert tally.num_done == len(rows) == len(ROWS)
    first = rows[1]
    assert [message["role"] for message in first["messages"]] == [USER, BOT, USER, BOT]
    assert "old" not in [message["content"] for message in first["messages"]]
    assert [message["content"] for message in rows[2]["messages"][:2]] == ["Be brief.", "Tell me a story."]
    assert rows[2]["source"] == "a"
    assert [message["content"] for message in rows[6]["messages"][:2]] == ["What is 1 + 1?", "Well?"]
    assert {row["temperature"] for row in rows.values()} == {0.0, 1.0}
    for row in rows.values():
        spans = row["answer_spans"]
        answers = sum(message["role"] == BOT for message in row["messages"])
        assert len(row["finish_reasons"]) == answers >= len(spans) >= 1
        assert spans[-1][1] == len(row["token_ids"])
        text = llm.engine.tokenizer.decode(
            row["token_ids"][spans[-1][0] : spans[-1][1]], skip_special_tokens=True
        )
        assert text == row["messages"][-1]["content"]
    greedy = next(row for row in rows.values() if row["temperature"] == 0 and row["line"] != 1)
    from slipstream.sampling.params import SamplingParams

    [again] = llm.chat(greedy["messages"][:-1], SamplingParams(temperature=0, max_tokens=8))
    assert again.outputs[0].text == greedy["messages"][-1]["content"]
    provenance = json.loads((tmp_path / "out.jsonl.provenance.json").read_text())
    assert provenance["made_with"]["options"]["max_tokens"] == 8


class Killed(Exception):
    """The run ends here, as by a kill."""


def kill_after(num_done: int) -> Callable[[Tally], None]:
    def check(tally: Tally) -> None:
        if tally.num_done >= num_done:
            raise Killed

    return check


def test_a_killed_run_goes_on_and_ends_the_same(data: Path, tmp_path: Path, llm: LLM) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run(data, whole, llm)
    with pytest.raises(Killed):
        run(data, parts, llm, on_progress=kill_after(2))
    kept = parts.read_bytes()
    parts.write_bytes(kept + b'{"task": "chat", "li')  # the last line was not finished
    before = made_lines = len(kept.splitlines())
    assert 2 <= made_lines < len(ROWS)
    tally = run(data, parts, llm)
    assert tally.num_before == before
    assert parts.read_bytes().startswith(kept)
    assert made(parts) == made(whole)
    again = run(data, parts, llm)
    assert again.num_tokens == 0
    assert llm.engine.integrity() == []


def rows_of(file: Path) -> list[dict[str, Any]]:
    journal = Journal(file)
    journal.close()
    return journal.rows


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    with pytest.raises(ConfigError, match="another run is writing"):
        Journal(tmp_path / "journal.jsonl")
    journal.close()
    assert rows_of(tmp_path / "journal.jsonl") == []


def test_sigkill_loses_no_finished_line(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    program = (
        "import os, sys, signal; from pathlib import Path; from slipstream.train.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "[journal.append({'n': n}) for n in range(100)]\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["n"] for row in rows_of(file)] == list(range(100))


def test_a_full_disk_keeps_what_was_whole(tmp_path: Path) -> None:
    file = tmp_path / "journal.jsonl"
    journal = Journal(file)
    journal.append({"text": "a" * 50})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(ConfigError, match="what it holds is whole"):
            journal.append({"text": "b" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert rows_of(file) == [{"text": "a" * 50}]
    assert file.read_bytes().endswith(b"\n")


def test_another_question_needs_another_output(data: Path, tmp_path: Path, llm: LLM) -> None:
    output = tmp_path / "out.jsonl"
    run(data, output, llm)
    with pytest.raises(ConfigError, match="begun with other settings: temperature, max_tokens;"):
        regenerate(data, output, RegenerateOptions(max_tokens=9), EngineAnswerer(llm.engine), {"model": "m"})
    data.write_text(data.read_text() + '{"prompt": "more"}\n')
    with pytest.raises(ConfigError, match="begun with other settings: data_sha256;"):
        run(data, output, llm)


def test_what_cannot_be_answered_is_left_out_and_said(tmp_path: Path, llm: LLM) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"prompt": "word " * 4000}) + '\n{"prompt": "hi"}\n')
    tally = run(file, tmp_path / "out.jsonl", llm)
    assert (tally.num_done, tally.num_skipped) == (1, 1)
    assert "line 1: the prompt has" in tally.why_skipped


BAD_LINES = {
    "no JSON": ("{", "line 1 is not valid JSON"),
    "no object": ("[]", "line 1 must be a JSON object"),
    "nothing to ask": ("{}", "line 1 needs exactly one of prompt, messages, turns, text, question"),
    "another key": ('{"query": "a"}', "it has query. Name the key: --key NAME"),
    "two others": ('{"text": "a", "question": "b"}', "it has text, question. Name the key"),
    "empty question": ('{"question": ""}', "question must be text that is not empty"),
    "two": ('{"prompt": "a", "turns": ["b"]}', "needs exactly one of"),
    "empty prompt": ('{"prompt": " "}', "prompt must be text that is not empty"),
    "turns": ('{"turns": [1]}', "turns must be text"),
    "answers only": ('{"messages": [{"role": "assistant", "content": "a"}]}', "no message to answer"),
    "system only": ('{"messages": [{"role": "system", "content": "a"}]}', "no message to answer"),
    "message": ('{"messages": [{"role": "user"}]}', "a message is"),
    "task": ('{"prompt": "a", "task": 1}', "task must be a text"),
    "empty file": ("", "has no prompts"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(line)
    with pytest.raises(RequestError, match=message):
        read_scripts(file)


USUAL_LINES: dict[str, tuple[dict[str, Any], str | None, list[str]]] = {
    "text": ({"text": "Hello."}, None, ["Hello."]),
    "question": ({"question": "Why?", "answer": "Because."}, None, ["Why?"]),
    "instruction": ({"instruction": "Sort.", "input": "", "output": "x"}, None, ["Sort."]),
    "instruction and input": ({"instruction": "Sort.", "input": "3 1"}, None, ["Sort.\n\n3 1"]),
    "a prompt beside a text": ({"prompt": "Hi.", "text": "whole"}, None, ["Hi."]),
    "a key": ({"query": "Where?", "text": "whole"}, "query", ["Where?"]),
    "turns under a key": ({"said": ["a", "b"]}, "said", ["a", "b"]),
    "messages under a key": ({"conversation": [said(USER, "a"), said(BOT, "b")]}, "conversation", ["a"]),
}


@pytest.mark.parametrize(("row", "key", "asked"), USUAL_LINES.values(), ids=USUAL_LINES)
def test_lines_of_usual_data(row: dict[str, Any], key: str | None, asked: list[str], tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row))
    [script] = read_scripts(file, key)
    assert [turn[-1]["content"] for turn in script.turns] == asked


def test_a_key_that_a_line_lacks_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"query": "Where?"}\n{"question": "Why?"}\n')
    command = ["train", "regenerate", "no-such/model", "--data", str(file), "--key", "query"]
    result = CliRunner().invoke(app, [*command, "--output", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 2
    assert "line 2 has no 'query'; it has question" in " ".join(result.output.split())


def test_the_mix(data: Path) -> None:
    scripts = read_scripts(data)
    tasks = [script.task for script in choose(scripts, 3, {}, seed=1)]
    assert sorted(tasks) == ["chat", "math", "sql"]
    assert [s.number for s in choose(scripts, 3, {}, 1)] == [s.number for s in choose(scripts, 3, {}, 1)]
    assert {s.task for s in choose(scripts, 4, {"sql": 3, "chat": 1}, 0)} == {"sql", "chat"}
    assert len(choose(scripts, 100, {"sql": 3, "chat": 1}, 0)) == 4
    assert len(choose(scripts, None, {}, 0)) == len(ROWS)
    with pytest.raises(ConfigError, match=r"no task 'code' in the data; it has chat, math, sql"):
        choose(scripts, 1, {"code": 1}, 0)
    for bad in ("code", "code=x", "code=-1", "code=0", "code=inf"):
        with pytest.raises(ConfigError, match="--mix"):
            parse_weights(bad, "--mix")


def test_spans_stop_where_the_template_says_it_otherwise() -> None:
    from slipstream.train.regenerate import _tokens

    first = TargetAnswer("a", "stop", 3, [1, 2], [5, 6, 7])
    second = TargetAnswer("b", "stop", 1, [1, 2, 5, 6, 9, 3], [4])
    assert _tokens([first, second]) == {
        "token_ids": [1, 2, 5, 6, 9, 3, 4],
        "answer_spans": [[2, 4], [6, 7]],
    }
    other = TargetAnswer("b", "stop", 1, [8, 8, 8], [4])
    assert _tokens([first, other])["answer_spans"] == [[3, 4]]


@contextmanager
def server(status: int = 200) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A chat server that says how many messages it got."""
    asked: list[dict[str, Any]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.body()
            asked.append(body)
            message = {"role": BOT, "content": f"{len(body['messages'])} messages"}
            choice = {"message": message, "finish_reason": "stop"}
            answer = {"choices": [choice], "usage": {"completion_tokens": 2}}
            self.send(status, answer if status == 200 else {"error": {"message": "no"}})

    with served(Handler) as address:
        yield f"{address}/v1", asked


def test_a_server_answers(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with server() as (url, asked):
        answerer = ServerAnswerer(ServerAddress(url, "m", "", timeout_s=120), 3)
        tally = regenerate(data, output, OPTIONS, answerer, {"model": "m"})
    rows = made(output)
    assert tally.num_done == len(rows) == len(ROWS)
    assert [m["content"] for m in rows[1]["messages"]] == ["hi", "1 messages", "why?", "3 messages"]
    assert "token_ids" not in rows[1]
    assert tally.num_tokens == 2 * len(asked)
    assert {(body["model"], body["max_tokens"]) for body in asked} == {("m", 8)}


@pytest.mark.parametrize(("status", "message"), [(500, "answers HTTP 500: no"), (401, "HTTP 401")])
def test_a_server_that_fails_ends_the_run(status: int, message: str, data: Path, tmp_path: Path) -> None:
    with server(status) as (url, _):
        answerer = ServerAnswerer(ServerAddress(url, "m", "", timeout_s=120), 2)
        with pytest.raises(RemoteError, match=message):
            regenerate(data, tmp_path / "out.jsonl", OPTIONS, answerer, {"model": "m"})


def test_a_server_that_is_not_there(data: Path, tmp_path: Path) -> None:
    answerer = ServerAnswerer(ServerAddress("http://127.0.0.1:9/v1", "m", "", timeout_s=120), 2)
    with pytest.raises(RemoteError, match="cannot reach"):
        regenerate(data, tmp_path / "out.jsonl", OPTIONS, answerer, {"model": "m"})


def test_the_command(data: Path, tmp_path: Path, shared_engines: None) -> None:
    output = tmp_path / "folder" / "out.jsonl"
    command = ["train", "regenerate", "--data", str(data), "--output", str(output)]
    result = CliRunner().invoke(app, [*command, "--max-tokens", "4", "--num-prompts", "3"])
    assert result.exit_code == 0, result.output
    assert len(made(output)) == 3
    refused = CliRunner().invoke(app, [*command, "--max-tokens", "5"])
    assert refused.exit_code == 2
    assert "begun with other settings: num_prompts, max_tokens;" in refused.output.replace("\n", " ")
    refused = CliRunner().invoke(app, [*command, "--temperature", "warm"])
    assert refused.exit_code == 2
    assert "--temperature takes numbers" in refused.output
