"""Folders in which nothing can be learned: one line that says why, an alarm, and serving goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from learn_cases import some_record

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.control.monitor.alarms import AlarmKind, Alarms
from slipstream.engine.async_engine import AsyncEngine
from slipstream.learn.storage import folder as folders
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import Ring, RingIdentity, read_ring
from slipstream.serve.config import ServeConfig
from slipstream.serve.learning import Learning

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
Break = Callable[[Path, pytest.MonkeyPatch], Path]


@pytest.fixture(scope="module")
def client() -> Iterator[AsyncEngine]:
    engine = LLM(speculative_config={"method": "versions", "drafter": DRAFT}).engine
    with_thread = AsyncEngine(engine=engine)
    yield with_thread
    with_thread.close()


def below_a_file(path: Path, patch: pytest.MonkeyPatch) -> Path:
    path.write_text("no folder")
    return path / "learn"


def a_ring_of_another_model(path: Path, patch: pytest.MonkeyPatch) -> Path:
    ring = Ring(LearnFolder(path), RingIdentity("model-a", "template-a"), 2**20)
    ring.append(some_record())
    ring.close()
    return path


def failing(number: int) -> Break:
    """Opening a file to write below the folder fails so, as on a full disk or one that may only be read."""

    def break_it(path: Path, patch: pytest.MonkeyPatch) -> Path:
        real = os.open

        def refused(file: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_CREAT and str(file).startswith(str(path)):
                raise OSError(number, os.strerror(number))
            return real(file, flags, *rest, **named)

        patch.setattr(folders.os, "open", refused)
        return path

    return break_it


def damaged_state(path: Path, patch: pytest.MonkeyPatch) -> Path:
    path.mkdir()
    (path / "state.json").write_text("{")
    return path


def test_old_answers_are_deleted_where_nothing_can_be_learned(client: AsyncEngine, tmp_path: Path) -> None:
    path = tmp_path / "learn"
    ring = Ring(LearnFolder(path), RingIdentity("model-a", "template-a"), 2**20)
    ring.append(some_record(0))
    ring.append(some_record(1, created_s=(now_s := time.time())))
    ring.close()
    learning = Learning(client, ServeConfig(learn=str(path), learn_max_age="30d"))
    assert "of another model" in learning.status.faults["learning_failed"]
    assert learning.as_json()["serving"] == "floor", "as earlier releases said"
    deadline_s = time.monotonic() + 280
    while len(left := list(read_ring(LearnFolder(path)))) > 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    learning.close()
    assert [one.created_s for one in left] == [now_s]


async def answer(client: AsyncEngine) -> list[int]:
    last: Any = None
    async for update in client.stream(
        [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True), request_id="one"
    ):
        last = update
    tokens: list[int] = last.output.outputs[0].token_ids
    return tokens


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (below_a_file, "give --learn a folder that can be written"),
        (a_ring_of_another_model, "of another model"),
        (failing(errno.ENOSPC), "No space left on device"),
        (failing(errno.EROFS), "Read-only file system"),
        (damaged_state, "remove it to serve the base drafter"),
    ],
    ids=["no folder", "another model", "full disk", "read-only", "damaged state"],
)
def test_serving_goes_on_where_nothing_can_be_learned(
    break_it: Break,
    why: str,
    client: AsyncEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = break_it(tmp_path / "learn", monkeypatch)
    with caplog.at_level(logging.WARNING):
        learning = Learning(client, ServeConfig(learn=str(folder)))
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("slipstream.learn")]
    assert line.startswith("nothing is learned: ")
    assert why in line
    assert line.endswith("; serving goes on")
    assert "\n" not in line
    assert len(asyncio.run(answer(client))) == 4
    alarms = Alarms()
    learning.raise_alarms(alarms)
    [alarm] = alarms.raised
    assert alarm.kind is AlarmKind.LEARNING_FAILED
    assert why in alarm.message
    learning.close()
