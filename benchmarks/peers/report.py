"""The page that the results make: a pure function of the JSON.

`python -m benchmarks.peers.page` writes it and the picture.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.harness.page import refusals, row, table, wrapped
from benchmarks.harness.rounds import quartiles
from benchmarks.peers.catalog import NAMES, OURS, PEERS
from benchmarks.peers.figures import (
    Ratio,
    best_by_task,
    equal_texts,
    over_tasks,
    paired_ratios,
    task_mean,
)
from benchmarks.peers.markdown import versions
from benchmarks.peers.results import BATCH, ModelEntries, Results, Sample

DISTURBED_CORES = 0.1
LONG_S = 0.5
"""Processor time is counted in hundredths of a second: a shorter sample says little about others."""


@dataclass(frozen=True)
class Bar:
    """One line of the table of bars: ours over theirs, and what it has to reach."""

    what: str
    models: tuple[str, ...]
    least: float
    measure: Callable[[ModelResults], tuple[Ratio | None, str]]
    """The ratio for one model, and against what it was taken."""


class ModelResults(ModelEntries):
    """One model's part of the results, by mode key."""

    def __init__(self, results: Results, name: str) -> None:
        super().__init__(results, name)
        single = {key: list(results.of(name, key)) for key in self.entries}
        batch = {key: list(results.of(name, key, batch=True)) for key in self.entries}
        self.single = {key: samples for key, samples in single.items() if samples}
        self.batch = {key: samples for key, samples in batch.items() if samples}

    def keys(self, *, ours: bool | None = None, **wanted: str | None) -> list[str]:
        """Modes of this `peer`, `kind` and `weights` that answered every prompt: means over different prompts cannot be
        compared. None takes any."""
        most = max(map(len, self.single.values()), default=0)
        return [
            key
            for key, samples in self.single.items()
            if len(samples) == most
            and ours in (None, self.definition(key)["peer"] == OURS)
            and all(want in (None, self.definition(key)[what]) for what, want in wanted.items())
        ]

    def off(self, key: str) -> str | None:
        """The mode without speculation of the same peer and weights."""
        peer, _, weights = _parts(key)
        keys = self.keys(peer=peer, kind="off", weights=weights)
        return keys[0] if keys else None

    def bytes_per_step(self, weights: str) -> float:
        return self.parameters * {"float32": 4, "int8": 1, "int4": 0.5}[weights]


def _parts(key: str) -> tuple[str, str, str]:
    peer, name, weights = key.split("/")
    return peer, name, weights


def _label(key: str) -> str:
    peer, name, weights = _parts(key)
    return f"{NAMES[peer]}, {name}" + ("" if weights == "float32" else f", {weights}")


# --- what the bars measure ---


def _against_fastest(
    model: ModelResults, ours: str | None, theirs: Iterable[str]
) -> tuple[Ratio | None, str]:
    """One mode of ours over the fastest of theirs."""
    candidates = [key for key in theirs if model.single[key]]
    if ours is None or not candidates:
        return None, "nothing to compare"
    fastest = max(candidates, key=lambda key: task_mean(model.single[key]))
    return over_tasks(paired_ratios(model.single[ours], model.single[fastest])), _label(fastest)


def _only(keys: list[str]) -> str | None:
    return keys[0] if keys else None


def _mode_against_peers(
    kind: str, weights: str, **theirs: str
) -> Callable[[ModelResults], tuple[Ratio | None, str]]:
    """Our mode of this kind and weights over the peers' fastest of the same kind, of `theirs` where it is given."""

    def measure(model: ModelResults) -> tuple[Ratio | None, str]:
        ours = _only(model.keys(peer=OURS, kind=kind, weights=weights))
        wanted = theirs or {"weights": weights}
        return _against_fastest(model, ours, model.keys(ours=False, kind=kind, **wanted))

    return measure


def _best(model: ModelResults, keys: Iterable[str]) -> list[Sample]:
    return best_by_task({key: model.single[key] for key in keys})


def _best_against_off(model: ModelResults) -> tuple[Ratio | None, str]:
    off = _only(model.keys(peer=OURS, kind="off", weights="float32"))
    if off is None:
        return None, "nothing to compare"
    best = _best(model, model.keys(peer=OURS, weights="float32"))
    return over_tasks(paired_ratios(best, model.single[off])), _label(off)


def _best_against_best(
    weights: str, peers: Iterable[str], their_weights: str | None
) -> Callable[[ModelResults], tuple[Ratio | None, str]]:
    """Our best mode by task over the best modes by task of the peer whose best are the fastest."""

    def measure(model: ModelResults) -> tuple[Ratio | None, str]:
        ours = _best(model, model.keys(peer=OURS, weights=weights))
        theirs = {peer: _best(model, model.keys(peer=peer, weights=their_weights)) for peer in peers}
        theirs = {peer: samples for peer, samples in theirs.items() if samples}
        if not ours or not theirs:
            return None, "nothing to compare"
        peer = max(theirs, key=lambda name: task_mean(theirs[name]))
        modes = sorted({_label(sample.mode).split(", ", 1)[1] for sample in theirs[peer]})
        return over_tasks(paired_ratios(ours, theirs[peer])), f"{NAMES[peer]} ({'; '.join(modes)})"

    return measure


def _batch_against_vllm(model: ModelResults) -> tuple[Ratio | None, str]:
    """Best batch mode of ours over vLLM's best, float32 both; pairs are rounds."""
    ours = {
        key: samples
        for key, samples in model.batch.items()
        if key.startswith(f"{OURS}/") and key.endswith("32")
    }
    theirs = {key: samples for key, samples in model.batch.items() if key.startswith("vllm/")}
    if not ours or not theirs:
        return None, "nothing to compare"
    our_key = max(ours, key=lambda key: task_mean(ours[key]))
    their_key = max(theirs, key=lambda key: task_mean(theirs[key]))
    ratio = over_tasks(paired_ratios(ours[our_key], theirs[their_key]))
    return ratio, f"{_label(our_key)} over {_label(their_key)}"


EMBEDDED, SMALL, LARGE = "embedded", "expanded-300m", "expanded-1g"
ALL, LARGER = (EMBEDDED, SMALL, LARGE), (SMALL, LARGE)
_OFF = _mode_against_peers("off", "float32")
_DRAFT = _mode_against_peers("draft", "float32")
_INT8_OFF = _mode_against_peers("off", "int8", peer="openvino")
_BEST = _best_against_best("float32", PEERS[1:], "float32")
_INT8_BEST = _best_against_best("int8", ["openvino"], None)
BARS = (
    Bar("speculation off over the fastest peer's off", ALL, 1.0, _OFF),
    Bar("the same draft, 4 tokens, over the fastest peer with it", LARGER, 1.05, _DRAFT),
    Bar("best mode by task over own off", LARGER, 1.9, _best_against_off),
    Bar("best mode by task over own off", (EMBEDDED,), 1.3, _best_against_off),
    Bar("best mode by task over the best peer's", ALL, 1.15, _BEST),
    Bar("int8 off over OpenVINO's fastest off at any weight format", LARGER, 1.2, _INT8_OFF),
    Bar("int8 best mode by task over OpenVINO's at any weight format", LARGER, 1.7, _INT8_BEST),
    Bar("8 requests at once over vLLM's best mode", (EMBEDDED, SMALL), 1.4, _batch_against_vllm),
)


# --- the page ---


def page(results: Results, file_name: str) -> str:
    """The whole page in Markdown; `file_name` is the JSON beside it."""
    models = [ModelResults(results, name) for name in results.settings["models"] if name in results.models]
    parts = [_heading(results, file_name), _bars(models)]
    for model in models:
        parts += [f"## {model.title[0].upper()}{model.title[1:]}\n"]
        if model.single:
            parts += [_speeds(model, results), _ratios(model), _tasks(model)]
        if model.batch:
            parts += [_batches(model)]
        parts += [_refusals(model)]
    parts.append(versions((_label(key), model.entries[key]) for model in models for key in _in_order(model)))
    text = "\n".join(part for part in parts if part)
    return wrapped(text)


def _heading(results: Results, file_name: str) -> str:
    lines = [
        "# Slipstream and its peers on a CPU",
        "",
        "Written by `python -m benchmarks.peers.page`; do not edit. How to run it again is in "
        "[benchmarks/peers](../../benchmarks/peers/README.md).",
        "",
        "The same checkpoints, prompt token ids, threads and output lengths for all; greedy, the end token ignored, "
        "nothing kept from one request to the next; modes take turns prompt by prompt. Tokens/s are output tokens over "
        "the whole call, prompt included. The larger models are cost-expanded: they compute the embedded target's "
        "function at their size's cost.",
        "",
        f"Raw results with every output: [{file_name}]({file_name}).",
        "",
    ]
    if not results.sessions:
        return "\n".join(lines)
    session = results.sessions[-1]
    lines += [
        f"- {session['cpu']}, {session['cores']} cores, {session['threads']} threads, "
        f"{session['memory_bytes'] / 2**30:.0f} GiB; memory read at "
        f"{session['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s",
        f"- {session['date']}, commit {session['commit'][:12]}, code {results.code}, Python {session['python']}, "
        f"{len(results.sessions)} start{'s' if len(results.sessions) > 1 else ''}",
        f"- `{session['command']}`",
        f"- {_quiet(results)}",
        "",
    ]
    return "\n".join(lines)


def _quiet(results: Results) -> str:
    """How much else the machine did while samples were taken, and what idle workers used."""
    if not results.samples:
        return "no samples"
    others = sum(sample.other_cpu_s for sample in results.samples) / sum(s.seconds for s in results.samples)
    long = [sample for sample in results.samples if sample.seconds >= LONG_S]
    disturbed = sum(sample.other_cpu_s / sample.seconds > DISTURBED_CORES for sample in long)
    idle = [
        (entry["idle_cores"], key)
        for key, entry in results.modes.items()
        if entry.get("idle_cores") is not None
    ]
    most = max(idle, default=(0.0, "none"))
    return (
        f"while a sample was taken, everything else on the machine used {others:.3f} cores on average, more than "
        f"{DISTURBED_CORES} in {disturbed} of the {len(long)} samples of at least {LONG_S} s; a loaded worker used "
        f"at most {most[0]:.3f} cores while it waited ({most[1]})"
    )


def _bars(models: list[ModelResults]) -> str:
    by_name = {model.name: model for model in models}
    lines = [
        "## Bars",
        "",
        "Geometric means over tasks of paired ratios, with 95 % bootstrap intervals over tasks and pairs. The best "
        "mode of a task is chosen and scored on the same samples, which favours the side with more modes by a few "
        "percent: the rows that name one mode each do not have this.",
        "",
        *table(("what", "model", "against", "bar", "reached", "yes or no"), ()),
    ]
    for bar in BARS:
        for name in bar.models:
            if name not in by_name:
                continue
            ratio, against = bar.measure(by_name[name])
            reached = str(ratio) if ratio else "not measured"
            verdict = "—" if ratio is None else "yes" if ratio.value >= bar.least else "**no**"
            lines.append(row((bar.what, name, against, f"≥ {bar.least}", reached, verdict)))
    for model in models:
        lines += _int8_texts(model)
    return "\n".join([*lines, ""])


def _int8_texts(model: ModelResults) -> list[str]:
    """Whether int8 texts are those of int8 off, over all our int8 modes."""
    off = _only(model.keys(peer=OURS, kind="off", weights="int8"))
    if off is None:
        return []
    counts = [
        equal_texts(model.single[key], model.single[off])
        for key in model.keys(peer=OURS, weights="int8")
        if key != off
    ]
    equal, total = sum(count[0] for count in counts), sum(count[1] for count in counts)
    if not total:
        return []
    verdict = "yes" if equal == total else "**no**"
    what = "int8 texts with speculation on equal to off's"
    return [row((what, model.name, _label(off), "100 %", f"{equal} of {total}", verdict))]


def _speeds(model: ModelResults, results: Results) -> str:
    bandwidth = results.sessions[-1]["read_bandwidth_bytes_per_s"] if results.sessions else None
    head = (
        *("mode", "tokens/s, mean over tasks", "median", "quartiles", "after the first token"),
        *("texts equal to its off", "weights read", "over the roofline", "peak memory", "load"),
    )
    rows = []
    for key in _in_order(model):
        samples = model.single[key]
        low, median, high = quartiles([sample.tokens_per_s for sample in samples])
        decode = [speed for sample in samples if (speed := sample.decode_tokens_per_s)]
        entry = model.entries[key]
        weights = entry["definition"]["weights"]
        if entry["definition"]["kind"] != "off":
            decode = []  # several tokens may come with the first
        roofline = ["", ""]
        if entry["definition"]["kind"] == "off" and decode:
            achieved = model.bytes_per_step(weights) * statistics.median(decode)
            roofline = [f"{achieved / 1e9:.1f} GB/s", f"{bandwidth / achieved:.2f}" if bandwidth else ""]
        off = model.off(key)
        same = ""
        if off is not None and off != key:
            equal, total = equal_texts(samples, model.single[off])
            same = f"{equal} of {total}"
        cells = (
            _label(key),
            f"{task_mean(samples):.1f}",
            f"{median:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{statistics.median(decode):.1f}" if decode else "",
            same,
            *roofline,
            f"{entry['peak_memory_bytes'] / 2**30:.2f} GiB" if entry.get("peak_memory_bytes") else "",
            f"{entry['load_s']:.1f} s",
        )
        rows.append(cells)
    lines = [
        *table(head, rows),
        "",
        "*Weights read* is the size of the weights times steps a second, with speculation off; *over the roofline* is "
        "the measured bandwidth of one large sum over it: 1.00 would be the fastest that this memory allows, and a "
        "small model that stays in the processor's cache goes below. *Peak memory* includes loading and mapped files.",
        "",
    ]
    return "\n".join(lines)


def _ratios(model: ModelResults) -> str:
    """Each mode over its peer's off, and over our own mode of the same kind."""
    rows = []
    for key in _in_order(model):
        definition = model.definition(key)
        off = model.off(key)
        own = ""
        if off is not None and off != key:
            own = str(over_tasks(paired_ratios(model.single[key], model.single[off])) or "")
        against = ""
        if definition["peer"] != OURS:
            weights = "float32" if definition["weights"] == "float32" else "int8"
            same = _only(model.keys(peer=OURS, kind=definition["kind"], weights=weights))
            if same is not None:
                against = str(over_tasks(paired_ratios(model.single[same], model.single[key])) or "")
        if own or against:
            rows.append((_label(key), own, against))
    head = ("mode", "over its own off", "Slipstream's same kind over it")
    return "\n".join(
        ["Paired ratios, geometric mean over tasks (95 % interval):", "", *table(head, rows), ""]
    )


def _tasks(model: ModelResults) -> str:
    tasks = sorted({sample.task for samples in model.single.values() for sample in samples})
    rows = []
    for key in _in_order(model):
        speeds = [[s.tokens_per_s for s in model.single[key] if s.task == task] for task in tasks]
        rows.append([_label(key), *(f"{statistics.median(each):.1f}" if each else "" for each in speeds)])
    return "\n".join([*table(["tokens/s, median", *tasks], rows), ""])


def _batches(model: ModelResults) -> str:
    size = max(len(sample.token_ids) for samples in model.batch.values() for sample in samples)
    rows = []
    for key in _in_order(model):
        if speeds := [sample.tokens_per_s for sample in model.batch.get(key, [])]:
            spread = f"{min(speeds):.1f} to {max(speeds):.1f}"
            rows.append((_label(key), f"{statistics.median(speeds):.1f}", spread))
    head = ("mode", "tokens/s together, median", "least and most")
    return "\n".join([f"{size} requests at once:", "", *table(head, rows), ""])


def _refusals(model: ModelResults) -> str:
    reasons = []
    for key, reason in model.refused.items():
        mode = key.removesuffix(" (batch)")
        reasons.append((_label(mode) + (f", {BATCH}" if mode != key else ""), reason))
    return refusals(reasons)


def _in_order(model: ModelResults) -> list[str]:
    """Modes with samples: by weights, then peer, as the catalogue has them."""
    weights = ["float32", "int8", "int4"]
    peers = list(NAMES)
    keys = [key for key in model.entries if key in model.single]
    return sorted(keys, key=lambda key: (weights.index(_parts(key)[2]), peers.index(_parts(key)[0])))
