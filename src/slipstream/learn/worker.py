"""The learner's process: reads the ring, trains a candidate, holds it against what serves, keeps it where it is faster.

It is started by `learn.process`: one JSON object is its argument, lines on its standard input tell it to rest or to go
on, and lines of JSON on its standard output tell what became of it. It ends with the server that started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import LearnError, SlipstreamError
from slipstream.learn.disk_ring import read_ring
from slipstream.learn.folder import LearnFolder
from slipstream.learn.options import LearnerOptions
from slipstream.learn.records import Purpose, ServedRecord
from slipstream.learn.state import StateFile
from slipstream.learn.versions import DataWindow, Version, VersionStore

if TYPE_CHECKING:
    from slipstream.learn.judge import VersionVerdict
    from slipstream.learn.learners.base import LearnedWeights, Learner
    from slipstream.learn.scoring import Hits, Scorer

REST, GO = "rest", "go"
_SLICE = 8
"""Records scored between two looks at whether to rest."""


@dataclass(frozen=True)
class WorkerConfig:
    """What the learner's process is told."""

    folder: str
    floor: str
    """The folder of the draft model that the server was started with."""
    floor_hash: str
    learner: str
    depth: int
    """Draft tokens of the chains that are served."""
    num_steps: int = 120
    """Of training, for a candidate."""
    min_records: int = 64
    """Answers to learn from that must have come since the last candidate."""
    max_records: int = 512
    """The latest ones that a candidate learns from; as many before them are the anchor."""
    max_looks: int = 10
    """Looks at an undecided candidate, each with more held-out answers, before it is refused."""
    poll_s: float = 1.0
    niceness: int = 19


class Rest:
    """Whether to rest, as the server says on a stream; the process ends with the stream."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self._go.set()
        self.rested_s = 0.0
        threading.Thread(target=self._listen, name="learn-rest", daemon=True).start()

    def wait(self, *_: object) -> None:
        """Return once there is no need to rest."""
        if not self._go.is_set():
            began_s = time.monotonic()
            self._go.wait()
            self.rested_s += time.monotonic() - began_s

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == REST:
                self._go.clear()
            else:
                self._go.set()
        os._exit(0)  # the server is gone


class RestingScorer:
    """Scores a few records at a time, and rests between them."""

    def __init__(self, scorer: Scorer, rest: Rest) -> None:
        self._scorer, self._rest = scorer, rest

    def hits(self, records: Seq[ServedRecord]) -> list[Hits]:
        """As `Scorer.hits`."""
        found: list[Hits] = []
        for begin in range(0, len(records), _SLICE):
            self._rest.wait()
            found += self._scorer.hits(records[begin : begin + _SLICE])
        return found


@dataclass
class _Candidate:
    """What was learned and is not decided yet."""

    learned: LearnedWeights
    parent: str
    window: DataWindow
    first: ServedRecord
    scorers: tuple[RestingScorer, RestingScorer]
    num_looks: int = 0
    num_judged: int = 0


class LearnWorker:
    """One candidate after another, of everyone's requests."""

    def __init__(self, config: WorkerConfig, rest: Rest) -> None:
        from slipstream.learn.learners.registry import make_learner

        self.config, self.rest = config, rest
        self._folder = LearnFolder(Path(config.folder))
        self._store = VersionStore(self._folder)
        self._state = StateFile(self._folder)
        options = LearnerOptions(depth=config.depth, num_steps=config.num_steps)
        self._learner: Learner = make_learner(config.learner, Path(config.floor), options)
        self._candidate: _Candidate | None = None
        self._last = -1
        """Number of the last record that a candidate learned from."""

    def turn(self) -> None:
        """Look whether there is something to do, and do it."""
        state = self._state.read()
        lane = state.lane()
        if state.frozen or lane.canary is not None:
            return
        if self._candidate is not None and self._candidate.parent != lane.serving:
            self._refuse("what it was to replace serves no more")
        if self._candidate is None:
            self._learn(lane.serving)
        if self._candidate is not None:
            self._judge(self._candidate, set(state.in_use))

    def _learn(self, serving: str) -> None:
        read_s = time.time()
        records = list(read_ring(self._folder, Purpose.TRAIN))
        num_new = sum(one.number > self._last for one in records)
        if num_new < self.config.min_records:
            return
        recent = records[-self.config.max_records :]
        anchor = records[: -len(recent)][-self.config.max_records :]
        start = self._store.load(serving) if serving else None
        tell("learning", num_records=len(recent), parent=serving)
        self._last = records[-1].number
        learned = self._learner.learn(recent, anchor, start=start, before_step=self.rest.wait)
        scorers = self._learner.scorer(learned.tensors), self._learner.scorer(start)
        made = RestingScorer(scorers[0], self.rest), RestingScorer(scorers[1], self.rest)
        window = DataWindow.of([*recent, *anchor], read_s)
        self._candidate = _Candidate(learned, serving, window, recent[-1], made)

    def _judge(self, candidate: _Candidate, in_use: set[str]) -> None:
        from slipstream.learn.judge import JudgeOptions, judge

        held_out = list(read_ring(self._folder, Purpose.JUDGE))
        if candidate.num_looks and len(held_out) - candidate.num_judged < _SLICE:
            return  # as many as at the last look
        candidate.num_looks, candidate.num_judged = candidate.num_looks + 1, len(held_out)
        verdict = judge(*candidate.scorers, held_out, options=JudgeOptions(depth=self.config.depth))
        if verdict.better:
            self._keep(candidate, verdict, in_use)
        elif candidate.num_looks >= self.config.max_looks or not _is_open(verdict):
            self._refuse(verdict.why)
        else:
            tell("undecided", why=verdict.why)

    def _keep(self, candidate: _Candidate, verdict: VersionVerdict, in_use: set[str]) -> None:
        learned, first = candidate.learned, candidate.first
        self._candidate = None
        try:
            version = self._store.add(
                Version(
                    learner=self._learner.name,
                    model_hash=first.model_hash,
                    template_hash=first.template_hash,
                    floor_hash=self.config.floor_hash,
                    parent=candidate.parent,
                    window=candidate.window,
                    figures={**learned.figures, "judge": verdict.figures},
                    settings=learned.settings,
                ),
                learned.tensors,
                in_use=in_use,
            )
        except LearnError as error:  # its records were forgotten meanwhile, or the disk is full
            tell("refused", why=str(error))
            return
        tell("candidate", version=version.id, promise=1 + float(verdict.figures["gain"]), why=verdict.why)

    def _refuse(self, why: str) -> None:
        self._candidate = None
        tell("refused", why=why)


def _is_open(verdict: VersionVerdict) -> bool:
    """Whether more held-out answers may show that a candidate is faster."""
    figures = verdict.figures
    return bool(figures["num_requests"] == 0 or figures["gain"] > 0)


def tell(event: str, **facts: Any) -> None:
    """Tell the server, in a line."""
    print(json.dumps({"event": event, **facts}), flush=True)


def main() -> None:
    """Learn until the server is gone."""
    config = WorkerConfig(**json.loads(sys.argv[1]))
    os.nice(config.niceness)
    rest = Rest()

    import torch

    torch.set_num_threads(1)
    worker = LearnWorker(config, rest)
    tell("ready", **{"pid": os.getpid(), "learner": asdict(config)["learner"]})
    while True:
        rest.wait()
        try:
            worker.turn()
        except SlipstreamError as error:
            tell("failed", why=str(error))
        tell("alive", cpu_s=time.process_time(), rested_s=rest.rested_s)
        time.sleep(config.poll_s)


if __name__ == "__main__":
    main()
