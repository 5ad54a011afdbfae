"""Metrics of the router and of each replica, and their sums, for Prometheus.

What replicas count outlives them here: neither a replica's count nor the sum falls where it dies or begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream.deploy.fleet import Health
from slipstream.deploy.router import Router, RouterCounts

PREFIX = "slipstream_fleet_"
_COUNTERS = {
    "submitted": "Requests that came.",
    "finished": "Requests that were answered whole.",
    "abandoned": "Requests whose client left, or that no replica could serve.",
    "refused": "Requests that were refused because too many wait.",
    "late": "Requests that could not meet, or did not meet, their deadline.",
    "failed": "Requests that no replica could go on with.",
    "moved": "Times a request went on at another replica.",
    "lost_replicas": "Replicas that went without a drain, or with requests under way.",
    "silent_replicas": "Times a replica was not heard of for too long.",
    "drained_replicas": "Replicas that handed their requests to others.",
    "crossed_unlike": "Requests that went on with other arithmetic than they were begun with.",
    "prompt_blocks": "Blocks of prompts that were routed.",
    "known_blocks": "Blocks of prompts that the chosen replica held.",
}
_GAUGES = {
    "load": "Answers that the router has given to the replica, without paused ones.",
    "running": "Answers that take part in the replica's steps.",
    "waiting": "Answers that wait at the replica.",
    "cache_usage": "Share of the replica's cache that running answers hold.",
    "tokens_per_second": "Tokens that the replica emits.",
    "acceptance_length": "Mean tokens a target pass at the replica.",
    "up": "1 while the replica is ready, else 0.",
}
_COUNTS = {
    "num_steps": ("steps", "Steps of the engines."),
    "num_passes": ("passes", "Target passes that produced tokens, an answer at a time."),
    "num_output_tokens": ("generation_tokens", "Output tokens."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that a replica began or went on with."),
    "num_cached_tokens": ("prompt_tokens_cached", "Those of them that it found in its own cache."),
    "num_drafts": ("drafts", "Steps in which a sequence's draft was checked."),
    "num_draft_tokens": ("draft_tokens", "Draft tokens that were checked."),
    "num_accepted_tokens": ("accepted_tokens", "Draft tokens that were accepted and emitted."),
    "num_preemptions": ("preemptions", "Times a full cache took an answer's place."),
    "num_draft_failures": ("draft_failures", "Times a drafter was retired for an answer that it failed."),
    "num_replayed_passes": ("replayed_passes", "Passes that were replays of recorded ones."),
    "num_eager_passes": ("eager_passes", "Passes outside a recorded graph; the replica's log says why."),
    "draft_s": ("draft_seconds", "Time spent drafting."),
    "verify_s": ("verify_seconds", "Time spent in target passes and verification."),
}


class FleetCollector(Collector):
    """Reads the router when it is scraped. A sum over `replica` is the fleet's."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """The families of this moment."""
        router = self._router
        for each in fields(RouterCounts):
            about = _COUNTERS[each.name]
            yield CounterMetricFamily(
                PREFIX + each.name, about, value=float(getattr(router.counts, each.name))
            )
        yield GaugeMetricFamily(
            PREFIX + "queued", "Answers that wait in front of the replicas.", value=router.queue.num_answers
        )
        yield GaugeMetricFamily(PREFIX + "replicas", "Replicas that are ready.", value=router.fleet.num_ready)
        families = {
            name: GaugeMetricFamily(PREFIX + "replica_" + name, about, labels=["replica"])
            for name, about in _GAUGES.items()
        }
        for state in router.fleet:
            values = {
                "load": state.load,
                "running": state.report.num_running,
                "waiting": state.report.num_waiting,
                "cache_usage": state.report.cache_usage,
                "tokens_per_second": state.report.tokens_per_s,
                "acceptance_length": state.report.acceptance_length,
                "up": state.health is Health.READY,
            }
            for name, value in values.items():
                families[name].add_metric([state.id], float(value))
        yield from families.values()
        yield from self._counts()

    def _counts(self) -> Iterator[Metric]:
        """What replicas have counted: of all, under the name alone, and of each, those that are gone too."""
        ledger = self._router.ledger
        for field, (name, about) in _COUNTS.items():
            yield CounterMetricFamily(PREFIX + name, about, value=float(getattr(ledger.total, field)))
            family = CounterMetricFamily(PREFIX + "replica_" + name, about, labels=["replica"])
            for replica, counts in ledger:
                family.add_metric([replica], float(getattr(counts, field)))
            yield family
