"""One file an engine: its own form of a speculative setting, behind `slipstream.export.contract.SettingsFormat`."""
