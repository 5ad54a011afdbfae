"""Tasks of different API keys, which statistics keep apart."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.core import RequestOptions
from slipstream.serve.api.task_labels import TaskLabels


class Accounts:
    """Names for the tasks of accounts: acceptance, lengths and alarms of one never mix with those of another.

    Where the server has no keys there is one account, '', and a task's name is the client's own.
    """

    def __init__(self, has_keys: bool, make_labels: Callable[[], TaskLabels]) -> None:
        """`make_labels` makes what bounds the tasks that an account is shown by name."""
        self._has_keys = has_keys
        self._make_labels = make_labels
        self._labels: dict[str, TaskLabels] = {}

    def account(self, options: RequestOptions) -> str:
        """Whose request it is."""
        return options.tenant.partition("/")[0] if self._has_keys else ""

    def name_of(self, options: RequestOptions) -> str:
        """What statistics call the task of a request."""
        return self.name(self.account(options), options.task)

    def name(self, account: str, task: str) -> str:
        """What statistics call a task of an account."""
        return f"{account}/{task}" if self._has_keys else task

    def split(self, name: str) -> tuple[str, str]:
        """The account and its task."""
        if not self._has_keys:
            return "", name
        account, _, task = name.partition("/")
        return account, task

    def task(self, name: str) -> str:
        """The task as its client named it."""
        return self.split(name)[1]

    def label(self, name: str) -> str:
        """The name, or the one that stands for the account's many others."""
        account, task = self.split(name)
        if account not in self._labels:
            self._labels.setdefault(account, self._make_labels())
        return self.name(account, self._labels[account](task))
