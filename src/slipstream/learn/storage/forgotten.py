"""Whose records have been forgotten, and until when: nothing older of theirs is written again, or learned from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from slipstream.errors import LearnError
from slipstream.learn.records.served import tenant_key, tenant_keys
from slipstream.learn.storage.folder import LearnFolder, write_whole


class Forgotten:
    """`forgotten.json`: `tenant_key` to the time up to which a tenant's answers are forgotten.

    Answers that were in the making, records that wait to be written and versions that are being trained when a tenant
    is forgotten are older than that time, and refused.
    """

    def __init__(self, folder: LearnFolder) -> None:
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._until_s: dict[str, float] = {}

    def add(self, tenant: str, now_s: float | None = None) -> float:
        """Forget what the tenant's answers that began until now held; returns that time. Raises `LearnError`."""
        now_s = time.time() if now_s is None else now_s
        try:
            with self._folder.lock("state"):
                found = {**self._read(), tenant_key(tenant): now_s}
                write_whole(self._folder.forgotten, json.dumps(found, indent=1).encode("ascii"))
        except OSError as error:
            raise self._folder.unwritable(error) from None
        return now_s

    def has(self, tenant: str, created_s: float) -> bool:
        """Whether an answer of the tenant that began at `created_s` is forgotten, by its own name or an account's."""
        until_s = self._read()
        return bool(until_s) and any(created_s <= until_s.get(key, -1.0) for key in tenant_keys(tenant))

    def check(self, keys: Iterable[str], read_s: float) -> None:
        """Raise `LearnError` where records of these tenants that were read at `read_s` have been forgotten since."""
        until_s = self._read()
        if any(read_s <= until_s.get(key, -1.0) for key in keys):
            raise LearnError("it learned from records that have been forgotten since; it is not kept")

    def _read(self) -> dict[str, float]:
        """What the file says; it is read again only where it has been replaced."""
        try:
            stat = self._folder.forgotten.stat()
            stamp = stat.st_ino, stat.st_mtime_ns
            if stamp != self._stamp:
                self._until_s = json.loads(self._folder.forgotten.read_bytes())
                self._stamp = stamp
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise LearnError(f"cannot read {str(self._folder.forgotten)!r}: {error}") from None
        return self._until_s
