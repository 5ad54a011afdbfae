"""The keys of an engine's form as a table: each says a field of the record, and is written and read by one code."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.config import reject_unknown
from slipstream.draft.methods import METHODS, NGRAM
from slipstream.tools.export.head_info import DSPARK
from slipstream.tools.export.reading import whole_number
from slipstream.tools.export.record import NgramLookup, SpeculativeRecord, SuffixLimits, TreeShape

NEUTRAL: Mapping[str, Any] = {"confidence_threshold": 0.0, "schedule": (), "verify": "any"}
"""What a field of the record is where a form says nothing of it; the others are None."""
SAMPLINGS = {"one_hot": "greedy", "sampled": "probabilistic"}
"""How vLLM and llama.cpp call what a record says of its draft tokens."""
_PARTS: Mapping[str, Callable[..., Any]] = {
    "ngram": NgramLookup,
    "suffix": SuffixLimits,
    "tree": TreeShape,
}


def _as_it_is(value: Any, *_: str) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """One key of an engine's form."""

    name: str
    field: str
    """The record's field that it says, or a part's, as in `ngram.max`."""
    read: Callable[[Any, str], Any] | None = _as_it_is
    """From the engine's value and the key's name, for messages; None where more than this key decides."""
    write: Callable[[Any], Any] = _as_it_is
    """The engine's value; None leaves the key out."""
    names: Mapping[Any, Any] | None = None
    """Our values to the engine's: those of ours that are missing are not written, those of its that are missing are
    refused."""
    methods: Collection[str] = tuple(METHODS)
    """Methods with which it is written and read."""
    also: tuple[str, ...] = ()
    """Other names under which it is read."""
    default: Any = None
    """The engine's value where the key is not given; None leaves the field as the record has it by itself."""

    def written(self, record: SpeculativeRecord) -> Any:
        """The engine's value for a record; None where the key is not needed."""
        value: Any = record
        for name in self.field.split("."):
            value = None if value is None else getattr(value, name)
        if self.names is not None:
            return self.names.get(value)
        return None if value is None or value == NEUTRAL.get(self.field) else self.write(value)

    def found(self, given: Mapping[str, Any], engine: str) -> Any:
        """Our value for what is given; None where nothing is. Raises `ConfigError` for a value that is none of its."""
        names = (name for name in (self.name, *self.also) if given.get(name) is not None)
        value = next((given[name] for name in names), self.default)
        if value is None or self.read is None:
            return None
        if self.names is None:
            return self.read(value, self.name)
        reject_unknown([value], self.names.values(), f"{self.name} of {engine}")
        return next(ours for ours, theirs in self.names.items() if theirs == value)


def up_to(name: str, default: int) -> Key:
    """The key of an engine that looks up n-grams of that length and all shorter ones."""

    def read(value: Any, what: str) -> NgramLookup:
        return NgramLookup(1, whole_number(value, what))

    return Key(name, "ngram", read, lambda lookup: lookup.max, methods=(NGRAM.name,), default=default)


def written(record: SpeculativeRecord, keys: Iterable[Key]) -> dict[str, Any]:
    """The engine's keys and values that say a record, in the order of the table."""
    values = {key.name: key.written(record) for key in keys if record.method in key.methods}
    return {name: value for name, value in values.items() if value is not None}


def named_by_head(given: SpeculativeRecord, key: str, engine: str) -> dict[str, Any]:
    """`key` with the engine's own name of the method for DSpark's heads; empty for all others.

    `given` is the record as it came, with its head.
    """
    if given.head is None or given.head.layout != DSPARK:
        return {}
    names = METHODS[given.method].elsewhere.get(engine, ())
    own = next((name for name in names if DSPARK in name.lower()), None)
    return {} if own is None else {key: own}


def fields_found(
    given: Mapping[str, Any], keys: Iterable[Key], method: str, engine: str = ""
) -> dict[str, Any]:
    """The record's fields that an engine's keys and values say, but for its method."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for key in keys:
        if key.field == "method" or method not in key.methods:
            continue
        value = key.found(given, engine)
        part, _, name = key.field.partition(".")
        if value is None:
            continue
        if name:
            parts.setdefault(part, {})[name] = value
        else:
            found[part] = value
    return found | {part: _PARTS[part](**values) for part, values in parts.items()}


def names_of(keys: Iterable[Key]) -> set[str]:
    """All names of the keys."""
    return {name for key in keys for name in (key.name, *key.also)}


def check_keys(given: Mapping[str, Any], known: Iterable[str], engine: str) -> None:
    """Raise `ConfigError` for a key that the engine does not have, with the nearest that it has."""
    reject_unknown(given, dict.fromkeys(known), f"{engine} key")


def left_out(
    given: Mapping[str, Any], used: Collection[str], why: str = "it has no counterpart here"
) -> list[str]:
    """A note for each key that is set and not among `used`."""
    unused = (key for key in sorted(given) if key not in used and given[key] not in (None, False))
    return [f"{key} is left out: {why}" for key in unused]
