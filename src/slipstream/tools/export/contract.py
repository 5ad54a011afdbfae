"""The contract of an engine's form of a speculative setting: made from a record, written, and read back into one."""

from __future__ import annotations

import json
import shlex
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from slipstream.draft.methods import MAY_NAME_MODEL, METHODS, NGRAM, OFF, WITH_MODEL, names_in
from slipstream.errors import ConfigError
from slipstream.tools.export.keys import NEUTRAL
from slipstream.tools.export.reading import SettingSource
from slipstream.tools.export.record import SpeculativeRecord
from slipstream.tools.export.refusals import refuse_method

COMMAND = "command.sh"
RECORD = "record.json"


def file_names(setting: ExportedSetting) -> list[str]:
    """Names of the files that `write_setting` makes."""
    command = [COMMAND] if setting.argv else []
    return [*(file.name for file in setting.files), *command, RECORD]


def write_setting(setting: ExportedSetting, folder: Path) -> list[Path]:
    """Write the files of a setting into `folder`, which is made where it is missing; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {file.name: file.text for file in setting.files}
    if setting.argv:
        texts[COMMAND] = f"#!/bin/sh\n# {setting.engine} {setting.version}\n{command_line(setting, folder)}\n"
    texts[RECORD] = json.dumps(setting.record.to_mapping(), indent=2) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def command_line(setting: ExportedSetting, folder: Path | None = None) -> str:
    """The command as a user types it; files of the setting are named in `folder`, where it is given."""
    names = {file.name for file in setting.files}
    words = [str(folder / word) if folder is not None and word in names else word for word in setting.argv]
    return shlex.join(words)


USUAL_DEPTH = 4
_WRITTEN = "the depth is always written, so that it does not change with the engine's defaults"


@dataclass(frozen=True)
class ExportedFile:
    """One file of an exported setting."""

    name: str
    text: str


Form = tuple[Sequence[str], Sequence[ExportedFile]]
"""The command, word by word, and the files of a setting."""


@dataclass(frozen=True, kw_only=True)
class ExportedSetting:
    """An engine's own form of a setting."""

    engine: str
    version: str
    record: SpeculativeRecord
    """What the engine will run: the given record, as far as its form can express it."""
    argv: tuple[str, ...] = ()
    """The command, word by word; empty for an engine that is a library. It names `files` by their bare names."""
    files: tuple[ExportedFile, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    """Field of the record to why `record` differs from what was given there."""
    notes: tuple[str, ...] = ()
    """What the user should know of the engine's behaviour."""


@dataclass(frozen=True)
class ImportedSetting:
    """A setting read from an engine's own form."""

    record: SpeculativeRecord
    notes: tuple[str, ...] = ()
    """What was left out, and what to know."""


class Losses:
    """Collects what an engine's form cannot express, while a record is adapted to it."""

    def __init__(self, record: SpeculativeRecord) -> None:
        self.record = record.setting()
        self.lost: dict[str, str] = {}

    def change(self, name: str, value: Any, why: str) -> None:
        """Set a field to what the engine will run, with the reason; nothing happens where it is that already."""
        if getattr(self.record, name) == value:
            return
        before, self.record = self.record, replace(self.record, **{name: value})
        for changed in before.differences(self.record):  # a schedule that is always the depth is none
            self.lost.setdefault(changed, why)


@dataclass(frozen=True)
class Lack:
    """A field of the record for which an engine's form has no place."""

    field: str
    why: str
    """May name `{engine}` and `{method}`."""
    kept_by: Collection[str] = ()
    """Methods with which there is a place."""


DRAFTING = METHODS.keys() - {OFF.name}
_USUAL = {
    lack.field: lack
    for lack in (
        Lack("depth", "nothing is drafted", DRAFTING),
        Lack("model", "the model of this drafter is the target", WITH_MODEL),
        Lack("revision", "the model of this drafter is the target", WITH_MODEL),
        Lack("confidence_threshold", "{engine} drafts the whole depth always"),
        Lack("exit_layer", "{engine} has no early exit"),
        Lack("suffix", "{engine} has no suffix drafter"),
        Lack("schedule", "{engine} drafts the same depth at any load"),
        Lack("ngram", "only ngram has it", (NGRAM.name,)),
        Lack("tree", "this drafter proposes chains", MAY_NAME_MODEL),
    )
}


class SettingsFormat(ABC):
    """One engine's form. `to_engine` and `from_engine` read no checkpoint and start nothing."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The engine's name in messages."""
    lacks: ClassVar[tuple[Lack | str, ...]]
    """What a form of its has no place for, by the method alone; a field's name alone means the usual reason."""
    versions: ClassVar[tuple[str, ...]]
    """Versions whose settings are known, the newest last; that is the default."""
    default_depths: ClassVar[Mapping[str, int]] = {}
    """Method to the engine's own depth, where it is not `USUAL_DEPTH`; written for records that have none."""

    def check_version(self, version: str | None) -> str:
        """The known version that `version` belongs to (0.33.1 is 0.33); raises `ConfigError` for another."""
        if version is None:
            return self.versions[-1]
        for known in self.versions:
            if version == known or version.startswith(known + "."):
                return known
        raise ConfigError(
            f"{self.name} {version} is not known; known versions: {', '.join(self.versions)}; "
            f"{self.versions[-1]} by default"
        )

    def to_engine(self, record: SpeculativeRecord, version: str | None = None) -> ExportedSetting:
        """The engine's form of `record`; raises `ExportError` where the engine cannot run it."""
        version = self.check_version(version)
        whole = self._with_depth(record)
        setting = self.write(whole, version)
        reasons = dict.fromkeys(record.differences(whole), _WRITTEN) | dict(setting.lost)
        different = record.differences(setting.record)
        return replace(setting, lost={name: why for name, why in reasons.items() if name in different})

    def _with_depth(self, record: SpeculativeRecord) -> SpeculativeRecord:
        if record.method == OFF.name or record.depth is not None:
            return record
        deepest = max((each.depth for each in record.schedule), default=0)
        return replace(record, depth=deepest or self.default_depths.get(record.method, USUAL_DEPTH))

    def methods(self, version: str) -> Mapping[str, str]:
        """Our methods that a version runs, each with its name there; `off` goes without saying."""
        return names_in(self.name)

    def why_not(self, method: str, version: str) -> str:
        """Why a version lacks a method, where there is more to say."""
        return ""

    def check(self, record: SpeculativeRecord) -> None:
        """Raise `ExportError` for a tree or a head that the engine cannot run."""
        return

    @abstractmethod
    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        """Change in `losses` what depends on more than the method; `lacks` have been applied."""

    @abstractmethod
    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        """(the command, the files) of an adapted record; `given` has the info of its checkpoints."""

    @abstractmethod
    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        """What the user should know; as in `form`."""

    def write(self, record: SpeculativeRecord, version: str) -> ExportedSetting:
        """What `to_engine` says of a record with a depth, for a known version; `lost` may name too much."""
        has = self.methods(version)
        if record.method not in (OFF.name, *has):
            raise refuse_method(record, self.title, has, self.why_not(record.method, version))
        self.check(record)
        losses = Losses(record)
        for each in self.lacks:
            lack = _USUAL[each] if isinstance(each, str) else each
            if record.method not in lack.kept_by:
                why = lack.why.format(engine=self.title, method=record.method)
                losses.change(lack.field, NEUTRAL.get(lack.field), why)
        self.adapt(record, losses, version)
        command, files = self.form(losses.record, record, version)
        return ExportedSetting(
            engine=self.name,
            version=version,
            record=losses.record,
            argv=tuple(command),
            files=tuple(files),
            lost=losses.lost,
            notes=tuple(self.notes(losses.record, record)),
        )

    @abstractmethod
    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """(the engine's own keys and values, the target) of a source; None without any."""

    @abstractmethod
    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        """(the record of what was found, what to know of it); None where that sets no speculation."""

    def from_engine(self, source: SettingSource, version: str | None = None) -> ImportedSetting:
        """The record of an engine's own form; raises `ConfigError` for what Slipstream cannot run, with what it can."""
        version = self.check_version(version)
        given, target = self.found(source)
        record, notes = (None, ()) if given is None else self.read(given, target, version, source)
        if record is None:
            off = SpeculativeRecord(method=OFF.name, target=target)
            return ImportedSetting(off, (f"{source.where} asks for no speculation",))
        return ImportedSetting(record, tuple(notes))


def changes_the_text(what: str, instead: str = "omit it") -> ConfigError:
    """The error for a setting of another engine under which drafts are accepted where the target does not agree."""
    return ConfigError(
        f"{what} changes the text; Slipstream accepts drafts only where the target agrees: {instead}"
    )


def no_counterpart(what: str, instead: str) -> ConfigError:
    """The error for a drafter of another engine that nothing here is like."""
    return ConfigError(f"{what} has no counterpart here; {instead}")
