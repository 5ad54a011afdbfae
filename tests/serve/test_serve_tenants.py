"""Tenants share nothing: the tenant is the API key, and within it the user."""

from __future__ import annotations

from typing import Any

import pytest
from serve_cases import MESSAGES, MakeApp, counters
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.control.monitor.alarms import AlarmKind
from slipstream.core.request import RequestOptions
from slipstream.core.sequence import Sequence
from slipstream.sampling.grammars import compiler
from slipstream.sampling.grammars.compiler import GrammarCompiler
from slipstream.serve.app import create_app
from slipstream.serve.auth import digest
from slipstream.serve.config import ServeConfig
from slipstream.serve.service import Service

KEYS = ("key-a", "key-b")
PROMPT = [7, 8, 9] * 40
ASK = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def num_cached(client: TestClient, name: str, user: str | None = None) -> int:
    answer = client.post("/v1/completions", json={**ASK, "user": user}, headers=key(name))
    assert answer.status_code == 200
    number: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_keys_share_no_prefixes_whatever_user_is_named(make_app: MakeApp) -> None:
    with TestClient(make_app(api_key=KEYS)) as client:
        assert num_cached(client, "key-a") == 0
        assert num_cached(client, "key-a") > 0
        assert num_cached(client, "key-b") == 0
        assert num_cached(client, "key-a", "ann") == 0
        assert num_cached(client, "key-b", "ann") == 0
        assert num_cached(client, "key-a", "ann") > 0
        assert num_cached(client, "key-b", "") > 0


def test_without_keys_the_user_is_the_tenant(client: TestClient) -> None:
    assert num_cached(client, "any") == 0
    assert num_cached(client, "other") > 0
    assert num_cached(client, "any", "ann") == 0


@pytest.mark.parametrize("keys", [(), KEYS])
def test_names_of_users_get_no_more_places_than_one_account(
    keys: tuple[str, ...], make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    add = drafting.engine.scheduler.add

    def noting(sequence: Sequence) -> None:
        seen.append(sequence.account)
        add(sequence)

    monkeypatch.setattr(drafting.engine.scheduler, "add", noting)
    with TestClient(make_app(api_key=keys) if keys else make_app()) as client:
        for name in KEYS:
            for user in ("ann", "bob", "eve/1"):
                num_cached(client, name, user)
    assert len(seen) == 6
    assert sorted(set(seen)) == sorted(map(digest, keys) if keys else [""])


def test_drafters_get_the_account_first_and_never_the_key_itself(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That tenants share nothing is every drafter's duty, which the conformance kit demands."""
    told: list[str] = []
    add = drafting.engine.add_request

    def noting(
        request_id: str, prompt: Any, params: SamplingParams, options: RequestOptions, **keywords: Any
    ) -> None:
        told.append(options.tenant)
        add(request_id, prompt, params, options, **keywords)

    monkeypatch.setattr(drafting.engine, "add_request", noting)
    with TestClient(make_app(api_key=KEYS)) as client:
        for name in KEYS:
            for user in (None, "ann", "key-a"):
                body = {"messages": MESSAGES, "max_tokens": 1, "user": user}
                assert client.post("/v1/chat/completions", json=body, headers=key(name)).status_code == 200
    assert len(set(told)) == 6
    assert not any(tenant.startswith(name) for tenant in told for name in KEYS)
    assert [tenant.partition("/")[2] for tenant in told] == ["", "ann", "key-a"] * 2


def test_what_a_tenant_has_compiled_saves_another_one_nothing(
    make_app: MakeApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema, a tool's and one that is refused: each is tried, checked and compiled as if none had been before."""
    done: list[str] = []
    for name in ("_try", "_compile"):
        made = getattr(GrammarCompiler, name)

        def counted(self: GrammarCompiler, *given: Any, name: str = name, made: Any = made) -> Any:
            done.append(name)
            return made(self, *given)

        monkeypatch.setattr(GrammarCompiler, name, counted)
    check = compiler.check_followed
    monkeypatch.setattr(compiler, "check_followed", lambda form: (done.append("check"), check(form))[1])
    schema = {"type": "object", "properties": {"seen_by_one": {"const": 1}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    bodies = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
        {"tools": [tool], "tool_choice": "required"},
        {"structured_outputs": {"json": {"not": {"type": "seen by one"}}}},
    ]

    def work(client: TestClient, name: str, user: str | None, body: dict[str, Any]) -> tuple[list[str], str]:
        done.clear()
        asked = {"messages": MESSAGES, "max_tokens": 1, "user": user, **body}
        answer = client.post("/v1/chat/completions", json=asked, headers=key(name))
        return sorted(done), answer.json().get("error", {}).get("message", "")

    with TestClient(make_app(api_key=KEYS)) as client:
        for body in bodies:
            first = work(client, "key-a", None, body)
            assert first[0]
            assert work(client, "key-a", None, body) == ([], first[1]), "its own is reused"
            assert work(client, "key-b", None, body) == first
            assert work(client, "key-a", "ann", body) == first
            assert work(client, "key-b", None, body) == ([], first[1])


def asked(client: TestClient, name: str, task: str, max_tokens: int = 8) -> None:
    body = {"messages": MESSAGES, "max_tokens": max_tokens, "task": task, "ignore_eos": True}
    assert client.post("/v1/chat/completions", json=body, headers=key(name)).status_code == 200


def test_the_dashboard_shows_a_key_its_own_tasks_and_answers(make_app: MakeApp) -> None:
    with TestClient(make_app(api_key=KEYS, dashboard_texts=True)) as client:
        asked(client, "key-a", "merger", 20)
        for _ in range(9):  # more than are kept of a key
            asked(client, "key-b", "sql")
        asked(client, "key-b", "")
        mine, theirs = (client.get("/dashboard/data", headers=key(name)).json() for name in KEYS)
        text = client.get("/metrics").text
    assert [answer["task"] for answer in mine["recent"]] == ["merger"]
    assert [answer["task"] for answer in theirs["recent"]] == ["", *["sql"] * 7]
    assert {task["task"]: task["num_tokens"] for task in mine["tasks"]} == {"merger": 20}
    assert {task["task"]: task["num_tokens"] for task in theirs["tasks"]} == {"none": 8, "sql": 72}
    assert mine["num_steps"] == theirs["num_steps"], "the engine is one for all"
    assert "merger" not in text
    assert not any(name in text or digest(name) in text for name in KEYS)


def test_equal_tasks_of_two_keys_are_learned_apart_and_shown_once() -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "probe_share": 0.02}
    llm = LLM(speculative_config=speculation, kv_cache_bytes=40 * 2**20, max_num_seqs=2)
    app = create_app(AsyncEngine(engine=llm.engine), ServeConfig(api_key=KEYS, task_labels=["sql"]), "pair")
    service: Service = app.state.service
    with TestClient(app) as client:
        for name in KEYS:
            asked(client, name, "sql", 20)
        client.get("/dashboard/data", headers=key("key-a"))
        report = service.observer.report
        assert report is not None
        told = [task.task for task in report.tasks if task.task.endswith("/sql")]
        assert set(told) == {f"{digest(name)}/sql" for name in KEYS}
        shown = counters(client)
    assert [v for n, v in shown.items() if "task_generation" in n and "sql" in n] == [40]
    assert sum("task_draft_depth" in n for n in shown) == 1


def test_a_given_plan_holds_for_the_tasks_of_every_key() -> None:
    speculation = {
        "method": "auto",
        "drafters": [{"method": "ngram", "num_speculative_tokens": 2}],
        "plan": [{"drafter": 0}, {"task": "plain"}],
        "probe_share": 0.0,
    }
    llm = LLM(speculative_config=speculation, kv_cache_bytes=40 * 2**20, max_num_seqs=2)
    app = create_app(AsyncEngine(engine=llm.engine), ServeConfig(api_key=KEYS), "pair")
    with TestClient(app) as client:

        def drafted(task: str) -> float:
            """Draft tokens so far, after an answer to a prompt that repeats itself."""
            body = {**ASK, "task": task}
            assert client.post("/v1/completions", json=body, headers=key("key-a")).status_code == 200
            return sum(value for name, value in counters(client).items() if "num_draft_tokens_total" in name)

        assert drafted("plain") == 0
        assert drafted("other") > 0


def test_alarms_of_a_task_are_for_its_key(make_app: MakeApp, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(api_key=KEYS)
    observer = app.state.service.observer
    name = f"{digest('key-a')}/merger"
    with TestClient(app) as client:
        observer.alarms.update(AlarmKind.TRUNCATION, name, None, "many were cut off", 0.9, "")
        observer.alarms.update(AlarmKind.TOKEN_MISMATCH, None, None, "counts differ", 1.0, "")
        which = {"kind": "truncation", "task": "merger", "drafter": None}

        def alarms(name: str, of: str = "alarms") -> list[tuple[str, str | None]]:
            told = client.get("/dashboard/data", headers=key(name)).json()[of]
            return [(alarm["kind"], alarm["task"]) for alarm in told]

        assert alarms("key-a") == [("truncation", "merger"), ("token_mismatch", None)]
        assert alarms("key-b") == [("token_mismatch", None)]
        for key_name, status in (("key-b", 404), ("key-a", 200)):
            answer = client.post("/dashboard/acknowledge", json=which, headers=key(key_name))
            assert answer.status_code == status
        assert alarms("key-a", "cleared") == [("truncation", "merger")]
        assert alarms("key-b", "cleared") == []
    raised = next(record for record in caplog.records if record.name == "slipstream.serve.alarms")
    fields = raised.fields  # type: ignore[attr-defined]
    assert (fields["task"], fields["account"]) == ("merger", digest("key-a"))
