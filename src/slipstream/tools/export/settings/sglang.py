"""SGLang: flags of `python -m sglang.launch_server`, and a JSON file for a schedule. Read in 0.5.23.

`--speculative-num-draft-tokens` counts the root: a chain of 4 draft tokens is 5 there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.config import reject_unknown
from slipstream.draft.methods import (
    DRAFT_MODEL,
    EAGLE,
    EAGLE3,
    MAY_NAME_MODEL,
    MTP,
    NGRAM,
    OFF,
    SGLANG,
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
from slipstream.tools.export.keys import (
    Key,
    check_keys,
    fields_found,
    left_out,
    named_by_head,
    names_of,
    written,
)
from slipstream.tools.export.reading import (
    PythonCall,
    SettingSource,
    command_flags,
    real_number,
    whole_number,
)
from slipstream.tools.export.record import ScheduleRange, SpeculativeRecord, TreeShape
from slipstream.tools.export.refusals import ExportError, check_grown_tree, described

ADAPTIVE_FILE = "speculative_adaptive.json"
ALGORITHMS = names_in(SGLANG)
ELSEWHERE = {
    "UNO": "train an EAGLE-3 head for the model",
    "FROZEN_KV_MTP": "train an EAGLE-3 head for the model",
}
"""Its algorithms that nothing of ours runs."""
_PREFIX = "--speculative-"
OTHER_FLAGS = (
    *("draft-load-format", "dflash-block-size", "domino-candidate-pool-size", "dspark-block-size"),
    *("dspark-sps-table-path", "dspark-confidence-sts-path", "dspark-align-verify-tokens-to-graph-tier"),
    *("token-map", "attention-mode", "draft-attention-backend", "dsa-topk-backend", "draft-kv-cache-dtype"),
    *("draft-window-size", "draft-sink-size", "moe-runner-backend", "moe-a2a-backend"),
    *("enable-w4a4-mxfp4-megamoe", "draft-model-quantization", "skip-dp-mlp-sync", "ngram-match-type"),
    *("ngram-max-trie-depth", "ngram-capacity", "ngram-external-corpus-path", "ngram-external-sam-budget"),
    "ngram-external-corpus-max-tokens",
)


def _key(name: str, field: str, **options: Any) -> Key:
    return Key(_PREFIX + name, field, **options)


TABLE = (
    _key("algorithm", "method", names=ALGORITHMS),
    _key("draft-model-path", "model", methods=WITH_MODEL, also=(_PREFIX + "draft-model",)),
    _key("draft-model-revision", "revision"),
    _key("num-steps", "depth", read=None, methods=MAY_NAME_MODEL),
    _key("eagle-topk", "method", names=dict.fromkeys(MAY_NAME_MODEL, 1)),
    _key("num-draft-tokens", "depth", read=None, write=lambda depth: depth + 1),
    # A breadth of 1 is a chain; its default is a tree.
    _key("ngram-min-bfs-breadth", "method", names={NGRAM.name: 1}),
    _key("ngram-max-bfs-breadth", "method", names={NGRAM.name: 1}),
)
_SWITCHES = {"rejection": "use-rejection-sampling", "block": "use-block-verification"}
USED_FLAGS = names_of(TABLE).union(
    _PREFIX + name
    for name in (
        *(*_SWITCHES.values(), "adaptive", "adaptive-config"),
        *("accept-threshold-single", "accept-threshold-acc"),
    )
)
FLAGS = (*USED_FLAGS, *(_PREFIX + name for name in OTHER_FLAGS))
_OF_EAGLE = (EAGLE.name, EAGLE3.name, MTP.name)
"""Methods that its worker for EAGLE runs."""
_DEFAULT_NGRAM_TOKENS = 12
"""What it checks in a step of NGRAM unless set otherwise, the root included."""
_DEFAULT_BREADTH = 10
_NUMBERS = ("num-steps", "eagle-topk", "num-draft-tokens")
_DEFAULT_SHAPES = {
    DRAFT_MODEL.name: (3, 1, 4),
    MTP.name: (3, 1, 4),
    EAGLE.name: (5, 4, 8),
    EAGLE3.name: (5, 4, 8),
}
"""The three numbers that it chooses itself; of EAGLE for Llama, and (3, 1, 4) for most other targets."""


class SglangSettings(SettingsFormat):
    """The `--speculative-*` flags."""

    name = "sglang"
    versions = ("0.5",)

    title = "SGLang"
    lacks = (
        "confidence_threshold",
        Lack("quantization", "{engine} quantises a draft by its checkpoint; give one in that format"),
        *("exit_layer", "suffix"),
        Lack("ngram", "SGLang's n-gram drafter matches any length up to its trie's depth"),
        *("model", "revision"),
        Lack("tree", "SGLang is given a chain of n-grams", MAY_NAME_MODEL),
        "depth",
    )

    def check(self, record: SpeculativeRecord) -> None:
        """It grows its trees itself, as large as EAGLE-2 finds them."""
        if record.tree is not None and record.method not in (OFF.name, NGRAM.name):
            check_grown_tree(record, self.title, TreeShape.most_nodes, least=0)

    def adapt(self, record: SpeculativeRecord, losses: Losses, version: str) -> None:
        """A schedule needs an EAGLE chain."""
        _adapt_verification(record, losses)
        _adapt_schedule(losses)

    def form(self, record: SpeculativeRecord, given: SpeculativeRecord, version: str) -> Form:
        words, files = _words(record, given)
        server = ("python", "-m", "sglang.launch_server", "--model-path", given.target or "MODEL")
        return [*server, *words, *_token_map(given)], files

    def notes(self, record: SpeculativeRecord, given: SpeculativeRecord) -> list[str]:
        if given.method == OFF.name:
            return []
        notes = ["without --max-running-requests SGLang runs at most 48 requests at once while it speculates"]
        head = given.head
        if given.method == EAGLE3.name and head is not None:
            if head.embedding == "own":
                notes.append(
                    "SGLang replaces the head's own embedding by the target's: fewer draft tokens are accepted "
                    "than here"
                )
            if head.aux_layers is not None:
                ids = list(head.aux_layers.as_convention("after_layer").ids)
                notes.append(
                    f"SGLang numbers the layers that a head reads by the layer that wrote: the head must name {ids}"
                )
        if record.schedule:
            notes.append("SGLang rounds the batch up to a captured size before it looks into the schedule")
        return notes

    def found(self, source: SettingSource) -> tuple[Mapping[str, Any] | None, str | None]:
        """Reads a command, a configuration file of the server, or a program that calls `Engine`: flags of
        speculation."""
        if source.calls is not None:
            pairs = dict(_engine_call(source.calls, source.where).kwargs)
        elif source.mapping is not None:
            pairs = dict(source.mapping)
        else:
            pairs = {
                key.removeprefix("--"): value
                for key, value in command_flags(source.words or ()).values.items()
            }
        named = {"--" + str(key).replace("_", "-"): value for key, value in pairs.items()}
        target = named.get("--model-path", named.get("--model"))
        given = {
            flag: value
            for flag, value in named.items()
            if flag.startswith(_PREFIX) and value is not None and value is not False
        }
        return given, target if isinstance(target, str) else None

    def read(
        self, given: Mapping[str, Any], target: str | None, version: str, source: SettingSource
    ) -> tuple[SpeculativeRecord | None, Sequence[str]]:
        check_keys(given, FLAGS, "SGLang")
        algorithm = given.get(_PREFIX + "algorithm")
        if algorithm is None:
            return None, ()
        algorithm = str(algorithm).upper()
        if algorithm in ELSEWHERE:
            raise no_counterpart(f"SGLang's algorithm {algorithm}", ELSEWHERE[algorithm])
        reject_unknown([algorithm], names_from(SGLANG), "algorithm of SGLang")
        _check_thresholds(given)
        notes = left_out(given, USED_FLAGS, "it sets loading or speed of SGLang's own parts")
        return _record(names_from(SGLANG)[algorithm], given, target, source, notes), notes


def _adapt_verification(record: SpeculativeRecord, losses: Losses) -> None:
    is_eagle_chain = record.method in _OF_EAGLE and record.tree is None
    whole = record.head is None or record.head.vocabulary is None
    if is_eagle_chain and record.verify == "block":
        losses.change("draft_sampling", None, "block verification of SGLang draws as it needs to")
        return
    wants = record.verify == "rejection" or record.draft_sampling in ("sampled", "coupled")
    if is_eagle_chain and whole and wants:
        losses.change(
            "verify", "rejection", "SGLang tests sampled drafts by rejection; the same distribution"
        )
        losses.change("draft_sampling", "sampled", "rejection sampling of SGLang draws its drafts")
        return
    reason = (
        "SGLang's rejection sampling needs a head with the whole vocabulary"
        if is_eagle_chain and not whole
        else "SGLang has it for EAGLE chains only"
    )
    losses.change("verify", "any", f"{reason}; its default rule keeps the distribution too")
    losses.change("draft_sampling", None, "SGLang drafts the most probable tokens here")


def _adapt_schedule(losses: Losses) -> None:
    record = losses.record
    if not record.schedule:
        return
    if record.method not in _OF_EAGLE or record.tree is not None:
        losses.change("schedule", (), "SGLang changes the depth of EAGLE chains only")
        return
    deepest = max(each.depth for each in record.schedule)
    if deepest == 0:
        nearest = SpeculativeRecord(method=OFF.name, target=record.target)
        raise ExportError("this schedule never drafts", nearest, described(nearest))
    losses.change("depth", deepest, "SGLang's steps are the schedule's deepest")


def _words(record: SpeculativeRecord, given: SpeculativeRecord) -> tuple[list[str], tuple[ExportedFile, ...]]:
    values = written(record, TABLE) | named_by_head(given, _PREFIX + "algorithm", SGLANG)
    if record.tree is not None:
        top_k, num_nodes = record.tree.top_k, record.tree.num_nodes
        values |= {_PREFIX + "eagle-topk": top_k, _PREFIX + "num-draft-tokens": num_nodes + 1}
    words = [word for flag, value in values.items() for word in (flag, str(value))]
    if record.verify in _SWITCHES:
        words.append(_PREFIX + _SWITCHES[record.verify])
    if not record.schedule:
        return words, ()
    words += [_PREFIX + "adaptive", _PREFIX + "adaptive-config", ADAPTIVE_FILE]
    # A slot holds from its batch size up to the next slot's. With one candidate there is nothing to adapt.
    slots = {str(each.low): {"candidate_steps": [each.depth]} for each in record.schedule}
    text = json.dumps({"strategy": "ema", **slots}, indent=2) + "\n"
    return words, (ExportedFile(ADAPTIVE_FILE, text),)


def _token_map(record: SpeculativeRecord) -> list[str]:
    vocabulary = None if record.head is None else record.head.vocabulary
    if vocabulary is None or vocabulary.kind != "hot_ids" or vocabulary.file is None:
        return []
    return [_PREFIX + "token-map", vocabulary.file]


def _engine_call(calls: tuple[PythonCall, ...], where: str) -> PythonCall:
    for call in calls:
        if call.name in ("Engine", "ServerArgs"):
            return call
    raise ConfigError(f"{where} calls neither Engine nor ServerArgs of SGLang")


def _check_thresholds(given: Mapping[str, Any]) -> None:
    for name in ("accept-threshold-single", "accept-threshold-acc"):
        value = given.get(_PREFIX + name)
        if value is not None and real_number(value, _PREFIX + name) < 1:
            raise changes_the_text(f"{_PREFIX}{name} {value}")


def _record(
    method: str, given: Mapping[str, Any], target: str | None, source: SettingSource, notes: list[str]
) -> SpeculativeRecord:
    depth, tree = _ngram_shape(given, notes) if method == NGRAM.name else _shape(given, method, notes)
    block = _PREFIX + "use-block-verification" in given
    rejection = _PREFIX + "use-rejection-sampling" in given
    record = SpeculativeRecord(
        method=method,
        target=target,
        depth=depth,
        tree=tree,
        verify="block" if block else "rejection" if rejection else "any",
        draft_sampling="sampled" if rejection and not block else None,
        **fields_found(given, TABLE, method),
    )
    if _PREFIX + "adaptive" not in given:
        return record
    file = given.get(_PREFIX + "adaptive-config")
    schedule = None if file is None else _schedule(source.read_nearby(str(file)))
    if schedule is None:
        notes.append(
            'the depth that SGLang adapts to what was accepted is left out; here {"method": "auto"} chooses it'
        )
        return record
    deepest = max(each.depth for each in schedule)  # the number of steps is only what SGLang begins with
    return replace(record, depth=max(record.depth or 1, deepest), schedule=schedule)


def _shape(given: Mapping[str, Any], method: str, notes: list[str]) -> tuple[int | None, TreeShape | None]:
    """(depth, tree), the root no longer counted; what SGLang chooses itself where nothing is given."""
    number = {
        name: whole_number(given[_PREFIX + name], _PREFIX + name)
        for name in _NUMBERS
        if _PREFIX + name in given
    }
    if not number and (_PREFIX + "adaptive" in given or method not in _DEFAULT_SHAPES):
        return None, None  # a chain, as deep as its configuration or the head's says
    if not number:
        number = dict(zip(_NUMBERS, _DEFAULT_SHAPES[method], strict=True))
        if method in (EAGLE.name, EAGLE3.name):
            notes.append(
                "SGLang chooses its numbers by the target: here those of Llama; most others have 3 steps and top-k 1"
            )
    if "num-steps" not in number:
        raise ConfigError("SGLang needs --speculative-num-steps in addition to its other two numbers")
    depth, top_k = number["num-steps"], number.get("eagle-topk", 1)
    if top_k == 1:  # SGLang itself sets the draft tokens of a chain to its steps + 1
        return depth, None
    return depth, TreeShape(top_k=top_k, num_nodes=number.get("num-draft-tokens", top_k * depth + 1) - 1)


def _ngram_shape(given: Mapping[str, Any], notes: list[str]) -> tuple[int, None]:
    flag = _PREFIX + "num-draft-tokens"
    total = whole_number(given.get(flag, _DEFAULT_NGRAM_TOKENS), flag)
    breadth = whole_number(
        given.get(_PREFIX + "ngram-max-bfs-breadth", _DEFAULT_BREADTH), _PREFIX + "ngram-max-bfs-breadth"
    )
    if breadth > 1:
        notes.append(
            "the tree of n-grams is left out: ngram proposes chains here, suffix with tree=true a tree"
        )
    if total < 2:
        raise ConfigError(f"{flag} counts the root, so it is at least 2, got {total}")
    return total - 1, None


def _schedule(config: Mapping[str, Any]) -> tuple[ScheduleRange, ...] | None:
    """Slots with one candidate each are a schedule; None where there is a choice left."""
    slots = sorted((int(key), value) for key, value in config.items() if str(key).isdigit())
    steps = [value.get("candidate_steps") if isinstance(value, Mapping) else None for _, value in slots]
    depths = [each for each in steps if isinstance(each, list) and len(each) == 1]
    if not slots or len(depths) < len(slots):
        return None
    lows = [1, *(low for low, _ in slots[1:])]  # batches below the first slot take it too
    highs = [low - 1 for low in lows[1:]]
    return tuple(
        ScheduleRange(low, high, whole_number(depth[0], "candidate_steps"))
        for low, high, depth in zip(lows, [*highs, None], depths, strict=True)
    )
