"""`slipstream plan`: whether a model fits, before it is loaded or downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from slipstream.cli.flags.flags import FlagSet, Values, parse_bytes, with_flags
from slipstream.cli.flags.options import (
    Json,
    ModelArgument,
    SpeculationValues,
    chosen_speculation,
    model_name,
)
from slipstream.cli.output.console import print_rows, results, stderr
from slipstream.cli.output.loading import say_loading
from slipstream.cli.output.profile_plot import check_plot
from slipstream.cli.output.results import print_json
from slipstream.cli.output.writing import Overwrite
from slipstream.config import EngineConfig, check_at_least
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from slipstream.plan.process import ProcessMemory
    from slipstream.plan.report import FitReport

_DECIDED = {"model", "seed", "tokenizer", "max_num_seqs", "max_model_len"}
_UNUSED = {"kv_cache_bytes", "kv_memory_fraction", "gpu_memory_utilization", "generation_config"}
ENGINE_TO_PLAN = FlagSet(
    EngineConfig,
    "Engine",
    skip=frozenset(
        {*_DECIDED, *_UNUSED, "override_generation_config", "enable_prefix_caching", "overlap_steps"}
    ),
)
"""What a plan depends on in addition to `--batch` and `--context`."""
LEAST_MEMORY = 2**20
"""Bytes that a size of memory must have."""
DOES_NOT_FIT = 3
"""Exit code; 2 is that of bad input, here as everywhere."""


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is planned for."""

    model: ModelArgument = None
    batch: Annotated[int, Option("--batch", "--max-num-seqs")] = EngineConfig.max_num_seqs
    """Requests that run at once."""
    context: Annotated[int | None, Option("--context", "--max-model-len")] = None
    """Tokens of a request, prompt and answer together; the model's context by default."""
    memory: Annotated[str | None, Option(metavar="SIZE")] = None
    """What there is: 24GiB. This machine's memory by default."""
    process_memory: Annotated[str | None, Option(metavar="SIZE")] = None
    """What the process itself takes: Python, PyTorch, libraries. By default it is measured, once on a machine, which
    takes some seconds."""
    plot: Path | None = None
    """Draw where the bytes go into this .png, .svg or .pdf."""
    overwrite: Overwrite = False
    json: Json = False
    speculation: SpeculationValues
    engine: Annotated[Values, ENGINE_TO_PLAN]


@with_flags
def plan(flags: PlanFlags) -> None:
    """Tell from the configuration alone whether a model fits with its drafter: the bytes of every part, what else fits,
    and where it does not fit what to change and what that costs. MODEL is a folder, a hub id, of which the
    configuration alone is downloaded, or a config.json. Exits with 3 when it does not fit, and
    with 2 on bad input.
    """
    model, batch, context, plot = flags.model, flags.batch, flags.context, flags.plot
    check_at_least("plan", 1, batch=batch, **({} if context is None else {"context": context}))
    memory_bytes = _memory_size("--memory", flags.memory)
    own_bytes = _memory_size("--process-memory", flags.process_memory)
    if plot is not None:
        check_plot(plot, flags.overwrite)
    say_loading(model, "planning for")
    speculative = chosen_speculation(flags.speculation, model)
    from slipstream.assets import EMBEDDED_TARGET
    from slipstream.plan.picture import draw
    from slipstream.plan.planner import Planner
    from slipstream.plan.report import FitReport

    config = EngineConfig(model or EMBEDDED_TARGET, max_model_len=context, **flags.engine)
    planner = Planner(config, speculative, _process(own_bytes))
    there = _memory_here(planner.target.device) if memory_bytes is None else memory_bytes
    report = FitReport.make(model_name(model), planner, batch, context or planner.max_context, there)
    if plot is not None:
        draw(report, plot)
    if flags.json:
        print_json(report.as_json())
    else:
        _print(report)
    if plot is not None:
        stderr().print(f"saved {plot}", markup=False)
    if not report.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _memory_size(flag: str, text: str | None) -> int | None:
    """Bytes; fewer than any machine has are a forgotten unit."""
    if text is None:
        return None
    size = parse_bytes(text)
    if size < LEAST_MEMORY:
        raise ConfigError(
            f"{flag} {text} is {size} bytes, less than 1 MiB; write a unit, as in 8GiB or 512MiB"
        )
    return size


def _memory_here(device: torch.device) -> int:
    """Return the memory of this machine's device; a device that is planned for need not be here."""
    import torch

    from slipstream.profiling.memory import total_bytes

    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"this machine has no {str(device)!r}; give the memory of the one to plan for as --memory"
        )
    return total_bytes(device)


def _process(own_bytes: int | None) -> ProcessMemory:
    """What was given, or the measurement of this machine."""
    from slipstream.plan.process import ProcessMemory, is_kept, process_memory

    if own_bytes is not None:
        return ProcessMemory(own_bytes, own_bytes, measured=False)
    if not is_kept():
        stderr().print("measuring what the process itself takes, once on this machine …")
    return process_memory()


def _print(report: FitReport) -> None:
    from slipstream.plan.fitting import MAX_BATCH
    from slipstream.plan.sizes import format_bytes

    console = results()
    rows = list(report.part_rows())
    width, size = max(len(name) for name, _, _ in rows), max(len(text) for _, text, _ in rows)
    for name, num_bytes, detail in rows:
        console.print(f"{name:<{width}}  {num_bytes:>{size}}  {detail}", markup=False)
    console.print()
    console.print(report.verdict(), markup=False)
    print_rows(
        console,
        [
            (
                "longest context",
                ", ".join(f"{each.batch} at once: {_count(each.context)}" for each in report.contexts),
            ),
            (
                "largest batch",
                ", ".join(
                    f"{each.context:,} tokens: {_count(each.batch, MAX_BATCH)}" for each in report.batches
                ),
            ),
            *([("to hold just this", report.flags())] if report.fits else []),
        ],
    )
    for number, change in enumerate(report.changes, start=1):
        console.print(
            f"change {number}: {change.name} ({change.flags}): peak {format_bytes(change.plan.peak_bytes)}. "
            f"Costs: {change.cost}.",
            markup=False,
        )
    if not report.fits and not report.changes:
        console.print(report.without_change(), markup=False)
    for note in report.plan.notes:
        console.print(f"note: {note}", markup=False)


def _count(number: int | None, limit: int | None = None) -> str:
    """Return it with 'or more' at the `limit` of what was looked for."""
    if number is None:
        return "none"
    return f"{number:,} or more" if number == limit else f"{number:,}"
