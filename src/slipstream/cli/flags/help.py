"""`--help` as plain text: names are never cut, and brackets are not read as markup."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class PlainHelp(TyperCommand):
    """A command whose help groups flags under the headings of their panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)
