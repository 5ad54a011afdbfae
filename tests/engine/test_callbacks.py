"""Whatever a caller's callback does, the other requests of the step are complete and nothing is left behind."""

from __future__ import annotations

from collections import defaultdict

import pytest

from slipstream import LLM, SamplingParams, Update
from slipstream.assets import EMBEDDED_DRAFT
from slipstream.core.request import FinishReason
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from tests.kit.engines import MakeLLM

DRAFT = {"method": "draft_model", "model": EMBEDDED_DRAFT}
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Tantrum(Exception):
    """Raised by a callback."""


class Harder(BaseException):
    """As Ctrl-C: no Exception."""


def run(engine: Engine, error: type[BaseException] | None = None) -> int:
    """Step until nothing is left; returns how often a step raised `error`, which is the only thing it may raise."""
    raised = 0
    for _ in range(200):
        if not engine.has_unfinished:
            return raised
        try:
            engine.step()
        except (Tantrum, Harder) as caught:
            if type(caught) is not error:
                raise
            raised += 1
    raise AssertionError("a request never ends")


@pytest.mark.parametrize("error", [Tantrum, Harder])
@pytest.mark.parametrize("at", [1, 3, "last"])
def test_a_callback_that_raises_harms_nobody(
    make_llm: MakeLLM,
    plain: LLM,
    prompts: list[list[int]],
    at: int | str,
    error: type[BaseException],
) -> None:
    engine = make_llm(DRAFT).engine
    reference = [output.outputs[0].token_ids for output in plain.generate(prompts[:4], PARAMS)]
    received: dict[str, list[int]] = defaultdict(list)
    outputs: dict[str, list[int]] = {}
    calls = 0

    def collect(update: Update) -> None:
        nonlocal calls
        received[update.request_id].extend(update.token_ids)
        if update.output is not None:
            outputs[update.request_id] = update.output.outputs[0].token_ids
        if update.request_id == "1":
            calls += 1
            if calls == at or (at == "last" and update.output is not None):
                raise error("not now")

    for number in range(4):
        engine.add_request(str(number), prompts[number], PARAMS, on_update=collect)
    assert run(engine, error) == 1
    assert engine.integrity() == []
    assert dict(received) == outputs == {str(n): tokens for n, tokens in enumerate(reference)}


def test_the_first_of_several_errors_leaves_the_step(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    engine = make_llm().engine
    seen: list[str] = []

    def fail(update: Update) -> None:
        seen.append(update.request_id)
        raise Tantrum(update.request_id)

    for number in range(3):
        engine.add_request(str(number), min(prompts, key=len), PARAMS, on_update=fail)
    with pytest.raises(Tantrum, match="0"):
        engine.step()
    assert seen == ["0", "1", "2"], "every callback was called"
    assert run(engine, Tantrum) == PARAMS.max_tokens - 1
    assert engine.integrity() == []


@pytest.mark.parametrize("victim", ["0", "1", "2", "all"])
def test_a_callback_may_abort_requests_of_its_own_step(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], victim: str
) -> None:
    """Whether the victim's update of this step is still to be delivered or was: its end is the abort's."""
    engine = make_llm(DRAFT).engine
    reference = [output.outputs[0].token_ids for output in plain.generate(prompts[:3], PARAMS)]
    outputs: dict[str, list[int]] = {}
    aborted: list[Update] = []

    def abort(update: Update) -> None:
        if update.output is not None:
            outputs[update.request_id] = update.output.outputs[0].token_ids
        if update.request_id == "1" and not aborted:
            for name in ("0", "1", "2") if victim == "all" else (victim,):
                aborted.extend(engine.abort(name))

    for number in range(3):
        engine.add_request(str(number), prompts[number], PARAMS, on_update=abort)
    run(engine)
    assert engine.integrity() == []
    assert {update.finish_reason for update in aborted} == {FinishReason.ABORT}
    gone = {update.request_id for update in aborted}
    assert gone == ({"0", "1", "2"} if victim == "all" else {victim})
    assert outputs == {str(n): tokens for n, tokens in enumerate(reference) if str(n) not in gone}
    for update in aborted:
        assert update.output is not None
        tokens = update.output.outputs[0].token_ids
        assert 0 < len(tokens) < PARAMS.max_tokens
        assert tokens == reference[int(update.request_id)][: len(tokens)], "what came before it is whole"


def test_a_callback_may_add_and_abort_what_has_finished(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    engine = make_llm().engine
    done: list[str] = []

    def follow(update: Update) -> None:
        if update.output is not None:
            done.append(update.request_id)
            assert engine.abort(update.request_id) == []
            if len(done) < 4:
                engine.add_request(update.request_id, prompts[len(done)], PARAMS, on_update=follow)

    engine.add_request("x", prompts[0], PARAMS, on_update=follow)
    run(engine)
    assert done == ["x"] * 4, "an id is free again when its request has ended"
    assert engine.integrity() == []


@pytest.mark.parametrize("error", [Tantrum, Harder])
def test_generate_raises_what_its_callback_raises_and_leaves_nothing(
    make_llm: MakeLLM, plain: LLM, prompts: list[list[int]], error: type[BaseException]
) -> None:
    llm = make_llm(DRAFT)
    num_tokens = 0

    def fail(update: Update) -> None:
        nonlocal num_tokens
        num_tokens += len(update.token_ids)
        if num_tokens > 20:
            raise error("enough")

    params = SamplingParams(temperature=0, max_tokens=16, n=2, ignore_eos=True)
    with pytest.raises(error, match="enough"):
        llm.generate(prompts[:3], params, on_update=fail)
    assert not llm.engine.has_unfinished
    assert llm.engine.integrity() == []
    again = llm.generate(prompts[:2], PARAMS)
    assert [o.outputs[0].token_ids for o in again] == [
        o.outputs[0].token_ids for o in plain.generate(prompts[:2], PARAMS)
    ]


@pytest.mark.parametrize("victims", [("0",), ("1",), ("0", "1", "2")])
def test_generate_ends_when_its_callback_aborts(
    make_llm: MakeLLM, prompts: list[list[int]], victims: tuple[str, ...]
) -> None:
    """Each request has an output, of an aborted one what there was."""
    llm = make_llm(DRAFT)
    first_id = 0
    seen = 0

    def abort(update: Update) -> None:
        nonlocal seen, first_id
        number = int(update.request_id.removeprefix("offline-"))
        first_id = number if not seen else first_id
        seen += len(update.token_ids)
        if seen > 8:
            for victim in victims:
                llm.engine.abort(f"offline-{first_id + int(victim)}")

    steps = 0
    step = llm.engine.step

    def counted() -> list[Update]:
        nonlocal steps
        steps += 1
        assert steps < 100, "it steps for ever"
        return step()

    llm.engine.step = counted  # type: ignore[method-assign]
    outputs = llm.generate(prompts[:3], PARAMS, on_update=abort)
    for number, output in enumerate(outputs):
        was_aborted = str(number) in victims
        assert output.outputs[0].finish_reason == ("abort" if was_aborted else "length")
        assert (len(output.outputs[0].token_ids) < 16) == was_aborted
        assert output.prompt_token_ids == prompts[number]


def test_generate_tells_of_requests_that_others_abort(make_llm: MakeLLM, prompts: list[list[int]]) -> None:
    llm = make_llm()
    step = llm.engine.step

    def aborting() -> list[Update]:
        llm.engine.abort("offline-0")
        return step()

    llm.engine.step = aborting  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="offline-0 was aborted outside its callback"):
        llm.generate(prompts[:2], PARAMS)
    assert not llm.engine.has_unfinished
