"""`slipstream load` on a real server of the embedded pair."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serve_cases import MODEL, MakeApp, running
from typer.testing import CliRunner

from slipstream.cli.main import app


@pytest.mark.parametrize(
    "how", [["--concurrency", "3"], ["--rate", "40", "--no-stream"]], ids=["closed", "open"]
)
def test_clients_and_server_count_the_same(make_app: MakeApp, how: list[str]) -> None:
    with running(make_app(per_request_metrics=True)) as (url, _):
        args = [
            "load",
            url,
            *how,
            "--num-requests",
            "9",
            "--max-tokens",
            "6",
            "--task",
            "sql",
            "--task",
            "code",
        ]
        done = CliRunner().invoke(app, [*args, "--send-task", "--json"])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    overall, *by_task = result["figures"]
    assert result["model"] == MODEL
    assert result["statuses"] == {"200": 9}
    assert overall["num_failed"] == 0
    assert overall["disagreements"] == []
    assert overall["server"]["num_output_tokens"] == overall["num_output_tokens"] > 9
    assert [(figures["task"], figures["num_requests"]) for figures in by_task] == [("sql", 5), ("code", 4)]
    counted, told = overall["server"]["acceptance"], result["acceptance"]["all"]
    for key in ("num_steps", "num_draft_tokens", "num_accepted_tokens", "rate", "length"):
        assert counted[key] == pytest.approx(told[key]), key
    assert set(result["acceptance"]) == {"all", "sql", "code"}
