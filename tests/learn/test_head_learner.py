"""An EAGLE-3 head that learns from captured hidden states: what is kept, learned, scored and served."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.config import SpeculativeConfig
from slipstream.engine.async_engine import AsyncEngine
from slipstream.errors import ConfigError, LearnError
from slipstream.learn.decisions import by_hand
from slipstream.learn.learners.base_draft import BaseDraft
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import check_learns, make_learner
from slipstream.learn.learners.scoring import replayed
from slipstream.learn.records.served import TAPS, ServedRecord
from slipstream.learn.session import LearnSession, SessionSettings
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import read_ring
from slipstream.learn.versions.store import Version, VersionStore

DEPTH = 3
HEAD = {
    "method": "eagle3",
    "model": EMBEDDED_EAGLE3,
    "num_speculative_tokens": DEPTH,
    "tree_top_k": 1,
    "num_draft_nodes": None,
}
OPTIONS = LearnerOptions(num_steps=25, batch_rows=4, row_length=128, learning_rate=2e-3, depth=DEPTH)
HEAD_BASE = BaseDraft(EMBEDDED_EAGLE3, "eagle3", EMBEDDED_TARGET)
IDLE = {"min_records": 10**9, "poll_s": 60.0}


def prompt(number: int) -> list[int]:
    return [200 + 7 * number + place for place in range(20)]


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=40, ignore_eos=True)


def answers(client: AsyncEngine, num: int) -> list[Any]:
    async def one(number: int) -> Any:
        last = None
        name = f"{number}-{time.monotonic_ns()}"
        async for update in client.stream(prompt(number), params(number), request_id=name):
            last = update
        assert last is not None
        return last.output

    async def every() -> list[Any]:
        return list(await asyncio.gather(*(one(number) for number in range(num))))

    return asyncio.run(every())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[ServedRecord], list[Any], list[Any], str]:
    """(records, outputs, outputs of a version that was promoted, the version) of a server that learns."""
    folder = tmp_path_factory.mktemp("learn")
    config = {"method": "versions", "drafter": HEAD, "num_versions": 1}
    client = AsyncEngine(engine=LLM(speculative_config=config, dtype="float32").engine)
    session = LearnSession(client, SessionSettings(folder, 2**26, worker=IDLE, capture_share=None))
    try:
        found = answers(client, 12)
        learner = make_learner("eagle", HEAD_BASE, OPTIONS)
        head, _ = learner.begin(None)
        identity = session.identity
        about = Version("eagle", identity.model_hash, identity.template_hash, HEAD_BASE.digest())
        version = VersionStore(LearnFolder(folder)).add(about, shaken(learner.tensors(head), 0.02)).id
        by_hand.freeze(LearnFolder(folder), True)  # no requests of the base drafter for comparison
        by_hand.promote(LearnFolder(folder), version)
        deadline_s = time.monotonic() + 280
        while version not in session.versions and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert session.status().faults == {}
        assert session.status().frozen
        again = answers(client, 12)
    finally:
        session.close()
        client.close()
    records = sorted(read_ring(LearnFolder(folder)), key=lambda one: one.number)
    return [one for one in records if not one.draft_version], found, again, version


def shaken(tensors: dict[str, torch.Tensor], noise: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (one.float() + noise * torch.randn(one.shape, generator=generator)).half()
        if one.ndim == 2
        else one
        for name, one in tensors.items()
    }


def test_the_target_s_hidden_states_are_kept(served: Any) -> None:
    records = served[0]
    assert len(records) == 12
    for one in records:
        taps = one.features[TAPS]
        assert taps.dtype == np.float16
        assert len(taps) == len(one.text_ids) - 1
        assert np.isfinite(taps).all()
        assert np.abs(taps).max() > 0


def test_what_is_scored_is_what_the_engine_accepted(served: Any) -> None:
    records = served[0]
    learner = make_learner("eagle", HEAD_BASE, OPTIONS)
    hits = learner.scorer(None).hits(records)
    assert [one.shape for one in hits] == [(DEPTH, len(one.token_ids)) for one in records]
    for one, record in zip(hits, records, strict=True):
        assert abs(sum(replayed(one, DEPTH).accepted) - record.num_accepted) <= 3
    total = sum(sum(replayed(one, DEPTH).accepted) for one in hits)
    assert total == pytest.approx(sum(one.num_accepted for one in records), rel=0.1)


def test_a_damaged_head_gets_better_and_its_tensors_are_all_that_it_needs(
    served: Any, tmp_path: Path
) -> None:
    records = served[0]
    learner = make_learner("eagle", HEAD_BASE, OPTIONS)
    head, _ = learner.begin(None)
    damaged = shaken(learner.tensors(head), 0.04)
    learned = learner.learn(records, records[:3], start=damaged)
    steps = [
        sum(replayed(hits, DEPTH).num_steps for hits in learner.scorer(tensors).hits(records))
        for tensors in (damaged, learned.tensors)
    ]
    assert steps[1] < 0.9 * steps[0]
    assert learned.figures["num_parameters"] == sum(one.numel() for one in head.parameters())
    learner.checkpoint(learned.tensors, tmp_path / "head")
    saved = (
        make_learner("eagle", replace(HEAD_BASE, model=str(tmp_path / "head")), OPTIONS)
        .scorer(None)
        .hits(records)
    )
    for one, two in zip(saved, learner.scorer(learned.tensors).hits(records), strict=True):
        assert (one == two).mean() > 0.95


def test_a_row_weighs_as_much_as_its_chain_comes_that_far(served: Any) -> None:
    [record] = [one for one in served[0] if one.temperature][:1]

    def loss(record: ServedRecord, depth: int) -> Any:
        learner = make_learner("eagle", HEAD_BASE, replace(OPTIONS, depth=depth))
        head, _ = learner.begin(None)
        return learner.loss(head, next(learner.batches([record], [])))

    def with_top(record: ServedRecord, places: Any, ids: Any) -> ServedRecord:
        top_ids = record.rows.top_ids.copy()
        top_ids[places] = ids
        return replace(record, rows=replace(record.rows, top_ids=top_ids))

    positions = record.rows.positions
    own = record.rows.path_lengths() == 0
    odd = np.arange(4000, 4000 + record.rows.width, dtype=np.int32)  # what the head thinks improbable
    base = loss(record, 2)
    assert base.loss.item() == loss(with_top(record, own & (positions == 0), odd), 2).loss.item(), (
        "an answer's first token is not drafted"
    )
    assert base.loss.item() != loss(with_top(record, own & (positions == 5), odd), 2).loss.item()
    assert base.loss.item() != loss(record, 1).loss.item()
    lost = with_top(record, slice(None), odd)
    assert loss(lost, 1).overlap < 0.1
    assert loss(lost, 2).loss.item() == pytest.approx(loss(lost, 1).loss.item(), rel=0.02), (
        "no chain comes to its second token"
    )


def test_a_version_of_a_head_serves_and_no_text_changes(served: Any) -> None:
    _, before, after, version = served
    assert {one.metrics.draft_version for one in before} == {""}
    assert {one.metrics.draft_version for one in after} == {version}
    off = LLM(dtype="float32").generate([prompt(n) for n in range(12)], [params(n) for n in range(12)])
    texts = [[one.outputs[0].token_ids for one in found] for found in (before, after, off)]
    assert texts[0] == texts[1] == texts[2]


def test_what_cannot_learn_is_one_line(served: Any) -> None:
    learner = make_learner("eagle", HEAD_BASE, OPTIONS)
    bare = [replace(one, features={}) for one in served[0]]
    with pytest.raises(LearnError, match="has hidden states"):
        learner.learn(bare)
    assert not learner.scorer(None).hits(bare)[0].any()
    with pytest.raises(LearnError, match="belongs to another head"):
        learner.scorer({"fc.weight": torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match="needs the target"):
        make_learner("eagle", replace(HEAD_BASE, target=None), OPTIONS)
    head = SpeculativeConfig("eagle3", options={"model": EMBEDDED_EAGLE3})
    check_learns(head)
    with pytest.raises(ConfigError, match="learns by eagle or corrective, not by 'whole'"):
        check_learns(head, "whole")
    draft = SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT})
    with pytest.raises(ConfigError, match="learns by whole or low_rank or corrective"):
        check_learns(draft, "eagle")
