"""The published OpenAPI document is true, and schemathesis finds no request that the server cannot answer.

    SLIPSTREAM_SCHEMATHESIS_CASES=2000 pytest tests/serve/test_serve_openapi.py

makes at least so many requests; unset it is about a hundred.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest
from serve_cases import DRAFT, MESSAGES, MODEL, running
from starlette.testclient import TestClient

from slipstream import LLM, AsyncEngine
from slipstream.serve.api.openapi import OPERATIONS
from slipstream.serve.api.responses.body import ResponseBody
from slipstream.serve.api.schema import ChatBody
from slipstream.serve.api.unsupported import IGNORED
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig

KEY = "test-key"
NUM_CASES = int(os.environ.get("SLIPSTREAM_SCHEMATHESIS_CASES", "100"))
REQUEST_TIMEOUT_S = 30
UNTRUE = "positive_data_acceptance"
"""Not checked: a schema cannot say what goes together, such as `max_tokens` and the length of the prompt."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    llm = LLM(speculative_config=DRAFT, kv_cache_bytes=40 * 2**20, max_num_seqs=4)
    config = ServeConfig(api_key=[KEY], max_output_tokens=16)
    with running(create_app(AsyncEngine(engine=llm.engine), config, MODEL)) as (address, _):
        yield address
    assert llm.engine.integrity() == []


@pytest.mark.long
@pytest.mark.timeout(180 + 2 * NUM_CASES)
def test_no_request_breaks_the_server(url: str, tmp_path: Path) -> None:
    """No 5xx, no hang, no answer that the document does not describe, and nothing that it forbids is let through."""
    phases = "fuzzing" if NUM_CASES <= 1000 else "coverage,fuzzing"
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
        *("-H", f"Authorization: Bearer {KEY}", "--phases", phases, "--exclude-checks", UNTRUE),
        *("--max-examples", str(max(1, NUM_CASES // 4)), "--seed", "1", "--no-shrink"),
        *("--request-timeout", str(REQUEST_TIMEOUT_S), "--continue-on-failure"),
    ]
    timeout_s = 120 + 2 * NUM_CASES
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s)
    print(run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert found is not None, run.stdout
    assert int(found[1]) >= NUM_CASES
    assert int(found[2]) >= 0.9 * int(found[1])


@pytest.fixture(scope="module")
def document(shared: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = shared.get("/openapi.json").json()
    return found


def test_every_route_is_described(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"] == OPERATIONS[f"{method.upper()} {path}"].summary
            assert {"200"} < set(operation["responses"]) or path in ("/version", "/metrics")
    found = {f"{method.upper()} {path}" for path, them in document["paths"].items() for method in them}
    assert set(OPERATIONS) == found


def test_references_lead_somewhere(document: dict[str, Any]) -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                *_, name = value["$ref"].split("/")
                assert value["$ref"] == f"#/components/schemas/{name}"
                assert name in document["components"]["schemas"]
            for inner in value.values():
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)

    check(document)


def test_every_parameter_is_described(document: dict[str, Any]) -> None:
    properties = document["components"]["schemas"]["ChatBody"]["properties"]
    assert set(properties) == set(ChatBody.model_fields) | IGNORED
    assert properties["top_p"]["maximum"] == 1
    properties = document["components"]["schemas"]["ResponseBody"]["properties"]
    assert set(properties) == set(ResponseBody.model_fields) | ResponseBody.ignored


def test_answers_are_as_described(shared: TestClient, document: dict[str, Any]) -> None:
    asked = {
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3, "logprobs": True},
        "/v1/completions": {"prompt": "Once", "max_tokens": 3, "logprobs": 1},
        "/v1/responses": {"input": "Once", "max_output_tokens": 3, "top_logprobs": 1},
        "/tokenize": {"prompt": "Once"},
        "/detokenize": {"tokens": [300]},
    }
    schemas = {"components": document["components"]}
    stored = shared.post("/v1/responses", json=asked["/v1/responses"]).json()["id"]
    every = [(path, *one) for path, methods in document["paths"].items() for one in methods.items()]
    for path, method, operation in every:
        named = path.replace("{model}", MODEL).replace("{response_id}", stored)
        if "multipart/form-data" in operation.get("requestBody", {}).get("content", ()):
            assert shared.request(method, named, files={"file": b"1"}).status_code == 400, "it hears nothing"
            continue
        response = shared.request(method, named, json=asked.get(path))
        assert response.status_code in (200, 204), path
        if path != "/metrics":
            schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), schema | schemas)
        if path in asked:
            refused = shared.request(method, path, json={"nothing": 1})
            assert refused.status_code == 400, path
            schema = operation["responses"]["400"]["content"]["application/json"]["schema"]
            jsonschema.validate(refused.json(), schema | schemas)


def test_keys_are_described_where_there_are_any(url: str, document: dict[str, Any]) -> None:
    guarded = httpx2.get(f"{url}/openapi.json").json()
    for path, methods in guarded["paths"].items():
        needs = httpx2.request("POST", f"{url}{path}").status_code == 401
        for operation in methods.values():
            assert ("security" in operation) is needs
            assert ("401" in operation["responses"]) is needs
    assert guarded["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert "security" not in str(document)
