"""Versions on disk: whole or absent, found when damaged, the last few kept, never of forgotten records."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from learn_cases import some_record, some_tensors

from slipstream.core.whole_files import sync_folder
from slipstream.errors import CorruptVersionError, LearnError
from slipstream.learn.decisions.by_hand import forget
from slipstream.learn.records.served import tenant_key
from slipstream.learn.storage.database import LearnDatabase
from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import check_remembered, forget_records
from slipstream.learn.storage.state import LearnState, ScopeVersions, StateStore
from slipstream.learn.storage.tables import put_document
from slipstream.learn.versions.store import DataWindow, Version, VersionStore


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    folder = LearnFolder(tmp_path / "learn")
    folder.create()
    return folder


def a_version(parent: str = "", tenant: str = "alpha") -> Version:
    window = DataWindow.of([some_record(1, tenant=tenant)], time.time())
    return Version(
        "corrective", "model-a", "template-a", "base-a", parent, window=window, figures={"tau": 2.5}
    )


def test_a_version_comes_back_as_it_was_added(folder: LearnFolder) -> None:
    store = VersionStore(folder)
    first = store.add(a_version(), some_tensors(1))
    second = store.add(a_version(first.id, "beta"), some_tensors(2))
    assert store.all() == [first, second] == [store.verify(one.id) for one in (first, second)]
    assert [one.number for one in store.all()] == [1, 2]
    tensors = store.load(second.id)
    assert all(torch.equal(tensors[name], one) for name, one in some_tensors(2).items())
    assert second.taught_by == tuple(sorted(map(tenant_key, ("alpha", "beta"))))
    assert "beta" not in (store.weights_file(second.id).parent / "version.json").read_text()


@pytest.mark.parametrize("name", ["weights.safetensors", "version.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_found_when_it_is_read(folder: LearnFolder, name: str, how: str) -> None:
    store = VersionStore(folder)
    version = store.add(a_version(), some_tensors())
    file = store.weights_file(version.id).with_name(name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data if how == "flipped" else data[:-1])
    assert list(store.faults()) == [version.id]
    with pytest.raises(LearnError):
        store.load(version.id)
    if name == "weights.safetensors":
        with pytest.raises(CorruptVersionError, match="damaged"):
            store.verify(version.id)
    assert store.add(a_version(), some_tensors(2)).number == 2, "a damaged version's number is not used again"


def test_the_last_ones_and_those_in_use_are_kept(folder: LearnFolder) -> None:
    store = VersionStore(folder, num_kept=2)
    ids = [store.add(a_version(), some_tensors(0)).id]
    for number in range(1, 5):
        ids.append(store.add(a_version(), some_tensors(number), in_use=ids[:1]).id)
    assert [one.id for one in store.all()] == [ids[0], ids[3], ids[4]]


def test_what_learned_from_forgotten_records_is_not_kept(folder: LearnFolder) -> None:
    store = VersionStore(folder)
    version = a_version(tenant="beta")
    forget_records(folder, "beta")
    with pytest.raises(LearnError, match="forgotten"):
        store.add(version, some_tensors())
    assert store.all() == []
    later = store.add(a_version(tenant="beta"), some_tensors())
    assert store.all() == [later], "what was read afterwards holds nothing that was forgotten"


def test_unknown_and_odd_names(folder: LearnFolder) -> None:
    store = VersionStore(folder)
    with pytest.raises(LearnError, match="there are: none"):
        store.get("v000001-00000000")
    with pytest.raises(LearnError, match="is named like"):
        store.load("../state")
    with pytest.raises(LearnError, match="no version"):
        store.add(a_version("v000009-00000000"), some_tensors())


def test_scopes(folder: LearnFolder) -> None:
    states = StateStore(folder)
    assert states.read() == LearnState()
    states.change(lambda state: state.with_scope(state.scope().promoted("v1").promoted("v2")))
    state = states.change(
        lambda state: state.with_scope(ScopeVersions("beta", serving="v3", canary="v4", canary_share=0.1))
    )
    assert (state, state.number) == (states.read(), 2)
    assert state.in_use == {"v1", "v2", "v3", "v4"}
    assert state.scope().rolled_back().serving == "v1"
    assert state.scope().rolled_back().rolled_back().rolled_back().serving == ""
    retired = state.retire({"v2": "forgotten", "v4": "forgotten"})
    assert retired.scope().serving == "v1"
    assert (retired.scope("beta").serving, retired.scope("beta").canary) == ("v3", None)
    assert states.change(lambda state: state).number == 2, "nothing changed"


def test_a_state_of_the_release_before_is_read(folder: LearnFolder) -> None:
    state = LearnState().with_scope(ScopeVersions("beta", serving="v3"))
    old = {**state.as_json(), "format": 1}
    old["lanes"] = old.pop("scopes")
    assert LearnState.from_json(old) == state


def test_a_state_that_cannot_be_read_says_so(folder: LearnFolder) -> None:
    EventLog(folder).add("promoted")
    with LearnDatabase(folder).writing() as connection:
        put_document(connection, "state", '{"format": 2, "scopes": 3}')
    with pytest.raises(
        LearnError, match="to serve the base drafter and keep all else, run sqlite3 "
    ) as found:
        StateStore(folder).read()
    with LearnDatabase(folder).writing() as connection:
        connection.execute(str(found.value).split('"')[1])  # as it advises
    assert StateStore(folder).read() == LearnState()
    assert [one["event"] for one in EventLog(folder).read()] == ["promoted"]


def test_a_folder_that_cannot_be_written_is_read(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    EventLog(folder).add("promoted")
    before = {file.name for file in folder.path.iterdir()}
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    with LearnDatabase(folder).reading() as connection:
        assert connection.execute("SELECT count(*) FROM events").fetchone() == (1,)
        assert {file.name for file in folder.path.iterdir()} == before, "SQLite needs no file beside it"


def test_an_event_that_is_no_object_is_not_read(folder: LearnFolder) -> None:
    with LearnDatabase(folder).writing() as connection:
        connection.executemany("INSERT INTO events (value) VALUES (?)", [("7",), ('{"event": "promoted"}',)])
    assert EventLog(folder).read() == [{"event": "promoted"}]


def test_a_damaged_database_says_so(folder: LearnFolder) -> None:
    EventLog(folder).add("promoted")
    data = folder.database.read_bytes()
    folder.database.write_bytes(bytes(100) + data[100:])
    with pytest.raises(LearnError, match=r"is damaged: .*; remove it to serve the base drafter"):
        StateStore(folder).read()


def test_events_stay_bounded(folder: LearnFolder) -> None:
    log = EventLog(folder, max_events=20)
    log.add("refused", version="v1", reason="slower")
    log.add("promoted", version="v2")
    assert [one["event"] for one in log.read()] == ["refused", "promoted"]
    for number in range(40):
        log.add("tick", number=number)
    assert [one["number"] for one in log.read()] == list(range(20, 40))
    assert [one["number"] for one in log.read(last=2)] == [38, 39]


def is_marked(folder: LearnFolder, tenant: str) -> bool:
    """Whether the tenant has been forgotten, though its versions may be there still."""
    try:
        check_remembered(folder, (tenant_key(tenant),), 0.0)
    except LearnError:
        return True
    return False


def test_forget_removes_a_version_that_is_being_written(
    folder: LearnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writes, goes_on = VersionStore(folder), threading.Event(), threading.Event()

    def slowly(path: Path) -> None:  # called before a version that was written beside is renamed
        writes.set()
        assert goes_on.wait(120)
        sync_folder(path)

    monkeypatch.setattr("slipstream.learn.versions.store.sync_folder", slowly)
    writer = threading.Thread(target=store.add, args=(a_version(), some_tensors()))
    forgetter = threading.Thread(target=forget, args=(folder, "alpha"))
    writer.start()
    assert writes.wait(120)
    forgetter.start()
    while not is_marked(folder, "alpha"):
        time.sleep(0.01)
    time.sleep(0.1)  # where it did not wait for the writer, it would be done
    goes_on.set()
    writer.join()
    forgetter.join()
    assert store.all() == []


def test_what_began_with_a_version_that_is_to_be_forgotten_is_not_kept(folder: LearnFolder) -> None:
    store = VersionStore(folder)
    parent = store.add(a_version(), some_tensors())
    forget_records(folder, "alpha")  # and then the process was killed, or has not come to the versions yet
    with pytest.raises(LearnError, match="forgotten"):
        store.add(a_version(parent.id, "beta"), some_tensors(1))


def test_forget_again_removes_what_a_killed_one_left(folder: LearnFolder) -> None:
    kept = VersionStore(folder).add(a_version(tenant="beta"), some_tensors())
    for place in (".tmp-removed-v000007-aa", ".tmp-v000008-bb"):
        (folder.versions / place).mkdir()
        (folder.versions / place / "weights.safetensors").write_bytes(b"alpha")
    for checkpoint in ("v000007-aa", kept.id):
        (folder.checkpoints / checkpoint).mkdir(parents=True)
        (folder.path / "lanes" / checkpoint).mkdir(parents=True)
    files = [".state.json.77.tmp", ".learner.log.77.tmp", "ring/.000000000003.ring.77.tmp"]
    (folder.path / "ring").mkdir()
    for file in files:
        (folder.path / file).write_bytes(b"alpha")
    forget(folder, "alpha")
    assert [one.name for one in folder.versions.iterdir()] == [kept.id]
    assert not (folder.path / "lanes").exists(), "the folder that a release before used"
    assert [one.name for one in folder.checkpoints.iterdir()] == [kept.id]
    assert not any((folder.path / file).exists() for file in files)
