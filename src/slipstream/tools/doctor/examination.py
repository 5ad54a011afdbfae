"""Examines a draft: files, vocabulary, conventions, acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig, reject_unknown
from slipstream.draft.heads.mtp import MtpDrafter
from slipstream.draft.methods import DRAFT_MODEL, EAGLE3, HEADS, MTP, PARD, PEAGLE, kind_of_checkpoint
from slipstream.engine.engine import Engine
from slipstream.engine.factory import create_engine
from slipstream.errors import ModelError, SlipstreamError, VocabularyMismatchError
from slipstream.models import load_config, load_draft_tokenizer
from slipstream.text.vocabulary import check_same_vocabulary
from slipstream.tools.doctor.canary import (
    BETTER,
    POOR,
    Canary,
    mtp_variations,
    run_canary,
    variations,
    with_config,
)


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
READ_LAYERS = (EAGLE3.name, PEAGLE.name)
"""Kinds whose configuration says which layers of the target they read, and where they norm them."""


def examine(
    target: str,
    draft: str,
    kind: str | None = None,
    engine: Mapping[str, Any] | None = None,
    on_part: Callable[[str], object] = lambda part: None,
) -> Iterator[Finding]:
    """Yield the finding of each check; checks that depend on a failed one are skipped.

    `draft` may be `mtp`: the layer in the target's own checkpoint. `kind` is one of `KINDS`; None infers it. `engine`
    are fields of `EngineConfig`. `on_part` is called with what is done next, where that takes long. Raises `ModelError`
    when the *target* cannot be loaded.
    """
    if kind is not None:
        reject_unknown([kind], KINDS, "kind of draft")
    try:  # before the target is loaded, which may take long
        kind = kind or kind_of(draft)
    except ModelError as error:
        yield fault("files", str(error))
        return
    loaded = create_engine(EngineConfig(model=target, **(engine or {})))
    is_own = draft == MTP.name
    yield ok("kind", f"{'the target' if is_own else repr(draft)} has a draft of kind {kind}")
    if kind not in HEADS:
        trouble = yield from _vocabulary(loaded, draft)
        if trouble:
            return
    speculative = SpeculativeConfig(kind, options={} if is_own else {"model": draft})
    try:
        drafter = create_engine(loaded.config, speculative, like=loaded).drafter
    except SlipstreamError as error:
        yield fault("checkpoint", str(error))
        return
    found = f"{drafter.found}: " if isinstance(drafter, MtpDrafter) else ""
    yield ok("checkpoint", f"{found}keys, shapes, vocabulary maps and sizes match the target")
    yield _context(loaded, drafter.traits.context_length)
    if kind in HEADS:
        yield from _conventions(loaded, draft, kind)
    on_part("drafting for a few prompts")
    canary = run_canary(loaded, speculative)
    yield _canary(canary)
    if isinstance(drafter, MtpDrafter):
        yield from _fed_otherwise(loaded, speculative, drafter, canary, on_part)
    if kind in READ_LAYERS and Path(draft).is_dir():
        yield from _variations(loaded, draft, kind, canary, on_part)


def kind_of(draft: str) -> str:
    """The kind of a checkpoint, by its configuration; raises `ModelError` where that cannot be read."""
    folder = Path(draft)
    if draft == MTP.name:
        return MTP.name
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
    target: Engine, draft: str, kind: str, canary: Canary, on_part: Callable[[str], object]
) -> Iterator[Finding]:
    """Compare the acceptance with variations of the configuration."""
    better: list[tuple[float, str]] = []
    tried: list[str] = []
    for sentence, config in variations(Path(draft), target.model.num_layers):
        on_part(f"drafting the same with {sentence}")
        with with_config(Path(draft), config) as folder:
            other = run_canary(target, SpeculativeConfig(kind, options={"model": folder}))
        tried.append(sentence)
        if other.first > max(BETTER * canary.first, canary.first + 0.05):
            better.append((other.first, sentence))
    if better:
        first, sentence = max(better)
        yield fault(
            "conventions",
            f"with {sentence} {first:.2f} of the first draft tokens are accepted instead of {canary.first:.2f}: the "
            "configuration is not the one that the head was trained with; correct it",
        )
    else:
        yield ok("conventions", f"tested {'; '.join(tried)}: none is better")


def _fed_otherwise(
    target: Engine,
    speculative: SpeculativeConfig,
    drafter: MtpDrafter,
    canary: Canary,
    on_part: Callable[[str], object],
) -> Iterator[Finding]:
    """Compare the acceptance with other ways to feed a layer for multi-token prediction."""
    better: list[tuple[float, str]] = []
    tried: list[str] = []
    for option, now, value in mtp_variations(drafter):
        sentence = f"{option} {value!r} instead of {now!r}"
        on_part(f"drafting the same with {sentence}")
        changed = SpeculativeConfig(speculative.method, options={**speculative.options, option: value})
        try:
            other = run_canary(target, changed)
        except SlipstreamError as error:  # nothing takes the target's norm out of its states
            tried.append(f"not {sentence} ({error})")
            continue
        tried.append(sentence)
        gain = other.length - canary.length
        if gain > max((BETTER - 1) * (canary.length - 1), 0.05):
            better.append((gain, f"{sentence} τ is {other.length:.2f} instead of {canary.length:.2f}"))
    if better:
        yield fault(
            "conventions",
            f"with {max(better)[1]}: the layer was trained for that; set it in speculative_config",
        )
    else:
        yield ok("conventions", f"tested {'; '.join(tried)}: none is better")
