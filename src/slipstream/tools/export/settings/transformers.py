"""Hugging Face Transformers: keywords of `generate`, and the draft's own `generation_config.json`. Read in 5.23.

Trap: `num_assistant_tokens`, its schedule and its threshold are read from the *draft's* generation configuration; as
keywords of the target's `generate` they have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from slipstream.draft.methods import (
    DRAFT_MODEL,
    DRAFT_MODELS,
    LAYER_SKIP,
    MTP,
    NGRAM,
    OFF,
    SLEM,
    TLI,
    TRANSFORMERS,
    names_in,
)
from slipstream.errors import ConfigError
from slipstream.tools.export.contract import (
    ExportedFile,
    Form,
    Lack,
    Losses,
    SettingsFormat,
    changes_the_text,
)
from slipstream.tools.export.keys import Key, check_keys, fields_found, up_to, written
from slipstream.tools.export.reading import UNKNOWN, PythonCall, SettingSource, real_number, whole_number
from slipstream.tools.export.record import NgramLookup, SpeculativeRecord
from slipstream.tools.export.refusals import refuse_method, refuse_tree

FILE = "transformers_generate.json"
PROGRAM = "run_transformers.py"
METHODS = names_in(TRANSFORMERS)
DRAFT_KEYS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Keys of the draft's generation configuration."""
REFUSED = {
    "speculation_type": "convert or train an EAGLE-3 head",
}
LOSSY = "assistant_ensemble_weight"
"""Mixes the draft's distribution into the target's."""
DEFAULT_DEPTH = 20
DEFAULT_THRESHOLD = 0.4
"""Below which probability of a draft token it ends a draft, unless set otherwise."""
DEFAULT_NGRAM = 2
_DRAFTS = (*DRAFT_MODELS, LAYER_SKIP.name)
TABLE = (
    Key("prompt_lookup_num_tokens", "depth", whole_number, methods=(NGRAM.name,)),
    up_to("max_matching_ngram_size", DEFAULT_NGRAM),
    Key("assistant_early_exit", "exit_layer", whole_number, methods=(LAYER_SKIP.name,)),
    Key("assistant_model", "model", methods=DRAFT_MODELS),
    Key("use_mtp", "method", names={MTP.name: True}),
    # Which of the two runs depends on whether text is sampled.
    Key("assistant_tokenizer", "model", None, methods=(TLI.name, SLEM.name)),
    Key("do_sample", "method", names={TLI.name: True, SLEM.name: False}),
    Key("num_assistant_tokens", "depth", whole_number, methods=_DRAFTS, default=DEFAULT_DEPTH),
    Key("num_assistant_tokens_schedule", "method", names=dict.fromkeys(_DRAFTS, "constant")),
    Key(
        "assistant_confidence_threshold",
        "confidence_threshold",
        real_number,
        methods=_DRAFTS,
        default=DEFAULT_THRESHOLD,
    ),
)
KEYS = (
    *("model", "assistant_lookbehind", "target_lookbehind", "speculation_type"),
    *("assistant_ensemble_weight", "is_assistant", *(key.name for key in TABLE)),
)


class TransformersSettings(SettingsFormat):
    """Keywords of `generate`, as JSON and as a program."""

    name = "transformers"
    versions = ("5",)
    default_depths: ClassVar[Mapping[str, int]] = {**dict.fromkeys(METHODS, DEFAULT_DEPTH), MTP.name: 1}

    title = "Transformers"
    lacks = (
        Lack("quantization", "{engine} quantises a draft when it is loaded; see from_pretrained"),
        "suffix",
        Lack("schedule", "{engine} runs one request at a time"),
        Lack("verify", "{engine} has one rule; the same distribution"),
        Lack("revision", "from_pretrained takes it; it is not part of generate"),
        Lack("draft_sampling", "drafts are sampled where do_sample is set, else greedy"),
        "model",
        Lack("confidence_threshold", "an n-gram has no probability", _DRAFTS),
        Lack("exit_layer", "only layer_skip has it", (LAYER_SKIP.name,)),
        Lack("tree", "this drafter proposes chains", _DRAFTS),
        *("ngram", "depth"),
    )

    def check(self, record: SpeculativeRecord) -> None:
        """It drafts a chain for one request at a time."""
        if record.method == LAYER_SKIP.name and record.exit_layer is None:
            why = "Transformers drafts with the first layers only; set exit_layer"
            raise refuse_method(record, self.title, METHODS, why)
        if record.tree is not None and record.method not in (OFF.name, NGRAM.name):
            raise refuse_tree(record, self.title)

    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        if record.method == NGRAM.name:
            longest = DEFAULT_NGRAM if record.ngram is None else record.ngram.max
            losses.change("ngram", NgramLookup(1, longest), "Transformers looks up any shorter n-gram too")
        if record.method == MTP.name:
            losses.change(
                "depth", 1, "Transformers drafts one token with each layer, and checkpoints have one"
            )

    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        values = _values(record)
        text = json.dumps(values, indent=2) + "\n"
        return (), (ExportedFile(FILE, text), ExportedFile(PROGRAM, _program(values)))

    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        if given.method == OFF.name:
            return []
        notes = ["Transformers speculates for one request at a time, and not with a static cache"]
        if given.method in DRAFT_MODELS:
            notes.append(
                "the number of draft tokens counts in the draft's own generation_config only; as a keyword of generate "
                "it has no effect"
            )
        if given.confidence_threshold and given.method != NGRAM.name:
            notes.append(
                "its threshold compares each token's probability and adapts itself, confidence_threshold the product "
                "of them: the same number drafts longer there"
            )
        if given.method in (TLI.name, SLEM.name):
            notes.append(
                "with another tokenizer it runs tli where do_sample is set, and slem where it is not"
            )
        return notes

    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """Reads the JSON, a `generation_config.json`, or a program that calls `generate`."""
        if source.words is not None:
            raise ConfigError(
                "Transformers is set in Python; give the program, its JSON or a generation_config.json"
            )
        return _from_calls(source) if source.calls is not None else _from_mapping(source.mapping or {}), None

    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        check_keys(given, KEYS, "Transformers")
        if given.get(LOSSY) not in (None, False):
            raise changes_the_text(f"{LOSSY} of Transformers")
        for key, instead in REFUSED.items():
            if given.get(key) not in (None, False):
                raise ConfigError(f"{key} of Transformers cannot be imported: {instead}")
        notes = [
            f"{key} is left out: it has no counterpart here"
            for key in ("assistant_lookbehind", "target_lookbehind")
            if given.get(key) is not None
        ]
        if given.get("assistant_model") or given.get("assistant_early_exit"):
            notes += _threshold_notes(given)
        if given.get("num_assistant_tokens_schedule") in ("heuristic", "heuristic_transient"):
            notes.append(
                'the depth that follows what was accepted is left out; here {"method": "auto"} chooses it'
            )
        return _record(given), notes


def _threshold_notes(given: Mapping[str, Any]) -> list[str]:
    threshold = given.get("assistant_confidence_threshold", DEFAULT_THRESHOLD)
    if threshold == 0:
        return []
    default = "" if "assistant_confidence_threshold" in given else ", its default"
    return [
        f"assistant_confidence_threshold {threshold}{default}, adapts itself and compares each token's probability; "
        "confidence_threshold stays and compares the product of them: the same number drafts shorter here"
    ]


def _values(record: SpeculativeRecord) -> dict[str, Any]:
    values: dict[str, Any] = {"model": record.target or "MODEL"}
    values |= written(record, TABLE)
    if record.method in _DRAFTS:  # without it a threshold of 0.4 that adapts itself ends the drafts
        values["assistant_confidence_threshold"] = record.confidence_threshold
    return values


def _program(values: Mapping[str, Any]) -> str:
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({values['model']!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({values['model']!r})",
    ]
    keywords = ["max_new_tokens=256"]
    if "assistant_model" in values:
        lines.append(f"assistant = AutoModelForCausalLM.from_pretrained({values['assistant_model']!r})")
        keywords.append("assistant_model=assistant")
    owner = "assistant" if "assistant_model" in values else "model"
    if "assistant_tokenizer" in values:
        lines.append(
            f"assistant_tokenizer = AutoTokenizer.from_pretrained({values['assistant_tokenizer']!r})"
        )
        keywords += ["tokenizer=tokenizer", "assistant_tokenizer=assistant_tokenizer"]
    lines += [f"{owner}.generation_config.{name} = {values[name]!r}" for name in DRAFT_KEYS if name in values]
    plain = (
        "do_sample",
        "use_mtp",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
    )
    keywords += [f"{name}={values[name]!r}" for name in plain if name in values]
    lines += [
        "",
        'inputs = tokenizer("The river is", return_tensors="pt")',
        f"tokens = model.generate(**inputs, {', '.join(keywords)})",
        "print(tokenizer.decode(tokens[0], skip_special_tokens=True))",
        "",
    ]
    return "\n".join(lines)


def _from_mapping(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A whole `generation_config.json` has many other keys; those are not about speculation."""
    marks = ("assistant", "prompt_lookup", "matching_ngram", "specul", MTP.name, "lookbehind")
    names = ("model", "do_sample")
    is_whole = "transformers_version" in mapping or "_from_model_config" in mapping
    return {
        key: value
        for key, value in mapping.items()
        if value is not None and (not is_whole or key in names or any(mark in key for mark in marks))
    }


def _from_calls(source: SettingSource) -> dict[str, Any]:
    given: dict[str, Any] = {}
    generated = False
    for call in source.calls or ():
        if call.name == "generate":
            generated = True
            given |= {name: _loaded(value) for name, value in call.kwargs.items() if name in KEYS}
        elif call.name == "=":
            given |= {
                name: value for name, value in call.kwargs.items() if name in (*DRAFT_KEYS, "do_sample")
            }
            model = call.kwargs.get("model")
            if isinstance(model, PythonCall):
                given["model"] = _loaded(model)
    if not generated:
        raise ConfigError(f"{source.where} does not call generate")
    return {name: value for name, value in given.items() if value is not None and value is not UNKNOWN}


def _loaded(value: Any) -> Any:
    """The folder or id of a `from_pretrained`; other values unchanged."""
    if not isinstance(value, PythonCall):
        return value
    return value.args[0] if value.name == "from_pretrained" and value.args else UNKNOWN


def _record(given: Mapping[str, Any]) -> SpeculativeRecord:
    method = _method(given)
    for name, read in (
        ("num_assistant_tokens", whole_number),
        ("assistant_confidence_threshold", real_number),
    ):
        if name in given:  # refused also where nothing reads it
            read(given[name], name)
    found = {} if method == OFF.name else fields_found(given, TABLE, method)
    if method == MTP.name:
        found["depth"] = 1  # one token with each layer, of which checkpoints have one
    return SpeculativeRecord(method=method, target=given.get("model"), **found)


def _method(given: Mapping[str, Any]) -> str:
    if given.get("prompt_lookup_num_tokens") is not None:
        return NGRAM.name
    if given.get("assistant_early_exit") is not None:
        return LAYER_SKIP.name
    if given.get("use_mtp"):
        return MTP.name
    if not given.get("assistant_model"):
        return OFF.name
    if not given.get("assistant_tokenizer"):
        return DRAFT_MODEL.name
    return TLI.name if given.get("do_sample") else SLEM.name
