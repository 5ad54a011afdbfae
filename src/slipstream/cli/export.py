"""`slipstream export`: a speculative setting in another engine's own form."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from slipstream.cli.flags.flags import with_flags
from slipstream.cli.flags.options import Json, ModelArgument, SpeculationValues, chosen_speculation
from slipstream.cli.output.console import results, stderr
from slipstream.cli.output.results import print_json
from slipstream.cli.output.writing import Overwrite, check_file, check_folder

if TYPE_CHECKING:
    from slipstream.tools.export import ExportedSetting


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """What is written, and where."""

    engine: Annotated[str, Argument()]
    """vllm, sglang, tensorrt-llm, llama-cpp, openvino or transformers."""
    model: ModelArgument = None
    output: Annotated[Path | None, Option("--output", "-o")] = None
    """Folder for the files; without it they are printed."""
    engine_version: str | None = None
    """The engine's version, such as 0.33; the newest known by default."""
    nearest: Annotated[bool, Option("--nearest")] = False
    """Where the engine cannot run the setting, write the nearest one."""
    checkpoint: Annotated[bool, Option("--checkpoint")] = False
    """Convert target and draft to the engine's layout too, into --output/checkpoint."""
    overwrite: Overwrite = False
    json: Json = False
    speculation: SpeculationValues


@with_flags
def export(flags: ExportFlags) -> None:
    """Write a speculative setting as another engine wants it: its command, files or program. Says what that engine
    cannot express. What it cannot run at all is refused, with the nearest that it can.
    """
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.errors import ConfigError
    from slipstream.tools.export import from_own, setting_or_nearest, settings_format
    from slipstream.tools.export.contract import file_names, write_setting
    from slipstream.tools.export.converting import FOLDER, check_destination, converted

    output = flags.output
    form = settings_format(flags.engine)
    version = form.check_version(flags.engine_version)
    if flags.checkpoint and output is None:
        raise ConfigError("--checkpoint writes files; give --output FOLDER")
    config = chosen_speculation(flags.speculation, flags.model)
    record, remarks = from_own(config, flags.model or EMBEDDED_TARGET)
    record, setting, why = setting_or_nearest(form.name, record, version, flags.nearest)
    for reason in why:
        stderr().print(f"note: {reason}", markup=False)
    if output is not None:
        check_folder(output, "--output")
        for name in file_names(setting):
            if output.is_dir():
                check_file(output / name, flags.overwrite, "--output")
    if flags.checkpoint:
        assert output is not None
        place = output / FOLDER
        check_destination(record, place, flags.overwrite, "--output")
        record, more = converted(record, form.name, place, version)
        setting = form.to_engine(record, version)
        remarks += more
    written = [] if output is None else write_setting(setting, output)
    _report(setting, remarks, written, flags.json)


def _report(setting: ExportedSetting, remarks: tuple[str, ...], written: list[Path], json: bool) -> None:
    from slipstream.tools.export.contract import command_line

    if json:
        whole = asdict(setting) | {"record": setting.record.to_mapping()}
        print_json({**whole, "notes": [*remarks, *setting.notes], "written": [str(path) for path in written]})
        return
    for field, why in setting.lost.items():
        stderr().print(f"lost: {field}: {why}", markup=False)
    for note in (*remarks, *setting.notes):
        stderr().print(f"note: {note}", markup=False)
    for path in written:
        stderr().print(f"wrote {path}", markup=False)
    console = results()
    if setting.argv:
        console.print(command_line(setting, written[0].parent if written else None), markup=False)
    for file in setting.files if not written else ():
        console.print(f"# {file.name}", markup=False)
        console.print(file.text, markup=False, end="")
