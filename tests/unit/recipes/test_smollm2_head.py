"""The recipe of SmolLM2's head at a tiny size: the stages that run with PyTorch and Transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from recipes.smollm2_head.__main__ import TRAINED, main
from recipes.smollm2_head.answers import read_prompts, write_answers
from recipes.smollm2_head.gguf_weights import read_gguf
from recipes.smollm2_head.heads import cut, measured, unpack
from recipes.smollm2_head.target import Target
from recipes.smollm2_head.tau import steps_of
from slipstream import LLM, SamplingParams
from slipstream.assets import EMBEDDED_EAGLE3, EMBEDDED_TARGET
from slipstream.train.batches import TrainingDocument
from slipstream.train.eagle import EagleStudent
from slipstream.train.options import EagleTrainOptions, TrainOptions
from slipstream.train.target import FrozenTarget
from tests.kit.gguf_files import write_model

VOCAB = 4096


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A tiny Llama with the types of the real file, and what Transformers makes of its numbers."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    keys = {"vocab_size": VOCAB, "rope.freq_base": 20000.0}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_model(path, "llama", model, keys, {"": "Q4_1", "token_embd": "Q8_0"})
    return path, model


@pytest.fixture(scope="module")
def file(tiny: tuple[Path, LlamaForCausalLM]) -> Path:
    return tiny[0]


@pytest.fixture(scope="module")
def reference(tiny: tuple[Path, LlamaForCausalLM]) -> LlamaForCausalLM:
    return tiny[1]


@pytest.fixture(scope="module")
def folder(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, the tokenizer and the unpacked target."""
    out = tmp_path_factory.mktemp("out")
    rng = np.random.default_rng(1)
    lengths = rng.integers(3, 20, 40)
    token_ids = rng.integers(3, VOCAB, int(lengths.sum())).astype(np.int32)
    np.savez_compressed(out / "prompts.npz", token_ids=token_ids, ends=np.cumsum(lengths))
    AutoTokenizer.from_pretrained(EMBEDDED_TARGET).save_pretrained(out / "target")
    unpack([file], out / "target")
    return out


def test_weights_are_those_that_the_gguf_package_reads(file: Path) -> None:
    fields, weights = read_gguf([file])
    assert fields["llama.attention.head_count_kv"] == 2
    reader = gguf.GGUFReader(file)
    assert {tensor.name for tensor in reader.tensors} == weights.keys()
    for tensor in reader.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_allclose(weights[tensor.name].numpy().reshape(expected.shape), expected, atol=1e-6)


def test_what_is_unpacked_is_the_same_model(folder: Path, reference: LlamaForCausalLM) -> None:
    unpacked = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(unpacked.state_dict()[name], weight, atol=2e-3, rtol=1e-3)


def test_a_file_in_parts_is_read_as_a_whole(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    parts = [tmp_path / "a", tmp_path / "b"]
    parts[0].write_bytes(data[:5000])
    parts[1].write_bytes(data[5000:])
    whole, joined = read_gguf([file])[1], read_gguf(parts)[1]
    assert all(torch.equal(whole[name], joined[name]) for name in whole)


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model" * 10)
    assert main(["answers", str(tmp_path), "--model", str(other), "--minutes", "1", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "error: other.gguf is not a GGUF file of version 3\n"


@torch.inference_mode()
def test_the_target_computes_what_transformers_does(file: Path, reference: LlamaForCausalLM) -> None:
    target = Target([file], "cpu", torch.float32)
    token_ids = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = target.new_cache(2, 12)
    cache.seen[:] = True
    states = target.forward(token_ids, torch.arange(12).expand(2, -1), cache)
    expected = reference(token_ids).logits
    torch.testing.assert_close(target.logits(states), expected, atol=1e-4, rtol=1e-4)


def test_greedy_answers_are_those_of_one_text_at_a_time(
    file: Path, folder: Path, reference: LlamaForCausalLM, tmp_path: Path
) -> None:
    """Whoever shares the batch, and however the texts are padded; a second run answers what is left."""
    target = Target([file], "cpu", torch.float32)
    prompts = read_prompts(folder / "prompts.npz")[:10]
    answers = tmp_path / "answers.jsonl"
    write_answers(target, prompts[:4], answers, batch=3, max_tokens=6, minutes=1)
    write_answers(target, prompts, answers, batch=4, max_tokens=6, minutes=1)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(10))
    agreed = []
    for row in rows:
        [(begin, end)] = row["answer_spans"]
        assert row["token_ids"][:begin] == prompts[row["index"]]
        assert end == len(row["token_ids"])
        if row["greedy"]:
            prompt = torch.tensor([row["token_ids"][:begin]])
            expected = reference.generate(
                prompt, max_new_tokens=6, do_sample=False, eos_token_id=target.eos_token_id, pad_token_id=0
            )
            agreed.append(row["token_ids"] == expected[0].tolist())
    assert agreed == [True] * 5


def test_processes_take_parts(file: Path, folder: Path, tmp_path: Path) -> None:
    target = Target([file], "cpu", torch.float32)
    prompts = read_prompts(folder / "prompts.npz")[:2] * 100
    found = []
    for part in range(2):
        answers = tmp_path / f"answers{part}.jsonl"
        write_answers(target, prompts, answers, batch=64, max_tokens=1, minutes=1, part=(part, 2))
        found.append({json.loads(line)["index"] for line in answers.read_text().splitlines()})
    assert not found[0] & found[1]
    assert found[0] | found[1] == set(range(200))


def test_steps_of_decoding_are_counted() -> None:
    # Tokens 2 to 9 are the answer; the first comes from the prompt's pass.
    nothing, everything = [0] * 10, [3] * 10
    assert steps_of(nothing, 2, 10) == 7
    assert steps_of(everything, 2, 10) == 2
    assert steps_of([0, 0, 1, 9, 0, 9, 9, 9, 9, 9], 2, 10) == 3, "2 to 4, 4 to 5, 5 to the end"


def test_answers_and_heads_are_made_within_one_budget(file: Path, folder: Path) -> None:
    common = [str(folder), "--model", str(file), "--device", "cpu", "--dtype", "float32", "--minutes", "0.1"]
    sizes = ["--max-tokens", "24", "--batch", "40", "--batch-rows", "4", "--row-length", "64"]
    assert main(["all", *common, *sizes, "--draft-vocab-size", "512", "--cache-features"]) == 0
    assert (folder / "features" / "features.f16").stat().st_size > 0
    for kind in TRAINED:
        figures = json.loads((folder / kind / "tau.json").read_text())
        assert figures["num_tokens"] > 0
        assert 1 <= figures["tau_1"] <= figures["tau_2"] <= 3
        written = folder / kind / kind / "model.safetensors"
        parts = sorted(written.parent.glob("model.safetensors.part*"))
        assert b"".join(part.read_bytes() for part in parts) == written.read_bytes()
        assert main(["halve", str(folder), "--kind", kind, "--to", str(folder / "half")]) == 0
        for name, half in load_file(folder / "half" / "model.safetensors").items():
            whole = load_file(written)[name]
            assert torch.equal(half, whole.half() if whole.is_floating_point() else whole)
        more = folder / f"more-{kind}"
        for name in ("target", "answers0.jsonl"):
            (more / name).parent.mkdir(exist_ok=True)
            (more / name).symlink_to(folder / name)
        given = [str(more), *common[1:], "--batch-rows", "4", "--row-length", "64", "--kind", kind]
        assert main(["train", *given, "--init", str(folder / "half")]) == 0
        assert (
            json.loads((more / kind / kind / "training.json").read_text())["made_with"]["shape"]["init"]
            == "half"
        )
        assert written.stat().st_size > 1.8 * (folder / "half" / "model.safetensors").stat().st_size


def test_large_files_are_cut(tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(bytes(range(256)) * 70000)
    parts = cut(file)
    assert [part.stat().st_size for part in parts] == [2**24, 256 * 70000 - 2**24]
    assert b"".join(part.read_bytes() for part in parts) == file.read_bytes()


def test_the_acceptance_length_is_the_engines() -> None:
    """Of the embedded head, on answers that the engine has just written with it."""
    chain = {"num_speculative_tokens": 4, "tree_top_k": 1, "num_draft_nodes": None}
    llm = LLM(speculative_config={"method": "eagle3", "model": "embedded", **chain})
    prompts = ["Show me how to use the command `tar`.", "Write a SQL query. How many rows are there?"]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    documents = []
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        is_answer = np.arange(len(prompt) + len(answer)) >= len(prompt)
        documents.append(TrainingDocument("", np.array(prompt + answer), is_answer))
    target = FrozenTarget(EMBEDDED_TARGET, torch.device("cpu"), torch.float32)
    student = EagleStudent(EagleTrainOptions(init=EMBEDDED_EAGLE3), target, documents, 3, 0)
    plan = TrainOptions(max_tokens=1, batch_rows=2, row_length=128)
    figures = measured(student, documents, plan, pad=0)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 20
    num_tokens = sum(len(output.outputs[0].token_ids) - 1 for output in outputs)
    assert figures["num_tokens"] == num_tokens
    passes = sum(output.metrics.num_steps - 1 for output in outputs)  # without the prompt's
    assert figures["tau_4"] == pytest.approx(num_tokens / passes, rel=0.02)
