"""What `slipstream deploy` says and refuses before anything is started or changed, and how it says how things are."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.cli.main import app
from slipstream.config import SpeculativeConfig
from slipstream.deploy import cluster
from slipstream.deploy.room import shortage
from slipstream.deploy.settings import DeploySettings
from slipstream.deploy.standing import Standing, reason_in
from slipstream.errors import DeployError

NEVER = "the cluster was touched"


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores, and a cluster that must not be asked for anything."""

    def fail(*_: Any) -> None:
        raise AssertionError(NEVER)

    monkeypatch.setattr(cluster, "connect", fail)
    monkeypatch.setattr(cluster, "require_ray", lambda: None)
    monkeypatch.setattr("slipstream.cli.deploy.num_cpus", lambda: 2)


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["deploy", *args])


def printed(*args: str) -> dict[str, Any]:
    """The settings that `--print-config` shows."""
    result = run(*args, "--print-config")
    assert result.exit_code == 0, result.output
    [application] = yaml.safe_load(result.stdout)["applications"]
    return dict(application["args"])


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--replicas", "3"], "3 replicas of 1 core need 3 cores, and this machine has 2 cores: run 2"),
        (["--replicas", "2", "--cpus", "1.5"], "run 1 (--replicas 1), or give each less (as in --cpus 1)"),
        (["/nowhere/model"], "'/nowhere/model' is not a folder"),
        (["--spec", "draft:/nowhere/draft", "--replicas", "1"], "'/nowhere/draft' is not a folder"),
        (
            ["--quantization", "int3", "--replicas", "1"],
            "unknown quantization 'int3'; formats: bfloat16, float16",
        ),
    ],
)
def test_what_cannot_serve_is_a_line_before_anything_starts(args: list[str], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("\n") == 1


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize("more", [[], ["--print-config"], ["--address", "127.0.0.1:1"]])
@pytest.mark.parametrize(
    ("serve", "words"),
    [
        ({"learn": "learned"}, "serve learn is not supported with replicas"),
        ({"lern": "learned"}, "unknown serve key 'lern'; did you mean 'learn'?"),
    ],
)
def test_the_servers_settings_are_checked_before_a_cluster_is_asked(
    tmp_path: Path, serve: dict[str, Any], words: str, more: list[str]
) -> None:
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"model": "embedded", "num_replicas": 1, "serve": serve}))
    result = run("--config", str(file), *more)
    assert result.exit_code == 2
    assert words in result.output
    assert result.output.count("\n") == 1


@pytest.mark.usefixtures("no_cluster")
def test_a_port_that_is_taken_is_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--replicas", "1", "--port", str(port))
    assert result.exit_code == 2
    assert result.output == f"error: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_the_embedded_pair_is_named_and_speculates_as_it_is_served() -> None:
    settings = DeploySettings.from_mapping(printed())
    assert settings.model == "embedded"
    assert settings.served_name == "embedded-pair"
    assert settings.target is None
    served = SpeculativeConfig.from_mapping(settings.speculative_config or {})
    assert (served.method, served.options["model"]) == ("draft_model", EMBEDDED_DRAFT)
    assert EMBEDDED_DRAFT not in str(settings.as_json()), "another machine has it elsewhere"
    assert EMBEDDED_DRAFT not in str(printed("--spec", "auto"))
    assert printed("--spec", "off")["speculative_config"]["method"] == "off"
    head = DeploySettings.from_mapping(printed("--spec", "eagle3"))
    assert SpeculativeConfig.from_mapping(head.speculative_config or {}).options["model"] == EMBEDDED_EAGLE3
    steps = DeploySettings.from_mapping(printed("--reasoning-draft", "embedded"))
    assert EMBEDDED_DRAFT not in str(steps.as_json())
    writer = SpeculativeConfig.from_mapping(steps.speculative_config or {}).reasoning
    assert writer == {"name": "embedded", "model": EMBEDDED_DRAFT}


def test_another_model_does_not_speculate_unless_it_is_told_to(tmp_path: Path) -> None:
    assert "speculative_config" not in printed("some/model")
    file = tmp_path / "deploy.yaml"
    file.write_text("model: some/model\nnum_replicas: 3\n")
    settings = DeploySettings.from_mapping(printed("--config", str(file)))
    assert (settings.model, settings.num_replicas, settings.speculative_config) == ("some/model", 3, None)
    assert settings.served_name == "some/model"


def test_a_generation_is_what_replicas_load() -> None:
    one = DeploySettings(model="m")
    assert one.generation == DeploySettings(model="m", num_replicas=5, serve={"api_key": ["k"]}).generation
    others = [{"model": "n"}, {"engine": {"max_model_len": 9}}, {"speculative_config": {"method": "ngram"}}]
    assert (
        len({DeploySettings(**{"model": "m", **other}).generation for other in others} | {one.generation})
        == 4
    )


def test_what_is_missing_is_said_of_each_kind() -> None:
    settings = DeploySettings(model="m", num_replicas=4, num_cpus=2, num_gpus=1)
    assert shortage(settings, {"CPU": 8, "GPU": 4}, "the cluster") == ""
    assert shortage(settings, {"CPU": 8}, "the cluster") == "", "what is not known is not missing"
    assert shortage(settings, {"CPU": 8, "GPU": 1}, "the cluster") == (
        "4 replicas of 1 GPU need 4 GPUs, and the cluster has 1 GPU: run 1 (--replicas 1)"
    )
    assert "run them on a larger machine" in shortage(settings, {"CPU": 1}, "it")


def test_another_port_than_the_clusters_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "listens", lambda: ("127.0.0.1", 8000))
    cluster.check_address(None, None)
    cluster.check_address("127.0.0.1", 8000)
    for host, port in ((None, 9000), ("0.0.0.0", None)):
        with pytest.raises(DeployError, match=r"listens at 127\.0\.0\.1:8000 for all applications, not at"):
            cluster.check_address(host, port)
    monkeypatch.setattr(cluster, "listens", lambda: None)
    cluster.check_address("0.0.0.0", 9000)


FAILED = """The deployment failed to start 3 times in a row. This may be due to a problem with its constructor. Error:
ray::ServeReplica:slipstream:Replica.initialize_and_get_metadata() (pid=1, ip=10.0.0.1)
  File "replica.py", line 9, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "app.py", line 1, in __init__
slipstream.errors.CapacityError: 5 MiB hold too few tokens; set kv_cache_bytes to at least 9 MiB"""
WAITS = (
    "Deployment 'Replica' in application 'slipstream' has 1 replicas that have taken more than 30s to be scheduled. "
    "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
    "Resources required for each replica: {'CPU': 1.0}, total resources available: {'memory': 3.0}. Use `ray status`."
)


def test_a_standing_is_state_reason_and_address_in_our_words() -> None:
    reason = "5 MiB hold too few tokens; set kv_cache_bytes to at least 9 MiB"
    failed = Standing("mine", "DEPLOY_FAILED", "", {"Replica": ({"STARTING": 2, "RUNNING": 0}, FAILED)})
    assert failed.lines("http://h:1") == [
        f"mine has failed: {reason}",
        "  address: http://h:1",
        "  replicas: 2 starting",
    ]
    waiting = Standing(
        "mine",
        "DEPLOYING",
        "",
        {"Replica": ({"RUNNING": 1, "STARTING": 1}, WAITS), "Front": ({"RUNNING": 1}, "")},
    )
    assert waiting.lines("") == [
        "mine is starting, or being updated: a replica waits for 1 core; 0 cores of the cluster are free",
        "  replicas: 1 ready, 1 starting",
        "  HTTP fronts: 1 ready",
    ]
    serving = Standing("mine", "RUNNING", "", {"Replica": ({"RUNNING": 2}, "said before")})
    assert serving.lines("http://h:1")[0] == "mine serves"
    assert reason_in("") == ""
