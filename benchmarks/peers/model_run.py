"""All rounds of one model: workers stay loaded as long as memory allows and take turns, prompt by prompt."""

from __future__ import annotations

import dataclasses
import random
import signal
import time
from collections.abc import Iterable
from typing import Any

import psutil

from benchmarks.harness.processes import Worker, WorkerRefused
from benchmarks.peers import machine
from benchmarks.peers.catalog import Mode, Model, fill_in
from benchmarks.peers.checkpoints import weight_bytes
from benchmarks.peers.conditions import tidy
from benchmarks.peers.driver import Driver, console
from benchmarks.peers.groups import Group, grouped
from benchmarks.peers.results import BATCH, Sample
from benchmarks.peers.workload import BATCH_SIZE, Question, context_length, questions

LOAD_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 600.0
WARM_UP_TOKENS = 12
SETTLE_S = 0.5
"""How long a worker's threads may go on spinning after its answer before somebody else's turn begins all the same."""
STOPPED = (-signal.SIGTERM, -signal.SIGINT)
"""Ends of a worker that say that somebody stops the run, not that the peer cannot."""
RESERVE_BYTES = 2 * 2**30
"""Memory that stays free, so that nothing is ever pushed out."""


def run_models(driver: Driver) -> None:
    """Prepare, then run every model."""
    driver.prepare()
    driver.open_session()
    models = driver.catalog.models
    for number, model in enumerate(models):
        console.print(f"{model.name}: about {driver.minutes(models[number:])} left for all models")
        ModelRun(driver, model).run()


class ModelRun:
    """All rounds of one model. Processes stay loaded as long as memory allows; then they go in waves."""

    def __init__(self, driver: Driver, model: Model) -> None:
        self.driver = driver
        self.model = model
        self.asked = questions(model)
        self.resident: dict[int, Worker] = {}
        """By the identity of the group."""
        self.rested: dict[int, tuple[float, float]] = {}
        """By the identity of the group: the clock and the worker's processor time at the end of its last turn."""
        self.idle: dict[int, list[tuple[float, float]]] = {}
        """Seconds between two turns, and processor time that the worker used in them."""

    def run(self) -> None:
        modes = [
            m for m in self.driver.catalog.modes_of(self.model) if not self.driver.is_refused(self.model, m)
        ]
        groups = grouped(modes)
        waves: list[list[Group]] = []
        try:
            for number in range(self.model.rounds):
                waves = self._round(number, groups, waves)
        finally:
            self._close_all(groups)
            tidy()
            self.driver.save()

    def _round(self, number: int, groups: list[Group], waves: list[list[Group]]) -> list[list[Group]]:
        """Run one round and return its waves: the next one takes them backwards, beginning with what is loaded."""
        order = random.Random(f"{self.driver.options.seed} {self.model.name} {number}")
        if not waves:
            left = [group for group in groups if self._missing(group, range(self.model.rounds))]
            order.shuffle(left)
            left.sort(key=lambda group: group.rank)
            while left:
                wave = self._load_wave(left)
                left = left[len(wave) :]
                waves.append(wave)
                self._run_wave(number, wave, order)
                if left:
                    self._close_all(wave)
            return waves
        waves = waves[::-1]
        for position, wave in enumerate(waves):
            for group in wave:
                self._load(group)
            self._run_wave(number, wave, order)
            if position + 1 < len(waves):
                self._close_all(wave)
        return waves

    def _load_wave(self, groups: list[Group]) -> list[Group]:
        """Load from the front until memory would run out; at least one."""
        wave: list[Group] = []
        for group in groups:
            if wave and self._need_bytes(group) + RESERVE_BYTES > psutil.virtual_memory().available:
                break
            wave.append(group)
            self._load(group)
        return wave

    def _need_bytes(self, group: Group) -> float:
        """Peak memory of such a process: measured if one ran before, otherwise estimated from the weights."""
        known = self.driver.peak_bytes.get((self.model.name, group.peer, group.weights))
        parameters = self.driver.results.models[self.model.name]["parameters"]
        both = weight_bytes(parameters, self.model.stored) + weight_bytes(parameters, group.weights)
        return known or 1.3 * both + 2**30

    def _load(self, group: Group) -> None:
        if id(group) in self.resident or not self._alive(group):
            return
        if not self._missing(group, range(self.model.rounds)):
            return
        target, draft = self.driver.paths(group.modes[0], self.model)
        started_s = time.monotonic()
        worker = self.driver.start(group.peer, f"{self.model.name} {group.modes[0].key}")
        request = {
            "op": "load",
            "target": target,
            "draft": draft,
            "weights": group.weights,
            "threads": self.driver.options.threads,
            "max_model_len": self.context_length_of(group),
            "max_num_seqs": BATCH_SIZE if self.model.batch else 1,
            "options": fill_in(group.load, draft),
        }
        try:
            ready = worker.ask(request, timeout_s=LOAD_TIMEOUT_S)
        except WorkerRefused as refusal:
            worker.close()
            for mode in group.modes:
                self.driver.refuse(self.model, mode, str(refusal))
            return
        self.resident[id(group)] = worker
        for mode in group.modes:
            self.driver.results.modes[f"{self.model.name}: {mode.key}"] = {
                "definition": dataclasses.asdict(mode),
                "versions": ready["versions"],
                "notes": ready["notes"],
                "load_s": ready["load_s"],
            }
            self._warm_up(group, mode)
        if id(group) not in self.resident:
            return
        self._settle(group)
        took_s = time.monotonic() - started_s
        self.driver.start_s.setdefault((self.model.name, group.peer), []).append(took_s)
        peak = worker.peak_memory_bytes()
        self.driver.peak_bytes[self.model.name, group.peer, group.weights] = peak

    def _warm_up(self, group: Group, mode: Mode) -> None:
        """Short calls, one request and several at once; a task's prompts are cut, which at 1 G take seconds."""
        first = self.asked[0].prompts[0]
        if not self.model.contexts:
            first = first[:WARM_UP_TOKENS]
        shapes = [Question("warm-up", 0, [first])]
        if self._batch_asked(mode):
            shapes.append(Question(BATCH, 0, [first] * len(self.asked[-1].prompts)))
        for question in shapes:
            if id(group) in self.resident and not self.driver.is_refused(self.model, mode):
                self._call(group, mode, question, WARM_UP_TOKENS)

    def _run_wave(self, number: int, wave: list[Group], order: random.Random) -> None:
        """Prompt by prompt, every mode answers in turn; the order is drawn anew for each prompt."""
        turns = [(group, mode) for group in wave for mode in group.modes]
        for question in self.asked:
            order.shuffle(turns)
            for group, mode in turns:
                if not self.asks_of(mode, question):
                    continue
                if id(group) not in self.resident or self._is_done(mode, number, question):
                    continue
                self._sample(number, group, mode, question)
            if self.model.contexts:
                left = self.driver.minutes(self._models_left())
                console.print(
                    f"{self.model.name}, text {question.index + 1}, {question.task}: about {left} left"
                )
        for group in wave:
            self._write_down(group)
        self.driver.save()
        names = ", ".join(mode.key for _, mode in sorted(turns, key=lambda turn: turn[1].key))
        minutes = self.driver.minutes(self._models_left())
        console.print(f"{self.model.name}, round {number + 1}: {names}; about {minutes} left")

    def _write_down(self, group: Group) -> None:
        """What the process itself has used so far."""
        if id(group) not in self.resident:
            return
        rests = self.idle.get(id(group), [])
        slept_s = sum(rest[0] for rest in rests)
        for mode in group.modes:
            entry = self.driver.results.modes.get(f"{self.model.name}: {mode.key}")
            if entry is not None:
                entry["peak_memory_bytes"] = self.resident[id(group)].peak_memory_bytes()
                entry["idle_cores"] = round(sum(rest[1] for rest in rests) / slept_s, 4) if slept_s else None

    def _settle(self, group: Group) -> None:
        """Wait until the worker's threads sleep: some OpenMP runtimes spin for a while after their work."""
        worker = self.resident[id(group)]
        deadline_s = time.perf_counter() + SETTLE_S
        used_s = worker.cpu_s()
        while time.perf_counter() < deadline_s:
            time.sleep(0.02)
            before_s, used_s = used_s, worker.cpu_s()
            if used_s == before_s:
                break
        self.rested[id(group)] = (time.perf_counter(), used_s)

    def _sample(self, number: int, group: Group, mode: Mode, question: Question) -> None:
        worker = self.resident[id(group)]
        if id(group) in self.rested:
            since_s, used_s = self.rested[id(group)]
            rest = (time.perf_counter() - since_s, worker.cpu_s() - used_s)
            self.idle.setdefault(id(group), []).append(rest)
        with question.condition.imposed(worker.process_ids()):
            busy_s, own_s = machine.busy_cpu_s(), worker.cpu_s()
            answers = self._call(group, mode, question, self.model.max_tokens)
            busy_s, own_s = machine.busy_cpu_s() - busy_s, worker.cpu_s() - own_s
        if answers is None:
            return
        self._settle(group)
        sample = Sample(
            model=self.model.name,
            mode=mode.key,
            round=number,
            task=question.task,
            index=question.index,
            seconds=answers["seconds"],
            first_token_s=answers["first_token_s"],
            token_ids=answers["token_ids"],
            cpu_s=round(own_s, 3),
            other_cpu_s=round(max(0.0, busy_s - own_s), 3),
            session=len(self.driver.results.sessions) - 1,
            peak_memory_bytes=worker.peak_memory_bytes(),
        )
        self.driver.results.samples.append(sample)
        self.driver.save()

    def _call(self, group: Group, mode: Mode, question: Question, max_tokens: int) -> dict[str, Any] | None:
        """The worker's answers, or None after a refusal, which is written down."""
        worker = self.resident[id(group)]
        batch = question.task == BATCH
        request = {
            "op": "generate",
            "prompts": question.prompts,
            "max_tokens": max_tokens,
            "options": mode.call,
        }
        try:
            answers = worker.ask(request, timeout_s=CALL_TIMEOUT_S)
            counts = {len(ids) for ids in answers["token_ids"]}
            if counts != {max_tokens}:
                raise WorkerRefused(f"it gave {sorted(counts)} tokens where {max_tokens} were asked for")
        except WorkerRefused as refusal:
            if worker.process.poll() in STOPPED:
                raise SystemExit(f"{mode.key}: the worker was told to end") from None
            self.driver.refuse(self.model, mode, str(refusal), batch=batch)
            if worker.process.poll() is not None:
                self._close(group)
            return None
        return answers

    def asks_of(self, mode: Mode, question: Question) -> bool:
        if question.task == BATCH:
            return self._batch_asked(mode)
        return mode.longest is None or question.num_prompt_tokens <= mode.longest

    def context_length_of(self, group: Group) -> int:
        asked = [
            question for question in self.asked if any(self.asks_of(mode, question) for mode in group.modes)
        ]
        return context_length(self.model, asked)

    def _batch_asked(self, mode: Mode) -> bool:
        return self.model.batch and mode.batch and not self.driver.is_refused(self.model, mode, batch=True)

    def _alive(self, group: Group) -> bool:
        return any(not self.driver.is_refused(self.model, mode) for mode in group.modes)

    def _is_done(self, mode: Mode, number: int, question: Question) -> bool:
        batch = question.task == BATCH
        if self.driver.is_refused(self.model, mode, batch=batch):
            return True
        return (number, question.task, question.index) in self.driver.results.done(self.model.name, mode.key)

    def _missing(self, group: Group, rounds: Iterable[int]) -> bool:
        return any(
            not self._is_done(mode, number, question)
            for number in rounds
            for mode in group.modes
            for question in self.asked
            if self.asks_of(mode, question)
        )

    def _models_left(self) -> list[Model]:
        models = self.driver.catalog.models
        return models[models.index(self.model) :]

    def _close_all(self, wave: list[Group]) -> None:
        for group in wave:
            self._close(group)

    def _close(self, group: Group) -> None:
        self._write_down(group)
        self.rested.pop(id(group), None)
        worker = self.resident.pop(id(group), None)
        if worker is not None:
            worker.close()
