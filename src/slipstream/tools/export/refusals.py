"""What to run where an engine lacks a drafter or a shape: the nearest setting that it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from slipstream.draft.methods import METHODS, NGRAM, OFF, SUFFIX
from slipstream.errors import ConfigError
from slipstream.tools.export.record import NgramLookup, SpeculativeRecord, TreeShape

_LOOKUP = NgramLookup(2, 4)


class ExportError(ConfigError):
    """An engine cannot run a speculative setting; `nearest` is one that it can run, if there is any."""

    def __init__(self, why: str, nearest: SpeculativeRecord | None = None, instead: str = "") -> None:
        self.nearest = nearest
        self.instead = instead
        """What `nearest` is, in a few words."""
        super().__init__(f"{why}; the nearest that it can run is {instead}" if instead else why)


def refuse_method(record: SpeculativeRecord, engine: str, has: Iterable[str], why: str = "") -> ExportError:
    """The error for a record whose method `engine` lacks; `has` are the methods that it runs."""
    has = frozenset(has)
    reason = why or f"{engine} has no {record.method} drafter"
    # A head or a draft of another vocabulary cannot be made into a draft model, so what is left without training is
    # looking up n-grams.
    for method in METHODS[record.method].nearest:
        keeps_model = METHODS[method].needs_model
        if method not in has or (keeps_model and not record.model):
            continue
        nearest = replace(
            SpeculativeRecord(method=OFF.name, target=record.target),
            method=method,
            depth=record.depth,
            model=record.model if keeps_model else None,
            revision=record.revision if keeps_model else None,
            ngram=(record.ngram or _LOOKUP) if method == NGRAM.name else None,
            suffix=record.suffix if method == SUFFIX.name else None,
            schedule=record.schedule,
        )
        return ExportError(reason, nearest, described(nearest))
    return ExportError(f"{reason}; nothing that it runs comes near, so run it without speculation")


def refuse_tree(record: SpeculativeRecord, engine: str, why: str = "") -> ExportError:
    """The error for a tree where `engine` runs chains; the nearest is a chain of the same depth."""
    nearest = replace(record, tree=None)
    return ExportError(why or f"{engine} checks chains, not trees", nearest, described(nearest))


def check_grown_tree(
    record: SpeculativeRecord, engine: str, most: Callable[[TreeShape, int], int], least: int, fixed: str = ""
) -> None:
    """Raise `ExportError` for a tree unless `engine`, which grows its trees itself, grows one of that size.

    `least` and `most` bound its draft tokens, the second one by shape and depth. `fixed` says why it takes no fixed
    tree.
    """
    tree = record.tree
    assert tree is not None
    grown = replace(tree, choices=None, top_k=max(2, tree.top_k))
    limit = most(grown, record.depth or 1)
    nearest = replace(record, tree=replace(grown, num_nodes=min(max(tree.num_nodes, least), limit)))
    if nearest.tree == tree:
        return
    why = f"{engine} needs from {least} to {limit} tokens in this tree, not {tree.num_nodes}"
    if tree.choices is not None:
        why = fixed or f"{engine} grows its trees itself and takes no fixed one"
    elif not least:
        why = f"{engine} finds at most {limit} draft tokens in this tree, not {tree.num_nodes}"
    raise ExportError(why, nearest, described(nearest))


def described(record: SpeculativeRecord) -> str:
    """A record in a few words: 'eagle3, a chain of 4 tokens'."""
    if record.method == OFF.name:
        return "no speculation"
    shape = "a chain" if record.tree is None else f"a tree of {record.tree.num_nodes} tokens"
    depth = (
        ""
        if record.depth is None
        else f" {record.depth} deep"
        if record.tree
        else f" of {record.depth} tokens"
    )
    return f"{record.method}, {shape}{depth}"
