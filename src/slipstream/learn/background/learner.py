"""The learner's process: reads the ring, trains a candidate, holds it against what serves, keeps it where it is faster.

It is started by `learner_process`: one JSON object is its argument, and the two speak by `messages`. The server stops
it at any instant and lets it go on (`pace`). It ends with the server that started it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slipstream.core.bounded import BoundedDict
from slipstream.errors import LearnError, SlipstreamError
from slipstream.learn.background.messages import CODEC, DraftingCosts, LearnEvent, LeaveToKeep
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.selection import judging_parts, training_parts
from slipstream.learn.records.served import Purpose, ServedRecord
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import read_ring
from slipstream.learn.storage.state import LearnState, StateStore
from slipstream.learn.versions.scope import LearnBy, Scope
from slipstream.learn.versions.store import DataWindow, Version, VersionStore
from slipstream.rpc.bound_program import end_with_parent
from slipstream.rpc.children import parent_socket
from slipstream.rpc.sockets import next_body

if TYPE_CHECKING:
    from slipstream.learn.decisions.judge import VersionVerdict
    from slipstream.learn.learners.base import LearnedWeights, Learner, Tensors
    from slipstream.learn.learners.scoring import Hits, Scorer

LEAST_URGENT = 19
"""The largest niceness."""
BEGUN = "begun"
"""The first message: from then on the process may be stopped."""
_MAX_UNFINISHED = 8
"""Scopes whose unfinished candidates are kept in memory."""
BEAT_S = 5.0
"""How often it tells that it is alive while it works."""
_SLICE = 8
"""Records scored between two signs of life."""
KEEP_S = 30.0
"""How long it waits for leave to write a version down."""


@dataclass(frozen=True)
class WorkerConfig:
    """What the learner's process is started with."""

    folder: str
    base: Mapping[str, Any]
    """The fields of the `BaseDraft` that the server was started with."""
    base_hash: str
    learner: str
    depth: int
    """Draft tokens of the chains that are served."""
    by: str = LearnBy.EVERYONE
    num_steps: int = 120
    """Steps of training for a candidate."""
    min_records: int = 64
    """Answers to learn from that must have come since the last candidate."""
    max_records: int = 512
    """The latest ones that a candidate learns from; as many of all, evenly by task, are learned again."""
    judged_records: int = 400
    """The latest held-out answers, on which a candidate must be faster; of those before them, evenly by task, as many
    as `max_records` must not be forgotten."""
    max_looks: int = 10
    """Looks at an undecided candidate, each with more held-out answers, before it is refused."""
    allowed: Seq[str] = ()
    denied: Seq[str] = ()
    by_default: bool = True
    """The server's `PrivacyRules`: the ring may hold answers that were kept under others."""
    poll_s: float = 1.0
    niceness: int = LEAST_URGENT


class ServerLink:
    """What the server sends, and what it is sent; the process ends with the stream."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._told_s = time.monotonic()
        self.costs = 0.0, 0.0
        """What drafting costs a step, in passes of the target: of the base drafter and of a version."""
        self._may_keep = threading.Event()
        threading.Thread(target=self._listen, name="learn-server", daemon=True).start()

    def tell(self, event: str, **status: Any) -> None:
        """Tell the server what happens."""
        self._socket.sendall(CODEC.frame(LearnEvent(event, status)))

    def beat(self, *_: object) -> None:
        """Tell that the process is alive, unless it did so a moment ago; called between two steps of the work."""
        now_s = time.monotonic()
        if now_s - self._told_s >= BEAT_S:
            self._told_s = now_s
            self.tell("alive", cpu_s=time.process_time())

    def ask_to_keep(self) -> None:
        """Wait for leave to write a version down: the server stops no process that holds a lock that others wait
        for."""
        self._may_keep.clear()
        self.tell("keeping")
        self._may_keep.wait(KEEP_S)

    def _listen(self) -> None:
        frames = CODEC.frames()
        while (body := next_body(self._socket, frames)) is not None:
            match CODEC.read(body):
                case DraftingCosts(base, version):
                    self.costs = base, version
                case LeaveToKeep():
                    self._may_keep.set()
        os._exit(0)  # the server is gone


class BeatingScorer:
    """Scores a few records at a time, and tells between them that it is alive."""

    def __init__(self, scorer: Scorer, server: ServerLink) -> None:
        self._scorer, self._server = scorer, server

    def hits(self, records: Seq[ServedRecord]) -> list[Hits]:
        """As `Scorer.hits`."""
        found: list[Hits] = []
        for begin in range(0, len(records), _SLICE):
            self._server.beat()
            found += self._scorer.hits(records[begin : begin + _SLICE])
        return found


@dataclass
class _Candidate:
    """What was learned and is not decided yet."""

    key: Scope
    learned: LearnedWeights
    parent: str
    window: DataWindow
    first: ServedRecord
    scorers: tuple[BeatingScorer, BeatingScorer]
    num_looks: int = 0
    first_judged: int = -1
    """Number of the first held-out answer that it must be faster on: the next look goes on from there, since a window
    that moved along would not be one test."""
    last_judged: int = -1
    """Index of the last one at the last look."""


class _Unfinished(NamedTuple):
    """A candidate that was not shown to be faster, nor anything else."""

    parent: str
    tensors: Tensors
    window: DataWindow


class LearnWorker:
    """One candidate after another: for everyone, or for the scope with the most new answers."""

    def __init__(self, config: WorkerConfig, server: ServerLink) -> None:
        from slipstream.learn.learners.base_draft import BaseDraft
        from slipstream.learn.learners.registry import make_learner

        self.config, self.server = config, server
        self._folder = LearnFolder(Path(config.folder))
        self._store = VersionStore(self._folder)
        self._state = StateStore(self._folder)
        options = LearnerOptions(depth=config.depth, num_steps=config.num_steps)
        self._learner: Learner = make_learner(config.learner, BaseDraft(**config.base), options)
        self._by = LearnBy(config.by)
        self._rules = PrivacyRules.of(config.allowed, config.denied, config.by_default)
        self._candidate: _Candidate | None = None
        self._last: dict[Scope, int] = {}
        """Number of the last record that a candidate of each scope learned from."""
        self._unfinished: BoundedDict[Scope, _Unfinished] = BoundedDict(_MAX_UNFINISHED)
        """What nothing spoke against but too little evidence: the scope's next candidate begins with it."""

    def turn(self) -> None:
        """Look whether there is something to do, and do it."""
        state = self._state.read()
        if state.frozen:
            return
        candidate = self._candidate
        if candidate is not None and candidate.parent != self._serving(state, candidate.key):
            self._refuse("what it was to replace serves no more")
        if self._candidate is None:
            self._learn(state)
        if self._candidate is not None:
            self._judge(self._candidate, set(state.in_use))

    def _serving(self, state: LearnState, key: Scope) -> str:
        """The version that serves a scope; the base drafter's empty name for one of another drafter, which does not."""
        version = state.scope(*key).serving
        return version if version and self._store.stands_on(version, self.config.base_hash) else ""

    def _read(self, purpose: Purpose) -> Iterator[ServedRecord]:
        """The answers of a purpose that may be learned from."""
        return (one for one in read_ring(self._folder, purpose) if self._rules.allows(one.tenant))

    def _learn(self, state: LearnState) -> None:
        """Make a candidate for the scope with the most new answers, if they are enough."""
        read_s = time.time()
        found: dict[Scope, list[ServedRecord]] = {}
        for record in self._read(Purpose.TRAIN):
            key = self._by.key_of(record.tenant, record.task)
            if key is not None and state.scope(*key).canary is None:
                found.setdefault(key, []).append(record)
        num_new = {
            key: sum(one.number > self._last.get(key, -1) for one in records)
            for key, records in found.items()
        }
        key = max(num_new, key=num_new.__getitem__, default=None)
        if key is None or num_new[key] < self.config.min_records:
            return
        records = found[key]
        most = self.config.max_records
        recent, older = training_parts(records, most, most, seed=records[-1].number)
        serving = self._serving(state, key)
        served = self._store.load(serving) if serving else None
        window = DataWindow.of({one.number: one for one in (*recent, *older)}.values(), read_s)
        start: Tensors | None = served
        before = self._unfinished.pop(key, None)
        if before is not None and before.parent == serving:
            window, start = window.with_(before.window), before.tensors
        self.server.tell("learning", num_records=len(recent), parent=serving, **_whose(key))
        self._last[key] = records[-1].number
        learned = self._learner.learn(recent, older, start=start, before_step=self.server.beat)
        scorers = self._learner.scorer(learned.tensors), self._learner.scorer(served)
        made = BeatingScorer(scorers[0], self.server), BeatingScorer(scorers[1], self.server)
        self._candidate = _Candidate(key, learned, serving, window, recent[-1], made)

    def _judge(self, candidate: _Candidate, in_use: set[str]) -> None:
        from slipstream.learn.decisions.judge import JudgeOptions, judge

        held_out = [
            one for one in self._read(Purpose.JUDGE) if self._by.key_of(one.tenant, one.task) == candidate.key
        ]
        if candidate.num_looks and sum(one.number > candidate.last_judged for one in held_out) < _SLICE:
            return  # those of the last look
        num_latest = self.config.judged_records
        if candidate.num_looks:
            num_latest = sum(one.number >= candidate.first_judged for one in held_out)
        options = JudgeOptions(depth=self.config.depth)
        latest, older = judging_parts(
            held_out, num_latest, self.config.max_records, least=options.min_requests
        )
        candidate.num_looks += 1
        if latest:
            candidate.first_judged, candidate.last_judged = latest[0].number, latest[-1].number
        base_cost, version_cost = self.server.costs
        verdict = judge(
            *candidate.scorers,
            latest,
            older,
            options,
            candidate_cost=version_cost,
            incumbent_cost=version_cost if candidate.parent else base_cost,
        )
        if verdict.better:
            self._keep(candidate, verdict, in_use)
        elif not _is_open(verdict):
            self._refuse(verdict.why)
        elif candidate.num_looks >= self.config.max_looks:
            if verdict.undecided:
                self._unfinished[candidate.key] = _Unfinished(
                    candidate.parent, candidate.learned.tensors, candidate.window
                )
            self._refuse(verdict.why)
        else:
            self.server.tell("undecided", why=verdict.why, look=candidate.num_looks, **_whose(candidate.key))

    def _keep(self, candidate: _Candidate, verdict: VersionVerdict, in_use: set[str]) -> None:
        learned, first = candidate.learned, candidate.first
        self._candidate = None
        self.server.ask_to_keep()
        try:
            version = self._store.add(
                Version(
                    learner=self._learner.name,
                    model_hash=first.model_hash,
                    template_hash=first.template_hash,
                    base_hash=self.config.base_hash,
                    parent=candidate.parent,
                    tenant=candidate.key[0],
                    task=candidate.key[1],
                    window=candidate.window,
                    figures={**learned.figures, "judge": verdict.figures},
                    settings=learned.settings,
                ),
                learned.tensors,
                in_use=in_use,
            )
        except LearnError as error:  # its records were forgotten meanwhile, or the disk is full
            self.server.tell("refused", why=str(error), **_whose(candidate.key))
            return
        promise = 1 + float(verdict.figures["gain"])
        self.server.tell(
            "candidate", version=version.id, promise=promise, why=verdict.why, **_whose(candidate.key)
        )

    def _refuse(self, why: str) -> None:
        whose = {} if self._candidate is None else _whose(self._candidate.key)
        self._candidate = None
        self.server.tell("refused", why=why, **whose)


def _whose(key: Scope) -> dict[str, str]:
    """A scope's tenant and task as a message has them."""
    return {name: one for name, one in zip(("tenant", "task"), key, strict=True) if one is not None}


def _is_open(verdict: VersionVerdict) -> bool:
    """Whether more held-out answers may show that a candidate is faster. What it forgets it will not know again."""
    figures = verdict.figures
    return bool(figures["num_requests"] == 0 or (verdict.undecided and figures["gain"] > 0))


def stand_back(niceness: int) -> None:
    """Leave the processor to others: by `niceness`, and at its largest only run where no other process wants to.

    A process that is merely nice goes on for its slice, some milliseconds, when the server's threads wake up; on Linux
    one of the idle class makes way at once.
    """
    os.nice(niceness)
    if niceness >= LEAST_URGENT and hasattr(os, "SCHED_IDLE"):
        with suppress(OSError):  # not allowed here: it is nice all the same
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Learn until the server is gone."""
    end_with_parent()
    config = WorkerConfig(**json.loads(sys.argv[1]))
    stand_back(config.niceness)
    server = ServerLink(parent_socket())
    server.tell(BEGUN)

    import torch

    torch.set_num_threads(1)
    worker = LearnWorker(config, server)
    server.tell("ready", **{"pid": os.getpid(), "learner": asdict(config)["learner"]})
    while True:
        server.beat()
        try:
            worker.turn()
        except SlipstreamError as error:
            server.tell("failed", why=str(error))
        time.sleep(config.poll_s)


if __name__ == "__main__":
    main()
