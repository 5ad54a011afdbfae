"""What is counted on a recording is what the engine does, step by step and token by token."""

from __future__ import annotations

from advise_cases import FREE

from slipstream.config import SpeculativeConfig
from slipstream.engine.closed_loop import closed_loop
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.tools.advise.candidates import Setting, setting_name, settings
from slipstream.tools.advise.scores import scores_of
from slipstream.tools.advise.simulate import Simulator, always
from tests.kit.tape import ENGINE, Tape


def simulator(tape: Tape) -> Simulator:
    scores = scores_of(tape.candidates, tape.recorded, tape.engine.model.vocab_size, 512)
    return Simulator(tape.recorded.requests, tape.candidates, scores, FREE)


def counted(tape: Tape, setting: Setting) -> list[tuple[int, int, int]]:
    """(steps, drafted, accepted) of each request, one after another."""
    alone = simulator(tape)
    found = []
    for place in range(len(tape.jobs)):
        done = alone.closed_loop([place], 1, always(setting), [setting.candidate])
        found.append((done.num_request_steps, done.num_drafted, done.num_accepted))
    return found


def test_the_recording_is_the_text_without_speculation(tape: Tape) -> None:
    off = make_engine(None, SpeculativeConfig(), ENGINE, tape.engine)
    answers, _, _ = closed_loop(off, tape.jobs, 2)
    assert [answer.token_ids for answer in answers] == [
        request.output_token_ids for request in tape.recorded.requests
    ]


def test_counted_steps_are_the_engines(tape: Tape) -> None:
    """For every candidate, chains and trees, lookups and heads: equal, request by request."""
    engines: dict[int, Engine] = {}
    for setting in settings(tape.candidates):
        candidate = tape.candidates[setting.candidate]
        if setting.depth != candidate.depths[-1] and (candidate.name != "draft" or setting.depth != 2):
            continue
        if setting.candidate not in engines:
            engines[setting.candidate] = make_engine(None, candidate.speculative, ENGINE, tape.engine)
        engine = engines[setting.candidate]
        expected = []
        for job in tape.jobs:
            [answer], _, _ = closed_loop(engine, [job], 1, setting.depth or None)
            metrics = answer.metrics
            expected.append((metrics.num_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens))
        assert counted(tape, setting) == expected, setting_name(setting, tape.candidates)


def test_answers_that_are_over_help_a_lookup_as_on_the_engine(tape: Tape) -> None:
    """One after another without emptying the caches: suffix decoding remembers earlier answers."""
    place = next(i for i, one in enumerate(tape.candidates) if one.name == "suffix")
    jobs = [*tape.jobs[:3], *tape.jobs[:3]]
    engine = make_engine(None, tape.candidates[place].speculative, ENGINE, tape.engine)
    answers, _, _ = closed_loop(engine, jobs, 1)
    done = simulator(tape).closed_loop([0, 1, 2, 0, 1, 2], 1, always(Setting(place)), [place])
    assert done.num_request_steps == sum(answer.metrics.num_steps for answer in answers)
    assert done.num_accepted == sum(answer.metrics.num_accepted_tokens for answer in answers)
    alone = counted(tape, Setting(place))
    assert done.num_request_steps < 2 * sum(steps for steps, _, _ in alone[:3]), "it remembered"


def test_other_requests_do_not_change_what_is_counted(tape: Tape) -> None:
    """A draft token is right or wrong whichever drafter runs: a chain takes the same steps alone and in a batch."""
    place = next(i for i, one in enumerate(tape.candidates) if one.name == "draft")
    setting = Setting(place, 3)
    engine = make_engine(None, tape.candidates[place].speculative, ENGINE, tape.engine)
    answers, _, _ = closed_loop(engine, tape.jobs, 3, 3)
    steps = [answer.metrics.num_steps for answer in answers]
    assert steps == [steps for steps, _, _ in counted(tape, setting)]
