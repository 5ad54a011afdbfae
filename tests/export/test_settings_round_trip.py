"""Every record that an engine supports survives the way there and back; what does not is refused or named."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_cases import records
from hypothesis import HealthCheck, given, settings

from slipstream.errors import ConfigError
from slipstream.tools.export import ENGINES, ExportedSetting, ExportError, SettingSource, read_source, to_own
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import described

EXAMPLES = settings(
    max_examples=35, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
VERSIONS = [(name, version) for name, engine in ENGINES.items() for version in engine.versions]


def sources(setting: ExportedSetting, folder: Path) -> list[SettingSource]:
    """Each form of an exported setting that holds all of it."""
    for file in setting.files:
        (folder / file.name).write_text(file.text, encoding="utf-8")
    found = [SettingSource("the command", words=setting.argv, folder=folder)] if setting.argv else []
    return found + [read_source(str(folder / file.name)) for file in setting.files[:1] if not setting.argv]


def exported(record: SpeculativeRecord, engine: str, version: str) -> ExportedSetting:
    """The setting of `record`, or of the nearest that the engine can run, which an error names and which is another."""
    for _ in range(4):
        try:
            return ENGINES[engine].to_engine(record, version)
        except ExportError as error:
            refused, message = error.nearest, str(error)
        nearest = refused or SpeculativeRecord(method="off", target=record.target)
        assert refused is None or described(nearest) in message
        assert nearest != record
        record = nearest
    raise AssertionError(f"{engine} never takes the nearest of {record}")


@pytest.mark.parametrize(("engine", "version"), VERSIONS)
@given(record=records())
@EXAMPLES
def test_what_was_exported_is_imported(
    engine: str, version: str, record: SpeculativeRecord, tmp_path: Path
) -> None:
    setting = exported(record, engine, version)
    for source in sources(setting, tmp_path):
        back = ENGINES[engine].from_engine(source, version)
        assert back.record == setting.record


@pytest.mark.parametrize(("engine", "version"), VERSIONS)
@given(record=records())
@EXAMPLES
def test_all_that_is_lost_is_named(engine: str, version: str, record: SpeculativeRecord) -> None:
    try:
        setting = ENGINES[engine].to_engine(record, version)
    except ExportError:
        return
    assert record.differences(setting.record) == set(setting.lost)
    assert all(setting.lost.values())
    assert setting.record.method == record.method, "another method is refused, never chosen in silence"


@given(record=records())
@EXAMPLES
def test_a_record_survives_its_own_json(record: SpeculativeRecord) -> None:
    assert SpeculativeRecord.from_mapping(record.to_mapping()) == record


@pytest.mark.parametrize(("engine", "version"), VERSIONS)
def test_what_is_imported_is_a_configuration_of_ours(engine: str, version: str, tmp_path: Path) -> None:
    seen = set()

    @given(record=records())
    @settings(max_examples=25, derandomize=True)
    def run(record: SpeculativeRecord) -> None:
        setting = exported(record, engine, version)
        config, _ = to_own(setting.record)
        seen.add(config["method"])

    run()
    assert {"off", "ngram"} <= seen


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unknown_version_is_a_clear_line(engine: str) -> None:
    with pytest.raises(ConfigError, match=rf"{engine} 0\.1 is not known; known versions: "):
        ENGINES[engine].check_version("0.1")
    assert ENGINES[engine].check_version(ENGINES[engine].versions[0] + ".7") == ENGINES[engine].versions[0]
