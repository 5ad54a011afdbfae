"""Names of tasks in metrics and statistics: bounded, and apart for different API keys."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from slipstream.core.request import RequestOptions, tenant_account

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


class Accounts:
    """Names for the tasks of accounts: acceptance, lengths and alarms of one never mix with those of another.

    Where the server has no keys there is one account, '', and a task's name is the client's own.
    """

    def __init__(self, has_keys: bool, make_labels: Callable[[], TaskLabels]) -> None:
        """`make_labels` makes the bounded set of task labels of one account."""
        self._has_keys = has_keys
        self._make_labels = make_labels
        self._labels: dict[str, TaskLabels] = {}

    @property
    def are_kept_apart(self) -> bool:
        """Whether there is more than one account."""
        return self._has_keys

    def account(self, options: RequestOptions) -> str:
        """The account that a request belongs to."""
        return tenant_account(options.tenant) if self._has_keys else ""

    def name_of(self, options: RequestOptions) -> str:
        """The name of a request's task in statistics."""
        return self.name(self.account(options), options.task)

    def name(self, account: str, task: str) -> str:
        """The name of an account's task in statistics."""
        return f"{account}/{task}" if self._has_keys else task

    def split(self, name: str) -> tuple[str, str]:
        """The account and the task of a name."""
        if not self._has_keys:
            return "", name
        account, _, task = name.partition("/")
        return account, task

    def task(self, name: str) -> str:
        """The task as its client named it."""
        return self.split(name)[1]

    def label(self, name: str) -> str:
        """The name, or the account's label `other` once it has too many tasks."""
        account, task = self.split(name)
        if account not in self._labels:
            self._labels.setdefault(account, self._make_labels())
        return self.name(account, self._labels[account](task))
