"""An audit of a server: against another one, against itself without speculation, or against a local target."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.assets.workload.prompts import Prompt
from slipstream.core.meter import meter, say
from slipstream.engine.engine import Engine
from slipstream.errors import ConfigError
from slipstream.rpc.client import connect
from slipstream.tools.audit.certificate import Certificate
from slipstream.tools.audit.decision import probe_level
from slipstream.tools.audit.findings import AuditCheck
from slipstream.tools.audit.journal import AuditJournal
from slipstream.tools.audit.local import encode, fits
from slipstream.tools.audit.mix import COMMON, FULL, PLAIN, SAMPLES, SERVED, Profile
from slipstream.tools.audit.reference import draws_alike
from slipstream.tools.audit.remote.counting import CounterWatch
from slipstream.tools.audit.remote.extras import ExtraCheck, check_stops, check_streams
from slipstream.tools.audit.remote.judging import Collected, Judge
from slipstream.tools.audit.remote.pairs import SampledPairs
from slipstream.tools.audit.remote.probing import find_abilities, identify, probe_seeds
from slipstream.tools.audit.remote.repeating import Repeats, measure_repeats
from slipstream.tools.audit.remote.sending import send_all
from slipstream.tools.audit.remote.side import WITHOUT_SPECULATION, ServerSide
from slipstream.tools.audit.replaying import Replayer
from slipstream.tools.audit.settings import AuditSettings, data_hash, make_requests

WITH_SEEDS, WITHOUT_SEEDS = 300, 2000
"""Requests, unless a number is given."""
PROMPTS_WITHOUT_SEEDS = 25
"""Fewer prompts, so that each has many answers to compare."""
KNOWN_LENGTHS = frozenset({"slipstream", "vllm", "llamacpp", "sglang"})
"""Owners whose servers understand `ignore_eos`."""
SAME_FILTERS = frozenset({"slipstream", "vllm", "sglang"})
"""Owners whose servers apply the temperature before top-p, as the reference does."""
NUM_NOISE_REQUESTS = 40
"""Requests that show whether a server draws with the reference's noise."""
UNKNOWN_VOCABULARY = 256
"""Token ids for parameters that name tokens, where the vocabulary is not known."""


@dataclass(frozen=True)
class RemoteAudit:
    """Which servers are audited, and how."""

    settings: AuditSettings
    first: ServerSide
    """The audited server."""
    second: ServerSide | None = None
    """What it is compared with; None with a reference, or for Slipstream's own server without speculation."""
    reference: Engine | None = None
    """A local target without speculation."""
    profiles: Seq[Profile] | None = None
    """None chooses by what the servers can do."""
    has_own_size: bool = False
    """Whether the settings' number of answers was given; otherwise it depends on what the servers can do."""
    journal: AuditJournal = field(default_factory=AuditJournal)


def run_remote(audit: RemoteAudit) -> Certificate:
    """Probe the servers, send everything, judge. Ctrl-C ends it early, with an incomplete certificate.

    Raises `RemoteError` where a server does not answer, `ConfigError` for a comparison that is impossible, and
    `RequestError` for invalid prompts.
    """
    first, second = audit.first.address, None if audit.second is None else audit.second.address
    if second is not None and (first.url, first.model) == (second.url, second.model):
        raise ConfigError(
            f"--against is the audited server itself, {first.url}, which proves nothing; give one without speculation"
        )
    identify(audit.first)
    sides = [audit.first]
    if audit.second is not None:
        identify(audit.second)
        sides.append(audit.second)
    elif audit.reference is None:
        sides.append(_undrafted(audit.first))
    return _Run(audit, sides).certificate()


def _undrafted(first: ServerSide) -> ServerSide:
    """Slipstream's own server without speculation; raises `ConfigError` for another server, and for one that does
    not speculate anyway."""
    if not first.info.is_ours:
        raise ConfigError(
            f"{first.address.url} cannot turn speculation off for a request; give --against URL, a server without "
            "speculation, or --reference MODEL"
        )
    said = first.info.settings.get("speculation")
    if isinstance(said, dict) and said.get("method") == "off":
        raise ConfigError(f"{first.address.url} does not speculate, so there is nothing to audit")
    return ServerSide(
        "off",
        first.address,
        {**first.extra, **WITHOUT_SPECULATION},
        first.raw,
        replace(first.info, lossy=[]),
    )


class _Run:
    """One audit, step by step."""

    def __init__(self, audit: RemoteAudit, sides: list[ServerSide]) -> None:
        self._audit = audit
        self._sides = sides
        self._replayer = None if audit.reference is None else Replayer(audit.reference)
        self._settings = audit.settings
        prompts, ids = self._prompts(self._settings)
        trial = make_requests(self._settings, prompts, ids, PLAIN, UNKNOWN_VOCABULARY)
        say("audit: finding out what the server answers")
        for side in sides:
            find_abilities(side, trial[0])
        self._check_sides()
        is_lossy = any(
            side.info.lossy for side in sides
        )  # says so itself: nothing that it answers can certify it
        self._probe_level = probe_level(audit.settings.alpha)
        self._shares_seeds = not is_lossy and probe_seeds(sides, trial, self._probe_level)
        if not audit.has_own_size:
            self._settings = self._sized()
        self._prompt_list, ids = self._prompts(self._settings)
        vocabulary = UNKNOWN_VOCABULARY if audit.reference is None else audit.reference.model.vocab_size
        requests = make_requests(self._settings, self._prompt_list, ids, self._profiles(), vocabulary)
        self._requests = [] if is_lossy else requests
        self._by_number = {request.number: request for request in self._requests}

    def certificate(self) -> Certificate:
        """Send all requests, and judge what came."""
        audit, settings = self._audit, self._settings
        audit.journal.open(self._key())
        repeats: list[Repeats] = []
        extras: list[AuditCheck] = []
        notes: list[str] = []
        why, interrupted = "", False
        pairs = SampledPairs(settings, enabled=len(self._sides) > 1 and not self._shares_seeds)
        try:
            watches = [CounterWatch(sides) for sides in self._by_metrics()]
            say("audit: sending the same again")
            repeats = [measure_repeats(side, self._requests) for side in self._sides]
            with meter("audit", len(self._requests) * len(self._sides)) as shown:
                why = asyncio.run(
                    send_all(
                        self._sides, self._requests, settings.concurrency, audit.journal, shown, pairs.add
                    )
                )
            if not why:
                say("audit: streams, counters and stop strings")
                extras.append(asyncio.run(self._send_again(repeats[0], check_streams)))
            for watch in watches:
                check, said = watch.check()
                extras.append(check)
                notes += said
            if not why:
                stops = CounterWatch(self._sides[:1])
                extras.append(asyncio.run(self._send_again(repeats[0], check_stops)))
                # Engines may count what a stop string cuts off an accepted block: that is noted, and decides nothing.
                notes += [f"with stop strings: {one.text}" for one in stops.check()[0].findings]
        except KeyboardInterrupt:
            why, interrupted = "the audit was interrupted", True
        finally:
            audit.journal.close()
        collected = Collected(
            settings,
            self._sides,
            self._prompt_list,
            self._requests,
            audit.journal,
            repeats,
            extras,
            pairs,
            notes,
            why,
            interrupted,
        )
        return Judge(collected, self._replayer, self._shares_noise()).certificate()

    def _prompts(self, settings: AuditSettings) -> tuple[list[Prompt], list[list[int] | None]]:
        """The prompts, and their token ids where there is a reference to encode them."""
        engine = self._audit.reference
        if engine is None:
            prompts = settings.prompts(lambda prompt: True)
            return prompts, [None] * len(prompts)
        prompts = settings.prompts(lambda prompt: fits(engine, settings, prompt))
        return prompts, [encode(engine, settings, prompt) for prompt in prompts]

    def _check_sides(self) -> None:
        if self._replayer is not None and not self._sides[0].info.returns_token_ids:
            raise ConfigError(
                f"{self._sides[0].address.url} tells no token ids, without which a reference cannot score its answers; "
                "compare it with another server by --against"
            )

    def _sized(self) -> AuditSettings:
        if self._shares_seeds or self._replayer is not None:
            return replace(self._settings, num_answers=WITH_SEEDS)
        num_prompts = min(self._settings.num_prompts, PROMPTS_WITHOUT_SEEDS)
        return replace(self._settings, num_answers=WITHOUT_SEEDS, num_prompts=num_prompts)

    def _profiles(self) -> Seq[Profile]:
        """What both sides mean alike."""
        if self._audit.profiles is not None:
            return self._audit.profiles
        info = [side.info for side in self._sides]
        if all(one.is_ours for one in info) and (self._shares_seeds or self._replayer is not None):
            return FULL
        if len(info) > 1 and not self._shares_seeds:
            return SAMPLES
        if self._replayer is not None and info[0].owner not in SAME_FILTERS:
            return PLAIN
        known = all(one.owner in KNOWN_LENGTHS for one in info)
        return SERVED if known else COMMON

    def _by_metrics(self) -> list[list[ServerSide]]:
        """The sides of each server; one server may be both."""
        found: dict[str, list[ServerSide]] = {}
        for side in self._sides:
            found.setdefault(side.address.metrics_url, []).append(side)
        return list(found.values())

    async def _send_again(self, repeats: Repeats, check: ExtraCheck) -> AuditCheck:
        """A check of the audited side that sends again what it repeats exactly."""
        side, replies = self._sides[0], self._audit.journal.side(self._sides[0].name)
        exact = [request for request in self._requests if request.is_greedy or side.info.keeps_seed]
        async with connect(side.address) as client:
            return await check(client, side, exact if repeats.is_exact else [], replies)

    def _shares_noise(self) -> bool:
        """Return, with a reference, whether the server draws with the noise that the reference computes."""
        if self._replayer is None or not self._sides[0].info.keeps_seed:
            return False
        replies = self._audit.journal.side(self._sides[0].name)
        return draws_alike(self._replayer, self._requests[:NUM_NOISE_REQUESTS], replies, self._probe_level)

    def _key(self) -> dict[str, Any]:
        """What a resumed audit must have in common: what is sent, how, and what the servers say of themselves."""
        return {
            "servers": [side.address.url for side in self._sides],
            "models": [side.address.model for side in self._sides],
            "versions": [side.info.version for side in self._sides],
            "speculation": [side.info.settings for side in self._sides],
            "extra": [dict(side.extra) for side in self._sides],
            "raw": [side.raw for side in self._sides],
            "data": data_hash(self._requests),
        }
