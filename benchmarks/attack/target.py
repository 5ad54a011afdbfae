"""What attacks are made with: requests and bare connections to one port of this machine, and a tally of the answers."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

TIMEOUT_S = 120.0


class Target:
    """The server as an attacker sees it. Usable from several threads."""

    def __init__(self, port: int, scale: float, seconds: float) -> None:
        self._port = port
        self._scale = scale
        self._end_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.statuses: Counter[str] = Counter()
        """HTTP statuses, or how a request failed."""
        self.finish_reasons: Counter[str] = Counter()
        self.extra: dict[str, Any] = {}
        """What a scenario found out besides."""

    def num(self, full: int) -> int:
        """So many of `full` requests, as the run is scaled."""
        return max(1, round(full * self._scale))

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self._end_s

    @property
    def left_s(self) -> float:
        return max(0.1, self._end_s - time.monotonic())

    def post(self, path: str, body: Any, key: str | None = None) -> dict[str, Any]:
        """The answer's JSON, or nothing; it is counted in any case."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        return self._ask("POST", path, json.dumps(body).encode(), headers)

    def get(self, path: str) -> dict[str, Any]:
        """`path` goes out as it is."""
        return self._ask("GET", path, None, {})

    def post_at_once(self, path: str, bodies: Iterable[Any]) -> None:
        """All at the same time."""
        bodies = list(bodies)
        with ThreadPoolExecutor(len(bodies)) as pool:
            for _ in pool.map(lambda body: self.post(path, body), bodies):
                pass

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=10)

    def count(self, status: str) -> None:
        with self._lock:
            self.statuses[status] += 1

    def _ask(self, method: str, path: str, raw: bytes | None, headers: dict[str, str]) -> dict[str, Any]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._port, timeout=min(TIMEOUT_S, self.left_s + 30)
        )
        try:
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            said = json.loads(response.read() or b"{}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.count(type(error).__name__)
            return {}
        finally:
            connection.close()
        with self._lock:
            self.statuses[str(response.status)] += 1
            for choice in said.get("choices", []):
                self.finish_reasons[str(choice.get("finish_reason"))] += 1
        found: dict[str, Any] = said
        return found
