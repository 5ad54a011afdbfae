"""LearningServer and learner are killed at random instants, again and again, over one folder."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.harness.kept import say
from benchmarks.learn_serving.drafts import add_version, make_base
from benchmarks.learn_serving.server import LearningServer, ServerOptions
from benchmarks.learn_serving.traffic import Answered, answer, answer_all, asked, open_client
from slipstream.learn.background.learner_process import MAX_STARTS
from slipstream.learn.decisions import by_hand
from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import read_ring, ring_identity
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.store import NUM_KEPT, VersionStore

WORKER = {"min_records": 1, "num_steps": 6, "max_records": 48, "poll_s": 0.05, "niceness": 0}
"""A learner that makes a version every few seconds."""
LEARN_BYTES = 2**20
NUM_ASKED = 48
"""Different requests, of which the answers without speculation are known."""
MAX_WAIT_S = 3.0


class Crashes:
    """The folder, what was seen in it, and what was wrong."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place = place
        self.folder = LearnFolder(place / "home/learn")
        self.options = ServerOptions(
            make_base(place / "base"), str(self.folder.path), LEARN_BYTES, worker=WORKER
        )
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.last_record = -1
        self.versions: set[str] = set()
        """All that were ever seen whole."""
        with LearningServer(ServerOptions(""), place / "off") as server:
            found = asyncio.run(_ask(server, range(NUM_ASKED)))
        self.expected = {one.asked.number: one.token_ids for one in found}

    def run(self, number: int) -> None:
        """Kill `number` times."""
        server: LearningServer | None = None
        deaths = 0
        try:
            for instant in range(number):
                if server is None:
                    server, deaths = self._start(), 0
                    if server is None:  # killed while it started
                        self.check(f"instant {instant}")
                        continue
                target = (
                    "server" if deaths >= MAX_STARTS - 2 else self.rng.choice(["server", "learner", "both"])
                )
                with Traffic(server, self):
                    self._one(server, target, instant)
                if target == "learner":
                    deaths += 1
                else:
                    server = None
                self.check(f"instant {instant}, {target}")
                if (instant + 1) % 10 == 0:
                    say(f"  {instant + 1} of {number}: {dict(self.counts)}, {len(self.faults)} faults")
            if server is not None:
                server.stop()
            with LearningServer(self.options, self.place / "home") as last:
                self._compare(asyncio.run(_ask(last, range(NUM_ASKED))))
        finally:
            if server is not None and server.process.poll() is None:
                server.kill()

    def _start(self) -> LearningServer | None:
        """A server that serves, or None where it was killed while it started: one of eight."""
        server = LearningServer(self.options, self.place / "home")
        if self.rng.random() < 1 / 8:
            time.sleep(self.rng.uniform(0.0, 6.0))
            server.kill()
            self.counts["killed at start"] += 1
            return None
        server.wait()
        self._compare(asyncio.run(_ask(server, self.rng.sample(range(NUM_ASKED), 3))))
        self.counts["restarts that served"] += 1
        return server

    def _one(self, server: LearningServer, target: str, instant: int) -> None:
        """Wait for a random instant, look at what is there, and kill."""
        deadline_s = time.monotonic() + self.rng.uniform(0.05, MAX_WAIT_S)
        learner = server.wait_for_learner() if target != "server" else None
        if instant % 4 == 0 and (identity := ring_identity(self.folder)) is not None:
            by_hand.promote(self.folder, add_version(self.folder, identity, self.options.base, 0.0, instant))
            self.counts["promoted by hand"] += 1
        self._look()
        time.sleep(max(deadline_s - time.monotonic(), 0.0))
        if learner is not None:
            learner.kill()
        if target != "learner":
            server.kill()
        self.counts[f"killed {target}"] += 1
        if target == "learner":
            assert learner is not None
            server.wait_for_learner(other_than=learner.pid)
            self._compare(asyncio.run(_ask(server, self.rng.sample(range(NUM_ASKED), 3))))

    def _look(self) -> None:
        """Take note of what a reader sees: it must outlive what comes."""
        self.versions |= {one.id for one in VersionStore(self.folder).all()}
        self.last_record = max([self.last_record, *(one.number for one in read_ring(self.folder))])

    def _compare(self, found: list[Answered]) -> None:
        for one in found:
            self.compare(one)

    def compare(self, one: Answered) -> None:
        """An answer must be the one without speculation."""
        self.counts["answers"] += 1
        if one.token_ids != self.expected[one.asked.number]:
            self.faults.append(
                f"the answer to {one.asked.number} differs, drafted by {one.version or 'base'}"
            )

    def check(self, when: str) -> None:
        """All that was seen before is there, whole, as far as the bounds keep it."""
        numbers = [one.number for one in read_ring(self.folder)]
        if numbers != list(range(numbers[0], numbers[-1] + 1)) if numbers else False:
            self.faults.append(f"{when}: records are missing within the ring")
        if self.last_record >= 0 and (not numbers or numbers[-1] < self.last_record):
            self.faults.append(f"{when}: record {self.last_record} is gone")
        store = VersionStore(self.folder)
        faults = store.faults()
        there = {one.id for one in store.all()} | set(store.unreadable())
        # A learner that was started again may have removed an old version meanwhile.
        self.faults += [f"{when}: {fault}" for name, fault in faults.items() if name in there]
        for version in self.versions - there:
            if sum(one > version for one in there) < NUM_KEPT:
                self.faults.append(f"{when}: version {version} is gone")
        self.versions |= there
        scope = StateStore(self.folder).read().scope()
        for name in (scope.serving, scope.canary):
            if name:
                store.load(name)
        EventLog(self.folder).read()
        self.counts["checks"] += 1
        self._look()


class Traffic:
    """Requests from a thread of its own until the server is gone or the context ends."""

    def __init__(self, server: LearningServer, crashes: Crashes) -> None:
        self._server, self._crashes = server, crashes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    async def _run(self) -> None:
        rng = random.Random(self._server.port)

        async def work(client: httpx2.AsyncClient) -> None:
            while not self._ended.is_set():
                self._crashes.compare(await answer(client, asked(rng.randrange(NUM_ASKED))))

        try:
            async with open_client(self._server.url) as client, asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(work(client))
        except* httpx2.HTTPError:  # it was killed
            self._crashes.counts["connections lost"] += 1
        except* RuntimeError as errors:
            self._crashes.faults += map(str, errors.exceptions)


async def _ask(server: LearningServer, numbers: Any) -> list[Answered]:
    found: list[Answered] = []
    async with open_client(server.url) as client:
        await answer_all(client, map(asked, numbers), 4, found.append)
    return found


def kills(place: Path, number: int, seed: int) -> dict[str, Any]:
    """The whole part."""
    crashes = Crashes(place, seed)
    crashes.run(number)
    events = Counter(str(event["event"]) for event in EventLog(crashes.folder).read())
    return {
        "instants": number,
        "seed": seed,
        "counts": dict(crashes.counts),
        "records": crashes.last_record + 1,
        "versions": len(crashes.versions),
        "events": dict(events),
        "faults": crashes.faults,
    }
