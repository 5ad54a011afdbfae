"""What to run where an engine lacks a drafter or a shape: the nearest setting that it has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slipstream.tools.export.contract import ExportError
from slipstream.tools.export.record import NgramLookup, SpeculativeRecord

NEAREST = {
    "tli": ("ngram",),
    "slem": ("tli", "ngram"),
    "eagle": ("ngram",),
    "eagle3": ("ngram",),
    "medusa": ("ngram",),
    "hydra": ("ngram",),
    "suffix": ("ngram",),
    "token_recycling": ("suffix", "ngram"),
    "siblings": ("suffix", "ngram"),
    "lookahead": ("ngram",),
    "jacobi": ("ngram",),
    "self": ("ngram",),
    "layer_skip": ("ngram",),
    "cascade": ("draft_model", "ngram"),
    "ensemble": ("suffix", "ngram"),
    "auto": ("suffix", "ngram"),
    "versions": ("ngram",),
}
"""Method to what comes nearest to it, the first that an engine has counts. A head or a draft of another vocabulary
cannot be made into a draft model, so what is left without training is looking up n-grams."""

_LOOKUP = NgramLookup(2, 4)


def refuse_method(record: SpeculativeRecord, engine: str, has: Iterable[str], why: str = "") -> ExportError:
    """The error for a record whose method `engine` lacks; `has` are the methods that it runs."""
    has = frozenset(has)
    reason = why or f"{engine} has no {record.method} drafter"
    for method in NEAREST.get(record.method, ()):
        if method not in has or (method in ("draft_model", "tli") and not record.model):
            continue
        nearest = replace(
            SpeculativeRecord(method="off", target=record.target),
            method=method,
            depth=record.depth,
            model=record.model if method in ("draft_model", "tli") else None,
            revision=record.revision if method in ("draft_model", "tli") else None,
            ngram=(record.ngram or _LOOKUP) if method == "ngram" else None,
            suffix=record.suffix if method == "suffix" else None,
            schedule=record.schedule,
        )
        return ExportError(reason, nearest, described(nearest))
    return ExportError(f"{reason}; nothing that it runs comes near, so run it without speculation")


def refuse_tree(record: SpeculativeRecord, engine: str, why: str = "") -> ExportError:
    """The error for a tree where `engine` runs chains; the nearest is a chain of the same depth."""
    nearest = replace(record, tree=None)
    return ExportError(why or f"{engine} checks chains, not trees", nearest, described(nearest))


def described(record: SpeculativeRecord) -> str:
    """A record in a few words: 'eagle3, a chain of 4 tokens'."""
    if record.method == "off":
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
