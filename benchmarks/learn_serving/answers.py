"""10,000 answers while versions are promoted, rolled back, damaged and forgotten: text, memory, and what is on disk."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.kept import say
from benchmarks.learn_serving.drafts import BROKEN_NOISE, add_version, make_base
from benchmarks.learn_serving.server import (
    CLOSED_KEY,
    OPEN_KEY,
    SILENT,
    STEPS_PATH,
    LearningServer,
    ServerOptions,
)
from benchmarks.learn_serving.traffic import KEPT_WORDS, OUT_WORDS, Answered, answer_all, asked, open_client
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_TARGET
from slipstream.errors import LearnError
from slipstream.learn.decisions import by_hand
from slipstream.learn.decisions.by_hand import forget
from slipstream.learn.storage.events import EventLog
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import ring_identity
from slipstream.learn.storage.state import LearnState, StateStore
from slipstream.learn.versions.store import VersionStore
from slipstream.models import load_tokenizer
from slipstream.serve.auth import digest
from slipstream.text.prompts import encode_chat

AT_ONCE = 32
"""Half of the places, so that the learner works beside."""
CHUNK = 1000
SAMPLE_EVERY = 100
"""Answers between two looks at the memory."""
NUM_PARTS = 100
"""Parts of the run: after each the operator does something."""
WORKER = {"min_records": 48, "num_steps": 40, "max_records": 128, "poll_s": 0.2, "niceness": 0}
"""It shall come to versions of its own, whoever else uses the machine."""
MIB = 2**20
MIN_IDS = 4
"""Token ids in a row that are told from chance."""


@dataclass
class Operator:
    """What is done to the server while it answers, one act after another."""

    folder: LearnFolder
    base: str
    """The folder of the draft that the server was started with."""
    num_acts: Counter[str] = field(default_factory=Counter)
    number: int = 0
    owners: dict[str, str] = field(default_factory=dict)
    """The tenant of each version that was promoted for one."""

    def act(self) -> None:
        """The next act of the cycle."""
        acts: list[Callable[[], object]] = [
            self.promote_good,
            self.promote_broken,
            *[self.nothing] * 3,
            self.roll_back,
            self.promote_for_tenant,
            self.promote_good,
            self.damage,
            self.freeze,
            self.thaw,
            self.forget,
            self.serve_base,
            *[self.nothing] * 8,
        ]
        act = acts[self.number % len(acts)]
        self.number += 1
        try:
            act()
            self.num_acts[act.__name__] += 1
        except LearnError as error:
            say(f"  {act.__name__}: {error}")

    def promote_good(self) -> None:
        """A version that is the draft as it was before the noise."""
        by_hand.promote(self.folder, self._add(0.0))

    def promote_broken(self) -> None:
        """A version whose files are whole and whose weights are noise: the server has to roll it back."""
        by_hand.promote(self.folder, self._add(BROKEN_NOISE))

    def promote_for_tenant(self) -> None:
        """A version that drafts for one tenant alone."""
        tenant = f"{digest(OPEN_KEY)}/tenant-1"
        version = self._add(0.0, tenant)
        self.owners[version] = tenant  # before it can draft for anybody
        by_hand.promote(self.folder, version)

    def serve_base(self) -> None:
        """What the server was started with: the learner's own versions have something to replace."""
        by_hand.promote(self.folder, by_hand.BASE)

    def roll_back(self) -> None:
        """By hand, whatever serves."""
        by_hand.roll_back(self.folder)

    def damage(self) -> None:
        """A version that serves by the state's file and cannot be read."""
        version = self._add(0.0)
        file = VersionStore(self.folder).weights_file(version)
        file.write_bytes(file.read_bytes()[:-1] + b"?")

        def served(state: LearnState) -> LearnState:
            return state.with_scope(state.scope().promoted(version))

        StateStore(self.folder).change(served)

    def freeze(self) -> None:
        """Nothing may change."""
        by_hand.freeze(self.folder, True)

    def thaw(self) -> None:
        """It may again."""
        by_hand.freeze(self.folder, False)

    def forget(self) -> None:
        """A tenant's records go, and every version that learned from them."""
        forget(self.folder, f"{digest(OPEN_KEY)}/tenant-{self.number % 4}")

    def nothing(self) -> None:
        """The loop may act."""

    def _add(self, noise: float, tenant: str | None = None) -> str:
        identity = ring_identity(self.folder)
        if identity is None:
            raise LearnError("no record yet")
        return add_version(self.folder, identity, self.base, noise, self.number, tenant)


def answers(place: Path, number: int) -> dict[str, Any]:
    """The whole part; its server writes below `place`."""
    base = make_base(place / "base")
    say(f"{number:,} answers without speculation …")
    expected = _plain(number)
    folder = LearnFolder(place / "home/learn")
    options = ServerOptions(base, str(folder.path), max_num_seqs=2 * AT_ONCE, worker=WORKER, step_times=True)
    samples: list[dict[str, float]] = []
    began_s = time.monotonic()
    with LearningServer(options, place / "home") as server:
        found, operator = asyncio.run(_swapped(server, Operator(folder, base), number, samples))
        metrics, steps = _learned(server), _steps(server)
        running = looked_for(place / "home", folder, found)
    ended = looked_for(place / "home", folder, found)
    differing = [n for n in range(number) if found[n].token_ids != expected[n]]
    events = Counter(str(event["event"]) for event in EventLog(folder).read())
    versions = Counter(one.version or "base" for one in found.values())
    return {
        "answers": number,
        "tokens": sum(len(one.token_ids) for one in found.values()),
        "seconds": round(time.monotonic() - began_s),
        "differing": len(differing),
        "first_differing": differing[:5],
        "answers_by_base": versions["base"],
        "versions_that_drafted": len(versions) - ("base" in versions),
        "acts": dict(operator.num_acts),
        "events": dict(events),
        "metrics": metrics,
        "steps": steps,
        "tenants": drafted_for(found.values(), operator.owners),
        "memory": memory(samples),
        "privacy": {"while it runs": running, "ended": ended},
    }


def _plain(number: int) -> list[tuple[int, ...]]:
    """The answers of an engine without speculation, in this process."""
    engine = LLM(speculative_config={"method": "off"}, max_num_seqs=64, kv_cache_bytes=64 * MIB)
    found: list[tuple[int, ...]] = []
    for first in range(0, number, CHUNK):
        wanted = [asked(one) for one in range(first, min(first + CHUNK, number))]
        prompts = [
            encode_chat(engine.engine.tokenizer, [{"role": "user", "content": one.message}]) for one in wanted
        ]
        params = [
            SamplingParams(temperature=one.temperature, seed=one.number, max_tokens=one.max_tokens)
            for one in wanted
        ]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        found += [tuple(output.outputs[0].token_ids) for output in outputs]
        say(f"  {len(found):,} of {number:,}")
    return found


def _keep(found: dict[int, Answered], one: Answered, number: int) -> None:
    # The text of the request is a function of its number: 10,000 of them are not part of what is measured.
    found[one.asked.number] = replace(one, asked=replace(one.asked, message=""))
    if len(found) % (number // 10 or 1) == 0:
        say(f"  {len(found):,} of {number:,}")


async def _swapped(
    server: LearningServer, operator: Operator, number: int, samples: list[dict[str, float]]
) -> tuple[dict[int, Answered], Operator]:
    found: dict[int, Answered] = {}
    acting: list[Future[None]] = []
    hand = ThreadPoolExecutor(1)
    """One act after another."""

    def on_answer(one: Answered) -> None:
        _keep(found, one, number)
        if len(found) % SAMPLE_EVERY == 0:
            samples.append(_sample(server, len(found)))
        if len(found) % max(number // NUM_PARTS, 1) == 0:
            acting.append(hand.submit(operator.act))

    async with open_client(server.url) as client:
        await answer_all(client, map(asked, range(number)), AT_ONCE, on_answer)
    for act in acting:
        act.result()
    hand.shutdown()
    return found, operator


def _learned(server: LearningServer) -> dict[str, float]:
    """The server's own counts."""
    import httpx2

    found = {}
    for line in httpx2.get(f"{server.url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("slipstream_learn_") and "_created" not in name:
            name = re.sub(r'model_name="[^"]*",?', "", name.removeprefix("slipstream_learn_"))
            found[name.removesuffix("{}")] = float(value)
    return found


def _steps(server: LearningServer) -> dict[str, Any]:
    """What the server's steps took; see `StepTimes.status`."""
    import httpx2

    found: dict[str, Any] = (
        httpx2.get(server.url + STEPS_PATH, headers={"Authorization": f"Bearer {OPEN_KEY}"})
        .raise_for_status()
        .json()
    )
    return found


def drafted_for(answered: Iterable[Answered], owners: Mapping[str, str]) -> dict[str, int]:
    """Answers that the tenants' own versions drafted, and those of other tenants among them."""
    theirs = [one for one in answered if one.version in owners]
    return {
        "versions": len({one.version for one in theirs}),
        "answers": len(theirs),
        "of_others": sum(one.asked.tenant != owners[one.version] for one in theirs),
    }


# --- memory -----------------------------------------------------------------------------------------------------------


def _sample(server: LearningServer, number: int) -> dict[str, float]:
    learner = server.learner()
    try:
        own = 0 if learner is None else learner.memory_info().rss
    except psutil.Error:  # it ended meanwhile
        own = 0
    return {
        "answers": number,
        "server_mib": psutil.Process(server.process.pid).memory_info().rss / MIB,
        "learner_mib": own / MIB,
    }


def memory(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Resident memory by fifths of the run: medians of the server's, the most of the learner's."""
    parts = np.array_split(np.array([[one["server_mib"], one["learner_mib"]] for one in samples]), 5)
    server = [round(float(np.median(part[:, 0])), 1) for part in parts]
    return {
        "server_mib": server,
        "server_most_mib": [round(float(part[:, 0].max()), 1) for part in parts],
        "learner_most_mib": [round(float(part[:, 1].max()), 1) for part in parts],
        "server_growth_mib": round(server[-1] - server[1], 1),
        "samples": [{name: round(value, 1) for name, value in one.items()} for one in samples],
    }


# --- what is on disk --------------------------------------------------------------------------------------------------


@cache
def ids_of(words: str) -> tuple[int, ...]:
    """The token ids of `words` in a prompt, without those at their ends that its neighbours change."""
    tokenizer = load_tokenizer(EMBEDDED_TARGET)
    texts = [[{"role": "user", "content": f"A {one}. So."}] for one in (words, words[::-1])]
    first, second = (encode_chat(tokenizer, messages) for messages in texts)
    begin = next(n for n, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    end = next(n for n, pair in enumerate(zip(first[::-1], second[::-1], strict=False)) if pair[0] != pair[1])
    inside = tuple(first[begin : len(first) - end])[1:-1]
    assert len(inside) >= MIN_IDS, inside
    return inside


def needles(words: str) -> list[bytes]:
    """What to look for: the text in the usual encodings, its token ids as integers and as written lists."""
    ids = ids_of(words)
    return [
        words.encode(),
        words.encode("utf-16-le"),
        *(np.array(ids, kind).tobytes() for kind in ("<i4", "<i8", "<u2")),
        *(separator.join(map(str, ids)).encode() for separator in (", ", ",", " ")),
    ]


def looked_for(home: Path, folder: LearnFolder, found: dict[int, Answered]) -> dict[str, Any]:
    """Where something of those who opted out is found in any file; the same for the others, which shows that the
    search finds."""
    wanted = {
        "prompts of those who opted out": needles(OUT_WORDS),
        "names of those who opted out": [SILENT.encode(), CLOSED_KEY.encode(), digest(CLOSED_KEY).encode()],
        "answers of those who opted out": _answers_alone(found),
        "prompts of the others": needles(KEPT_WORDS),
    }
    hits: dict[str, list[str]] = {name: [] for name in wanted}
    num_files = num_bytes = 0
    for file in sorted(one for one in home.rglob("*") if one.is_file()):
        try:
            data = file.read_bytes()
        except FileNotFoundError:  # replaced meanwhile
            continue
        num_files, num_bytes = num_files + 1, num_bytes + len(data)
        for name, all_needles in wanted.items():
            if any(one in data for one in all_needles):
                hits[name].append(str(file.relative_to(home)))
    return {"files": num_files, "bytes": num_bytes, "found_in": hits}


def _answers_alone(found: dict[int, Answered], most: int = 300) -> list[bytes]:
    """The latest drawn answers of those who opted out that are in no other's answer."""
    others = b"|".join(
        np.array(one.token_ids, "<i4").tobytes() for one in found.values() if not one.asked.opted_out
    )
    drawn = [
        np.array(one.token_ids, "<i4").tobytes()
        for number, one in sorted(found.items())
        if one.asked.opted_out and one.asked.temperature and len(one.token_ids) >= 10
    ]
    return [one for one in drawn[-most:] if one not in others]
