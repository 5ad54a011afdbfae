"""Verifiers by name. Built-in ones are imported when they are asked for; others are registered or come as entry points.

A package adds a verifier with one line of its own `pyproject.toml`:

    [project.entry-points."slipstream.verifiers"]
    my_verifier = "my_package.module:MyVerifier"

and without packaging, `verifier` may itself be `"my_package.module:MyVerifier"`. A built-in name cannot be taken over.
"""

from __future__ import annotations

from slipstream.errors import ConfigError
from slipstream.registry import Registry
from slipstream.verify.base import Verifier

VERIFIERS = Registry[Verifier](
    "verifier",
    Verifier,  # type: ignore[type-abstract]
    "slipstream.verifiers",
    {
        "coupled": "slipstream.verify.coupled:CoupledVerifier",
        "rejection": "slipstream.verify.rejection:RejectionVerifier",
        "block": "slipstream.verify.block:BlockVerifier",
    },
)
"""`VERIFIERS.register(name, cls)` adds one for this process."""


def create_verifier(name: str) -> Verifier:
    """The verifier called `name`.

    Raises `ConfigError` with the nearest valid name for an unknown one, and for one that cannot be made.
    """
    cls = VERIFIERS.load(name)
    try:
        return cls()
    except Exception as error:
        raise ConfigError(f"verifier {name!r} cannot be made: {type(error).__name__}: {error}") from error
