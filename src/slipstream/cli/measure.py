"""Measures step times with their roofline times, saves, loads and prints them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.core.meter import meter
from slipstream.errors import ConfigError
from slipstream.profiling.break_even import break_even, draft_cost, round_cost
from slipstream.profiling.plausible import implausible
from slipstream.profiling.profile import CostProfile, StepTime

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.models.identity import ModelIdentity
    from slipstream.profiling.part_profile import PartProfile

USUAL_CONTEXT = 256
"""The context of conclusions, if it was measured."""

NOTICEABLE = 1.25
"""Ratio to a step of one row from which on a step is called more expensive."""

CHAIN = 4
"""Draft tokens of the chain in conclusions; the draft model's default."""


@dataclass(frozen=True)
class Measurement:
    """The profiles of a target and of its draft model, where there is one."""

    target: CostProfile
    draft: CostProfile | None
    parts: tuple[PartProfile, ...] = ()
    """Where the target's passes spend their time, if it was asked for."""

    @classmethod
    def take(cls, llm: LLM, quick: bool, by_part: bool = False) -> Measurement:
        """Measure now, with a bar on a terminal. Raises `ConfigError` where passes have no parts that can be timed."""
        from slipstream.profiling.part_profile import check_parts, measure_parts
        from slipstream.profiling.pass_times import QUICK, Survey, measure

        if by_part:
            check_parts(llm.engine.model)

        models = [model for model in (llm.engine.model, llm.engine.draft_model) if model is not None]
        with meter("measuring", refreshes=False) as shown:
            profiles = measure(models, QUICK if quick else Survey(), shown.show)
            parts = measure_parts(llm.engine.model, USUAL_CONTEXT, shown.show) if by_part else []
        return cls(profiles[0], profiles[1] if len(profiles) > 1 else None, tuple(parts))

    @classmethod
    def find(cls, model: ModelIdentity, draft_model: ModelIdentity | None) -> Measurement | None:
        """The saved profiles of these models on this machine; None without a profile of the target."""
        from slipstream.profiling.pass_times import profile_key
        from slipstream.profiling.store import find

        target = find(profile_key(model))
        if target is None:
            return None
        return cls(target, None if draft_model is None else find(profile_key(draft_model)))

    @property
    def fault(self) -> str | None:
        """Why the measurement is not plausible, and what to do; None for a plausible one."""
        for role, profile in self.profiles().items():
            found = implausible(profile)
            if found is not None:
                return (
                    f"measured during other work, it seems: {role}: {found}; stop what else runs on this machine, or "
                    "give --threads as many cores as are free, and measure again"
                )
        return None

    def save(self) -> list[str]:
        """Save the profiles for later runs; returns their files. Raises `ConfigError` for implausible ones."""
        from slipstream.profiling.store import save

        if self.fault is not None:
            raise ConfigError(f"nothing is saved: {self.fault}")
        return [str(save(profile)) for profile in self.profiles().values()]

    def profiles(self) -> dict[str, CostProfile]:
        """Role to profile."""
        return {"target": self.target} | ({} if self.draft is None else {"draft": self.draft})

    @property
    def context(self) -> int:
        """The context of conclusions."""
        return _usual_context(self.target)

    def lines(self) -> list[tuple[str, str]]:
        """A one-line summary for each model, for other reports."""
        context = _usual_context(self.target)
        step = _at(self.target, context)
        costs = ", ".join(
            f"v({rows}) {time.median_s / step[1].median_s:.2f}"
            for rows, time in step.items()
            if rows in (5, 8)
        )
        taken = f"{context} tokens of context, measured {self.target.measured_at[:10]}"
        lines = [("step", f"{_ms(step[1].median_s)} ms for one row, {costs} at {taken}")]
        if self.draft is not None:
            c = draft_cost(self.target, self.draft, context)
            lines.append(("draft step", f"{_ms(self.draft.step_s(1, context))} ms, c {c:.2f}"))
        return lines

    def as_json(self) -> dict[str, Any]:
        """The profiles with conclusions."""
        return {
            **{role: _profile_json(profile) for role, profile in {"draft": None, **self.profiles()}.items()},
            "draft_cost": [
                {"context": context, "c": draft_cost(self.target, self.draft, context)}
                for context in self.target.contexts
                if self.draft is not None
            ],
            "by_part": [self._part_json(profile) for profile in self.parts],
            "conclusion": self.conclusion(),
        }

    def _part_json(self, profile: PartProfile) -> dict[str, Any]:
        rate = self.target.read_bytes_per_s.median
        parts = [{**asdict(part), "roofline_s": part.roofline_s(rate)} for part in profile.parts]
        return {**asdict(profile), "parts": parts, "rest_s": profile.rest_s}

    def print(self, console: Console) -> None:
        """Print a table for each model, then conclusions."""
        self.print_tables(console)
        for parts in self.parts:
            console.print(
                f"a pass of {parts.rows} row{'s' if parts.rows > 1 else ''} behind {parts.context} tokens: "
                f"{_ms(parts.pass_s)} ms, {_ms(parts.rest_s)} of it outside the kernels"
            )
            console.print(_part_table(parts, self.target.read_bytes_per_s.median))
        for sentence in self.conclusion():
            console.print(sentence, markup=False)

    def print_tables(self, console: Console) -> None:
        """Print a table for each model, plausible or not."""
        for role, profile in self.profiles().items():
            console.print()
            for line in _heading(role, profile):
                console.print(line, markup=False)
            console.print(_table(profile))

    def conclusion(self) -> list[str]:
        """Conclusions for speculation, one sentence each; none for an implausible measurement."""
        if self.fault is not None:
            return [f"No conclusion: {self.fault}."]
        context = _usual_context(self.target)
        times = _at(self.target, context)
        one = times[1]
        roofline_s = self.target.memory_roofline_s(one)
        sentences = [
            f"At {context} tokens of context a step of one row takes {_ms(one.median_s)} ms, "
            f"{one.median_s / roofline_s:.2f} times what it takes to read its weights and cache ({_ms(roofline_s)} ms)."
        ]
        checked = [
            f"v({rows}) = {times[rows].median_s / one.median_s:.2f}" for rows in (5, 8) if rows in times
        ]
        if checked:
            sentences.append(f"Checking several rows at once costs {' and '.join(checked)} steps of one row.")
        costs = {rows: self.target.verify_cost(rows, context) for rows in times}
        dear = next((rows for rows, cost in costs.items() if cost > NOTICEABLE), None)
        if dear is None:
            sentences.append(f"Up to {max(costs)} rows no step costs more than {NOTICEABLE} of one row.")
        else:
            sentences.append(
                f"From {dear} rows on a step is noticeably more expensive: {costs[dear]:.2f} of one row."
            )
        return [*sentences, *self._break_even_lines(context)]

    def _break_even_lines(self, context: int) -> list[str]:
        """Break-even acceptance rates of a chain, with the draft model and with drafts without cost."""
        verify = self.target.verify_cost(CHAIN + 1, context)
        sentences = [f"A chain of {CHAIN} drafts that cost nothing (ngram, suffix) {_pays(verify)}."]
        if self.draft is not None:
            c = draft_cost(self.target, self.draft, context)
            cost = round_cost(self.target, self.draft, CHAIN, context)
            sentences.append(
                f"A step of the draft model costs c = {c:.2f} of the target's: "
                f"drafting and checking a chain of {CHAIN} costs {cost:.2f} steps and {_pays(cost)}."
            )
        return sentences


def _pays(cost: float) -> str:
    rate = break_even(CHAIN, cost)
    if rate is None:
        return "cannot gain speed, even if every draft token is accepted"
    return f"gains speed from an acceptance rate of {rate:.2f} on"


def _usual_context(profile: CostProfile) -> int:
    if USUAL_CONTEXT in profile.contexts:
        return USUAL_CONTEXT
    return profile.contexts[len(profile.contexts) // 2]


def _at(profile: CostProfile, context: int) -> dict[int, StepTime]:
    """Row count to measurement at one context, ascending."""
    return {time.rows: time for time in profile.step_times if time.context == context}


def _profile_json(profile: CostProfile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    one = {context: _at(profile, context)[1].median_s for context in profile.contexts}
    steps = [
        {
            **asdict(time),
            **dict.fromkeys(("memory_roofline_s", "memory_floor_s"), profile.memory_roofline_s(time)),
            **dict.fromkeys(("compute_roofline_s", "compute_floor_s"), profile.compute_roofline_s(time)),
            **dict.fromkeys(("roofline_ratio", "floor_ratio"), time.median_s / profile.roofline_s(time)),
            "v": time.median_s / one[time.context],
        }
        for time in profile.step_times
    ]
    return {**profile.as_json(), "step_times": steps}


def _heading(role: str, profile: CostProfile) -> list[str]:
    names = {EMBEDDED_TARGET: "embedded target", EMBEDDED_DRAFT: "embedded draft"}
    key, memory, own = profile.key, profile.memory_bytes_per_s, profile.read_bytes_per_s
    threads = f"{key.num_threads} thread{'s' if key.num_threads > 1 else ''}"
    reads = f"memory {memory.median / 1e9:.1f} GB/s (best {memory.best / 1e9:.1f})"
    if own != memory:
        reads += f", {own.median / 1e9:.1f} GB/s over its own weights"
    return [
        f"{role}: {names.get(profile.path, profile.path)}",
        f"{key.cpu if key.device == 'cpu' else key.device}, {threads}, {key.dtype}: {reads}, "
        f"{profile.flops_per_s.median / 1e9:.0f} GFLOP/s (best {profile.flops_per_s.best / 1e9:.0f})",
    ]


def _table(profile: CostProfile) -> Table:
    """Milliseconds by context and rows."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("context", "rows", "ms", "quartiles", "to read", "to compute", "over roofline", "v"):
        table.add_column(name, justify="right", no_wrap=True)
    for context in profile.contexts:
        times = _at(profile, context)
        for time in times.values():
            table.add_row(
                str(context),
                str(time.rows),
                _ms(time.median_s),
                f"{_ms(time.q1_s)} – {_ms(time.q3_s)}",
                _ms(profile.memory_roofline_s(time)),
                _ms(profile.compute_roofline_s(time)),
                f"{time.median_s / profile.roofline_s(time):.2f}",
                f"{time.median_s / times[1].median_s:.2f}",
                end_section=time.rows == max(times),
            )
    return table


def _part_table(profile: PartProfile, bytes_per_s: float) -> Table:
    """Milliseconds of each part, all layers together, and microseconds of one layer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    for name in ("ms", "waiting", "to read", "over that", "µs a layer", "least – most"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in profile.parts:
        least = part.roofline_s(bytes_per_s)
        layers = [1e6 * layer for layer in part.layers_s]
        table.add_row(
            part.name.replace("_", " "),
            _ms(part.work_s),
            _ms(part.waiting_s),
            _ms(least) if least else "",
            f"{part.work_s / least:.2f}" if least else "",
            f"{sum(layers) / len(layers):.1f}" if layers else "",
            f"{min(layers):.1f} – {max(layers):.1f}" if layers else "",
        )
    return table


def _ms(seconds: float) -> str:
    """Milliseconds with three significant digits."""
    ms = seconds * 1e3
    return (
        f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 0.1 else f"{ms:.3f}"
    )
