"""`slipstream learn`: shows what a server has learned, and lets an operator promote, roll back, freeze and forget."""

from __future__ import annotations

import json as json_
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from slipstream.cli import learn_replay
from slipstream.cli.flags.flags import PlainHelp, with_flags
from slipstream.cli.flags.options import Json
from slipstream.cli.output.console import print_rows, results, stderr, wide_results
from slipstream.cli.output.results import print_json
from slipstream.cli.output.writing import Overwrite, check_file, check_folder
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.learn.storage.folder import LearnFolder
    from slipstream.learn.storage.state import LearnState, ScopeVersions
    from slipstream.learn.versions.store import Version
    from slipstream.tools.bench.report.grid import Grid

app = typer.Typer(help="See and steer what a server that learns (slipstream serve --learn) has learned.")
app.command(cls=PlainHelp)(learn_replay.replay)


@dataclass(frozen=True, kw_only=True)
class LearnFlags:
    """What a server has learned."""

    folder: Annotated[Path, Argument(metavar="DIR")]
    """The folder that serve --learn was given."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class VersionsFlags(LearnFlags):
    """The versions on disk."""

    verify: Annotated[bool, Option("--verify")] = False
    """Read all weights and compare their sha256; exit with 1 on damage."""


@dataclass(frozen=True, kw_only=True)
class FreezeFlags(LearnFlags):
    """Whether anything may change."""

    off: Annotated[bool, Option("--off")] = False
    """Let the server learn again."""


@dataclass(frozen=True, kw_only=True)
class ScopeFlags:
    """Whose versions."""

    tenant: str | None = None
    """The versions of this tenant alone: an API key's account, or ACCOUNT/USER."""
    task: str | None = None
    """The versions of this task alone."""


@dataclass(frozen=True, kw_only=True)
class RollbackFlags(ScopeFlags, LearnFlags):
    """Where what served before serves again."""


@dataclass(frozen=True, kw_only=True)
class PromoteFlags(RollbackFlags):
    """What serves where."""

    version: Annotated[str, Argument()]
    """A version's id, or base for the drafter itself."""


@dataclass(frozen=True, kw_only=True)
class ForgetFlags(LearnFlags):
    """Whose data is deleted."""

    tenant: str
    """Whose data is deleted: an account with all its users, or ACCOUNT/USER."""


@dataclass(frozen=True, kw_only=True)
class LearnExportFlags(ScopeFlags):
    """What is exported."""

    folder: Annotated[Path, Argument(metavar="DIR")]
    """The folder that serve --learn was given."""
    output: Annotated[Path, Argument()]
    """A folder for a version; a file of JSON lines for records."""
    version: str | None = None
    """Export this version's tensors and description."""
    records: Annotated[bool, Option("--records")] = False
    """Export the served answers, as slipstream train reads them."""
    held_out: Annotated[bool, Option("--held-out")] = False
    """With --records: those on which versions are judged, too."""
    overwrite: Overwrite = False


@app.command(cls=PlainHelp)
@with_flags
def status(flags: LearnFlags) -> None:
    """Show what was captured, which versions serve, and what happened last. No server is contacted."""
    from slipstream.learn.status import LearnStatus

    found = LearnStatus.of(_folder(flags.folder))
    if flags.json:
        print_json(found.as_json())
        return
    ring, state = found.ring, found.state
    rows = [
        (
            "records",
            f"{_counted(ring.num_records, 'answer')}, {_counted(found.num_tokens, 'token')}, {ring.num_bytes:,} bytes",
        ),
        ("purposes", _counts(found.by_purpose)),
        ("tenants", _counts(found.by_tenant)),
        ("tasks", _counts(found.by_task)),
        ("model", "none yet" if found.identity is None else found.identity.model_hash),
        ("learning", "frozen" if state.frozen else "may change what serves"),
        *((f"serves {_whose(scope)}", _versions(scope)) for scope in state.scopes),
        *(
            (f"tokens a pass, {name or 'base'}", f"{value:.2f} on the answers in the ring")
            for name, value in sorted(found.by_version.items())
        ),
        ("versions", f"{len(found.versions)} kept"),
        *(("damaged", name) for name in found.unreadable),
        *(
            (_time(event.get("time_s", 0.0)), " ".join(f"{key}={value}" for key, value in _details(event)))
            for event in found.events
        ),
    ]
    print_rows(results(), rows)


@app.command(cls=PlainHelp)
@with_flags
def versions(flags: VersionsFlags) -> None:
    """List the versions on disk with their parents, data, figures and hash."""
    from slipstream.learn.storage.state import StateStore
    from slipstream.learn.versions.store import VersionStore

    where = _folder(flags.folder)
    where.check()
    store, state = VersionStore(where), StateStore(where).read()
    found = store.all()
    faults = (
        store.faults() if flags.verify else dict.fromkeys(store.unreadable(), "its description is damaged")
    )
    if flags.json:
        print_json({"versions": [one.as_json() for one in found], "faults": faults})
    else:
        wide_results().print(_table(found, state).rich())
        for name, fault in faults.items():
            print(f"damaged: {name}: {fault}")
    if flags.verify and faults:
        raise typer.Exit(1)


@app.command(cls=PlainHelp)
@with_flags
def freeze(flags: FreezeFlags) -> None:
    """Let nothing be trained, tried or promoted any more; what serves goes on serving."""
    from slipstream.learn.decisions.by_hand import freeze as freeze_

    _told(
        freeze_(_existing(flags.folder), not flags.off).as_json(),
        "learning goes on" if flags.off else "frozen",
        flags.json,
    )


@app.command(cls=PlainHelp)
@with_flags
def promote(flags: PromoteFlags) -> None:
    """Have a version serve from the next step on, without a test but that it is whole."""
    from slipstream.learn.decisions.by_hand import promote as promote_

    scope = promote_(_existing(flags.folder), flags.version, flags.tenant, flags.task)
    _told(asdict(scope), f"{_versions(scope)} serves {_whose(scope)}", flags.json)


@app.command(cls=PlainHelp)
@with_flags
def rollback(flags: RollbackFlags) -> None:
    """Withdraw the canary; without one, have what served before serve again."""
    from slipstream.learn.decisions.by_hand import roll_back

    scope = roll_back(_existing(flags.folder), flags.tenant, flags.task)
    _told(asdict(scope), f"{_versions(scope)} serves {_whose(scope)}", flags.json)


@app.command(cls=PlainHelp)
@with_flags
def forget(flags: ForgetFlags) -> None:
    """Delete a tenant's records, and all versions that learned from them; the server builds new ones from the rest."""
    from slipstream.learn.decisions.by_hand import forget as forget_

    gone = forget_(_existing(flags.folder), flags.tenant)
    names = ", ".join(gone.versions) or "none"
    text = f"{_counted(gone.num_records, 'record')} deleted; versions retired, to be rebuilt: {names}"
    if not gone.num_records and not gone.versions:
        # No error: the same call again, after one that was interrupted or has done all, must succeed.
        text = (
            f"there is nothing of tenant {flags.tenant!r}: no records, and no versions that learned from any"
        )
    _told(asdict(gone), text, flags.json)


@app.command(cls=PlainHelp)
@with_flags
def export(flags: LearnExportFlags) -> None:
    """Write a version's tensors, or the records as training data, to where others can use them."""
    from slipstream.learn.records.served import Purpose
    from slipstream.learn.storage.ring import read_ring
    from slipstream.learn.versions.store import ABOUT, WEIGHTS, VersionStore

    if (flags.version is None) != flags.records:
        raise ConfigError("choose what to export: --version ID, or --records")
    where, output = _existing(flags.folder), flags.output
    if flags.version is not None:
        check_folder(output)
        for name in (WEIGHTS, ABOUT):
            if output.is_dir():
                check_file(output / name, flags.overwrite)
        made = VersionStore(where).export(flags.version, output)
        stderr().print(f"written: {output} ({made.num_bytes:,} bytes, sha256 {made.sha256})", markup=False)
        return
    check_file(output, flags.overwrite)
    num = 0
    with output.open("w", encoding="utf-8") as stream:
        purpose = None if flags.held_out else Purpose.TRAIN
        for record in read_ring(where, purpose, flags.tenant, flags.task):
            stream.write(json_.dumps(record.training_row(), ensure_ascii=False) + "\n")
            num += 1
    stderr().print(f"written: {output} ({_counted(num, 'answer')})", markup=False)


def _folder(path: Path) -> LearnFolder:
    from slipstream.learn.storage.folder import LearnFolder

    return LearnFolder(path)


def _existing(path: Path) -> LearnFolder:
    folder = _folder(path)
    folder.check()
    return folder


def _told(what: Mapping[str, Any], text: str, json: bool) -> None:
    if json:
        print_json(what)
    else:
        print(text)


def _table(found: list[Version], state: LearnState) -> Grid:
    from slipstream.tools.bench.report.grid import Grid

    grid = Grid(
        "versions, the oldest first",
        ["version", "made", "learner", "parent", "for", "records", "tokens", "bytes", "serves", "figures"],
    )
    for one in found:
        whose = ", ".join(name for name in (one.tenant, one.task) if name is not None) or "all"
        serving = [_whose(scope) for scope in state.scopes if scope.serving == one.id]
        serving += [f"canary {scope.canary_share:.0%}" for scope in state.scopes if scope.canary == one.id]
        grid.add(
            one.id,
            _time(one.created_s),
            one.learner,
            one.parent or "base",
            whose,
            f"{one.window.num_records:,}",
            f"{one.window.num_tokens:,}",
            f"{one.num_bytes:,}",
            ", ".join(serving) or state.retired.get(one.id, ""),
            " ".join(f"{name}={_figure(value)}" for name, value in one.figures.items()),
        )
    return grid


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _counted(number: int, what: str) -> str:
    """'1 answer', '1,200 answers'."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _counts(counts: Any) -> str:
    return ", ".join(f"{name or '(none)'} {count:,}" for name, count in counts.items()) or "none yet"


def _whose(scope: ScopeVersions) -> str:
    names = [f"tenant {scope.tenant}"] if scope.tenant is not None else []
    names += [f"task {scope.task}"] if scope.task is not None else []
    return " and ".join(names) or "everyone"


def _versions(scope: ScopeVersions) -> str:
    text = scope.serving or "base"
    return (
        text
        if scope.canary is None
        else f"{text}, and to {scope.canary_share:.0%} of requests {scope.canary}"
    )


def _time(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _details(event: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in event.items() if key != "time_s"]
