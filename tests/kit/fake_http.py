"""What every HTTP server that a test makes up has in common: it is quiet, quick and ends with its block."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # else each answer waits 40 ms for the client's acknowledgement of its header
    )

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def send(self, status: int, value: Any, kind: str = "application/json") -> None:
        """Answer with a text or bytes as they are, or with another value as JSON."""
        text = value if isinstance(value, str | bytes) else json.dumps(value)
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        """Clients that go away are part of the tests."""


@contextmanager
def served(handler: type[QuietHandler], **attributes: Any) -> Iterator[str]:
    """The address of a server on a free port, until the block ends; handlers have these attributes."""
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
