"""What learning from served answers gains when a topic appears that the draft never saw.

    python -m benchmarks.learn --data CHAT.jsonl --floor DRAFT [--quick]
    python -m benchmarks.learn --data CHAT.jsonl --floor DRAFT --topic math --temperature 1 --output RESULT.json
    python -m benchmarks.learn --data CHAT.jsonl --floor DRAFT --model TARGET --output RESULT.json

`--data` are conversations by task, `--floor` is a draft that was trained without `--topic`, a weak one or a
well-trained one, with the vocabulary of the target: the embedded one, or `--model`, such as a cost-expanded one. The
target answers prompts of the other tasks, then as many of the topic between them. The draft learns from these answers
as it would beside a server (`slipstream learn replay`), and each version that is promoted drafts other, held-out
prompts of both kinds. Beside it stands a draft that learned offline from all answers to the topic at once, for three
times as long.

Then 50 candidates are made worse on purpose, from the version that serves in the end: noise on its weights, wrong
labels, one task without an anchor. The judge sees them on held-out answers as it sees honest ones.

Everything is counterfactual, and exact but for time: an answer is the same with any draft. Cells that have ended are
kept. Without --output the result is docs/benchmarks/learn.json with its picture, of sql at temperature 0 with the
embedded target; a --quick run has learn_quick.json and no picture. Any other has its picture beside its result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.command import DOCS, command
from benchmarks.harness.kept import Kept, say
from benchmarks.harness.pictures import drawing
from slipstream.assets import EMBEDDED_NAME
from slipstream.engine.factory import make_engine
from slipstream.learn.capture.traces import asked_trace
from slipstream.learn.decisions.judge import JudgeOptions, judge
from slipstream.learn.decisions.replay import ReplayOptions, by_task, replay
from slipstream.learn.learners.base import LearnedWeights, Learner
from slipstream.learn.learners.floor import DraftFloor
from slipstream.learn.learners.learner_options import LearnerOptions
from slipstream.learn.learners.registry import make_learner
from slipstream.learn.learners.scoring import Scorer, replayed
from slipstream.learn.records.selection import anchor_of, split
from slipstream.learn.records.served import Purpose, ServedRecord
from slipstream.profiling.provenance import provenance
from slipstream.sampling.params import SamplingParams

RESULT = DOCS / "learn.json"
QUICK_RESULT = RESULT.with_name("learn_quick.json")
PICTURE = DOCS.parent / "images/learning.svg"
DEPTH = 4
NUM_BAD = 50
OFFLINE_FACTOR = 3
EVERY, WINDOW, NUM_ANCHORS = 120, 600, 400
"""Requests between candidates, and of how many each learns: about what a server does."""


def main() -> None:
    args = options_of()
    torch.set_num_threads(1)
    part = 3 if args.quick else 1
    before, after, held_out, steps = 180 // part, args.after // part, 480 // part, 120 // part
    kept = Kept(args.output, {name: str(value) for name, value in vars(args).items()})
    options = LearnerOptions(num_steps=steps, batch_rows=4 if args.quick else 8, row_length=256, depth=DEPTH)
    learner = make_learner(args.learner, DraftFloor(str(args.floor)), options)
    trace, other = answers(args, before, after, held_out)
    shift = sum(int(one.request_id.split("-")[1]) < before for one in trace)
    rounds = ReplayOptions(every=EVERY // part, window=WINDOW // part, num_anchors=NUM_ANCHORS // part)
    final: list[LearnedWeights] = []
    loop = kept.cell("the loop", partial(online, learner, trace, other, rounds, final))
    offline = kept.cell("offline", partial(trained_offline, learner, trace, other, args.topic, rounds))
    if not final:
        learned = replay(trace, learner, rounds, JudgeOptions(depth=DEPTH), keep=final.append)
        say(f"went through the loop again for its last version ({learned.learn_s:.0f} s)")
    bad = kept.cell("worse on purpose", partial(worse, learner, trace, final, NUM_BAD // part))
    result = {
        "provenance": provenance(num_threads=1),
        "settings": {
            "topic": args.topic,
            "temperature": args.temperature,
            "target": args.model or EMBEDDED_NAME,
            "floor": args.about_floor,
        },
        "options": {"learner": asdict(options), "replay": asdict(rounds), "judge": asdict(JudgeOptions())},
        "shift_after": shift,
        "loop": loop,
        "offline": offline,
        "worse": bad,
        "summary": summary(loop, offline, args.topic, shift),
    }
    kept.finish(result)
    if args.picture is not None:
        draw(result, args.topic, args.picture)
    print(json.dumps(result["summary"], indent=1))
    print(f"worse on purpose: {bad['promoted']} of {bad['tries']} promoted")


def options_of(given: list[str] | None = None) -> argparse.Namespace:
    """The command line, with `output` and `picture`, which is None where none is drawn."""
    parser = command(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="conversations: task and messages")
    parser.add_argument("--floor", type=Path, required=True, help="a draft that never saw the topic")
    parser.add_argument("--about-floor", default="", help="how the floor was trained, for the result")
    parser.add_argument("--model", help="a target's folder; the embedded one unless given")
    parser.add_argument("--topic", default="sql")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--learner", default="whole")
    parser.add_argument(
        "--after", type=int, default=1800, help="requests from the one on with which the topic appears"
    )
    parser.add_argument("--quick", action="store_true", help="a third of the requests and of the steps")
    parser.add_argument("--output", type=Path, help="the result, as JSON")
    args = parser.parse_args(given)
    if args.output is None:
        names = ("model", "topic", "temperature", "learner", "after")
        others = [name for name in names if getattr(args, name) != parser.get_default(name)]
        if others:
            parser.error(f"give --output: {RESULT.name} is not of another {' or '.join(others)}")
        args.output = QUICK_RESULT if args.quick else RESULT
    whole = None if args.quick else PICTURE
    pictures = {RESULT: whole, QUICK_RESULT: None}
    args.picture = pictures.get(args.output.resolve(), args.output.with_suffix(".svg"))
    return args


def answers(
    args: argparse.Namespace, before: int, after: int, held_out: int
) -> tuple[list[ServedRecord], list[ServedRecord]]:
    """(the trace, held-out answers of all tasks): the target's own, to prompts in the file's order."""
    topic = args.topic
    prompts: dict[str, list[Any]] = defaultdict(list)
    with args.data.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            messages = [{"role": "user", "content": row["messages"][0]["content"]}]
            if len(messages[0]["content"]) < 600:
                prompts[row["task"]].append((row["task"], messages))
    tasks = [task for task in sorted(prompts) if task != topic]

    def mixed(number: int, with_topic: bool) -> list[Any]:
        order = [
            topic if with_topic and at % 2 else tasks[(at // (1 + with_topic)) % len(tasks)]
            for at in range(number)
        ]
        return [prompts[task].pop() for task in order if prompts[task]]

    params = SamplingParams(temperature=args.temperature, max_tokens=64, seed=1)
    asked = [mixed(before, False) + mixed(after, True), mixed(held_out, True)]
    engine = make_engine(args.model, None, {"max_num_seqs": 32})
    started_s = time.monotonic()
    found = [asked_trace(engine, one, params) for one in asked]
    say(f"{sum(map(len, found)):,} answers: {time.monotonic() - started_s:.0f} s")
    return found[0], found[1]


def drafted(scorer: Scorer, records: list[ServedRecord]) -> dict[str, float]:
    """Tokens a pass by task."""
    return by_task(records, [replayed(hits, DEPTH) for hits in scorer.hits(records)])


def online(
    learner: Learner,
    trace: list[ServedRecord],
    other: list[ServedRecord],
    rounds: ReplayOptions,
    final: list[LearnedWeights],
) -> dict[str, Any]:
    """The loop, with what each promoted version drafts on the held-out answers."""
    versions: list[LearnedWeights] = []
    report = replay(
        trace,
        learner,
        rounds,
        JudgeOptions(depth=DEPTH),
        keep=versions.append,
        on_round=lambda one: say(f"  after {one.after}: {one.why}; {one.served['all']:.2f}"),
    )
    final += versions
    swaps = [one.after for one in report.rounds if one.promoted]
    on_held_out = [
        {"after": after, "tokens_a_pass": drafted(learner.scorer(one.tensors), other)}
        for after, one in zip(swaps, versions, strict=True)
    ]
    floor = drafted(learner.scorer(None), other)
    return {**report.as_json(), "held_out": [{"after": 0, "tokens_a_pass": floor}, *on_held_out]}


def trained_offline(
    learner: Learner,
    trace: list[ServedRecord],
    other: list[ServedRecord],
    topic: str,
    rounds: ReplayOptions,
) -> dict[str, Any]:
    """A draft that learns from all answers to the topic at once."""
    records = split(trace, Purpose.TRAIN)
    own = [one for one in records if one.task == topic]
    anchor = anchor_of([one for one in records if one.task != topic], Purpose.TRAIN, 2 * rounds.num_anchors)
    longer = replace(learner.options, num_steps=OFFLINE_FACTOR * learner.options.num_steps)
    learned = type(learner)(learner.floor, longer).learn(own, anchor)
    return {
        "num_records": len(own),
        "figures": learned.figures,
        "tokens_a_pass": drafted(learner.scorer(learned.tensors), other),
    }


def worse(
    learner: Learner, trace: list[ServedRecord], final: list[LearnedWeights], tries: int
) -> dict[str, Any]:
    """Candidates that are worse on purpose, judged as honest ones are."""
    if not final:
        return {"tries": 0, "promoted": 0, "why": [], "note": "nothing was promoted"}
    serving = final[-1].tensors
    incumbent = learner.scorer(serving)
    held_out, records = split(trace, Purpose.JUDGE), split(trace, Purpose.TRAIN)
    tasks = sorted({one.task for one in records})
    rng = np.random.default_rng(0)
    why = []
    for number in range(tries):
        kind = ("noise", "noise", "noise", "wrong labels", "one task")[number % 5]
        if kind == "noise":
            generator = torch.Generator().manual_seed(number)
            share = float(rng.uniform(0.05, 0.5))
            tensors = {
                name: one
                + share * one.float().std().nan_to_num() * torch.randn(one.shape, generator=generator)
                for name, one in serving.items()
            }
        else:
            short = replace(learner.options, num_steps=max(10, learner.options.num_steps // 4), seed=number)
            teacher = type(learner)(learner.floor, short)
            if kind == "one task":
                chosen = [one for one in records if one.task == tasks[number // 5 % len(tasks)]]
            else:
                chosen = [mislabelled(one, rng) for one in records[:100]]
            tensors = teacher.learn(chosen, start=serving).tensors
        verdict = judge(learner.scorer(tensors), incumbent, held_out, options=JudgeOptions(depth=DEPTH))
        why.append({"kind": kind, "promoted": verdict.better, "why": verdict.why})
        say(f"  {number + 1}: {kind}: {verdict.why}")
    return {"tries": tries, "promoted": sum(one["promoted"] for one in why), "why": why}


def mislabelled(record: ServedRecord, rng: np.random.Generator) -> ServedRecord:
    """The rows of the target in another order."""
    order = rng.permutation(len(record.rows))
    rows = replace(
        record.rows, top_ids=record.rows.top_ids[order], top_log_probs=record.rows.top_log_probs[order]
    )
    return replace(record, rows=rows)


def summary(loop: dict[str, Any], offline: dict[str, Any], topic: str, shift: int) -> dict[str, Any]:
    """The bars, on held-out answers."""
    static = loop["held_out"][0]["tokens_a_pass"]
    best = offline["tokens_a_pass"][topic]

    def share(one: dict[str, Any]) -> float:
        return (one["tokens_a_pass"][topic] - static[topic]) / (best - static[topic])

    there = [one["after"] - shift for one in loop["held_out"] if one["after"] > shift and share(one) >= 0.9]
    last = loop["held_out"][-1]["tokens_a_pass"]
    before = [one for one in loop["held_out"] if one["after"] <= shift][-1]["tokens_a_pass"]
    return {
        "topic_static": static[topic],
        "topic_offline": best,
        "topic_online": last[topic],
        "times_static": last[topic] / static[topic],
        "share_of_offline_gain": share(loop["held_out"][-1]),
        "requests_to_90_percent": there[0] if there else None,
        "old_topics_since_shift": {
            task: last[task] / before[task] - 1 for task in before if task not in (topic, "all")
        },
        "old_topics_over_floor": {
            task: last[task] / static[task] - 1 for task in static if task not in (topic, "all")
        },
        "learn_s": loop["learn_s"],
    }


def draw(result: dict[str, Any], topic: str, picture: Path) -> None:
    """Tokens a pass over the requests, with the shift and the swaps."""
    rounds = result["loop"]["rounds"]
    with drawing(picture, 8, 3.6) as figure:
        axes = figure.subplots()
        at = [one["after"] for one in rounds]
        axes.step(at, [one["served"]["all"] for one in rounds], where="post", label="learning, all")
        axes.step(
            at, [one["floor"]["all"] for one in rounds], where="post", label="static draft, all", color="grey"
        )
        late = [one for one in rounds if topic in one["served"]]
        places = [one["after"] for one in late]
        axes.step(places, [one["served"][topic] for one in late], where="post", label=f"learning, {topic}")
        axes.step(
            places,
            [one["floor"][topic] for one in late],
            where="post",
            label=f"static draft, {topic}",
            ls="--",
        )
        axes.axvline(result["shift_after"], color="black", lw=1, label=f"{topic} appears")
        for number, one in enumerate(one for one in rounds if one["promoted"]):
            axes.axvline(one["after"], color="green", lw=0.6, ls=":", label=None if number else "swap")
        axes.set(xlabel="requests", ylabel="tokens a pass", ylim=(1, None))
        axes.legend(fontsize=8)


if __name__ == "__main__":
    main()
