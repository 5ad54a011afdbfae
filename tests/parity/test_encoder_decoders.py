"""Encoder-decoders compute what Transformers computes, with drafts too, and the encoder runs once a request."""

from __future__ import annotations

import asyncio
import json
import shutil
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from typer.testing import CliRunner

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.cli.main import app
from slipstream.deploy.process import ReplicaDescription, start_replica
from slipstream.errors import CapacityError, ConfigError, ModelError, RequestError, UnsupportedModelError
from slipstream.models import encoder_decoder, load_model
from slipstream.models.attention import masks
from slipstream.models.executor.eager import EagerExecutor
from slipstream.models.verdicts import LoadVerdict
from slipstream.tools.audit.replaying import Replayer
from tests.kit.encoder_decoders import FAMILIES, RATE, Stock, prompts, save, sound

LENGTH = 20
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, min_tokens=LENGTH)
Path_of = Callable[..., str]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Path_of:
    made: dict[tuple[str, float], str] = {}
    folder = tmp_path_factory.mktemp("encoder_decoders")

    def find(family: str, noise: float = 0.0) -> str:
        if (family, noise) not in made:
            made[family, noise] = save(family, folder, noise)
        return made[family, noise]

    return find


def drafts(path_of: Path_of, family: str) -> list[dict[str, Any]]:
    model = {"method": "draft_model", "model": path_of(family, 0.1)}
    return [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {**model, "num_speculative_tokens": 3},
        {**model, "num_draft_nodes": 8, "tree_top_k": 3, "num_speculative_tokens": 3},
    ]


def answers(
    llm: LLM, given: list[Any], params: SamplingParams | list[SamplingParams] = GREEDY
) -> list[list[int]]:
    outputs = llm.generate(given, params)
    assert llm.engine.integrity() == []
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_transformers_own(family: str, path_of: Path_of) -> None:
    stock, given = Stock(path_of(family)), prompts(family)
    expected = [stock.answer(prompt, LENGTH) for prompt in given]
    assert len({tuple(text) for text in expected}) > 2, "the texts hardly depend on the encoder"
    plain = LLM(path_of(family))
    assert answers(plain, given) == expected
    assert answers(plain, given) == expected, "after what was kept of the same inputs"
    chosen = drafts(path_of, family) if family in ("t5", "bart", "whisper") else drafts(path_of, family)[2:]
    for speculative in chosen:
        llm = LLM(path_of(family), speculative_config=speculative, max_num_batched_tokens=33)
        assert answers(llm, given) == expected, speculative


@pytest.mark.parametrize("family", ["umt5", "mbart", "whisper"])
def test_sampled_text_is_the_same_with_drafts(family: str, path_of: Path_of) -> None:
    given = prompts(family)
    params = [SamplingParams(temperature=0.4, seed=seed, max_tokens=LENGTH) for seed in range(len(given))]
    expected = answers(LLM(path_of(family)), given, params)
    for speculative in drafts(path_of, family):
        llm = LLM(path_of(family), speculative_config=speculative)
        outputs = llm.generate(given, params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert (
            sum(output.metrics.num_accepted_tokens for output in outputs) > 0
            or speculative["method"] == "ngram"
        )


def begun(prompt: str, begin: int, length: int = 40) -> dict[str, Any]:
    """A prompt whose answer begins with so many given tokens."""
    return {
        "encoder_prompt": prompt,
        "decoder_prompt": [3 + (begin + 11 * place) % 190 for place in range(length)],
    }


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_long_beginnings_are_computed_in_parts_and_reused_for_the_same_input_alone(
    family: str, path_of: Path_of
) -> None:
    texts = prompts(family, 4)
    given = [begun(text, 5) for text in texts]
    alone = [answers(LLM(path_of(family)), [one])[0] for one in given]
    assert len({tuple(text) for text in alone}) > 1
    llm = LLM(path_of(family), speculative_config=drafts(path_of, family)[1], max_num_batched_tokens=16)
    assert answers(llm, given) == alone
    again = llm.generate(given, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in again] == alone
    assert all(output.metrics.num_cached_tokens >= 32 for output in again)
    other = llm.generate(begun("w5 w6 w7", 5), GREEDY)[0]
    assert other.metrics.num_cached_tokens == 0


def test_preempted_answers_go_on(path_of: Path_of) -> None:
    given = [begun(text, number, 30) for number, text in enumerate(prompts("t5", 4))]
    params = SamplingParams(temperature=0, max_tokens=60, min_tokens=60)
    expected = answers(LLM(path_of("t5")), given, params)
    tight = LLM(path_of("t5"), speculative_config=drafts(path_of, "t5")[1])
    tight.engine.runner.cache.accounting.num_slots = 192  # two begin, and one of them grows
    assert answers(tight, given, params) == expected
    assert tight.engine.stats().num_preemptions > 0


def test_the_encoder_runs_once_a_request(path_of: Path_of, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    encode = EagerExecutor.encode

    def counted(self: EagerExecutor, given: Any) -> Any:
        ran.append((self, given.token_ids))
        return encode(self, given)

    llm = LLM(path_of("bart"), speculative_config=drafts(path_of, "bart")[1])
    monkeypatch.setattr(EagerExecutor, "encode", counted)
    given = prompts("bart", 4)[3]
    llm.generate(given, SamplingParams(temperature=1, n=3, seed=2, max_tokens=LENGTH))
    assert len(ran) == 2, "once for the target and once for the draft, whatever n is"
    assert len({id(executor) for executor, _ in ran}) == 2
    llm.generate(given, GREEDY)
    assert len(ran) == 2, "what was kept is reused"
    llm.reset_caches()
    llm.generate(given, GREEDY)
    assert len(ran) == 4


def test_what_is_planned_is_held_and_aborts_leave_nothing(path_of: Path_of) -> None:
    llm = LLM(path_of("bart"), speculative_config=drafts(path_of, "bart")[1], max_num_seqs=3)
    engine, plan = llm.engine, llm.engine.memory_plan
    draft: Any = engine.drafter
    held = engine.runner.cache.memory_bytes() + draft.cache.memory_bytes()
    assert plan.num_encoded == 3
    assert plan.encoded_bytes > 0
    assert held == plan.kv_bytes + plan.encoded_bytes
    for number, prompt in enumerate(prompts("bart", 5)):
        engine.add_request(str(number), prompt, GREEDY)
    for _ in range(3):
        engine.step()
    engine.pause("0")
    engine.step()
    engine.resume("0")
    assert engine.runner.cache.num_encoded_held > 0
    for number in range(5):
        engine.abort(str(number))
    assert engine.integrity() == []
    assert engine.runner.cache.num_encoded_held == draft.cache.num_encoded_held == 0


def test_fewer_requests_run_where_encoders_outputs_do_not_fit(path_of: Path_of) -> None:
    given = prompts("bart", 4)
    whole = LLM(path_of("bart"))
    plan = whole.engine.memory_plan
    each = (plan.kv_bytes + plan.encoded_bytes) // 32
    llm = LLM(path_of("bart"), kv_cache_bytes=2 * each)
    assert llm.engine.memory_plan.num_encoded == 2
    assert answers(llm, given) == answers(whole, given)
    with pytest.raises(
        CapacityError, match="too few for a request of 64; set kv_cache_bytes to at least 1 MiB"
    ):
        LLM(path_of("bart"), kv_cache_bytes=plan.encoded_bytes // 32)


def test_a_wrong_bias_or_position_is_refused(path_of: Path_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadVerdict, "is_kept", lambda self: False)

    def unbiased(self: Any, distance: torch.Tensor) -> torch.Tensor:
        return torch.zeros(4, *distance.shape)

    with monkeypatch.context() as patch:
        patch.setattr(encoder_decoder.DistanceBias, "__call__", unbiased)
        with pytest.raises(UnsupportedModelError, match="its attention would be computed wrongly"):
            load_model(path_of("t5"))
    biased = masks.Masks.biased
    with monkeypatch.context() as patch:
        patch.setattr(masks.Masks, "biased", lambda *given: biased(*given).roll(1, -1))
        with pytest.raises(UnsupportedModelError, match="its attention would be computed wrongly"):
            load_model(path_of("umt5"))


def test_a_wrong_encoder_is_refused(path_of: Path_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadVerdict, "is_kept", lambda self: False)
    attend = encoder_decoder.EncoderPass.attend
    monkeypatch.setattr(
        encoder_decoder.EncoderPass, "attend", lambda *given: attend(*given[:-1], None).roll(1, 1)
    )
    with pytest.raises(UnsupportedModelError, match="its attention would be computed wrongly"):
        load_model(path_of("bart"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_other_types_load(family: str, dtype: str, path_of: Path_of) -> None:
    llm = LLM(
        path_of(family), dtype=dtype, kv_cache_dtype="int8", speculative_config=drafts(path_of, family)[0]
    )
    assert all(len(text) == LENGTH for text in answers(llm, prompts(family)))


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ({"decoder_prompt": "w5"}, "got the keys 'decoder_prompt'"),
        ({"encoder_prompt": "w5", "audio": 1}, "got the keys 'encoder_prompt', 'audio'"),
        ({"encoder_prompt": []}, "the prompt is empty"),
        ({"encoder_prompt": [999]}, "outside the vocabulary"),
        ({"encoder_prompt": "w5", "decoder_prompt": [999]}, "outside the vocabulary"),
        ({"encoder_prompt": "w5", "decoder_prompt": [5] * 500}, "prompt and answer together may have 128"),
        ("w5 " * 128, "the encoder's prompt has 129 tokens, and the encoder reads 128"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, complaint: str, path_of: Path_of) -> None:
    llm = LLM(path_of("bart"))
    with pytest.raises(RequestError, match=complaint):
        llm.generate(prompt, GREEDY)
    with pytest.raises(RequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "w5"}])


@pytest.mark.parametrize(("start", "forced"), [(1, 7), (5, 5)])
def test_answers_begin_with_what_the_model_requires(
    start: int, forced: int, path_of: Path_of, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(path_of("bart"), tmp_path / "bart"))
    file = folder / "generation_config.json"
    changes = {"decoder_start_token_id": start, "forced_bos_token_id": forced}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    stock, given = Stock(str(folder)), prompts("bart", 3)
    expected = [stock.answer(prompt, LENGTH + 1) for prompt in given]
    assert {text[0] for text in expected} == {forced}
    assert answers(LLM(str(folder)), given) == [text[1:] for text in expected]


def test_an_audit_and_a_fleet_refuse_them(path_of: Path_of) -> None:
    engine = AsyncEngine(path_of("bart"))
    with pytest.raises(ConfigError, match="those of an encoder-decoder depend on its input too"):
        Replayer(engine.engine)
    with pytest.raises(ConfigError, match="a fleet does not serve encoder-decoders"):
        asyncio.run(start_replica(engine, ReplicaDescription(id="a", secret="b")))


def test_forms_of_prompts(path_of: Path_of) -> None:
    llm = LLM(path_of("bart"))
    forms: list[Any] = [
        "w5 w9",
        [5, 9, 1],
        {"prompt": "w5 w9"},
        {"encoder_prompt": "w5 w9"},
        {"encoder_prompt": {"prompt_token_ids": [5, 9, 1]}, "decoder_prompt": None},
        {"encoder_prompt": "w5 w9", "decoder_prompt": [1]},
    ]
    texts = answers(llm, forms)
    assert all(text == texts[0] for text in texts)
    first = texts[0][:2]
    going_on = {"encoder_prompt": "w5 w9", "decoder_prompt": " ".join(f"w{token}" for token in first)}
    shorter = SamplingParams(temperature=0, max_tokens=LENGTH - 2, min_tokens=LENGTH - 2)
    assert answers(llm, [going_on], shorter)[0] == texts[0][2:]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_other_drafters_give_the_same_text(family: str, path_of: Path_of) -> None:
    given = prompts(family)
    expected = answers(LLM(path_of(family)), given)
    draft = path_of(family, 0.1)
    for speculative in (
        {"method": "suffix"},
        {"method": "token_recycling"},
        {"method": "lookahead"},
        {"method": "self"},
        {"method": "layer_skip"},
        {"method": "cascade", "draft": {"method": "ngram"}, "model": draft},
        {"method": "auto"},
    ):
        llm = LLM(path_of(family), speculative_config=speculative)
        assert answers(llm, given) == expected, speculative
        assert llm.engine.stats().num_draft_failures == 0, speculative


def test_drafts_whose_encoder_reads_something_else_are_refused(path_of: Path_of, tmp_path: Path) -> None:
    def draft(path: str) -> dict[str, Any]:
        return {"method": "draft_model", "model": path}

    decoder = small_llama(tmp_path / "llama", path_of("t5"))
    with pytest.raises(ConfigError, match="is an encoder-decoder, and what it would read"):
        LLM(decoder, speculative_config=draft(path_of("t5")))
    other = Path(shutil.copytree(path_of("whisper"), tmp_path / "whisper"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_mel_bins": 40}))
    with pytest.raises((ConfigError, ModelError), match=r"misshapen|hears other features"):
        LLM(path_of("whisper"), speculative_config=draft(str(other)))
    # A decoder-only draft knows the answer so far, and drafts all the same.
    llm = LLM(path_of("t5"), speculative_config=draft(decoder))
    assert answers(llm, prompts("t5")) == answers(LLM(path_of("t5")), prompts("t5"))


def small_llama(folder: Path, tokenizer: str) -> str:
    """A decoder-only model with the tokenizer of an encoder-decoder."""
    config = tf.LlamaConfig(
        vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, bos_token_id=0, eos_token_id=1, max_position_embeddings=128,
    )  # fmt: skip
    tf.LlamaForCausalLM(config).save_pretrained(folder)
    tf.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("w5", "a prompt of a speech model is"),
        ({"audio": (sound(1), RATE), "encoder_prompt": "w5"}, "got the keys 'audio', 'encoder_prompt'"),
        ({"audio": sound(1)}, "audio must be"),
        ({"audio": (sound(1), "loud")}, "audio must be"),
        ({"audio": (sound(1) * np.nan, RATE), "language": "de"}, "samples are numbers"),
        ({"audio": (np.zeros(0, np.float32), RATE)}, "samples are numbers"),
        ({"audio": (np.tile(sound(1), 3), RATE), "language": "de"}, "1.9 s long, and at most 1 s are heard"),
        ({"audio": "nowhere.wav"}, "there is no file 'nowhere.wav'"),
        ({"audio": (sound(1), RATE), "language": "tlh"}, "language must be one of de, en, fr"),
        (
            {"audio": (sound(1), RATE), "language": "de", "task": "sing"},
            "task must be one of transcribe, translate",
        ),
    ],
)
def test_sounds_that_are_refused(prompt: Any, complaint: str, path_of: Path_of) -> None:
    llm = LLM(path_of("whisper"))
    with pytest.raises(RequestError, match=complaint):
        llm.generate(prompt, GREEDY)
    assert llm.engine.integrity() == []


def test_the_command_line_reads_texts_and_files(path_of: Path_of, tmp_path: Path) -> None:
    def run(prompt: str, family: str) -> Any:
        words = [prompt, "--model", path_of(family), "--temperature", "0", "--max-tokens", "8", "--json"]
        result = CliRunner().invoke(app, ["generate", *words, "--spec", "ngram"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["requests"][0]["outputs"][0]["token_ids"]

    shorter = SamplingParams(temperature=0, max_tokens=8)
    assert run("w5 w9", "t5") == answers(LLM(path_of("t5")), ["w5 w9"], shorter)[0]
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound(1), -1, 1) * 32767).astype("<i2").tobytes())
    heard: Any = {"audio": str(tmp_path / "a.wav")}
    assert run(heard["audio"], "whisper") == answers(LLM(path_of("whisper")), [heard], shorter)[0]
