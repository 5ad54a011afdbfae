"""What one tenant asked is of no use to another: the tenant is the API key, and within it the user."""

from __future__ import annotations

from typing import Any

import pytest
from serve_cases import MESSAGES, MakeApp
from starlette.testclient import TestClient

from slipstream import LLM

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


def test_drafters_are_told_the_key_first_and_never_the_key_itself(
    make_app: MakeApp, drafting: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That tenants share nothing is every drafter's duty, which the conformance kit demands."""
    told: list[str] = []
    add = drafting.engine.add_request

    def noting(*args: Any, **options: Any) -> None:
        told.append(options["tenant"])
        add(*args, **options)

    monkeypatch.setattr(drafting.engine, "add_request", noting)
    with TestClient(make_app(api_key=KEYS)) as client:
        for name in KEYS:
            for user in (None, "ann", "key-a"):
                body = {"messages": MESSAGES, "max_tokens": 1, "user": user}
                assert client.post("/v1/chat/completions", json=body, headers=key(name)).status_code == 200
    assert len(set(told)) == 6
    assert not any(tenant.startswith(name) for tenant in told for name in KEYS)
    assert [tenant.partition("/")[2] for tenant in told] == ["", "ann", "key-a"] * 2
