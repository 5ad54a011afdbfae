"""Examines a draft: files, vocabulary, conventions, acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig, reject_unknown
from slipstream.draft.base import Drafter
from slipstream.draft.heads.gguf_heads import gguf_head_kind
from slipstream.draft.methods import (
    DRAFT_MODEL,
    HEADS,
    PARD,
    DraftWeights,
    kind_of_checkpoint,
    spec_of,
)
from slipstream.engine.engine import Engine
from slipstream.engine.factory import create_engine
from slipstream.errors import ModelError, SlipstreamError, VocabularyMismatchError
from slipstream.models import load_config, load_draft_tokenizer
from slipstream.text.vocabulary import check_same_vocabulary
from slipstream.tools.doctor.canary import POOR, Canary, run_canary
from slipstream.tools.doctor.variations import READ_LAYERS, variations


class CheckOutcome(StrEnum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    """Usable, but probably misconfigured."""
    FAULT = "fault"
    """Not usable as it is."""


@dataclass(frozen=True)
class Finding:
    """A check with its outcome and explanation."""

    check: str
    verdict: CheckOutcome
    text: str


def ok(check: str, text: str) -> Finding:
    """A passed check."""
    return Finding(check, CheckOutcome.OK, text)


def warning(check: str, text: str) -> Finding:
    """A check with a probable problem."""
    return Finding(check, CheckOutcome.WARNING, text)


def fault(check: str, text: str) -> Finding:
    """A failed check."""
    return Finding(check, CheckOutcome.FAULT, text)


KINDS = (DRAFT_MODEL.name, PARD.name, *HEADS)


def examine(
    target: str,
    draft: str,
    kind: str | None = None,
    engine: Mapping[str, Any] | None = None,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[Finding]:
    """Yield the finding of each check; checks that depend on a failed one are skipped.

    `draft` is a folder, a hub id, or the name of a method whose weights are in the target's own checkpoint. `kind` is
    one of `KINDS`; None infers it. `engine` are fields of `EngineConfig`. `on_part` is called with what
    is done next, where that takes long. Raises `ModelError` when the *target* cannot be loaded.
    """
    if kind is not None:
        reject_unknown([kind], KINDS, "kind of draft")
    spec = spec_of(draft)
    if spec is not None and spec.weights is DraftWeights.CHECKPOINT:
        kind, draft, found = spec.name, "", f"the target's own checkpoint, {spec.help}"
    else:
        try:  # before the target is loaded, which may take long
            kind = kind or kind_of(draft)
        except ModelError as error:
            yield fault("files", str(error))
            return
        found = f"{draft!r} is a draft of kind {kind}"
    loaded = create_engine(EngineConfig(model=target, **(engine or {})))
    yield ok("kind", found)
    if kind not in HEADS:
        trouble = yield from _vocabulary(loaded, draft)
        if trouble:
            return
    speculative = SpeculativeConfig(kind, options={"model": draft} if draft else {})
    try:
        drafter = create_engine(loaded.config, speculative, like=loaded).drafter
    except SlipstreamError as error:
        yield fault("checkpoint", str(error))
        return
    yield ok("checkpoint", "keys, shapes, vocabulary maps and sizes match the target")
    yield _context(loaded, drafter.traits.context_length)
    if kind in HEADS and draft:
        yield from _conventions(loaded, draft, kind)
    on_part("drafting for a few prompts")
    canary = run_canary(loaded, speculative)
    yield _canary(canary)
    yield from _variations(loaded, drafter, (kind, draft), canary, on_part)


def kind_of(draft: str) -> str:
    """The kind of a checkpoint, by its configuration; raises `ModelError` where that cannot be read."""
    folder = Path(draft)
    if (head := gguf_head_kind(draft)) is not None:
        return head
    if not folder.is_dir():
        return kind_of_checkpoint(load_config(draft).to_dict())
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{draft!r} has no config.json; a draft is a folder with config.json and weights"
        ) from None
    except ValueError as error:
        raise ModelError(f"cannot read the configuration of {draft!r}: {error}") from None
    return kind_of_checkpoint(config)


def _vocabulary(target: Engine, draft: str) -> Generator[Finding, None, bool]:
    """Yields a finding; returns True for a fault."""
    try:
        check_same_vocabulary(target.tokenizer, load_draft_tokenizer(draft, target.tokenizer), draft)
    except VocabularyMismatchError as error:
        yield fault("tokenizer", str(error))
        return True
    except SlipstreamError as error:
        yield fault("tokenizer", str(error))
        return True
    yield ok("tokenizer", "both vocabularies are the same")
    return False


def _context(target: Engine, length: int | None) -> Finding:
    if length is None or length >= target.max_model_len:
        return ok("context", "the draft's context is as long as the target's")
    return warning(
        "context",
        f"the draft's context is {length:,} tokens, the target's {target.max_model_len:,}: longer texts get no drafts",
    )


def _conventions(target: Engine, draft: str, kind: str) -> Iterator[Finding]:
    """Warnings about settings that are missing in a configuration and that engines interpret differently."""
    if not Path(draft).is_dir():
        return
    config = json.loads((Path(draft) / "config.json").read_text(encoding="utf-8"))
    layer = config.get("transformer_layer_config") or config
    theta = (layer.get("rope_parameters") or {}).get("rope_theta") or layer.get("rope_theta")
    own = (getattr(target.model.config, "rope_parameters", None) or {}).get("rope_theta")
    if theta is not None and own is not None and theta != own:
        yield warning(
            "rope",
            f"the draft's rope_theta is {theta:g}, the target's {own:g}; set the value that it was trained with",
        )
    if kind not in READ_LAYERS:
        return
    if "norm_before_residual" not in config:
        yield warning(
            "norm flags",
            "norm_before_residual is missing: its default is true in vLLM, false elsewhere; set it explicitly",
        )
    nested = config.get("eagle_config") or {}
    if not (nested.get("eagle_aux_hidden_state_layer_ids") or config.get("eagle_aux_hidden_state_layer_ids")):
        yield warning(
            "layers",
            "eagle_aux_hidden_state_layer_ids is missing, and engines' defaults differ; set it explicitly",
        )


def _canary(canary: Canary) -> Finding:
    text = f"on bundled prompts, greedy: {canary.first:.2f} of the first draft tokens accepted, τ {canary.length:.2f}"
    if canary.num_failures:
        return fault("canary", f"{text}; the drafter failed {canary.num_failures} times (--debug shows how)")
    if canary.first < POOR:
        return fault(
            "canary",
            f"{text}; such a draft costs more than it gains: train it longer, or use one for this target",
        )
    return ok("canary", text)


def _variations(
    target: Engine,
    drafter: Drafter,
    draft: tuple[str, str],
    canary: Canary,
    on_part: Callable[[str], object],
) -> Iterator[Finding]:
    """Compare the acceptance with other readings of `draft`, (kind, path)."""
    tried: list[tuple[Canary, str]] = []
    for other in variations(*draft, drafter, target.model):
        on_part(f"drafting the same with {other.sentence}")
        try:
            with other.speculative() as speculative:
                tried.append((run_canary(target, speculative), other.sentence))
        except SlipstreamError:
            continue  # the checkpoint cannot be read so
    if not tried:
        return
    best, sentence = max(tried, key=lambda each: each[0].length)
    if best.is_better(canary):
        yield fault(
            "conventions",
            f"with {sentence} τ is {best.length:.2f} instead of {canary.length:.2f}: the draft is not read as it was "
            "trained; correct its configuration, or the options",
        )
    else:
        costs = "; ".join(f"τ {each.length:.2f} with {what}" for each, what in tried)
        yield ok(
            "conventions",
            f"τ is {canary.length:.2f} as it is read, and not clearly better otherwise: {costs}",
        )
