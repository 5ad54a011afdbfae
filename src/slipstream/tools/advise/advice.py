"""The result of an advice."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.tools.advise.candidates import Candidate
from slipstream.tools.advise.check import CheckedSetting
from slipstream.tools.advise.findings import AdviceFindings
from slipstream.tools.advise.predict import AdvisedPlan, PredictedCell

ADVICE_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LoadAdvice:
    """What is advised at one measured load, for all tasks together."""

    concurrency: int
    setting: str
    """'off' is: do not enable."""
    predicted_speedup: float
    checked: tuple[CheckedSetting, ...] = ()
    """Off, what was predicted to be best, the runner-up; empty where nothing was measured."""

    @property
    def own(self) -> CheckedSetting | None:
        """The measurement of the advised setting."""
        return next((one for one in self.checked if one.name == self.setting), None)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with what was decided by."""
        checked = [{**one.as_json(), "weighed_speedup": one.weighed_speedup} for one in self.checked]
        return {**asdict(self), "checked": checked}


@dataclass(frozen=True, slots=True)
class TraceAdvice:
    """A trace as it is predicted to be served."""

    num_requests: int
    duration_s: float
    mean_in_flight: float
    """Requests at once while there are any, with speculation off."""
    busy_share: float
    """Share of the time that is busy with speculation off."""
    latency_off_s: float
    """Median, from arrival to the last token."""
    latency_s: float
    """With the advised plan."""
    goodput_off: float
    goodput: float


@dataclass(frozen=True)
class Advice:
    """What to run, and whether."""

    provenance: dict[str, Any]
    model: str
    labels: Seq[str]
    traffic: str
    num_requests: dict[str, int]
    """By task, as recorded."""
    num_asked: int
    max_tokens: int | None
    sampling: dict[str, Any]
    candidates: Seq[Candidate]
    plan: AdvisedPlan
    speculative: dict[str, Any]
    """What `--speculative-config` takes."""
    loads: Seq[LoadAdvice]
    predicted: Seq[PredictedCell]
    findings: AdviceFindings
    trace: TraceAdvice | None
    notes: Seq[str]
    wall_s: float

    @property
    def enable(self) -> bool:
        """False where the advice is not to speculate at any measured load."""
        return not self.plan.is_off

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "schema": ADVICE_SCHEMA,
            "enable": self.enable,
            "model": self.model,
            "labels": list(self.labels),
            "traffic": self.traffic,
            "num_requests": self.num_requests,
            "num_asked": self.num_asked,
            "max_tokens": self.max_tokens,
            "sampling": self.sampling,
            "candidates": [candidate.as_json() for candidate in self.candidates],
            "plan": self.plan.as_json(self.candidates),
            "speculative_config": self.speculative,
            "loads": [load.as_json() for load in self.loads],
            "predicted": [asdict(cell) for cell in self.predicted],
            "findings": asdict(self.findings),
            "trace": None if self.trace is None else asdict(self.trace),
            "notes": list(self.notes),
            "wall_s": self.wall_s,
            "provenance": self.provenance,
        }
