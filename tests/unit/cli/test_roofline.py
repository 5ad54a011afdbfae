"""What a pass must read, how its times are taken, and `slipstream info --measure`."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config
from typer.testing import CliRunner

from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.cli.main import app
from slipstream.models import CausalLM, load_model
from slipstream.models.cpu import threads
from slipstream.models.executor.base import ReadWeights
from slipstream.models.linear.formats import weight_format
from slipstream.models.loading import adapt
from slipstream.profiling import limits, pass_times, store
from slipstream.profiling.profile import CostProfile, Rate
from tests.kit.profiles import profile
from tests.kit.small_llama import sizes

TINY = pass_times.Survey((1, 2, 5, 8), (16, 256), budget_s=0.1, array_bytes=2**20, max_repeats=3)
SHAPE: dict[str, Any] = sizes(16, 2, 4, 2, vocab=50, inner=24, context=128, eos=None, bos=1, pad=0)
ATTENTION = 16 * 16 + 2 * 16 * 8 + 16 * 16
MLP = 3 * 16 * 24
NORMS = 2 * 2 * 16 + 16


def tiny(config: Any, *, pack: bool = True) -> CausalLM:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="slipstream")
    return adapt(model.eval(), canary=False, pack=pack)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array of eight real caches takes longer to read than a test should."""
    monkeypatch.setattr(limits, "last_level_cache_bytes", lambda: 2**17)


# --- what a pass reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_read_are_the_layers_and_the_output_but_not_the_embedding(pack: bool, tied: bool) -> None:
    weights = tiny(LlamaConfig(**SHAPE, tie_word_embeddings=tied), pack=pack).executor.reads
    multiplied = 2 * (ATTENTION + MLP) + 50 * 16
    assert weights == ReadWeights(multiplied, 4 * (multiplied + NORMS))


def test_biases_are_read_but_are_not_multiplied_with() -> None:
    weights = tiny(Qwen2Config(**SHAPE)).executor.reads
    multiplied = 2 * (ATTENTION + MLP) + 50 * 16
    biases = 2 * (16 + 8 + 8)
    assert weights == ReadWeights(multiplied, 4 * (multiplied + NORMS + biases))


def test_half_the_experts_are_read_where_half_are_chosen() -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    router = 16 * 4
    assert tiny(config).executor.reads.number == 2 * (ATTENTION + 2 * MLP + router) + 50 * 16


def test_keys_and_values_are_read_as_far_as_a_layer_looks() -> None:
    per_token = 2 * 2 * 2 * 4 * 4  # layers, keys and values, heads, width, bytes
    everything = tiny(LlamaConfig(**SHAPE))
    weight_bytes = everything.executor.reads.num_bytes
    assert pass_times.bytes_read_per_step(everything, 5, 100) == weight_bytes + 105 * per_token
    window = tiny(MistralConfig(**SHAPE, sliding_window=4))
    assert pass_times.bytes_read_per_step(window, 5, 100) == window.executor.reads.num_bytes + 8 * per_token
    assert pass_times.bytes_read_per_step(window, 1, 2) == window.executor.reads.num_bytes + 3 * per_token


# --- measuring ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def draft() -> CausalLM:
    return load_model(EMBEDDED_DRAFT)


def test_a_measurement_is_a_profile_of_real_passes(draft: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[tuple[int, int, int]] = []
    forward = CausalLM.forward

    def counted(self: CausalLM, groups: Any, pool: Any, hidden_layers: Any = ()) -> Any:
        output = forward(self, groups, pool, hidden_layers)
        [group] = groups
        assert group.tail_seen is None
        assert torch.isfinite(output.logits).all()
        passes.append((len(group.token_ids), group.num_past, len(output.logits)))
        return output

    monkeypatch.setattr(CausalLM, "forward", counted)
    calls: list[tuple[int, int]] = []
    [measured] = pass_times.measure([draft], TINY, lambda done, total: calls.append((done, total)))
    assert measured.row_counts == (1, 2, 5, 8)
    assert measured.contexts == (16, 256)
    assert all(rows == wanted for rows, _, wanted in passes)
    cells = {(rows, context) for rows, context, _ in passes}
    assert cells == {(time.rows, time.context) for time in measured.step_times}
    assert all(time.repeats == 3 for time in measured.step_times)
    assert len(passes) == 8 * 2 + 3 * (8 + 1)
    first, second = passes[17 : 17 + 8], passes[26 : 26 + 8]
    assert first == second[::-1]  # forwards, then backwards
    assert [done for done, _ in calls] == [*range(8 + 3 * 8), 32]
    assert calls[-1] == (32, 32)
    assert measured.key == pass_times.profile_key(draft)
    assert (measured.key.dtype, measured.key.quantization, measured.key.device) == (
        "float32",
        "float16",
        "cpu",
    )
    assert measured.path == EMBEDDED_DRAFT


def test_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [tiny(LlamaConfig(**SHAPE)), tiny(LlamaConfig(**{**SHAPE, "hidden_size": 32}))]
    order: list[int] = []
    timed = pass_times.PassBench.pass_s

    def spy(self: Any, rows: int, context: int) -> float:
        order.append(models.index(self.model))
        return timed(self, rows, context)

    monkeypatch.setattr(pass_times.PassBench, "pass_s", spy)
    survey = dataclasses.replace(TINY, row_counts=(1, 2), contexts=(4,))
    first, second = pass_times.measure(models, survey, lambda done, total: None)
    assert order == [0] * 4 + [1] * 4 + ([0] * 3 + [1] * 3) * 3
    assert first.key.model != second.key.model
    assert first.memory_bytes_per_s == second.memory_bytes_per_s
    assert first.flops_per_s == second.flops_per_s


def test_a_slow_model_gets_few_repeats_and_a_quick_one_no_more_than_the_most(
    draft: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = dataclasses.replace(TINY, row_counts=(1, 2), contexts=(4,), budget_s=100.0, max_repeats=7)
    for pass_s, repeats in ((1e-3, 7), (1000.0, 3), (10.0, 4)):
        monkeypatch.setattr(pass_times.PassBench, "pass_s", lambda self, rows, context, s=pass_s: s)
        [measured] = pass_times.measure([draft], survey, lambda done, total: None)
        assert {time.repeats for time in measured.step_times} == {repeats}


def test_a_first_idea_of_few_rows_is_that_of_steps_in_a_row(
    draft: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of many rows pushes the weights out of the caches, and the next few passes pay for that."""
    passes = [64] * 8

    def pass_s(self: Any, rows: int, context: int) -> float:
        passes.append(rows)
        return rows + 100.0 * any(earlier > 32 for earlier in passes[-1 - pass_times.NUM_WARMUP : -1])

    monkeypatch.setattr(pass_times.PassBench, "pass_s", pass_s)
    assert pass_times.time_passes(draft, (1, 4, 64), 16, 1.0) == {1: 1.0, 4: 4.0, 64: 64.0}


def test_a_first_idea_of_a_slow_model_has_as_many_sizes_as_there_is_time_for(
    draft: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def pass_s(self: Any, rows: int, context: int) -> float:
        clock[0] += 0.1
        return 0.1

    monkeypatch.setattr(pass_times.PassBench, "pass_s", pass_s)
    monkeypatch.setattr(pass_times.time, "perf_counter", lambda: clock[0])
    assert len(pass_times.time_passes(draft, (1, 2, 4, 8, 16, 32), 16, 1.0)) >= 5


def test_a_short_context_is_measured_as_far_as_it_goes() -> None:
    model = tiny(LlamaConfig(**{**SHAPE, "max_position_embeddings": 20}))
    [measured] = pass_times.measure(
        [model], pass_times.Survey(budget_s=0.01, array_bytes=2**20), lambda done, total: None
    )
    assert measured.row_counts == (1, 2, 4, 5, 8)
    assert measured.contexts == (12,)


def test_the_key_tells_models_and_threads_apart_but_not_paths(draft: CausalLM, tmp_path: Path) -> None:
    key = pass_times.profile_key(draft)
    shutil.copytree(EMBEDDED_DRAFT, tmp_path / "moved")
    assert key == pass_times.profile_key(load_model(str(tmp_path / "moved"), canary=False))
    assert key != pass_times.profile_key(tiny(LlamaConfig(**SHAPE)))
    rounded = pass_times.profile_key(load_model(EMBEDDED_DRAFT, dtype="bfloat16", canary=False))
    wide = pass_times.profile_key(load_model(EMBEDDED_DRAFT, dtype="float32", canary=False))
    assert [each.quantization for each in (key, rounded, wide)] == ["float16", "bfloat16", None]
    assert key.dtype == rounded.dtype == "float32"
    options = {"dtype": "bfloat16", "cpu_kernels": "torch"}
    halved = pass_times.profile_key(load_model(EMBEDDED_DRAFT, **options, canary=False))
    assert (halved.dtype, halved.kernels) == ("bfloat16", "torch")
    assert halved.model == key.model
    paged = load_model(
        EMBEDDED_DRAFT,
        **options,
        canary=False,
        attention_backend="slipstream.testing.paged:PagedBackend",
    )
    assert pass_times.profile_key(paged) != halved
    with threads.limit(2):
        assert key != pass_times.profile_key(load_model(EMBEDDED_DRAFT, canary=False))


def test_the_memory_array_outgrows_the_caches_but_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(limits, "available_bytes", lambda device: 2**40)
    monkeypatch.setattr(limits, "last_level_cache_bytes", lambda: 2**20)
    assert limits.memory_array_bytes(2**10, cpu) == 8 * 2**20
    assert limits.memory_array_bytes(2**30, cpu) == 2**30
    monkeypatch.setattr(limits, "available_bytes", lambda device: 2**22)
    assert limits.memory_array_bytes(2**30, cpu) == 2**20


def test_rates_count_bytes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "fastest_s", lambda kinds, device: 0.5)
    cpu = torch.device("cpu")
    assert limits.ReadStream(4096, cpu).bytes_per_s() == 8192
    assert limits.MatrixProduct(torch.float32, weight_format(None), cpu).flops_per_s() == 2 * 1024**3 / 0.5


# --- the command ----------------------------------------------------------------------------------------------


def run(*args: str, **env: str) -> Any:
    return CliRunner().invoke(app, ["info", *args], env=env)


@pytest.fixture
def tiny_survey(monkeypatch: pytest.MonkeyPatch, shared_engines: None) -> None:
    monkeypatch.setattr(pass_times, "Survey", lambda: TINY)
    monkeypatch.setattr(pass_times, "QUICK", TINY)


REFUSALS = {
    "quick without measure": (["--quick"], "--quick needs --measure"),
    "parts without measure": (["--by-part"], "--by-part needs --measure"),
    "plot without measure": (["--plot", "a.png"], "--plot needs --measure"),
    "plot of another kind": (["--measure", "--plot", "a.gif"], "--plot writes .pdf, .png, .svg"),
    "plot nowhere": (["--measure", "--plot", "no/such/a.png"], "there is no folder"),
}


@pytest.mark.parametrize(("args", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refused_before_a_model_is_loaded(
    args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.engine.llm.LLM", None)
    result = run(*args)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_refused_where_nothing_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.engine.llm.LLM", None)
    (tmp_path / "file").write_text("")
    result = run("--measure", SLIPSTREAM_CACHE=str(tmp_path / "file"))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "set SLIPSTREAM_CACHE" in result.stderr


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured beside other tests may be refused, and is not what such a test is about."""
    monkeypatch.setattr("slipstream.cli.measure.implausible", lambda profile: None)
    monkeypatch.setattr("slipstream.profiling.store.implausible", lambda profile: None)


def beyond(profile: CostProfile) -> CostProfile:
    """The same steps on a machine whose memory seemed ten times as slow: all are far below their roofline."""
    slow = 0.1 * min(time.bytes_read / time.median_s for time in profile.step_times)
    return dataclasses.replace(profile, read_bytes_per_s=Rate(slow, slow))


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_what_cannot_be_is_refused_and_not_saved(
    tiny_survey: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    measure = pass_times.measure
    monkeypatch.setattr(pass_times, "measure", lambda *args: [beyond(profile) for profile in measure(*args)])
    env = {"SLIPSTREAM_CACHE": str(tmp_path)}
    result = run("--measure", *form, "--plot", str(tmp_path / "a.svg"), **env)
    assert result.exit_code == 2
    assert re.search(
        r"^error: nothing is saved: .*target: a step of .* took 0\.\d\d of the least", result.stderr, re.M
    )
    assert "stop what else runs on this machine" in result.stderr
    assert list((tmp_path / "profiles").iterdir()) == []
    assert not (tmp_path / "a.svg").exists()
    assert ("over roofline" in result.stdout) == (not form)
    assert "At 256 tokens" not in result.stdout
    quick = run("--measure", "--quick", *form, **env)
    assert quick.exit_code == 0
    assert "No conclusion: measured during other work" in quick.stdout
    assert "At 256 tokens" not in quick.stdout


def test_a_step_is_taken_apart(tiny_survey: None, believed: None) -> None:
    result = run("--measure", "--quick", "--by-part")
    assert result.exit_code == 0, result.output
    assert re.search(r"^a pass of 1 row behind \d+ tokens: ", result.stdout, re.M)
    assert re.search(
        r"^ gate up +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ – [\d.]+ *$", result.stdout, re.M
    )
    found = json.loads(run("--measure", "--quick", "--by-part", "--json").stdout)["measured"]["by_part"]
    assert [each["rows"] for each in found] == [1, 5, 8]
    target = load_model(EMBEDDED_TARGET, canary=False)
    for each in found:
        parts = {part["name"]: part for part in each["parts"]}
        assert {"norm", "qkv", "rotation", "attention", "output", "gate_up", "down", "head"} <= parts.keys()
        assert all(
            len(parts[name]["layers_s"]) == len(target.shapes) for name in ("norm", "qkv", "attention")
        )
        assert parts["head"]["layers_s"] == []
        in_parts = sum(part["work_s"] + part["waiting_s"] for part in each["parts"])
        assert each["rest_s"] == pytest.approx(each["pass_s"] - in_parts)
        read = sum(part["bytes_read"] for name, part in parts.items() if name != "attention")
        norms = target.executor.reads.num_bytes - read
        assert 0 <= norms < 0.01 * read
        cached = pass_times.cache_bytes_by_layer(target, each["rows"], each["context"])
        assert parts["attention"]["bytes_read"] == sum(cached)


def test_parts_of_other_passes_cannot_be_timed(tiny_survey: None) -> None:
    result = run("--measure", "--quick", "--by-part", "--cpu-kernels", "torch")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "--by-part times whole passes of the native CPU kernels" in result.stderr


def test_measured_saved_and_shown_again(tiny_survey: None, believed: None, tmp_path: Path) -> None:
    env = {"SLIPSTREAM_CACHE": str(tmp_path / "cache")}
    before = json.loads(run("--json", **env).stdout)
    assert before["measured"] is None
    picture = tmp_path / "roofline.svg"
    result = run("--measure", "--plot", str(picture), **env)
    assert result.exit_code == 0, result.output
    out = result.stdout
    assert re.search(r"^target: embedded target$", out, re.M)
    assert re.search(r"^draft: embedded draft$", out, re.M)
    assert (
        len(
            re.findall(
                r"^ +(?:16|256) +[1258] +[\d.]+ +[\d.]+ – [\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ +[\d.]+ *$",
                out,
                re.M,
            )
        )
        == 16
    )
    assert "v(5) = " in out
    assert "and v(8) = " in out
    assert re.search(r"costs c = \d\.\d\d of the target's: drafting and checking a chain of 4 costs", out)
    assert result.stderr.count("saved ") == 3
    svg = picture.read_text()
    assert svg.lstrip().startswith("<?xml")
    files = sorted((tmp_path / "cache" / "profiles").iterdir())
    assert len(files) == 2
    target = store.load(next(file for file in files if store.load(file).path == EMBEDDED_TARGET))

    text = run(**env).stdout
    [step] = re.findall(
        r"^step +([\d.]+) ms for one row, v\(5\) ([\d.]+), v\(8\) [\d.]+ at 256 tokens", text, re.M
    )
    one, five = (time.median_s for time in target.step_times if time.context == 256 and time.rows in (1, 5))
    # The page shows two decimals of a millisecond, and a small model's step is under one.
    assert float(step[0]) == pytest.approx(one * 1e3, rel=0.005, abs=0.00501)  # three digits are shown
    assert float(step[1]) == pytest.approx(five / one, abs=0.006)
    assert re.search(r"^draft step +[\d.]+ ms, c [\d.]+$", text, re.M)
    assert "over roofline" not in text

    lone = json.loads(run(EMBEDDED_TARGET, "--json", **env).stdout)["measured"]
    assert lone["draft"] is None
    assert lone["draft_cost"] == []
    assert lone["target"]["measured_at"] == target.measured_at
    assert "draft step" not in run(EMBEDDED_TARGET, **env).stdout


def test_quick_saves_nothing_and_json_is_all_there_is(tiny_survey: None, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    result = run("--measure", "--quick", "--json", SLIPSTREAM_CACHE=str(cache))
    assert result.exit_code == 0, result.output
    assert not cache.exists()
    found = json.loads(result.stdout)
    assert result.stderr == "loading the embedded pair\n"  # no bar where there is no terminal
    assert found["profile_files"] == []
    measured = found["measured"]
    page = (Path(__file__).parents[3] / "docs/guides/roofline.md").read_text().split("## In JSON")[1]
    target = measured["target"]
    for keys in (
        measured,
        target,
        target["key"],
        target["step_times"][0],
        target["flops_per_s"],
        measured["draft_cost"][0],
    ):
        for key in keys:
            assert f"`{key}`" in page, key
    for role in ("target", "draft"):
        old = {"memory_floor_s": "memory_roofline_s", "compute_floor_s": "compute_roofline_s"}
        old["floor_ratio"] = "roofline_ratio"
        derived = (*old, *old.values(), "v")
        for time in measured[role]["step_times"]:
            roofline_s = max(time["memory_roofline_s"], time["compute_roofline_s"])
            assert time["roofline_ratio"] == pytest.approx(time["median_s"] / roofline_s)
            assert all(time[name] == time[new] for name, new in old.items())
            assert time["v"] == 1 or time["rows"] > 1
        plain = {**measured[role]}
        plain["step_times"] = [
            {k: v for k, v in time.items() if k not in derived} for time in plain["step_times"]
        ]
        assert CostProfile.from_json(plain).as_json() == {**plain, "step_times": tuple(plain["step_times"])}
    assert [cost["context"] for cost in measured["draft_cost"]] == [16, 256]


def test_what_the_numbers_mean() -> None:
    from slipstream.cli.measure import Measurement

    flat = {(1, 9): 0.5, (5, 9): 0.6, (8, 9): 0.61}
    slow = {(1, 9): 0.45}
    sentences = Measurement(profile(flat), profile(slow)).conclusion()
    assert "takes 500 ms, 49.55 times what it takes to read its weights and cache (10.1 ms)" in sentences[0]
    assert "v(5) = 1.20 and v(8) = 1.22" in sentences[1]
    assert "Up to 8 rows no step costs more than 1.25" in sentences[2]
    assert "gains speed from an acceptance rate of 0.17 on" in sentences[3]
    assert "c = 0.90" in sentences[4]
    assert "costs 4.80 steps and gains speed from an acceptance rate of 0.98 on" in sentences[4]
    steep = {**flat, (8, 9): 1.0}
    assert (
        "From 8 rows on a step is noticeably more expensive: 2.00"
        in Measurement(profile(steep), None).conclusion()[2]
    )
    slower = {(1, 9): 0.6}
    assert "cannot gain speed" in Measurement(profile(flat), profile(slower)).conclusion()[4]
