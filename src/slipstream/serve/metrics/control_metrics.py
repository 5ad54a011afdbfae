"""The controller's report as metrics, read at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.control.types import ControlReport, MethodReport, Speedup, TaskReport
from slipstream.serve.accounts import OTHER
from slipstream.serve.dashboard.history import MAX_POSITIONS


class PositionCounts(Protocol):
    """Who counts how often each position of a draft was reached, and its token accepted."""

    @property
    def positions(self) -> Mapping[str, tuple[list[int], list[int]]]:
        """Since the start, by drafter: reached and accepted, by position."""
        ...


class ControlMetrics(Collector):
    """Metrics of the last report, and of the acceptance by position. Tasks and drafters that the report no longer
    has have no metrics."""

    def __init__(self, history: PositionCounts, task_label: Callable[[str], str]) -> None:
        """`task_label` makes a label of a task's name; of several tasks with one label the latest is shown."""
        self._history = history
        self._task_label = task_label
        self.report: ControlReport | None = None
        """None before the first."""
        self.batches: dict[int, list[int]] = {}
        """As `Snapshot.batches` has them."""

    def collect(self) -> Iterator[Metric]:
        yield from self._positions()
        yield self._batches()
        if self.report is not None:
            yield from _overall(self.report)
            yield from _methods(self.report.methods)
            labelled = {self._task_label(task.task): task for task in self.report.tasks}
            yield from _tasks([(label, task) for label, task in labelled.items() if label != OTHER])

    def _positions(self) -> Iterator[Metric]:
        labels = ("method", "position")
        reached = CounterMetricFamily(
            "conditional_reached",
            "How often a draft token at this position was checked after all before it were accepted.",
            labels=labels,
        )
        accepted = CounterMetricFamily(
            "conditional_accepted", "How often such a draft token was accepted.", labels=labels
        )
        for method, counts in list(self._history.positions.items()):
            for position, (num_reached, num_accepted) in enumerate(zip(*counts, strict=True)):
                if num_reached:
                    reached.add_metric([method, str(position)], num_reached)
                    accepted.add_metric([method, str(position)], num_accepted)
        yield reached
        yield accepted

    def _batches(self) -> Metric:
        """Mean draft depth by the number of decoding sequences, rounded up to a power of two to bound the labels."""
        sums: dict[int, list[int]] = {}
        for size, (_, num_answers, depths) in self.batches.items():
            rounded = sums.setdefault(1 << (size - 1).bit_length(), [0, 0])
            rounded[0] += num_answers
            rounded[1] += depths
        family = GaugeMetricFamily(
            "batch_draft_depth",
            "Mean draft depth in the last minutes, by number of answers in a step, rounded up to a power of two.",
            labels=["batch"],
        )
        for size, (num_answers, depths) in sorted(sums.items()):
            family.add_metric([str(size)], depths / num_answers)
        return family


def _gauge(name: str, help_: str, value: float | None) -> Iterator[Metric]:
    """Nothing where there is no value."""
    if value is not None:
        yield GaugeMetricFamily(name, help_, value)


def _overall(report: ControlReport) -> Iterator[Metric]:
    yield from _gauge(
        "speculation_adaptive", "1 where the controller chooses drafter and depth.", report.adaptive
    )
    yield from _gauge("speculation_active", "1 while any task is drafted for.", report.speculating)
    yield from _gauge(
        "speculation_stands_back",
        "1 while drafting is off because probes measured a speedup below 1.",
        report.stands_back,
    )
    yield from _gauge("probe_share", "Share of time spent on probes and exploration.", report.probe_share)
    yield from _gauge(
        "estimated_speedup",
        "Speedup over no speculation, estimated by the cost model.",
        report.estimated_speedup,
    )
    if report.realised is not None:
        for suffix, value in _parts(report.realised).items():
            yield from _gauge(
                f"realised_speedup{suffix}",
                "Speedup over no speculation, measured by paired probes; with a 95 % interval.",
                value,
            )


def _parts(speedup: Speedup) -> dict[str, float]:
    return {"": speedup.ratio, "_low": speedup.low, "_high": speedup.high, "_pairs": speedup.num_pairs}


def _methods(methods: tuple[MethodReport, ...]) -> Iterator[Metric]:
    rate = GaugeMetricFamily(
        "drafter_acceptance_rate", "Recent acceptance rate of all tasks.", labels=["method"]
    )
    survival = GaugeMetricFamily(
        "drafter_survival",
        "Probability that a draft is accepted up to this position.",
        labels=["method", "position"],
    )
    steps = CounterMetricFamily(
        "drafter_steps", "Steps of sequences that this drafter drafted for.", labels=["method"]
    )
    failures = CounterMetricFamily(
        "drafter_failures", "Failures of the drafter, counted by sequence.", labels=["method"]
    )
    retired = GaugeMetricFamily(
        "drafter_retired", "1 while the drafter is paused or retired for its failures.", labels=["method"]
    )
    for method in methods:
        if method.acceptance_rate is not None:
            rate.add_metric([method.name], method.acceptance_rate)
        for position, chance in enumerate(method.survival[:MAX_POSITIONS]):
            survival.add_metric([method.name, str(position)], chance)
        steps.add_metric([method.name], method.num_steps)
        failures.add_metric([method.name], method.num_failures)
        retired.add_metric([method.name], method.retired)
    yield from (rate, survival, steps, failures, retired)


def _tasks(tasks: list[tuple[str, TaskReport]]) -> Iterator[Metric]:
    figures: dict[str, tuple[str, Callable[[TaskReport], float | None]]] = {
        "draft_depth": ("Recent draft tokens a step.", lambda task: task.depth),
        "acceptance_rate": ("Recent acceptance rate.", lambda task: task.acceptance_rate),
        "acceptance_length": ("Recent tokens a target pass.", lambda task: task.acceptance_length),
        "break_even": (
            "Break-even acceptance rate: below it drafting does not pay.",
            lambda task: task.break_even,
        ),
        "estimated_speedup": (
            "Speedup over no speculation, estimated by the cost model.",
            lambda task: task.estimated_speedup,
        ),
    }
    for name, (help_, figure) in figures.items():
        family = GaugeMetricFamily(f"task_{name}", help_, labels=["task"])
        for label, task in tasks:
            value = figure(task)
            if value is not None:
                family.add_metric([label], value)
        yield family
    for suffix in ("", "_low", "_high", "_pairs"):
        family = GaugeMetricFamily(
            f"task_realised_speedup{suffix}",
            "Speedup over no speculation, measured by paired probes; with a 95 % interval.",
            labels=["task"],
        )
        for label, task in tasks:
            if task.realised is not None:
                family.add_metric([label], _parts(task.realised)[suffix])
        yield family
    method = GaugeMetricFamily(
        "task_method", "1 for the drafter that is used now.", labels=["task", "method"]
    )
    for label, task in tasks:
        method.add_metric([label, task.method or "off"], 1)
    yield method
