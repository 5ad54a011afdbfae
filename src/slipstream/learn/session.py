"""A server that learns: capture, the learner's process, the loop's decisions and the lanes of the drafter, together."""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slipstream.config import SpeculativeConfig
from slipstream.core import FinishReason, Sequence, StepItem
from slipstream.draft.combine.versions import DraftLane, VersionsDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import LearnError, SlipstreamError
from slipstream.learn.capture import Capture
from slipstream.learn.disk_ring import DiskRing
from slipstream.learn.events import EventLog
from slipstream.learn.facts import LearnFacts
from slipstream.learn.folder import LearnFolder
from slipstream.learn.identity import identity_of
from slipstream.learn.learners.registry import learner_for, make_learner
from slipstream.learn.loop import Act, Decision, Judgment, LaneLoop, LoopSettings
from slipstream.learn.options import LearnerOptions
from slipstream.learn.privacy import PrivacyRules, belongs_to
from slipstream.learn.process import LearnerProcess
from slipstream.learn.records import share_of
from slipstream.learn.segments import RingIdentity
from slipstream.learn.state import LearnState, StateFile
from slipstream.learn.versions import VersionStore
from slipstream.models.files.digest import digest_of_files

T = TypeVar("T")

logger = logging.getLogger(__name__)

TICK_S = 0.05
WATCH_S = 1.0
"""How often the learner's process and the state's file are looked at."""
MAX_REFUSED = 12
"""Candidates refused in a row before learning is said never to improve."""
NUM_EVENTS = 20


@dataclass(frozen=True)
class SessionSettings:
    """What a server says of its learning."""

    folder: Path
    max_bytes: int
    rules: PrivacyRules = field(default_factory=PrivacyRules)
    loop: LoopSettings = field(default_factory=LoopSettings)
    worker: dict[str, Any] = field(default_factory=dict)
    """Values of `WorkerConfig` other than their defaults."""


class SteppedEngine(Protocol):
    """An engine that somebody steps, in this process."""

    @property
    def engine(self) -> Engine:
        """To be asked for what does not change, and for hooks."""
        ...

    def between_steps(self, change: Callable[[Engine], T]) -> T:
        """What `change` returns, called between two steps; waits for that. Raises `EngineStoppedError`."""
        ...


class LearnSession:
    """Runs beside an engine whose drafter is `versions`; whatever fails here, serving goes on."""

    def __init__(self, stepped: SteppedEngine, settings: SessionSettings) -> None:
        """Raises `LearnError` where the folder cannot be used, or holds another model's answers."""
        engine = stepped.engine
        self._stepped, self._engine, self._settings = stepped, engine, settings
        self._drafter = engine.drafter_as(VersionsDrafter)
        self._floor: SpeculativeConfig = self._drafter.options.floor()
        floor = str(self._floor.options["model"])
        model = self._drafter.drafting_model()
        name = learner_for(0 if model is None else model.num_parameters)
        depth = self._drafter.configured_depth(self._drafter.options) or 1
        self._most = depth + 1
        self._learner = make_learner(name, Path(floor), LearnerOptions(depth=depth))
        self._folder = LearnFolder(settings.folder)
        self._ring = DiskRing(self._folder, identity_of(engine), settings.max_bytes)
        self._checkpoints = self._folder.lanes
        shutil.rmtree(self._checkpoints, ignore_errors=True)
        self._store, self._state_file = VersionStore(self._folder), StateFile(self._folder)
        self._log = EventLog(self._folder)
        self._state = self._state_file.read()
        lane = self._state.lane()
        self._loop = LaneLoop(
            settings.loop, serving=lane.serving, previous=lane.previous, promise=self._promise(lane.serving)
        )
        self._loop.frozen = self._state.frozen
        if lane.canary is not None:  # its comparison was lost with the process: it begins anew
            self._loop.frozen = False
            self._loop.offer(lane.canary, self._promise(lane.canary))
            self._loop.judged(lane.canary, Judgment.BETTER)
            self._loop.frozen = self._state.frozen
        worker = {
            "folder": str(settings.folder),
            "floor": floor,
            "floor_hash": digest_of_files(floor),
            "learner": name,
            "depth": depth,
            **settings.worker,
        }
        self.process = LearnerProcess(worker)
        self._finished: queue.SimpleQueue[tuple[str, float, bool]] = queue.SimpleQueue()
        self._facts = LearnFacts()
        self._faults: dict[str, str] = {}
        self._refused_in_a_row = 0
        self._closed = threading.Event()
        self._capture = Capture(self._ring, settings.rules, version_of=self._drafter.version_of)
        self._apply(self._state)
        engine.on_checked = self._on_checked
        self._thread = threading.Thread(target=self._run, name="learn-session", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> RingIdentity:
        """The target whose answers are kept."""
        return self._ring.identity

    @property
    def lanes(self) -> list[str]:
        """The versions that draft now, the floor's empty name first."""
        return self._drafter.names

    def facts(self) -> LearnFacts:
        """What happened so far; may be called from any thread."""
        return replace(
            self._facts,
            serving=self._loop.serving,
            canary=self._loop.candidate if self._loop.canary_share else None,
            frozen=self._loop.frozen,
            by_version=dict(self._facts.by_version),
            learner_deaths=self.process.num_deaths,
            rests=self.process.rests,
            capture=self._capture.facts(),
            faults=dict(self._faults),
        )

    def close(self) -> None:
        """End the learner, and write what was captured."""
        self._closed.set()
        self._thread.join()
        self.process.close()
        self._engine.on_checked = None
        self._capture.close()
        self._ring.close()

    # --- in the engine's thread -------------------------------------------------------------------------------

    def _on_checked(self, items: list[StepItem]) -> None:
        self._capture.observe(items)
        for item in items:
            sequence = item.sequence
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                metrics = sequence.metrics
                figure = sequence.num_new_tokens / max(metrics.num_steps, 1)
                compared = metrics.num_draft_tokens > 0 and self._whose(sequence) is None
                self._finished.put((metrics.draft_version, figure, compared))

    def _choose(self, sequence: Sequence) -> str:
        """Who drafts for a request: its tenant's or task's version, else who serves everyone."""
        own = self._whose(sequence)
        if own is not None:
            return own
        return self._loop.version_for(share_of(sequence.request_id, "lane"))

    def _whose(self, sequence: Sequence) -> str | None:
        """The version of the sequence's own lane, None where it has none."""
        found: tuple[int, str] | None = None
        for lane in self._state.lanes:
            if lane.key == (None, None):
                continue
            fits_tenant = lane.tenant is None or belongs_to(sequence.tenant, lane.tenant)
            if fits_tenant and lane.task in (None, sequence.task):
                rank = 2 * (lane.tenant is not None) + (lane.task is not None)
                if found is None or rank > found[0]:
                    found = rank, lane.serving
        return None if found is None else found[1]

    # --- in the session's own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        watched_s = 0.0
        while not self._closed.wait(TICK_S):
            try:
                num_running, num_waiting = self._engine.load
                self.process.rest(num_waiting > 0 or 2 * num_running > self._engine.config.max_num_seqs)
                while not self._finished.empty():
                    self._count(*self._finished.get())
                while not self.process.messages.empty():
                    self._hear(self.process.messages.get())
                if time.monotonic() - watched_s >= WATCH_S:
                    watched_s = time.monotonic()
                    self._watch()
            except Exception as error:  # serving goes on
                logger.warning("learning: %s", error, exc_info=not isinstance(error, SlipstreamError))
                self._faults["learning_failed"] = str(error)

    def _watch(self) -> None:
        self.process.watch()
        self._set_fault("learner_died", self.process.fault)
        self._set_fault("learning_failed", self._capture.facts().fault)
        state = self._state_file.read()
        if state.number != self._state.number:
            self._follow(state)

    def _set_fault(self, kind: str, message: str) -> None:
        if message:
            self._faults[kind] = message
        else:
            self._faults.pop(kind, None)

    def _follow(self, state: LearnState) -> None:
        """Somebody changed the state by hand: `slipstream learn`."""
        lane, loop = state.lane(), self._loop
        loop.frozen = state.frozen
        loop.retire(set(state.retired))
        if lane.serving != loop.serving:
            loop.promote(lane.serving, self._promise(lane.serving))
        if lane.canary is None and loop.candidate is not None and loop.canary_share:
            loop.retire({loop.candidate})
        self._faults.pop("version_rolled_back", None)
        self._apply(state)

    def _count(self, version: str, figure: float, compared: bool) -> None:
        known = self._facts.by_version
        num, total = known.get(version, (0, 0.0))
        known[version] = num + 1, total + figure
        while len(known) > NUM_EVENTS:
            del known[next(iter(known))]
        if compared and (decision := self._loop.served(version, figure / self._most)) is not None:
            self._carry_out(decision)

    def _hear(self, message: dict[str, Any]) -> None:
        event = message.pop("event", "")
        if event == "alive":
            self._facts = replace(
                self._facts,
                learner_cpu_s=float(message.get("cpu_s", 0.0)),
                learner_rested_s=float(message.get("rested_s", 0.0)),
            )
        elif event == "refused":
            self._note("refused", **message)
            self._on_refused()
        elif event == "candidate":
            version = str(message["version"])
            self._note("offered", **message)
            try:
                self._loop.offer(version, float(message["promise"]))
            except LearnError as error:
                self._note("refused", version=version, why=str(error))
                return
            decision = self._loop.judged(version, Judgment.BETTER, str(message.get("why", "")))
            if decision is not None:
                self._carry_out(decision)
        elif event in ("failed", "learning"):
            self._note(event, **message)

    def _on_refused(self) -> None:
        self._facts = replace(self._facts, num_refused=self._facts.num_refused + 1)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED:
            self._faults["never_improves"] = (
                f"the last {self._refused_in_a_row} candidates were refused; see slipstream learn status"
            )

    def _carry_out(self, decision: Decision) -> None:
        """Write a decision down, then have the drafter follow it."""
        version = decision.version

        def changed(state: LearnState) -> LearnState:
            lane = state.lane()
            match decision.act:
                case Act.TRY:
                    lane = replace(lane, canary=version, canary_share=self._loop.settings.canary_share)
                case Act.PROMOTE:
                    lane = lane.promoted(version)
                case Act.REFUSE:
                    lane = replace(lane, canary=None, canary_share=0.0)
                case Act.ROLL_BACK:
                    lane = lane.rolled_back()
            state = state.with_lane(lane)
            refused = decision.act in (Act.REFUSE, Act.ROLL_BACK)
            return state.retire({version: decision.reason}) if refused else state

        facts = self._facts
        match decision.act:
            case Act.PROMOTE:
                self._facts = replace(facts, num_promoted=facts.num_promoted + 1)
                self._refused_in_a_row = 0
                self._faults.pop("never_improves", None)
                self._faults.pop("version_rolled_back", None)
            case Act.REFUSE:
                self._on_refused()
            case Act.ROLL_BACK:
                self._facts = replace(facts, num_rolled_back=facts.num_rolled_back + 1)
                self._faults["version_rolled_back"] = f"version {version} was rolled back: {decision.reason}"
                logger.warning("learning: %s", self._faults["version_rolled_back"])
        try:
            state = self._state_file.change(changed)
        except LearnError as error:  # a full disk: what serves must follow all the same
            self._faults["learning_failed"] = str(error)
            state = changed(self._state)
        self._note(str(decision.act), version=version, why=decision.reason, **decision.figures)
        self._apply(state)

    def _note(self, event: str, **facts: Any) -> None:
        line = {"time_s": round(time.time(), 3), "event": event, **facts}
        self._facts = replace(self._facts, events=(line, *self._facts.events)[:NUM_EVENTS])
        try:
            self._log.add(event, **facts)
        except LearnError as error:
            self._faults["learning_failed"] = str(error)

    def _apply(self, state: LearnState) -> None:
        """Have the drafter's lanes be those of `state`: load here, enter between two steps."""
        self._state = state
        wanted: dict[str, str | None] = {}
        for lane in state.lanes:
            for version in (lane.serving, lane.canary):
                if version and version not in state.retired:
                    wanted[version] = lane.tenant if version not in wanted else None
        lanes: list[DraftLane] = []
        damaged: dict[str, str] = {}
        for version, tenant in wanted.items():
            if version not in self._drafter.names:
                try:
                    lanes.append(self._load(version, tenant))
                except (SlipstreamError, OSError, ValueError) as error:
                    damaged[version] = str(error)
        keep = set(wanted) - set(damaged)
        revoke = [name for name in self._drafter.names if name in state.retired]
        self._stepped.between_steps(lambda engine: self._drafter.change(lanes, keep, self._choose, revoke))
        if damaged:
            for version, why in damaged.items():
                self._note("damaged", version=version, why=why)
                self._faults["version_rolled_back"] = f"version {version} is not served: {why}"
            self._loop.retire(set(damaged))
            self._apply(self._state_file.change(lambda state: state.retire(damaged)))

    def _load(self, version: str, tenant: str | None) -> DraftLane:
        """A lane of a version's tensors, whose sha256 is right."""
        about = self._store.get(version)
        tensors = self._store.load(version)
        owner = about.tenant if about.tenant is not None else tenant
        folder = self._checkpoints / version
        try:
            self._learner.checkpoint(tensors, folder)
            config = replace(self._floor, options={**self._floor.options, "model": str(folder)})
            return self._drafter.prepare(version, config, owner)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _promise(self, version: str) -> float:
        """The predicted speed of a version over what it was judged against."""
        if not version:
            return 1.0
        try:
            return 1 + float(self._store.get(version).figures["judge"]["gain"])
        except (LearnError, KeyError, TypeError, ValueError):
            return 1.0


def begin_learning(
    stepped: SteppedEngine, settings: SessionSettings
) -> tuple[LearnSession | None, Callable[[], LearnFacts]]:
    """A session and what tells its facts; where the folder cannot be used, None and why: serving goes on."""
    try:
        session = LearnSession(stepped, settings)
    except LearnError as error:
        fault = f"nothing is learned: {error}"
        logger.warning("%s; serving goes on", fault)
        facts = LearnFacts(faults={"learning_failed": fault})
        return None, lambda: facts
    return session, session.facts
