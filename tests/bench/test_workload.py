"""What may be asked, and how a broken line is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.assets.workload.prompts import Chosen, Lengths, Prompt, choose, task_names
from slipstream.assets.workload.reading import Question, Workload, read_workload
from slipstream.errors import RequestError


def write(folder: Path, rows: list[Any], name: str = "w.jsonl") -> Path:
    file = folder / name
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return file


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_the_sample_has_seven_tasks_in_turn() -> None:
    workload = read_workload("sample")
    tasks = [question.task for question in workload.questions]
    assert len(tasks) == 350
    assert len(set(tasks[:7])) == 7
    assert {tasks.count(task) for task in set(tasks)} == {50}


def test_lines_of_every_form(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        [
            {"prompt": "one", "task": "x", "output_tokens": 9},
            "",
            {"messages": [user("q"), assistant("a"), user("two"), assistant("recorded")], "category": "y"},
            {"turns": ["three", "four"], "reference": ["r3", "r4"]},
            {"conversations": [{"from": "human", "value": "five"}, {"from": "gpt", "value": "r5"}]},
            {"conversations": []},
        ],
    )
    workload = read_workload(str(file))
    one, two, three, five = workload.questions
    assert (one.text, one.task, one.output_tokens, one.where) == ("one", "x", 9, f"{file}, line 1")
    assert two.messages == (user("q"), assistant("a"), user("two"))
    assert (two.task, two.references, two.where) == ("y", ("recorded",), f"{file}, line 3")
    assert (three.messages, three.later_turns) == ((user("three"),), ("four",))
    assert (three.references, three.task) == (("r3", "r4"), "all")
    assert (five.messages, five.references) == ((user("five"),), ("r5",))
    assert workload.num_unusable == 1


def test_spec_bench_groups_the_categories_of_mt_bench(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 241, "category": "translation", "turns": ["c"], "reference": ["d"]},
        {"question_id": 120, "category": "math", "turns": ["e"]},
    ]
    workload = read_workload(f"spec-bench:{write(tmp_path, rows)}")
    assert [question.task for question in workload.questions] == ["mt_bench", "translation", "mt_bench"]
    assert workload.questions[0].later_turns == ("b",)
    assert workload.questions[1].references == ("d",)


def test_sharegpt_asks_the_first_thing_that_a_human_says(tmp_path: Path) -> None:
    entries = [
        {
            "id": "1",
            "conversations": [
                {"from": "human", "value": "q1"},
                {"from": "gpt", "value": "a1"},
                {"from": "human", "value": "q2"},
            ],
        },
        {"id": "2", "conversations": []},
        {"id": "3", "conversations": [{"from": "gpt", "value": "begins in the middle"}]},
        {"id": "4", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q4"}]},
    ]
    file = tmp_path / "s.json"
    file.write_text(json.dumps(entries))
    workload = read_workload(f"sharegpt:{file}")
    first, last = workload.questions
    assert (first.messages, first.references) == ((user("q1"),), ("a1",))
    assert (last.messages, last.references) == (({"role": "system", "content": "s"}, user("q4")), ())
    assert workload.num_unusable == 2


BROKEN = {
    "no JSON": (["{}x"], "line 1 is not valid JSON"),
    "no object": ([{"prompt": "a"}, "[1]"], "line 2 must be a JSON object"),
    "nothing": (
        [{"prompt": "a"}, "", {"text": "b"}],
        "line 3 needs exactly one of prompt, messages, turns, conversations",
    ),
    "two kinds": ([{"prompt": "a", "turns": ["b"]}], "line 1 needs exactly one of"),
    "empty prompt": ([{"prompt": " "}], "line 1: prompt must be a text that is not empty"),
    "number for a prompt": ([{"prompt": 3}], "line 1: prompt must be a text"),
    "empty turns": ([{"turns": []}], "line 1: turns must be a list"),
    "empty turn": ([{"turns": ["a", ""]}], "line 1: turn 2 must be a text"),
    "message without content": ([{"messages": [{"role": "user"}]}], "line 1: a message is"),
    "nothing to answer": ([{"messages": [assistant("a")]}], "line 1 has no message to answer"),
    "output_tokens": ([{"prompt": "a", "output_tokens": 0}], "line 1: output_tokens must be a whole number"),
    "output_tokens true": ([{"prompt": "a", "output_tokens": True}], "line 1: output_tokens must be"),
    "reference": ([{"prompt": "a", "reference": 3}], "line 1: reference must be a text"),
    "task": ([{"prompt": "a", "task": 3}], "line 1: task must be a text"),
    "conversation": ([{"conversations": [{"role": "user"}]}], "line 1: a message is"),
    "nothing at all": ([""], "has no prompts"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_lines_are_named(case: str, tmp_path: Path) -> None:
    rows, error = BROKEN[case]
    file = write(tmp_path, rows)
    with pytest.raises(RequestError) as raised:
        read_workload(str(file))
    assert error in str(raised.value)
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_broken_files_of_other_forms(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    for text, error in {
        "[": "not valid JSON",
        "{}": "must be a JSON list",
        "[{}]": "entry 1 has no 'conversations'",
        '[{"conversations": [{"from": "human"}]}]': "entry 1: a message is",
    }.items():
        file.write_text(text)
        with pytest.raises(RequestError, match=error):
            read_workload(f"sharegpt:{file}")
    with pytest.raises(RequestError, match="line 1 has no 'turns'"):
        read_workload(f"spec-bench:{write(tmp_path, [{'category': 'qa'}])}")
    with pytest.raises(RequestError, match="there is no file"):
        read_workload("spec-bench:nowhere.jsonl")
    with pytest.raises(RequestError, match="is none of sample, FILE"):
        read_workload("conversations.json")


# --- choosing --------------------------------------------------------------------------------------------------


def question(task: str, name: str, *later: str, **more: Any) -> Question:
    return Question(task, name, messages=(user(name),), later_turns=later, **more)


def chosen(
    questions: list[Question], per_task: int | None = None, lengths: Lengths | None = None, limit: int = 99
) -> Chosen:
    """With answers "answer to …"; prompts of more than `limit` messages do not fit."""

    def answer(prompt: Prompt) -> str:
        return f"answer to {prompt.messages[-1]['content']}"

    return choose(
        Workload("w", questions),
        per_task,
        lengths or Lengths(7),
        lambda prompt: len(prompt.messages) <= limit,
        answer,
    )


def test_the_first_of_each_task_tasks_in_turn() -> None:
    questions = [question("a", "a1"), question("a", "a2"), question("a", "a3"), question("b", "b1")]
    found = chosen(questions, per_task=2)
    assert [prompt.where for prompt in found.prompts] == ["a1", "b1", "a2"]
    assert task_names(found.prompts) == ["a", "b"]
    assert len(chosen(questions).prompts) == 4


def test_later_turns_follow_the_answers() -> None:
    [first, second, third] = chosen([question("a", "one", "two", "three")]).prompts
    assert first.messages == (user("one"),)
    assert second.messages == (user("one"), assistant("answer to one"), user("two"))
    assert third.messages == (*second.messages, assistant("answer to two"), user("three"))
    assert (second.where, third.where) == ("one, turn 2", "one, turn 3")


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    long = Question("a", "long", messages=(user("x"),) * 4)
    found = chosen(
        [long, question("a", "short"), question("a", "turns", "more", "and more")], per_task=2, limit=3
    )
    assert [prompt.where for prompt in found.prompts] == ["short", "turns", "turns, turn 2"]
    assert found.num_too_long == 2
    with pytest.raises(RequestError, match="none of the 1 prompts of w fits"):
        chosen([long], limit=3)


def test_lengths() -> None:
    def count(text: str) -> int:
        return len(text.split())

    data = Lengths(None, count)
    both = question("a", "q", "later", references=("one two three", "four"))
    assert [prompt.max_tokens for prompt in chosen([both], lengths=data).prompts] == [3, 1]
    assert [prompt.max_tokens for prompt in chosen([both], lengths=Lengths(5)).prompts] == [5, 5]
    assert data.of(question("a", "q", output_tokens=8, references=("one",)), 0) == 8
    with pytest.raises(RequestError, match="q has neither output_tokens nor a reference answer for turn 2"):
        data.of(question("a", "q", "later", references=("one",)), 1)
