"""Addresses of draft workers: `host:port`, `tcp://host:port` or `unix:/path`."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from slipstream.errors import ConfigError

EXAMPLES = "such as 127.0.0.1:7070 or unix:/run/draft.sock"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker listens; of a unix socket `host` is empty and `path` its file."""

    host: str = ""
    port: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `ConfigError` for what is no address."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:").removeprefix("//")
            if not path or len(path.encode()) > 100:
                raise ConfigError(f"draft worker address {text!r} needs a path of 1 to 100 bytes; {EXAMPLES}")
            return cls(path=path)
        host, _, port = text.removeprefix("tcp://").rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isascii() and port.isdigit()) or not 0 <= int(port) < 65536:
            raise ConfigError(f"draft worker address {text!r} must be HOST:PORT or unix:PATH, {EXAMPLES}")
        return cls(host, int(port))

    @property
    def is_local(self) -> bool:
        """True where only this machine can reach it: a unix socket, or a loopback address."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def connect(self, timeout_s: float) -> socket.socket:
        """A connection to it; raises OSError."""
        if self.path:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(timeout_s)
                connection.connect(self.path)
            except OSError:
                connection.close()
                raise
            return connection
        connection = socket.create_connection((self.host, self.port), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
