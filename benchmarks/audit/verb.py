"""The same faults through the command itself: a server of ours with a fault, audited as `slipstream audit URL` does."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal
from unittest.mock import patch

from benchmarks.audit.faults import HONEST_CLASSICAL, HONEST_SEEDED, Answered, Fault
from slipstream import AsyncEngine
from slipstream.assets.workload.reading import read_workload
from slipstream.core.request import FinishReason, RequestOptions
from slipstream.engine.engine import Engine
from slipstream.engine.factory import make_engine
from slipstream.engine.outputs import Update
from slipstream.rpc.client import ServerAddress
from slipstream.sampling.params import SamplingParams
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.lifecycle import DrainingServer
from slipstream.text.prompts import EncodedPrompt
from slipstream.tools.audit.decision import AuditDecision
from slipstream.tools.audit.remote.audit import RemoteAudit, run_remote
from slipstream.tools.audit.remote.side import ServerSide
from slipstream.tools.audit.settings import AuditSettings

MODEL = "pair"
CONCURRENCY = 16
OPTIONS = {"kv_cache_bytes": 300_000_000, "max_num_seqs": CONCURRENCY}
USAGE = "slipstream.serve.api.answer.usage"

Kind = Literal["against", "reference"]


@dataclass(frozen=True)
class Trial:
    """One audit of one server."""

    fault: Fault
    kind: Kind
    """Against a server without speculation, or with a local reference."""
    num_answers: int = 100
    max_tokens: int = 64

    @property
    def name(self) -> str:
        return f"{self.fault.name}, {self.kind}, {self.num_answers} answers of {self.max_tokens} tokens"


def trials(faults: tuple[Fault, ...]) -> list[Trial]:
    """Every fault by the kind of audit that its bar names, faults of sampling from samples alone too, and honest
    servers by every kind."""
    found = []
    for fault in faults:
        if fault.usage:
            found.append(Trial(fault, "against", 10))
        elif "cut" in fault.name:
            found.append(Trial(fault, "against", 1000, 16))
        elif fault.seeds:
            found.append(Trial(fault, "against"))
        else:
            found += [Trial(fault, "reference"), Trial(fault, "against", 400)]
    # Where no seed repeats an answer, samples are all that there is.
    classical = HONEST_CLASSICAL.speculation
    for fault in faults:
        if fault.name.startswith(("temperature 0.8 served as 0.95", "top_p")):
            found.append(Trial(replace(fault, speculation=classical, seeds=False), "reference"))
    found += [Trial(HONEST_SEEDED, "against"), Trial(HONEST_CLASSICAL, "reference", 300)]
    return [*found, Trial(HONEST_CLASSICAL, "against", 400)]


class Auditor:
    """Runs the audits. All engines share the weights of the one without speculation."""

    @cached_property
    def _off(self) -> Engine:
        return make_engine(None, None, {**OPTIONS, "enable_prefix_caching": False})

    def run(self, trial: Trial) -> dict[str, Any]:
        """What the certificate says."""
        fault = trial.fault
        settings = AuditSettings(
            read_workload("sample"),
            num_answers=trial.num_answers,
            max_tokens=trial.max_tokens,
            seed=1,
            concurrency=CONCURRENCY,
        )
        own = {**OPTIONS, **fault.engine}
        like = None if fault.engine else self._off
        audited = break_engine(make_engine(None, fault.speculation, own, like), trial)
        with ExitStack() as stack:
            if fault.usage:
                stack.enter_context(patch(USAGE, _counted_twice))
            first = ServerSide("audited", stack.enter_context(running(audited)))
            if trial.kind == "reference":
                audit = RemoteAudit(settings, first, reference=self._off, has_own_size=True)
            else:
                other = make_engine(None, None, {**OPTIONS, "enable_prefix_caching": False}, self._off)
                second = ServerSide("against", stack.enter_context(running(other)))
                audit = RemoteAudit(settings, first, second, has_own_size=True)
            certificate = run_remote(audit)
        return {
            "fault": fault.name,
            "kind": trial.kind,
            "num_asked": trial.num_answers,
            "max_tokens": trial.max_tokens,
            "num_answers": certificate.data.num_answers,
            "decision": str(certificate.decision),
            "is_right": certificate.decision is AuditDecision.CERTIFIED
            if fault in (HONEST_SEEDED, HONEST_CLASSICAL)
            else certificate.decision is AuditDecision.NOT_CERTIFIED,
            "signs": sorted({reason.partition(":")[0] for reason in certificate.reasons}),
            "tests": {test.name: test.p_value for test in certificate.tests},
            "keeps_seed": certificate.audited["keeps_seed"],
        }


def break_engine(engine: Engine, trial: Trial) -> Engine:
    """Give an engine the fault that `Fault` has in front of an engine. What a request is served as depends on its seed
    alone, so that asking again gives the same."""
    fault, add, step = trial.fault, engine.add_request, engine.step
    cut: set[str] = set()

    def add_request(
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **others: Any,
    ) -> None:
        assert params is not None
        if not isinstance(prompt, EncodedPrompt):
            prompt = engine.intake.encode(prompt, params)
        chance = random.Random(f"{params.seed}")
        ids, params = fault.before((prompt.token_ids, params), chance)
        if params.max_tokens and params.max_tokens >= trial.max_tokens:  # not the short probes
            whole = Answered(0, params, [0] * params.max_tokens, "length", params.max_tokens)
            if (kept := len(fault.after(whole, chance).token_ids)) < params.max_tokens:
                params = replace(params, max_tokens=kept, min_tokens=min(params.min_tokens, kept))
                cut.add(request_id)
        add(request_id, replace(prompt, token_ids=list(ids)), params, options, **others)

    def faulty_step() -> list[Update]:
        with fault.during():
            return [_stopped(update) if update.request_id in cut else update for update in step()]

    setattr(engine, "add_request", add_request)  # noqa: B010
    setattr(engine, "step", faulty_step)  # noqa: B010
    return engine


def _stopped(update: Update) -> Update:
    """The update of a cut answer, which claims to have come to its end."""
    if update.finish_reason is FinishReason.LENGTH:
        update = replace(update, finish_reason=FinishReason.STOP)
    if update.output is not None:
        answers = [replace(one, finish_reason=FinishReason.STOP) for one in update.output.outputs]
        update = replace(update, output=replace(update.output, outputs=answers))
    return update


def _counted_twice(num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int) -> dict[str, Any]:
    from slipstream.serve.metrics.figures import usage

    return usage(num_prompt_tokens, num_cached_tokens, 2 * num_output_tokens)


@contextmanager
def running(engine: Engine) -> Iterator[ServerAddress]:
    """The address of a server around an engine, until the block ends."""
    bound = socket.create_server(("127.0.0.1", 0))
    server = DrainingServer(create_app(AsyncEngine(engine=engine), ServeConfig(), MODEL))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    root = f"http://127.0.0.1:{bound.getsockname()[1]}"
    try:
        yield ServerAddress(f"{root}/v1", MODEL, f"{root}/metrics", timeout_s=600)
    finally:
        server.should_exit = True
        thread.join(60)
