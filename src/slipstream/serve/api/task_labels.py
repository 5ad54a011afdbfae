"""Which of the tasks that clients name are shown by name."""

from __future__ import annotations

from collections.abc import Sequence as Seq

OTHER = "other"
"""The label that the rest have in common; their figures cannot be put together."""


class TaskLabels:
    """Those that the operator named, and the first few others: clients cannot make labels without end."""

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
