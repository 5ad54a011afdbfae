"""A server that learns: capture, the learner's process, the loop's decisions and the versions that the drafter holds,
together."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from slipstream.core.request import FinishReason
from slipstream.core.sequence import Sequence
from slipstream.core.step import StepItem
from slipstream.draft.combine.versions import VersionsDrafter
from slipstream.draft.methods import HEADS
from slipstream.engine.engine import Engine
from slipstream.errors import LearnError, SlipstreamError
from slipstream.learn.background.learner_process import LearnerProcess
from slipstream.learn.background.pace import BESIDE_SHARE, LearnerPace
from slipstream.learn.capture.capture import MAX_ANSWER_BYTES, MAX_SHARE, Capture, CaptureLimits, identity_of
from slipstream.learn.decisions.draft_costs import DraftCosts
from slipstream.learn.decisions.loop import Act, Decision, LoopSettings, VersionLoop
from slipstream.learn.learners.registry import learner_for
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.served import TAPS, tenant_key
from slipstream.learn.served_versions import ServedVersions, SteppedEngine
from slipstream.learn.server_status import ServerLearnStatus
from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.retention import Retention, RetentionThread
from slipstream.learn.storage.ring import Ring, RingIdentity
from slipstream.learn.storage.state import LearnState, ScopeVersions, StateStore
from slipstream.learn.versions.loading import BaseVersions, base_of
from slipstream.learn.versions.scope import EVERYONES, LearnBy, Scope
from slipstream.models.cpu.threads import leaves_a_core

logger = logging.getLogger(__name__)

TICK_S = 0.02
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
    by: LearnBy = LearnBy.EVERYONE
    learner: str | None = None
    """None is what suits the draft's size."""
    max_age_s: float | None = None
    """After which answers are deleted."""
    capture_share: float | None = MAX_SHARE
    """The most of the engine's time that capture uses; None for no bound."""
    beside_share: float = BESIDE_SHARE
    """Share of the time that requests run on all cores in which the learner runs too: 0 to 1."""
    worker: dict[str, Any] = field(default_factory=dict)
    """Values of `WorkerConfig` other than their defaults."""


@dataclass(frozen=True, slots=True)
class _FinishedRequest:
    """An answer that ended well."""

    key: Scope
    version: str
    tokens_a_pass: float
    was_drafted: bool
    draft_s: float
    verify_s: float


class LearnSession:
    """Runs concurrently with an engine whose drafter is `versions`; whatever fails here, serving goes on."""

    def __init__(self, stepped: SteppedEngine, settings: SessionSettings) -> None:
        """Raises `LearnError` where the folder cannot be used, or holds another model's answers."""
        engine = stepped.engine
        self._stepped, self._engine, self._settings = stepped, engine, settings
        self._drafter = engine.drafter_as(VersionsDrafter)
        base = base_of(engine)
        model = self._drafter.drafting_model()
        num_parameters = 0 if model is None else model.num_parameters
        self._learner = settings.learner or learner_for(base.method, num_parameters)
        depth = self._drafter.configured_depth(self._drafter.options) or 1
        self._most = depth + 1
        self._folder = LearnFolder(settings.folder)
        self._ring = Ring(self._folder, identity_of(engine), settings.max_bytes)
        self._retention = Retention(self._folder, settings.max_age_s)
        self._retention.look()  # before anything is learned
        self._states = StateStore(self._folder)
        self._log = EventLog(self._folder)
        self._status = ServerLearnStatus()
        self._faults: dict[str, str] = {}
        self._refused_in_a_row = 0
        self._versions = BaseVersions(self._drafter, base, self._folder, depth, self._tell_waiting)
        state = self._states.read()
        self._served_versions = ServedVersions(stepped, self._drafter, self._versions, state)
        self._follow_scopes(state)
        self._costs = DraftCosts(self._drafter)
        self.process = LearnerProcess(self._worker_config(), log=self._folder.learner_log)
        self._pace = LearnerPace(self.process, leaves_a_core(_num_threads(engine)), settings.beside_share)
        self._keeping = contextlib.ExitStack()
        """While the learner writes a version down, and must not be stopped."""
        self._finished: queue.SimpleQueue[_FinishedRequest] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._capture = Capture(
            self._ring,
            settings.rules,
            CaptureLimits(max_share=settings.capture_share),
            version_of=self._drafter.version_of,
            features_of=self._features if base.method in HEADS else None,
        )
        self._apply(state)
        engine.on_begin, engine.on_checked = self._pace.step_begins, self._on_checked
        self._thread = threading.Thread(target=self._run, name="learn-session", daemon=True)
        self._thread.start()

    def _worker_config(self) -> dict[str, Any]:
        """The values of `WorkerConfig` that the learner's process gets."""
        settings, versions = self._settings, self._versions
        return {
            "folder": str(settings.folder),
            "base": asdict(versions.base),
            "base_hash": versions.base_hash,
            "learner": self._learner,
            "depth": self._most - 1,
            "by": str(settings.by),
            **settings.rules.as_lists(),
            **settings.worker,
        }

    @property
    def identity(self) -> RingIdentity:
        """The target whose answers are kept."""
        return self._ring.identity

    @property
    def versions(self) -> list[str]:
        """The versions that draft now, the base drafter's empty name first."""
        return self._drafter.names

    def status(self) -> ServerLearnStatus:
        """What happened so far; may be called from any thread. `serving` and `canary` are everyone's."""
        main = self._served_versions.loops[EVERYONES]
        return replace(
            self._status,
            serving=main.serving,
            canary=main.candidate if main.canary_share else None,
            frozen=main.frozen,
            own_scopes=sum(
                one.key != EVERYONES and bool(one.serving) for one in self._served_versions.state.scopes
            ),
            by_version=dict(self._status.by_version),
            learner_deaths=self.process.num_deaths,
            rests=self.process.rests,
            learner_rested_s=self.process.rested_s,
            capture=self._capture.status(),
            faults=dict(self._faults),
        )

    def close(self) -> None:
        """End the learner, and write what was captured."""
        self._closed.set()
        self._thread.join()
        self.process.close()
        self._engine.on_begin = self._engine.on_checked = None
        self._capture.close()
        self._ring.close()

    # --- in the engine's thread -------------------------------------------------------------------------------

    def _on_checked(self, items: list[StepItem]) -> None:
        self._capture.observe(items)
        for item in items:
            sequence = item.sequence
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                metrics = sequence.metrics
                self._finished.put(
                    _FinishedRequest(
                        self._served_versions.key_of(sequence),
                        metrics.draft_version,
                        sequence.num_new_tokens / max(metrics.num_steps, 1),
                        metrics.num_draft_tokens > 0,
                        metrics.draft_s,
                        metrics.verify_s,
                    )
                )

    def _features(self, sequence: Sequence) -> dict[str, NDArray[Any]]:
        """What a head has read of an answer; nothing of one that is too long to be kept with it."""
        taps = self._drafter.features(sequence)
        if taps is None or 2 * taps.numel() > MAX_ANSWER_BYTES:
            return {}
        return {TAPS: taps.half().cpu().numpy()}

    # --- in the session's own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        watched_s = 0.0
        while not self._closed.wait(TICK_S):
            try:
                self._pace.look(*self._engine.load, self._engine.config.max_num_seqs)
                while not self._finished.empty():
                    self._count(self._finished.get())
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
        if not self.process.pid:
            self._keeping.close()
        self._retention.look()
        self._set_fault("learning_failed", self._capture.status().fault or self._retention.fault)
        self.process.tell_costs(self._costs.base, self._costs.of("?", self._learner))
        state = self._states.read()
        if state.number != self._served_versions.state.number:
            self._follow(state)
        elif not self._served_versions.are_loaded(state):
            self._apply(state)
        self._ring.tidy(
            self._pace.running
        )  # last, since it may fail: an operator's word must be followed all the same

    def _set_fault(self, kind: str, message: str) -> None:
        if message:
            self._faults[kind] = message
        else:
            self._faults.pop(kind, None)

    def _follow(self, state: LearnState) -> None:
        """Somebody changed the state by hand: `slipstream learn`."""
        self._follow_scopes(state)
        for key, loop in self._served_versions.loops.items():
            scope = self._versions.known(state.scope(*key))
            loop.frozen = state.frozen
            loop.retire(set(state.retired))
            if scope.serving != loop.serving:
                loop.promote(scope.serving, self._versions.promise(scope.serving))
            if scope.canary is None and loop.candidate is not None and loop.canary_share:
                loop.retire({loop.candidate})
        self._faults.pop("version_rolled_back", None)
        self._apply(state)

    def _follow_scopes(self, state: LearnState) -> None:
        """Have a loop for everyone's versions, and for each scope that learns."""
        for scope in (state.scope(), *state.scopes):
            is_everyones = scope.key == EVERYONES
            if scope.key not in self._served_versions.loops and (
                is_everyones or self._settings.by.learns(scope.key)
            ):
                self._served_versions.loops[scope.key] = self._loop_of(scope)

    def _loop_of(self, scope: ScopeVersions) -> VersionLoop:
        """A loop that goes on where the state is."""
        scope = self._versions.known(scope)
        promise = self._versions.promise(scope.serving)
        loop = VersionLoop(
            self._settings.loop, serving=scope.serving, previous=scope.previous, promise=promise
        )
        if scope.canary is not None:  # its comparison was lost with the process: it begins anew
            loop.offer(scope.canary, self._versions.promise(scope.canary))
        loop.frozen = self._served_versions.state.frozen
        return loop

    def _count(self, one: _FinishedRequest) -> None:
        version, known = one.version, self._status.by_version
        num, total = known.get(version, (0, 0.0))
        known[version] = num + 1, total + one.tokens_a_pass
        self._costs.add(one.draft_s, one.verify_s)
        self._served_versions.count(one.key)
        while len(known) > NUM_EVENTS:
            del known[next(iter(known))]
        loop = self._served_versions.loops.get(one.key)
        if loop is not None and one.was_drafted:
            # What a version gains in passes it may lose in drafting: both count, over the base drafter's.
            cost = (1 + self._costs.base) / (1 + self._costs.of(version, self._learner))
            decision = loop.served(version, cost * one.tokens_a_pass / self._most)
            if decision is not None:
                self._carry_out(one.key, decision)

    def _hear(self, message: dict[str, Any]) -> None:
        event = message.pop("event", "")
        if event != "keeping":
            self._keeping.close()  # whatever it says next, it has written the version or failed
        if event == "alive":
            self._status = replace(self._status, learner_cpu_s=float(message.get("cpu_s", 0.0)))
        elif event == "refused":
            self._note("refused", **_named(message))
            self._on_refused()
        elif event == "candidate":
            self._offer(message)
        elif event == "keeping":
            self._keeping.close()
            self._keeping.enter_context(self._pace.running())
            self.process.let_keep()
        elif event in ("failed", "learning", "undecided"):
            self._note(event, **_named(message))

    def _offer(self, message: dict[str, Any]) -> None:
        """Try a candidate of the learner's."""
        version = str(message["version"])
        key: Scope = message.get("tenant"), message.get("task")
        self._note("offered", **_named(message))
        loop = self._served_versions.loops.get(key)
        if loop is None:
            loop = self._served_versions.loops[key] = self._loop_of(self._served_versions.state.scope(*key))
        try:
            decision = loop.offer(version, float(message["promise"]), str(message.get("why", "")))
        except LearnError as error:
            self._note("refused", version=version, why=str(error))
            return
        self._carry_out(key, decision)

    def _on_refused(self) -> None:
        self._status = replace(self._status, num_refused=self._status.num_refused + 1)
        self._refused_in_a_row += 1
        if self._refused_in_a_row >= MAX_REFUSED:
            self._faults["never_improves"] = (
                f"the last {self._refused_in_a_row} candidates were refused; see slipstream learn status"
            )

    def _carry_out(self, key: Scope, decision: Decision) -> None:
        """Write a decision down, then have the drafter follow it."""
        version = decision.version

        def changed(state: LearnState) -> LearnState:
            scope = state.scope(*key)
            match decision.act:
                case Act.TRY:
                    scope = replace(scope, canary=version, canary_share=self._settings.loop.canary_share)
                case Act.PROMOTE:
                    scope = scope.promoted(version)
                case Act.REFUSE:
                    scope = replace(scope, canary=None, canary_share=0.0)
                case Act.ROLL_BACK:
                    scope = scope.rolled_back()
            state = state.with_scope(scope)
            refused = decision.act in (Act.REFUSE, Act.ROLL_BACK)
            return state.retire({version: decision.reason}) if refused else state

        status = self._status
        match decision.act:
            case Act.PROMOTE:
                self._status = replace(status, num_promoted=status.num_promoted + 1)
                self._refused_in_a_row = 0
                self._faults.pop("never_improves", None)
                self._faults.pop("version_rolled_back", None)
            case Act.REFUSE:
                self._on_refused()
            case Act.ROLL_BACK:
                self._status = replace(status, num_rolled_back=status.num_rolled_back + 1)
                self._faults["version_rolled_back"] = f"version {version} was rolled back: {decision.reason}"
                logger.warning("learning: %s", self._faults["version_rolled_back"])
        try:
            state = self._states.change(changed)
        except LearnError as error:  # a full disk: what serves must follow all the same
            self._faults["learning_failed"] = str(error)
            state = changed(self._served_versions.state)
        self._note(str(decision.act), version=version, why=decision.reason, **decision.figures)
        self._apply(state)

    def _note(self, event: str, **status: Any) -> None:
        line = {"time_s": round(time.time(), 3), "event": event, **status}
        self._status = replace(self._status, events=(line, *self._status.events)[:NUM_EVENTS])
        try:
            self._log.add(event, **status)
        except LearnError as error:
            self._faults["learning_failed"] = str(error)

    def _apply(self, state: LearnState) -> None:
        """Have the drafter hold the versions of `state`: load here, enter between two steps. Versions that are damaged
        are retired, and what their scopes served before is loaded in their place."""
        while damaged := self._served_versions.enter(state):
            for version, why in damaged.items():
                self._note("damaged", version=version, why=why)
                self._faults["version_rolled_back"] = f"version {version} is not served: {why}"
            for loop in self._served_versions.loops.values():
                loop.retire(set(damaged))
            state = self._states.change(partial(_without, damaged))

    def _tell_waiting(self, version: str) -> None:
        why = "it was learned on another drafter than the one that serves"
        logger.warning("learning: version %s is not served: %s", version, why)
        self._note("waits", version=version, why=why)


def begin_learning(
    stepped: SteppedEngine, settings: SessionSettings
) -> tuple[LearnSession | RetentionThread | None, Callable[[], ServerLearnStatus]]:
    """A session and what tells its status. Where the folder cannot be used, why, and what deletes old answers in it all
    the same, if anything should: serving goes on. The caller closes what is returned."""
    try:
        session = LearnSession(stepped, settings)
    except Exception as error:  # whatever it is, serving goes on
        fault = f"nothing is learned: {error}"
        expected = isinstance(error, (SlipstreamError, OSError))
        logger.warning("%s; serving goes on", fault, exc_info=not expected)
        status = ServerLearnStatus(faults={"learning_failed": fault})
        if settings.max_age_s is None:
            return None, lambda: status
        alone = RetentionThread(LearnFolder(settings.folder), settings.max_age_s)
        return alone, lambda: ServerLearnStatus(
            faults={"learning_failed": "; ".join(filter(None, (fault, alone.fault)))}
        )
    return session, session.status


def _without(retired: Mapping[str, str], state: LearnState) -> LearnState:
    return state.retire(retired)


def _num_threads(engine: Engine) -> int | None:
    """Those of the engine; on another device one that starts its work."""
    return engine.config.num_threads if engine.model.device.type == "cpu" else 1


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it is written down: without a tenant's name."""
    tenant = message.get("tenant")
    rest = {name: value for name, value in message.items() if name != "tenant" and value is not None}
    return rest if tenant is None else {**rest, "tenant_key": tenant_key(tenant)}
