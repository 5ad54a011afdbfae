"""Takes a speculative setting to other engines and brings theirs here, by way of one neutral record."""

from slipstream.tools.export.contract import (
    ExportedFile,
    ExportedSetting,
    ImportedSetting,
    SettingsFormat,
)
from slipstream.tools.export.engines import ENGINES, setting_or_nearest, settings_format
from slipstream.tools.export.own import from_own, to_own
from slipstream.tools.export.reading import SettingSource, read_source
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import ExportError

__all__ = [
    "ENGINES",
    "ExportError",
    "ExportedFile",
    "ExportedSetting",
    "ImportedSetting",
    "SettingSource",
    "SettingsFormat",
    "SpeculativeRecord",
    "from_own",
    "read_source",
    "setting_or_nearest",
    "settings_format",
    "to_own",
]
