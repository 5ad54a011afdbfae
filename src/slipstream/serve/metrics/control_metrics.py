"""What the control of speculation has found out, as metrics: as they are at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.control.report import ControlReport, MethodReport, Speedup, TaskReport
from slipstream.serve.api.task_labels import OTHER
from slipstream.serve.dashboard.history import MAX_POSITIONS, History


class ControlMetrics(Collector):
    """Metrics of the last report, and of the acceptance by position. A task or drafter that is gone has none."""

    def __init__(self, history: History, task_label: Callable[[str], str]) -> None:
        """`task_label` makes a label of what reports call a task; of several of one label the latest is shown."""
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
            "conditional_reached", "Drafts checked at this position below an accepted path.", labels=labels
        )
        accepted = CounterMetricFamily("conditional_accepted", "Of them, those accepted.", labels=labels)
        for method, counts in list(self._history.positions.items()):
            for position, (num_reached, num_accepted) in enumerate(zip(*counts, strict=True)):
                if num_reached:
                    reached.add_metric([method, str(position)], num_reached)
                    accepted.add_metric([method, str(position)], num_accepted)
        yield reached
        yield accepted

    def _batches(self) -> Metric:
        """Sizes are rounded up to powers of two, to have few."""
        sums: dict[int, list[int]] = {}
        for size, (_, num_answers, depths) in self.batches.items():
            rounded = sums.setdefault(1 << (size - 1).bit_length(), [0, 0])
            rounded[0] += num_answers
            rounded[1] += depths
        family = GaugeMetricFamily(
            "batch_draft_depth",
            "Mean depth of drafts in the last minutes, by answers in a step, rounded up to a power of two.",
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
    yield from _gauge("speculation_adaptive", "1 where drafter and depth are chosen.", report.adaptive)
    yield from _gauge("speculation_active", "1 while anything is drafted for.", report.speculating)
    yield from _gauge(
        "speculation_stands_back",
        "1 while nothing is drafted because drafts lost in probes.",
        report.stands_back,
    )
    yield from _gauge("probe_share", "Share of the time that probes and tries cost.", report.probe_share)
    yield from _gauge("estimated_speedup", "By the model of costs.", report.estimated_speedup)
    if report.realised is not None:
        for suffix, value in _parts(report.realised).items():
            yield from _gauge(f"realised_speedup{suffix}", "By paired probes; 95 % interval.", value)


def _parts(speedup: Speedup) -> dict[str, float]:
    return {"": speedup.ratio, "_low": speedup.low, "_high": speedup.high, "_pairs": speedup.num_pairs}


def _methods(methods: tuple[MethodReport, ...]) -> Iterator[Metric]:
    rate = GaugeMetricFamily("drafter_acceptance_rate", "Pooled α of late.", labels=["method"])
    survival = GaugeMetricFamily(
        "drafter_survival", "Chance that a draft stands down to here.", labels=["method", "position"]
    )
    steps = CounterMetricFamily("drafter_steps", "How often a sequence was drafted for.", labels=["method"])
    failures = CounterMetricFamily("drafter_failures", "How often it failed a sequence.", labels=["method"])
    retired = GaugeMetricFamily("drafter_retired", "1 once it is never asked again.", labels=["method"])
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
        "draft_depth": ("Draft tokens a step, of late.", lambda task: task.depth),
        "acceptance_rate": ("α of late.", lambda task: task.acceptance_rate),
        "acceptance_length": ("Tokens a target pass, of late.", lambda task: task.acceptance_length),
        "break_even": ("The α under which drafting does not pay.", lambda task: task.break_even),
        "estimated_speedup": ("By the model of costs.", lambda task: task.estimated_speedup),
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
            f"task_realised_speedup{suffix}", "By paired probes; 95 % interval.", labels=["task"]
        )
        for label, task in tasks:
            if task.realised is not None:
                family.add_metric([label], _parts(task.realised)[suffix])
        yield family
    method = GaugeMetricFamily("task_method", "1 for what drafts for it now.", labels=["task", "method"])
    for label, task in tasks:
        method.add_metric([label, task.method or "off"], 1)
    yield method
