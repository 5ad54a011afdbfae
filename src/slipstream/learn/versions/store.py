"""Versions of a drafter's weights on disk: each whole or absent, with where it came from and what it promised."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.core.whole_files import sync_folder
from slipstream.errors import CorruptVersionError, LearnError
from slipstream.learn.records.served import ServedRecord, tenant_keys
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import check_remembered

if TYPE_CHECKING:
    import torch

WEIGHTS, ABOUT = "weights.safetensors", "version.json"
NUM_KEPT = 8
FORMAT = 2
"""1 called `base_hash` `floor_hash`."""
"""Raised when a file of another version could be misread."""
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class DataWindow:
    """The records that a version learned from."""

    first: int = -1
    last: int = -1
    """Numbers in the ring, both included; -1 for none."""
    num_records: int = 0
    num_tokens: int = 0
    """Tokens of answers."""
    from_s: float = 0.0
    to_s: float = 0.0
    """When the first and the last of the answers began, seconds since 1970."""
    tenants: tuple[str, ...] = ()
    """`tenant_keys` of all; names are not kept."""
    read_s: float = 0.0
    """When they were read from the ring: what is forgotten later was among them, what was forgotten before was not."""

    @classmethod
    def of(cls, records: Iterable[ServedRecord], read_s: float) -> DataWindow:
        """The window of `records`, in any order; `read_s` is a `time.time()` from before they were read."""
        records = list(records)
        if not records:
            return cls(read_s=read_s)
        return cls(
            first=min(one.number for one in records),
            last=max(one.number for one in records),
            num_records=len(records),
            num_tokens=sum(len(one.token_ids) for one in records),
            from_s=min(one.created_s for one in records),
            to_s=max(one.created_s for one in records),
            tenants=tuple(sorted({key for one in records for key in tenant_keys(one.tenant)})),
            read_s=read_s,
        )

    def with_(self, other: DataWindow) -> DataWindow:
        """The window of a version that learned from both, one after the other."""
        firsts = [one.first for one in (self, other) if one.num_records]
        return replace(
            self,
            first=min(firsts, default=-1),
            last=max(self.last, other.last),
            num_records=self.num_records + other.num_records,
            num_tokens=self.num_tokens + other.num_tokens,
            from_s=min(self.from_s, other.from_s),
            to_s=max(self.to_s, other.to_s),
            tenants=tuple(sorted({*self.tenants, *other.tenants})),
            read_s=min(self.read_s, other.read_s),
        )


@dataclass(frozen=True, slots=True)
class Version:
    """All that is known of a version in addition to its tensors. No version needs another one to be loaded."""

    learner: str
    """What made it: whole, low_rank, eagle, corrective."""
    model_hash: str
    template_hash: str
    base_hash: str
    """Hash of the drafter that it belongs on, which is never replaced."""
    parent: str = ""
    """The version whose weights it began with; empty for the base drafter."""
    tenant: str | None = None
    """Whose requests it is for; None for everyone's."""
    task: str | None = None
    window: DataWindow = DataWindow()
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What it promised and what it cost: plain values, as JSON has them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The learner's options."""
    taught_by: tuple[str, ...] = ()
    """`tenant_keys` of all whose records are in it, its parents' included. `VersionStore.add` fills in this and what
    follows."""
    id: str = ""
    created_s: float = 0.0
    num_bytes: int = 0
    sha256: str = ""
    """Digest of its weights' file."""

    @property
    def number(self) -> int:
        """Versions count on in the order in which they were made."""
        return int(self.id.partition("-")[0].removeprefix("v"))

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, for a file or a message."""
        return {
            "format": FORMAT,
            **asdict(self),
            "floor_hash": self.base_hash,
        }  # the name before, for one release

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Version:
        """Read it from a file; raises `LearnError`."""
        found = dict(value)
        written, floor_hash = found.pop("format", None), found.pop("floor_hash", None)
        if written == 1:
            found["base_hash"], written = floor_hash, FORMAT
        if written != FORMAT:
            raise LearnError("it was written by another release of slipstream")
        try:
            window = {**found.pop("window")}
            window["tenants"] = tuple(window["tenants"])
            found["taught_by"] = tuple(found["taught_by"])
            return cls(window=DataWindow(**window), **found)
        except (TypeError, KeyError) as error:
            raise LearnError(f"it lacks or has too many fields: {error}") from None


class VersionStore:
    """`versions/<id>/` with `weights.safetensors` and `version.json`, of which the last `num_kept` are kept.

    A version is written under a temporary name, synced and renamed: killed at any instant, it is there whole or not at
    all. What cannot be read any more is found by its sha256 when it is read.
    """

    def __init__(self, folder: LearnFolder, num_kept: int = NUM_KEPT) -> None:
        if num_kept < 1:
            raise LearnError(f"at least 1 version must be kept, got {num_kept}")
        self._folder = folder
        self._num_kept = num_kept

    def add(
        self, version: Version, tensors: Mapping[str, torch.Tensor], in_use: Collection[str] = ()
    ) -> Version:
        """Keep `tensors` as a version; returns it with its id, sha256 and size.

        Versions older than the last `num_kept` are removed, but for those `in_use`. Raises `LearnError` where nothing
        can be written, where the parent is not there, or where its records or the parent's have been forgotten since.
        """
        from safetensors.torch import save

        data = save({name: one.detach().contiguous().cpu() for name, one in tensors.items()})
        taught_by = set(version.window.tenants)
        with self._folder.lock("versions"):
            if version.parent:
                parent = self.get(version.parent)
                check_remembered(
                    self._folder, parent.taught_by, parent.created_s
                )  # it is about to be removed
                taught_by |= set(parent.taught_by)
            check_remembered(self._folder, version.window.tenants, version.window.read_s)
            digest = hashlib.sha256(data).hexdigest()
            number = 1 + max((one.number for one in self.all()), default=self._last_number())
            version = replace(
                version,
                taught_by=tuple(sorted(taught_by)),
                id=f"v{number:06d}-{digest[:8]}",
                created_s=time.time(),
                num_bytes=len(data),
                sha256=digest,
            )
            try:
                self._write(version, data)
                self._prune(in_use)
            except OSError as error:
                raise self._folder.unwritable(error) from None
        return version

    def all(self) -> list[Version]:
        """Those whose description can be read, the oldest first; `faults` names the others."""
        found: list[Version] = []
        for folder in self._folders():
            with contextlib.suppress(LearnError):
                found.append(self.get(folder.name))
        return sorted(found, key=lambda one: one.number)

    def get(self, version_id: str) -> Version:
        """A version's description; raises `LearnError` where there is none, `CorruptVersionError` for a damaged one."""
        file = self._path(version_id) / ABOUT
        try:
            text = file.read_bytes()
        except FileNotFoundError:
            known = ", ".join(one.name for one in self._folders()) or "none"
            raise LearnError(f"there is no version {version_id!r}; there are: {known}") from None
        except OSError as error:
            raise CorruptVersionError(f"version {version_id!r} cannot be read: {error.strerror}") from None
        try:
            head, _, body = text.partition(b"\n")
            if head.decode("ascii") != hashlib.sha256(body).hexdigest():
                raise LearnError("its description is not the one that was written")
            version = Version.from_json(json.loads(body))
            if version.id != version_id:
                raise LearnError(f"it says that it is {version.id!r}")
        except (LearnError, ValueError) as error:
            raise CorruptVersionError(f"version {version_id!r} is damaged: {error}") from None
        return version

    def stands_on(self, version_id: str, base_hash: str) -> bool:
        """Whether a version was learned on the drafter of this hash. One that cannot be read counts as such, and is
        found out when it is loaded."""
        try:
            return self.get(version_id).base_hash == base_hash
        except LearnError:
            return True

    def load(self, version_id: str) -> dict[str, torch.Tensor]:
        """Return its tensors, from bytes whose sha256 is right; raises as `get` does."""
        from safetensors.torch import load

        version = self.get(version_id)
        try:
            data = self.weights_file(version_id).read_bytes()
        except OSError as error:
            raise CorruptVersionError(
                f"version {version_id!r} is damaged: its weights cannot be read: {error.strerror}"
            ) from None
        if hashlib.sha256(data).hexdigest() != version.sha256:
            raise CorruptVersionError(f"version {version_id!r} is damaged: its weights have another sha256")
        return load(data)

    def verify(self, version_id: str) -> Version:
        """Return its description, once the weights' sha256 has been found right; raises as `get` does."""
        version = self.get(version_id)
        try:
            with self.weights_file(version_id).open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise CorruptVersionError(
                f"version {version_id!r} is damaged: its weights cannot be read: {error.strerror}"
            ) from None
        if digest != version.sha256:
            raise CorruptVersionError(f"version {version_id!r} is damaged: its weights have another sha256")
        return version

    def unreadable(self) -> list[str]:
        """Versions of which not even the description can be read."""
        readable = {one.id for one in self.all()}
        return [folder.name for folder in self._folders() if folder.name not in readable]

    def faults(self) -> dict[str, str]:
        """Damaged versions and what is wrong with each; reads all weights."""
        found: dict[str, str] = {}
        for folder in self._folders():
            try:
                self.verify(folder.name)
            except LearnError as error:
                found[folder.name] = str(error)
        return found

    def weights_file(self, version_id: str) -> Path:
        """Return where its weights are, for those who read them another way; `verify` first."""
        return self._path(version_id) / WEIGHTS

    def export(self, version_id: str, output: Path) -> Version:
        """Copy a version's tensors and its description to a folder, once its sha256 has been found right.

        Raises as `get` does, and `OSError` where it cannot be written.
        """
        version = self.verify(version_id)
        output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.weights_file(version_id), output / WEIGHTS)
        text = json.dumps(version.as_json(), indent=1, ensure_ascii=False)
        (output / ABOUT).write_text(text + "\n", encoding="utf-8")
        return version

    def remove(self, version_id: str) -> None:
        """Delete a version for good; one that is not there is no error."""
        with self._folder.lock("versions"):
            try:
                self._remove(self._path(version_id))
            except OSError as error:
                raise self._folder.unwritable(error) from None

    def remove_where(
        self, unwanted: Callable[[Version], bool], before: Callable[[Collection[str]], None]
    ) -> tuple[str, ...]:
        """Delete all `unwanted` versions, and those whose description cannot be read; returns their ids.

        `before` is called with the ids before any of them goes. No version is added meanwhile: one that is being
        written is among those that are looked at.
        """
        with self._folder.lock("versions"):
            gone = sorted({*(one.id for one in self.all() if unwanted(one)), *self.unreadable()})
            before(gone)
            try:
                for version_id in gone:
                    self._remove(self._path(version_id))
            except OSError as error:
                raise self._folder.unwritable(error) from None
        return tuple(gone)

    def _path(self, version_id: str) -> Path:
        if not version_id.startswith("v") or "/" in version_id or "\0" in version_id:
            raise LearnError(f"a version is named like v000012-1f0c9a3e, got {version_id!r}")
        return self._folder.versions / version_id

    def _folders(self) -> list[Path]:
        try:
            return sorted(one for one in self._folder.versions.iterdir() if one.name.startswith("v"))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LearnError(f"cannot read {str(self._folder.versions)!r}: {error.strerror}") from None

    def _last_number(self) -> int:
        """The highest number among folders that cannot be read either; 0 without any."""
        numbers = [one.name.partition("-")[0].removeprefix("v") for one in self._folders()]
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def _write(self, version: Version, data: bytes) -> None:
        """Write a version under a temporary name and rename it. Leftovers are those of writers that died: the lock is
        held."""
        for leftover in self._folder.versions.glob(".tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        unfinished = self._folder.versions / f".tmp-{version.id}"
        body = json.dumps(version.as_json(), indent=1, ensure_ascii=False).encode("utf-8") + b"\n"
        try:
            unfinished.mkdir(mode=0o700)
            head = hashlib.sha256(body).hexdigest().encode("ascii") + b"\n"
            for name, content in ((WEIGHTS, data), (ABOUT, head + body)):
                with (unfinished / name).open("xb") as stream:
                    view = memoryview(content)
                    for begin in range(0, len(view), _BLOCK):
                        stream.write(view[begin : begin + _BLOCK])
                    stream.flush()
                    os.fsync(stream.fileno())
            sync_folder(unfinished)
            unfinished.rename(self._folder.versions / version.id)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_folder(self._folder.versions)

    def _prune(self, in_use: Collection[str]) -> None:
        """Remove what is older than the last `num_kept`, but for what is in use."""
        for version in self.all()[: -self._num_kept]:
            if version.id not in in_use:
                self._remove(self._path(version.id))

    def _remove(self, path: Path) -> None:
        """Rename first: a version is never seen with a part of its files."""
        removed = self._folder.versions / f".tmp-removed-{path.name}"
        try:
            path.rename(removed)
        except FileNotFoundError:
            return
        sync_folder(self._folder.versions)
        shutil.rmtree(removed, ignore_errors=True)
