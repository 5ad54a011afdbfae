"""What every model's run needs: environments, converted models, worker processes, and the results on disk."""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
from rich.console import Console

from benchmarks.harness.processes import Worker, WorkerRefused
from benchmarks.peers import conditions, environments, machine
from benchmarks.peers.catalog import Catalog, Mode, Model
from benchmarks.peers.checkpoints import num_parameters, paths_for, target_path, weight_bytes
from benchmarks.peers.groups import grouped
from benchmarks.peers.results import Results
from benchmarks.peers.workload import Question, questions
from slipstream.models.cpu.native import instructions
from slipstream.profiling.provenance import provenance, without_folders

CONVERT_TIMEOUT_S = 1800.0
STARTS_S = {"slipstream": 6.0, "transformers": 8.0, "vllm": 30.0, "openvino": 3.0, "llamacpp": 2.0}
"""Estimated start times of each peer's process (imports, loading, warm-up), until one has been measured."""
PROMPT_ROWS = 12
"""Rows of a prompt that are estimated to take as long as a step, until a call has been measured."""

console = Console(stderr=True, highlight=False, soft_wrap=True)


class Driver:
    """Prepares the selected modes, starts their workers, and stores the results on disk."""

    def __init__(self, options: argparse.Namespace, catalog: Catalog, results: Results) -> None:
        self.options = options
        self.catalog = catalog
        self.results = results
        self.pythons: dict[str, Path] = {}
        self.no_environment: dict[str, str] = {}
        self.start_s: dict[tuple[str, str], list[float]] = {}
        """By model and peer: from starting a process to the end of its warm-up."""
        self.peak_bytes: dict[tuple[str, str, str], int] = {}

    def prepare(self) -> None:
        """Environments and models; raises `ConfigError` for a condition that cannot be imposed."""
        for model in self.catalog.models:
            conditions.check(model.conditions)
        for model in self.catalog.models:  # what could not run is tried again
            for mode in self.catalog.modes:
                for suffix in ("", " (batch)"):
                    self.results.refused.pop(f"{model.name}: {mode.key}{suffix}", None)
        for peer in dict.fromkeys(mode.peer for mode in self.catalog.modes):
            try:
                self.pythons[peer] = environments.ensure(
                    peer, self.options.venvs, console.print, self.options.elsewhere
                )
            except environments.EnvironmentFailed as failure:
                self.no_environment[peer] = f"its environment cannot be built: {failure}"
        self._convert_everything()

    def start(self, peer: str, name: str) -> Worker:
        """A new worker process of `peer`."""
        logs = self.options.venvs / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [str(self.pythons[peer]), "-m", f"benchmarks.peers.workers.{peer}"]
        variables = environments.process_environment(
            peer, self.options.venvs, self.options.threads, self.options.elsewhere
        )
        return Worker(command, logs / f"{name.replace('/', '-').replace(' ', '_')}.log", variables)

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
        reason = reason.replace(f"{self.options.models_dir}/", "")  # a result names no folder of a machine
        self.results.refused[where] = reason
        console.print(f"{where}: cannot run: {reason}")

    def is_refused(self, model: Model, mode: Mode, *, batch: bool = False) -> bool:
        where = f"{model.name}: {mode.key}"
        return where in self.results.refused or (batch and f"{where} (batch)" in self.results.refused)

    def _convert_everything(self) -> None:
        """Before anything is timed."""
        for model in self.catalog.models:
            if model.expand and not (self.options.models_dir / model.folder / "config.json").is_file():
                console.print(f"writing {model.folder} to {self.options.models_dir}")
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

    def open_session(self) -> None:
        """Say what else the machine does, and write down where the samples that follow come from."""
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
                "instructions": instructions(),
                "command": shlex.join(
                    ["python", "-m", "benchmarks.peers.run", *map(without_folders, sys.argv[1:])]
                ),
                "threads": self.options.threads,
                "cores": psutil.cpu_count(),
                "memory_bytes": psutil.virtual_memory().total,
                "cores_in_use_before": round(share, 3),
                "load_average_before": round(machine.load_average(), 2),
                "read_bandwidth_bytes_per_s": bandwidth,
            }
        )
        self.save()

    def minutes(self, models: Iterable[Model]) -> str:
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
                done = self.results.done(model.name, mode.key)
                for question in asked:
                    if mode.longest is None or question.num_prompt_tokens <= mode.longest:
                        times = sum(
                            (number, question.task, question.index) not in done
                            for number in range(model.rounds)
                        )
                        seconds += times * self._call_s(model, mode, question)
        return f"{seconds / 60:.0f} minutes"

    def _call_s(self, model: Model, mode: Mode, question: Question) -> float:
        """Measured calls of the same task; else from the size of the weights."""
        samples = list(self.results.of(model.name, mode.key))
        known = [sample.seconds for sample in samples if sample.task == question.task or not model.contexts]
        if known:
            return statistics.mean(known)
        parameters = self.results.models[model.name]["parameters"]
        steps = model.max_tokens + question.num_prompt_tokens / PROMPT_ROWS
        return steps * (weight_bytes(parameters, mode.weights) / 20e9 + 0.002) + 0.1
