"""Reads other engines' settings as users have them: a command, JSON, YAML or a Python program. Nothing is executed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slipstream.errors import ConfigError

PROGRAMS = frozenset({"vllm", "sglang", "trtllm-serve", "llama-server", "llama-cli", "python", "python3"})
"""A command without flags must name one of them."""


@dataclass(frozen=True)
class PythonCall:
    """A call in a program: the name behind its last dot, and the arguments that are literals."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class SettingSource:
    """A setting in one of its forms; exactly one of `words`, `mapping` and `calls` is set."""

    where: str
    """For messages: a file's name, or 'the command'."""
    words: tuple[str, ...] | None = None
    """Words of a command."""
    mapping: Mapping[str, Any] | None = None
    """Mapping of JSON or YAML."""
    calls: tuple[PythonCall, ...] | None = None
    """Calls of a Python program, in order; `name = value` and `thing.name = value` are calls '=' with one keyword."""
    folder: Path | None = None
    """Where files lie that a command names; None: the working directory."""

    def read_nearby(self, name: str) -> Mapping[str, Any]:
        """The JSON or YAML object of a file that the source names; raises `ConfigError`."""
        path = Path(name)
        if self.folder is not None:  # a script names it from where it is run, or from where it lies
            places = [self.folder / path, self.folder / path.name]
            path = next((each for each in places if each.is_file()), path)
        return _mapping(_text(path), str(path))


def read_source(text: str) -> SettingSource:
    """A file's path, a command, or JSON; raises `ConfigError` for anything else."""
    stripped = text.strip()
    if not stripped:
        raise ConfigError("there is no setting to import; give a file or a command")
    if _is_file(stripped):
        return _read_file(Path(stripped))
    if stripped.startswith("{"):
        return SettingSource("the JSON", mapping=_mapping(stripped, "the JSON"))
    words = split_command(stripped)
    if len(words) == 1 and not stripped.startswith("-"):
        raise ConfigError(f"there is no file {stripped!r}; give a file, a command in quotes, or JSON")
    if not any(map(_is_flag, words)) and not {Path(word).name for word in words} & PROGRAMS:
        raise ConfigError(
            f"{stripped!r} is neither a file nor an engine's command: it has no flags and begins with none of "
            f"{', '.join(sorted(PROGRAMS))}"
        )
    return SettingSource("the command", words=words)


def split_command(text: str) -> tuple[str, ...]:
    """The words of a shell command with `--flag=value` split, without comments, variables and a prompt sign."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    joined = " ".join(lines).strip().removeprefix("$ ")
    try:
        words = shlex.split(joined)
    except ValueError as error:
        raise ConfigError(f"the command cannot be split into words: {error}") from None
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
        words.pop(0)
    split: list[str] = []
    for word in words:
        flag, equals, value = word.partition("=")
        split += [flag, value] if equals and flag.startswith("--") else [word]
    return tuple(split)


@dataclass(frozen=True)
class CommandFlags:
    """The flags of a command, each with its value, and the other words."""

    values: Mapping[str, str]
    """Flag to value, the last one counts; '' for a switch."""
    others: tuple[str, ...]


def command_flags(words: Sequence[str]) -> CommandFlags:
    """Split words into flags and others; a flag's value is the next word, unless that is a flag itself."""
    values: dict[str, str] = {}
    others: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_flag(word):
            others.append(word)
            continue
        has_value = position < len(words) and not _is_flag(words[position])
        values[word] = words[position] if has_value else ""
        position += has_value
    return CommandFlags(values, tuple(others))


def whole_number(value: Any, what: str) -> int:
    """`value` as an int; raises `ConfigError` that names `what`."""
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{what} must be a whole number, got {value!r}") from None


def real_number(value: Any, what: str) -> float:
    """`value` as a float; raises `ConfigError` that names `what`."""
    try:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{what} must be a number, got {value!r}") from None


def _is_file(text: str) -> bool:
    try:
        return "\n" not in text and Path(text).is_file()
    except OSError:  # a command is often too long for a file's name
        return False


def _is_flag(word: str) -> bool:
    return re.fullmatch(r"--?[A-Za-z][\w.-]*", word) is not None


def _read_file(path: Path) -> SettingSource:
    text = _text(path)
    if path.suffix == ".py":
        return SettingSource(str(path), calls=tuple(_calls(text, str(path))), folder=path.parent)
    if path.suffix in (".json", ".yaml", ".yml") or text.lstrip().startswith("{"):
        return SettingSource(str(path), mapping=_mapping(text, str(path)), folder=path.parent)
    lines = [line for line in text.splitlines() if not line.startswith("#!")]
    return SettingSource(str(path), words=split_command("\n".join(lines)), folder=path.parent)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r} as text: {error}") from None


def _mapping(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where} is neither valid JSON nor YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must hold one object of keys and values")
    if odd := [key for key in value if not isinstance(key, str)]:
        raise ConfigError(f"{where} has the key {odd[0]!r}; keys are names")
    return value


def _calls(text: str, where: str) -> Iterator[PythonCall]:
    """Calls and assignments of a program; names that were set to literals are replaced by them."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not a Python program: {error}") from None
    known: dict[str, Any] = {}
    for statement in tree.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                yield _call(node, known)
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], _literal(statement.value, known)
            name = getattr(target, "id", getattr(target, "attr", None))
            if name is None:
                continue
            if isinstance(target, ast.Name):
                known[name] = value
            if value is not UNKNOWN:
                yield PythonCall("=", (), {name: value})


def _call(node: ast.Call, known: Mapping[str, Any]) -> PythonCall:
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    args = tuple(_literal(arg, known) for arg in node.args)
    kwargs = {word.arg: _literal(word.value, known) for word in node.keywords if word.arg}
    return PythonCall(name, args, kwargs)


UNKNOWN = object()
"""The value of an expression that is no literal."""


def _literal(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if isinstance(node, ast.Call):
        return _call(node, known)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return UNKNOWN
