"""Assistants over each form of Gemma 4: Transformers' logits, texts without them, accepted lengths."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from slipstream import LLM, SamplingParams
from slipstream.cli.main import app
from slipstream.draft.proposers.draft_tree import DraftTree
from slipstream.errors import ConfigError, ModelError
from tests.kit.gemma4_pairs import FORMS, VOCAB, Pair, pair

TEXT = [(37 * place + 11) % VOCAB for place in range(14)]
PROMPTS = [TEXT, TEXT[:5], [*TEXT[:9], 7, 3], [*TEXT, 9, 4, 1]]


def texts(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=18, ignore_eos=True)
        for number, temperature in enumerate((0.0, 0.0, 0.8, 0.8))
    ]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@functools.cache
def texts_without(form: str, dtype: torch.dtype = torch.float32, **engine: Any) -> list[list[int]]:
    return texts(LLM(pair(form, dtype).target, **engine))


def drafting(
    made: Pair, spec: dict[str, Any] | None = None, **engine: Any
) -> tuple[LLM, list[int], list[int]]:
    """An engine, and by step how many draft tokens were made and how many of them accepted."""
    llm = LLM(
        made.target, speculative_config={"method": "mtp", "model": made.assistant, **(spec or {})}, **engine
    )
    drafted: list[int] = []
    accepted: list[int] = []

    def seen(steps: Seq[Any]) -> None:
        drafted.extend(len(one.proposal) for one in steps)
        accepted.extend(one.num_accepted for one in steps)

    llm.engine.on_observe = seen
    return llm, drafted, accepted


@pytest.mark.parametrize("form", FORMS)
def test_in_an_engine_its_logits_are_those_of_transformers(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each text that the engine comes to, and behind each draft token, whatever was accepted before."""
    made, grow = pair(form), DraftTree.grow
    found: list[tuple[list[int], list[int], Tensor]] = []

    def recorded(tree: DraftTree, logits: Tensor, *others: Any) -> Any:
        for node, row in zip(tree.frontier, logits, strict=True):
            found.append((list(tree.sequence.token_ids), list(node.token_ids() if node else ()), row.clone()))
        return grow(tree, logits, *others)

    monkeypatch.setattr(DraftTree, "grow", recorded)
    llm, _, _ = drafting(made, max_num_batched_tokens=9)
    llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    assert {len(drafts) for _, drafts, _ in found} >= {0, 1, 2}
    for text, drafts, row in found:
        expected = made.logits(text, drafts)[-1]
        assert float((row - expected).abs().max()) < 1e-3, (len(text), drafts)
        assert float(expected.std()) > 1, "logits of nothing would be close to anything"


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_those_without_it_and_longer_steps(form: str) -> None:
    """In chunks, in a batch, with prefixes of earlier requests; some drafts are accepted and some are not."""
    llm, drafted, accepted = drafting(pair(form), max_num_batched_tokens=9)
    for _ in range(2):
        assert texts(llm) == texts_without(form)
    assert llm.engine.stats().num_draft_failures == 0
    assert sum(drafted) > sum(accepted) > 30
    assert max(accepted) > 1


@pytest.mark.parametrize(
    ("form", "dtype", "engine"),
    [
        *(
            (form, torch.float32, {"cpu_kernels": "torch"})
            for form in ("e2b", "26b-a4b tower", "12b unified")
        ),
        *((form, torch.float32, {"quantization": "int8"}) for form in ("e4b tower", "26b-a4b")),
        ("31b", torch.float32, {"kv_cache_dtype": "int8"}),
        ("12b unified tower", torch.bfloat16, {}),
        ("e2b", torch.bfloat16, {"quantization": "int8"}),
    ],
)
def test_texts_of_other_engines(form: str, dtype: torch.dtype, engine: dict[str, Any]) -> None:
    llm, drafted, accepted = drafting(pair(form, dtype), max_num_batched_tokens=9, **engine)
    for _ in range(2):
        assert texts(llm) == texts_without(form, dtype, **engine)
    assert sum(drafted) > sum(accepted) > 20


@pytest.mark.parametrize("form", ["e2b", "12b unified tower"])
def test_texts_after_preemption(form: str) -> None:
    made = pair(form)
    bytes_per_token = drafting(made)[0].engine.memory_plan.kv_bytes_per_token
    llm, _, accepted = drafting(made, kv_cache_bytes=120 * bytes_per_token, max_model_len=40)
    assert texts(llm) == texts_without(form)
    assert llm.engine.stats().num_preemptions > 0
    assert sum(accepted) > 10


def test_each_request_is_told_its_accepted_length() -> None:
    made = pair("31b")
    llm, _, accepted = drafting(made)
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
    for prompt in PROMPTS:
        accepted.clear()
        (output,) = llm.generate([prompt], params)
        assert output.metrics.acceptance_length == pytest.approx(18 / (18 - sum(accepted)))


def run(*args: str) -> Any:
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_command_line_describes_and_plans_the_pair() -> None:
    made = pair("12b unified tower")
    assert run("info", made.assistant, "--draft-for", made.target)["drafts_for"] == {made.target: "yes"}
    found = run("info", made.target, "--draft", made.assistant)
    assert found["drafters"]["mtp"] == f"{made.assistant}: yes"
    assert found["memory_plan"]["draft_bytes"] > 0
    assert found["try"].startswith(f"--spec mtp:{made.assistant}: ")
    alone = run("info", made.target)["drafters"]["mtp"]
    assert alone.startswith("does not run as it is: ")
    assert alone.endswith("name it with `model`, --spec mtp:ASSISTANT")


def test_where_it_is_named_wrongly_it_is_told_how() -> None:
    made = pair("31b")
    with pytest.raises(ModelError, match="is no model of its own; name that Gemma 4 as the model"):
        LLM(made.assistant)
    with pytest.raises(ModelError, match="name that Gemma 4 as the model and this as its drafter"):
        LLM(made.target, speculative_config={"method": "draft_model", "model": made.assistant})
    with pytest.raises(ConfigError, match="Gemma 4's is a checkpoint of its own, an assistant"):
        LLM(made.target, speculative_config={"method": "mtp"})
