"""Calls as vLLM's users write them: prompts, parameters, conversations, outputs, and several threads."""

from __future__ import annotations

import asyncio
import io
import pickle
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from slipstream import LLM, AsyncEngine, Logprob, RequestOutputKind, SamplingParams, StructuredOutputsParams
from slipstream.assets import EMBEDDED_DRAFT, EMBEDDED_TARGET
from slipstream.errors import RequestError
from tests.kit.engines import MakeLLM

GREEDY = SamplingParams(temperature=0, max_tokens=4)
IDS = [5, 9, 70]
MESSAGES = [{"role": "user", "content": "Write a SQL query."}]


def tokens(llm: LLM, prompts: Any, params: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, **options)]


def test_prompts_in_every_shape(plain: LLM) -> None:
    [expected] = tokens(plain, [IDS])
    for one in (
        IDS,
        tuple(IDS),
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.array(IDS), "multi_modal_data": None},
        np.array(IDS),
        [np.int64(token) for token in IDS],
        torch.tensor(IDS),
    ):
        assert tokens(plain, one) == [expected], one
        assert tokens(plain, [one]) == [expected], one
    assert tokens(plain, np.array([IDS, IDS])) == [expected] * 2
    [text] = plain.generate({"prompt": "SELECT"}, GREEDY)
    [same] = plain.generate("SELECT", GREEDY)
    assert (text.prompt, text.outputs[0].token_ids) == ("SELECT", same.outputs[0].token_ids)
    [both] = plain.generate([{"prompt_token_ids": IDS, "prompt": "as text"}], GREEDY)
    assert (both.prompt, both.prompt_token_ids, both.outputs[0].token_ids) == ("as text", IDS, expected)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({}, "got the keys none"),
        ({"promt": "a"}, "got the keys 'promt'"),
        ({"prompt": 5}, "a prompt is a string"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "models read text only"),
        ({"prompt_embeds": [[1.0]]}, "give text or token ids"),
        ({"prompt": "a", "cache_salt": "s"}, "use tenant"),
        ({"prompt_token_ids": [0.5]}, "a prompt is a string"),
        ([True], "a prompt is a string"),
        (np.array([0.5]), "a prompt is a string"),
        (5, "a prompt is a string"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
    ],
)
def test_prompts_that_are_none(plain: LLM, prompt: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        plain.generate(prompt, GREEDY)


def test_calls_without_prompts_say_how_to_give_them(plain: LLM) -> None:
    with pytest.raises(RequestError, match="give them as prompts"):
        plain.generate(prompt_token_ids=[IDS], sampling_params=GREEDY)
    with pytest.raises(RequestError, match="generate needs prompts"):
        plain.generate(sampling_params=GREEDY)


def test_paths_are_models(make_llm: MakeLLM) -> None:
    speculation = {"method": "draft_model", "model": Path(EMBEDDED_DRAFT), "num_speculative_tokens": 2}
    llm = make_llm(speculation, model=Path(EMBEDDED_TARGET), tokenizer=Path(EMBEDDED_TARGET))
    assert llm.engine.config.model == EMBEDDED_TARGET
    assert tokens(llm, [IDS])


def test_outputs_have_vllms_names(plain: LLM) -> None:
    params = SamplingParams(
        temperature=0.9, seed=4, max_tokens=6, logprobs=2, prompt_logprobs=0, stop_token_ids=[7]
    )
    [output] = plain.generate("SELECT name FROM", params)
    [answer] = output.outputs
    assert output.finished
    assert answer.finished()
    assert (answer.finish_reason, answer.stop_reason) in (("length", None), ("stop", 7), ("stop", None))
    assert answer.logprobs is not None
    assert answer.token_logprobs is not None
    for token_id, shown, own in zip(answer.token_ids, answer.logprobs, answer.token_logprobs, strict=True):
        text = plain.get_tokenizer().decode([token_id])
        assert shown[token_id] == Logprob(own.logprob, own.rank, text)
        assert shown.keys() == {token_id} | {other for other, _ in own.top}
        assert {shown[other].rank for other, _ in own.top} == {1, 2}
    assert answer.cumulative_logprob == pytest.approx(sum(one.logprob for one in answer.token_logprobs))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(one or {}) for one in output.prompt_logprobs[1:]] == [
        [t] for t in output.prompt_token_ids[1:]
    ]
    assert output.num_cached_tokens == answer.metrics.num_cached_tokens
    assert pickle.loads(pickle.dumps(output)) == output
    [bare] = plain.generate([IDS], GREEDY)
    assert (bare.prompt, bare.prompt_logprobs) == (None, None)
    assert (bare.outputs[0].logprobs, bare.outputs[0].cumulative_logprob) == (None, None)


def test_all_of_the_vocabulary(plain: LLM) -> None:
    [output] = plain.generate([IDS], SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=-1))
    [shown] = output.outputs[0].logprobs or []
    assert len(shown) == plain.engine.model.vocab_size
    assert sum(np.exp(one.logprob) for one in shown.values()) == pytest.approx(1.0, abs=1e-4)
    assert len((output.prompt_logprobs or [])[1] or {}) == plain.engine.model.vocab_size


def test_no_bound_is_the_context(make_llm: MakeLLM) -> None:
    drafted = make_llm({"method": "ngram", "num_speculative_tokens": 3}, max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    [output] = drafted.generate([IDS], params)
    assert len(output.outputs[0].token_ids) == 40 - len(IDS)
    assert output.outputs[0].finish_reason == "length"


def test_the_default_is_sixteen_tokens(plain: LLM) -> None:
    params = plain.get_default_sampling_params()
    params.ignore_eos = True
    assert len(tokens(plain, [IDS], params)[0]) == 16
    assert not plain.get_default_sampling_params().ignore_eos


def test_no_text_where_none_is_wanted(plain: LLM) -> None:
    params = GREEDY.clone()
    params.detokenize, params.output_kind = False, RequestOutputKind.FINAL_ONLY
    [output] = plain.generate("SELECT", params)
    assert (output.outputs[0].text, [output.outputs[0].token_ids]) == ("", tokens(plain, "SELECT"))


def test_an_engine_works_on_a_copy(plain: LLM) -> None:
    params = GREEDY.clone()
    [expected] = tokens(plain, [IDS])

    def meddle(update: Any) -> None:
        params.max_tokens = 1
        params.temperature = 1.5

    assert tokens(plain, [IDS], params, on_update=meddle) == [expected]


def test_asynchronous_requests_take_the_same_shapes(plain: LLM) -> None:
    [expected] = tokens(plain, [IDS])

    async def ask() -> None:
        async with AsyncEngine(kv_cache_bytes=16 * 2**20) as engine:
            params = GREEDY.clone()
            asked = asyncio.create_task(engine.generate({"prompt_token_ids": np.array(IDS)}, params))
            await asyncio.sleep(0)
            params.max_tokens = 1
            assert (await asked).outputs[0].token_ids == expected
            assert len((await engine.generate(IDS)).outputs[0].token_ids) <= 16

    asyncio.run(ask())


def test_a_grammar_in_gbnf(plain: LLM) -> None:
    grammar = 'root ::= "SELECT " column\ncolumn ::= "a" | "b"\n'
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(grammar=grammar))
    [output] = plain.generate("Write SQL.", params)
    assert output.outputs[0].text in ("SELECT a", "SELECT b")


# --- conversations --------------------------------------------------------------------------------------------


def test_conversations_as_vllm_takes_them(plain: LLM) -> None:
    [expected] = plain.chat(MESSAGES, GREEDY)
    parts = [{"type": "text", "text": "Write a "}, {"type": "text", "text": "SQL query."}]
    for options in (
        {"messages": MESSAGES},
        {"conversations": [MESSAGES]},
        {"messages": [{"role": "user", "content": parts}], "chat_template_content_format": "auto"},
        {
            "messages": MESSAGES,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "lora_request": None,
        },
        {"messages": MESSAGES, "tools": None, "chat_template_kwargs": {}},
    ):
        [output] = plain.chat(sampling_params=GREEDY, **options)
        assert output.prompt_token_ids == expected.prompt_token_ids, options
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(plain.chat([MESSAGES] * 3, GREEDY)) == 3


def test_templates_of_the_callers_own(plain: LLM) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ tools | length if tools }}{{ mood }}{% endfor %}"
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"mood": "!"}}
    [output] = plain.chat(
        MESSAGES, GREEDY, tools=[{"type": "function", "function": {"name": "f"}}], **options
    )
    assert plain.get_tokenizer().decode(output.prompt_token_ids) == "Write a SQL query.1!"
    open_ended = [*MESSAGES, {"role": "assistant", "content": "SELECT name"}]
    [output] = plain.chat(open_ended, GREEDY, add_generation_prompt=False, continue_final_message=True)
    assert plain.get_tokenizer().decode(output.prompt_token_ids).endswith("SELECT name")
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a + 1 }}{% endfor %}"
    [output] = plain.chat([{"role": "assistant", "tool_calls": [call]}], GREEDY, chat_template=template)
    assert plain.get_tokenizer().decode(output.prompt_token_ids) == "2"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "chat needs messages"),
        ({"messages": MESSAGES, "continue_final_message": True}, "set one of them to false"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "type 'image_url'; this model reads",
        ),
        ({"messages": MESSAGES, "lora_request": "x"}, "lora_request='x' is vLLM's"),
        ({"messages": MESSAGES, "chat_templat": "x"}, "did you mean 'chat_template'"),
    ],
)
def test_conversations_that_are_none(plain: LLM, options: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=told):
        plain.chat(**options)


# --- the rest of vLLM's LLM -----------------------------------------------------------------------------------


def test_what_is_not_there_says_what_to_do(plain: LLM) -> None:
    with pytest.raises(AttributeError, match="beam_search is vLLM's and is not available here; ask for n"):
        plain.beam_search  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        plain.nothing  # noqa: B018
    with pytest.raises(RequestError, match="give them as prompts"):
        plain.generate("a", GREEDY, prompt_token_ids=[[1]])
    with pytest.raises(RequestError, match="did you mean 'use_tqdm'"):
        plain.generate("a", GREEDY, use_tqmd=True)
    assert plain.reset_prefix_cache()


def test_progress(plain: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain.generate([IDS] * 3, GREEDY)
    plain.generate([IDS] * 3, GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    plain.generate([IDS] * 3, GREEDY, use_tqdm=True)
    assert "3/3" in capsys.readouterr().err
    plain.generate([IDS] * 2, GREEDY, use_tqdm=partial(tqdm, desc="mine", file=sys.stderr))
    assert "2/2" in capsys.readouterr().err

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    plain.generate([IDS] * 3, GREEDY)
    assert terminal.getvalue() == ""  # it is done too soon
    monkeypatch.setattr("slipstream.engine.llm.QUIET_S", 0.0)
    plain.generate([IDS] * 3, GREEDY, on_update=lambda update: None)
    plain.generate([IDS], GREEDY)
    assert terminal.getvalue() == ""
    plain.generate([IDS] * 3, GREEDY)
    assert "Processed prompts" in terminal.getvalue()


# --- threads --------------------------------------------------------------------------------------------------


def test_several_threads_take_turns(plain: LLM) -> None:
    """Without turns one thread takes the updates of another, which then ends in a KeyError or never."""
    expected = tokens(plain, [IDS, [6, 7]])
    got: list[Any] = []

    def call() -> None:
        try:
            got.append(tokens(plain, [IDS, [6, 7]]))
        except BaseException as error:
            got.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == [expected] * 6
    assert plain.engine.integrity() == []


def test_a_call_from_a_callback_is_refused(plain: LLM) -> None:
    with pytest.raises(RequestError, match="from its own on_update"):
        plain.generate([IDS], GREEDY, on_update=lambda update: plain.generate([IDS], GREEDY))  # type: ignore[arg-type,return-value]
    assert plain.engine.integrity() == []
    assert tokens(plain, [IDS])
