"""The flags of `vllm serve` for a speculative configuration of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.config import SpeculativeConfig
from slipstream.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VllmSetting:
    """What vLLM is started with."""

    flags: tuple[str, ...]
    """Empty without speculation."""
    method: str
    """The drafter, as it is shown."""
    notes: tuple[str, ...] = ()
    """What differs there, for the user."""


Exporter = Callable[[SpeculativeConfig, str, str | None], VllmSetting]
"""(configuration, target, vLLM's version) to the setting; raises `ConfigError` for what vLLM cannot run."""


def exported(speculation: SpeculativeConfig, target: str, version: str | None) -> VllmSetting:
    """The setting that `slipstream export vllm` writes for this version.

    Raises `ConfigError`, with the reason and the nearest thing that it can run, for what vLLM cannot run.
    """
    if speculation.method == "off":
        return VllmSetting((), "off")
    written = {"method": speculation.method, **speculation.options}
    if speculation.method not in ("draft_model", "ngram", "suffix", "eagle", "eagle3"):
        raise ConfigError(
            f"vLLM cannot run {speculation.method}; use a draft model, ngram, suffix or an EAGLE head"
        )
    written.setdefault("num_speculative_tokens", 4)
    return VllmSetting(("--speculative-config", json.dumps(written)), speculation.method)
