"""A Ray cluster of this machine with two replicas: deployed, killed under way, asked how it is, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("ray.serve", reason="Ray is an extra: pip install 'slipstream-llm[deploy]'")

import ray

from slipstream.assets import EMBEDDED_TARGET
from slipstream.deploy import cluster
from slipstream.deploy.settings import DeploySettings
from slipstream.errors import DeployError
from tests.kit.own_process import in_own_process

ASKED = {"prompt": "The sea", "max_tokens": 1200, "seed": 3, "temperature": 0.8, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def standing_again(seconds: float = 600.0) -> list[str]:
    """What is said of the application once Ray has replaced what was killed; the last that was said, if it never is."""
    end = time.monotonic() + seconds
    while True:
        said = cluster.standing("tested").lines(cluster.address())
        if said[0] == "tested serves" or time.monotonic() > end:
            return said
        time.sleep(0.5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@in_own_process
def test_two_replicas_one_of_which_is_killed_under_way() -> None:
    settings = DeploySettings(
        model=EMBEDDED_TARGET,
        num_replicas=2,
        engine={"kv_cache_bytes": 64 * 2**20, "num_threads": 1},
        serve={"served_model_name": "pair", "request_timeout_s": 600.0},
        drain_s=5.0,
    )
    url = f"http://127.0.0.1:{free_port()}"
    cluster.connect(None, num_cpus=4)
    try:
        cluster.run(settings, "tested", "127.0.0.1", int(url.rpartition(":")[2]))
        with httpx2.Client(base_url=url, timeout=600) as client:
            lone = client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"]
            killed: list[int] = []

            def kill_the_busy() -> None:
                while not killed:
                    states: list[dict[str, Any]] = httpx2.get(f"{url}/replicas/data").json()["replicas"]
                    for state in states:
                        if state["load"] and not killed:
                            killed.append(state["process"])
                            os.kill(state["process"], signal.SIGKILL)

            killer = threading.Thread(target=kill_the_busy)
            text, errors = "", []
            with client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as answer:
                killer.start()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        said = json.loads(line.removeprefix("data: "))
                        errors += [said["error"]] if "error" in said else []
                        text += "" if "error" in said else said["choices"][0]["text"]
            killer.join()
            assert errors == []
            assert text == lone
            assert client.get("/replicas/data").json()["counts"]["moved"] >= 1
            assert "slipstream_fleet_replica_up" in client.get("/metrics").text
        said = standing_again()
        assert said[:2] == ["tested serves", f"  address: {url}"]
        assert "  HTTP fronts: 1 ready" in said
        with pytest.raises(DeployError, match=r"listens at 127\.0\.0\.1:\d+ for all applications"):
            cluster.check_address(None, 1)
        with pytest.raises(
            DeployError, match="nothing was changed on the cluster: '/nowhere' is not a folder"
        ):
            cluster.check(DeploySettings(model="/nowhere"))
        with pytest.raises(DeployError, match="no application 'another'"):
            cluster.stop("another")
        cluster.stop("tested")
    finally:
        cluster.shut_down()


def test_a_cluster_that_is_not_there_is_a_line() -> None:
    with pytest.raises(DeployError, match="no Ray cluster answers at") as error:
        cluster.connect(f"127.0.0.1:{free_port()}")
    assert "\n" not in str(error.value)
    assert "ray start --head" in str(error.value)


def test_workers_of_a_cluster_import_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray adds it to the job's folders while it connects, which is asked for here without a cluster."""
    given: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    cluster.connect(None)
    given["job_config"]._py_driver_sys_path.extend([str(tmp_path)])
    assert list(given["job_config"]._get_proto_job_config().py_driver_sys_path) == []
