"""Watches a vLLM server: reads its metrics, keeps their history, and gives the alarms what they judge."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import httpx2
from prometheus_client import CollectorRegistry

from slipstream.control.monitor.alarms import Alarm, AlarmKind, Alarms, FinishedRequest
from slipstream.control.monitor.causes import Traits
from slipstream.errors import RemoteError
from slipstream.serve.metrics.alarm_metrics import AlarmMetrics
from slipstream.serve.metrics.instruments import Instruments
from slipstream.stats.shift import FALSE_ALARM_RATE, Bets, Value
from slipstream.tools.handoff.history import READ_EVERY_S, ReadingInterval, ServerHistory
from slipstream.tools.handoff.reading import EngineCounts, added, parse_reading

logger = logging.getLogger("slipstream.tools.handoff.alarms")

TASK = "all"
"""vLLM's metrics know no tasks: all requests are one."""
UNREACHABLE_READINGS = 3
"""Failed readings one after the other that raise an alarm."""
MIN_REACHED = 32
"""Draft positions that an observation has at least."""
READ_TIMEOUT_S = 5.0
CLEARING_EVIDENCE = 100.0
"""For the opposite, after which it is no longer said."""
_EVEN = 0.5


@dataclass(frozen=True, slots=True)
class WatchedServer:
    """A server that is watched."""

    url: str
    """Without `/v1` and without a trailing slash."""
    model: str
    """As clients name it."""
    method: str
    """The drafter, as it is shown."""
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class AlarmLog:
    """Tells of alarms as they are raised and cleared."""

    def __init__(self, metrics: AlarmMetrics) -> None:
        self._metrics = metrics
        self.cleared: deque[tuple[Alarm, float, str]] = deque(maxlen=20)
        """Cleared alarms, the latest first: alarm, time and reason."""

    def on_raise(self, alarm: Alarm) -> None:
        self._metrics.on_alarm(alarm, raised=True)
        logger.warning("alarm raised: %s", alarm.message, extra={"fields": _fields(alarm)})

    def on_clear(self, alarm: Alarm, why: str) -> None:
        self._metrics.on_alarm(alarm, raised=False)
        self.cleared.appendleft((alarm, time.time(), why))
        logger.warning("alarm cleared: %s", why, extra={"fields": _fields(alarm)})


def _fields(alarm: Alarm) -> dict[str, object]:
    return {"kind": alarm.kind, "since": alarm.since, "value": alarm.value}


class SlowerTest:
    """Bets on which side of a pair is faster: a sign test that may be read after every pair.

    Where the side with speculation is faster in at least half of the pairs, the evidence reaches 1 / rate with
    probability at most the rate, however long one looks (`stats.shift`). It says nothing of by how much.
    """

    def __init__(self) -> None:
        self.is_slower = False
        self.num_pairs = 0
        """Up to the decision, or since it."""
        self.num_slower = 0
        """Pairs in which speculation was slower."""
        self._is_decided = False
        self._bets = self._new()

    def add(self, speedup: float) -> None:
        """Count a pair: tokens a second with speculation over those without."""
        if self._is_decided:
            self.num_pairs, self.num_slower, self._is_decided = 0, 0, False
        self.num_pairs += 1
        self.num_slower += speedup < 1
        self._bets.add(Value(1.0 if speedup > 1 else 0.0 if speedup < 1 else _EVEN))
        if self._bets.evidence >= (CLEARING_EVIDENCE if self.is_slower else 1 / FALSE_ALARM_RATE):
            self.is_slower, self._is_decided = not self.is_slower, True
            self._bets = self._new()

    def begin(self) -> None:
        """Restart the test."""
        self.is_slower, self.num_pairs, self.num_slower, self._is_decided = False, 0, 0, False
        self._bets = self._new()

    def _new(self) -> Bets:
        return Bets(_EVEN, weight=1.0, variance=_EVEN**2, below=not self.is_slower)


class Watch:
    """One server's readings, history and alarms. Used from the event loop only."""

    def __init__(self, server: WatchedServer, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self.registry = CollectorRegistry()
        self.history = ServerHistory(server.method)
        metrics = AlarmMetrics(Instruments(self.registry), str)
        for kind in (AlarmKind.ACCEPTANCE_DRIFT, AlarmKind.TRUNCATION):
            metrics.expect(kind, TASK, None)
        for kind in (AlarmKind.UNDER_BREAK_EVEN, AlarmKind.SERVER_UNREACHABLE):  # of the whole server
            metrics.expect(kind, None, None)
        self.log = AlarmLog(metrics)
        self.alarms = Alarms(self.log.on_raise, self._on_clear, unit="observations")
        self.slower = SlowerTest()
        self.pause: str | None = None
        """Why the server is not to be read now, as during a restart of ours; None: it is."""
        self.fault: str | None = None
        """Why the last reading failed; None where it did not."""
        self._clock = clock
        self._read_s = clock()
        self._num_failed = 0
        self._open: list[EngineCounts] = []
        self._turnover = 1

    @property
    def age_s(self) -> float:
        """Since the last good reading."""
        return self._clock() - self._read_s

    async def run(self) -> None:
        """Read every few seconds until cancelled."""
        async with httpx2.AsyncClient(headers=self.server.headers, timeout=READ_TIMEOUT_S) as client:
            while True:
                if self.pause is None:
                    await self.read(client)
                await asyncio.sleep(READ_EVERY_S)

    async def read(self, client: httpx2.AsyncClient) -> None:
        """One reading; a failed one is kept in `fault`, and is an alarm when it repeats itself."""
        try:
            response = await client.get(f"{self.server.url}/metrics")
            if response.status_code != 200:
                raise RemoteError(f"its metrics answer HTTP {response.status_code}")
            reading = await asyncio.to_thread(parse_reading, response.text, self._clock())
        except (httpx2.HTTPError, httpx2.InvalidURL, RemoteError) as error:
            if self.pause is None:  # not where it was stopped meanwhile, on purpose
                self.on_fault(str(error) or type(error).__name__)
            return
        self._num_failed, self.fault, self._read_s = 0, None, self._clock()
        self.alarms.update(AlarmKind.SERVER_UNREACHABLE, None, None, None, 0.0, "it answers again")
        interval = self.history.add(reading)
        if interval is None:
            self._open = []
        else:
            self.on_interval(interval)

    def on_fault(self, why: str) -> None:
        """Count a failed reading."""
        self._num_failed += 1
        self.fault = why
        if self._num_failed >= UNREACHABLE_READINGS:
            message = f"{self.server.url} cannot be watched: {why}"
            self.alarms.update(AlarmKind.SERVER_UNREACHABLE, None, None, message, self._num_failed, "")

    def on_interval(self, interval: ReadingInterval) -> None:
        """Collect intervals into observations of the alarms.

        An observation ends when as many requests have ended as ran when it began: then the next one is about other
        requests, and observations are about as independent of each other as requests are. Shorter ones would see
        the same long answer again and again, which the tests' rate of false alarms does not allow for.
        """
        if not self._open:
            self._turnover = max(interval.num_running, 1)
        self._open.append(interval.counts)
        total = added(self._open)
        drafted = sum(total.reached_at)
        if total.num_ended < self._turnover or 0 < drafted < MIN_REACHED:
            return
        self._open = []
        self.alarms.on_request(_observation(total, self.server.method))

    def on_pair(self, speedup: float) -> None:
        """Count a paired probe: tokens a second with speculation over those without."""
        self.slower.add(speedup)
        message = None
        if self.slower.is_slower:
            message = (
                f"answers are slower with speculation than without: in {self.slower.num_slower} of "
                f"{self.slower.num_pairs} paired probes"
            )
        share = self.slower.num_slower / self.slower.num_pairs
        why = "paired probes are faster with speculation again"
        self.alarms.update(AlarmKind.UNDER_BREAK_EVEN, None, None, message, share, why)

    def _on_clear(self, alarm: Alarm, why: str) -> None:
        if alarm.kind == AlarmKind.UNDER_BREAK_EVEN and self.slower.is_slower:
            self.slower.begin()  # acknowledged: what is now counts as usual
        self.log.on_clear(alarm, why)


def _observation(total: EngineCounts, method: str) -> FinishedRequest:
    """One observation of the alarms: what vLLM counted until a batch of requests was over."""
    num = max(total.num_ended, 1)
    first = total.reached_at[:1], total.accepted_at[:1]
    return FinishedRequest(
        task=TASK,
        traits=Traits(
            num_prompt_tokens=total.num_prompt_tokens // num,
            num_output_tokens=total.num_output_tokens // num,
            temperature=0.0,  # the metrics have neither temperatures nor grammars: they never count as moved
            structured=False,
            method=method,
        ),
        num_reached=sum(total.reached_at),
        num_accepted=min(sum(total.accepted_at), sum(total.reached_at)),
        num_reached_first=sum(first[0]),
        num_accepted_first=sum(first[1]),
        num_streamed=total.num_output_tokens,
        num_counted=total.num_output_tokens,  # vLLM has one count of them; `bench --url` compares it with its own
        share_truncated=total.num_cut / num,
        share_out_of_context=None,
    )
