"""Stored responses, which later requests may continue: in memory, bounded in bytes and number."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from slipstream.serve.api.errors import ApiError

ENTRY_BYTES = 1024
"""Memory of an entry in addition to its texts, an upper estimate."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it was sent, and the conversation including it."""

    id: str
    account: str
    """The account of its request, as `auth.account_of` returns it."""
    tenant: str
    """The tenant of its request, as `auth.tenant_of` returns it."""
    response: bytes
    """JSON."""
    messages: bytes
    """Lines of JSON, without the instructions."""

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages) + ENTRY_BYTES

    @property
    def holder(self) -> str:
        """Who shares the memory with others: an account with all its users, or without keys a user."""
        return self.account or self.tenant


class ResponseStore:
    """The last responses of every holder. Used from the event loop only.

    Each holder keeps at most `max_count`, all together `max_bytes`. Where either is exceeded the least recently
    used are removed: those of that holder, or of the one that holds the most bytes.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self.max_count = max_count
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: dict[str, StoredResponse] = {}
        self._by_holder: dict[str, OrderedDict[str, None]] = {}
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def keeps(self) -> bool:
        """False where the server stores no responses."""
        return self.max_count > 0 and self.max_bytes > 0

    def put(self, kept: StoredResponse) -> bool:
        """Store a response; False where it is larger than the bound for all."""
        if not self.keeps or kept.num_bytes > self.max_bytes:
            return False
        self._kept[kept.id] = kept
        mine = self._by_holder.setdefault(kept.holder, OrderedDict())
        mine[kept.id] = None
        self._bytes_of[kept.holder] = self._bytes_of.get(kept.holder, 0) + kept.num_bytes
        self.num_bytes += kept.num_bytes
        if len(mine) > self.max_count:
            self._forget(next(iter(mine)))
        while self.num_bytes > self.max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._forget(next(iter(self._by_holder[largest])))
        return kept.id in self._kept

    def get(self, response_id: str, account: str) -> StoredResponse:
        """A response of this account; raises `ApiError` 404 for any other."""
        kept = self._kept.get(response_id)
        if kept is None or kept.account != account:
            raise self._unknown(response_id, None)
        self._by_holder[kept.holder].move_to_end(response_id)
        return kept

    def previous(self, response_id: str, tenant: str) -> StoredResponse:
        """A response of this tenant, to be continued; raises `ApiError` 404 for any other."""
        kept = self._kept.get(response_id)
        if kept is None or kept.tenant != tenant:
            raise self._unknown(response_id, "previous_response_id")
        self._by_holder[kept.holder].move_to_end(response_id)
        return kept

    def delete(self, response_id: str, account: str) -> None:
        """Delete a response of this account; raises `ApiError` 404 for any other."""
        self._forget(self.get(response_id, account).id)

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self.num_bytes -= kept.num_bytes
        self._bytes_of[kept.holder] -= kept.num_bytes
        del self._by_holder[kept.holder][response_id]
        if not self._by_holder[kept.holder]:
            del self._by_holder[kept.holder], self._bytes_of[kept.holder]

    def _unknown(self, response_id: str, param: str | None) -> ApiError:
        if not self.keeps:
            message = "this server keeps no responses (max_stored_responses is 0); give the whole conversation as input"
        else:
            message = (
                f"there is no response {response_id[:80]!r}: it is unknown, was not stored, or was forgotten for newer "
                f"ones; give the whole conversation as input"
            )
        return ApiError(404, message, param=param, code="response_not_found")
