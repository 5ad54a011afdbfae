"""`slipstream doctor`: checks a draft against its target."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from typer import Argument

from slipstream.cli.flags.flags import with_flags
from slipstream.cli.flags.options import EngineValues, Json
from slipstream.cli.output.console import results, stderr
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.results import print_json
from slipstream.core.model_path import check_model_path
from slipstream.core.pretrained import path_of
from slipstream.draft.methods import IN_CHECKPOINT

_COLOURS = {"ok": "green", "warning": "yellow", "fault": "red"}


@dataclass(frozen=True, kw_only=True)
class DoctorFlags:
    """What is checked."""

    target: Annotated[str, Argument()]
    """The target: a checkpoint folder, hub id or GGUF file, or `embedded`."""
    draft: Annotated[str, Argument()]
    """The draft model or head: a folder, hub id or GGUF file; `mtp` for the layer in the target's own checkpoint."""
    kind: str | None = None
    """draft_model, mtp, eagle, eagle3, medusa or hydra; inferred by default."""
    json: Json = False
    engine: EngineValues


@with_flags
def doctor(flags: DoctorFlags) -> None:
    """Check a draft against its target: files, keys, shapes, tokenizer, vocabulary maps, context, rope, norm flags,
    layer numbering and layouts, and its acceptance on a few prompts. Exits with 2 when it found a fault.
    """
    target, draft = path_of(flags.target), flags.draft
    for path in (target, draft):
        if path not in ("embedded", *IN_CHECKPOINT):
            check_model_path(path)
    say_loading(target)

    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.tools.doctor import CheckOutcome, examine

    findings = []
    console = results()
    model = EMBEDDED_TARGET if target == "embedded" else target

    def say(part: str) -> None:
        stderr().print(f"{part} …", markup=False)

    for finding in examine(model, draft, flags.kind, flags.engine, say):
        findings.append(finding)
        if not flags.json:
            console.print(f"{finding.verdict:<8}", style=_COLOURS[finding.verdict], end="")
            console.print(f"{finding.check:<12}{finding.text}", markup=False)
    if flags.json:
        print_json([asdict(finding) for finding in findings])
    faults = sum(finding.verdict is CheckOutcome.FAULT for finding in findings)
    if faults:
        stderr().print(f"{faults} fault{'s' if faults > 1 else ''} found")
        raise typer.Exit(2)
