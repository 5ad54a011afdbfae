"""vLLM: `vllm serve MODEL --speculative-config JSON`, and the same mapping in Python. Read in 0.32 and 0.33."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from slipstream.config import reject_unknown
from slipstream.draft.methods import (
    DRAFT_MODEL,
    DRAFT_MODELS,
    EAGLE,
    EAGLE3,
    MAY_NAME_MODEL,
    MEDUSA,
    MTP,
    NGRAM,
    OFF,
    PARD,
    PEAGLE,
    SUFFIX,
    TLI,
    VLLM,
    is_pard2,
    names_in,
)
from slipstream.errors import ConfigError
from slipstream.tools.export.contract import (
    DRAFTING,
    ExportedFile,
    Form,
    Lack,
    Losses,
    SettingsFormat,
    changes_the_text,
    no_counterpart,
)
from slipstream.tools.export.head_info import read_config
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
from slipstream.tools.export.record import NgramLookup, ScheduleRange, SpeculativeRecord, SuffixLimits
from slipstream.tools.export.refusals import refuse_method, refuse_tree
from slipstream.vllm_names import METHODS_ELSEWHERE, PARALLEL, own_method, own_speculation

FILE = "speculative_config.json"
METHODS = {
    "0.32": names_in(VLLM),
    "0.33": {m: name for m, name in names_in(VLLM).items() if m != MEDUSA.name},
}
"""Our methods that each version runs; 0.33 has removed Medusa."""
ELSEWHERE = frozenset({*METHODS_ELSEWHERE, "dflash2", "lilicorr", "xpress"})
"""Its methods that nothing of ours runs."""
NO_END = 65_536
"""Where it writes the end of a range that has none: more requests than any server runs at once."""

SHORT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""Flags of single keys, to those keys."""
SPEED_KEYS = (
    *("attention_backend", "code_revision", "disable_eagle_block_drop", "disable_padded_drafter_batch"),
    *("draft_load_config", "draft_tensor_parallel_size", "dspark_draft_topk", "enforce_eager"),
    *("index_share_for_mtp_iteration", "kv_cache_dtype", "max_model_len", "moe_backend", "quantization"),
    *("use_local_argmax_reduction", "enable_adaptive_verification"),
)
"""Keys of its own loading and scheduling: they change neither text nor proposals here, so they are left out."""
REFUSED_KEYS = {
    "tensor_parallel_size": "vLLM refuses it too; draft_tensor_parallel_size was meant",
}
LOSSY_RULES = ("fly", "synthetic")
"""Its ways of accepting draft tokens that the target would not have drawn."""
LOSSY_KEYS = ("synthetic_acceptance_rates", "synthetic_acceptance_length")


def _schedule(entries: Any, key: str) -> tuple[ScheduleRange, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, list | tuple) for entry in entries):
        raise ConfigError(f"{key} must be a list such as [[1, 8, 4], [9, 64, 0]], got {entries!r}")
    for entry in entries:
        if len(entry) != 3:
            raise ConfigError(
                f"{key}: {list(entry)} is not [first, last, draft tokens]; ranges of contexts cannot be imported"
            )
    return tuple(ScheduleRange(*(whole_number(each, key) for each in entry)) for entry in entries)


def _ranges(schedule: Sequence[ScheduleRange]) -> list[list[int]]:
    return [
        [each.low, max(each.low, NO_END) if each.high is None else each.high, each.depth] for each in schedule
    ]


_RULES = {"rejection": "standard", "block": "block"}
_SUFFIX = [
    Key(
        f"suffix_decoding_{limit.name}",
        f"suffix.{limit.name}",
        real_number if isinstance(limit.default, float) else whole_number,
        methods=(SUFFIX.name,),
        default=limit.default,
    )
    for limit in fields(SuffixLimits)
]
TABLE = (
    # The method is always written: without it vLLM goes by substrings of the model's path.
    Key("method", "method", names=names_in(VLLM)),
    Key("model", "model", methods=MAY_NAME_MODEL),
    Key("revision", "revision"),
    Key("num_speculative_tokens", "depth", whole_number),
    Key("use_heterogeneous_vocab", "method", names={TLI.name: True}),
    Key("parallel_drafting", "method", names=dict.fromkeys(PARALLEL.values(), True)),
    Key("prompt_lookup_min", "ngram.min", whole_number, methods=(NGRAM.name,)),
    Key("prompt_lookup_max", "ngram.max", whole_number, methods=(NGRAM.name,)),
    *_SUFFIX,
    Key("draft_sample_method", "draft_sampling", names=SAMPLINGS),
    Key("rejection_sample_method", "verify", names=_RULES),
    Key("num_speculative_tokens_per_batch_size", "schedule", _schedule, _ranges),
)
_KEYS = frozenset({*names_of(TABLE), *SPEED_KEYS, *REFUSED_KEYS, *LOSSY_KEYS})
_NEW_KEYS = (
    *("draft_lm_head_quantization", "xpress_topc", "disable_lookahead_block_hashes"),
    *("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"),
)
KEYS = {"0.32": _KEYS, "0.33": _KEYS.union(_NEW_KEYS)}
_MAY_SAMPLE = frozenset({DRAFT_MODEL.name, EAGLE.name, EAGLE3.name, MTP.name})


class VllmSettings(SettingsFormat):
    """The mapping of `--speculative-config`."""

    name = "vllm"
    versions = ("0.32", "0.33")
    default_depths: ClassVar[Mapping[str, int]] = {SUFFIX.name: 16}

    title = "vLLM"
    lacks = (
        "confidence_threshold",
        Lack("quantization", "{engine} quantises a draft by its checkpoint; give one in that format"),
        "exit_layer",
        Lack("suffix", "its defaults are written for suffix only", (SUFFIX.name,)),
        Lack("ngram", "its defaults are written for ngram only", (NGRAM.name,)),
        Lack("model", "this drafter has no model", MAY_NAME_MODEL),
        Lack("revision", "this drafter has no model", MAY_NAME_MODEL),
        *("depth", Lack("schedule", "nothing is drafted", DRAFTING)),
        Lack("draft_sampling", "{engine} drafts greedily with {method}", _MAY_SAMPLE),
    )

    def methods(self, version: str) -> Mapping[str, str]:
        return METHODS[version]

    def why_not(self, method: str, version: str) -> str:
        return "vLLM has removed Medusa in 0.33, and 0.32 runs it" if method == MEDUSA.name else ""

    def check(self, record: SpeculativeRecord) -> None:
        """Trees are refused, heads without an output layer, and PARD-2 models."""
        if record.tree is not None:
            raise refuse_tree(record, self.title)
        _check_head(record)

    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        if record.method == SUFFIX.name:
            losses.change(
                "suffix", record.suffix or SuffixLimits(), "its defaults are written for suffix only"
            )
        if record.method == NGRAM.name:
            losses.change(
                "ngram", record.ngram or NgramLookup(5, 5), "its defaults are written for ngram only"
            )
        if record.verify == "coupled" or record.method == OFF.name:
            why = "vLLM verifies by rejection: the same distribution, but a seed's text depends on what was drafted"
            losses.change("verify", "any", why)
        if losses.record.draft_sampling == "coupled":
            losses.change(
                "draft_sampling", "sampled", "vLLM has no coupled noise: drafts are drawn on their own"
            )

    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        config = written(record, TABLE) | named_by_head(given, "method", VLLM)
        command = ["vllm", "serve", record.target or "MODEL"]
        if not config:
            return command, ()
        file = ExportedFile(FILE, json.dumps(config, indent=2) + "\n")
        return [*command, "--speculative-config", json.dumps(config)], (file,)

    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        notes: list[str] = []
        draft, target = given.draft_context, given.target_context
        if given.method in DRAFT_MODELS and draft and target and draft < target:
            notes.append(
                f"the draft's context is {draft:,} tokens, the target's {target:,}: vLLM lowers max_model_len to the "
                "draft's, for all requests"
            )
        if given.method == SUFFIX.name:
            notes.append(
                "suffix needs the package arctic-inference, and runs with vLLM's first model runner only"
            )
        if given.method != OFF.name:
            notes.append("requests with min_p or logit_bias are refused while vLLM speculates")
        head = given.head
        if given.method in (EAGLE3.name, PEAGLE.name) and head is not None:
            if head.aux_layers is None:
                notes.append(
                    "the head's configuration does not name eagle_aux_hidden_state_layer_ids: vLLM reads layers 2, "
                    "half and the third from the end; write those that it was trained with"
                )
            if head.norms.before_residual is None:
                assumed = "true" if head.layout == "speculators" else "false"
                notes.append(
                    f"the head's configuration does not name norm_before_residual: vLLM assumes {assumed}; write what "
                    "it was trained with"
                )
        return notes

    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """Reads a command, the JSON, a configuration file of `vllm serve`, or a program that calls `LLM`."""
        target, given = _found(source)
        if given is None:
            return None, target
        return {str(key).replace("-", "_"): value for key, value in given.items()}, target

    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        _check_lossless(given)
        check_keys(given, KEYS[version], f"vLLM {version} speculative_config")
        for key, why in REFUSED_KEYS.items():
            if given.get(key) not in (None, False):
                raise ConfigError(f"{key} of vLLM cannot be imported: {why}")
        notes = left_out(given, names_of(TABLE), "it sets loading or speed of vLLM's own parts")
        return _record(given, target, version), notes


def _check_head(record: SpeculativeRecord) -> None:
    head = record.head
    if record.method in (EAGLE3.name, PEAGLE.name) and head is not None and head.output == "shared":
        why = f"vLLM needs lm_head in an EAGLE-3 head, and {record.model!r} has none; write the head with the target's"
        raise refuse_method(record, "vLLM", METHODS["0.32"], why)
    config = read_config(record.model) if record.method == PARD.name and record.model else None
    if config is not None and is_pard2(config):
        why = f"{record.model!r} is a PARD-2 model, which reads the target's hidden states, and vLLM's drafts read none"
        raise refuse_method(record, "vLLM", METHODS["0.32"], why)


def _found(source: SettingSource) -> tuple[str | None, Mapping[str, Any] | None]:
    """(target, speculative configuration) in any of the forms."""
    if source.calls is not None:
        for call in source.calls:
            if call.name in ("LLM", "EngineArgs", "AsyncEngineArgs"):
                target = call.kwargs.get("model", call.args[0] if call.args else None)
                return _text(target), _object(call.kwargs.get("speculative_config"), source)
        raise ConfigError(f"{source.where} calls neither LLM nor EngineArgs")
    if source.mapping is not None:
        target, found = _in_file(source.mapping, source)
        if found is None and not {"speculative_config", "speculative-config"} & source.mapping.keys():
            return None, source.mapping  # the speculative configuration alone
        return target, found
    words = source.words or ()
    flags = command_flags(words).values
    target = _target(words)
    named = {key.removeprefix("--").replace("-", "_"): value for key, value in flags.items()}
    dotted = {
        key.split(".", 1)[1]: _json_or_text(value) for key, value in named.items() if key.startswith(_DOTTED)
    }
    text = named.get("speculative_config", flags.get("-sc"))
    found = _with_short(dotted or (None if text is None else _object(text, source)), named)
    if found is None and "config" in named:  # a file of the same flags
        nearby, found = _in_file(source.read_nearby(named["config"]), source)
        target = target or nearby
    return target, found


_DOTTED = "speculative_config."


def _target(words: Sequence[str]) -> str | None:
    """What is served: the word behind `serve`, or `--model`."""
    if "serve" in words:
        behind = words[words.index("serve") + 1 :][:1]
        if behind and not behind[0].startswith("-"):
            return behind[0]
    flags = command_flags(words)
    others = [word for word in flags.others if word not in ("vllm", "serve", "python", "python3")]
    return flags.values.get("--model") or (others[0] if others else None)


def _in_file(
    mapping: Mapping[str, Any], source: SettingSource
) -> tuple[str | None, Mapping[str, Any] | None]:
    """(target, speculative configuration) of a file of the server's flags."""
    given = {key.replace("-", "_"): value for key, value in mapping.items()}
    config = _object(given.get("speculative_config"), source)
    return _text(given.get("model")), _with_short(config, given)


def _with_short(config: Mapping[str, Any] | None, given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return it with what vLLM's flags of single keys say."""
    short = {key: given[name] for name, key in SHORT.items() if given.get(name) is not None}
    return {**(config or {}), **short} if short else config


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _object(value: Any, source: SettingSource) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config in {source.where} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config in {source.where} must be an object of keys and values")
    return value


def _record(given: Mapping[str, Any], target: str | None, version: str) -> SpeculativeRecord:
    method = _method(given, version)
    if (rule := given.get("rejection_sample_method")) is not None:
        reject_unknown([rule], _RULES.values(), f"rejection_sample_method of vLLM {version}")
    # Both lengths are 5 where neither is given, and equal where one is.
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    given = {**given, "prompt_lookup_min": low or high or 5, "prompt_lookup_max": high or low or 5}
    return SpeculativeRecord(method=method, target=target, **fields_found(given, TABLE, method, "vLLM"))


def _method(given: Mapping[str, Any], version: str) -> str:
    method = given.get("method")
    if method is None:
        method = str(own_speculation({"model": given.get("model")})["method"])
    method = own_method(str(method))
    if method in ELSEWHERE:
        instead = METHODS_ELSEWHERE.get(method, "convert or train an EAGLE-3 head")
        raise no_counterpart(f"vLLM's method {method!r}", instead)
    reject_unknown([method], set(METHODS[version].values()), f"method of vLLM {version}")
    if given.get("parallel_drafting") is True:
        if method not in PARALLEL:
            raise ConfigError(
                f"parallel_drafting of vLLM is for {' and '.join(PARALLEL)}, got method {method!r}"
            )
        return PARALLEL[method]
    return TLI.name if given.get("use_heterogeneous_vocab") is True else method


def _check_lossless(given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for what changes the text in any version; such a rule may also be given as the method."""
    for key, instead in (("rejection_sample_method", "omit it, or use block"), ("method", "name a drafter")):
        if given.get(key) in LOSSY_RULES:
            raise changes_the_text(f"{key} {given[key]!r} of vLLM", instead)
    for key in LOSSY_KEYS:
        if given.get(key) is not None:
            raise changes_the_text(f"{key} of vLLM")
