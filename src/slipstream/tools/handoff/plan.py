"""What a hand-off is to do, as checked data."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.tools.handoff.pairs import ProbePrompts

OWN_FLAGS = {
    "--speculative-config": "--spec or --speculative-config before the --",
    "-sc": "--spec or --speculative-config before the --",
    "--spec-method": "--spec",
    "--spec-model": "--spec",
    "--spec-tokens": "--num-speculative-tokens",
    "--port": "--port before the --",
    "--host": "--host before the --",
    "--api-key": "--api-key-env before the --",
}
"""Flags of vLLM that the hand-off writes itself, and what to use instead."""

_REACHED = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every one of this machine, to one that can be called."""


class OffSide(StrEnum):
    """Where paired probes have their side without speculation."""

    NONE = "none"
    INSTANCE = "instance"
    CANARY = "canary"


@dataclass(frozen=True)
class ServeCommand:
    """How `vllm serve` is started."""

    program: str
    model: str
    host: str
    port: int
    setting: Seq[str] = ()
    """The flags of the speculation."""
    extra: Seq[str] = ()
    """What the user wrote behind `--`."""
    served_name: str | None = None

    def words(self) -> list[str]:
        """The command line."""
        named = ["--served-model-name", self.served_name] if self.served_name else []
        where = ["--host", self.host, "--port", str(self.port)]
        return [self.program, "serve", self.model, *where, *named, *self.setting, *self.extra]


@dataclass(frozen=True, kw_only=True)
class HandoffPlan:
    """A hand-off. Exactly one of `command` and a server that runs at `url` already (`command` is None)."""

    url: str
    """URL of the server, without `/v1`."""
    method: str
    """The drafter, as it is shown."""
    command: Seq[str] | None = None
    off_side: OffSide = OffSide.NONE
    off_command: Seq[str] | None = None
    """The same without speculation: for an instance with its own port, for the canary with the same one."""
    off_url: str | None = None
    """URL of the second instance."""
    off_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the second instance alone, such as the device that it has."""
    served_model: str | None = None
    api_key: str | None = None
    start_timeout_s: float = 1800.0
    log: Path | None = None
    probes: ProbePrompts | None = None
    probe_every_s: float = 60.0
    """Between the pairs of a second instance."""
    canary_pairs: int = 24
    canary_every_s: float | None = None
    """Between the canary's rounds; None makes one, before the first request."""

    def __post_init__(self) -> None:
        if self.off_side == OffSide.CANARY and self.command is None:
            raise ConfigError(
                "--off-side canary restarts vLLM, but --attach names a server that was started elsewhere; use "
                "--off-side instance with --off-url, or let handoff start the server"
            )
        if self.off_side == OffSide.INSTANCE and self.off_url is None:
            raise ConfigError(
                "--off-side instance needs a second server, and --attach starts none: give it with --off-url URL"
            )
        if self.off_side != OffSide.NONE and self.probes is None:
            raise ConfigError("paired probes need prompts: --probe-workload")


def check_extra(extra: Seq[str]) -> None:
    """Raise `ConfigError` for a flag behind `--` that the hand-off writes itself."""
    for word in extra:
        name = word.partition("=")[0].partition(".")[0].replace("_", "-")  # vLLM takes all of these spellings
        if name in OWN_FLAGS:
            raise ConfigError(f"{name} behind the -- is written by handoff itself; use {OWN_FLAGS[name]}")


def url_of(host: str, port: int) -> str:
    """Return where a server that listens on `host` is reached from this machine."""
    host = _REACHED.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def plain_url(url: str) -> str:
    """A server's address without `/v1` and trailing slashes; raises `ConfigError` for what is no address."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address of a server; write it as in http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def check_free(host: str, port: int, flag: str) -> None:
    """Raise `ConfigError` where something listens on the port already, or the address is not this machine's."""
    from slipstream.serve.network.listening import bind

    try:
        bind(host, port).close()
    except ConfigError as error:
        raise ConfigError(f"{error}; choose another with {flag}") from None
    with suppress(OSError), socket.create_connection((_REACHED.get(host, host), port), timeout=0.5):
        raise ConfigError(f"something listens on {host}:{port} already; choose another with {flag}")
