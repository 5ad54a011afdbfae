"""The socket on which a server listens."""

from __future__ import annotations

import contextlib
import socket

from slipstream.errors import ConfigError

MAX_UNSENT_BYTES = 64 * 2**10
"""What the kernel keeps of a connection's answer that it cannot send yet. Left alone it takes megabytes, whole answers
that their client may never read. What is on its way to a client that reads is not bounded by this."""


def hold_back_little(listening: socket.socket) -> None:
    """Bound what connections of a listening socket hold unsent, so that the server notices a client that does not read.

    Nothing where the system has no such option.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    if option is not None:
        with contextlib.suppress(OSError):
            listening.setsockopt(socket.IPPROTO_TCP, option, MAX_UNSENT_BYTES)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not yet listen; raises `ConfigError` where the address is not available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            hold_back_little(bound)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except UnicodeError:
        raise ConfigError(f"cannot listen on {host}:{port}: that is no address") from None
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound
