"""Slipstream beside its peers on this CPU: same checkpoints, prompts, threads and token counting, interleaved.

    python -m benchmarks.peers.run                       # everything; leave the machine alone while it runs
    python -m benchmarks.peers.run --quick               # one round of few tokens, results beside the environments
    python -m benchmarks.peers.run --models expanded-300m --peers slipstream,openvino --modes off,draft

Builds what is missing (environments, expanded and converted models), then runs round by round. A run that was
stopped goes on where it was. Writes docs/benchmarks/cpu_peers.json and, from it, docs/benchmarks/cpu.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.peers import environments, machine
from benchmarks.peers.catalog import KINDS, PEERS, Catalog, Mode, Model, fill_in, load_catalog
from benchmarks.peers.checkpoints import num_parameters, paths_for, target_path, weight_bytes
from benchmarks.peers.page import write
from benchmarks.peers.protocol import Worker, WorkerRefused
from benchmarks.peers.results import BATCH, Results, Sample, resume
from benchmarks.peers.workload import BATCH_SIZE, Question, context_length, questions
from slipstream.config import check_at_least, reject_unknown
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.provenance import provenance

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "slipstream-peers"
RESULTS = ROOT / "docs/benchmarks/cpu_peers.json"

LOAD_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 600.0
CONVERT_TIMEOUT_S = 1800.0
WARM_UP_TOKENS = 12
SETTLE_S = 0.5
"""How long a worker's threads may go on spinning after its answer before somebody else's turn begins all the same."""
STARTS_S = {"slipstream": 6.0, "transformers": 8.0, "vllm": 30.0, "openvino": 3.0, "llamacpp": 2.0}
"""Estimated start times of each peer's process (imports, loading, warm-up), until one has been measured."""
RESERVE_BYTES = 2 * 2**30
"""Memory that stays free, so that nothing is ever pushed out."""
QUICK = {"prompts_per_task": 1, "max_tokens": 24, "rounds": 1}
KIND_ORDER = {kind: number for number, kind in enumerate(KINDS)}

console = Console(stderr=True, highlight=False)


@dataclass
class Group:
    """Modes that one process serves."""

    peer: str
    weights: str
    load: dict[str, Any]
    modes: list[Mode] = field(default_factory=list)

    @property
    def rank(self) -> tuple[bool, int]:
        """Groups that are compared with each other come together: float32 first, then by kind."""
        return (self.weights != "float32", min(KIND_ORDER[mode.kind] for mode in self.modes))


def grouped(modes: Iterable[Mode]) -> list[Group]:
    """Modes of one peer that load the same thing, together."""
    groups: dict[str, Group] = {}
    for mode in modes:
        key = json.dumps([mode.peer, mode.weights, mode.load], sort_keys=True)
        groups.setdefault(key, Group(mode.peer, mode.weights, mode.load)).modes.append(mode)
    return list(groups.values())


class Driver:
    """Runs the selected modes, model by model, and stores the results on disk."""

    def __init__(self, options: argparse.Namespace, catalog: Catalog, results: Results) -> None:
        self.options = options
        self.catalog = catalog
        self.results = results
        self.pythons: dict[str, Path] = {}
        self.no_environment: dict[str, str] = {}
        self.start_s: dict[tuple[str, str], list[float]] = {}
        """By model and peer: from starting a process to the end of its warm-up."""
        self.peak_bytes: dict[tuple[str, str, str], int] = {}

    def run(self) -> None:
        for model in self.catalog.models:  # what could not run is tried again
            for mode in self.catalog.modes:
                for suffix in ("", " (batch)"):
                    self.results.refused.pop(f"{model.name}: {mode.key}{suffix}", None)
        for peer in dict.fromkeys(mode.peer for mode in self.catalog.modes):
            try:
                self.pythons[peer] = environments.ensure(peer, self.options.venvs, console.print)
            except environments.EnvironmentFailed as failure:
                self.no_environment[peer] = f"its environment cannot be built: {failure}"
        self._convert_everything()
        self._open_session()
        for number, model in enumerate(self.catalog.models):
            console.print(
                f"{model.name}: about {self._minutes(self.catalog.models[number:])} left for all models"
            )
            ModelRun(self, model).run()

    def start(self, peer: str, name: str) -> Worker:
        """A new worker process of `peer`."""
        logs = self.options.venvs / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [str(self.pythons[peer]), "-m", f"benchmarks.peers.workers.{peer}"]
        variables = environments.process_environment(peer, self.options.venvs, self.options.threads)
        return Worker(command, variables, ROOT, logs / f"{name.replace('/', '-').replace(' ', '_')}.log")

    def paths(self, mode: Mode, model: Model) -> tuple[str, str]:
        def convert(source: Path, target: Path, weights: str) -> None:
            console.print(f"{mode.peer}: converting {source.name} to {target.name.removesuffix('.partial')}")
            worker = self.start(mode.peer, f"convert {mode.peer} {target.name}")
            try:
                request = {"op": "convert", "source": str(source), "target": str(target), "weights": weights}
                worker.ask(request, timeout_s=CONVERT_TIMEOUT_S)
            finally:
                worker.close()

        return paths_for(mode, model, self.options.models_dir, convert)

    def save(self) -> None:
        self.results.save(self.options.out)

    def refuse(self, model: Model, mode: Mode, reason: str, *, batch: bool = False) -> None:
        where = f"{model.name}: {mode.key}" + (" (batch)" if batch else "")
        self.results.refused[where] = reason
        console.print(f"{where}: cannot run: {reason}")

    def is_refused(self, model: Model, mode: Mode, *, batch: bool = False) -> bool:
        where = f"{model.name}: {mode.key}"
        return where in self.results.refused or (batch and f"{where} (batch)" in self.results.refused)

    def _convert_everything(self) -> None:
        """Before anything is timed."""
        for model in self.catalog.models:
            if model.expand and not (self.options.models_dir / model.name / "config.json").is_file():
                console.print(f"writing {model.name} to {self.options.models_dir}")
            parameters = num_parameters(target_path(model, self.options.models_dir))
            self.results.models[model.name] = {"title": model.title, "parameters": parameters}
            for mode in self.catalog.modes_of(model):
                if mode.peer in self.no_environment:
                    self.refuse(model, mode, self.no_environment[mode.peer])
                    continue
                try:
                    self.paths(mode, model)
                except WorkerRefused as refusal:
                    self.refuse(model, mode, f"the model cannot be converted: {refusal}")

    def _open_session(self) -> None:
        share = machine.others_share()
        idle = share <= machine.BUSY_SHARE
        console.print(
            f"the machine is {'idle' if idle else 'BUSY: these figures will not be right'} "
            f"({share:.2f} cores in use, load average {machine.load_average():.2f})"
        )
        bandwidth = machine.read_bandwidth_bytes_per_s(self.options.threads)
        console.print(f"memory is read at {bandwidth / 1e9:.1f} GB/s by {self.options.threads} threads")
        self.results.sessions.append(
            {
                **provenance(),
                "command": shlex.join(["python", "-m", "benchmarks.peers.run", *sys.argv[1:]]),
                "threads": self.options.threads,
                "cores": psutil.cpu_count(),
                "memory_bytes": psutil.virtual_memory().total,
                "cores_in_use_before": round(share, 3),
                "load_average_before": round(machine.load_average(), 2),
                "read_bandwidth_bytes_per_s": bandwidth,
            }
        )
        self.save()

    def _minutes(self, models: Iterable[Model]) -> str:
        """What is left, from measured calls where there are some and from the weights' size elsewhere."""
        seconds = 0.0
        for model in models:
            asked = questions(model)
            modes = [mode for mode in self.catalog.modes_of(model) if not self.is_refused(model, mode)]
            for group in grouped(modes):
                known = self.start_s.get((model.name, group.peer))
                estimate_s = STARTS_S[group.peer] + 3 * self.results.models[model.name]["parameters"] / 1e9
                seconds += statistics.mean(known) if known else estimate_s
            for mode in modes:
                left = model.rounds * len(asked) - len(self.results.done(model.name, mode.key))
                seconds += max(0, left) * self._call_s(model, mode)
        return f"{seconds / 60:.0f} minutes"

    def _call_s(self, model: Model, mode: Mode) -> float:
        known = [sample.seconds for sample in self.results.of(model.name, mode.key)]
        if known:
            return statistics.mean(known)
        parameters = self.results.models[model.name]["parameters"]
        return model.max_tokens * (weight_bytes(parameters, mode.weights) / 20e9 + 0.002) + 0.1


class ModelRun:
    """All rounds of one model. Processes stay loaded as long as memory allows; then they go in waves."""

    def __init__(self, driver: Driver, model: Model) -> None:
        self.driver = driver
        self.model = model
        self.asked = questions(model)
        self.context = context_length(model, self.asked)
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
        return known or 2.2 * weight_bytes(parameters, "float32") + 2**30

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
            "max_model_len": self.context,
            "max_num_seqs": BATCH_SIZE,
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
        """Short calls, one request and several at once; prompts are cut, for at 1 G a long one takes seconds."""
        first = self.asked[0].prompts[0][:WARM_UP_TOKENS]
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
                if question.task == BATCH and not self._batch_asked(mode):
                    continue
                if id(group) not in self.resident or self._is_done(mode, number, question):
                    continue
                self._sample(number, group, mode, question)
        for group in wave:
            self._write_down(group)
        self.driver.save()
        names = ", ".join(mode.key for _, mode in sorted(turns, key=lambda turn: turn[1].key))
        minutes = self.driver._minutes(self._models_left())
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
        busy_s, own_s = machine.busy_cpu_s(), worker.cpu_s()
        if id(group) in self.rested:
            since_s, used_s = self.rested[id(group)]
            rest = (time.perf_counter() - since_s, own_s - used_s)
            self.idle.setdefault(id(group), []).append(rest)
        answers = self._call(group, mode, question, self.model.max_tokens)
        if answers is None:
            return
        own_s = worker.cpu_s() - own_s
        busy_s = machine.busy_cpu_s() - busy_s
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
            self.driver.refuse(self.model, mode, str(refusal), batch=batch)
            if worker.process.poll() is not None:
                self._close(group)
            return None
        return answers

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
            if question.task != BATCH or self._batch_asked(mode)
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


def selected(catalog: Catalog, options: argparse.Namespace) -> Catalog:
    """The part of the catalogue that the command line asks for; raises `ConfigError` for names that are not there."""
    models = _chosen(options.models, [model.name for model in catalog.models], "model")
    peers = _chosen(options.peers, list(PEERS), "peer")
    names = {name for mode in catalog.modes for name in (mode.name, mode.kind, mode.weights, mode.key)}
    wanted = _chosen(options.modes, sorted(names), "mode")
    modes = [
        mode
        for mode in catalog.modes
        if mode.peer in peers and {mode.name, mode.kind, mode.weights, mode.key} & set(wanted)
    ]
    if not modes:
        raise ConfigError("no mode is left; --peers and --modes exclude each other")
    changes: dict[str, Any] = dict(QUICK) if options.quick else {}
    given = {name: getattr(options, name) for name in ("prompts_per_task", "max_tokens", "rounds")}
    changes = {**changes, **{name: value for name, value in given.items() if value is not None}}
    check_at_least("--", 1, **changes)
    kept = [dataclasses.replace(model, **changes) for model in catalog.models if model.name in models]
    return Catalog(kept, modes)


def _chosen(text: str | None, valid: list[str], what: str) -> list[str]:
    if text is None:
        return valid
    names = [name.strip() for name in text.split(",") if name.strip()]
    reject_unknown(names, valid, what)
    return names


def code_fingerprint() -> str:
    """What the figures depend on in this checkout: Slipstream's own code, the workers and their requirements."""
    folder = Path(__file__).parent
    files = [
        *ROOT.glob("src/slipstream/**/*.py"),
        *ROOT.glob("src/slipstream/models/cpu/kernels/*"),
        *folder.glob("workers/*.py"),
        *folder.glob("requirements/*.txt"),
        folder / "environments.py",
    ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def check_definitions(results: Results, catalog: Catalog) -> None:
    """Raise `ConfigError` when a mode that has samples is defined otherwise by now."""
    definitions = {mode.key: dataclasses.asdict(mode) for mode in catalog.modes}
    for name, entry in results.modes.items():
        key = name.split(": ", 1)[1]
        if key in definitions and entry["definition"] != definitions[key]:
            raise ConfigError(f"mode {key!r} was defined otherwise when its samples were taken; give --fresh")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one round, one prompt a task, 24 tokens")
    parser.add_argument("--models", help="names of models, with commas; all unless given")
    parser.add_argument("--peers", help=f"some of {', '.join(PEERS)}")
    parser.add_argument("--modes", help="names, kinds or weights of modes, with commas")
    parser.add_argument("--prompts-per-task", type=int, help="instead of each model's own")
    parser.add_argument("--max-tokens", type=int, help="instead of each model's own")
    parser.add_argument("--rounds", type=int, help="instead of each model's own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the order in which modes take turns")
    parser.add_argument(
        "--venvs", type=Path, default=CACHE / "venvs", help="where the peers' environments are"
    )
    parser.add_argument("--models-dir", type=Path, default=CACHE / "models", help="where larger models are")
    parser.add_argument("--out", type=Path, help=f"results; {RESULTS.relative_to(ROOT)} unless --quick")
    parser.add_argument("--fresh", action="store_true", help="replace earlier results instead of going on")
    options = parser.parse_args(arguments)
    if options.out is None:
        options.out = options.venvs / "cpu_peers_quick.json" if options.quick else RESULTS
    options.venvs, options.models_dir = options.venvs.resolve(), options.models_dir.resolve()
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    started_s = time.monotonic()
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # workers are ended on the way out
    try:
        check_at_least("--", 1, threads=options.threads)
        catalog = selected(load_catalog(), options)
        settings = {
            "threads": options.threads,
            "seed": options.seed,
            "models": {model.name: dataclasses.asdict(model) for model in catalog.models},
        }
        results = resume(options.out, settings, code_fingerprint(), fresh=options.fresh)
        check_definitions(results, catalog)
        Driver(options, catalog, results).run()
        page = options.out.with_name("cpu.md") if options.out == RESULTS else options.out.with_suffix(".md")
        write(results, options.out, page)
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(f"{(time.monotonic() - started_s) / 60:.0f} minutes; wrote {options.out} and {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
