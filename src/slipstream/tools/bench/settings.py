"""What a benchmark runs: prompts, sampling, concurrencies, repeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.assets.workload.prompts import Chosen
from slipstream.assets.workload.reading import Workload
from slipstream.sampling.params import SamplingParams
from slipstream.tools.bench.result import WorkloadSummary


@dataclass(frozen=True)
class BenchSettings:
    """The workload of a benchmark, its sampling parameters, concurrencies and repeats."""

    workload: Workload
    params: SamplingParams
    """For every answer; the prompts' own seeds are derived from its seed."""
    prompts_per_task: int | None = None
    """None: all."""
    max_tokens: int | None = None
    """None uses the lengths in the data, exactly."""
    concurrencies: Seq[int] = (1,)
    repeats: int = 1
    raw: bool = False
    """Plain prompts are not wrapped in the chat template."""

    @property
    def ignore_eos(self) -> bool:
        return self.params.ignore_eos or self.max_tokens is None

    def summary(self, chosen: Chosen) -> WorkloadSummary:
        """The workload's entry in the report."""
        return WorkloadSummary(
            source=self.workload.source,
            num_prompts=dict(Counter(prompt.task for prompt in chosen.prompts)),
            max_tokens=self.max_tokens,
            num_unusable=self.workload.num_unusable,
            num_too_long=chosen.num_too_long,
        )
