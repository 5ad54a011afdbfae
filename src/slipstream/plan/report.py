"""A plan as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.plan.changes import FittingChange, fitting_changes
from slipstream.plan.deployment import DeploymentPlan, PartKind
from slipstream.plan.fitting import BATCHES, FittingBatch, FittingContext, largest_batch, longest_context
from slipstream.plan.planner import Planner
from slipstream.plan.sizes import format_bytes


@dataclass(frozen=True)
class FitReport:
    """What `slipstream plan` tells."""

    model: str
    planner: Planner
    memory_bytes: int
    """What there is."""
    plan: DeploymentPlan
    contexts: tuple[FittingContext, ...]
    batches: tuple[FittingBatch, ...]
    changes: tuple[FittingChange, ...]
    """What makes it fit; empty where it fits."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the memory."""
        return self.plan.peak_bytes <= self.memory_bytes

    @classmethod
    def make(cls, model: str, planner: Planner, batch: int, context: int, memory_bytes: int) -> FitReport:
        """The plan of `batch` requests of `context` tokens, and what else fits."""
        plan = planner.at(batch, context)
        fits = plan.peak_bytes <= memory_bytes
        return cls(
            model=model,
            planner=planner,
            memory_bytes=memory_bytes,
            plan=plan,
            contexts=tuple(
                FittingContext(each, longest_context(planner, each, memory_bytes))
                for each in sorted({*BATCHES, batch})
            ),
            batches=tuple(
                FittingBatch(each, largest_batch(planner, each, memory_bytes))
                for each in _contexts(planner.max_context, context)
            ),
            changes=() if fits else tuple(fitting_changes(planner, batch, context, memory_bytes)),
        )

    def part_rows(self) -> Iterator[tuple[str, str, str]]:
        """Name, bytes and detail of every part, then the sums."""
        plan = self.plan
        yield from plan.lines()
        yield "while requests run", format_bytes(plan.running_bytes), "all of these"
        largest = max(plan.stages, key=lambda stage: stage.num_bytes)
        yield "while it starts", format_bytes(plan.loading_bytes), f"at most: {largest.name}"

    def verdict(self) -> str:
        """One line: whether it fits, and how much is left or lacking."""
        plan, left = self.plan, self.memory_bytes - self.plan.peak_bytes
        what = f"{plan.batch:,} at once of {plan.context:,} tokens: peak {format_bytes(plan.peak_bytes)}"
        if self.fits:
            return f"fits: {what} of {format_bytes(self.memory_bytes)}, {format_bytes(left)} left"
        return f"does not fit: {what}, {format_bytes(-left)} more than the {format_bytes(self.memory_bytes)} there are"

    def flags(self) -> str:
        """Flags that make an engine hold just this."""
        plan = self.plan
        return (
            f"--max-num-seqs {plan.batch} --max-model-len {plan.context} "
            f"--kv-cache-bytes {plan.kv_cache_bytes}"
        )

    def without_change(self) -> str:
        """What to do where no change makes it fit."""
        config, target = self.planner.config, self.planner.target
        if config.lora is None or target.stored_as:
            return "no change that is known makes it fit: take a smaller model or more memory"
        return (
            "no change that is known makes it fit: the adapter is merged into weights that are read whole; quantise "
            "the model first with `slipstream quantize` and give --lora with what that writes, or take a smaller "
            "model or more memory"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, in bytes and tokens."""
        target, plan = self.planner.target, self.plan
        return {
            "model": self.model,
            "family": target.family,
            "num_parameters": target.num_parameters,
            "weight_format": target.weight_type,
            "kernels": target.kernels,
            "device": str(target.device),
            "speculation": {"method": self.planner.speculative.method, **self.planner.speculative.options},
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "process": asdict(self.planner.process),
            "plan": plan_json(plan),
            "longest_contexts": [asdict(each) for each in self.contexts],
            "largest_batches": [asdict(each) for each in self.batches],
            "changes": [
                {"change": each.name, "cost": each.cost, "flags": each.flags, "plan": plan_json(each.plan)}
                for each in self.changes
            ],
            "flags": self.flags(),
        }


def plan_json(plan: DeploymentPlan) -> Mapping[str, Any]:
    """A plan with its sums."""
    return {
        **asdict(plan),
        "by_kind": {str(kind): plan.of_kind(kind) for kind in PartKind},
        "kv_cache_bytes": plan.kv_cache_bytes,
        "running_bytes": plan.running_bytes,
        "loading_bytes": plan.loading_bytes,
        "peak_bytes": plan.peak_bytes,
    }


def _contexts(longest: int, wanted: int) -> list[int]:
    """Contexts for which the largest batch is given: doubling from 512 to the model's, and the one requested."""
    found = {wanted, longest}
    length = 512
    while length < longest:
        found.add(length)
        length *= 2
    return sorted(found)
