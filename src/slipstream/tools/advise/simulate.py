"""Simulates the engine's scheduler on a recording: counted steps, measured costs.

Each request takes exactly the steps that it would take, since its drafts and what of them is right are known at every
place. Only times are estimates. Requests come as in a closed loop, or as a trace says.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.kv.prefix import PrefixIndex
from slipstream.tools.advise.candidates import OFF, Candidate, Setting
from slipstream.tools.advise.costs import StepCosts
from slipstream.tools.advise.recording import RecordedRequest
from slipstream.tools.advise.scores import DraftScores

MAX_ROWS = 512
MAX_REQUESTS = 32

ChooseSetting = Callable[[str, int], Setting]
"""From a task and the number of requests that decode in a step."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """What a simulated request took."""

    place: int
    """In the recording."""
    arrival_s: float
    first_token_s: float
    """Since its arrival."""
    total_s: float
    num_tokens: int


@dataclass(slots=True)
class Simulated:
    """What a simulated run did."""

    wall_s: float = 0.0
    num_tokens: int = 0
    num_steps: int = 0
    """Steps of the engine."""
    num_request_steps: int = 0
    """Steps of requests: one for each that decoded in a step."""
    num_drafted: int = 0
    num_accepted: int = 0
    draft_s: float = 0.0
    busy_s: float = 0.0
    """In steps; the rest of the time no request was there."""
    in_flight_s: float = 0.0
    """Requests times seconds."""
    requests: list[SimulatedRequest] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def tau(self) -> float:
        """Tokens a step of a request, the target's own included."""
        return self.num_tokens / self.num_request_steps if self.num_request_steps else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None


@dataclass(eq=False)
class _Held:
    token_ids: list[int]
    tenant: str = ""
    keys: list[int] = field(default_factory=list)


class SimulatedCache:
    """Texts computed so far, found by the engine's own index of prefixes. Nothing is evicted."""

    def __init__(self, is_on: bool = True, fast_prompts: bool = False) -> None:
        """`is_on` is False where the engine does not reuse prefixes; `fast_prompts` is the engine's."""
        self._is_on = is_on
        self._fast_prompts = fast_prompts
        self._index: PrefixIndex[_Held] = PrefixIndex()

    def num_cached(self, prompt: Seq[int]) -> int:
        """Leading tokens that need not be computed; the last one always is."""
        if not self._is_on:
            return 0
        _, common = self._index.longest(self._entry_ids(prompt, len(prompt)), "")
        return min(common, len(prompt) - 1)

    def add(self, token_ids: Seq[int], num_prompt: int) -> None:
        """A text whose entries are in the cache from now on; its first `num_prompt` tokens are a prompt."""
        if self._is_on:
            self._index.extend(_Held(self._entry_ids(token_ids, num_prompt)))

    def _entry_ids(self, token_ids: Seq[int], num_prompt: int) -> list[int]:
        """As `Sequence.entry_ids`: an answer's entries are not those of the same text in a prompt."""
        fast = max(num_prompt - 1, 0) if self._fast_prompts else 0
        return [*(~token_id for token_id in token_ids[:fast]), *token_ids[fast:]]


@dataclass(slots=True)
class _Running:
    run: int
    place: int
    known: RecordedRequest
    arrival_s: float
    pending: int
    """Prompt rows to compute."""
    length: int = 0
    """Tokens of the answer so far."""
    first_s: float = 0.0


class Simulator:
    """Runs requests of one recording."""

    def __init__(
        self,
        requests: Seq[RecordedRequest],
        candidates: Seq[Candidate],
        scores: Seq[DraftScores],
        costs: StepCosts,
        max_rows: int = MAX_ROWS,
        max_requests: int = MAX_REQUESTS,
        new_cache: Callable[[], SimulatedCache] = SimulatedCache,
    ) -> None:
        """`new_cache` makes an empty cache, which keeps prompts for later ones that begin alike as the engine does."""
        self._new_cache = new_cache
        self._cache = self._new_cache()
        self._requests = requests
        self._candidates = candidates
        self._scores = list(scores)
        self._used = self._scores
        self._costs = costs
        self._max_rows = max_rows
        self._max_requests = min(max_requests, max_rows)

    def closed_loop(
        self, places: Seq[int], concurrency: int, choose: ChooseSetting, used: Seq[int] | None = None
    ) -> Simulated:
        """So many requests at any time until all are answered, from empty caches.

        `used` are the candidates that `choose` may choose; None is all.
        """
        self._used = self._scores if used is None else [self._scores[candidate] for candidate in used]
        waiting = deque((place, 0.0) for place in places)
        return self._run(waiting, concurrency, choose, is_closed=True)

    def arrivals(
        self, coming: Seq[tuple[int, float]], choose: ChooseSetting, used: Seq[int] | None = None
    ) -> Simulated:
        """Requests by place and second of arrival, in order; those that find no room wait."""
        self._used = self._scores if used is None else [self._scores[candidate] for candidate in used]
        return self._run(deque(coming), self._max_requests, choose, is_closed=False)

    def _run(
        self, waiting: deque[tuple[int, float]], most: int, choose: ChooseSetting, is_closed: bool
    ) -> Simulated:
        for scores in self._used:
            scores.begin()
        self._cache = self._new_cache()
        runs = itertools.count()
        done = Simulated()
        running: list[_Running] = []
        now_s = 0.0
        while waiting or running:
            if not running and not is_closed:
                now_s = max(now_s, waiting[0][1])
            while waiting and len(running) < most and (is_closed or waiting[0][1] <= now_s):
                place, arrival_s = waiting.popleft()
                known = self._requests[place]
                if known.num_output:
                    at_s = now_s if is_closed else arrival_s
                    prompt = known.prompt_token_ids
                    rows = len(prompt) - self._cache.num_cached(prompt)
                    running.append(_Running(next(runs), place, known, at_s, rows))
            if not running:
                continue
            step_s = self._step(running, choose, done)
            now_s += step_s
            done.busy_s += step_s
            done.in_flight_s += step_s * len(running)
            self._note(running, now_s, done)
            running = [one for one in running if one.length < one.known.num_output]
        done.wall_s = now_s
        return done

    def _step(self, running: Seq[_Running], choose: ChooseSetting, done: Simulated) -> float:
        """One step for all that run; returns its seconds."""
        rows = self._share_rows(running)
        decoding = [one for one in running if rows[one.run] == one.pending or not one.pending]
        spare = (self._max_rows - sum(rows.values())) // len(running)
        prompt_rows = sum(rows.values()) - len(decoding)
        checked = accepted = 0
        levels: dict[int, tuple[int, int]] = {}
        reading: dict[int, int] = {}
        context = 0
        for one in running:
            setting = choose(one.known.task, max(len(decoding), 1))
            if one.pending:
                reading[setting.candidate] = reading.get(setting.candidate, 0) + rows[one.run]
                if rows[one.run] == one.pending:
                    self._cache.add(one.known.prompt_token_ids, len(one.known.prompt_token_ids))
            one.pending -= min(rows[one.run], one.pending)
        for one in decoding:
            setting = choose(one.known.task, len(decoding))
            nodes, right = self._draft(one, setting, spare, levels)
            context += len(one.known.prompt_token_ids) + one.length
            emitted = min(right + 1, one.known.num_output - one.length)
            checked, accepted = checked + nodes, accepted + min(right, emitted)
            one.length += emitted
            done.num_tokens += emitted
        done.num_steps += 1
        done.num_request_steps += len(decoding)
        done.num_drafted += checked
        done.num_accepted += accepted
        number = len(decoding)
        # A step of prompts alone is a step too: what rows of prompts add is measured on one that decodes.
        mean = context / number if number else None
        seconds = self._costs.step_s(max(number, 1), checked, accepted, mean)
        seconds += self._costs.prompt_s(prompt_rows)
        drafting = self._drafting_s(levels, reading)
        done.draft_s += drafting
        return seconds + drafting

    def _draft(
        self, one: _Running, setting: Setting, spare: int, levels: dict[int, tuple[int, int]]
    ) -> tuple[int, int]:
        """(nodes, right ones) of a request's draft; counts the call in `levels`, candidate to (requests, levels)."""
        if setting.is_off:
            return 0, 0
        limit = min(spare, one.known.max_tokens - one.length - 1)
        if setting.depth:
            limit = min(limit, setting.depth)
        if limit <= 0:
            return 0, 0
        nodes, _, right = self._scores[setting.candidate].draft(one.run, one.place, one.length, limit)
        calls, deepest = levels.get(setting.candidate, (0, 0))
        wanted = setting.depth and limit  # a drafter drafts all of it, also where the draft is shorter
        levels[setting.candidate] = calls + 1, max(deepest, wanted or nodes)
        return nodes, right

    def _drafting_s(self, levels: dict[int, tuple[int, int]], reading: dict[int, int]) -> float:
        seconds = 0.0
        for candidate, (calls, deepest) in levels.items():
            seconds += self._costs.draft_s(self._candidates[candidate].name, calls, deepest)
        for candidate, rows in reading.items():
            if candidate != OFF.candidate:
                seconds += self._costs.draft_prompt_s(self._candidates[candidate].name, rows)
        return seconds

    def _share_rows(self, running: Seq[_Running]) -> dict[int, int]:
        """By run: one for each that decodes, and what is left shared by prompts, as the scheduler does."""
        rows = {one.run: 1 for one in running if not one.pending}
        prompts = sorted((one for one in running if one.pending), key=lambda one: one.pending)
        left = self._max_rows - len(rows)
        for number, one in enumerate(prompts):
            share = left // (len(prompts) - number)
            rows[one.run] = min(one.pending, max(share, 1)) if left else 0
            left -= rows[one.run]
        return rows

    def _note(self, running: Seq[_Running], now_s: float, done: Simulated) -> None:
        for one in running:
            if one.length and not one.first_s:
                one.first_s = now_s
            if one.length >= one.known.num_output:
                prompt = one.known.prompt_token_ids
                self._cache.add([*prompt, *one.known.output_token_ids[:-1]], len(prompt))
                for scores in self._used:
                    scores.finish(one.run, one.place)
                done.requests.append(
                    SimulatedRequest(
                        one.place,
                        one.arrival_s,
                        one.first_s - one.arrival_s,
                        now_s - one.arrival_s,
                        one.length,
                    )
                )


def always(setting: Setting) -> ChooseSetting:
    """The same for every request."""
    return lambda task, number: setting
