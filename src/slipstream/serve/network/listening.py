"""The socket on which a server listens."""

from __future__ import annotations

import socket

from slipstream.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not yet listen; raises `ConfigError` where the address is not available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except UnicodeError:
        raise ConfigError(f"cannot listen on {host}:{port}: that is no address") from None
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound
