"""A Ray cluster of this machine: one replica becomes two by load and one again, then a changed configuration is rolled
out; streams run all the while, and each must be what one engine alone says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest

pytest.importorskip("ray.serve", reason="Ray is an extra: pip install 'slipstream-llm[deploy]'")

from test_ray import free_port

from slipstream.deploy import cluster
from slipstream.deploy.settings import DeploySettings
from tests.kit.own_process import in_own_process

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

SEATS, MORE_SEATS = 4, 6
SETTINGS = DeploySettings(
    model="embedded",
    engine={"kv_cache_bytes": 64 * 2**20, "num_threads": 1, "max_num_seqs": SEATS},
    num_replicas=1,
    max_replicas=2,
    target_load=0.5,
    upscale_delay_s=2.0,
    downscale_delay_s=3.0,
    drain_s=30.0,
)
NUM_CASES = 6
WAIT_S = 600.0


class Streams:
    """Streams from so many threads, one after another in each, until they are told to stop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.num_equal = 0
        self.faults: list[str] = []
        self.alone: list[str] = []
        self._lock = threading.Lock()
        self._stops: list[tuple[threading.Event, threading.Thread]] = []

    def text(self, case: int) -> str:
        """A stream's text; raises where it breaks off or says an error."""
        asked = {
            "prompt": f"Number {case}: the sea",
            "max_tokens": 700,
            "ignore_eos": True,
            "seed": case,
            "temperature": 0.8 if case % 2 else 0.0,
            "stream": True,
        }
        text, ended = "", False
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=600) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {answer.read()[:200]!r}")
            for line in answer.iter_lines():
                ended = ended or line == "data: [DONE]"
                if line.startswith("data: {"):
                    said = json.loads(line.removeprefix("data: "))
                    if "error" in said:
                        raise RuntimeError(str(said["error"]))
                    text += "".join(choice["text"] for choice in said["choices"])
        if not ended:
            raise RuntimeError("the stream broke off")
        return text

    def start(self, number: int) -> None:
        """So many more threads."""
        for _ in range(number):
            stop = threading.Event()
            thread = threading.Thread(target=self._run, args=(len(self._stops), stop))
            self._stops.append((stop, thread))
            thread.start()

    def stop(self, number: int) -> None:
        """So many fewer; returns when their streams have ended."""
        ending, self._stops = self._stops[:number], self._stops[number:]
        for stop, _ in ending:
            stop.set()
        for _, thread in ending:
            thread.join()

    def stop_all(self) -> None:
        self.stop(len(self._stops))

    def _run(self, case: int, stop: threading.Event) -> None:
        while not stop.is_set():
            case = (case + 1) % NUM_CASES
            try:
                text = self.text(case)
                fault = "" if text == self.alone[case] else f"case {case} differs"
            except Exception as error:
                fault = f"case {case}: {type(error).__name__}: {error}"
            with self._lock:
                self.num_equal += not fault
                if fault:
                    self.faults.append(fault)
                    return


def ready(url: str) -> list[dict[str, Any]]:
    """The replicas that take requests; none while no front answers."""
    try:
        states: list[dict[str, Any]] = httpx2.get(f"{url}/replicas/data", timeout=60).json()["replicas"]
    except (httpx2.HTTPError, ValueError, KeyError):
        return []
    return [state for state in states if state["health"] == "ready"]


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.25)


@in_own_process
def test_replicas_come_and_go_with_the_load_and_are_updated_under_streams() -> None:
    port = free_port()
    streams = Streams(f"http://127.0.0.1:{port}")
    cluster.connect(None, num_cpus=4)
    try:
        assert cluster.run(SETTINGS, "scaled", "127.0.0.1", port) == streams.url
        streams.alone = [streams.text(case) for case in range(NUM_CASES)]
        assert len(ready(streams.url)) == 1

        streams.start(2 * SEATS)
        until(lambda: len(ready(streams.url)) == 2, "no second replica came")
        streams.stop(2 * SEATS - 1)
        until(lambda: len(ready(streams.url)) == 1, "the second replica did not go")
        assert cluster.standing("scaled").state == "RUNNING"

        streams.start(2)
        engine = {**SETTINGS.engine, "max_num_seqs": MORE_SEATS}
        cluster.run(replace(SETTINGS, num_replicas=2, min_replicas=2, engine=engine), "scaled")
        until(
            lambda: [state["capacity"] for state in ready(streams.url)] == [MORE_SEATS] * 2,
            "the replicas are not those of the changed settings",
        )
        before = streams.num_equal
        until(lambda: streams.num_equal > before + 2 or bool(streams.faults), "no stream ends any more")
        streams.stop_all()
        assert streams.faults == []
        assert streams.num_equal > 2 * SEATS
        cluster.stop("scaled")
    finally:
        streams.stop_all()
        cluster.shut_down()
