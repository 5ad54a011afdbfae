"""A well-behaved client that asks for little, again and again, while others attack."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

TIMEOUT_S = 60.0
"""A request that has no answer by then has failed; its delay counts as this long."""
_PAUSE_S = 0.05
SMALL = {"prompt": "Once upon a time", "max_tokens": 2}


class Bystander:
    """A context: inside it one small request after the other is made, each on a connection of its own."""

    def __init__(self, port: int, path: str, body: dict[str, Any] | None, key: str | None = None) -> None:
        """POST with a body, GET without."""
        self._port = port
        self._path = path
        self._raw = None if body is None else json.dumps(body).encode()
        self._headers = {"Content-Type": "application/json"} if body is not None else {}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._over = threading.Event()
        self._delays_s: list[float] = []
        self._statuses: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A request that is under way is waited for."""
        self._over.set()
        self._thread.join(TIMEOUT_S + 5)

    def figures(self) -> dict[str, Any]:
        """Delays in seconds, and how the requests ended; once the context is left."""
        delays_s = self._delays_s or [TIMEOUT_S]
        return {
            "num_requests": len(self._delays_s),
            "num_failed": sum(n for status, n in self._statuses.items() if status != "200"),
            "longest_s": round(max(delays_s), 3),
            "median_s": round(statistics.median(delays_s), 4),
            "statuses": dict(sorted(self._statuses.items())),
        }

    def _work(self) -> None:
        while not self._over.is_set():
            began_s = time.monotonic()
            status = self._ask()
            self._delays_s.append(time.monotonic() - began_s)
            self._statuses[status] += 1
            self._over.wait(_PAUSE_S)

    def _ask(self) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET" if self._raw is None else "POST", self._path, self._raw, self._headers)
            response = connection.getresponse()
            response.read()
            return str(response.status)
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()
