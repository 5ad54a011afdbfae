"""The raw results: one JSON file, written after every prompt, so that a run can be taken up again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

BATCH = "batch"
"""The task of a sample with several requests at once."""


@dataclass(frozen=True)
class Sample:
    """One call of one mode: a prompt, or a batch of them."""

    model: str
    mode: str
    round: int
    task: str
    index: int
    """Which prompt of the task."""
    seconds: float
    first_token_s: float | None
    token_ids: list[list[int]]
    """Output token ids, prompt by prompt; what is counted."""
    cpu_s: float
    """Processor time of the worker during the call."""
    other_cpu_s: float
    """Processor time of everything else on the machine during the call: idle workers, other programs, the host."""
    session: int = 0
    """Which start of the driver took it."""
    peak_memory_bytes: int | None = None
    """The worker's highest resident size up to the end of the call; shorter prompts were asked before."""

    @property
    def cell(self) -> tuple[str, int, str, int]:
        """What pairs samples of different modes."""
        return (self.model, self.round, self.task, self.index)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self.token_ids)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first over the seconds after it; None where the first one's time is not known."""
        if self.first_token_s is None or len(self.token_ids) != 1 or self.seconds <= self.first_token_s:
            return None
        return (self.num_tokens - 1) / (self.seconds - self.first_token_s)


@dataclass
class Results:
    """Everything that the report needs. `settings` and `code` say what may be resumed."""

    settings: dict[str, Any]
    code: str
    sessions: list[dict[str, Any]] = field(default_factory=list)
    """Provenance of each start of the driver that added samples."""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    modes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By `model: mode`: the kind, weights, versions, notes, load time and peak memory."""
    refused: dict[str, str] = field(default_factory=dict)
    """By `model: mode`: why it cannot run; `(batch)` behind it where only that cannot."""
    samples: list[Sample] = field(default_factory=list)

    def done(self, model: str, mode: str) -> set[tuple[int, str, int]]:
        """Round, task and index of what this mode has answered."""
        return {(s.round, s.task, s.index) for s in self.samples if (s.model, s.mode) == (model, mode)}

    def of(self, model: str, mode: str, *, batch: bool = False) -> Iterator[Sample]:
        for sample in self.samples:
            if (sample.model, sample.mode) == (model, mode) and (sample.task == BATCH) == batch:
                yield sample

    def save(self, path: Path) -> None:
        """Write the file whole and put it in its place in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        samples = ",\n".join("  " + json.dumps(sample) for sample in content.pop("samples"))
        head = json.dumps(content, indent=1).removesuffix("\n}")
        temporary = path.with_suffix(".partial")
        temporary.write_text(f'{head},\n "samples": [\n{samples}\n ]\n}}\n', encoding="utf-8")
        temporary.replace(path)


class ModelEntries:
    """What results say of one model's modes, by mode key (`peer/name/weights`)."""

    def __init__(self, results: Results, name: str) -> None:
        self.name = name
        self.title: str = results.models[name]["title"]
        self.parameters: int = results.models[name]["parameters"]
        self.entries = _of_model(results.modes, name)
        self.refused = _of_model(results.refused, name)

    def definition(self, mode: str) -> dict[str, Any]:
        """The mode as the catalogue had it."""
        return self.entries[mode]["definition"]


def _of_model(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key.split(": ", 1)[1]: entry for key, entry in entries.items() if key.startswith(f"{name}: ")}


def load(path: Path) -> Results:
    """Read results; raises `ConfigError` for a file that is not of this kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        samples = [Sample(**sample) for sample in content.pop("samples")]
        return Results(**content, samples=samples)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} holds no results of this benchmark: {error}") from None


def resume(path: Path, settings: dict[str, Any], code: str, *, fresh: bool) -> Results:
    """Earlier results to go on with, or empty ones.

    Raises `ConfigError` when the file at `path` came from other settings or other code: samples that were not
    taken alike must not be compared.
    """
    if fresh or not path.exists():
        return Results(settings, code)
    earlier = load(path)
    models = {**earlier.settings["models"], **settings["models"]}
    same_models = all(models[name] == model for name, model in earlier.settings["models"].items())
    same = {key: value for key, value in earlier.settings.items() if key != "models"} == {
        key: value for key, value in settings.items() if key != "models"
    }
    for what, alike in (("settings", same and same_models), ("code", earlier.code == code)):
        if not alike:
            raise ConfigError(
                f"{path} was made with other {what}; give --fresh to replace it, or --out for another file"
            )
    earlier.settings["models"] = models
    return earlier
