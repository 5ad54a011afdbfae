"""Training on the prompts that are measured with does not go unnoticed."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slipstream.assets.workload.reading import Question, read_workload
from slipstream.cli.main import app
from slipstream.train.evaluation import Evaluator
from slipstream.train.overlap import find_overlap
from slipstream.train.runs import first_a_task
from slipstream.train.trainer import Progress

LONG = "Write a short story about a lighthouse keeper who finds a letter in a bottle and answers it."
PROMPTS = [LONG, "What is 4 + 9?", "Summarise the plot of the novel in no more than three plain sentences."]
PROMPTS += ["Show me how to use the command gh-browse."]
FOUND = {
    "word for word": (LONG, 1, 0),
    "but for case, spaces and signs": (LONG.upper().replace(" A ", "\n a,  "), 1, 0),
    "a word changed at its end": (LONG.replace("answers it", "answers them"), 0, 1),
    "inside a longer text": (f"You are a poet. {LONG} Make it rhyme, please.", 0, 1),
    "short, word for word": ("what is 4+9", 1, 0),
    "short, another number": ("What is 4 + 8?", 0, 0),
    "short, another name": ("Show me how to use the command gh-run.", 0, 0),
    "small talk": ("No, thank you.", 0, 0),
    "the same subject": ("Tell me a story of a lighthouse keeper who found a bottle with a letter.", 0, 0),
}


def conversations(file: Path, *texts: str) -> Path:
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": LONG}]}
        for text in texts
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case: str, tmp_path: Path) -> None:
    """In what users say; that an answer holds the words of a prompt is no overlap."""
    text, exact, near = FOUND[case]
    data = conversations(tmp_path / "data.jsonl", "Something else that nobody asks.", text)
    questions = [Question("a", f"line {number}", text=prompt) for number, prompt in enumerate(PROMPTS)]
    talk = ({"role": "user", "content": text} for text in ("Book me a table.", "No, thank you."))
    questions.append(Question("a", "a talk", messages=tuple(talk)))
    found = find_overlap(questions, [data], None)
    assert (len(found.exact), len(found.near)) == (exact, near)
    assert found.conversations == ({f"{data}, line 2"} if exact or near else set())
    assert str(found).startswith(f"{exact + near} of 5 evaluation prompts are in the training data")


def test_later_turns_and_tokens_are_looked_through(tmp_path: Path, tokenizer: Any) -> None:
    ids, answer = tokenizer(LONG).input_ids, tokenizer("Once upon a time").input_ids
    turns = [{"role": "user", "content": text} for text in ("Hello.", LONG)]
    rows: list[dict[str, Any]] = [
        {"messages": turns},
        {"token_ids": ids + answer, "answer_spans": [[len(ids), len(ids + answer)]]},
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = find_overlap([Question("a", "here", text=LONG)], [data], tokenizer)
    assert found.conversations == {f"{data}, line 1", f"{data}, line 2"}


def test_prompts_of_one_kind_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """The sample's prompts come from templates, and some are in it twice; none that is not is found in the others."""
    questions = read_workload("sample").questions
    even, odd = questions[0::2], questions[1::2]
    half = tmp_path / "half.jsonl"
    half.write_text("".join(json.dumps({"messages": list(question.messages)}) + "\n" for question in odd))
    found = find_overlap(even, [half], None)
    assert found.near == set()
    texts = [[message["content"] for message in question.messages] for question in odd]
    twice = {q.where for q in even if [message["content"] for message in q.messages] in texts}
    assert found.exact == twice


@pytest.fixture
def leaked(tmp_path: Path) -> tuple[Path, str]:
    """Data with an evaluation prompt of the sample, and what it is."""
    asked = first_a_task(read_workload("sample").questions, 1)
    [text, *_] = [str(question.messages[0]["content"]) for question in asked if len(question.messages) == 1]
    sums = [f"What is {a} + {b}?" for a in range(20) for b in (3, 5)]
    return conversations(tmp_path / "data.jsonl", *sums, text), text


def train(data: Path, output: Path, *flags: str, model: Seq[str] = ()) -> Any:
    command = ["train", "draft", *model, "--data", str(data), "--output", str(output), "--shape", "1x64"]
    small = ["--max-tokens", "60", "--batch-rows", "1", "--row-length", "48", "--eval-prompts-per-task", "1"]
    return CliRunner().invoke(app, [*command, *small, "--eval-max-tokens", "4", *flags])


def test_training_on_evaluation_prompts_is_refused(
    leaked: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.train.runs.FrozenTarget", None)  # before any model is loaded
    refused = train(leaked[0], tmp_path / "out")
    assert refused.exit_code == 2
    said = "error: 1 of 7 evaluation prompts are in the training data (1 exact"
    assert refused.stderr.splitlines()[-1].startswith(said)
    assert "--overlap drop_training" in refused.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("overlap", ["drop_training", "drop_evaluation", "report"])
def test_either_side_may_be_dropped(
    overlap: str, leaked: tuple[Path, str], tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained on, what is measured with, and what is told, without the training itself."""
    seen: dict[str, Any] = {}

    class Measures:
        def __init__(self, *args: Any, excluded: set[str]) -> None:
            seen["excluded"] = excluded

        def evaluate(self) -> None:
            raise AssertionError

    class Trains:
        def __init__(self, student: Any, target: Any, documents: Any, *args: Any) -> None:
            seen["num_documents"] = len(documents)
            seen["made_with"] = args[3]

        def run(self) -> Progress:
            return Progress()

    monkeypatch.setattr("slipstream.train.runs.Evaluator", Measures)
    monkeypatch.setattr("slipstream.train.runs.Trainer", Trains)
    done = train(leaked[0], tmp_path / "out", "--overlap", overlap, model=[tiny])
    assert done.exit_code == 0, done.output
    told = seen["made_with"]["overlap"]
    number = told["num_exact"]  # of all prompts of the sample, some are in it several times
    assert (told["num_near"], told["num_conversations"]) == (0, 1)
    assert number == 1 or overlap == "drop_evaluation"
    asked = told["num_evaluation_prompts"]
    assert asked == (350 if overlap == "drop_evaluation" else 7)
    assert f"{number} of {asked} evaluation prompts are in the training data" in done.stderr
    assert (seen["num_documents"] == 40) == (overlap == "drop_training")
    assert len(seen["excluded"]) == (number if overlap == "drop_evaluation" else 0)


def test_the_evaluator_asks_others_for_what_is_left_out(shared_engines: None) -> None:
    questions = [q for q in read_workload("sample").questions if q.task == "chat"]
    plain = Evaluator(None, prompts_per_task=1, max_tokens=4)
    other = Evaluator(None, prompts_per_task=1, max_tokens=4, excluded={questions[0].where})
    first, second = ({tuple(job.token_ids) for job in each.jobs} for each in (plain, other))
    assert len(first - second) == len(second - first) == 1


FAULTS = {
    "nothing": (
        ["draft"],
        ["--data is missing", "--output is missing", "one of --init, --shape", "a run needs a budget"],
    ),
    "paths": (
        ["eagle3", "--data", "no.jsonl", "--output", "README.md/x", "--max-tokens", "5", "--init", "./none"],
        ["there is no file 'no.jsonl'", "cannot write 'README.md/x'", "--init: there is no folder './none'"],
    ),
    "values": (
        [
            "medusa",
            "--data",
            "README.md",
            "--output",
            "x",
            "--max-tokens",
            "0",
            "--eval-workload",
            "no.jsonl",
        ],
        ["max_tokens must be above 0", "there is no file 'no.jsonl'"],
    ),
    "regenerate": (["regenerate"], ["--data is missing", "--output is missing"]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_all_that_is_wrong_is_named_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    args, told = FAULTS[case]
    done = CliRunner().invoke(app, ["train", *args])
    assert done.exit_code == 2
    [line] = done.stderr.splitlines()
    assert [text for text in told if text not in line] == []


def test_data_are_checked_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.train.runs.FrozenTarget", None)
    monkeypatch.setattr("slipstream.cli.train.load", None)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": 3}\n')
    assert "broken.jsonl, line 1" in train(broken, tmp_path / "out").stderr
    few = conversations(tmp_path / "few.jsonl", "What is 2 + 2?")
    assert (
        "1 conversations, too few for a batch of 4"
        in train(few, tmp_path / "out", "--batch-rows", "4").stderr
    )
    command = ["train", "regenerate", "--data", str(broken), "--output", str(tmp_path / "out.jsonl")]
    assert "broken.jsonl, line 1" in CliRunner().invoke(app, command).stderr
