"""Servers against servers: what is certified, and that each fault is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MODEL, FakeEngine, serve

from slipstream.assets.workload.reading import read_workload
from slipstream.errors import ConfigError, RemoteError
from slipstream.rpc.client import ServerAddress
from slipstream.tools.audit.accounting import Knowledge, account
from slipstream.tools.audit.certificate import Certificate
from slipstream.tools.audit.decision import AuditDecision
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.mix import Profile
from slipstream.tools.audit.records import AuditAnswer, AuditRequest, TokenTop
from slipstream.tools.audit.remote import counting
from slipstream.tools.audit.remote.audit import RemoteAudit, run_remote
from slipstream.tools.audit.remote.probing import find_abilities
from slipstream.tools.audit.remote.reading import ReplyReader
from slipstream.tools.audit.remote.repeating import log_prob_differences
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.audit.settings import AuditSettings


@pytest.fixture(autouse=True)
def prompt_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake engine's counters are never late."""
    monkeypatch.setattr(counting, "PATIENCE_S", 0.0)


def side(name: str, fake: FakeEngine) -> ServerSide:
    root = fake.url.removesuffix("/v1")
    return ServerSide(name, ServerAddress(fake.url, MODEL, f"{root}/metrics", timeout_s=120))


def settings(num_answers: int = 40, **others: Any) -> AuditSettings:
    return AuditSettings(
        read_workload("sample"), num_answers=num_answers, max_tokens=16, num_prompts=10, **others
    )


def audit(first: dict[str, Any], second: dict[str, Any], num_answers: int = 40, **others: Any) -> Certificate:
    with serve(**first) as one, serve(**second) as other:
        plan = RemoteAudit(
            settings(num_answers, **others), side("audited", one), side("against", other), has_own_size=True
        )
        return run_remote(plan)


def violated(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if check.num_violations]


def test_an_honest_server_that_keeps_seeds_is_certified() -> None:
    found = audit({}, {})
    assert found.decision is AuditDecision.CERTIFIED, found.reasons
    assert found.exit_code == 0
    assert found.audited["keeps_seed"]
    held = {check.name for check in found.checks if check.outcome == "held"}
    assert {
        "same tokens",
        "usage",
        "finish reasons",
        "streams",
        "cut at stop strings",
        "counters",
        "log-probabilities",
    } <= held
    about_stops = [check.name for check in found.checks if "stop strings" in check.name]
    assert sorted(about_stops) == ["cut at stop strings", "stop strings"], "two checks, each with its name"
    assert found.smallest_deviations["share_of_answers"] == pytest.approx(1 - 0.01 ** (1 / 40))
    assert "10.87% of the answers" in found.claim


def test_faults_of_accounting_are_found_at_once() -> None:
    faulty = {
        "usage_factor": 2,
        "counter_factor": 3,
        "ignores_stop": True,
        "stream_drops": True,
        "logprob_shift": 0.05,
    }
    found = audit(faulty, {}, num_answers=12)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert found.exit_code == 1
    assert set(violated(found)) == {
        "usage",
        "counters",
        "cut at stop strings",
        "streams",
        "log-probabilities",
    }
    assert found.claim == "Nothing is certified."


@pytest.mark.parametrize(
    "fault", [{"cut_every": 12}, {"flip_every": 2, "flipped": range(65, 89)}], ids=["cut", "another token"]
)
def test_another_text_is_found_under_seeds(fault: dict[str, Any]) -> None:
    found = audit(fault, {}, num_answers=24)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert "same tokens" in violated(found)
    assert found.differences
    assert not any(one["is_tie"] for one in found.differences)


def test_cut_answers_show_without_another_side_that_tells_tokens() -> None:
    found = audit({"gives_ids": False, "cut_every": 12}, {"gives_ids": False}, num_answers=16)
    assert "finish reasons" in violated(found)


def test_near_ties_are_named_and_more_than_rounding_explains_are_a_finding() -> None:
    found = audit(
        {"flip_every": 2, "flipped": range(65, 105), "flip_margin": 1e-4},
        {"flip_margin": 1e-4},
        tie_margin=1e-3,
    )
    assert "same tokens" not in violated(found), "each difference alone is a near-tie"
    ties = [one for one in found.differences if one["is_tie"]]
    assert ties
    assert all(one["margin"] == pytest.approx(1e-4) for one in ties)
    assert found.ties["observed"] == len(ties)
    assert found.ties["expected"] > 0


@pytest.mark.long
def test_samples_of_servers_without_a_common_seed() -> None:
    honest = audit({"keeps_seed": False}, {"keeps_seed": False, "noise": 1}, num_answers=150)
    assert honest.decision is AuditDecision.CERTIFIED, honest.reasons
    assert {test.name for test in honest.tests} == {"samples, by betting", "samples, by discrepancy"}
    other = audit({"noise": 1, "spread": 1.6}, {}, num_answers=150)
    assert other.decision is AuditDecision.NOT_CERTIFIED
    assert any("samples, by betting" in reason for reason in other.reasons), other.reasons


@pytest.mark.long
def test_betting_stops_an_audit_early() -> None:
    found = audit({"keeps_seed": False, "spread": 4.0}, {"keeps_seed": False, "noise": 1}, num_answers=1200)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert found.data.num_answers < 1200


def test_what_no_rounding_explains_excuses_nothing() -> None:
    jitter = {"logprob_jitter": 3.0}
    honest = audit(jitter, {}, num_answers=24)
    assert honest.decision is AuditDecision.COULD_NOT_TELL
    assert any("more than 1 is no rounding" in reason for reason in honest.reasons), honest.reasons
    faulty = audit({**jitter, "flip_every": 2, "flipped": range(65, 89)}, {}, num_answers=24)
    assert "same tokens" in violated(faulty)
    assert not any(one["is_tie"] for one in faulty.differences)


def test_servers_that_do_not_repeat_themselves_and_tell_no_margins_leave_doubt() -> None:
    # Every third request while the server is tried out, and all behind these, in whatever order they come.
    flipped = {*range(0, 45, 3), *range(45, 200)}
    fault = {"flip_every": 1, "flipped": flipped, "gives_logprobs": False}
    found = audit(fault, {"gives_logprobs": False}, num_answers=24)
    assert found.decision is AuditDecision.COULD_NOT_TELL, found.reasons
    assert any("nothing tells rounding from faults" in reason for reason in found.reasons)


def test_empty_answers_certify_nothing() -> None:
    empty = {"empty": True, "gives_ids": False, "gives_logprobs": False}
    found = audit(empty, empty, num_answers=24)
    assert found.decision is AuditDecision.COULD_NOT_TELL
    assert found.reasons[0].startswith("none of these could run: same tokens")


def test_few_failed_requests_are_named() -> None:
    found = audit({"fail_every": 70}, {}, num_answers=60)
    assert found.decision is AuditDecision.CERTIFIED, found.reasons
    assert any(note.startswith("1 of 60 requests to ") for note in found.notes), found.notes


def test_counters_of_other_requests_decide_nothing() -> None:
    found = audit({"counter_factor": 2, "requests_counted": 2}, {}, num_answers=12)
    assert found.decision is AuditDecision.CERTIFIED, found.reasons
    assert any("because the server answered other requests too" in note for note in found.notes)


@pytest.mark.parametrize(
    ("drafted", "note"), [(None, ""), (0, "no draft tokens"), (3, " draft tokens meanwhile")]
)
def test_whether_a_server_drafted_is_a_note(drafted: int | None, note: str) -> None:
    found = audit({"drafted": drafted}, {}, num_answers=4)
    told = [one for one in found.notes if "draft" in one]
    assert len(told) == bool(note)
    assert all(note in one for one in told)
    assert found.decision is AuditDecision.CERTIFIED, found.reasons


def test_few_other_answers_without_log_probabilities_may_be_rounding() -> None:
    """Sixteen answers that are repeated exactly do not show that rounding never turns a token around."""
    fault = {"flip_every": 3, "flipped": range(65, 105), "gives_logprobs": False}
    found = audit(fault, {"gives_logprobs": False})
    assert found.decision is AuditDecision.COULD_NOT_TELL
    assert any("no log-probabilities are reported" in reason for reason in found.reasons)


def test_an_answer_that_is_not_repeated_says_nothing_of_streams() -> None:
    """The fault is in the answers that were compared, not in streams or stop strings."""
    fault = {"flip_every": 1, "flipped": range(65, 105), "gives_logprobs": False}  # only while all is asked
    found = audit(fault, {"gives_logprobs": False})
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert violated(found) == []


def test_before_min_tokens_a_stop_string_does_not_count() -> None:
    profile = Profile("min_tokens", lambda chance, vocabulary: {"temperature": 0.0, "min_tokens": 16})
    with serve() as one, serve() as other:
        first, second = side("audited", one), side("against", other)
        found = run_remote(RemoteAudit(settings(8), first, second, profiles=(profile,), has_own_size=True))
    assert found.decision is AuditDecision.CERTIFIED, found.reasons


def test_a_lossy_setting_is_never_certified() -> None:
    config = {"rejection_sample_method": "fly", "method": "eagle3", "draft_model_config": {"dtype": "half"}}
    lossy = {"vllm_config": {"speculative_config": config}}
    found = audit({"settings": lossy}, {}, num_answers=4)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert found.data.num_answers == 0, "nothing that it answers can certify it"
    assert "rejection_sample_method = 'fly'" in found.reasons[0]
    assert found.audited["speculation"]["speculative_config"] == {k: config[k] for k in list(config)[:2]}


@pytest.mark.long
def test_a_server_that_dies_leaves_doubt_and_can_be_resumed(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with serve(fails_after=95) as one, serve() as other:
        plan = RemoteAudit(
            settings(),
            side("audited", one),
            side("against", other),
            has_own_size=True,
            journal=AuditJournal(file),
        )
        broken = run_remote(plan)
        assert broken.decision is AuditDecision.COULD_NOT_TELL
        assert broken.exit_code == 2
        assert "the engine died" in " ".join(broken.reasons)
        one.fails_after = None
        asked = one.num_requests
        plan = RemoteAudit(
            settings(),
            side("audited", one),
            side("against", other),
            has_own_size=True,
            journal=AuditJournal(file, resume=True),
        )
        whole = run_remote(plan)
        assert whole.decision is AuditDecision.CERTIFIED, whole.reasons
        kept = plan.journal.num_resumed
        assert kept > 10
        assert f"{kept} replies are from an earlier run" in whole.notes
        assert one.num_requests - asked < 40 + 80
        raw = [
            ServerSide(name, side(name, server).address, raw=True)
            for name, server in (("audited", one), ("against", other))
        ]
        plan = RemoteAudit(
            settings(),
            *raw,
            has_own_size=True,
            journal=AuditJournal(file, resume=True),
        )
        with pytest.raises(ConfigError, match=r"answers of another audit \(raw differ"):
            run_remote(plan)
    with serve() as one, serve() as other:
        plan = RemoteAudit(
            settings(seed=1),
            side("audited", one),
            side("against", other),
            has_own_size=True,
            journal=AuditJournal(file, resume=True),
        )
        with pytest.raises(ConfigError, match=r"answers of another audit \(.*data"):
            run_remote(plan)


def test_what_servers_lack_is_said() -> None:
    found = audit(
        {"streams": False, "gives_logprobs": False, "gives_ids": False}, {"gives_ids": False}, num_answers=8
    )
    skipped = {check.name: check.skipped for check in found.checks if not check.num_compared}
    assert skipped["streams"] == "the server does not stream"
    assert skipped["log-probabilities"] == "the servers do not report them"
    assert found.decision is AuditDecision.CERTIFIED, found.reasons


def test_zeros_in_place_of_log_probabilities_are_named() -> None:
    found = audit({"fills_in": True}, {}, num_answers=12)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert violated(found) == ["log-probabilities"]
    [reason] = found.reasons
    assert "with the log-probability 0 and without alternatives" in reason
    assert audit({"fills_in": True}, {"fills_in": True}, num_answers=12).decision is AuditDecision.CERTIFIED


@pytest.mark.parametrize(("told", "outcomes"), [(4, ["held", "held"]), (9, ["violated", "violated"])])
def test_an_entry_of_log_probabilities_may_be_several_tokens(told: int, outcomes: list[str]) -> None:
    """llama.cpp gives one for all tokens of a character: the `°` here is at most two, the answer at most four."""
    reader = ReplyReader(0)
    entries = [{"token": token, "id": 5, "logprob": -1.0} for token in ("5", "°", "C")]
    choice = {"message": {"content": "5°C"}, "finish_reason": "length", "logprobs": {"content": entries}}
    reader.add({"choices": [choice], "usage": {"completion_tokens": told}})
    request = AuditRequest(0, prompt=0, task="math", params={}, max_tokens=told, seed=0)
    usage, ends, _ = account({0: request}, {0: reader.reply()}, Knowledge())
    assert [usage.outcome, ends.outcome] == outcomes
    assert reader.reply().answers[0].token_ids is None  # a reference would score another text
    reader.add({"choices": [], "usage": {"completion_tokens": 3}})
    assert reader.reply().answers[0].token_ids == [5, 5, 5]


def test_only_what_is_known_to_be_the_same_token_is_compared() -> None:
    """llama.cpp gives tokens that are parts of characters the same text."""
    parts = TokenTop("a", -0.5, (("a", -0.5), ("\ufffd", -1.0), ("\ufffd", -9.8), ("b", -11.0)))
    one_left = TokenTop("a", -0.4, (("a", -0.4), ("\ufffd", -9.7), ("b", -11.2)))
    odd = TokenTop("\ufffd", -7.0, (("c", -0.1),))
    first = AuditAnswer(token_ids=[1, 2], tops=[parts, odd])
    same = log_prob_differences(first, AuditAnswer(token_ids=[1, 2], tops=[parts, odd]))
    assert same.tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]  # both tokens, and the alternatives a, b and c
    other_token = TokenTop("\ufffd", -0.2, (("c", -3.0),))
    other = AuditAnswer(token_ids=[1, 3], tops=[one_left, other_token])
    assert log_prob_differences(first, other).tolist() == pytest.approx([-0.1, -0.1, 0.2])
    assert len(log_prob_differences(AuditAnswer(tops=[parts]), AuditAnswer(token_ids=[5], tops=[parts]))) == 3


@pytest.mark.parametrize("refused", ["return_token_ids", "min_p", "logprobs"])
def test_only_what_a_server_refuses_is_left_out(refused: str) -> None:
    with serve(refuses=(refused,)) as fake:
        asked = side("audited", fake)
        find_abilities(asked, AuditRequest(0, 0, "math", {}, max_tokens=8, seed=1, text="one"))
    info = asked.info
    asks = {
        "return_token_ids": info.returns_token_ids,
        "min_p": info.knows_filters,
        "logprobs": info.returns_logprobs,
    }
    assert [name for name, is_there in asks.items() if not is_there] == [refused]


def test_too_few_samples_to_find_anything_certify_nothing() -> None:
    profile = Profile("sampled", lambda chance, vocabulary: {"temperature": 0.8})
    with serve(keeps_seed=False) as one, serve(keeps_seed=False, noise=1) as other:
        first, second = side("audited", one), side("against", other)
        plan = replace(settings(14), num_prompts=14)  # ten bets, which make 1,024 of 1, and 3,200 are needed
        found = run_remote(RemoteAudit(plan, first, second, profiles=(profile,), has_own_size=True))
    assert found.decision is AuditDecision.COULD_NOT_TELL
    [reason] = found.reasons
    assert "there are too few answers" in reason
    assert "samples, by betting, samples, by discrepancy" in reason


def test_refusals() -> None:
    with (
        serve(owner="other") as fake,
        pytest.raises(ConfigError, match="--against URL, a server without speculation, or --reference MODEL"),
    ):
        run_remote(RemoteAudit(settings(), side("audited", fake)))
    idle = {"speculation": {"method": "off", "lossy": False}}
    with (
        serve(owner="slipstream", card=idle) as fake,
        pytest.raises(ConfigError, match="does not speculate, so there is nothing to audit"),
    ):
        run_remote(RemoteAudit(settings(), side("audited", fake)))
    with (
        serve(fails_after=0) as fake,
        serve() as other,
        pytest.raises(RemoteError, match="does not answer: HTTP 500: the engine died"),
    ):
        run_remote(RemoteAudit(settings(), side("audited", fake), side("against", other)))
    with serve() as fake, pytest.raises(ConfigError, match="--against is the audited server itself"):
        run_remote(RemoteAudit(settings(), side("audited", fake), side("against", fake)))
