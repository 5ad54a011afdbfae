"""The ring: bounded, readable after any crash, of one model, and without what is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from learn_cases import some_record

from slipstream.errors import CorruptRecordError, LearnError
from slipstream.learn.decisions.by_hand import forget
from slipstream.learn.records.served import Purpose, ServedRecord, purpose_of
from slipstream.learn.storage.disk_ring import DiskRing, read_ring
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import MIN_BYTES, MemoryRing, Ring
from slipstream.learn.storage.segments import RingIdentity, segment_files

IDENTITY = RingIdentity("model-a", "template-a")


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    return LearnFolder(tmp_path / "learn")


@pytest.fixture
def on_disk(folder: LearnFolder) -> Iterator[Callable[[], DiskRing]]:
    """Makes rings on disk, and closes them."""
    made: list[DiskRing] = []

    def make() -> DiskRing:
        made.append(DiskRing(folder, IDENTITY, MIN_BYTES))
        return made[-1]

    yield make
    for ring in made:
        ring.close()


@pytest.fixture(params=["disk", "memory"])
def make(request: pytest.FixtureRequest, on_disk: Callable[[], DiskRing]) -> Callable[[], Ring]:
    return on_disk if request.param == "disk" else lambda: MemoryRing(IDENTITY, MIN_BYTES)


def same(first: ServedRecord, second: ServedRecord) -> bool:
    return first.encoded() == second.encoded()


def num_stored(folder: LearnFolder) -> int:
    return sum(file.stat().st_size for file in segment_files(folder.ring))


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
    facts = ring.facts()
    assert (facts.num_records, facts.first, facts.last) == (20, 0, 19)


def test_it_never_has_more_bytes_than_it_may(make: Callable[[], Ring], folder: LearnFolder) -> None:
    ring = make()
    for number in range(300):
        assert ring.append(some_record(number, num_tokens=number % 40)) == number
        facts = ring.facts()
        assert facts.num_bytes <= MIN_BYTES
        assert num_stored(folder) in (0, facts.num_bytes)
    kept = list(ring.read())
    assert [one.number for one in kept] == list(range(300 - len(kept), 300)), "the oldest have made room"
    assert facts.num_records == len(kept)
    assert facts.num_bytes > MIN_BYTES // 2
    with pytest.raises(LearnError, match="raise --learn-bytes"):
        ring.append(some_record(0, num_tokens=2000))
    assert ring.append(some_record(300)) == 300


def test_another_model_or_template_is_refused(
    on_disk: Callable[[], DiskRing], make: Callable[[], Ring], folder: LearnFolder
) -> None:
    ring = make()
    ring.append(some_record())
    with pytest.raises(LearnError, match="of another model"):
        ring.append(some_record(model_hash="model-b"))
    with pytest.raises(LearnError, match="of another chat template"):
        ring.append(some_record(template_hash="template-b"))
    assert len(list(ring.read())) == 1
    if isinstance(ring, DiskRing):
        ring.close()
        with pytest.raises(LearnError, match=r"of another model .* give --learn another folder"):
            DiskRing(folder, RingIdentity("model-b", "template-a"))
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
    on_disk: Callable[[], DiskRing], folder: LearnFolder
) -> None:
    ring = on_disk()
    for number in range(4):
        ring.append(some_record(number, tenant="beta" if number > 1 else "alpha"))
    ring.forget("beta")
    ring.close()
    again = on_disk()
    assert again.append(some_record(4)) == 4
    assert [one.number for one in again.read()] == [0, 1, 4]


def test_nothing_of_the_forgotten_is_on_disk(on_disk: Callable[[], DiskRing], folder: LearnFolder) -> None:
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


@pytest.mark.parametrize("damage", ["cut", "flipped", "zeros", "head"])
def test_a_torn_end_loses_no_other_record(
    on_disk: Callable[[], DiskRing], folder: LearnFolder, damage: str
) -> None:
    ring = on_disk()
    for number in range(5):
        ring.append(some_record(number))
    ring.close()
    [file] = segment_files(folder.ring)
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-10:]
    elif damage == "flipped":
        data[-10] ^= 4
    elif damage == "zeros":
        data += bytes(100)
    else:
        data = data[:10]
    file.write_bytes(data)
    left = {"zeros": 5, "head": 0}.get(damage, 4)
    assert [one.number for one in read_ring(folder)] == list(range(left))
    again = on_disk()
    assert again.append(some_record(left)) == left
    assert [one.number for one in again.read()] == list(range(left + 1))


def test_two_servers_do_not_share_a_folder(on_disk: Callable[[], DiskRing]) -> None:
    ring = on_disk()
    with pytest.raises(LearnError, match="another server learns in"):
        on_disk()
    ring.close()
    on_disk().close()


def test_what_a_killed_deletion_left_is_gone_once_the_ring_is_opened(
    on_disk: Callable[[], DiskRing], folder: LearnFolder
) -> None:
    ring = on_disk()
    ring.append(some_record())
    ring.close()
    [segment] = segment_files(folder.ring)
    leftover = segment.with_name(f".{segment.name}.12345.tmp")
    leftover.write_bytes(segment.read_bytes())
    assert [one.number for one in on_disk().read()] == [0]
    assert not leftover.exists()
