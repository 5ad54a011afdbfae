"""llama.cpp: flags of `llama-server`. Read in its server's manual of November 2026 and in its parser of September 2026.

The target is sampled and compared with a greedy draft, or, from build 11368 on, a draft model is sampled and tested by
rejection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from slipstream.config import reject_unknown
from slipstream.draft.methods import (
    DRAFT_MODEL,
    EAGLE3,
    LLAMA_CPP,
    MAY_NAME_MODEL,
    MTP,
    NGRAM,
    OFF,
    WITH_MODEL,
    names_from,
    names_in,
)
from slipstream.errors import ConfigError
from slipstream.tools.export.contract import (
    Form,
    Lack,
    Losses,
    SettingsFormat,
    changes_the_text,
    no_counterpart,
)
from slipstream.tools.export.keys import (
    SAMPLINGS,
    Key,
    check_keys,
    fields_found,
    left_out,
    named_by_head,
    names_of,
    written,
)
from slipstream.tools.export.reading import SettingSource, command_flags, real_number, whole_number
from slipstream.tools.export.record import NgramLookup, SpeculativeRecord
from slipstream.tools.export.refusals import refuse_method, refuse_tree

TYPES = names_in(LLAMA_CPP)
KINDS = names_from(LLAMA_CPP)
"""Its kinds of drafters, to our methods."""
ELSEWHERE = {
    "ngram-cache": "use --spec suffix, which keeps past answers too",
}
SYNONYMS = {
    "-m": "--model",
    "-hf": "--hf-repo",
    "-hfr": "--hf-repo",
    "-md": "--spec-draft-model",
    "--model-draft": "--spec-draft-model",
    "-hfd": "--spec-draft-hf",
    "-hfrd": "--spec-draft-hf",
    "--hf-repo-draft": "--spec-draft-hf",
    "--draft-p-min": "--spec-draft-p-min",
    "--draft-p-split": "--spec-draft-p-split",
    "--draft": "--draft-max",
    "--draft-n": "--draft-max",
    "--draft-n-min": "--draft-min",
}
REMOVED = {"--draft-max": "--spec-draft-n-max", "--draft-min": "--spec-draft-n-min"}
"""Flags of older versions, and what they are called today."""
SYNTHETIC = ("--spec-synth-len", "--spec-synth-rates")
WITHOUT_SAMPLED_DRAFTS = "2026-09"
"""Builds before 11368, which do not know `--spec-draft-sampling`."""
_DRAFT = (
    *(
        "model",
        "hf",
        "n-max",
        "n-min",
        "p-min",
        "p-split",
        "sampling",
        "conf-min",
        "threads",
        "threads-batch",
    ),
    *("device", "ngl", "type-k", "type-v", "backend-sampling", "cpu-moe", "override-tensor", "n-cpu-moe"),
    *("cpu-mask", "cpu-range", "cpu-strict", "prio", "poll", "ncmoe", "cpu-mask-batch", "cpu-range-batch"),
    *("cpu-strict-batch", "prio-batch", "poll-batch"),
)
_NGRAM = (
    *("mod-n-match", "mod-n-min", "mod-n-max"),
    *(
        f"{kind}-{size}"
        for kind in ("simple", "map-k", "map-k4v")
        for size in ("size-n", "size-m", "min-hits")
    ),
)
FLAGS = (
    *("--spec-type", "--spec-default", "--no-spec-draft-backend-sampling", *SYNTHETIC, *REMOVED),
    *(f"--spec-draft-{name}" for name in _DRAFT),
    *(f"--spec-ngram-{name}" for name in _NGRAM),
)
DEFAULT_DEPTH = 3
DEFAULT_SIZES = (12, 48)
"""Length of the n-gram that is looked up, and of what is drafted."""
DEFAULT_MOD = (24, 64)
"""The same of `ngram-mod`."""

SAMPLING = "--spec-draft-sampling"
TABLE = (
    Key("--spec-type", "method", names=TYPES),
    Key("--spec-ngram-simple-size-n", "ngram", None, lambda lookup: lookup.max),
    Key("--spec-ngram-simple-size-m", "depth", None, methods=(NGRAM.name,)),
    Key(
        "--spec-draft-n-max",
        "depth",
        whole_number,
        methods=MAY_NAME_MODEL,
        also=("--draft-max",),
        default=DEFAULT_DEPTH,
    ),
    Key("--spec-draft-p-min", "confidence_threshold", real_number, repr),
    # EAGLE-3 drafts greedily whatever is said.
    Key(SAMPLING, "draft_sampling", names=SAMPLINGS, methods=(DRAFT_MODEL.name,)),
)


class LlamaCppSettings(SettingsFormat):
    """The `--spec-*` flags."""

    name = "llama-cpp"
    versions = (WITHOUT_SAMPLED_DRAFTS, "2026-11")
    default_depths: ClassVar[Mapping[str, int]] = {
        DRAFT_MODEL.name: DEFAULT_DEPTH,
        EAGLE3.name: DEFAULT_DEPTH,
        MTP.name: DEFAULT_DEPTH,
        NGRAM.name: DEFAULT_SIZES[1],
    }

    title = "llama.cpp"
    lacks = (
        Lack("quantization", "a GGUF file has its own format"),
        *("exit_layer", "suffix", "schedule"),
        Lack("revision", "{engine} takes a file or the newest of the hub"),
        "model",
        Lack("confidence_threshold", "an n-gram has no probability", MAY_NAME_MODEL),
        Lack("tree", "nothing is drafted", MAY_NAME_MODEL),
        *("depth", "ngram"),
    )

    def check(self, record: SpeculativeRecord) -> None:
        """It runs a chain of a GGUF draft model, a GGUF EAGLE-3 head, or n-grams."""
        if record.tree is not None and record.method != OFF.name:
            raise refuse_tree(record, self.title)
        _check_head(record)

    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        _adapt_verification(record, losses, version != WITHOUT_SAMPLED_DRAFTS)
        if record.method == NGRAM.name:
            length = DEFAULT_SIZES[0] if record.ngram is None else record.ngram.min
            why = "its own default" if record.ngram is None else "llama.cpp looks up n-grams of one length"
            losses.change("ngram", NgramLookup(length, length), why)

    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        words = _words(record, given, version != WITHOUT_SAMPLED_DRAFTS)
        return ("llama-server", *_model_words(given.target), *words), ()

    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        notes = []
        by = "convert_hf_to_gguf.py" if given.method == MTP.name else "--checkpoint"
        for name, what in (("target", given.target), ("draft", given.model)):
            if what and Path(what).is_dir():
                notes.append(f"llama.cpp reads GGUF files: the {name} {what} must be converted ({by})")
        if given.confidence_threshold and given.method in (DRAFT_MODEL.name, EAGLE3.name, MTP.name):
            notes.append(
                "--spec-draft-p-min compares each token's probability, confidence_threshold the product of them: the "
                "same number drafts longer there"
            )
        if given.method == EAGLE3.name and given.head is not None and given.head.vocabulary is not None:
            notes.append(
                "a GGUF head holds the target's token ids in d2t, not offsets; the conversion changes them"
            )
        if given.method != OFF.name:
            notes.append(
                "llama-server reports the log-probability 0 for every token that a speculating pass yields"
            )
        return notes

    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """Reads a command of `llama-server` or `llama-cli`."""
        if source.words is None:
            raise ConfigError(f"llama.cpp is set by a command; {source.where} is none")
        values = command_flags(source.words).values
        flags = {SYNONYMS.get(flag, flag): value for flag, value in values.items()}
        given = {flag: value for flag, value in flags.items() if flag.startswith(("--spec-", "--draft"))}
        return given, flags.get("--model", flags.get("--hf-repo"))

    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        check_keys(given, FLAGS, "llama.cpp")
        for flag in SYNTHETIC:
            if flag in given:
                raise changes_the_text(f"{flag} of llama.cpp")
        kind = _kind(given)
        if kind is None:
            return None, ()
        notes = _import_notes(given)
        record = (_lookup if KINDS[kind] == NGRAM.name else _draft)(kind, given, target)
        if record.method == DRAFT_MODEL.name and version == WITHOUT_SAMPLED_DRAFTS:
            record = replace(record, draft_sampling="one_hot")
        return record, notes


def _check_head(record: SpeculativeRecord) -> None:
    head = record.head
    if record.method != EAGLE3.name or head is None:
        return
    reasons = []
    if head.norms.fc_norm:
        reasons.append("normalises each hidden state (fc_norm)")
    if head.num_layers != 1:
        reasons.append(f"has {head.num_layers} layers")
    if head.aux_layers is not None and len(head.aux_layers.ids) != 3:
        reasons.append(f"reads {len(head.aux_layers.ids)} hidden states")
    if reasons:
        why = f"llama.cpp runs EAGLE-3 heads of one layer that read three hidden states; {record.model!r} "
        raise refuse_method(record, "llama.cpp", TYPES, why + " and ".join(reasons))


def _adapt_verification(record: SpeculativeRecord, losses: Losses, samples_drafts: bool) -> None:
    """Only a draft model may be sampled, and only by newer builds; then it is verified by rejection."""
    drawn = record.method == DRAFT_MODEL.name and record.draft_sampling in ("sampled", "coupled")
    if record.method == DRAFT_MODEL.name and not samples_drafts:
        losses.change("draft_sampling", "one_hot", "llama.cpp samples drafts from build 11368 on")
    elif drawn:
        losses.change(
            "draft_sampling", "sampled", "llama.cpp has no coupled noise: drafts are drawn on their own"
        )
        losses.change(
            "verify", "rejection", "llama.cpp tests sampled drafts by rejection; the same distribution"
        )
        return
    losses.change(
        "verify", "any", "llama.cpp compares drafts with the target's own draw; the same distribution"
    )
    if record.method != DRAFT_MODEL.name:
        losses.change("draft_sampling", None, "llama.cpp drafts the most probable tokens here")


def _words(record: SpeculativeRecord, given: SpeculativeRecord, samples_drafts: bool) -> list[str]:
    values = written(record, TABLE) | named_by_head(given, "--spec-type", LLAMA_CPP)
    if not samples_drafts:
        values.pop(SAMPLING, None)
    words = [word for flag, value in values.items() for word in (flag, str(value))]
    model = _model_words(record.model, draft=True) if record.method in WITH_MODEL else []
    return [*words[:2], *model, *words[2:]]


def _model_words(model: str | None, draft: bool = False) -> list[str]:
    """`-m FILE`, or `-hf ID` for a hub id."""
    model = model or "MODEL.gguf"
    is_id = model.count("/") == 1 and not model.endswith(".gguf") and not Path(model).exists()
    is_id = is_id and not model.startswith((".", "/", "~"))
    file, hub = ("--spec-draft-model", "--spec-draft-hf") if draft else ("--model", "--hf-repo")
    return [hub if is_id else file, model]


def _kind(given: Mapping[str, str]) -> str | None:
    if "--spec-default" in given:
        return "ngram-mod"
    text = given.get("--spec-type")
    has_draft = "--spec-draft-model" in given or "--spec-draft-hf" in given
    if text is None:  # a draft model without a type is an ordinary one
        return "draft-simple" if has_draft else None
    kinds = [kind.strip() for kind in text.split(",") if kind.strip() not in ("", "none")]
    if len(kinds) > 1:
        raise ConfigError(
            f"--spec-type {text} names {len(kinds)} drafters; import one, and list them with "
            '{"method": "ensemble", "mode": "first", "members": […]}'
        )
    if not kinds:
        return None
    kind = kinds[0]
    if kind.startswith("synth"):
        raise changes_the_text(f"--spec-type {kind} of llama.cpp")
    if kind in ELSEWHERE:
        raise no_counterpart(f"--spec-type {kind} of llama.cpp", ELSEWHERE[kind])
    reject_unknown([kind], KINDS, "--spec-type of llama.cpp")
    return kind


_USED = frozenset(
    {
        *(*names_of(TABLE), "--spec-default", "--spec-draft-model", "--spec-draft-hf"),
        *(f"--spec-ngram-{name}" for name in _NGRAM if not name.endswith(("min-hits", "n-min"))),
    }
)


def _import_notes(given: Mapping[str, str]) -> list[str]:
    notes = left_out(given, _USED)
    notes += [f"{flag} is called {now} in newer versions" for flag, now in REMOVED.items() if flag in given]
    if given.get("--spec-draft-p-min"):
        notes.append(
            "confidence_threshold compares the product of probabilities, --spec-draft-p-min each of them: the same "
            "number drafts shorter here"
        )
    return notes


def _draft(kind: str, given: Mapping[str, str], target: str | None) -> SpeculativeRecord:
    method = KINDS[kind]
    model = given.get("--spec-draft-model", given.get("--spec-draft-hf"))
    if not model and method != MTP.name:
        raise ConfigError(f"--spec-type {kind} needs a draft: --spec-draft-model FILE")
    chosen = given.get(SAMPLING)
    if chosen not in (None, *SAMPLINGS.values()):
        raise ConfigError(f"{SAMPLING} must be greedy or probabilistic, got {chosen!r}")
    found = fields_found(given, TABLE, method)
    drawn = found.get("draft_sampling") == "sampled"
    return SpeculativeRecord(
        method=method, target=target, model=model, verify="rejection" if drawn else "any", **found
    )


def _lookup(kind: str, given: Mapping[str, str], target: str | None) -> SpeculativeRecord:
    record = SpeculativeRecord(method=NGRAM.name, target=target)
    if kind == "ngram-mod":
        names = ("--spec-ngram-mod-n-match", "--spec-ngram-mod-n-max")
        defaults = DEFAULT_MOD
    else:
        names = (f"--spec-{kind}-size-n", f"--spec-{kind}-size-m")
        defaults = DEFAULT_SIZES
    size, depth = (
        whole_number(given.get(name, default), name) for name, default in zip(names, defaults, strict=True)
    )
    return replace(record, ngram=NgramLookup(size, size), depth=depth)
