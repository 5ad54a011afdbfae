"""The router's own code in front of a thousand simulated replicas, with a million requests.

    python -m benchmarks.deploy.simulation [--quick]

Replicas are simulated: each steps up to 16 answers at once, computes what of a prompt it does not hold, and makes
tokens slower the more answers it has. Requests are turns of conversations of several tenants, of which each has system
prompts of its own. Replicas die, hang and drain all the while, and a tenth of them dies at one moment. What is real is
every decision. Writes docs/benchmarks/deploy_simulation.json and .svg.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.deploy.page import FOLDER, draw, write_page
from benchmarks.harness.command import command
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.rounds import tail
from slipstream.deploy.config import RouterConfig
from slipstream.deploy.fingerprint import Fingerprint
from slipstream.deploy.fleet import Health, ReplicaInfo, ReplicaReport
from slipstream.deploy.orders import Cancel, Order, Start
from slipstream.deploy.prefixes import FleetPrefixes
from slipstream.deploy.router import Router
from slipstream.deploy.work import Work
from slipstream.errors import OverloadedError

PRINT = Fingerprint("model", "bits")
BLOCK_TOKENS = 32
PREFILL_S = 0.0004
"""A prompt token."""
TOKEN_S = 0.02
"""A token of an answer that runs alone; with a full house half as long again."""
BEAT_S = 1.0
WARM_S = 5.0
"""The house is filling up until then, and the balance of few answers is not looked at."""


@dataclass(frozen=True)
class World:
    """One simulated run."""

    num_replicas: int = 1000
    num_requests: int = 1_000_000
    utilisation: float = 0.75
    max_imbalance: float = 0.25
    capacity: int = 16
    num_slots: int = 131_072
    num_tenants: int = 400
    kills: int = 400
    hangs: int = 200
    drains: int = 200
    outage: bool = True
    affine: bool = True
    seed: int = 1


@dataclass(slots=True)
class Run:
    """A request at a simulated replica."""

    attempt: int
    replica: str
    started_s: float
    first_s: float
    token_s: float
    left: int
    """Tokens to make."""

    def made_by(self, now_s: float) -> int:
        return (
            max(0, min(self.left, int((now_s - self.first_s) / self.token_s) + 1))
            if now_s >= self.first_s
            else 0
        )


@dataclass(slots=True)
class Told:
    """What became of all requests."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    wrong_length: int = 0
    waits_s: list[float] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)


class Simulation:
    """Virtual time; the router's methods are called as the relay calls them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.seed)
        self.router = Router(
            RouterConfig(
                max_waiting=200_000,
                max_imbalance=world.max_imbalance,
                hang_timeout_s=5.0,
                block_tokens=BLOCK_TOKENS,
            )
        )
        self.big = FleetPrefixes()
        self.big.add_replica("big", world.num_replicas * world.num_slots // BLOCK_TOKENS)
        self.events: list[tuple[float, int, str, Any]] = []
        self.number = 0
        self.now_s = 0.0
        self.runs: dict[str, Run] = {}
        self.wanted: dict[str, int] = {}
        self.passed: Counter[str] = Counter()
        self.arrived: dict[str, float] = {}
        self.paused: dict[str, float] = {}
        self.deaf: set[str] = set()
        self.names: list[str] = []
        self.told = Told()
        self.big_blocks = self.found_blocks = self.all_blocks = 0
        self.imbalances: list[tuple[float, float]] = []
        self.decide_s = 0.0
        self.submit_s: list[float] = []
        self.num_arrived = 0
        self.conversations: list[list[Any]] = []
        self.incarnation = Counter[str]()

    def run(self) -> dict[str, Any]:
        """All of it; what came out."""
        world = self.world
        for number in range(world.num_replicas):
            self._join(f"r{number}")
        mean_s = 0.9 + 100 * TOKEN_S * 1.4
        rate = world.utilisation * world.num_replicas * world.capacity / mean_s
        span_s = world.num_requests / rate
        self._at(0.0, "arrive", rate)
        self._at(0.0, "tick", None)
        self._at(0.0, "beat", None)
        for kind, number in (("kill", world.kills), ("hang", world.hangs), ("drain", world.drains)):
            for _ in range(number):
                self._at(self.rng.uniform(0.05, 0.9) * span_s, kind, None)
        if world.outage:
            self._at(0.5 * span_s, "outage", None)
        started_s = time.perf_counter()
        while self.events and (self.num_arrived < world.num_requests or self.router.num_under_way):
            self.now_s, _, kind, what = heapq.heappop(self.events)
            getattr(self, f"_{kind}")(what)
            if self.num_arrived % 100_000 == 0 and kind == "arrive":
                say(f"  {self.num_arrived:,} requests, {time.perf_counter() - started_s:.0f} s")
        return self._result(time.perf_counter() - started_s)

    # --- events -----------------------------------------------------------------------------------------------

    def _at(self, at_s: float, kind: str, what: Any) -> None:
        self.number += 1
        heapq.heappush(self.events, (at_s, self.number, kind, what))

    def _arrive(self, rate: float) -> None:
        if self.num_arrived >= self.world.num_requests:
            return
        work = self._next_work()
        self.num_arrived += 1
        self.big_blocks += self.big.num_known("big", work.blocks)
        self.all_blocks += len(work.blocks)
        self.big.use("big", work.blocks)
        self.arrived[work.id] = self.now_s
        before_s = time.perf_counter()
        try:
            orders = self.router.submit(work, self.now_s)
        except OverloadedError:
            self.told.refused += 1
            del self.arrived[work.id]
            orders = []
        self.submit_s.append(time.perf_counter() - before_s)
        self._obey(orders)
        self._at(self.now_s + self.rng.expovariate(rate), "arrive", rate)

    def _next_work(self) -> Work:
        """The next turn of a conversation, or the first of a new one."""
        rng = self.rng
        name = str(self.num_arrived)
        if self.conversations and rng.random() < 0.75:
            conversation = self.conversations[rng.randrange(len(self.conversations))]
        else:
            tenant = int(rng.paretovariate(1.1)) % self.world.num_tenants
            prompt = rng.randrange(3)
            blocks = [hash((tenant, prompt, number)) for number in range(8 + 8 * prompt)]
            conversation = [f"t{tenant}", blocks, 0]
            if len(self.conversations) < 20_000:
                self.conversations.append(conversation)
            else:
                self.conversations[rng.randrange(20_000)] = conversation
        tenant_name, blocks, turn = conversation
        for number in range(rng.randint(2, 10)):
            blocks.append(hash((name, number)))
        conversation[2] = turn + 1
        if len(blocks) > 128:
            del blocks[24:]
        self.wanted[name] = 1 + int(rng.expovariate(1 / 99))
        shown = tuple(blocks) if self.world.affine else ()
        self.shown = tuple(blocks)
        return Work(
            name, shown, tenant_name, num_prompt_tokens=BLOCK_TOKENS * len(blocks), account=tenant_name
        )

    def _finish(self, what: tuple[str, int]) -> None:
        request, attempt = what
        run = self.runs.get(request)
        if run is None or run.attempt != attempt or run.replica in self.deaf:
            return
        self._progress(request, run)
        del self.runs[request]
        if self.router.ticket(request) is None:
            return
        self.told.answered += 1
        self.told.wrong_length += self.passed[request] != self.wanted[request]
        before_s = time.perf_counter()
        orders = self.router.finish(request, self.now_s)
        self.decide_s += time.perf_counter() - before_s
        self._forget(request)
        self._obey(orders)

    def _first(self, what: tuple[str, int]) -> None:
        request, attempt = what
        run = self.runs.get(request)
        if run is None or run.attempt != attempt or run.replica in self.deaf:
            return
        self._progress(request, run)
        if request in self.paused:
            self.told.pauses_s.append(self.now_s - self.paused.pop(request))

    def _progress(self, request: str, run: Run) -> None:
        """Pass on what the replica has made until now."""
        made = run.made_by(self.now_s)
        if made and self.router.passed_on(request, run.attempt, made, self.now_s):
            self.passed[request] += made
            run.left -= made
            run.first_s = run.first_s + made * run.token_s

    def _tick(self, _: Any) -> None:
        before_s = time.perf_counter()
        orders = self.router.tick(self.now_s)
        self.decide_s += time.perf_counter() - before_s
        self._obey(orders)
        loads = [state.load for state in self.router.fleet if state.health is Health.READY]
        if sum(loads) and self.num_arrived < self.world.num_requests and self.now_s > WARM_S:
            mean = sum(loads) / len(loads)
            self.imbalances.append((max(loads) / mean, float(np.std(loads)) / mean))
        self._at(self.now_s + 0.5, "tick", None)

    def _beat(self, _: Any) -> None:
        for name in self.names:
            if name not in self.deaf:
                self._obey(self.router.hear(name, ReplicaReport(), self.now_s))
        self._at(self.now_s + BEAT_S, "beat", None)

    def _kill(self, _: Any) -> None:
        name = self.names[self.rng.randrange(len(self.names))]
        self._die(name)
        self._at(self.now_s + 20.0, "back", name)

    def _outage(self, _: Any) -> None:
        for name in self.rng.sample(self.names, len(self.names) // 10):
            self._die(name)
            self._at(self.now_s + 30.0, "back", name)

    def _die(self, name: str) -> None:
        """Its last tokens were passed on; what it would have made now is lost."""
        for request, run in self._runs_of(name):
            self._progress(request, run)
            self.paused[request] = self.now_s
            del self.runs[request]
        self.deaf.discard(name)
        self._obey(self.router.leave(name, self.now_s))

    def _runs_of(self, name: str) -> list[tuple[str, Run]]:
        state = self.router.fleet.get(name)
        held = list(state.requests) if state is not None else []
        return [(request, self.runs[request]) for request in held if request in self.runs]

    def _hang(self, _: Any) -> None:
        name = self.names[self.rng.randrange(len(self.names))]
        for request, run in self._runs_of(name):
            self._progress(request, run)
            self.paused[request] = self.now_s
        self.deaf.add(name)
        self._at(self.now_s + self.rng.uniform(2.0, 20.0), "wake", name)

    def _wake(self, name: str) -> None:
        if name not in self.deaf:
            return
        self.deaf.discard(name)
        for request, run in list(self._runs_of(name)):
            if run.replica == name:
                self._at(
                    self.now_s,
                    "finish" if run.left <= run.made_by(self.now_s) else "late",
                    (request, run.attempt),
                )
        self._obey(self.router.hear(name, ReplicaReport(), self.now_s))

    def _late(self, what: tuple[str, int]) -> None:
        request, attempt = what
        run = self.runs.get(request)
        if run is not None and run.attempt == attempt:
            self._first(what)
            self._at(max(self.now_s, run.first_s + run.left * run.token_s), "finish", what)

    def _drain(self, _: Any) -> None:
        name = self.names[self.rng.randrange(len(self.names))]
        self._obey(self.router.drain(name, self.now_s))
        self._at(self.now_s + 10.0, "gone", name)

    def _gone(self, name: str) -> None:
        state = self.router.fleet.get(name)
        if state is not None and state.health is Health.DRAINING:
            self._die(name)
            self._at(self.now_s + 10.0, "back", name)

    def _back(self, name: str) -> None:
        if name not in self.router.fleet:
            self._join(name)

    # --- orders -----------------------------------------------------------------------------------------------

    def _join(self, name: str) -> None:
        world = self.world
        if name not in self.names:
            self.names.append(name)
        self._obey(self.router.join(ReplicaInfo(name, PRINT, world.capacity, world.num_slots), self.now_s))

    def _obey(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Start):
                self._start(order)
            elif isinstance(order, Cancel):
                run = self.runs.get(order.request)
                if run is not None and run.attempt == order.attempt:
                    self.paused[order.request] = self.now_s
                    del self.runs[order.request]
            else:
                self.told.failed += 1
                self._forget(order.request)

    def _start(self, order: Start) -> None:
        request, router = order.request, self.router
        ticket = router.ticket(request)
        assert ticket is not None
        state = router.fleet[order.replica]
        if order.attempt == 1:
            self.told.waits_s.append(self.now_s - self.arrived[request])
        known = self._known(ticket.work, order)
        uncached = (len(ticket.work.blocks) - known) * BLOCK_TOKENS + self.passed[request]
        token_s = TOKEN_S * (1 + 0.5 * state.load / state.info.capacity)
        first_s = self.now_s + uncached * PREFILL_S + token_s
        left = self.wanted[request] - self.passed[request]
        self.runs[request] = Run(order.attempt, order.replica, self.now_s, first_s, token_s, left)
        what = (request, order.attempt)
        self._at(first_s, "first", what)
        self._at(first_s + (left - 1) * token_s + 1e-9, "finish", what)

    def _known(self, work: Work, order: Start) -> int:
        """Blocks that the replica held before: the router's counter has just been added to."""
        counts = self.router.counts
        found = counts.known_blocks - self.found_blocks
        self.found_blocks = counts.known_blocks
        return max(0, min(found, len(work.blocks)))

    def _forget(self, request: str) -> None:
        for held in (self.wanted, self.arrived, self.paused):
            held.pop(request, None)
        self.passed.pop(request, None)

    def _result(self, wall_s: float) -> dict[str, Any]:
        told, counts = self.told, self.router.counts
        waits = np.array(told.waits_s or [0.0])
        peaks, spreads = zip(*self.imbalances, strict=True)
        lost = self.num_arrived - told.answered - told.refused - told.failed
        return {
            "world": asdict(self.world),
            "virtual_s": self.now_s,
            "wall_s": wall_s,
            "requests": self.num_arrived,
            "answered": told.answered,
            "refused": told.refused,
            "failed": told.failed,
            "lost": lost,
            "wrong_length": told.wrong_length,
            "moved": counts.moved,
            "lost_replicas": counts.lost_replicas,
            "silent_replicas": counts.silent_replicas,
            "drained_replicas": counts.drained_replicas,
            "share_of_one_cache": counts.known_blocks / self.big_blocks if self.big_blocks else 0.0,
            "hit_share": counts.known_blocks / max(counts.prompt_blocks, 1),
            "one_cache_hit_share": self.big_blocks / max(self.all_blocks, 1),
            "load_max_over_mean": tail(peaks),
            "load_std_over_mean": tail(spreads),
            "wait_s": {
                "mean": float(waits.mean()),
                "p99": float(np.quantile(waits, 0.99)),
                "max": float(waits.max()),
            },
            "pause_s": tail(told.pauses_s or [0.0]),
            "submit_us": tail(self.submit_s, 1e6),
            "faults": self.router.integrity(),
        }


def simulate(world: World) -> dict[str, Any]:
    """One run."""
    return Simulation(world).run()


def main() -> None:
    """The million, then the sweep."""
    parser = command(__doc__, FOLDER / "deploy_simulation.json")
    parser.add_argument(
        "--quick", action="store_true", help="a fiftieth of it, to try the code; nothing is kept"
    )
    options = parser.parse_args()
    worlds = {"million": World()}
    small = World(num_replicas=100, num_requests=60_000, kills=20, hangs=10, drains=10, outage=False)
    for imbalance in (0.0, 0.125, 0.25, 0.5):
        for utilisation in (0.3, 0.5, 0.7, 0.85, 0.95):
            name = f"sweep {imbalance:g} {utilisation:g}"
            worlds[name] = replace(small, max_imbalance=imbalance, utilisation=utilisation)
    worlds["without affinity"] = replace(small, affine=False)
    if options.quick:
        quick = World(num_replicas=50, num_requests=20_000, kills=20, hangs=10, drains=10)
        print(json.dumps(Simulation(quick).run(), indent=1))
        return
    kept = Kept(options.output, {name: asdict(world) for name, world in worlds.items()})
    cells = {name: kept.cell(name, partial(simulate, world)) for name, world in worlds.items()}
    kept.finish({"cells": cells}, draw=lambda written, file: draw(written["cells"], file))
    if options.output.parent == FOLDER:
        write_page()
    say(f"the million: {json.dumps({k: v for k, v in cells['million'].items() if k != 'world'}, indent=1)}")


if __name__ == "__main__":
    main()
