"""`slipstream import`: another engine's speculative setting as ours."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from slipstream.cli.flags.flags import with_flags
from slipstream.cli.flags.options import Json
from slipstream.cli.output.console import stderr
from slipstream.cli.output.results import print_json
from slipstream.cli.output.writing import Overwrite, check_file, check_folder


@dataclass(frozen=True, kw_only=True)
class ImportFlags:
    """What is read, and what is written."""

    engine: Annotated[str, Argument()]
    """vllm, sglang, tensorrt-llm, llama-cpp, openvino or transformers."""
    setting: Annotated[str, Argument()]
    """A file (JSON, YAML, a Python program, a shell script), a command in quotes, or JSON."""
    output: Annotated[Path | None, Option("--output", "-o")] = None
    """File for what --speculative-config takes."""
    engine_version: str | None = None
    """The engine's version, such as 0.33; the newest known by default."""
    checkpoint: Path | None = None
    """Convert target and draft into this folder, where Slipstream needs another form."""
    overwrite: Overwrite = False
    json: Json = False


@with_flags
def import_(flags: ImportFlags) -> None:
    """Read another engine's speculative setting and print it as --speculative-config takes it. Says what has no
    counterpart here; a setting that changes the text is refused. Programs are read, not run.
    """
    from slipstream.tools.export import read_source, settings_format, to_own
    from slipstream.tools.export.converting import check_destination, converted_back

    output, checkpoint = flags.output, flags.checkpoint
    form = settings_format(flags.engine)
    form.check_version(flags.engine_version)
    if output is not None:
        check_file(output, flags.overwrite, "--output")
    found = form.from_engine(read_source(flags.setting), flags.engine_version)
    record, more = found.record, found.notes
    if checkpoint is not None:
        check_folder(checkpoint, "--checkpoint")
        check_destination(record, checkpoint, flags.overwrite, "--checkpoint")
        record, kept = converted_back(record, form.name, checkpoint)
        more += kept
    config, remarks = to_own(record)
    remarks = (*more, *remarks)
    if output is not None:
        output.write_text(jsonlib.dumps(config, indent=2) + "\n", encoding="utf-8")
    if flags.json:
        print_json(
            {
                "model": record.target,
                "speculative_config": config,
                "record": record.to_mapping(),
                "notes": list(remarks),
            }
        )
        return
    for note in remarks:
        stderr().print(f"note: {note}", markup=False)
    if record.target is not None:
        stderr().print(f"model: {record.target}", markup=False)
    if output is not None:
        stderr().print(f"wrote {output}", markup=False)
    print_json(config)
