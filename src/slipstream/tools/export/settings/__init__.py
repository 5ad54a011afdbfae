"""One file an engine: its own form of a speculative setting (`slipstream.tools.export.contract.SettingsFormat`)."""
