"""The engine that records and replays, and those that a check measures; they share one target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.config import EngineConfig, SpeculativeConfig
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.errors import RequestError
from slipstream.tools.advise.job import AdviceJob
from slipstream.tools.advise.step_costs import CHECKED

RECORDING_DRAFTER = "slipstream.tools.advise.recording_drafter:RecordingDrafter"
ENGINES = 4
"""Engines that share the memory for keys and values."""


def make_recording_engine(job: AdviceJob) -> Engine:
    """The engine that records and replays."""
    drafters = [{"method": one.speculative.method, **one.speculative.options} for one in job.candidates]
    config = SpeculativeConfig(
        RECORDING_DRAFTER, options={"drafters": drafters, "room": max(CHECKED)}, probe_share=0.0
    )
    return make_engine(job.model, config, own_options(job))


def own_options(job: AdviceJob) -> dict[str, Any]:
    """The engine's options, with room for all requests and an equal share of the memory."""
    options = {"max_num_seqs": max(EngineConfig.max_num_seqs, *job.loads), **job.engine_options}
    if options["max_num_seqs"] < max(job.loads):
        raise RequestError(
            f"{max(job.loads)} requests at once need --max-num-seqs of at least {max(job.loads)}, "
            f"got {options['max_num_seqs']}"
        )
    if options.get("kv_cache_bytes") is None:
        fraction = options.get("kv_memory_fraction", EngineConfig.kv_memory_fraction)
        options["kv_memory_fraction"] = fraction / ENGINES
    return options


class CheckEngines:
    """Engines to measure with, each made when it is first used."""

    def __init__(self, job: AdviceJob, like: Engine) -> None:
        """`like` has the target that they share."""
        self._job, self._like = job, like
        self._made: dict[str, Engine] = {}

    def get(self, name: str, speculative: SpeculativeConfig) -> Engine:
        """The engine of that name; it probes nothing."""
        if name not in self._made:
            config = replace(speculative, probe_share=0.0)
            self._made[name] = make_engine(self._job.model, config, own_options(self._job), self._like)
        return self._made[name]
