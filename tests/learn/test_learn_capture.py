"""Records of served answers: what the target thought, of those who allow it, and never at the expense of serving."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.request import EmittedTokens, RequestOptions
from slipstream.errors import LearnError
from slipstream.learn.capture.capture import Capture, CaptureLimits, identity_of
from slipstream.learn.capture.step_rows import StepRows, reduced, top_of
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.served import CheckedRows, ServedRecord
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import MIN_BYTES, Ring, read_ring
from slipstream.reasoning.options import StepOptions
from slipstream.text.prompts import encode_chat

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SEEDED = SamplingParams(temperature=0.8, max_tokens=20, seed=5)
TREE: dict[str, Any] = {
    "method": "draft_model",
    "model": EMBEDDED_DRAFT,
    "tree_choices": [[0], [1], [0, 0], [0, 1], [0, 0, 0]],
}
MakeCapture = Callable[..., Capture]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=TREE, kv_cache_bytes=32 * 2**20)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> LLM:
    """Speculation off."""
    return LLM(kv_cache_bytes=32 * 2**20)


@pytest.fixture
def make(llm: LLM) -> Iterator[MakeCapture]:
    """Makes captures of the engine, and ends them."""
    made: list[Capture] = []

    def make(ring: Ring | None = None, rules: PrivacyRules | None = None, **options: Any) -> Capture:
        ring = Ring(None, identity_of(llm.engine)) if ring is None else ring
        hooks = {name: options.pop(name) for name in ("version_of", "features_of") if name in options}
        limits = CaptureLimits(**{"width": 8, "max_share": None, **options})
        made.append(Capture(ring, rules, limits, **hooks))
        llm.engine.on_checked = made[-1].observe
        return made[-1]

    yield make
    llm.engine.on_checked = None
    for capture in made:
        capture.close()
        capture.ring.close()


def encoded(llm: LLM, text: str) -> list[int]:
    return encode_chat(llm.engine.tokenizer, [{"role": "user", "content": text}])


def ask(
    llm: LLM, capture: Capture, *texts: str, params: SamplingParams = GREEDY, **keywords: Any
) -> list[ServedRecord]:
    """The records that are there once the texts have been answered."""
    llm.generate([encoded(llm, text) for text in texts], params, use_tqdm=False, **keywords)
    assert capture.flush()
    return list(capture.ring.read())


def test_rows_are_what_the_target_thinks_there(llm: LLM, plain: LLM, make: MakeCapture) -> None:
    capture = make()
    seen: list[torch.Tensor] = []
    plain.engine.on_checked = lambda items: seen.append(items[0].logits[0].clone())
    for params in (GREEDY, SEEDED):
        *_, record = ask(llm, capture, "Write a query that counts users by city.", params=params, task="sql")
        rows, answer = record.rows, record.token_ids.tolist()
        on_text = [row for row in range(len(rows)) if not rows.path(row)]
        assert sorted(rows.positions[on_text].tolist()) == list(range(len(answer))), "one for each token"
        assert len(on_text) < len(rows), "rejected branches too"
        assert record.num_steps == (rows.depths[on_text] == 0).sum()
        for row in range(len(rows)):
            assert rows.depths[row] >= len(rows.path(row))
            text = [*record.prompt_ids.tolist(), *answer[: rows.positions[row]], *rows.path(row)]
            seen.clear()
            plain.generate(text, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
            logits = seen[0]
            assert abs(rows.logsumexps[row] - logits.logsumexp(0)) < 1e-3
            top_logits = rows.top_log_probs[row].astype(np.float32) + rows.logsumexps[row]
            assert np.allclose(top_logits, logits.topk(8).values, atol=2e-2)
            assert rows.top_ids[row, 0] == logits.argmax()
            if params is GREEDY and row in on_text:
                assert answer[rows.positions[row]] == rows.top_ids[row, 0]
        assert (record.task, record.temperature) == ("sql", params.temperature)
        assert record.model_hash == identity_of(llm.engine).model_hash
    plain.engine.on_checked = None


def test_several_answers_at_once_and_one_that_ends_by_itself(llm: LLM, make: MakeCapture) -> None:
    capture = make(version_of=lambda sequence: f"v-{sequence.tenant}")
    params = SamplingParams(temperature=0.7, seed=1, n=2, max_tokens=60)
    records = ask(llm, capture, "Say yes.", "What is 2 + 2?", params=params, tenant="ann")
    assert sorted((one.request_id, one.index) for one in records) == sorted(
        (one, index) for one in {one.request_id for one in records} for index in (0, 1)
    )
    assert {one.draft_version for one in records} == {"v-ann"}
    for record in records:
        lengths = record.rows.path_lengths()
        assert sorted(record.rows.positions[lengths == 0].tolist()) == list(range(len(record.token_ids)))
    assert {one.purpose for one in records if one.request_id == records[0].request_id} == {records[0].purpose}


def test_texts_are_the_same_with_it(llm: LLM, make: MakeCapture) -> None:
    prompt = encoded(llm, "Name three rivers.")
    [before] = llm.generate(prompt, SEEDED, use_tqdm=False)
    for options in ({}, {"max_waiting_bytes": 0}, {"version_of": None}):
        capture = make(**options)  # None cannot be called: capture itself fails
        [with_it] = llm.generate(prompt, SEEDED, use_tqdm=False)
        assert capture.flush()
        assert with_it.outputs[0].token_ids == before.outputs[0].token_ids
    assert "capture failed" in capture.status().fault


def test_only_answers_that_ended_well_and_are_the_targets_own(llm: LLM, make: MakeCapture) -> None:
    capture = make()
    engine = llm.engine
    prompt = encoded(llm, "Name three rivers.")
    engine.add_request("aborted", prompt, GREEDY)
    engine.step()
    engine.step()
    engine.abort("aborted")
    [whole] = llm.generate(prompt, SEEDED, use_tqdm=False)
    emitted = [EmittedTokens(whole.outputs[0].token_ids[:5])]
    engine.add_request("resumed", prompt, SEEDED, emitted=emitted)
    while engine.has_unfinished:
        engine.step()
    biased = SamplingParams(temperature=0.0, max_tokens=5, logit_bias={5: 1.0})
    formed = SamplingParams(temperature=0.0, max_tokens=5, structured={"regex": "(yes|no)"})
    llm.generate([prompt, prompt], [biased, formed], use_tqdm=False)
    engine.on_observe = lambda items: setattr(items[0].sequence.metrics, "lossy", True)
    llm.generate(prompt, GREEDY, use_tqdm=False)
    engine.on_observe = None
    assert capture.flush()
    assert len(list(capture.ring.read())) == 1
    assert capture.status().num_skipped == {"begun elsewhere": 1, "constrained": 2, "lossy": 1}


def test_nothing_of_an_opted_out_tenant_is_on_disk(llm: LLM, make: MakeCapture, tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "learn")
    rules = PrivacyRules.of(allowed=["acme/lawyer"], denied=["acme", "quiet"])
    capture = make(Ring(folder, identity_of(llm.engine), 2**20), rules)
    secrets = {
        "acme": "The zebra password of acme is tangerine.",
        "acme/intern": "An intern of acme likes purple elephants.",
        "quiet": "Quiet people hide their umbrellas.",
    }
    open_text = "Name three rivers."
    for tenant, text in secrets.items():
        ask(llm, capture, text, params=SEEDED, tenant=tenant)
    ask(llm, capture, "Nobody may keep this pineapple.", params=SEEDED, tenant="loud", learn=False)
    assert b"SLR1" not in folder_bytes(folder), "no record was written"
    records = ask(llm, capture, open_text, params=SEEDED, tenant="loud")
    assert [one.tenant for one in records] == ["loud"]
    assert [one.tenant for one in ask(llm, capture, open_text, tenant="acme/lawyer")] == [
        "loud",
        "acme/lawyer",
    ]
    stored = folder_bytes(folder)
    assert np.array(encoded(llm, open_text), np.int32).tobytes() in stored, (
        "this is how a text would be found"
    )
    llm.engine.on_checked = None
    public = {window for one in capture.ring.read() for window in windows(one.text_ids.tolist())}
    for tenant, text in {**secrets, "": "Nobody may keep this pineapple."}.items():
        [answer] = llm.generate(encoded(llm, text), SEEDED, use_tqdm=False)
        tokens = windows([*encoded(llm, text), *answer.outputs[0].token_ids]) - public
        assert len(tokens) > 10
        assert not any(window in stored for window in tokens)
        assert text.encode() not in stored
        assert not tenant or f'"{tenant}"'.encode() not in stored
    assert capture.status().num_records == 2


def folder_bytes(folder: LearnFolder) -> bytes:
    """Everything that is stored below a folder."""
    return b"".join(file.read_bytes() for file in sorted(folder.path.rglob("*")) if file.is_file())


def windows(token_ids: list[int]) -> set[bytes]:
    """Any four tokens in a row of a text, as a record stores them."""
    ids = np.array(token_ids, np.int32)
    return {ids[at : at + 4].tobytes() for at in range(len(ids) - 3)}


@pytest.mark.parametrize(
    ("tenant", "allowed", "denied", "by_default", "may"),
    [
        ("", (), (), True, True),
        ("", (), (), False, False),
        ("acme", (), ("acme",), True, False),
        ("acme/ann", (), ("acme",), True, False),
        ("acmeville", (), ("acme",), True, True),
        ("acme/ann", ("acme/ann",), ("acme",), True, True),
        ("acme/bob", ("acme/ann",), ("acme",), True, False),
        ("acme", ("acme",), (), False, True),
        ("other", ("acme",), (), False, False),
        ("both", ("both",), ("both",), True, False),
    ],
)
def test_rules(
    tenant: str, allowed: tuple[str, ...], denied: tuple[str, ...], by_default: bool, may: bool
) -> None:
    rules = PrivacyRules.of(allowed, denied, by_default)
    assert rules.may_learn(RequestOptions(tenant=tenant)) is may
    assert not rules.may_learn(RequestOptions(tenant=tenant, learn=False))
    assert not rules.may_learn(RequestOptions(tenant=tenant, reasoning=StepOptions())), "drafted steps"


def test_a_full_disk_is_told_and_serving_goes_on(llm: LLM, make: MakeCapture, tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "learn")
    capture = make(Ring(folder, identity_of(llm.engine), 2**20), retry_s=0.0)
    assert len(ask(llm, capture, "Name three rivers.")) == 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(file.stat().st_size for file in folder.path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, limits[1]))
    try:
        records = ask(llm, capture, "Name four rivers.")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(records) == 1
    assert [one.number for one in read_ring(folder)] == [0], "of the half of the second nothing is read"
    assert "cannot write in" in capture.status().fault
    assert capture.status().num_skipped == {"cannot be written": 1}
    assert [one.number for one in ask(llm, capture, "Name five rivers.")] == [0, 1]
    assert capture.status().fault == ""
    assert [one.number for one in read_ring(folder)] == [0, 1]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", tmp_path / "file" / "learn", Path("/proc/learn")):
        with pytest.raises(LearnError, match="give --learn a folder that can be written"):
            LearnFolder(path).create()


def test_memory_is_bounded_and_given_back(llm: LLM, make: MakeCapture) -> None:
    capture = make(Ring(None, identity_of(llm.engine), MIN_BYTES), width=16)
    for number in range(15):
        ask(llm, capture, f"Name {number} rivers.")
    status = capture.status()
    assert (status.num_records, status.waiting_bytes, status.fault) == (15, 0, "")
    assert capture.ring.status().num_bytes <= MIN_BYTES
    assert capture.ring.status().num_records < 15
    assert status.reduce_s > 0 < status.capture_s


def test_it_uses_no_more_than_its_share_of_time(llm: LLM, make: MakeCapture) -> None:
    capture = make(max_share=0.0)
    ask(llm, capture, "Name three rivers.")
    ask(llm, capture, "Name four rivers.", "Name five rivers.")
    status = capture.status()
    assert status.num_records == 1, "the first one used what there was"
    assert status.num_skipped == {"over its share of time": 2}


@pytest.mark.parametrize("vocab", [5, 300, 4096, 10_001])
def test_the_most_probable_tokens_of_any_vocabulary(vocab: int) -> None:
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    ids, log_probs, logsumexps = top_of(logits, 12)
    wanted = logits.log_softmax(dim=1).topk(min(12, vocab), dim=1)
    assert torch.equal(ids.long(), wanted.indices)
    assert torch.allclose(log_probs.float(), wanted.values, atol=1e-2)
    assert torch.allclose(logsumexps, logits.logsumexp(dim=1))


def test_rows_of_others_are_not_held(llm: LLM, make: MakeCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a step are one tensor: who holds a part of it holds all."""
    capture = make()
    shared: list[bool] = []

    def watched(steps: list[StepRows], *options: int) -> list[CheckedRows]:
        held: dict[int, int] = {}
        for step in steps:
            place = step.logits.untyped_storage().data_ptr()
            held[place] = held.get(place, 0) + step.logits.nbytes
        for step in steps:
            storage = step.logits.untyped_storage()
            assert storage.nbytes() == held[storage.data_ptr()]
            shared.append(storage.nbytes() > step.logits.nbytes)
        return reduced(steps, *options)

    monkeypatch.setattr("slipstream.learn.capture.capture.reduced", watched)
    texts = [encoded(llm, text) for text in ("Say yes.", "What is 2 + 2?", "Name three rivers.")]
    llm.generate(texts, GREEDY, use_tqdm=False)
    assert capture.flush()
    assert any(shared), "nothing is copied where all are kept"
    for number, text in enumerate(texts):
        llm.engine.add_request(f"held-{number}", text, GREEDY, RequestOptions(learn=number != 1))
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert capture.flush()
    assert capture.status().fault == ""
    assert capture.status().num_records == 5


def test_an_answer_that_is_too_large_is_skipped_alone(llm: LLM, make: MakeCapture) -> None:
    capture = make(Ring(None, identity_of(llm.engine), MIN_BYTES))
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    short = SamplingParams(temperature=0.0, max_tokens=4)
    assert ask(llm, capture, "Tell me a story.", params=long) == []
    assert len(ask(llm, capture, "Say yes.", params=short)) == 1
    status = capture.status()
    assert status.num_skipped == {"too large for the ring": 1}
    assert status.fault == ""
