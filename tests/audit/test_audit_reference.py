"""Our own server, audited against itself without speculation and against a local reference."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slipstream import AsyncEngine
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.assets.workload.reading import read_workload
from slipstream.config import SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.rpc.client import ServerAddress
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import DrainingServer
from slipstream.tools.audit.certificate import Certificate
from slipstream.tools.audit.decision import AuditDecision
from slipstream.tools.audit.mix import FULL, PLAIN, SERVED, Profile
from slipstream.tools.audit.records import AuditReply, AuditRequest
from slipstream.tools.audit.remote import judging
from slipstream.tools.audit.remote.audit import RemoteAudit, run_remote
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.audit.settings import AuditSettings

DRAFT = SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT, "num_speculative_tokens": 3})
MEMORY = {"kv_cache_bytes": 48 * 2**20}


@contextmanager
def running(engine: Engine) -> Iterator[str]:
    """The URL of a server around an engine."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(create_app(AsyncEngine(engine=engine), ServeConfig(), "pair"))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(120)


@pytest.fixture(scope="module")
def reference() -> Engine:
    return make_engine(None, None, {**MEMORY, "enable_prefix_caching": False})


@pytest.fixture(scope="module")
def url(reference: Engine) -> Iterator[str]:
    with running(make_engine(None, DRAFT, MEMORY, reference)) as found:
        yield found


def audit(
    url: str, reference: Engine | None, num_answers: int, profiles: Any, extra: dict[str, Any] | None = None
) -> Certificate:
    settings = AuditSettings(read_workload("sample"), num_answers=num_answers, max_tokens=16, num_prompts=7)
    side = ServerSide(
        "audited", ServerAddress(f"{url}/v1", "pair", f"{url}/metrics", timeout_s=60), extra or {}
    )
    return run_remote(RemoteAudit(settings, side, reference=reference, profiles=profiles, has_own_size=True))


@pytest.mark.long
def test_our_server_is_certified_against_itself_with_all_parameters(url: str) -> None:
    found = audit(url, None, len(FULL), FULL)
    assert found.decision is AuditDecision.CERTIFIED, found.reasons
    assert found.compared_with["extra_body"] == {"speculation": {"enabled": False}}
    held = {check.name for check in found.checks if check.outcome == "held"}
    assert {
        "same tokens",
        "usage",
        "finish reasons",
        "stop strings",
        "cut at stop strings",
        "streams",
        "counters",
    } <= held


def test_a_reference_replays_our_noise(url: str, reference: Engine) -> None:
    found = audit(url, reference, 10, SERVED)
    assert found.decision is AuditDecision.CERTIFIED, found.reasons
    assert found.compared_with["replays_noise"]
    assert found.ties["observed"] == 0
    [same] = [check for check in found.checks if check.name == "same tokens"]
    assert same.num_compared == 10


def test_a_lossy_verifier_of_our_server_is_refused_at_once(reference: Engine) -> None:
    lossy = SpeculativeConfig("draft_model", "faulty_verifiers:LossyCoupled", DRAFT.options)
    with running(make_engine(None, lossy, MEMORY, reference)) as url:
        found = audit(url, None, 40, FULL)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    [reason] = found.reasons
    assert reason.endswith("says lossy = True, which changes the text")
    assert found.data.num_answers == 0
    assert found.audited["speculation"]["speculation"]["verifier"] == "faulty_verifiers:LossyCoupled"


class ForgetfulSide(ServerSide):
    """Loses the token ids of one answer."""

    async def send(self, client: Any, request: AuditRequest, stream: bool = False) -> AuditReply:
        reply = await super().send(client, request, stream)
        for answer in reply.answers if request.number == 3 else ():
            answer.token_ids = None
        return reply


@pytest.mark.parametrize(("share", "decision"), [(0.02, "could not tell"), (0.25, "certified")])
def test_answers_that_cannot_be_scored_leave_doubt_where_they_are_many(
    url: str, reference: Engine, share: float, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "MAX_FAILED_SHARE", share)
    settings = AuditSettings(read_workload("sample"), num_answers=4, max_tokens=8, num_prompts=4)
    side = ForgetfulSide("audited", ServerAddress(f"{url}/v1", "pair", f"{url}/metrics", timeout_s=60))
    plan = RemoteAudit(settings, side, reference=reference, profiles=SERVED, has_own_size=True)
    found = run_remote(plan)
    assert found.decision == decision
    said = found.reasons if decision == "could not tell" else found.notes
    assert "1 of 4 answers came without all token ids, and the reference scores no others" in said


@pytest.mark.long
def test_a_wrong_temperature_shows_under_our_noise(url: str, reference: Engine) -> None:
    found = audit(url, reference, 24, PLAIN[1:], {"temperature": 0.9})
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert found.differences
    assert all(one["margin"] > 0 for one in found.differences)


@pytest.mark.long
def test_an_ignored_filter_shows(url: str, reference: Engine) -> None:
    nucleus = Profile("top_p", lambda chance, vocabulary: {"temperature": 1.0, "top_p": 0.7})
    found = audit(url, reference, 20, (nucleus,), {"top_p": 1.0})
    assert found.decision is AuditDecision.NOT_CERTIFIED


@pytest.mark.long
def test_int8_served_as_float32_shows(reference: Engine) -> None:
    with running(make_engine(None, DRAFT, {**MEMORY, "quantization": "int8"})) as url:
        found = audit(url, reference, 20, SERVED)
    assert found.decision is AuditDecision.NOT_CERTIFIED
    assert "log-probabilities" in {check.name for check in found.checks if check.num_violations}


@pytest.mark.long
def test_a_classical_verifier_is_judged_by_distributions(reference: Engine) -> None:
    rejection = SpeculativeConfig("draft_model", "rejection", DRAFT.options)
    with running(make_engine(None, rejection, MEMORY, reference)) as url:
        honest = audit(url, reference, 40, SERVED)
        hot = audit(url, reference, 120, PLAIN, {"temperature": 1.0})
    assert honest.decision is AuditDecision.CERTIFIED, honest.reasons
    assert not honest.compared_with["replays_noise"]
    assert "distribution" in {test.name for test in honest.tests}
    assert hot.decision is AuditDecision.NOT_CERTIFIED
