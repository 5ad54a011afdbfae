"""One recording of the embedded target beside which everything drafts."""

from __future__ import annotations

import pytest

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_EAGLE3
from slipstream.config import SpeculativeConfig
from slipstream.sampling.params import SamplingParams
from slipstream.tools.advise.candidates import make_candidates, own_draft
from slipstream.tools.advise.engines import make_recording_engine
from slipstream.tools.advise.job import AdviceJob, make_jobs
from slipstream.tools.advise.recording import record
from slipstream.tools.advise.traffic import read_traffic
from tests.kit.tape import ENGINE, Tape


def drafters(every: bool) -> list[SpeculativeConfig]:
    """The embedded target's own draft, and with `every` its head and the target itself in int8."""
    draft = SpeculativeConfig("draft_model", options={"model": EMBEDDED_DRAFT, "num_speculative_tokens": 4})
    own = own_draft(None, "cpu")
    if not every or own is None:
        return [draft]
    return [
        draft,
        SpeculativeConfig("eagle3", options={"model": EMBEDDED_EAGLE3, "num_speculative_tokens": 3}),
        own,
    ]


@pytest.fixture(scope="session", params=[0.0, 0.8], ids=["greedy", "sampled"])
def tape(request: pytest.FixtureRequest) -> Tape:
    """Answers to three prompts at once."""
    job = AdviceJob(
        read_traffic(None, None, None),
        make_candidates(drafters(request.param == 0), with_trees=True),
        SamplingParams(temperature=request.param, seed=7),
        engine_options=ENGINE,
        loads=(1, 2),
        prompts_per_task=1,
        max_tokens=12,
    )
    engine = make_recording_engine(job)
    jobs = make_jobs(job, engine)[:3]
    recorded = record(engine, job.candidates, jobs, 3, 60.0, lambda done, total: None)
    assert engine.integrity() == []
    return Tape(job, engine, jobs, recorded)
