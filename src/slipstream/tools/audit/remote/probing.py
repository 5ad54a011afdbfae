"""Finds out what a server can do, by requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import combinations
from typing import Any

import httpx2

from slipstream.errors import RemoteError
from slipstream.rpc.client import connect, trusted
from slipstream.sampling.noise import derive_seed
from slipstream.stats.paired import sign_test
from slipstream.tools.audit.records import AuditReply, AuditRequest
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.bench.statistics import first_difference

NUM_SEED_PROBES = 20
NUM_REPEATED_PROBES = 6
"""The first of them, which are sent twice."""
SEED_PROBE_TOKENS = 12
REPEATED = 0.75
"""Share of these that a server must answer twice alike, to count as keeping to a seed."""

_LOSSY: Mapping[str, Callable[[Any], bool]] = {
    "rejection_sample_method": lambda value: value not in ("standard", "block", "probabilistic", "strict"),
    "spec_decoding_acceptance_method": lambda value: value == "typical_acceptance_sampler",
    "acceptance_method": lambda value: value == "typical_acceptance_sampler",
    "speculative_accept_threshold_single": lambda value: isinstance(value, (int, float)) and value < 1,
    "speculative_accept_threshold_acc": lambda value: isinstance(value, (int, float)) and value < 1,
    "use_relaxed_acceptance_for_thinking": bool,
    "assistant_ensemble_weight": lambda value: value not in (None, 0, 0.0),
    "lossy": bool,
}
"""Settings of engines that change the text, and the values at which they do."""
_INFO_PATHS = ("server_info?config_format=json", "get_server_info", "props")
"""Paths of vLLM, which tells its settings as one text unless JSON is requested, of SGLang and of llama.cpp."""
_ABILITIES = ("asks_token_ids", "knows_filters", "asks_logprobs")
_LESS = tuple(names for num in range(len(_ABILITIES) + 1) for names in combinations(_ABILITIES, num))
"""What is left out of a request, one thing after the other, then two, then all."""


def identify(side: ServerSide) -> None:
    """Fill in owner, version and what the server tells of its speculation; raises `RemoteError` without a server."""
    address, info = side.address, side.info
    try:
        timeout_s = min(address.timeout_s, 30)
        with httpx2.Client(headers=address.headers, timeout=timeout_s, verify=trusted()) as client:
            models = client.get(f"{address.url}/models")
            if models.status_code == 200:
                cards = _object(models).get("data") or []
                own = next(
                    (card for card in cards if card.get("id") == address.model), cards[0] if cards else {}
                )
                info.owner = str(own.get("owned_by") or "")
                info.settings |= dict(_speculative(own))
            root = address.url.removesuffix("/v1")
            info.version = _object(client.get(f"{root}/version")).get("version")
            for path in _INFO_PATHS:
                found = _object(client.get(f"{root}/{path}"))
                info.version = info.version or found.get("build_info") or found.get("version")
                info.settings |= dict(_speculative(found))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise RemoteError(f"cannot reach {address.url}: {error or type(error).__name__}") from None
    info.lossy = [
        f"{side.address.url} says {name} = {value!r}, which changes the text"
        for name, value in info.settings.items()
        if _is_lossy(name, value)
    ]


def find_abilities(side: ServerSide, request: AuditRequest) -> AuditReply:
    """Send one request, with all that the server takes; raises `RemoteError` where it does not answer at all."""
    info = side.info
    short = replace(request, params={"temperature": 0.0}, max_tokens=min(4, request.max_tokens))
    for less in _LESS:
        for name in _ABILITIES:
            setattr(info, name, name not in less)
        reply = _once(side, short)
        if (
            reply.error is None
            or not reply.error.startswith("HTTP 4")
            or reply.error.startswith(("HTTP 401", "HTTP 403", "HTTP 404"))
        ):
            break
    if reply.error is not None:
        raise RemoteError(f"{side.address.url} does not answer: {reply.error}")
    answer = reply.answers[0]
    info.returns_token_ids = answer.token_ids is not None
    info.returns_logprobs = bool(answer.tops)
    info.returns_usage = reply.num_output_tokens is not None
    streamed = _once(side, short, stream=True)
    info.streams = streamed.error is None
    return reply


def probe_seeds(sides: Seq[ServerSide], requests: Seq[AuditRequest], level: float) -> bool:
    """Fill in which servers keep to a seed; True where all do and the same seed gives the same noise on each.

    Sides with noise of their own pass for sharing it with a probability of at most `level`.
    """
    probes = _seed_probes(requests, NUM_SEED_PROBES if len(sides) > 1 else NUM_REPEATED_PROBES)
    answered = []
    for side in sides:
        first, again = _all(side, probes), _all(side, probes[:NUM_REPEATED_PROBES])
        same = [_agreement(one, two) == 1.0 for one, two in zip(first, again, strict=False)]
        side.info.keeps_seed = sum(same) >= REPEATED * len(same)
        answered.append(first)
    if not all(side.info.keeps_seed for side in sides):
        return False
    if len(sides) == 1:
        return True
    unrelated = _all(sides[0], [replace(probe, seed=probe.seed ^ 1) for probe in probes])
    return _draw_alike(answered[0], answered[1], unrelated, level)


def _seed_probes(requests: Seq[AuditRequest], num: int) -> list[AuditRequest]:
    """Short sampled requests with seeds of their own, on the requests' prompts in turn."""
    chosen = [requests[number % len(requests)] for number in range(num)]
    return [
        replace(
            request,
            number=-1 - number,
            params={"temperature": 1.0},
            max_tokens=min(SEED_PROBE_TOKENS, request.max_tokens),
            seed=derive_seed(request.seed, number),
        )
        for number, request in enumerate(chosen)
    ]


def _draw_alike(
    mine: Seq[AuditReply], theirs: Seq[AuditReply], unrelated: Seq[AuditReply], level: float
) -> bool:
    """Whether the second side agrees longer with the first side's answers under the same seed (`mine`) than with those
    under another one. With noise of its own it agrees with either in the same way, so a sign test tells."""
    pairs = [
        (_agreement(other, own), _agreement(other, one))
        for other, own, one in zip(theirs, mine, unrelated, strict=True)
    ]
    telling = [same > other for same, other in pairs if same != other]
    return sign_test(sum(telling), len(telling)) <= level


def _once(side: ServerSide, request: AuditRequest, stream: bool = False) -> AuditReply:
    async def send() -> AuditReply:
        async with connect(side.address) as client:
            return await side.send(client, request, stream)

    return asyncio.run(send())


def _all(side: ServerSide, requests: Seq[AuditRequest]) -> list[AuditReply]:
    async def send() -> list[AuditReply]:
        async with connect(side.address) as client:
            return [await side.send(client, request) for request in requests]

    return asyncio.run(send())


def _agreement(first: AuditReply, second: AuditReply) -> float:
    """The share of the longer answer up to the first difference; 0 where one failed."""
    if first.error is not None or second.error is not None:
        return 0.0
    one, other = first.answers[0].text, second.answers[0].text
    place = first_difference(one, other)
    return 1.0 if place is None else place / max(len(one), len(other))


def _object(response: httpx2.Response) -> dict[str, Any]:
    """A JSON object; an empty one where the server has none there."""
    if response.status_code != 200:
        return {}
    try:
        found = response.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _speculative(found: Any) -> list[tuple[str, Any]]:
    """All settings of speculation within nested objects: (name, value)."""
    if not isinstance(found, dict):
        return []
    own = [(name, _flat(value)) for name, value in found.items() if "specul" in name or name in _LOSSY]
    return own + [pair for value in found.values() for pair in _speculative(value)]


def _flat(value: Any) -> Any:
    """An object without the objects and lists in it: vLLM's settings of speculation hold those of whole models."""
    if not isinstance(value, dict):
        return value
    return {name: one for name, one in value.items() if not isinstance(one, (dict, list))}


def _is_lossy(name: str, value: Any) -> bool:
    return name in _LOSSY and value is not None and _LOSSY[name](value)
