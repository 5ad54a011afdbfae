"""Ages as people write them."""

from __future__ import annotations

import re

from slipstream.errors import ConfigError

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*(h|hours?|d|days?)")
HOUR_S = 3600.0


def seconds_of_age(age: str) -> float:
    """The seconds of an age such as `36h` or `30 days`; raises `ConfigError` for anything else."""
    found = _AGE.fullmatch(age.strip().lower())
    seconds = float(found[1]) * HOUR_S * (24 if found[2].startswith("d") else 1) if found else 0.0
    if seconds <= 0:
        raise ConfigError(f"learn_max_age must be hours or days above 0, as in 36h or 30d, got {age!r}")
    return seconds
