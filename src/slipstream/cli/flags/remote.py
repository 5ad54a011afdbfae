"""What the verbs that measure servers have in common."""

from __future__ import annotations

import os

from slipstream.cli.flags.flags import FlagSet
from slipstream.cli.flags.options import PYTHON_ONLY
from slipstream.errors import ConfigError
from slipstream.sampling.params import SamplingParams

TIMED_SAMPLING = FlagSet(
    SamplingParams,
    "Sampling",
    skip=PYTHON_ONLY | {"n", "max_tokens", "temperature", "seed", "logprobs", "prompt_logprobs"},
)
"""One answer a prompt, and no log-probabilities: they would be timed. The others have flags of the verb's own."""


def api_key_of(variable: str | None) -> str | None:
    """The key in the environment variable that `--api-key-env` names; None when it names none."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(f"the environment variable {variable} of --api-key-env is not set")
    return key


def metrics_url_of(url: str) -> str:
    """Where a server has its Prometheus metrics: beside `/v1`."""
    return f"{url.removesuffix('/v1')}/metrics"
