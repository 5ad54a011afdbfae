"""What earlier releases left in a folder of learning: shown as it is, and taken over once, with nothing lost."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from learn_cases import some_record

from slipstream.errors import LearnError
from slipstream.learn.decisions.by_hand import freeze
from slipstream.learn.records.served import ServedRecord, tenant_key
from slipstream.learn.status import LearnStatus
from slipstream.learn.storage import database
from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.old_files import copy_old_files
from slipstream.learn.storage.ring import MIN_BYTES, Ring, RingIdentity, check_remembered, read_ring
from slipstream.learn.storage.state import LearnState, ScopeVersions, StateStore

IDENTITY = RingIdentity("model-a", "template-a")


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    folder = LearnFolder(tmp_path / "learn")
    folder.create()
    return folder


def test_what_an_earlier_release_left_is_shown_and_then_taken_over(folder: LearnFolder) -> None:
    old_folder(
        folder, [some_record(number, tenant="beta" if number == 3 else "alpha") for number in range(7)]
    )
    before = contents(folder)
    with folder.lock("writer"):  # as a server of that release, which runs still
        status = LearnStatus.of(folder)
    assert status.ring.num_records == 6, "beta is forgotten"
    assert status.state.scope().serving == "v000002-aa"
    assert [one["event"] for one in status.events] == ["promoted"]
    assert contents(folder) == before
    with ring_of(folder) as ring:
        assert not folder.old_files
        assert [one.number for one in read_ring(folder)] == [0, 1, 2, 4, 5, 6]
        assert all(one.encoded() == some_record(one.number).encoded() for one in ring.read())
        assert ring.append(some_record(7)) == 7
    assert StateStore(folder).read().scope().serving == "v000002-aa"
    assert [one["event"] for one in EventLog(folder).read()] == ["promoted"]
    with pytest.raises(LearnError, match="forgotten"):
        check_remembered(folder, (tenant_key("beta"),), 1000.0)
    with pytest.raises(LearnError, match="of another model"):
        Ring(folder, RingIdentity("model-b", "template-a"))


def test_after_a_while_with_the_earlier_release_nothing_is_lost(folder: LearnFolder) -> None:
    with ring_of(folder) as ring:
        for number in range(3):
            ring.append(some_record(number))
    StateStore(folder).change(
        lambda state: state.with_scope(ScopeVersions(serving="v000009-cc")).retire({"v000001-bb": "slower"})
    )
    freeze(folder, True)
    began = LearnState().with_scope(ScopeVersions(serving="v000002-aa")).retire({"v000003-dd": "forgotten"})
    old_folder(folder, [some_record(number) for number in range(10, 17)], began)
    with ring_of(folder) as ring:
        found = [one.request_id for one in ring.read()]
        assert sorted(found) == sorted(f"request-{number}" for number in (0, 1, 2, *range(10, 17)))
        assert found[:3] == [f"request-{number}" for number in range(3)]
    state = StateStore(folder).read()
    assert (state.scope().serving, state.frozen) == ("v000009-cc", True)
    assert state.retired == {"v000001-bb": "slower", "v000003-dd": "forgotten"}
    assert [one["event"] for one in EventLog(folder).read()] == ["frozen", "promoted"]


def test_what_is_taken_over_while_it_is_read_is_shown(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside(connection: sqlite3.Connection, folder: LearnFolder) -> None:
        monkeypatch.undo()
        freeze(folder, True)  # takes the files over
        copy_old_files(connection, folder)

    old_folder(folder, [some_record(number) for number in range(7)])
    monkeypatch.setattr(database, "copy_old_files", beside)
    assert len(list(read_ring(folder))) == 7
    assert not folder.old_files


def test_a_version_that_the_earlier_release_retired_serves_no_more(folder: LearnFolder) -> None:
    StateStore(folder).change(lambda state: state.with_scope(ScopeVersions(serving="v000009-cc")))
    old_folder(folder, [], LearnState(retired={"v000009-cc": "forgotten"}))
    assert StateStore(folder).read().scope().serving == ""


def test_taken_over_again_after_a_crash_nothing_is_there_twice(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring_of(folder) as ring:
        ring.append(some_record(100))
    old_folder(folder, [some_record(number) for number in range(7)])

    def crashes(file: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crashes)
        with pytest.raises(KeyboardInterrupt):
            freeze(folder, True)
    assert (folder.path / "ring").exists()
    records = [one.encoded() for one in read_ring(folder)]
    freeze(folder, True)
    assert not folder.old_files
    assert [one.encoded() for one in read_ring(folder)] == records
    assert len(records) == 8
    assert [one["event"] for one in EventLog(folder).read()] == ["promoted", "frozen"]


def test_events_that_are_no_objects_are_left_out(folder: LearnFolder) -> None:
    (folder.path / "events.jsonl").write_text('7\n{"event": "promoted"}\nnull\n[]\n')
    assert EventLog(folder).read() == [{"event": "promoted"}]
    freeze(folder, True)
    assert [one["event"] for one in EventLog(folder).read()] == ["promoted", "frozen"]


def test_numbers_count_on_from_an_empty_segment(folder: LearnFolder) -> None:
    old_folder(folder, [some_record(number) for number in range(5)])
    segment(folder, 9, [])  # the last records were forgotten
    with ring_of(folder) as ring:
        assert ring.append(some_record(9)) == 9


def test_answers_of_another_model_are_not_mixed_in(folder: LearnFolder) -> None:
    with ring_of(folder, RingIdentity("model-b", "template-a")) as ring:
        ring.append(some_record(0, model_hash="model-b"))
    old_folder(folder, [some_record(number) for number in range(5)])
    with pytest.raises(LearnError, match="holds answers of another model"):
        freeze(folder, True)
    assert (folder.path / "ring").exists()


@pytest.mark.parametrize(
    ("name", "text", "advice"),
    [
        ("forgotten.json", '{"a": "b"}', "repair it"),
        ("forgotten.json", "[1", "repair it"),
        ("state.json", "[1]", "remove it to serve the base drafter; records, versions and events stay"),
    ],
)
def test_a_damaged_file_says_what_to_do(folder: LearnFolder, name: str, text: str, advice: str) -> None:
    (folder.path / name).write_text(text)
    for use in (LearnStatus.of, lambda folder: freeze(folder, True)):
        with pytest.raises(LearnError, match=rf"{name}' cannot be used: .*; {advice}"):
            use(folder)
    assert (folder.path / name).read_text() == text


def test_a_server_waits_for_a_command_that_takes_the_files_over(folder: LearnFolder) -> None:
    old_folder(folder, [some_record(0)])
    with contextlib.ExitStack() as held:
        held.enter_context(folder.lock("writer"))
        threading.Timer(0.1, held.close).start()
        with ring_of(folder) as ring:
            assert ring.status().num_records == 1


@contextlib.contextmanager
def ring_of(folder: LearnFolder, identity: RingIdentity = IDENTITY) -> Iterator[Ring]:
    """As a server opens it."""
    ring = Ring(folder, identity, MIN_BYTES)
    try:
        yield ring
    finally:
        ring.close()


def contents(folder: LearnFolder) -> dict[Path, bytes]:
    return {
        file: file.read_bytes()
        for file in folder.path.rglob("*")
        if file.is_file() and file.suffix != ".lock"
    }


def old_folder(
    folder: LearnFolder,
    records: list[ServedRecord],
    state: LearnState | None = None,
) -> None:
    """What a server of the release before the database left: two segments with torn ends, and three files."""
    if state is None:
        state = LearnState().with_scope(ScopeVersions(serving="v000002-aa"))
    for first, end in ((0, 4), (4, len(records))):
        segment(folder, first, records[first:end])
    (folder.path / "state.json").write_text(json.dumps(state.as_json()))
    (folder.path / "events.jsonl").write_text('{"time_s": 1.0, "event": "promoted"}\n{"event": "cut')
    (folder.path / "forgotten.json").write_text(json.dumps({tenant_key("beta"): 2000.0}))


def segment(folder: LearnFolder, first: int, records: list[ServedRecord]) -> None:
    """A file of the old ring, with a torn end."""
    ring = folder.path / "ring"
    ring.mkdir(exist_ok=True)
    head = {"slipstream_ring": 1, "model_hash": "model-a", "template_hash": "template-a"}
    data = json.dumps(head).encode() + b"\n"
    frames = b""
    for number, record in enumerate(records, first):
        payload = record.encoded()
        crc = zlib.crc32(payload, zlib.crc32(struct.pack("<Q", number)))
        frames += struct.pack("<4sIIQ", b"SLR1", len(payload), crc, number) + payload
    (ring / f"{first:012d}.ring").write_bytes(data + frames + frames[-90:])
