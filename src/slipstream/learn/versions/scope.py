"""Whose versions are learned: everyone's, or each tenant's or task's own."""

from __future__ import annotations

from enum import StrEnum

Scope = tuple[str | None, str | None]
"""A tenant and a task whose versions are learned; None for all."""

EVERYONES: Scope = (None, None)


class LearnBy(StrEnum):
    """What a version is learned from, and for."""

    EVERYONE = "everyone"
    TENANT = "tenant"
    """An account's own answers, for that account alone."""
    TASK = "task"
    """The answers to a task, for that task."""

    def key_of(self, tenant: str, task: str) -> Scope | None:
        """The scope that learns from an answer; None where it has no name to tell by."""
        match self:
            case LearnBy.TENANT:
                account = tenant.partition("/")[0]
                return (account, None) if account else None
            case LearnBy.TASK:
                return (None, task) if task else None
            case _:
                return EVERYONES

    def learns(self, key: Scope) -> bool:
        """Whether versions of that scope are learned; others are promoted by hand."""
        tenant, task = key
        match self:
            case LearnBy.TENANT:
                return tenant is not None and task is None
            case LearnBy.TASK:
                return task is not None and tenant is None
            case _:
                return key == EVERYONES
