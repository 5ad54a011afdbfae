"""The ring: bounded, readable after any crash, of one model, and without what is forgotten."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from learn_cases import some_record

from slipstream.errors import CorruptRecordError, LearnError
from slipstream.learn.decisions.by_hand import forget
from slipstream.learn.records.served import Purpose, ServedRecord, purpose_of
from slipstream.learn.storage.database import LearnDatabase
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import (
    MIN_BYTES,
    Ring,
    RingIdentity,
    remove_older,
)

IDENTITY = RingIdentity("model-a", "template-a")


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    return LearnFolder(tmp_path / "learn")


@pytest.fixture
def on_disk(folder: LearnFolder) -> Iterator[Callable[[], Ring]]:
    """Makes rings on disk, and closes them."""
    made: list[Ring] = []

    def make() -> Ring:
        made.append(Ring(folder, IDENTITY, MIN_BYTES))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


@pytest.fixture(params=["disk", "memory"])
def make(request: pytest.FixtureRequest, on_disk: Callable[[], Ring]) -> Callable[[], Ring]:
    return on_disk if request.param == "disk" else lambda: Ring(None, IDENTITY, MIN_BYTES)


def same(first: ServedRecord, second: ServedRecord) -> bool:
    return first.encoded() == second.encoded()


def test_a_record_comes_back_as_it_was() -> None:
    record = some_record(3, features={"hidden": np.ones((14, 2), np.float16)}, task="sql", temperature=0.7)
    again = ServedRecord.decoded(record.encoded(), 7)
    assert same(record, again)
    assert (again.number, again.task, again.temperature) == (7, "sql", 0.7)
    assert again.features["hidden"].shape == (14, 2)
    assert [again.rows.path(row) for row in range(8)] == [record.rows.path(row) for row in range(8)]
    assert [len(again.rows.path(row)) for row in range(8)] == [0] * 6 + [1, 2]
    kept = np.exp(record.rows.top_log_probs.astype(np.float32)).sum(axis=1)
    assert np.allclose(record.rows.tail(), np.maximum(0, 1 - kept))


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_half_a_record_is_none(cut: int) -> None:
    with pytest.raises(CorruptRecordError):
        ServedRecord.decoded(some_record().encoded()[:cut])


def test_what_a_record_is_for_follows_from_its_request() -> None:
    purposes = [purpose_of(f"chatcmpl-{number}") for number in range(2000)]
    assert purposes == [purpose_of(f"chatcmpl-{number}") for number in range(2000)]
    assert 300 < purposes.count(Purpose.JUDGE) < 500


def test_it_reads_by_purpose_tenant_task_and_number(make: Callable[[], Ring]) -> None:
    ring = make()
    assert list(ring.read()) == []
    for number in range(20):
        tenant, task = ("alpha", "beta")[number % 2], ("sql", "chat")[number // 2 % 2]
        assert ring.append(some_record(number, tenant=tenant, task=task)) == number
    assert [one.number for one in ring.read()] == list(range(20))
    assert [one.number for one in ring.read(tenant="beta", task="sql")] == [1, 5, 9, 13, 17]
    assert [one.number for one in ring.read(after=17)] == [18, 19]
    judge = {one.request_id for one in ring.read(Purpose.JUDGE)}
    train = {one.request_id for one in ring.read(Purpose.TRAIN)}
    assert judge | train == {f"request-{number}" for number in range(20)}
    assert judge
    assert not judge & train
    assert all(same(one, some_record(one.number, tenant=one.tenant, task=one.task)) for one in ring.read())
    status = ring.status()
    assert (status.num_records, status.first, status.last) == (20, 0, 19)


def test_it_never_has_more_bytes_than_it_may(make: Callable[[], Ring], folder: LearnFolder) -> None:
    ring = make()
    for number in range(300):
        assert ring.append(some_record(number, num_tokens=number % 40)) == number
        status = ring.status()
        assert status.num_bytes <= MIN_BYTES
        assert not folder.database.exists() or folder.database.stat().st_size < 3 * MIN_BYTES
    kept = list(ring.read())
    assert [one.number for one in kept] == list(range(300 - len(kept), 300)), "the oldest have made room"
    assert status.num_records == len(kept)
    assert status.num_bytes > MIN_BYTES // 2
    with pytest.raises(LearnError, match="raise --learn-bytes"):
        ring.append(some_record(0, num_tokens=2000))
    assert ring.append(some_record(300)) == 300


def test_another_model_or_template_is_refused(
    on_disk: Callable[[], Ring], make: Callable[[], Ring], folder: LearnFolder
) -> None:
    ring = make()
    ring.append(some_record())
    with pytest.raises(LearnError, match="of another model"):
        ring.append(some_record(model_hash="model-b"))
    with pytest.raises(LearnError, match="of another chat template"):
        ring.append(some_record(template_hash="template-b"))
    assert len(list(ring.read())) == 1
    if folder.database.exists():
        ring.close()
        with pytest.raises(LearnError, match=r"of another model .* give --learn another folder"):
            Ring(folder, RingIdentity("model-b", "template-a"))
        assert len(list(on_disk().read())) == 1


def test_a_forgotten_tenant_is_gone_with_its_users(make: Callable[[], Ring]) -> None:
    ring = make()
    for number, tenant in enumerate(("alpha", "beta", "beta/ann", "betamax", "beta")):
        ring.append(some_record(number, tenant=tenant))
    assert ring.forget("beta") == 3
    assert [one.tenant for one in ring.read()] == ["alpha", "betamax"]
    assert ring.append(some_record(9, tenant="beta/ann")) is None, "it began before"
    assert ring.append(some_record(9, tenant="beta", created_s=4e9)) == 5
    assert [one.number for one in ring.read()] == [0, 3, 5]


def test_numbers_count_on_though_the_last_records_are_forgotten(
    on_disk: Callable[[], Ring], folder: LearnFolder
) -> None:
    ring = on_disk()
    for number in range(4):
        ring.append(some_record(number, tenant="beta" if number > 1 else "alpha"))
    ring.forget("beta")
    ring.close()
    again = on_disk()
    assert again.append(some_record(4)) == 4
    assert [one.number for one in again.read()] == [0, 1, 4]
    again.forget("alpha")
    again.close()
    assert on_disk().append(some_record(5, created_s=4e9)) == 5


def test_nothing_of_the_forgotten_is_on_disk(on_disk: Callable[[], Ring], folder: LearnFolder) -> None:
    ring = on_disk()
    secret = np.frombuffer(b"a secret of beta's, in 32 bytes!", np.int32)
    for number in range(30):
        ring.append(some_record(number))
        ring.append(some_record(number, tenant="beta", prompt_ids=secret))
    assert any(b"a secret of" in file.read_bytes() for file in folder.path.rglob("*") if file.is_file())
    assert forget(folder, "beta").num_records == 30
    for file in folder.path.rglob("*"):
        assert not file.is_file() or not {b"a secret of", b"beta"} & {
            found for found in (b"a secret of", b"beta") if found in file.read_bytes()
        }
    assert len(list(ring.read())) == 30
    assert ring.append(some_record(60)) == 60, "the server that runs goes on"


def test_a_damaged_record_loses_no_other_one(on_disk: Callable[[], Ring], folder: LearnFolder) -> None:
    ring = on_disk()
    for number in range(5):
        ring.append(some_record(number))
    with LearnDatabase(folder).writing() as connection:
        connection.execute("UPDATE records SET data = zeroblob(length(data)) WHERE number = 2")
    assert [one.number for one in ring.read()] == [0, 1, 3, 4]
    assert ring.append(some_record(5)) == 5


def test_a_smaller_bound_holds_from_the_start(on_disk: Callable[[], Ring], folder: LearnFolder) -> None:
    wide = Ring(folder, IDENTITY, 4 * MIN_BYTES)
    for number in range(200):
        wide.append(some_record(number, num_tokens=20))
    size, last = wide.status().num_bytes, wide.status().last
    wide.close()
    assert size > 2 * MIN_BYTES
    before = folder.database.stat().st_size
    ring = on_disk()
    assert ring.status().num_bytes <= MIN_BYTES
    assert ring.status().last == last
    ring.tidy(contextlib.nullcontext)
    assert folder.database.stat().st_size < before / 2


def test_a_reader_that_is_stopped_keeps_nobody_waiting(
    on_disk: Callable[[], Ring], folder: LearnFolder
) -> None:
    """As a learner that is stopped within a read: what was deleted meanwhile is gone once it goes on."""
    ring = on_disk()
    ring.append(some_record(0, tenant="beta"))
    with LearnDatabase(folder).reading() as connection:
        rows = connection.execute("SELECT number FROM records UNION ALL SELECT 1")
        assert next(rows) == (0,)
        assert ring.append(some_record(1, tenant="beta")) == 1
        assert remove_older(folder, 2000.0) == 2
        assert not LearnDatabase(folder).empty_log()
        assert any(b"beta" in file.read_bytes() for file in folder.path.rglob("*") if file.is_file())
        rows.close()
    assert LearnDatabase(folder).empty_log()
    assert not any(b"beta" in file.read_bytes() for file in folder.path.rglob("*") if file.is_file())


def test_two_servers_do_not_share_a_folder(on_disk: Callable[[], Ring]) -> None:
    ring = on_disk()
    with pytest.raises(LearnError, match="another server learns in"):
        on_disk()
    ring.close()
    on_disk().close()


def between(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[], object], after: Callable[[], object]
) -> None:
    """Have another thread's work come just before, and just after, the next transaction."""
    writing = LearnDatabase.writing

    @contextlib.contextmanager
    def interleaved(self: LearnDatabase) -> Iterator[sqlite3.Connection]:
        monkeypatch.setattr(LearnDatabase, "writing", writing)
        before()
        with self.writing() as connection:
            yield connection
        after()

    monkeypatch.setattr(LearnDatabase, "writing", interleaved)


def test_two_threads_that_append_together_keep_the_bound(
    make: Callable[[], Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make()
    size = len(some_record(0, num_tokens=30).encoded())
    for number in range(MIN_BYTES // size - 1):
        ring.append(some_record(number, num_tokens=30))
    status = ring.status()
    assert size <= MIN_BYTES - status.num_bytes < 2 * size, "there is room for one more"
    between(monkeypatch, lambda: None, lambda: ring.append(some_record(1000, num_tokens=30)))
    ring.append(some_record(1001, num_tokens=30))
    assert ring.status().num_bytes <= MIN_BYTES


def test_what_is_forgotten_beside_an_append_leaves_its_room(
    make: Callable[[], Ring], monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = make()
    size = len(some_record(0, num_tokens=30).encoded())
    num = MIN_BYTES // size - 4
    for number in range(num):
        ring.append(some_record(number, num_tokens=30, tenant="beta" if number >= num // 2 else "alpha"))
    between(monkeypatch, lambda: ring.append(some_record(1000, num_tokens=30)), lambda: None)
    ring.forget("beta")
    for number in range(num // 2):
        ring.append(some_record(2000 + number, num_tokens=30))
    assert ring.status().first == 0, "nothing had to go"
