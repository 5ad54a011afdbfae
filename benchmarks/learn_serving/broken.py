"""Versions that break after they were promoted: in memory while they serve, on disk, or from their first request on.

The base drafter is the embedded draft without noise. A serving version is compared with the base drafter, so one that
breaks is told by what it costs: beside a base drafter that itself drafts nearly nothing there is little to lose and
little to be seen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness.kept import say
from benchmarks.learn_serving.drafts import BROKEN_NOISE, add_version, make_base
from benchmarks.learn_serving.server import DEPTH
from benchmarks.learn_serving.traffic import Asked, asked
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.core.request import RequestOptions
from slipstream.draft.combine.versions import VersionsDrafter
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.learn.decisions import by_hand
from slipstream.learn.session import LearnSession, SessionSettings
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.state import StateStore
from slipstream.learn.versions.store import VersionStore
from slipstream.models import load_tokenizer
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_chat

IDLE = {"min_records": 10**9, "poll_s": 60.0}
"""For a learner that has nothing to do."""
BAR = 200
LIMIT = 600
"""Requests after which a try has failed for good."""
AT_ONCE = 8
NUM_TOKENS = 16
WAYS = ("in memory", "at once")
ALARM = "version_rolled_back"


def broken(place: Path, tries: int) -> dict[str, Any]:
    """The whole part."""
    cells = [one_try(place, way, number) for way in WAYS for number in range(tries)]
    on_disk = [damaged_on_disk(place / f"disk-{number}", place, number) for number in range(tries)]
    return {"bar": BAR, "tries": cells, "damaged_on_disk": on_disk}


def one_try(place: Path, way: str, number: int) -> dict[str, Any]:
    """Promote a version, break it, and count requests until it is rolled back and the alarm is there.

    "in memory": a good version serves for a while first, then its weights in memory become noise. "at once": its files
    are whole and its weights are noise.
    """
    folder = LearnFolder(place / f"{way.replace(' ', '-')}-{number}")
    client, session = _begun(place, folder)
    asking = _Asking(client, first=1000 * number)
    try:
        served = 20 + 40 * number if way == "in memory" else 0
        version = add_version(
            folder, session.identity, EMBEDDED_DRAFT, 0.0 if way == "in memory" else BROKEN_NOISE, number + 1
        )
        by_hand.promote(folder, version)
        _wait_for(lambda: session.status().serving == version)
        asking.until(lambda: False, served)
        if session.status().serving != version:
            raise RuntimeError("a good version was rolled back")
        if way == "in memory":
            draft = make_base(place / f"broken-{number}", BROKEN_NOISE, number + 1)
            asyncio.run(client.ask(lambda engine: _break(engine, session, version, draft)))
        needed = asking.until(lambda: session.status().serving != version, LIMIT)
        time.sleep(1.5)  # alarms are looked at once a second
        status = session.status()
        found = {
            "way": way,
            "served_well": served,
            "requests": needed,
            "rolled_back": status.serving != version,
            "alarm": ALARM in status.faults,
            "drafted_by_it": status.by_version.get(version, (0, 0.0))[0],
            "faults": asyncio.run(client.ask(Engine.integrity)),
        }
    finally:
        session.close()
        client.close()
    say(f"  {way}, after {served}: {needed} requests, rolled back {found['rolled_back']}")
    return found


def damaged_on_disk(where: Path, place: Path, number: int) -> dict[str, Any]:
    """A promoted version whose file loses a byte: the next server does not serve it, and says so."""
    folder = LearnFolder(where)
    client, session = _begun(place, folder)
    version = add_version(folder, session.identity, EMBEDDED_DRAFT, 0.0, number + 1)
    by_hand.promote(folder, version)
    _wait_for(lambda: session.status().serving == version)
    session.close()
    client.close()
    file = VersionStore(folder).weights_file(version)
    data = bytearray(file.read_bytes())
    data[(number * 7919) % len(data)] ^= 1 << number % 8
    file.write_bytes(data)
    client, session = _begun(place, folder)
    try:
        asking = _Asking(client, 0)
        asking.until(lambda: False, 8)
        status = session.status()
        return {
            "served_by_it": status.by_version.get(version, (0, 0.0))[0],
            "alarm": ALARM in status.faults,
            "retired": version in StateStore(folder).read().retired,
        }
    finally:
        session.close()
        client.close()


def _begun(place: Path, folder: LearnFolder) -> tuple[AsyncEngine, LearnSession]:
    base = {
        "method": "draft_model",
        "model": str(EMBEDDED_DRAFT),
        "num_speculative_tokens": DEPTH,
    }
    engine = make_engine(
        None, {"method": "versions", "drafter": base}, {"max_num_seqs": 32, "kv_cache_bytes": 64 * 2**20}
    )
    client = AsyncEngine(engine=engine)
    return client, LearnSession(client, SessionSettings(folder.path, 8 * 2**20, worker=IDLE))


def _break(engine: Engine, session: LearnSession, version: str, draft: str) -> None:
    """Have a version draft with other weights, as if its own had been overwritten; no request may be under way."""
    drafter = engine.drafter_as(VersionsDrafter)
    base = drafter.options.base()
    loaded = drafter.prepare(version, replace(base, options={**base.options, "model": draft}))
    drafter.change([], [], session._served_versions.choose, revoke=[version])
    drafter.change([loaded], [version], session._served_versions.choose)


class _Asking:
    """Requests one after another, some at a time."""

    def __init__(self, client: AsyncEngine, first: int) -> None:
        self._client, self._next = client, first
        self._tokenizer = load_tokenizer(EMBEDDED_TARGET)

    def until(self, ended: Callable[[], bool], most: int) -> int:
        """Ask until `ended`, at most so often; returns how many were asked."""
        asked_before = self._next

        async def work() -> None:
            while not ended() and self._next < asked_before + most:
                number, self._next = self._next, self._next + 1
                await self._ask(asked(number, NUM_TOKENS))

        async def every() -> None:
            await asyncio.gather(*(work() for _ in range(AT_ONCE)))

        asyncio.run(every())
        return self._next - asked_before

    async def _ask(self, one: Asked) -> None:
        prompt = encode_chat(self._tokenizer, [{"role": "user", "content": one.message}])
        params = SamplingParams(temperature=one.temperature, seed=one.number, max_tokens=one.max_tokens)
        options = RequestOptions(task=one.task)
        async for _ in self._client.stream(
            prompt, params, request_id=f"request-{one.number}", options=options
        ):
            pass


def _wait_for(what: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline_s = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline_s:
            raise RuntimeError("the version was not served in time")
        time.sleep(0.02)
