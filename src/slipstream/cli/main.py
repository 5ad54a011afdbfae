"""The `slipstream` command. Each verb is one file, imported when it is called; so is PyTorch."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from slipstream.cli.flags.flags import PlainHelp
from slipstream.cli.output.writing import unwritable
from slipstream.core.garbage import leave_garbage_at_exit
from slipstream.core.version import __version__
from slipstream.errors import SlipstreamError

VERBS = {
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "deploy": "deploy",
    "info": "info",
    "plan": "plan",
    "bench": "bench",
    "load": "load",
    "audit": "audit",
    "advise": "advise",
    "tree": "tree",
    "doctor": "doctor",
    "export": "export",
    "import": "importing:import_",
    "quantize": "quantize",
    "draft-worker": "draft_worker",
    "train": "train:app",
    "handoff": "handoff:app",
    "learn": "learn:app",
    "reasoning": "reasoning:app",
}
"""Verb to its file, and to the name in it where that is another."""


class _Verbs(Mapping[str, Any]):
    """The verbs' commands, each made when it is first needed: making the flags of all takes half a second."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)

    def __contains__(self, name: object) -> bool:
        return name in VERBS

    def get(self, name: str, default: Any = None) -> Any:
        """Not the base's, which would take a `KeyError` in a verb's own file for an unknown verb."""
        return self[name] if name in VERBS else default

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            module, _, attribute = VERBS[name].partition(":")
            verb = getattr(import_module(f"slipstream.cli.{module}"), attribute or module)
            group = typer.Typer(rich_markup_mode=None)
            if isinstance(verb, typer.Typer):
                group.add_typer(verb, name=name)
            else:
                group.command(name=name, cls=PlainHelp)(verb)
            self._made[name] = typer.main.get_group(group).commands[name]
        return self._made[name]


class _Group(TyperGroup):
    """Turns every failure into one line on standard error and an exit code.

    2: invalid input, or a file cannot be written. 1: an internal error. 130: Ctrl-C.
    """

    debug = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = _Verbs()  # type: ignore[assignment]

    def invoke(self, ctx: Any) -> Any:
        self.debug = bool(ctx.params.get("debug"))
        return super().invoke(ctx)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # replaced in tests
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            sys.stdout.flush()  # so that a full disk raises here, not when Python exits
        except (SlipstreamError, TyperException) as error:
            code = self._fail(error, getattr(error, "exit_code", 2))
        except Exception as error:
            code = self._fail(error, 1 if unwritable(error) is None else 2)
        if code == 130:
            if sys.stdout.isatty():
                print()  # end the unfinished line of the answer or the prompt sign
            print("interrupted", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)

    def _fail(self, error: Exception, code: int) -> int:
        if self.debug:
            traceback.print_exception(error)
        message = error.format_message() if isinstance(error, TyperException) else str(error)
        if code == 2 and not isinstance(error, (SlipstreamError, TyperException)):
            message = unwritable(error) or message
            _drop_output()
        if message.startswith("Got unexpected extra argument"):
            verb = getattr(getattr(error, "ctx", None), "info_name", None)
            message += (
                "; put quotes around the prompt, and give several by --file" if verb == "generate" else ""
            )
        if message == "Missing command.":
            message = f"{message} See {error.ctx.command_path} --help"  # type: ignore[attr-defined]
        text = " ".join(message.split()) or type(error).__name__
        if code == 1 and not self.debug:
            text = f"{type(error).__name__}: {text} (slipstream --debug … shows where)"
        print(f"error: {text}", file=sys.stderr)
        return code


def _drop_output() -> None:
    """Redirect standard output, so that Python does not try to write its buffer again at exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)


leave_garbage_at_exit()
app = typer.Typer(name="slipstream", cls=_Group, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def slipstream(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """LLM inference whose first primitive is speculative decoding: the target's own text, faster."""
    if version:
        print(f"slipstream {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


if __name__ == "__main__":
    app()
