"""Messages as clients send them, and stop strings that are special tokens."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.outputs import Update
from slipstream.errors import RequestError
from slipstream.text.prompts import encode_chat
from tests.kit.engines import MakeLLM

ASKED = {"role": "user", "content": "Tell me of the sea."}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "same_as"),
    [
        ({"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "assistant", "content": ""}),
    ],
)
def test_a_message_is_what_its_client_means(
    plain: LLM, message: dict[str, Any], same_as: dict[str, Any]
) -> None:
    tokenizer = plain.engine.tokenizer
    wanted = encode_chat(tokenizer, [ASKED, same_as, ASKED])
    assert encode_chat(tokenizer, [ASKED, message, ASKED]) == wanted
    output = plain.chat([ASKED, message, ASKED], SamplingParams(max_tokens=1))[0]
    assert list(output.prompt_token_ids) == wanted


def test_a_template_that_knows_developers_gets_them_and_others_must_have_text(plain: LLM) -> None:
    tokenizer = plain.engine.tokenizer
    template = "{% for m in messages %}{{ m.role }}{% endfor %}{# developer #}"
    token_ids = encode_chat(tokenizer, [{"role": "developer", "content": "x"}], chat_template=template)
    assert tokenizer.decode(token_ids) == "developer"
    with pytest.raises(RequestError, match="a message of the role 'user' has no content"):
        encode_chat(tokenizer, [{"role": "user", "content": None}])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_a_stop_string_that_is_a_special_token_ends_the_answer(
    plain: LLM, make_llm: MakeLLM, prompts: list[list[int]], drafter: str, skip: bool, include: bool
) -> None:
    """As a stop string that is text does: at its first place, alone and in a batch, in streams and whole."""
    tokenizer = plain.engine.tokenizer
    special = tokenizer.convert_tokens_to_ids("<|user|>")
    words = tokenizer("The sea is wide and the wind is cold", add_special_tokens=False).input_ids
    free = {
        "temperature": 1.0,
        "logit_bias": {special: 9.0},
        "max_tokens": 40,
        "ignore_eos": True,
        "allowed_token_ids": [*words, special],
    }
    llm = plain if drafter == "off" else make_llm({"method": "ngram", "num_speculative_tokens": 4})
    given = [
        SamplingParams(
            **free,
            seed=seed,
            stop=["nowhere", "<|user|>"],
            skip_special_tokens=skip,
            include_stop_str_in_output=include,
        )
        for seed in range(len(prompts[:3]))
    ]
    released: dict[str, str] = {}

    def on_update(update: Update) -> None:
        released[update.request_id] = released.get(update.request_id, "") + update.text

    outputs = llm.generate(prompts[:3], given, on_update=on_update)
    whole = [SamplingParams(**free, seed=params.seed) for params in given]
    num_ended = 0
    for output, unbounded in zip(outputs, plain.generate(prompts[:3], whole), strict=True):
        [answer], token_ids = output.outputs, list(unbounded.outputs[0].token_ids)
        end = token_ids.index(special) if special in token_ids else len(token_ids)
        num_ended += end < len(token_ids)
        assert list(answer.token_ids) == token_ids[: end + 1]
        text = tokenizer.decode(token_ids[:end], skip_special_tokens=skip)
        ended = end < len(token_ids)
        assert answer.text.lstrip(" ") == (text + "<|user|>" * (include and ended)).lstrip(" ")
        assert answer.stop_reason == ("<|user|>" if ended else None)
        assert released[output.request_id] == answer.text
    assert num_ended >= 2


def test_a_stop_string_that_is_a_special_token_counts_from_min_tokens_on(
    plain: LLM, prompts: list[list[int]]
) -> None:
    special = plain.engine.tokenizer.convert_tokens_to_ids("<|user|>")
    params = SamplingParams(
        temperature=0,
        max_tokens=9,
        min_tokens=4,
        ignore_eos=True,
        allowed_token_ids=[special],
        stop="<|user|>",
    )
    [answer] = plain.generate([prompts[0]], params)[0].outputs
    assert (list(answer.token_ids), answer.text, answer.stop_reason) == ([special] * 5, "", "<|user|>")
