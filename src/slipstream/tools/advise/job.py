"""What is to be advised on, and its requests in token ids."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.assets.workload.prompts import Lengths, Prompt, choose
from slipstream.engine.closed_loop import BenchJob
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.tools.advise.candidates import Candidate, key_of
from slipstream.tools.advise.traffic import Requests
from slipstream.tools.bench.engine.jobs import JobMaker


@dataclass(frozen=True)
class AdviceJob:
    """What is to be advised on."""

    requests: Requests
    candidates: Seq[Candidate]
    params: SamplingParams
    model: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    loads: Seq[int] = (1, 4, 16)
    """Requests at once."""
    prompts_per_task: int | None = 4
    max_tokens: int | None = 64
    budget_s: float = 300.0
    checks: bool = True
    raw: bool = False
    folder: Path | None = None
    resume: bool = False

    def key(self) -> dict[str, Any]:
        """All that the parts depend on."""
        return {
            "traffic": self.requests.workload.source,
            "prompts": [[one.task, one.text, one.messages] for one in self.requests.workload.questions],
            "shares of tasks": self.requests.shares,
            "candidates": key_of(self.candidates),
            "sampling": asdict(self.params),
            "model": self.model,
            "engine": dict(self.engine_options),
            "loads": list(self.loads),
            "prompts per task": self.prompts_per_task,
            "answer length": self.max_tokens,
            "way of asking": self.raw,
        }


def make_jobs(job: AdviceJob, engine: Engine) -> list[BenchJob]:
    """The requests, encoded, tasks interleaved, each with a seed of its own. Raises `RequestError`."""
    job.params.check_vocabulary(engine.model.vocab_size)
    maker = JobMaker(engine, job.params, job.raw, job.params.ignore_eos or job.max_tokens is None)
    jobs = [maker.job(number, prompt) for number, prompt in enumerate(_prompts(job, maker))]
    if len(jobs) < 2:
        raise RequestError("advice needs at least 2 prompts; one does not show what traffic is like")
    return jobs


def _prompts(job: AdviceJob, maker: JobMaker) -> list[Prompt]:
    """The first prompts of each task: as many of each, or of a trace as many as the task's share in it says."""
    workload, most = job.requests.workload, job.prompts_per_task
    lengths, shares = Lengths(job.max_tokens, maker.count), job.requests.shares
    if not shares or most is None:
        return choose(workload, most, lengths, maker.fits, _no_turns).prompts
    left = {task: max(1, round(share * most * len(shares))) for task, share in shares.items()}
    remaining = replace(workload, questions=[one for one in workload.questions if one.task in left])
    found: list[Prompt] = []
    for prompt in choose(remaining, max(left.values()), lengths, maker.fits, _no_turns).prompts:
        if left[prompt.task]:
            left[prompt.task] -= 1
            found.append(prompt)
    return found


def _no_turns(prompt: Prompt) -> str:
    raise RequestError(f"{prompt.where}: advice takes single questions; give later turns as messages")
