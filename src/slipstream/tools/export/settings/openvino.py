"""OpenVINO GenAI: a program, since the pipeline is made in Python and the rest is set for each request.

Read in its documentation of speculative decoding of August 2026. `num_assistant_tokens` does not count the root.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from slipstream.draft.methods import DRAFT_MODEL, EAGLE3, NGRAM, OFF, OPENVINO, WITH_MODEL, names_in
from slipstream.errors import ConfigError
from slipstream.tools.export.contract import (
    ExportedFile,
    Form,
    Lack,
    Losses,
    SettingsFormat,
)
from slipstream.tools.export.keys import Key, check_keys, up_to, written
from slipstream.tools.export.reading import PythonCall, SettingSource, real_number, whole_number
from slipstream.tools.export.record import NgramLookup, SpeculativeRecord, TreeShape
from slipstream.tools.export.refusals import check_grown_tree, refuse_tree

PROGRAM = "run_openvino.py"
FILE = "openvino_genai.json"
METHODS = names_in(OPENVINO)
DRAFT_KEY = DRAFT_MODEL.elsewhere[OPENVINO][0]
"""Its keyword of any draft, also of a head."""
DEFAULT_DEPTH = 5
DEFAULT_NGRAM = 3
_DRAFTED = {DRAFT_MODEL.name: "CPU", EAGLE3.name: "CPU"}
TABLE = (
    Key("prompt_lookup", "method", names={NGRAM.name: True}),
    up_to("max_ngram_size", DEFAULT_NGRAM),
    Key(DRAFT_KEY, "model", methods=WITH_MODEL),
    Key("draft_device", "method", names=_DRAFTED),
    Key("method", "method", names={name: name for name in _DRAFTED}),
    Key("assistant_confidence_threshold", "confidence_threshold", None),
    Key("num_assistant_tokens", "depth", None),
    Key("branching_factor", "tree.top_k", None),
    Key("tree_depth", "tree", None),
)
KEYS = ("model", "device", *(key.name for key in TABLE))
OPTIONS = (
    *("num_assistant_tokens", "assistant_confidence_threshold", "max_ngram_size"),
    *("branching_factor", "tree_depth"),
)
"""What is set for each request."""


class OpenvinoSettings(SettingsFormat):
    """A program, and the same values as JSON."""

    name = "openvino"
    versions = ("2026",)
    default_depths: ClassVar[Mapping[str, int]] = dict.fromkeys(METHODS, DEFAULT_DEPTH)

    title = "OpenVINO GenAI"
    lacks = (
        Lack("quantization", "weights have the format in which they were exported"),
        *("exit_layer", "suffix", "schedule"),
        Lack("revision", "{engine} reads a folder"),
        Lack("verify", "{engine} has one rule; the same distribution"),
        Lack("draft_sampling", "{engine} has no choice of it"),
        "model",
        "tree",
        Lack("confidence_threshold", "only a draft model has it", (DRAFT_MODEL.name,)),
        *("ngram", "depth"),
    )

    def check(self, record: SpeculativeRecord) -> None:
        """A dynamic tree is for EAGLE-3: b²(d - 1) + b >= n >= d, by its documentation.

        `GenerationConfig.validate` of 2026.4 checks the second of them only.
        """
        if record.tree is None or record.method in (OFF.name, NGRAM.name):
            return
        if record.method != EAGLE3.name:
            raise refuse_tree(record, self.title, f"{self.title} grows trees for EAGLE-3 only")
        check_grown_tree(record, self.title, TreeShape.most_nodes, least=record.depth or 1)

    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        if record.method == NGRAM.name:
            longest = DEFAULT_NGRAM if record.ngram is None else record.ngram.max
            losses.change("ngram", NgramLookup(1, longest), "OpenVINO GenAI looks up any shorter n-gram too")
        if losses.record.confidence_threshold:
            why = "OpenVINO GenAI has a threshold or a number of tokens, never both"
            losses.change("depth", None, why)

    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        values = _values(record)
        text = json.dumps(values, indent=2) + "\n"
        return (), (ExportedFile(FILE, text), ExportedFile(PROGRAM, _program(values)))

    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        notes: list[str] = []
        if record.model is not None:
            trust = " --trust-remote-code" if record.method == EAGLE3.name else ""
            notes.append(
                "target and draft are folders that `optimum-cli export openvino --task text-generation-with-past"
                f"{trust}` writes; they share the cache's size"
            )
        if record.tree is not None:
            notes.append("OpenVINO GenAI runs trees at temperature 0 only")
        if record.confidence_threshold:
            notes.append(
                "its threshold compares each token's probability, confidence_threshold the product of them: the same "
                "number drafts longer there"
            )
        return notes

    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """Reads the JSON, or a program that makes an `LLMPipeline`."""
        if source.words is not None:
            raise ConfigError("OpenVINO GenAI is set in Python; give the program or its JSON")
        return dict(source.mapping) if source.mapping is not None else _from_calls(source), None

    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        check_keys(given, KEYS, "OpenVINO GenAI")
        record = _record(given)
        unsaid = source.calls is not None and record.method == DRAFT_MODEL.name
        note = "a program does not say whether its draft is an EAGLE-3 head; where it is, set the method to eagle3"
        return record, [note] if unsaid else []


def _values(record: SpeculativeRecord) -> dict[str, Any]:
    values: dict[str, Any] = {"model": record.target or "MODEL", "device": "CPU"}
    values |= written(record, TABLE)
    if record.tree is not None:
        values |= {"num_assistant_tokens": record.tree.num_nodes, "tree_depth": record.depth}
    return values


def _program(values: Mapping[str, Any]) -> str:
    lines = ["import openvino_genai", ""]
    extra = ""
    if DRAFT_KEY in values:
        kind = "an EAGLE-3 head" if values["method"] == EAGLE3.name else "a draft model"
        lines.append(f"# {kind}; {values['method']} in Slipstream")
        lines.append(f"draft = openvino_genai.draft_model({values[DRAFT_KEY]!r}, {values['draft_device']!r})")
        extra = ", draft_model=draft"
    elif values.get("prompt_lookup"):
        extra = ", prompt_lookup=True"
    lines.append(f"pipe = openvino_genai.LLMPipeline({values['model']!r}, {values['device']!r}{extra})")
    lines += ["", "config = openvino_genai.GenerationConfig()", "config.max_new_tokens = 256"]
    lines += [f"config.{name} = {values[name]!r}" for name in OPTIONS if name in values]
    lines += ["", 'print(pipe.generate("The river is", config))', ""]
    return "\n".join(lines)


def _from_calls(source: SettingSource) -> dict[str, Any]:
    given: dict[str, Any] = {}
    found = False
    for call in source.calls or ():
        if call.name == "LLMPipeline":
            found = True
            given |= _pipeline(call)
        elif call.name in ("=", "GenerationConfig", "generate"):
            given |= {name: value for name, value in call.kwargs.items() if name in OPTIONS}
    if not found:
        raise ConfigError(f"{source.where} makes no LLMPipeline of OpenVINO GenAI")
    return given


def _pipeline(call: PythonCall) -> dict[str, Any]:
    values: dict[str, Any] = {"model": call.args[0] if call.args else call.kwargs.get("models_path")}
    draft = call.kwargs.get(DRAFT_KEY)
    if isinstance(draft, PythonCall) and draft.args:
        values[DRAFT_KEY] = draft.args[0]
    elif isinstance(draft, str):
        values[DRAFT_KEY] = draft
    if call.kwargs.get("prompt_lookup") is True:
        values["prompt_lookup"] = True
    return {name: value for name, value in values.items() if isinstance(value, str | bool)}


def _record(given: Mapping[str, Any]) -> SpeculativeRecord:
    lookup, draft = bool(given.get("prompt_lookup")), given.get(DRAFT_KEY)
    if lookup and draft:
        raise ConfigError("OpenVINO GenAI takes draft_model or prompt_lookup, not both")
    record = SpeculativeRecord(method=OFF.name, target=given.get("model"))
    if not lookup and not draft:
        return record
    threshold = real_number(
        given.get("assistant_confidence_threshold", 0.0), "assistant_confidence_threshold"
    )
    number = given.get("num_assistant_tokens")
    if threshold and number:
        raise ConfigError(
            "OpenVINO GenAI takes assistant_confidence_threshold or num_assistant_tokens, not both"
        )
    total = whole_number(number or DEFAULT_DEPTH, "num_assistant_tokens")
    if lookup:
        longest = whole_number(given.get("max_ngram_size") or DEFAULT_NGRAM, "max_ngram_size")
        return replace(record, method=NGRAM.name, depth=total, ngram=NgramLookup(1, longest))
    depth = given.get("tree_depth")
    if not depth:
        return replace(
            record,
            method=given.get("method", DRAFT_MODEL.name),
            model=draft,
            depth=None if threshold else total,
            confidence_threshold=threshold,
        )
    top_k = whole_number(given.get("branching_factor", 1), "branching_factor")
    depth = whole_number(depth, "tree_depth")
    if total < depth:
        raise ConfigError(
            f"OpenVINO GenAI refuses a tree of {total} tokens with tree_depth {depth}: it takes one for each level"
        )
    tree = None if top_k == 1 else TreeShape(top_k=top_k, num_nodes=total)
    return replace(record, method=EAGLE3.name, model=draft, depth=depth, tree=tree)
