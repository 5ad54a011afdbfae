"""Flags and defaults of verbs that send requests to a server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

from typer import Option

from slipstream.cli.flags.flags import FlagSet, Values
from slipstream.cli.flags.options import PYTHON_ONLY
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.rpc.client import ServerAddress

SERVER_PANEL = "A server instead of an engine"
Url = Annotated[
    str | None,
    Option(help="An OpenAI-compatible server, as in http://localhost:8000/v1.", rich_help_panel=SERVER_PANEL),
]

TIMED_SAMPLING = FlagSet(
    SamplingParams,
    "Sampling",
    skip=PYTHON_ONLY | {"n", "max_tokens", "temperature", "seed", "logprobs", "prompt_logprobs"},
)
"""Without n and log-probabilities, which would be timed, and without parameters that have flags of the verb's own."""
TimedSampling = Annotated[Values, TIMED_SAMPLING]


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """How requests are sent to a server."""

    served_model: str | None = None
    """The model's name there; by default the first that it lists."""
    api_key_env: str | None = None
    """Environment variable with the server's API key."""
    timeout_s: Annotated[float, Option(min=0.001)] = 600.0
    """Seconds without a byte until a request fails."""

    @cached_property
    def api_key(self) -> str | None:
        """Raises `ConfigError` where the variable is not set."""
        return api_key_of(self.api_key_env)

    def address(self, url: str, model: str | None = None, metrics_url: str | None = None) -> ServerAddress:
        """The server at `url`, which names its model where none is given; raises `RemoteError`."""
        from slipstream.rpc.client import ServerAddress, find_model, find_url

        key, timeout_s = self.api_key, self.timeout_s
        url = find_url(url, key, timeout_s)
        model = model or find_model(url, key, timeout_s)
        return ServerAddress(url, model, metrics_url or f"{url.removesuffix('/v1')}/metrics", key, timeout_s)


@dataclass(frozen=True, kw_only=True)
class MeasuredServerFlags(ServerFlags):
    """How requests are sent to a server that is measured by its own counters, too."""

    metrics_url: str | None = None
    """Its Prometheus metrics; by default /metrics next to /v1."""

    def measured(self, url: str) -> ServerAddress:
        """The server at `url`, as the flags say."""
        return self.address(url, self.served_model, self.metrics_url)


def api_key_of(variable: str | None) -> str | None:
    """The value of the environment variable `variable`; None for None. Raises `ConfigError` where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the environment variable {variable} of --api-key-env is not set")
    return key
