"""The flags of `vllm serve` for a speculative configuration of ours, as `slipstream export vllm` writes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.config import SpeculativeConfig
from slipstream.errors import ModelError

if TYPE_CHECKING:
    from slipstream.tools.export import SpeculativeRecord

SETTING_FLAG = "--speculative-config"
AS_IT_IS = "speculators"
"""The layout of heads that vLLM reads under the names that they have; others are converted."""


@dataclass(frozen=True, slots=True)
class VllmSetting:
    """What vLLM is started with."""

    flags: tuple[str, ...]
    """Empty without speculation."""
    method: str
    """The drafter, as it is shown."""
    notes: tuple[str, ...] = ()
    """What differs there, for the user."""


def exported(
    speculation: SpeculativeConfig,
    target: str,
    version: str | None,
    place: Path,
    *,
    nearest: bool = False,
    overwrite: bool = False,
) -> VllmSetting:
    """The setting for this version of vLLM; None is the newest that is known.

    A head in a folder is converted to vLLM's layout, into `place`. Raises `ConfigError`, with the reason and the
    nearest setting that it can run, for what vLLM cannot run (with `nearest` that is taken), for a version that is not
    known, and where files in `place` would be written over without `overwrite`.
    """
    from slipstream.tools.export import from_own, setting_or_nearest, settings_format

    form = settings_format("vllm")
    version = form.check_version(version)
    record, remarks = from_own(speculation, target)
    record, setting, why = setting_or_nearest(form.name, record, version, nearest)
    if record.head is not None and record.head.layout != AS_IT_IS:
        record, more = _converted(record, version, place, overwrite)
        setting = form.to_engine(record, version)
        remarks += more
    words = list(setting.argv)
    flags = tuple(words[words.index(SETTING_FLAG) :]) if SETTING_FLAG in words else ()
    if not flags:
        return VllmSetting((), setting.record.method, why)
    lost = (f"{name}: {reason}" for name, reason in setting.lost.items())
    return VllmSetting(flags, setting.record.method, (*why, *remarks, *lost, *setting.notes))


def _converted(
    record: SpeculativeRecord, version: str, place: Path, overwrite: bool
) -> tuple[SpeculativeRecord, tuple[str, ...]]:
    """The record of the head as vLLM loads it; one that we cannot read is handed over as it is."""
    from slipstream.tools.export.converting import check_destination, converted

    check_destination(record, place, overwrite, "--checkpoint")
    try:
        return converted(record, "vllm", place, version)
    except ModelError as error:
        return record, (f"the head is handed over as it is: {error}",)
