"""Traces for a replay: what a server captured, or conversations that the target answers now."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from slipstream.assets.workload.reading import read_workload
from slipstream.core.request import RequestOptions
from slipstream.engine.engine import Engine
from slipstream.errors import LearnError
from slipstream.learn.capture.capture import Capture, CaptureLimits, identity_of
from slipstream.learn.records.privacy import PrivacyRules
from slipstream.learn.records.served import ServedRecord
from slipstream.learn.storage.folder import LearnFolder
from slipstream.learn.storage.ring import Ring, read_ring
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_conversation

_AT_ONCE = 32


def served_trace(folder: Path) -> list[ServedRecord]:
    """The records in the folder of a server that learns, in their order; raises `LearnError` where there are none."""
    where = LearnFolder(folder)
    where.check()
    records = sorted(read_ring(where), key=lambda one: one.number)
    if not records:
        raise LearnError(f"{str(folder)!r} holds no served answer yet")
    return records


def asked_trace(
    engine: Engine,
    questions: Seq[tuple[str, Seq[dict[str, Any]]]],
    params: SamplingParams,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ServedRecord]:
    """Have `engine` answer (task, messages) in order, captured as a server would; prompts that are too long are left
    out. Answers that were not captured are missing from the trace."""
    ring = Ring(None, identity_of(engine), 2**33)
    capture = Capture(ring, PrivacyRules(), CaptureLimits(max_share=None))  # a trace needs every answer
    engine.on_checked = capture.observe
    try:
        waiting = list(enumerate(questions))[::-1]
        running: set[str] = set()
        done = 0
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                number, (task, messages) = waiting.pop()
                prompt = encode_conversation(engine.tokenizer, list(messages))
                if len(prompt) + (params.max_tokens or 1) > engine.max_model_len:
                    done += 1
                    continue
                name = f"trace-{number:06d}"
                own = SamplingParams(
                    temperature=params.temperature,
                    top_p=params.top_p,
                    max_tokens=params.max_tokens,
                    seed=derive_seed(params.seed or 0, number + 1),
                )
                engine.add_request(name, prompt, own, RequestOptions(task=task))
                running.add(name)
            for update in engine.step():
                if update.output is not None:
                    running.discard(update.request_id)
                    done += 1
                    on_progress(done, len(questions))
            capture.flush()
        capture.flush()
        return sorted(ring.read(), key=lambda one: one.request_id)
    finally:
        engine.on_checked = None
        capture.close()


def questions_of(workload: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """(task, messages) of the first turns of a workload, as `slipstream bench` reads it."""
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for one in read_workload(workload).questions:
        found.append((one.task, list(one.messages) or [{"role": "user", "content": one.text}]))
    return found
