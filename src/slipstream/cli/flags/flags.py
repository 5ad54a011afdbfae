"""Command-line flags made from dataclasses, so that flags, help and documentation agree.

A field becomes `--its-name`, with the string below it in the class as its help and the field's default. A flag that is
not given is not passed on, so that defaults are defined in one place.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import logging
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from slipstream.config import RENAMED
from slipstream.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

Values = dict[str, Any]
"""Field name to value, for the flags that were given."""
Filled = TypeVar("Filled")

_AS_FLAG = "_flag"
"""Ends the parameter's name of a flag whose field may be given as an argument, too."""

_ALIASES = {"n": ["-n"], "num_threads": ["--threads"]}

_PLAIN_HELP = {
    "bad_words": "Texts that must not occur in the answer.",
    "device": "auto, cpu or cuda.",
    "dtype": "auto, float32, bfloat16 or float16.",
    "enable_prefix_caching": "Reuse keys and values of prompts with a common prefix; the text does not change.",
    "ignore_eos": "Continue after the model's end token.",
    "include_stop_str_in_output": "Keep the stop string or stop token in the text.",
    "method": "The drafter: one of those below, one that a package installed, or package.module:Class.",
    "model": "Checkpoint folder or hub id.",
    "options": "The drafter's own keys, below; written on the same level as the other two.",
    "max_num_seqs": "The most sequences that run at once.",
    "max_tokens": "The most tokens in an answer.",
    "prompt_logprobs": "As `logprobs`, for the tokens of the prompt.",
    "revision": "Branch, tag or commit of a checkpoint on the hub.",
    "skip_special_tokens": "Omit special tokens from the text.",
    "stop_token_ids": "Token ids that end the answer.",
    "tokenizer": "Folder or hub id of the tokenizer; the model's own by default.",
    "verifier": "coupled, rejection, block, one that a package installed, or package.module:Class.",
    "trust_remote_code": "Run Python code that comes with the checkpoint.",
}
"""Help of fields without a string in the source."""


def field_help(cls: type) -> dict[str, str]:
    """Field name to help: the string that follows the field in the source of `cls`, in one line.

    Inherited fields keep their base's help unless the class has its own.
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    help_: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            help_ |= field_help(base)
    for field, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            name = field.target.id
            text = below.value.value if _is_string(below) else _PLAIN_HELP.get(name, "")  # type: ignore[attr-defined]
            help_[name] = " ".join(text.split()) or help_.get(name, "")
    return help_


@dataclasses.dataclass(frozen=True)
class FlagSet:
    """The flags of one dataclass: `skip` names the fields without a flag, `panel` is their heading in the help.

    `defaults` replace the fields' own defaults, `panels` name the headings of fields that have another one.
    """

    cls: type
    panel: str
    skip: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    panels: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def fields(self) -> list[dataclasses.Field[Any]]:
        """The fields with a flag."""
        return [field for field in dataclasses.fields(self.cls) if field.name not in self.skip]

    def parameters(self) -> list[inspect.Parameter]:
        """One keyword parameter for each flag, in Typer's form; None means that the flag was not given."""
        help_, hints = field_help(self.cls), typing.get_type_hints(self.cls)
        return [self._parameter(field, hints[field.name], help_[field.name]) for field in self.fields()]

    def collect(self, arguments: Values) -> Values:
        """Remove this set's values from a command's `arguments`; returns them converted to the fields' types."""
        hints = typing.get_type_hints(self.cls)
        given: Values = {}
        for field in self.fields():
            value = arguments.pop(field.name)
            if value is None:
                value = self.defaults.get(field.name)
            if value is not None:
                given[field.name] = _convert(field.name, _kind(field.name, hints[field.name]), value)
        return given

    def read(self, values: Mapping[str, Any], source: str) -> Values:
        """Values of a file or of the environment, which holds texts only, converted as `collect` does.

        Raises `ConfigError`, which names the `source`, for an invalid value.
        """
        hints = typing.get_type_hints(self.cls)
        return {name: _read(name, _kind(name, hints[name]), value, source) for name, value in values.items()}

    def _parameter(self, field: dataclasses.Field[Any], hint: Any, help_: str) -> inspect.Parameter:
        kind = _kind(field.name, hint)
        name = flag_name(field.name)
        names = [*_ALIASES.get(field.name, []), f"{name}/--no{name[1:]}" if kind is bool else name]
        own = self.defaults.get(field.name, field.default)
        default = None if own in (None, (), dataclasses.MISSING) else str(own)
        option = typer.Option(
            *names,
            help=" ".join(filter(None, [help_, _EXAMPLES.get(field.name) or _SYNTAX.get(kind)])),
            metavar=_METAVARS.get(kind),
            show_default=(default.lower() if kind is bool else default) if default else False,
            rich_help_panel=self.panels.get(field.name, self.panel),
        )
        shape = {"ids": str, "json": str, "bytes": str, "strings": list[str]}.get(kind, kind)
        return _keyword(field.name, Annotated[shape | None, option])


class PlainHelp(TyperCommand):
    """A command whose help groups flags under the headings of their panels, and that knows flags by old names too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.get_params(ctx) for name in parameter.opts}
        return super().parse_args(ctx, [_of_this_release(argument, known) for argument in args])

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


def _of_this_release(argument: str, known: Collection[str]) -> str:
    """An argument of the command line with a flag's name of this release; an old one is warned of."""
    flag, *value = argument.split("=", 1)
    new = flag_name(RENAMED.get(flag.removeprefix("--").replace("-", "_"), ""))
    if not flag.startswith("--") or flag in known or new not in known:
        return argument
    logger.warning("%s is now called %s", flag, new)
    return "=".join([new, *value])


def with_flags(command: Callable[[Any], None]) -> Callable[..., None]:
    """A command of Typer from a function of one dataclass of settings, each field of which is a flag.

    A field's help is the string below it; `Annotated` gives it what else Typer's `Option` or `Argument` takes (with
    both, either may be used). A field of a dataclass holds that one's flags, under the panel in its annotation, and a
    field with a `FlagSet` that set's values, of the flags that were given.
    """
    [parameter] = inspect.signature(command, eval_str=True).parameters.values()
    settings = parameter.annotation
    parameters = list(_parameters(settings))

    def run(**arguments: Any) -> None:
        command(_made(settings, arguments))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def filled(cls: type[Filled], settings: object, **others: Any) -> Filled:
    """A `cls` with the values that `settings` has under the names of its fields, and with the `others`."""
    names = {field.name for field in dataclasses.fields(cls)} - others.keys()  # type: ignore[arg-type]
    return cls(**{name: getattr(settings, name) for name in names if hasattr(settings, name)}, **others)


def refuse(flags: Mapping[str, Any], why: str) -> None:
    """Raise `ConfigError` for the first of the `flags`, names and values, that was given."""
    for name, value in flags.items():
        if value is not None:
            raise ConfigError(f"{flag_name(name)} {why}")


def flag_name(name: str) -> str:
    """'max_tokens' -> '--max-tokens'; the name of an argument, in capitals, stays."""
    return name if name.isupper() else "--" + name.replace("_", "-")


def _fields(settings: type) -> Iterator[tuple[dataclasses.Field[Any], Any, list[Any]]]:
    """Each field with its type, and what else is in its `Annotated`."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        is_plain = typing.get_origin(hint) is not Annotated
        yield field, *((hint, []) if is_plain else (hint.__origin__, list(hint.__metadata__)))


def _parameters(settings: type, panel: str | None = None) -> Iterator[inspect.Parameter]:
    help_ = field_help(settings)
    for field, hint, extras in _fields(settings):
        if extras and isinstance(extras[0], FlagSet):
            yield from extras[0].parameters()
        elif dataclasses.is_dataclass(hint):
            yield from _parameters(typing.cast("type", hint), *extras)
        else:
            for number, info in enumerate(extras or [typer.Option()]):
                own = copy.copy(info)
                own.help = own.help or help_[field.name]
                own.rich_help_panel = own.rich_help_panel or panel
                default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
                name = field.name + number * _AS_FLAG
                yield _keyword(name, Annotated[hint, own], default)


def _made(settings: type, arguments: Values) -> Any:
    """The settings from a command's `arguments`, which are removed."""
    values: Values = {}
    for field, hint, extras in _fields(settings):
        name = field.name
        if extras and isinstance(extras[0], FlagSet):
            values[name] = extras[0].collect(arguments)
        elif dataclasses.is_dataclass(hint):
            values[name] = _made(typing.cast("type", hint), arguments)
        else:
            value, as_flag = arguments.pop(name), arguments.pop(name + _AS_FLAG, None)
            if value is not None and as_flag not in (None, value):
                raise ConfigError(
                    f"two {name}s are given: {value!r} and --{name} {as_flag!r}; omit one of them"
                )
            values[name] = as_flag if value is None else value
    return settings(**values)


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def parse_bytes(text: str) -> int:
    """'512MiB' -> 536870912. Units are B, KB, MB, GB (1000) and KiB, MiB, GiB (1024), in any case."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)(i?)b?\s*", text.lower())
    if match is None:
        raise ConfigError(
            f"{text!r} is not a size; write a number of bytes, or with one of the units B, KB, MB, GB, KiB, MiB and "
            "GiB, as in 512MiB or 2GB"
        )
    number, scale, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** " kmg".index(scale or " ")
    if size > sys.maxsize:
        raise ConfigError(f"{text!r} is more than any machine has; write a size as in 512MiB or 2GB")
    return int(size)


_SYNTAX = {
    "ids": "Separated by commas: 5,6.",
    "json": "A JSON object.",
    "strings": "May be repeated.",
}
"""Added to the help of flags whose value is more than one word or number."""

_EXAMPLES = {
    "logit_bias": """A JSON object: '{"5": 1.5, "6": -100}'.""",
    "structured": """In JSON: '{"regex": "[0-9]+"}'.""",
}
"""Replaces `_SYNTAX` for flags with an example."""

_METAVARS = {"ids": "ID,ID,…", "json": "JSON", "bytes": "SIZE", "strings": "TEXT", bool: None}


def _kind(name: str, hint: Any) -> Any:
    """A plain type, or the name of a kind that needs conversion."""
    if name.endswith("_bytes"):
        return "bytes"
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    origin = typing.get_origin(hint)
    if origin is Mapping:
        return "json"
    if origin is Seq:
        return "strings" if typing.get_args(hint) == (str,) else "ids"
    return hint


def _convert(name: str, kind: Any, value: Any) -> Any:
    flag = flag_name(name)
    if kind == "bytes":
        return parse_bytes(value)
    if kind == "ids":
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            raise RequestError(f"{flag} takes token ids separated by commas, got {value!r}") from None
    if kind == "json":
        return parse_json(value, flag)
    return value


_SWITCHES = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _read(name: str, kind: Any, value: Any, source: str) -> Any:
    """A value from a file or the environment: texts are parsed as on the command line, lists are comma-separated."""
    if isinstance(value, Mapping) and kind is str:
        return json.dumps(value)  # the command line takes JSON for it
    if not isinstance(value, str):
        return value
    if kind == "strings":
        return [part.strip() for part in value.split(",") if part.strip()]
    if kind is bool:
        if value.lower() not in _SWITCHES:
            raise ConfigError(f"{name} in {source} must be true or false, got {value!r}")
        return _SWITCHES[value.lower()]
    if kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            raise ConfigError(f"{name} in {source} must be a number, got {value!r}") from None
    return _convert(name, kind, value)


def parse_json(text: str, what: str) -> Any:
    """The decoded JSON; raises `RequestError` that names `what`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"{what} is not valid JSON: {error}") from None


def _is_string(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
