"""`slipstream learn`: what an operator sees and decides, without a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learn_cases import some_record, some_tensors
from typer.testing import CliRunner

from slipstream.cli.main import app
from slipstream.learn.records.served import Purpose
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import MIN_BYTES, Ring, RingIdentity, read_ring
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.store import DataWindow, Version, VersionStore
from slipstream.train.batches import read_documents


def run(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["learn", *args])
    return done.exit_code, done.stdout, done.stderr


def told(*args: str) -> Any:
    """What a command prints with --json."""
    code, text, error = run(*args, "--json")
    assert code == 0, error
    return json.loads(text)


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    """Twenty answers of two tenants, and three versions: two of alpha's, the last one of beta's alone."""
    folder = LearnFolder(tmp_path / "learn")
    ring = Ring(folder, RingIdentity("model-a", "template-a"), MIN_BYTES)
    for number in range(20):
        tenant = "beta" if number % 4 == 3 else "alpha"
        ring.append(some_record(number, tenant=tenant, task="sql", num_steps=3, draft_version=""))
    ring.close()
    store = VersionStore(folder)
    for number, tenant in enumerate(("alpha", "alpha", "beta")):
        window = DataWindow.of(read_ring(folder, tenant=tenant), time.time())
        own = tenant if tenant == "beta" else None
        store.add(
            Version(
                "whole", "model-a", "template-a", "base-a", tenant=own, window=window, figures={"tau": 2.5}
            ),
            some_tensors(number),
        )
    return folder


def ids(folder: LearnFolder) -> list[str]:
    return [one.id for one in VersionStore(folder).all()]


def test_status_and_versions(folder: LearnFolder) -> None:
    path = str(folder.path)
    promoted = ids(folder)[0]
    run("promote", path, promoted)
    code, text, _ = run("status", path)
    assert code == 0
    for part in ("20 answers, 120 tokens", "alpha 15, beta 5", "sql 20", f"serves everyone      {promoted}"):
        assert part in text, text
    assert "tokens a pass, base" in text
    assert "2.00" in text
    assert f"event=promoted version={promoted} by=hand" in text
    found = told("status", path)
    assert found["ring"]["num_records"] == 20
    assert [one["id"] for one in found["versions"]] == ids(folder)
    state = found["state"]
    assert state["lanes"] == state["scopes"] == told("freeze", path, "--off")["lanes"], "the name before"
    assert [one["floor_hash"] for one in told("versions", path)["versions"]] == ["base-a"] * 3
    code, text, _ = run("versions", path, "--verify")
    assert code == 0
    assert all(name in text for name in (*ids(folder), "tau=2.5", "everyone", "base"))
    file = VersionStore(folder).weights_file(promoted)
    file.write_bytes(file.read_bytes()[:-1])
    code, text, _ = run("versions", path, "--verify")
    assert code == 1
    assert f"damaged: {promoted}: version '{promoted}' is damaged: its weights have another sha256" in text


def test_promote_rollback_and_freeze(folder: LearnFolder) -> None:
    path, (first, second, betas) = str(folder.path), ids(folder)
    states = StateStore(folder)
    for name in (first, second):
        assert run("promote", path, name)[0] == 0
    assert run("rollback", path)[1] == f"{first} serves everyone\n"
    assert run("rollback", path)[1] == "base serves everyone\n"
    code, _, error = run("rollback", path)
    assert (code, error) == (2, "error: the base drafter serves already; there is nothing to roll back\n")
    assert told("promote", path, betas)["tenant"] == "beta", "a tenant's version serves its own tenant"
    assert (states.read().scope().serving, states.read().scope("beta").serving) == ("", betas)
    assert "serves no other one" in run("promote", path, betas, "--tenant", "alpha")[2]
    assert run("promote", path, "base", "--tenant", "beta")[1] == "base serves tenant beta\n"
    canary = states.read().scope().promoted(first)
    states.change(lambda state: state.with_scope(canary))
    assert told("freeze", path)["frozen"] is True
    assert told("freeze", path, "--off")["frozen"] is False


def test_damaged_retired_and_other_models_versions_are_not_promoted(folder: LearnFolder) -> None:
    path, (first, second, _) = str(folder.path), ids(folder)
    file = VersionStore(folder).weights_file(first)
    file.write_bytes(b"")
    assert "is damaged" in run("promote", path, first)[2]
    StateStore(folder).change(lambda state: state.retire({second: "slower than promised"}))
    assert f"version '{second}' is retired: slower than promised" in run("promote", path, second)[2]
    other = VersionStore(folder).add(Version("whole", "model-b", "template-a", "base-a"), some_tensors())
    assert "is of another model" in run("promote", path, other.id)[2]
    assert "there is no version 'v000099-x'" in run("promote", path, "v000099-x")[2]
    assert StateStore(folder).read().scope().serving == ""


def test_forget_retires_what_learned_from_the_tenant(folder: LearnFolder) -> None:
    path, (first, second, betas) = str(folder.path), ids(folder)
    for name in (first, second, betas):
        run("promote", path, name)
    gone = told("forget", path, "--tenant", "beta")
    assert gone == {"num_records": 5, "versions": [betas]}
    state = StateStore(folder).read()
    assert [one.key for one in state.scopes] == [(None, None)]
    assert (state.scope().serving, list(state.retired)) == (second, [betas])
    assert state.rebuild_since_s > 0
    assert ids(folder) == [first, second]
    assert told("status", path)["by_tenant"] == {"alpha": 15}
    gone = told("forget", path, "--tenant", "alpha")
    assert (gone["num_records"], StateStore(folder).read().scope().serving) == (15, "")
    assert ids(folder) == []
    for file in folder.path.rglob("*"):
        if file.is_file():
            assert not {name for name in (b"beta", b"alpha") if name in file.read_bytes()}, file
    assert told("forget", path, "--tenant", "nobody") == {"num_records": 0, "versions": []}
    code, text, _ = run("forget", path, "--tenant", "nobody")
    assert (code, text.startswith("there is nothing of tenant 'nobody'")) == (0, True)


def test_one_answer_is_counted_as_one(tmp_path: Path) -> None:
    ring = Ring(LearnFolder(tmp_path), RingIdentity("model-a", "template-a"), MIN_BYTES)
    ring.append(some_record(1, tenant="alpha", task="sql", num_steps=3, draft_version=""))
    ring.close()
    assert "1 answer, " in run("status", str(tmp_path))[1]
    assert run("forget", str(tmp_path), "--tenant", "alpha")[1].startswith("1 record deleted;")


def test_export(folder: LearnFolder, tmp_path: Path) -> None:
    path, first = str(folder.path), ids(folder)[0]
    code, _, error = run("export", path, str(tmp_path / "out"), "--version", first)
    assert code == 0, error
    assert (tmp_path / "out/weights.safetensors").read_bytes() == VersionStore(folder).weights_file(
        first
    ).read_bytes()
    about = json.loads((tmp_path / "out/version.json").read_text())
    assert (about["id"], about["base_hash"], about["floor_hash"]) == (first, "base-a", "base-a")
    assert "already" in run("export", path, str(tmp_path / "out"), "--version", first)[2]
    file = tmp_path / "served.jsonl"
    assert run("export", path, str(file), "--records", "--tenant", "beta", "--held-out")[0] == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["line"] for row in rows] == [3, 7, 11, 15, 19]
    begin, end = rows[0]["answer_spans"][0]
    assert rows[0]["token_ids"][begin:end] == some_record(3).token_ids.tolist()
    assert run("export", path, str(file), "--records", "--overwrite")[0] == 0
    train = list(read_ring(folder, Purpose.TRAIN))
    assert len(file.read_text().splitlines()) == len(train) < 20
    assert "choose what to export" in run("export", path, str(file))[2]


def test_exported_records_can_be_trained_on(folder: LearnFolder, tmp_path: Path) -> None:
    file = tmp_path / "served.jsonl"
    run("export", str(folder.path), str(file), "--records", "--held-out")
    documents = read_documents([file], range(50), length=512)
    assert len(documents) == 20
    assert np.array_equal(documents[0].tokens, some_record(0).text_ids)
    assert documents[0].is_answer.sum() == len(some_record(0).token_ids)


def test_a_folder_without_learning_is_refused(tmp_path: Path) -> None:
    for verb in (["status"], ["versions"], ["freeze"], ["rollback"], ["forget", "--tenant", "a"]):
        code, _, error = run(verb[0], str(tmp_path), *verb[1:])
        assert code == 2
        assert "is no folder of slipstream serve --learn: it has no learn.sqlite" in error
