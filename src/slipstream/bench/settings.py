"""What a benchmark asks, of an engine or of a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from slipstream.bench.result import WorkloadFacts
from slipstream.sampling.params import SamplingParams
from slipstream.workload.prompts import Chosen
from slipstream.workload.reading import Workload


@dataclass(frozen=True)
class BenchSettings:
    """The workload, how it is sampled and how often."""

    workload: Workload
    params: SamplingParams
    """For every answer; its seed is where the prompts' own seeds come from."""
    prompts_per_task: int | None = None
    """None: all."""
    max_tokens: int | None = None
    """None takes the lengths of answers from the data; then they are exact."""
    concurrencies: Seq[int] = (1,)
    repeats: int = 1
    raw: bool = False
    """Plain prompts are not wrapped in the chat template."""

    @property
    def ignore_eos(self) -> bool:
        return self.params.ignore_eos or self.max_tokens is None

    def facts(self, chosen: Chosen) -> WorkloadFacts:
        """What was asked, for the report."""
        return WorkloadFacts(
            source=self.workload.source,
            num_prompts=dict(Counter(prompt.task for prompt in chosen.prompts)),
            max_tokens=self.max_tokens,
            num_unusable=self.workload.num_unusable,
            num_too_long=chosen.num_too_long,
        )
