"""`slipstream export`: a speculative setting in another engine's own form."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import (
    SPECULATION,
    Json,
    ModelArgument,
    chosen_speculation,
    print_json,
    with_model,
)
from slipstream.cli.output.console import notes, results
from slipstream.cli.output.writing import Overwrite, check_file, check_folder

if TYPE_CHECKING:
    from slipstream.tools.export import ExportedSetting


@with_model
@with_flags(speculation=SPECULATION)
def export(
    engine: Annotated[
        str, typer.Argument(help="vllm, sglang, tensorrt-llm, llama-cpp, openvino or transformers.")
    ],
    model: ModelArgument = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for the files; without it they are printed.")
    ] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="The engine's version, such as 0.33; the newest known by default.")
    ] = None,
    nearest: Annotated[
        bool,
        typer.Option("--nearest", help="Where the engine cannot run the setting, write the nearest one."),
    ] = False,
    checkpoint: Annotated[
        bool,
        typer.Option(
            "--checkpoint",
            help="Convert target and draft to the engine's layout too, into --output/checkpoint.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
    *,
    speculation: Values,
) -> None:
    """Write a speculative setting as another engine wants it: its command, files or program. Says what that engine
    cannot express. What it cannot run at all is refused, with the nearest that it can.
    """
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.errors import ConfigError
    from slipstream.tools.export import from_own, setting_or_nearest, settings_format
    from slipstream.tools.export.converting import FOLDER, check_destination, converted
    from slipstream.tools.export.writing import file_names, write_setting

    form = settings_format(engine)
    version = form.check_version(engine_version)
    if checkpoint and output is None:
        raise ConfigError("--checkpoint writes files; give --output FOLDER")
    config = chosen_speculation(speculation, model)
    record, remarks = from_own(config, EMBEDDED_TARGET if model is None else model)
    record, setting, why = setting_or_nearest(form.name, record, version, nearest)
    for reason in why:
        notes().print(f"note: {reason}", markup=False)
    if output is not None:
        check_folder(output, "--output")
        for name in file_names(setting):
            if output.is_dir():
                check_file(output / name, overwrite, "--output")
    if checkpoint:
        assert output is not None
        place = output / FOLDER
        check_destination(record, place, overwrite, "--output")
        record, more = converted(record, form.name, place, version)
        setting = form.to_engine(record, version)
        remarks += more
    written = [] if output is None else write_setting(setting, output)
    _report(setting, remarks, written, json)


def _report(setting: ExportedSetting, remarks: tuple[str, ...], written: list[Path], json: bool) -> None:
    from slipstream.tools.export.writing import command_line

    if json:
        whole = asdict(setting) | {"record": setting.record.to_mapping()}
        print_json({**whole, "notes": [*remarks, *setting.notes], "written": [str(path) for path in written]})
        return
    for field, why in setting.lost.items():
        notes().print(f"lost: {field}: {why}", markup=False)
    for note in (*remarks, *setting.notes):
        notes().print(f"note: {note}", markup=False)
    for path in written:
        notes().print(f"wrote {path}", markup=False)
    console = results()
    if setting.argv:
        console.print(command_line(setting, written[0].parent if written else None), markup=False)
    for file in setting.files if not written else ():
        console.print(f"# {file.name}", markup=False)
        console.print(file.text, markup=False, end="")
