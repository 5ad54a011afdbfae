"""Where engines differ in what the same number means: each difference has its test."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from export_cases import draft_record

from slipstream.errors import ConfigError
from slipstream.tools.export import ENGINES, ExportedSetting, ExportError, read_source, settings_format
from slipstream.tools.export.head_info import AuxLayers, HeadInfo, HeadNorms, VocabularyMap
from slipstream.tools.export.record import NgramLookup, ScheduleRange, SpeculativeRecord, TreeShape

HEAD = HeadInfo(layout="eagle3", version=3, output="own", aux_layers=AuxLayers((2, 16, 29)))
EAGLE3 = draft_record(method="eagle3", head=HEAD)
SCHEDULE = (ScheduleRange(1, 8, 4), ScheduleRange(9, 64, 2), ScheduleRange(65, None, 0))


def flags(setting: ExportedSetting) -> dict[str, str]:
    words = setting.argv
    return {word: after for word, after in zip(words, [*words[1:], ""], strict=True) if word.startswith("-")}


def vllm(record: SpeculativeRecord, version: str | None = None) -> dict[str, Any]:
    mapping: dict[str, Any] = json.loads(
        flags(ENGINES["vllm"].to_engine(record, version))["--speculative-config"]
    )
    return mapping


def tensorrt(record: SpeculativeRecord) -> dict[str, Any]:
    mapping: dict[str, Any] = yaml.safe_load(ENGINES["tensorrt-llm"].to_engine(record).files[0].text)
    return mapping


def imported(engine: str, text: str, version: str | None = None) -> SpeculativeRecord:
    return settings_format(engine).from_engine(read_source(text), version).record


def test_only_sglang_counts_the_root() -> None:
    assert vllm(EAGLE3)["num_speculative_tokens"] == 4
    assert tensorrt(EAGLE3)["speculative_config"]["max_draft_len"] == 4
    sglang = flags(ENGINES["sglang"].to_engine(EAGLE3))
    assert sglang["--speculative-num-steps"] == "4"
    assert sglang["--speculative-num-draft-tokens"] == "5"
    ngram = SpeculativeRecord(method="ngram", target="t", depth=4, ngram=NgramLookup(2, 4))
    assert flags(ENGINES["sglang"].to_engine(ngram))["--speculative-num-draft-tokens"] == "5"
    command = "sglang serve --model-path t --speculative-algorithm NGRAM --speculative-num-draft-tokens 5"
    assert imported("sglang", command).depth == 4


def test_a_tree_of_sglang_counts_the_root_too() -> None:
    tree = replace(EAGLE3, depth=3, tree=TreeShape(top_k=4, num_nodes=12))
    assert flags(ENGINES["sglang"].to_engine(tree))["--speculative-num-draft-tokens"] == "13"
    assert tensorrt(tree)["speculative_config"]["max_total_draft_tokens"] == 12


def test_the_method_is_always_written_for_vllm() -> None:
    for model in ("org/eagle3-like-name", "org/medusa"):  # names that vLLM would take for another method
        assert vllm(draft_record(model=model))["method"] == "draft_model"


def test_vllm_without_a_method_is_read_as_vllm_reads_it() -> None:
    given = '{"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "num_speculative_tokens": 3}'
    assert imported("vllm", given).method == "eagle3"


def test_vllm_has_removed_medusa_in_033() -> None:
    medusa = draft_record(method="medusa")
    assert vllm(medusa, "0.32")["method"] == "medusa"
    with pytest.raises(
        ExportError, match=r"removed Medusa in 0\.33, and 0\.32 runs it; the nearest .* ngram"
    ):
        ENGINES["vllm"].to_engine(medusa, "0.33")
    with pytest.raises(ConfigError, match=r"method of vLLM 0\.33"):
        imported("vllm", '{"method": "medusa", "model": "m", "num_speculative_tokens": 3}', "0.33")


@pytest.mark.parametrize("method", ["mlp_speculator", "lilicorr", "custom_class", "xpress"])
def test_methods_of_vllm_without_a_counterpart(method: str) -> None:
    with pytest.raises(ConfigError, match="has no counterpart here; "):
        imported("vllm", json.dumps({"method": method, "num_speculative_tokens": 3}))


@pytest.mark.parametrize("version", ["0.32", "0.33"])
@pytest.mark.parametrize(
    "lossy",
    [
        {"rejection_sample_method": "fly"},
        {"rejection_sample_method": "fly", "fly_window_size": 4},
        {"rejection_sample_method": "synthetic"},
        {"method": "fly"},
        {"method": "synthetic"},
        {"synthetic_acceptance_rates": [0.9, 0.8, 0.7]},
        {"synthetic-acceptance-length": 2},
    ],
)
def test_lossy_rules_of_vllm_are_refused_by_name(lossy: dict[str, Any], version: str) -> None:
    """Also where the version does not know them, and where a rule is given as the method."""
    given = {"method": "ngram", "num_speculative_tokens": 3, **lossy}
    name = next(str(value) if isinstance(value, str) else key for key, value in lossy.items())
    with pytest.raises(ConfigError, match=rf"{name.replace('-', '_')}'? of vLLM changes the text"):
        imported("vllm", json.dumps(given), version)


def test_keys_of_033_are_unknown_in_032() -> None:
    given = '{"method": "ngram", "num_speculative_tokens": 3, "disable_lookahead_block_hashes": true}'
    assert imported("vllm", given, "0.33").depth == 3
    with pytest.raises(ConfigError, match=r"unknown vLLM 0\.32 speculative_config key"):
        imported("vllm", given, "0.32")


@pytest.mark.parametrize(
    ("engine", "setting"),
    [
        ("sglang", "x --speculative-algorithm EAGLE3 --speculative-accept-threshold-acc 0.8"),
        ("vllm", "vllm serve t --spec-method fly --spec-model d --spec-tokens 2"),
        ("llama-cpp", "llama-server -m t.gguf -md d.gguf --spec-synth-len 3"),
        ("llama-cpp", "llama-server -m t.gguf -md d.gguf --spec-synth-rates 0.9,0.8"),
        ("llama-cpp", "llama-server -m t.gguf -md d.gguf --spec-type synthetic"),
        ("tensorrt-llm", '{"decoding_type": "MTP", "use_relaxed_acceptance_for_thinking": true}'),
        ("tensorrt-llm", '{"decoding_type": "Eagle3", "greedy_sampling": false}'),
        ("tensorrt-llm", '{"decoding_type": "Eagle3", "posterior_threshold": 0.1}'),
        ("transformers", '{"assistant_model": "d", "assistant_ensemble_weight": 0.5}'),
    ],
)
def test_settings_that_change_the_text_are_refused(engine: str, setting: str) -> None:
    with pytest.raises(
        ConfigError, match="changes the text; Slipstream accepts drafts only where the target"
    ):
        imported(engine, setting)


def test_ngram_lengths_of_vllm_are_both_five_or_equal() -> None:
    assert imported("vllm", '{"method": "ngram", "num_speculative_tokens": 3}').ngram == NgramLookup(5, 5)
    one = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    assert imported("vllm", one).ngram == NgramLookup(4, 4)


def test_a_draft_model_with_masks_is_vllms_parallel_drafting() -> None:
    setting = ENGINES["vllm"].to_engine(draft_record(method="pard", draft_sampling="one_hot"))
    config = json.loads(flags(setting)["--speculative-config"])
    assert (config["method"], config["parallel_drafting"]) == ("draft_model", True)
    assert imported("vllm", json.dumps(config)).method == "pard"
    head = json.dumps({"method": "eagle3", "model": "h", "parallel_drafting": True})
    assert imported("vllm", head).method == "peagle"
    with pytest.raises(ConfigError, match="parallel_drafting of vLLM is for draft_model and eagle3"):
        imported("vllm", json.dumps({"method": "ngram", "parallel_drafting": True}))


def test_another_vocabulary_drafts_greedily_in_vllm() -> None:
    setting = ENGINES["vllm"].to_engine(draft_record(method="tli", draft_sampling="sampled"))
    config = json.loads(flags(setting)["--speculative-config"])
    assert config["use_heterogeneous_vocab"] is True
    assert "draft_sample_method" not in config
    assert "draft_sampling" in setting.lost


def test_a_shorter_context_of_the_draft_is_told() -> None:
    record = draft_record(draft_context=2048, target_context=8192)
    [note] = [each for each in ENGINES["vllm"].to_engine(record).notes if "max_model_len" in each]
    assert "2,048" in note
    assert "8,192" in note
    longer = replace(record, draft_context=8192)
    assert not any("max_model_len" in each for each in ENGINES["vllm"].to_engine(longer).notes)


def test_a_pard2_model_is_not_given_to_vllm_as_one_that_drafts_alone(tmp_path: Path) -> None:
    config = {"pard_token": 3, "spd_type": "pard"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    record = draft_record(method="pard", model=str(tmp_path))
    assert "parallel_drafting" in flags(ENGINES["vllm"].to_engine(record))["--speculative-config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"spd_type": "pard2"}))
    with pytest.raises(ExportError, match=r"is a PARD-2 model, which reads the target's hidden states"):
        ENGINES["vllm"].to_engine(record)


def test_vllm_needs_the_output_layer_of_an_eagle3_head() -> None:
    with pytest.raises(ExportError, match=r"needs lm_head.*the nearest that it can run is ngram"):
        ENGINES["vllm"].to_engine(replace(EAGLE3, head=replace(HEAD, output="shared")))


def test_what_a_head_leaves_to_vllms_defaults_is_told() -> None:
    notes = " ".join(ENGINES["vllm"].to_engine(replace(EAGLE3, head=replace(HEAD, aux_layers=None))).notes)
    assert "eagle_aux_hidden_state_layer_ids" in notes
    assert "norm_before_residual: vLLM assumes false" in notes
    speculators = replace(EAGLE3, head=replace(HEAD, layout="speculators"))
    assert "norm_before_residual: vLLM assumes true" in " ".join(ENGINES["vllm"].to_engine(speculators).notes)
    norms = HeadNorms(before_residual=False)
    notes = " ".join(ENGINES["vllm"].to_engine(replace(EAGLE3, head=replace(HEAD, norms=norms))).notes)
    assert "eagle_aux_hidden_state_layer_ids" not in notes
    assert "norm_before_residual" not in notes


def test_sglang_takes_the_embedding_from_the_target() -> None:
    own = replace(EAGLE3, head=replace(HEAD, embedding="own"))
    assert any("replaces the head's own embedding" in note for note in ENGINES["sglang"].to_engine(own).notes)
    assert not any("embedding" in note for note in ENGINES["sglang"].to_engine(EAGLE3).notes)
    assert not any("embedding" in note for note in ENGINES["vllm"].to_engine(own).notes)


def test_rejection_sampling_of_sglang_needs_a_chain_and_the_whole_vocabulary() -> None:
    sampled = replace(EAGLE3, draft_sampling="sampled", verify="rejection")
    switch = "--speculative-use-rejection-sampling"
    assert switch in ENGINES["sglang"].to_engine(sampled).argv
    pruned = replace(sampled, head=replace(HEAD, vocabulary=VocabularyMap("offset", 1000)))
    setting = ENGINES["sglang"].to_engine(pruned)
    assert switch not in setting.argv
    assert "whole vocabulary" in setting.lost["verify"]
    draft = ENGINES["sglang"].to_engine(draft_record(draft_sampling="sampled", verify="rejection"))
    assert switch not in draft.argv


def test_a_list_of_hot_tokens_goes_to_sglang() -> None:
    vocabulary = VocabularyMap("hot_ids", 1000, "hot.pt")
    record = draft_record(method="eagle", head=HeadInfo(layout="eagle", version=1, vocabulary=vocabulary))
    assert flags(ENGINES["sglang"].to_engine(record))["--speculative-token-map"] == "hot.pt"


def test_tensorrt_takes_the_layers_from_the_setting_by_the_layer_that_wrote() -> None:
    assert tensorrt(EAGLE3)["speculative_config"]["eagle3_layers_to_capture"] == [1, 15, 28]
    text = yaml.safe_dump(tensorrt(EAGLE3))
    form = settings_format("tensorrt-llm")
    found = form.from_engine(replace(read_source("{}"), mapping=yaml.safe_load(text)))
    assert any("[2, 16, 29]" in note for note in found.notes)
    assert tensorrt(found.record)["speculative_config"]["eagle3_layers_to_capture"] == [1, 15, 28]
    embedding = replace(HEAD, aux_layers=AuxLayers((0, 3, 5)))
    with pytest.raises(ExportError, match="reads the embedding"):
        tensorrt(replace(EAGLE3, head=embedding))
    with pytest.raises(ExportError, match=r"rising order.*the nearest that it can run is ngram"):
        tensorrt(replace(EAGLE3, head=replace(HEAD, aux_layers=AuxLayers((5, 3, 1)))))


def test_the_same_schedule_in_three_forms() -> None:
    scheduled = replace(EAGLE3, schedule=SCHEDULE)
    ranges = vllm(scheduled)["num_speculative_tokens_per_batch_size"]
    assert ranges[:2] == [[1, 8, 4], [9, 64, 2]]  # first and last, both included
    assert ranges[2][0] == 65
    assert ranges[2][2] == 0
    lengths = tensorrt(scheduled)["speculative_config"]["draft_len_schedule"]
    assert lengths == {1: 4, 8: 4, 64: 2}  # the last of each range; above 64 nothing is drafted
    [file] = ENGINES["sglang"].to_engine(scheduled).files
    slots = json.loads(file.text)
    assert {key: slots[key]["candidate_steps"] for key in ("1", "9", "65")} == {"1": [4], "9": [2], "65": [0]}


def test_beyond_the_last_range_vllm_goes_on_and_tensorrt_stops() -> None:
    base = {"method": "ngram", "num_speculative_tokens": 4}
    ranges = {**base, "num_speculative_tokens_per_batch_size": [[1, 8, 4], [17, 64, 2]]}
    assert imported("vllm", json.dumps(ranges)).schedule == (
        ScheduleRange(1, 16, 4),  # the gap belongs to the range before it
        ScheduleRange(17, None, 2),
    )
    trt = {"decoding_type": "NGram", "max_draft_len": 4}
    lengths = {**trt, "draft_len_schedule": {4: 4, 8: 2}}
    assert imported("tensorrt-llm", json.dumps(lengths)).schedule == (
        ScheduleRange(1, 4, 4),
        ScheduleRange(5, 8, 2),
        ScheduleRange(9, None, 0),
    )
    assert imported("tensorrt-llm", json.dumps({**trt, "max_concurrency": 16})).schedule == (
        ScheduleRange(1, 16, 4),
        ScheduleRange(17, None, 0),
    )


@pytest.mark.parametrize(
    ("ranges", "why"),
    [
        ([[2, 8, 4]], "begins at 1"),
        ([[1, 8, 4], [8, 9, 2]], "overlap"),
        ([[1, 8, 5]], "depth 5"),
        ([[1, 8, 1, 100, 5]], "ranges of contexts"),
        ({"1": 4}, "must be a list"),
    ],
)
def test_schedules_that_are_none(ranges: Any, why: str) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": ranges}
    with pytest.raises(ConfigError, match=why):
        imported("vllm", json.dumps(given))


def test_sglangs_own_example_survives() -> None:
    """Its manual: 5 steps, top-k 8 and 64 draft tokens, of which one is the root."""
    words = "x --model-path t --speculative-algorithm EAGLE3 --speculative-draft-model-path h "
    words += "--speculative-num-steps 5 --speculative-eagle-topk 8 --speculative-num-draft-tokens 64"
    record = imported("sglang", words)
    assert record.tree == TreeShape(top_k=8, num_nodes=63)
    assert flags(ENGINES["sglang"].to_engine(record))["--speculative-num-draft-tokens"] == "64"


def test_the_numbers_that_sglang_chooses_itself(tmp_path: Path) -> None:
    standalone = imported("sglang", "x --speculative-algorithm STANDALONE --speculative-draft-model-path d")
    assert (standalone.depth, standalone.tree) == (3, None)
    eagle = "x --speculative-algorithm EAGLE3 --speculative-draft-model-path h"
    found = settings_format("sglang").from_engine(read_source(eagle))
    assert (found.record.depth, found.record.tree) == (5, TreeShape(top_k=4, num_nodes=7))
    assert any("by the target" in note for note in found.notes)
    file = tmp_path / "adaptive.json"
    file.write_text('{"1": {"candidate_steps": [4]}, "9": {"candidate_steps": [2]}}')
    record = imported("sglang", f"{eagle} --speculative-adaptive --speculative-adaptive-config {file}")
    assert (record.depth, record.tree) == (4, None)
    assert record.schedule == (ScheduleRange(1, 8, 4), ScheduleRange(9, None, 2))
    begins = f"{eagle} --speculative-num-steps 2 --speculative-adaptive --speculative-adaptive-config {file}"
    assert imported("sglang", begins) == record
    never = replace(EAGLE3, schedule=(ScheduleRange(1, None, 0),))
    with pytest.raises(ExportError, match="never drafts; the nearest that it can run is no speculation"):
        ENGINES["sglang"].to_engine(never)


def test_transformers_ends_drafts_at_its_default_threshold() -> None:
    found = settings_format("transformers").from_engine(read_source('{"model": "t", "assistant_model": "d"}'))
    assert found.record.confidence_threshold == 0.4
    assert any("0.4, its default" in note for note in found.notes)
    told = settings_format("transformers").from_engine(
        read_source('{"model": "t", "assistant_model": "d", "assistant_confidence_threshold": 0}')
    )
    assert (told.record.confidence_threshold, told.notes) == (0.0, ())
    notes = ENGINES["transformers"].to_engine(draft_record(confidence_threshold=0.3)).notes
    assert any("each token's probability" in note for note in notes)


def test_a_tree_becomes_a_chain_where_there_are_no_trees() -> None:
    tree = replace(EAGLE3, depth=4, tree=TreeShape(top_k=4, num_nodes=16))
    for engine in ("vllm", "llama-cpp"):
        with pytest.raises(
            ExportError, match="the nearest that it can run is eagle3, a chain of 4 tokens"
        ) as found:
            ENGINES[engine].to_engine(tree)
        assert found.value.nearest == replace(tree, tree=None)


def test_the_bounds_of_trees() -> None:
    """OpenVINO: b²(d - 1) + b >= n >= d; TensorRT-LLM: d <= n <= k·d; SGLang: n <= k²(d - 1) + k."""
    many = replace(EAGLE3, depth=4, tree=TreeShape(top_k=8, num_nodes=15))
    assert ENGINES["openvino"].to_engine(many).record.tree == many.tree
    wide = replace(EAGLE3, depth=3, tree=TreeShape(top_k=2, num_nodes=10))
    assert ENGINES["openvino"].to_engine(wide).record.tree == wide.tree
    assert ENGINES["sglang"].to_engine(wide).record.tree == wide.tree
    wider = replace(wide, tree=TreeShape(top_k=2, num_nodes=11))
    for engine, record, most in (("sglang", wider, 10), ("openvino", wider, 10), ("tensorrt-llm", wide, 6)):
        with pytest.raises(ExportError) as found:
            ENGINES[engine].to_engine(record)
        assert found.value.nearest is not None
        assert found.value.nearest.tree == TreeShape(top_k=2, num_nodes=most)
    undrafted = SpeculativeRecord(method="off", tree=wide.tree)
    for engine in ("sglang", "openvino", "tensorrt-llm"):
        assert ENGINES[engine].to_engine(undrafted).record.tree is None
    narrow = replace(EAGLE3, depth=4, tree=TreeShape(top_k=2, num_nodes=3))
    for engine in ("openvino", "tensorrt-llm"):
        with pytest.raises(ExportError, match=r"needs from 4 to \d+ tokens in this tree, not 3"):
            ENGINES[engine].to_engine(narrow)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"norms": HeadNorms(fc_norm=True)}, "fc_norm"),
        ({"num_layers": 2}, "has 2 layers"),
        ({"aux_layers": AuxLayers((1, 2, 3, 4))}, "reads 4 hidden states"),
    ],
)
def test_heads_that_llama_cpp_cannot_run(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ExportError, match=why) as found:
        ENGINES["llama-cpp"].to_engine(replace(EAGLE3, head=replace(HEAD, **changes)))
    assert found.value.nearest is not None
    assert found.value.nearest.method == "ngram"


def test_llama_cpp_drafts_three_tokens_unless_told() -> None:
    assert imported("llama-cpp", "llama-server -m t.gguf -md d.gguf --spec-type draft-simple").depth == 3
    old = settings_format("llama-cpp").from_engine(read_source("llama-server -m t -md d --draft-max 8"))
    assert old.record.depth == 8
    assert any("--spec-draft-n-max" in note for note in old.notes)


def test_flags_that_only_look_like_ours_are_none() -> None:
    assert imported("llama-cpp", "llama-server -m t.gguf --special").method == "off"
    assert imported("sglang", "x --model-path t --spec-trace-dir d").method == "off"


def test_transformers_reads_the_depth_from_the_drafts_configuration() -> None:
    setting = ENGINES["transformers"].to_engine(draft_record())
    program = next(file.text for file in setting.files if file.name.endswith(".py"))
    assert "assistant.generation_config.num_assistant_tokens = 4" in program
    assert "assistant.generation_config.assistant_confidence_threshold = 0.0" in program  # its default is 0.4
    call = program[program.index("model.generate(") :]
    assert "num_assistant_tokens" not in call


def test_openvino_takes_a_threshold_or_a_number() -> None:
    setting = ENGINES["openvino"].to_engine(draft_record(confidence_threshold=0.4))
    values = json.loads(setting.files[0].text)
    assert values["assistant_confidence_threshold"] == 0.4
    assert "num_assistant_tokens" not in values
    assert "depth" in setting.lost
    with pytest.raises(ConfigError, match="not both"):
        imported("openvino", '{"model": "t", "draft_model": "d", "prompt_lookup": true}')


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", ["hydra", "token_recycling", "lookahead", "self", "cascade", "auto"])
def test_what_no_engine_has_is_refused_with_what_comes_nearest(engine: str, method: str) -> None:
    record = SpeculativeRecord(method=method, target="t", model="m" if method == "hydra" else None, depth=4)
    with pytest.raises(
        ExportError, match=r"the nearest that it can run is (ngram|suffix), a chain of 4 tokens"
    ):
        ENGINES[engine].to_engine(record)


@pytest.mark.parametrize(
    ("engine", "setting", "key"),
    [
        ("vllm", '{"method": "ngram", "num_speculativ_tokens": 3}', "num_speculative_tokens"),
        ("sglang", "x --speculative-algorithm EAGLE --speculative-num-step 3", "--speculative-num-steps"),
        ("tensorrt-llm", '{"decoding_type": "NGram", "max_draft_length": 3}', "max_draft_len"),
        ("llama-cpp", "llama-server -m t -md d --spec-draft-nmax 3", "--spec-draft-n-max"),
        ("openvino", '{"model": "t", "draft_model": "d", "num_asistant_tokens": 3}', "num_assistant_tokens"),
        ("transformers", '{"assistant_model": "d", "num_asistant_tokens": 3}', "num_assistant_tokens"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(engine: str, setting: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{key}'"):
        imported(engine, setting)


def test_programs_and_files_of_users(tmp_path: Path) -> None:
    program = tmp_path / "serve.py"
    program.write_text(
        'from vllm import LLM\nname = "t"\nllm = LLM(model=name, speculative_config={"method": "eagle3", "model": "h", '
        '"num_speculative_tokens": 2})\n'
    )
    assert imported("vllm", str(program)) == SpeculativeRecord(
        method="eagle3", target="t", model="h", depth=2
    )
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/sh\nCUDA=1 vllm serve t \\\n  --speculative-config.method ngram "
                      "--speculative-config.num_speculative_tokens 6\n")  # fmt: skip
    assert imported("vllm", str(script)).depth == 6
    server = tmp_path / "server.yaml"
    server.write_text("model: t\nspeculative-config: {method: suffix, num_speculative_tokens: 8}\n")
    assert imported("vllm", str(server)).method == "suffix"
    genai = tmp_path / "genai.py"
    genai.write_text(
        'import openvino_genai as ov\npipe = ov.LLMPipeline("t", "CPU", draft_model=ov.draft_model("d", "CPU"))\n'
        "config = ov.GenerationConfig()\nconfig.num_assistant_tokens = 7\n"
    )
    assert imported("openvino", str(genai)) == SpeculativeRecord(
        method="draft_model", target="t", model="d", depth=7
    )
    with pytest.raises(ConfigError, match=r"there is no file 'nowhere\.json'"):
        imported("vllm", "nowhere.json")
    with pytest.raises(ConfigError, match="neither a file nor an engine's command"):
        imported("vllm", "nonsense words here")
    assert imported("vllm", "/opt/bin/vllm serve t") == SpeculativeRecord(method="off", target="t")


@pytest.mark.parametrize("name", ["run_openvino.py", "run_transformers.py"])
def test_exported_programs_can_be_imported(name: str, tmp_path: Path) -> None:
    engine = name.removesuffix(".py").removeprefix("run_")
    for record in (draft_record(), SpeculativeRecord(method="ngram", target="t", depth=5)):
        setting = ENGINES[engine].to_engine(record)
        [text] = [file.text for file in setting.files if file.name == name]
        (tmp_path / name).write_text(text)
        found = settings_format(engine).from_engine(read_source(str(tmp_path / name)))
        assert found.record == setting.record
        told = any("EAGLE-3" in note for note in found.notes)
        assert told == (engine == "openvino" and record.method == "draft_model")


@pytest.mark.parametrize(
    ("engine", "setting", "why"),
    [
        ("vllm", '{"method": ["ngram"], "num_speculative_tokens": 3}', "method of vLLM"),
        ("vllm", '{"num_speculative_tokens": 3}', "method"),
        (
            "tensorrt-llm",
            '{"decoding_type": "Eagle3", "max_draft_len": 3, "eagle_choices": []}',
            "list of paths",
        ),
        (
            "tensorrt-llm",
            '{"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "h", "eagle_choices": [["a"]]}',
            "whole number",
        ),
        (
            "tensorrt-llm",
            '{"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "h", "eagle3_layers_to_capture": 5}',
            "must be a list",
        ),
    ],
)
def test_values_of_the_wrong_kind_are_a_clear_line(engine: str, setting: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(engine, setting)


@pytest.mark.parametrize("engine", ENGINES)
def test_keys_that_are_no_names(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "setting.yaml"
    file.write_text("1: ngram\n")
    with pytest.raises(ConfigError, match="has the key 1; keys are names"):
        imported(engine, str(file))


def test_literals_that_python_cannot_make_are_unknown(tmp_path: Path) -> None:
    program = tmp_path / "serve.py"
    program.write_text('odd = {[1]: 2}\nllm = LLM(model="t", speculative_config={"method": "suffix"})\n')
    assert imported("vllm", str(program)).method == "suffix"


def test_llama_cpp_gives_no_log_probabilities_while_it_speculates() -> None:
    wanted = "log-probability 0"
    assert any(wanted in note for note in ENGINES["llama-cpp"].to_engine(draft_record()).notes)
    off = replace(draft_record(), method="off", model=None, depth=None)
    assert not any(wanted in note for note in ENGINES["llama-cpp"].to_engine(off).notes)


def test_llama_cpp_samples_draft_models_and_no_heads() -> None:
    sampled = draft_record(draft_sampling="sampled", verify="rejection")
    setting = ENGINES["llama-cpp"].to_engine(sampled)
    assert flags(setting)["--spec-draft-sampling"] == "probabilistic"
    assert setting.lost == {}
    head = ENGINES["llama-cpp"].to_engine(replace(EAGLE3, draft_sampling="sampled"))
    assert "--spec-draft-sampling" not in head.argv
    assert "draft_sampling" in head.lost


@pytest.mark.parametrize("sampling", ["sampled", "coupled", "one_hot"])
def test_older_builds_of_llama_cpp_are_not_given_a_flag_that_they_do_not_know(sampling: str) -> None:
    record = draft_record(draft_sampling=sampling, verify="rejection")
    setting = ENGINES["llama-cpp"].to_engine(record, "2026-09")
    assert "--spec-draft-sampling" not in setting.argv
    assert setting.record.draft_sampling == "one_hot"
    assert ("draft_sampling" in setting.lost) == (sampling != "one_hot")
    assert "verify" in setting.lost


def test_all_spellings_of_vllms_flags(tmp_path: Path) -> None:
    short = "/opt/env/bin/vllm serve t --enforce-eager --spec-method ngram --spec-tokens 3"
    wanted = SpeculativeRecord(method="ngram", target="t", depth=3, ngram=NgramLookup(5, 5))
    assert imported("vllm", short) == wanted
    dashes = """vllm serve t --speculative_config '{"method": "ngram", "num-speculative-tokens": 3}'"""
    assert imported("vllm", dashes) == wanted
    file = tmp_path / "serve.yaml"
    file.write_text("model: t\nspec-method: ngram\nspec-tokens: 3\n")
    assert imported("vllm", f"vllm serve --config {file}") == wanted
    assert imported("vllm", str(file)) == wanted


def test_a_command_longer_than_a_name_of_a_file_is_a_command() -> None:
    words = (
        "vllm",
        "serve",
        "target",
        "--speculative-config.method",
        "ngram",
        "--served-model-name",
        600 * "n",
    )
    assert read_source(" ".join(words)).words == words


@pytest.mark.parametrize(
    ("engine", "setting", "depth"),
    [
        ("vllm", '{"method": "mtp", "num_speculative_tokens": 2}', 2),
        ("vllm", '{"method": "deepseek_mtp", "num_speculative_tokens": 1}', 1),
        ("vllm", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}', 2),
        ("sglang", "x --speculative-algorithm NEXTN", 3),
        ("sglang", "x --speculative-algorithm NEXTN --speculative-num-steps 2", 2),
        ("tensorrt-llm", '{"decoding_type": "MTP", "num_nextn_predict_layers": 2}', 2),
        ("tensorrt-llm", '{"decoding_type": "MTP", "max_draft_len": 2}', 2),
        ("llama-cpp", "llama-server -m t.gguf --spec-type draft-mtp --spec-draft-n-max 2", 2),
        ("transformers", '{"model": "t", "use_mtp": true}', 1),
    ],
)
def test_multi_token_prediction_has_a_name_of_each_engine(engine: str, setting: str, depth: int) -> None:
    record = imported(engine, setting)
    assert (record.method, record.model, record.depth) == ("mtp", None, depth)
    exported = ENGINES[engine].to_engine(record)
    assert exported.record.method == "mtp"
    assert "model" not in exported.lost
