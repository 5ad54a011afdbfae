"""A recording of the embedded target, and all that it was made with."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.engine.closed_loop import BenchJob
from slipstream.engine.engine import Engine
from slipstream.tools.advise.candidates import Candidate
from slipstream.tools.advise.job import AdviceJob
from slipstream.tools.advise.recording import Recorded

ENGINE = {"num_threads": 1, "kv_cache_bytes": 32 * 2**20, "max_num_seqs": 8, "max_model_len": 512}


@dataclass(frozen=True)
class Tape:
    """A recording and all that it was made with."""

    job: AdviceJob
    engine: Engine
    jobs: list[BenchJob]
    recorded: Recorded

    @property
    def candidates(self) -> list[Candidate]:
        return list(self.job.candidates)
