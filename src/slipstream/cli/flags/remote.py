"""Flags and defaults of verbs that send requests to a server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from slipstream.cli.flags.flags import FlagSet
from slipstream.cli.flags.options import PYTHON_ONLY
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

SERVER_PANEL = "A server instead of an engine"
Url = Annotated[
    str | None,
    typer.Option(
        help="An OpenAI-compatible server, as in http://localhost:8000/v1.", rich_help_panel=SERVER_PANEL
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        help="The model's name there; by default the first that it lists.", rich_help_panel=SERVER_PANEL
    ),
]
MetricsUrl = Annotated[
    str | None,
    typer.Option(
        help="Its Prometheus metrics; by default /metrics beside /v1.", rich_help_panel=SERVER_PANEL
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(help="Environment variable with the server's API key.", rich_help_panel=SERVER_PANEL),
]
TimeoutS = Annotated[
    float,
    typer.Option(
        min=0.001, help="Seconds without a byte until a request fails.", rich_help_panel=SERVER_PANEL
    ),
]

TIMED_SAMPLING = FlagSet(
    SamplingParams,
    "Sampling",
    skip=PYTHON_ONLY | {"n", "max_tokens", "temperature", "seed", "logprobs", "prompt_logprobs"},
)
"""Without n and log-probabilities, which would be timed, and without parameters that have flags of the verb's own."""


def api_key_of(variable: str | None) -> str | None:
    """The value of the environment variable `variable`; None for None. Raises `ConfigError` where it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the environment variable {variable} of --api-key-env is not set")
    return key


def metrics_url_of(url: str) -> str:
    """Default URL of a server's Prometheus metrics: `/metrics` beside `/v1`."""
    return f"{url.removesuffix('/v1')}/metrics"
