"""Settings of a long-running verb: flags, then environment variables, then one file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.cli.flags.flags import FlagSet, Values
from slipstream.config import RENAMED, reject_unknown, renamed
from slipstream.errors import ConfigError

PREFIX = "SLIPSTREAM_"

_SAME_THING = frozenset({"spec", "draft", "speculative_config"})
"""Settings that name a drafter; one that is given replaces all of them from lower layers."""


def merged(
    model: str | None,
    sets: Mapping[str, tuple[FlagSet, Values]],
    file: Path | None,
    environment: Mapping[str, str],
) -> tuple[str | None, dict[str, Values]]:
    """(the model, each set's values): flags take precedence over the environment, the environment over the file.

    Raises `ConfigError` or `RequestError` for a file that cannot be read, an unknown name or an invalid value.
    """
    names = {"model"} | {field.name for flags, _ in sets.values() for field in flags.fields()}
    written = {} if file is None else renamed(read_file(file), names, f"setting in {file}")
    reject_unknown(written, names, f"setting in {file}")
    variables = _from_environment(names | RENAMED.keys(), environment)
    found = renamed(variables, names, "setting in the environment")
    result: dict[str, Values] = {}
    for name, (flags, given) in sets.items():
        mine = {field.name for field in flags.fields()}
        below = flags.read({key: written[key] for key in mine & written.keys()}, str(file))
        above = flags.read({key: found[key] for key in mine & found.keys()}, "the environment")
        result[name] = _over(_over(below, above), given)
    model = model or environment.get(PREFIX + "MODEL") or written.get("model")
    if not isinstance(model, str | None):
        raise ConfigError(f"model in {file} must be a folder or hub id, got {model!r}")
    return model, result


def read_file(file: Path) -> dict[str, Any]:
    """The settings in a TOML or YAML file; raises `ConfigError`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error}") from None
    if file.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file} is not valid TOML: {error}") from None
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{str(file)!r} is neither .toml nor .yaml")
    import yaml

    try:
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} must hold names and values, as in port: 8000")
    return settings


def _from_environment(names: set[str], environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment[key] for name in names if (key := PREFIX + name.upper()) in environment}


def _over(below: Values, above: Values) -> Values:
    if _SAME_THING & above.keys():
        below = {name: value for name, value in below.items() if name not in _SAME_THING}
    return below | above
