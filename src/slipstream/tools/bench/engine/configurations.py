"""The configurations of a benchmark: speculation off, then each drafter with each number of draft tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.draft.methods import short_name
from slipstream.errors import ConfigError

OFF_NAME = "off"


@dataclass(frozen=True)
class Configuration:
    """A named speculative configuration."""

    name: str
    speculative: SpeculativeConfig

    @property
    def is_off(self) -> bool:
        return self.speculative.method == "off"


def sweep(chosen: Seq[SpeculativeConfig], num_speculative_tokens: Seq[int]) -> list[Configuration]:
    """Speculation off and the chosen configurations, named, without duplicates.

    Every drafter runs with each of `num_speculative_tokens`, or unchanged when that is empty. Raises `ConfigError`
    when there is nothing to compare with off, or an option is invalid.
    """
    from slipstream.engine.speculation import ParsedSpeculation

    drafters = [config for config in chosen if config.method != "off"]
    if not drafters:
        raise ConfigError("there is nothing to compare with speculation off; choose drafters with --spec")
    swept: list[SpeculativeConfig] = []
    for config in drafters:
        lengths = [{"num_speculative_tokens": number} for number in num_speculative_tokens]
        for length in lengths or [{}]:
            one = replace(config, options={**config.options, **length})
            ParsedSpeculation.of(one)
            if one not in swept:
                swept.append(one)
    names = _names(swept)
    off = Configuration(OFF_NAME, SpeculativeConfig())
    return [off, *(Configuration(name, config) for name, config in zip(names, swept, strict=True))]


def parse_counts(text: str, flag: str) -> list[int]:
    """Whole numbers of at least 1 from comma-separated text, without duplicates; raises `ConfigError`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} takes whole numbers of at least 1 separated by commas, got {text!r}")
    return list(dict.fromkeys(numbers))


def _names(configs: Seq[SpeculativeConfig]) -> list[str]:
    """Short unique names: method, number of draft tokens, and the draft model where several are compared."""
    several = len({config.options.get("model") for config in configs if "model" in config.options}) > 1
    names = [_name(config, several) for config in configs]
    repeated = {name for name, times in Counter(names).items() if times > 1}
    return [
        f"{name} #{names[: i + 1].count(name)}" if name in repeated else name for i, name in enumerate(names)
    ]


def _name(config: SpeculativeConfig, with_model: bool) -> str:
    from slipstream.engine.speculation import ParsedSpeculation

    speculation = ParsedSpeculation.of(config)
    parts: list[Any] = [short_name(config.method)]
    if with_model and "model" in config.options:
        parts.append(Path(str(config.options["model"])).name)
    tokens = speculation.drafter.configured_depth(speculation.options)
    if tokens is not None:
        parts.append(f"γ={tokens}")
    parts += [
        f"{key}={value}"
        for key, value in config.options.items()
        if key not in ("model", "num_speculative_tokens")
    ]
    if config.verifier != SpeculativeConfig.verifier:
        parts.append(config.verifier)
    return " ".join(map(str, parts))
