"""Cost profiles: their arithmetic, and how they are kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.profiling import machine, store
from slipstream.profiling.break_even import acceptance_length, break_even, draft_cost, round_cost
from slipstream.profiling.plausible import implausible
from slipstream.profiling.profile import CostProfile, ProfileKey, Rate, isotonic
from tests.kit.profiles import KEY, profile, step_time

grids = st.lists(st.integers(2, 64), min_size=0, max_size=5, unique=True).flatmap(
    lambda rows: st.lists(st.integers(0, 4096), min_size=1, max_size=4, unique=True).flatmap(
        lambda contexts: st.tuples(
            st.just(sorted([1, *rows])),
            st.just(sorted(contexts)),
            st.lists(
                st.floats(1e-4, 10.0),
                min_size=(len(rows) + 1) * len(contexts),
                max_size=(len(rows) + 1) * len(contexts),
            ),
        )
    )
)


def made(
    grid: tuple[list[int], list[int], list[float]], *, ordered: bool
) -> tuple[CostProfile, dict[tuple[int, int], float]]:
    """A profile over the grid; `ordered`, its medians grow with rows and context."""
    row_counts, contexts, numbers = grid
    medians = {
        (rows, context): numbers[i * len(contexts) + j]
        for i, rows in enumerate(row_counts)
        for j, context in enumerate(contexts)
    }
    if ordered:
        for i, rows in enumerate(row_counts):
            for j, context in enumerate(contexts):
                above = medians[row_counts[i - 1], context] if i else 0.0
                left = medians[rows, contexts[j - 1]] if j else 0.0
                medians[rows, context] = max(medians[rows, context], above, left)
    return profile(medians), medians


@given(grids)
def test_measured_points_in_order_are_met_exactly(grid: Any) -> None:
    costs, medians = made(grid, ordered=True)
    for (rows, context), median_s in medians.items():
        assert costs.step_s(rows, context) == median_s


@given(
    grids,
    st.lists(st.floats(1, 300), min_size=2, max_size=6),
    st.lists(st.floats(0, 20_000), min_size=2, max_size=4),
)
def test_more_rows_and_more_context_never_cost_less(
    grid: Any, rows: list[float], contexts: list[float]
) -> None:
    costs, medians = made(grid, ordered=False)
    almost = 1 - 1e-9  # rounding of the interpolation
    for context in contexts:
        times = [costs.step_s(count, context) for count in sorted(rows)]
        assert all(later >= almost * earlier for earlier, later in itertools.pairwise(times))
        assert times[0] >= almost * min(medians.values())
    for count in rows:
        count = min(count, costs.row_counts[-1])
        times = [costs.step_s(count, context) for context in sorted(contexts)]
        assert all(later >= almost * earlier for earlier, later in itertools.pairwise(times))


@given(st.lists(st.floats(-1e6, 1e6), max_size=20))
def test_isotonic(values: list[float]) -> None:
    fitted = isotonic(values)
    assert all(later >= earlier for earlier, later in itertools.pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values), abs=1e-3)
    assert isotonic(sorted(values)) == sorted(values)


def test_isotonic_is_the_nearest_in_least_squares() -> None:
    scipy = pytest.importorskip("scipy.optimize")
    values = [3.0, 1.0, 2.0, 2.0, 5.0, 4.0, 4.5, 9.0, 0.5]
    assert isotonic(values) == pytest.approx(list(scipy.isotonic_regression(values).x))


def test_between_and_beyond_the_points() -> None:
    costs = profile({(1, 0): 1.0, (4, 0): 4.0, (1, 100): 2.0, (4, 100): 8.0})
    assert costs.step_s(2, 0) == pytest.approx(2.0)
    assert costs.step_s(1, 50) == pytest.approx(1.5)
    assert costs.step_s(2.5, 50) == pytest.approx((2.5 + 5.0) / 2)  # bilinear
    assert costs.step_s(7, 0) == pytest.approx(7.0)
    assert costs.step_s(1, 300) == pytest.approx(4.0)
    assert costs.verify_cost(4, 100) == pytest.approx(4.0)
    flat = profile({(1, 16): 1.0, (2, 16): 1.5, (1, 32): 2.0, (2, 32): 2.5})
    assert flat.step_s(1, 0) == 1.0  # below the smallest context as at it
    crossing = profile({(1, 0): 1.0, (2, 0): 3.0, (1, 10): 4.0, (2, 10): 4.0})
    assert crossing.step_s(2, 100) >= crossing.step_s(1, 100) == pytest.approx(31.0)
    for rows, context in ((0, 5), (1, -1)):
        with pytest.raises(ValueError, match="at least one row"):
            costs.step_s(rows, context)


def test_rooflines_of_a_worked_example() -> None:
    costs = profile({(1, 0): 1.0, (100, 0): 2.0})
    one, many = costs.step_times
    assert costs.memory_roofline_s(one) == pytest.approx(1000 / 1e5)
    assert costs.compute_roofline_s(one) == pytest.approx(2 * 250 / 5e4)
    assert costs.roofline_s(many) == costs.compute_roofline_s(many) == pytest.approx(100 * 0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_times": ()}, "each pair"),
        ({"step_times": (step_time(1, 0, 1.0), step_time(2, 0, 1.0), step_time(1, 5, 1.0))}, "each pair"),
        ({"step_times": (step_time(2, 0, 1.0),)}, "from 1 on"),
        ({"step_times": (step_time(1, 0, 1.0), step_time(1, 0, 1.0))}, "once"),
        ({"num_weights": 0}, "num_weights"),
        ({"path": 3}, "path must be str"),
    ],
)
def test_profiles_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile({(1, 0): 1.0}, **changes)


def test_numbers_that_cannot_be() -> None:
    for median, best in ((0.0, 1.0), (2.0, 1.0), (float("nan"), 1.0), (1.0, float("inf"))):
        with pytest.raises(ConfigError, match="rate must be positive"):
            Rate(median, best)
    for changes in ({"median_s": 2.0}, {"best_s": 0.0}, {"q3_s": float("inf")}):
        with pytest.raises(ConfigError, match="median between its quartiles"):
            dataclasses.replace(step_time(1, 0, 1.0), **changes)
    with pytest.raises(ConfigError, match="rows must be a whole number"):
        step_time(0, 0, 1.0)


# --- what a chain earns ---------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.floats(0.2, 12.0))
def test_break_even_is_where_a_round_earns_its_cost(gamma: int, cost: float) -> None:
    rate = break_even(gamma, cost)
    if rate is None:
        assert cost >= gamma + 1
    elif cost <= 1:
        assert rate < 1e-9
    else:
        assert acceptance_length(rate, gamma) == pytest.approx(cost)


def test_costs_of_a_round() -> None:
    target = profile({(1, 0): 1.0, (5, 0): 1.2})
    draft = profile({(1, 0): 0.1})
    assert draft_cost(target, draft, 0) == pytest.approx(0.1)
    assert round_cost(target, draft, 4, 0) == pytest.approx(4 * 0.1 + 1.2)


# --- files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


def test_saved_and_found_again(folder: Path) -> None:
    costs = profile({(1, 0): 1.0, (2, 0): 1.25, (1, 7): 1.5, (2, 7): 1.75})
    assert store.find(KEY) is None
    assert not folder.exists()  # looking makes nothing
    path = store.save(costs)
    assert path.parent == folder
    assert store.find(KEY) == costs == store.load(path)
    for field in dataclasses.fields(ProfileKey):
        other = 99 if isinstance(getattr(KEY, field.name), int) else "other"
        assert store.find(dataclasses.replace(KEY, **{field.name: other})) is None
    newer = dataclasses.replace(costs, measured_at="2027-01-01T00:00:00+00:00")
    store.save(newer)
    assert store.find(KEY) == newer
    assert [file.name for file in folder.iterdir()] == [path.name]  # the old one replaced, nothing left over


def test_a_failing_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = profile({(1, 0): 1.0})
    store.save(costs)

    def fails(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        store.save(dataclasses.replace(costs, path="newer"))
    assert store.find(KEY) == costs
    assert len(list(folder.iterdir())) == 1


def damaged(path: Path) -> dict[str, tuple[str, str]]:
    """What is wrong to the file's text and the words that say so."""
    good = json.loads(path.read_text())

    def without(key: str) -> str:
        return json.dumps({"format": 1, "profile": {k: v for k, v in good["profile"].items() if k != key}})

    def changed(**values: Any) -> str:
        return json.dumps({"format": 1, "profile": {**good["profile"], **values}})

    return {
        "cut": (path.read_text()[:100], "not valid JSON"),
        "empty": ("", "not valid JSON"),
        "a list": ("[]", "not of format 1"),
        "newer": (json.dumps({**good, "format": 2}), "not of format 1"),
        "no profile": (json.dumps({"format": 1}), "has no 'profile'"),
        "no times": (without("step_times"), "a list"),
        "times of another kind": (changed(step_times=[3]), "must be objects"),
        "no rate": (without("flops_per_s"), "needs 'flops_per_s'"),
        "a plain rate": (changed(flops_per_s=3.0), "flops_per_s must be Rate"),
        "unknown key": (changed(colour="red"), "unknown profile key 'colour'"),
        "wrong type": (changed(num_weights="many"), "num_weights must be int"),
        "another machine": (changed(key={**good["profile"]["key"], "cpu": "another"}), "another machine's"),
    }


def test_files_that_are_no_use(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = store.save(profile({(1, 0): 1.0}))
    for what, (text, message) in damaged(path).items():
        path.write_text(text)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert store.find(KEY) is None, what
        [record] = caplog.records
        assert message in record.getMessage(), what
        assert "measure again with slipstream info --measure" in record.getMessage()
        assert str(path) in record.getMessage()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        store.load(folder / "nothing.json")


FAST = 0.0075  # of a roofline of 0.01 s, which 1,000 bytes at 1e5 a second make
APART = {"q1_s": 0.4, "q3_s": 0.9, "best_s": 0.4}


@pytest.mark.parametrize(
    ("cells", "apart", "told"),
    [
        ({(1, 0): 0.5, (2, 0): 0.6}, [], None),
        ({(1, 0): 0.0085, (2, 0): 0.02}, [], None),
        (
            {(1, 0): 0.5, (2, 0): FAST},
            [],
            "a step of 2 rows at 0 tokens of context took 0.75 of the least time",
        ),
        (
            {(1, 0): 0.5, (2, 0): 0.5},
            [1],
            "the quartiles of a step of one row at 0 tokens of context are 2.2 times",
        ),
        ({(rows, 0): 0.5 for rows in (1, 2, 3, 4)}, [3], None),
        ({(rows, 0): 0.5 for rows in (1, 2, 3, 4)}, [3, 4], "those of 2 of 4 sizes more than 2 times"),
    ],
)
def test_what_cannot_be_true(cells: dict[tuple[int, int], float], apart: list[int], told: str | None) -> None:
    """Below the roofline, or with quartiles that far apart: another process had the machine."""
    made = profile(cells)
    times = tuple(
        dataclasses.replace(time, **(APART if time.rows in apart else {})) for time in made.step_times
    )
    found = implausible(dataclasses.replace(made, step_times=times, num_weights=1))
    assert (found is None) if told is None else told in (found or "")


def test_a_saved_profile_that_cannot_be_true_is_no_use(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(profile({(1, 0): FAST}))
    with caplog.at_level(logging.WARNING):
        assert store.find(KEY) is None
    assert "cannot be true" in caplog.text
    assert "measure again" in caplog.text


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.profiles_folder() == tmp_path / "own" / "profiles"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    assert store.profiles_folder() == tmp_path / "xdg" / "slipstream" / "profiles"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    assert store.profiles_folder() == Path.home() / ".cache" / "slipstream" / "profiles"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="set SLIPSTREAM_CACHE to a folder"):
        store.prepare_folder()


# --- the machine ----------------------------------------------------------------------------------------------


def test_the_machine_says_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert machine.cpu_name()
    assert machine.num_cpus() >= 1
    for index, size in enumerate(("32K", "1024K", "48M", "odd")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    monkeypatch.setattr(machine, "CACHES", tmp_path)
    assert machine.last_level_cache_bytes() == 48 * 2**20
    monkeypatch.setattr(machine, "CACHES", tmp_path / "nowhere")
    assert machine.last_level_cache_bytes() == 32 * 2**20


def test_no_torch() -> None:
    modules = "slipstream.profiling.store, slipstream.profiling.break_even"
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
