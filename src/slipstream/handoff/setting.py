"""The flags of `vllm serve` for a speculative configuration of ours, as `slipstream export vllm` writes them."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.config import SpeculativeConfig

SETTING_FLAG = "--speculative-config"


@dataclass(frozen=True, slots=True)
class VllmSetting:
    """What vLLM is started with."""

    flags: tuple[str, ...]
    """Empty without speculation."""
    method: str
    """The drafter, as it is shown."""
    notes: tuple[str, ...] = ()
    """What differs there, for the user."""


def exported(speculation: SpeculativeConfig, target: str, version: str | None) -> VllmSetting:
    """The setting for this version of vLLM; None is the newest that is known.

    Raises `ConfigError`, with the reason and the nearest setting that it can run, for what vLLM cannot run, and for a
    version that is not known.
    """
    from slipstream.export import from_own, settings_format

    form = settings_format("vllm")
    record, remarks = from_own(speculation, target)
    setting = form.to_engine(record, form.check_version(version))
    words = list(setting.argv)
    flags = tuple(words[words.index(SETTING_FLAG) :]) if SETTING_FLAG in words else ()
    if not flags:
        return VllmSetting((), setting.record.method)
    lost = (f"{name}: {why}" for name, why in setting.lost.items())
    return VllmSetting(flags, setting.record.method, (*remarks, *lost, *setting.notes))
