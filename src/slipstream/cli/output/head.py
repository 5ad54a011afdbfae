"""Describes a draft head, which is no model of its own, for `slipstream info`."""

from __future__ import annotations

from typing import Any

from slipstream.cli.output.console import print_rows, results
from slipstream.cli.output.results import print_json
from slipstream.draft.methods import EAGLE, METHODS, short_name

CORRECTIONS = {
    "vanilla": "a Markov head",
    "gated": "a gated Markov head",
    "rnn": "a Markov head with a state",
    "selector": "a selector among the best tokens",
    "gru": "a GRU",
    "refiner": "a refiner",
}


def print_head(path: str, method: str, draft_for: str | None, json: bool) -> None:
    """Print what the head of `method` in `path` is, and whether it fits the target `draft_for`.

    Raises `ModelError` where either cannot be read.
    """
    from slipstream.draft.heads.description import HeadOnDisk
    from slipstream.tools.export.checkpoints.target_files import TargetFiles

    head = HeadOnDisk(path, method)
    details = head.details()
    if draft_for is not None:
        details["drafts_for"] = {draft_for: head.drafts_for(TargetFiles(draft_for))}
    details["try"] = (
        f"slipstream generate … --model {draft_for or 'TARGET'} --spec {short_name(method)}:{path}"
    )
    if json:
        print_json(details)
    else:
        print_rows(results(), _lines(details))


def _lines(details: dict[str, Any]) -> list[tuple[str, str]]:
    layers, heads = details.get("num_layers"), details.get("num_heads")
    parts = f"{heads} heads" if heads else f"{layers} layer{'' if layers == 1 else 's'}"
    width = f" of width {details['hidden_size']:,}" if "hidden_size" in details else ""
    lines = [
        ("head", details["head"]),
        ("method", f"{details['method']}: {METHODS[details['method']].help}"),
        ("parameters", f"{details['num_parameters']:,} in {parts}{width}"),
    ]
    if "block_size" in details:
        lines += _block(details)
    elif details.get("mask_token_id") is not None:
        lines.append(("mask token", f"{details['mask_token_id']}: all tokens in one pass"))
    if "draft_vocab_size" in details:
        lines += [("drafts", _vocabulary(details)), ("reads", _reads(details))]
        own = {"embedding": details["own_embedding"], "output layer": details["own_output_layer"]}
        lines.append(("of its own", " and ".join(name for name, has in own.items() if has) or "no tables"))
    wide, tokens = details["target_hidden_size"], details["vocab_size"]
    sizes = [f"hidden size {wide:,}"] if wide else []
    lines.append(("for a target of", ", ".join([*sizes, *([f"{tokens:,} tokens"] if tokens else [])]) or "?"))
    if length := details.get("context_length"):
        lines.append(("context", f"{length:,} tokens"))
    lines += [(f"drafts for {target}", answer) for target, answer in details.get("drafts_for", {}).items()]
    return [*lines, ("try", details["try"])]


def _block(details: dict[str, Any]) -> list[tuple[str, str]]:
    predicts = (
        "each predicts the token behind it" if details["sample_from_anchor"] else "the anchor's predicts none"
    )
    correction = details["left_to_right"]
    after = "nothing: its probabilities are marginals"
    if correction is not None:
        after = f"{CORRECTIONS[correction['kind']]} of rank {correction['rank']}"
    tokens = " and the token before" if details["confidence"] == "hidden+token" else ""
    confidence = f"reads the hidden state{tokens}" if details["confidence"] else "none"
    return [
        (
            "block",
            f"{details['block_size']} rows, of which {predicts}: {details['num_drafts']} draft tokens a pass",
        ),
        ("rows see", _rows_see(details)),
        ("mask token", str(details["mask_token_id"])),
        ("left to right", after),
        ("confidence head", confidence),
        ("layout", details["layout"]),
    ]


def _rows_see(details: dict[str, Any]) -> str:
    """'their whole block; in layers 2, 3 64 tokens before it'"""
    causal, windows = details["causal"], details["windows"]
    kinds = {True: "the rows before them", False: "their whole block"}
    said = kinds[causal[0]]
    if len(set(causal)) > 1:
        earlier = ", ".join(str(layer) for layer, each in enumerate(causal, 1) if each)
        said = f"{kinds[False]}, in layers {earlier} {kinds[True]}"
    for window in sorted({each for each in windows if each}):
        layers = ", ".join(str(layer) for layer, each in enumerate(windows, 1) if each == window)
        said += f"; in layers {layers} only {window:,} tokens before it"
    return said


def _vocabulary(details: dict[str, Any]) -> str:
    drafted, tokens = details["draft_vocab_size"], details["vocab_size"]
    if not drafted or drafted == tokens:
        return "all of the target's tokens"
    return (
        f"{drafted:,} of the target's {tokens:,} tokens" if tokens else f"{drafted:,} of the target's tokens"
    )


def _reads(details: dict[str, Any]) -> str:
    layers = details["feature_layers"]
    if layers is not None:
        return f"the target's hidden states {', '.join(map(str, layers))}, of which 0 is the embedding"
    last = details["method"] == EAGLE.name
    return "the target's last hidden state" if last else "hidden states that follow from the target's depth"
