"""Answers that are too old are deleted, and no others; ages are written in hours or days."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learn_cases import some_record

from slipstream import LLM
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.capture.capture import identity_of
from slipstream.learn.session import LearnSession, SessionSettings
from slipstream.learn.storage.database import LearnDatabase
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.retention import RETRY_S, Retention
from slipstream.learn.storage.ring import MIN_BYTES, Ring, RingIdentity, read_ring, remove_older
from slipstream.serve.config import ServeConfig, seconds_of_age

IDENTITY = RingIdentity("model-a", "template-a")
HOUR_S = 3600.0
SECRET = b"a secret of old, in 32 bytes, yes"[:32]


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    return LearnFolder(tmp_path / "learn")


@pytest.fixture
def ring(folder: LearnFolder) -> Iterator[Ring]:
    made = Ring(folder, IDENTITY, MIN_BYTES)
    yield made
    made.close()


def fill(ring: Ring, numbers: range) -> None:
    """A record each second from the thousandth on; those before the twentieth have the secret."""
    for number in numbers:
        prompt = {"prompt_ids": np.frombuffer(SECRET, np.int32)} if number < 20 else {}
        ring.append(some_record(number, **prompt))


def has_secret(folder: LearnFolder) -> bool:
    return any(SECRET[:16] in file.read_bytes() for file in folder.path.rglob("*") if file.is_file())


def test_what_is_too_old_is_nowhere_on_disk_and_the_writer_goes_on(folder: LearnFolder, ring: Ring) -> None:
    fill(ring, range(40))
    assert has_secret(folder)
    assert remove_older(folder, 1020.0) == 20
    assert not has_secret(folder)
    assert [one.number for one in ring.read()] == [*range(20, 40)]
    assert remove_older(folder, 1020.0) == 0
    assert ring.append(some_record(40)) == 40
    assert remove_older(folder, 2000.0) == 21
    assert list(ring.read()) == []
    assert ring.append(some_record(41)) == 41, "numbers count on"


def test_the_order_in_which_answers_ended_does_not_matter(folder: LearnFolder, ring: Ring) -> None:
    fill(ring, range(20, 40))
    fill(ring, range(20))  # those that took longest are written last
    assert remove_older(folder, 1020.0) == 20
    assert not has_secret(folder)
    assert [one.created_s for one in ring.read()] == [1000.0 + number for number in range(20, 40)]


def test_an_answer_of_a_clock_that_ran_ahead_is_too_old(folder: LearnFolder, ring: Ring) -> None:
    fill(ring, range(2))
    ring.append(some_record(2, created_s=4e9))
    assert remove_older(folder, 1000.0) == 1
    assert [one.number for one in ring.read()] == [0, 1]
    assert ring.append(some_record(3)) == 3
    assert remove_older(folder, 1000.0, now_s=1002.0) == 1, "by the clock of the caller"


def test_it_looks_now_and_then_and_tells_what_hinders_it(
    folder: LearnFolder,
    ring: Ring,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 1000.0 + 100 * HOUR_S
    fill(ring, range(40))
    retention = Retention(folder, 100 * HOUR_S, lambda: now_s)
    assert Retention(folder, None, lambda: now_s).look() == 0
    now_s += 10
    assert retention.look() == 10
    now_s += 0.9 * HOUR_S
    assert retention.look() == 0, "it looked less than an hour ago"
    monkeypatch.setattr(LearnDatabase, "writing", refused)
    now_s += 0.2 * HOUR_S
    assert retention.look() == 0
    assert retention.fault.startswith("answers that are too old cannot be deleted: cannot write in")
    now_s += RETRY_S
    assert retention.look() == 0
    assert len(caplog.messages) == 1, "the same fault is told once"
    monkeypatch.undo()
    now_s += RETRY_S - 1
    assert retention.look() == 0
    now_s += 1
    assert retention.look() == 30, "a minute after a failure it tries again"
    assert retention.fault == ""
    now_s += 2 * RETRY_S
    fill(ring, range(1))
    assert retention.look() == 0


@pytest.mark.parametrize("exists", [False, True])
def test_where_nothing_was_kept_nothing_is_made(tmp_path: Path, exists: bool) -> None:
    folder = LearnFolder(tmp_path / "learn")
    if exists:
        folder.path.mkdir()
    retention = Retention(folder, HOUR_S)
    assert (retention.look(), retention.fault) == (0, "")
    assert [*tmp_path.rglob("*")] == [folder.path] * exists


def refused(self: LearnDatabase) -> Iterator[None]:
    raise LearnError("cannot write in 'learn': Read-only file system")


def test_a_server_deletes_what_is_too_old_before_it_learns(folder: LearnFolder) -> None:
    base = {"method": "draft_model", "model": EMBEDDED_DRAFT, "num_speculative_tokens": 3}
    client = AsyncEngine(
        engine=LLM(speculative_config={"method": "versions", "drafter": base}, num_threads=1).engine
    )
    now_s = time.time()
    ring = Ring(folder, identity := identity_of(client.engine), MIN_BYTES)
    model, template = identity.model_hash, identity.template_hash
    ring.append(some_record(1, model_hash=model, template_hash=template))
    ring.append(some_record(2, model_hash=model, template_hash=template, created_s=now_s))
    ring.close()
    idle = {"min_records": 10**9, "poll_s": 60.0}
    settings = SessionSettings(folder.path, MIN_BYTES, worker=idle)
    try:
        LearnSession(client, settings).close()
        assert len(list(read_ring(folder))) == 2
        LearnSession(client, replace(settings, max_age_s=seconds_of_age("30d"))).close()
        assert [one.created_s for one in read_ring(folder)] == [now_s]
    finally:
        client.close()


def test_ages() -> None:
    assert [seconds_of_age(age) / HOUR_S for age in ("36h", "1 hour", "30d", "0.5 days", " 2 Hours ")] == [
        *(36, 1, 720, 12, 2)
    ]
    for age in ("", "30", "0d", "-1h", "2w", "1h30"):
        with pytest.raises(ConfigError, match=r"hours or days above 0, as in 36h or 30d"):
            ServeConfig(learn="folder", learn_max_age=age)
    assert ServeConfig(learn="folder", learn_max_age="7d").learn_max_age == "7d"
