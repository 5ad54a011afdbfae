"""TensorRT-LLM, PyTorch backend: `speculative_config` of the YAML that `trtllm-serve MODEL --config` reads.

Read in the documentation and `llm_args.py` of 1.3. `max_draft_len` does not count the root. A key of
`draft_len_schedule` is the last batch size of its range, and above the largest key nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from slipstream.config import reject_unknown
from slipstream.draft.methods import (
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    LOOKAHEAD,
    MEDUSA,
    METHODS,
    MTP,
    NGRAM,
    OFF,
    TENSORRT_LLM,
    WITH_MODEL,
    names_from,
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
    no_counterpart,
)
from slipstream.tools.export.head_info import AuxLayers, HeadInfo
from slipstream.tools.export.keys import Key, check_keys, fields_found, left_out, names_of, up_to, written
from slipstream.tools.export.reading import PythonCall, SettingSource, command_flags, whole_number
from slipstream.tools.export.record import NgramLookup, ScheduleRange, SpeculativeRecord, TreeShape
from slipstream.tools.export.refusals import check_grown_tree, refuse_method, refuse_tree

FILE = "config.yaml"
TYPES = names_in(TENSORRT_LLM)
SYNONYMS = {name: TYPES[method] for name, method in names_from(TENSORRT_LLM).items()}
ELSEWHERE = {
    "PARD": "draft models draft token by token here; train a draft model",
    "AUTO": 'use {"method": "auto"}',
    "User_Provided": 'give method the class itself: "my_package.module:MyDrafter"',
    "SaveState": "slipstream train reads hidden states by itself",
    "Medusa": "its TensorRT engine is another backend; name the heads with --spec medusa:PATH",
    "Lookahead": "its TensorRT engine is another backend; use --spec lookahead",
}
RELAXED = "use_relaxed_acceptance_for_thinking"
LOSSY: dict[str, object] = {"greedy_sampling": True, "posterior_threshold": None}
"""Keys of EAGLE-3 and Medusa that accept what is merely typical, by the value with which they do not."""
"""Takes draft tokens that the target thought likely enough."""
_BASE = (
    *("decoding_type", "max_draft_len", "max_total_draft_tokens", "speculative_model"),
    *("speculative_model_dir", "max_concurrency", "draft_len_schedule", "load_format"),
    *("acceptance_window", "use_rejection_sampling", "acceptance_length_threshold"),
    *("acceptance_rate_window_size", "acceptance_rate_threshold", "allow_advanced_sampling"),
    *("advanced_sampling_mode", "enable_penalty"),
)
KEYS = {
    "DraftTarget": _BASE,
    "DFlash": _BASE,
    "NGram": (*_BASE, "max_matching_ngram_size", "is_keep_all", "is_use_oldest", "is_public_pool"),
    "SA": (*_BASE, "max_matching_ngram_size", "enable_global_pool"),
    "MTP": (
        *(*_BASE, "num_nextn_predict_layers", "num_nextn_predict_layers_from_model_config"),
        *("use_mtp_vanilla", "mtp_eagle_one_model", RELAXED, "relaxed_topk", "relaxed_delta"),
        *("begin_thinking_phase_token", "end_thinking_phase_token"),
    ),
    "Eagle3": (
        *(*_BASE, "use_dynamic_tree", "dynamic_tree_max_topK", "eagle_choices", "num_eagle_layers"),
        *("eagle3_one_model", "eagle3_layers_to_capture", "eagle3_model_arch", "greedy_sampling"),
        *("posterior_threshold", "max_non_leaves_per_layer", "pytorch_weights_path", "max_batch_size"),
        *("sa_config", "use_sa_spec", "sa_spec_threshold"),
    ),
}
"""Keys by `decoding_type`."""
NO_END = 65_536


def _captured_ids(head: HeadInfo) -> list[int] | None:
    return None if head.aux_layers is None else list(head.aux_layers.as_convention("after_layer").ids)


def _lengths(schedule: Sequence[ScheduleRange]) -> dict[int, int]:
    """Last batch size of a range to its depth. Older versions want a key 1; a last range of 0 needs no key."""
    lengths = {1: schedule[0].depth}
    for each in schedule:
        if each.high is not None or each.depth:
            lengths[NO_END if each.high is None else each.high] = each.depth
    return lengths


TABLE = (
    Key("decoding_type", "method", names=TYPES),
    Key("max_draft_len", "depth", whole_number, methods=tuple(METHODS.keys() - {MTP.name})),
    Key("num_nextn_predict_layers", "depth", whole_number, methods=(MTP.name,), also=("max_draft_len",)),
    Key("speculative_model", "model", methods=WITH_MODEL, also=("speculative_model_dir",)),
    up_to("max_matching_ngram_size", 2),
    Key("eagle3_layers_to_capture", "head", None, _captured_ids, methods=(EAGLE3.name,)),
    Key("use_dynamic_tree", "tree", None, lambda tree: True),
    Key("dynamic_tree_max_topK", "tree.top_k", None),
    Key("max_total_draft_tokens", "tree.num_nodes", None),
    Key("use_rejection_sampling", "verify", None, names={"rejection": True}),
    Key("draft_len_schedule", "schedule", None, _lengths, also=("max_concurrency",)),
)
_NO_OVERLAP = frozenset({DRAFT_MODEL.name, NGRAM.name})
"""Drafters that its documentation runs without the overlap scheduler."""


_REASONS = {
    EAGLE.name: "TensorRT-LLM's PyTorch backend cannot load EAGLE-1 and EAGLE-2 heads",
    MEDUSA.name: "only TensorRT-LLM's old TensorRT backend runs Medusa",
    LOOKAHEAD.name: "only TensorRT-LLM's old TensorRT backend runs lookahead",
}
"""Why it lacks a method."""


class TensorrtLlmSettings(SettingsFormat):
    """The YAML of the server."""

    name = "tensorrt-llm"
    versions = ("1.3",)

    title = "TensorRT-LLM"
    lacks = (
        "confidence_threshold",
        Lack("quantization", "{engine} takes a draft's format from its checkpoint"),
        "exit_layer",
        Lack("revision", "{engine} takes a folder or the newest of the hub"),
        Lack("suffix", "SA of {engine} has none of these limits"),
        "model",
        "tree",
        "ngram",
    )

    def why_not(self, method: str, version: str) -> str:
        return _REASONS.get(method, "")

    def check(self, record: SpeculativeRecord) -> None:
        """Dynamic trees are for EAGLE-3."""
        if record.tree is not None and record.method != OFF.name:
            if record.method != EAGLE3.name:
                raise refuse_tree(record, self.title, f"{self.title} grows trees for EAGLE-3 only")
            why = "TensorRT-LLM gives up fixed trees in 1.4"
            check_grown_tree(
                record, self.title, lambda tree, depth: tree.top_k * depth, record.depth or 1, why
            )
        _check_layers(record)

    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        if record.method == NGRAM.name:
            longest = 2 if record.ngram is None else record.ngram.max
            looks_up = "TensorRT-LLM looks up any shorter n-gram too"
            why = "TensorRT-LLM's own default" if record.ngram is None else looks_up
            losses.change("ngram", NgramLookup(1, longest), why)
        _adapt_verification(record, losses)
        _adapt_schedule(record, losses)

    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        config = _config(record, given)
        command = ("trtllm-serve", given.target or "MODEL")
        if not config:
            return command, ()
        return (*command, "--config", FILE), (ExportedFile(FILE, yaml.safe_dump(config, sort_keys=False)),)

    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        notes = []
        if given.method in _NO_OVERLAP:
            notes.append(
                "TensorRT-LLM runs this drafter without its overlap scheduler, which costs speed by itself"
            )
        head = given.head
        if given.method == EAGLE3.name and (head is None or head.aux_layers is None):
            notes.append(
                "the layers that the head reads are not known: TensorRT-LLM captures 1, half - 1 and the fourth from "
                "the end; write eagle3_layers_to_capture as it was trained, by the layer that wrote"
            )
        if given.tree is not None:
            notes.append("dynamic trees of TensorRT-LLM do not run with sliding windows or latent attention")
        return notes

    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """Reads the YAML, the server's command next to it, or a program with a `…DecodingConfig`."""
        if source.calls is not None:
            return _from_calls(source.calls, source.where)
        if source.mapping is not None:
            return _from_mapping(source.mapping, source.where), None
        flags = command_flags(source.words or ())
        words = [word for word in flags.others if word not in ("trtllm-serve", "serve", "trtllm-bench")]
        target = words[0] if words else flags.values.get("--model")
        file = next(
            (flags.values[flag] for flag in ("--config", "--extra_llm_api_options") if flag in flags.values),
            None,
        )
        return (None if file is None else _from_mapping(source.read_nearby(file), file)), target

    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        if given.get(RELAXED) not in (None, False):
            raise changes_the_text(f"{RELAXED} of TensorRT-LLM")
        for key, value in LOSSY.items():
            if given.get(key, value) != value:
                raise changes_the_text(f"{key} {given[key]} of TensorRT-LLM")
        kind = str(given.get("decoding_type", ""))
        kind = SYNONYMS.get(kind, kind)
        if kind in ELSEWHERE:
            raise no_counterpart(f"decoding_type {kind} of TensorRT-LLM", ELSEWHERE[kind])
        reject_unknown([kind], KEYS, "decoding_type of TensorRT-LLM")
        check_keys(given, KEYS[kind], f"TensorRT-LLM {kind}")
        notes = left_out(given, names_of(TABLE))
        record = _record(kind, given, target)
        if record.head is not None and record.head.aux_layers is not None:
            ids = list(record.head.aux_layers.as_convention("before_layer").ids)
            notes.append(
                f"the head's eagle_aux_hidden_state_layer_ids must be {ids} here, by the layer that reads"
            )
        return record, notes


def _check_layers(record: SpeculativeRecord) -> None:
    """It takes the layers from `eagle3_layers_to_capture`, not from the head, by the layer that wrote."""
    head = record.head
    if record.method != EAGLE3.name or head is None or head.aux_layers is None:
        return
    ids = head.aux_layers.as_convention("after_layer").ids
    if any(layer < 0 for layer in ids):
        why = (
            f"the head reads the embedding ({list(head.aux_layers.ids)}), which TensorRT-LLM cannot capture; -1 means "
            "the last state there"
        )
        raise refuse_method(record, "TensorRT-LLM", TYPES, why)
    if list(ids) != sorted(set(ids)):
        why = f"TensorRT-LLM captures a set of layers in rising order, the head reads {list(head.aux_layers.ids)}"
        raise refuse_method(record, "TensorRT-LLM", TYPES, why)


def _adapt_verification(record: SpeculativeRecord, losses: Losses) -> None:
    sampled = record.draft_sampling in ("sampled", "coupled") or record.verify == "rejection"
    if record.method == EAGLE3.name and record.tree is None and sampled:
        losses.change(
            "verify", "rejection", "TensorRT-LLM tests sampled drafts by rejection; the same distribution"
        )
        losses.change("draft_sampling", "sampled", "TensorRT-LLM has no coupled noise")
        return
    losses.change("verify", "any", "TensorRT-LLM compares with the target's own draw; the same distribution")
    losses.change("draft_sampling", None, "TensorRT-LLM drafts the most probable tokens here")


def _adapt_schedule(record: SpeculativeRecord, losses: Losses) -> None:
    if record.method == OFF.name:
        losses.change("depth", None, "nothing is drafted")
        losses.change("schedule", (), "nothing is drafted")
        return
    schedule = losses.record.schedule
    if not schedule:
        return
    first = schedule[0].depth
    if first == 0:
        losses.change("schedule", (), "a schedule of TensorRT-LLM begins with drafts")
    elif record.tree is not None:
        losses.change("schedule", (), "TensorRT-LLM changes the depth of chains only")
    elif any(each.depth > first for each in schedule):
        losses.change("schedule", (), "a schedule of TensorRT-LLM only becomes shorter with more requests")
    else:
        losses.change("depth", first, "max_draft_len is the depth of one running request")


def _config(record: SpeculativeRecord, given: SpeculativeRecord) -> dict[str, Any]:
    config = written(replace(record, head=given.head), TABLE)
    whole: dict[str, Any] = {"speculative_config": config} if config else {}
    return whole | ({"disable_overlap_scheduler": True} if record.method in _NO_OVERLAP else {})


def _from_mapping(mapping: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    given = mapping.get("speculative_config", mapping if "decoding_type" in mapping else None)
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config in {where} must be an object of keys and values")
    return given


def _from_calls(calls: tuple[PythonCall, ...], where: str) -> tuple[Mapping[str, Any] | None, str | None]:
    target: str | None = None
    given: dict[str, Any] | None = None
    for call in calls:
        if call.name == "LLM":
            first = call.kwargs.get("model", call.args[0] if call.args else None)
            target = first if isinstance(first, str) else None
        if call.name.endswith("DecodingConfig"):
            given = {"decoding_type": call.name.removesuffix("DecodingConfig"), **call.kwargs}
    if given is None and target is None:
        raise ConfigError(f"{where} calls neither LLM nor a DecodingConfig of TensorRT-LLM")
    return given, target


def _record(kind: str, given: Mapping[str, Any], target: str | None) -> SpeculativeRecord:
    method = names_from(TENSORRT_LLM)[kind]
    found = fields_found(given, TABLE, method)
    if found.get("depth") is None:
        key = "num_nextn_predict_layers" if method == MTP.name else "max_draft_len"
        raise ConfigError(f"TensorRT-LLM needs {key}, the number of draft tokens")
    rejection, tree = bool(given.get("use_rejection_sampling")), _tree(given, found["depth"])
    return SpeculativeRecord(
        method=method,
        target=target,
        tree=tree,
        verify="rejection" if rejection else "any",
        draft_sampling="sampled" if rejection and tree is None else None,
        schedule=_schedule(given, found["depth"]),
        head=_head(given) if method == EAGLE3.name else None,
        **found,
    )


def _head(given: Mapping[str, Any]) -> HeadInfo | None:
    """What the setting says of an EAGLE-3 head: the layers that it reads."""
    layers = given.get("eagle3_layers_to_capture")
    if not layers:
        return None
    if not isinstance(layers, list | tuple | set):
        raise ConfigError(f"eagle3_layers_to_capture must be a list such as [1, 15, 28], got {layers!r}")
    ids = sorted(whole_number(layer, "eagle3_layers_to_capture") for layer in layers)
    layer_ids = AuxLayers(tuple(ids), "after_layer")
    return HeadInfo(layout=EAGLE3.name, version=3, aux_layers=layer_ids, embedding=None, output=None)


def _tree(given: Mapping[str, Any], depth: int) -> TreeShape | None:
    if given.get("eagle_choices") is not None:
        choices = _paths(given["eagle_choices"])
        widest = max(rank for path in choices for rank in path) + 1
        return TreeShape(top_k=widest, num_nodes=len(choices), choices=choices)
    top_k = given.get("dynamic_tree_max_topK")
    if top_k is None or whole_number(top_k, "dynamic_tree_max_topK") == 1:
        return None
    total = given.get("max_total_draft_tokens", int(top_k) * depth)
    return TreeShape(top_k=int(top_k), num_nodes=whole_number(total, "max_total_draft_tokens"))


def _paths(choices: Any) -> tuple[tuple[int, ...], ...]:
    """`eagle_choices`, the path of ranks to each node; raises `ConfigError` for anything else."""
    is_list = isinstance(choices, list | tuple) and len(choices) > 0
    if not is_list or not all(isinstance(path, list | tuple) and path for path in choices):
        raise ConfigError(
            f"eagle_choices must be a list of paths such as [[0], [1], [0, 0]], got {choices!r}"
        )
    return tuple(tuple(whole_number(rank, "eagle_choices") for rank in path) for path in choices)


def _schedule(given: Mapping[str, Any], depth: int) -> tuple[ScheduleRange, ...]:
    lengths = given.get("draft_len_schedule")
    if lengths is None and given.get("max_concurrency") is not None:
        lengths = {given["max_concurrency"]: depth}
    if lengths is None:
        return ()
    if not isinstance(lengths, Mapping) or not lengths:
        raise ConfigError(f"draft_len_schedule must be an object such as {{4: 4, 8: 2}}, got {lengths!r}")
    steps = sorted(
        (whole_number(last, "draft_len_schedule"), whole_number(each, "draft_len_schedule"))
        for last, each in lengths.items()
    )
    ranges, low = [], 1
    for last, each in steps:
        ranges.append(ScheduleRange(low, None if last >= NO_END else last, each))
        low = last + 1
    return (*ranges, ScheduleRange(low, None, 0)) if steps[-1][0] < NO_END else tuple(ranges)
