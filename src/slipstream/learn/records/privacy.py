"""Whose answers may be learned from. What may not is never written, neither to disk nor into memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from slipstream.core.request import RequestOptions


def belongs_to(tenant: str, owner: str) -> bool:
    """Whether a tenant is `owner` or below it, as `owner/user` is: an API key's account and those it serves."""
    return tenant == owner or (bool(owner) and tenant.startswith(owner + "/"))


@dataclass(frozen=True, slots=True)
class PrivacyRules:
    """The operator's settings; a request's own `learn: false` is honoured above all of them.

    Names are those of tenants: an API key's account, or `account/user` for one user of it. Where a rule names both, the
    longer name decides.
    """

    by_default: bool = True
    """Whether those who have no rule are learned from."""
    allowed: frozenset[str] = frozenset()
    denied: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, allowed: Collection[str] = (), denied: Collection[str] = (), by_default: bool = True
    ) -> PrivacyRules:
        """Rules from lists of names; a name that is in both is denied."""
        return cls(by_default, frozenset(allowed) - frozenset(denied), frozenset(denied))

    def may_learn(self, options: RequestOptions) -> bool:
        """Whether anything of the request may be kept; drafted steps, say, are not the target's own."""
        return options.learn and options.reasoning is None and self.allows(options.tenant)

    def as_lists(self) -> dict[str, Any]:
        """The arguments of `of`, as JSON has them."""
        return {
            "allowed": sorted(self.allowed),
            "denied": sorted(self.denied),
            "by_default": self.by_default,
        }

    def allows(self, tenant: str) -> bool:
        """Whether a tenant's answers may be learned from."""
        name = tenant
        while True:
            if name in self.denied:
                return False
            if name in self.allowed:
                return True
            if "/" not in name:
                return self.by_default
            name = name.rpartition("/")[0]
