"""Bounded labels for the tasks that clients name."""

from __future__ import annotations

from collections.abc import Sequence as Seq

OTHER = "other"
"""The label of all other tasks; gauges are not shown under it."""


class TaskLabels:
    """The tasks that the operator named and the first few others, so that clients cannot add labels without end."""

    def __init__(self, named: Seq[str], num_others: int) -> None:
        self._known = set(named)
        self._max_known = len(self._known) + num_others

    def __call__(self, task: str) -> str:
        """The task's own name, `none` for requests without a task, else `OTHER`."""
        if not task:
            return "none"
        if task not in self._known:
            if len(self._known) >= self._max_known:
                return OTHER
            self._known.add(task)
        return task
