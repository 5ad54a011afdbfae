"""A request to the engine's process while it is under way: what was requested, and what came of it so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from slipstream.engine.mailbox import Put
from slipstream.sampling.params import SamplingParams
from slipstream.serve.engine_info import EngineInfo
from slipstream.serve.process.answers import AnswerRecord, all_emitted
from slipstream.serve.process.protocol import CODEC, CancelRequest, Flow, Submit

MAX_DEATHS = 2
"""A request that was under way so often when the engine's process died may be what kills it."""


@dataclass(eq=False, slots=True)
class RemoteCall:
    """A request under way. `params.seed` is set, so that another process can go on with it."""

    submit: Submit
    params: SamplingParams
    prompt: str | None
    """Its text, where it is known."""
    put: Put
    answers: list[AnswerRecord]
    aborted: bool = False
    """Whether only its last updates are wanted. It is kept here, since the process may die before it has acted."""
    paused: bool = False
    """Whether its reader does not keep up."""
    num_deaths: int = field(default=0, init=False)

    def note_death(self, info: EngineInfo) -> bool:
        """The engine's process has died; True where another one gives the rest, and is likely to live through it."""
        self.num_deaths += 1
        repeats = (
            self.aborted
            or not any(answer.token_ids for answer in self.answers)
            or info.reproduces(self.params, self.submit.options)
        )
        return repeats and self.num_deaths < MAX_DEATHS

    def frames(self) -> bytes:
        """The messages that have an engine do it, or the rest of it; raises `ProtocolError` where they are too long."""
        submit = self.submit
        emitted = all_emitted(self.answers)
        if emitted:
            submit = msgspec.structs.replace(submit, emitted=emitted)
        if not self.aborted:
            return CODEC.frame(submit) + (CODEC.frame(Flow(submit.id, True)) if self.paused else b"")
        # Its last updates need no grammar.
        params = {name: value for name, value in submit.params.items() if name != "structured"}
        submit = msgspec.structs.replace(submit, params=params, tried_bytes=None)
        return CODEC.frame(submit) + CODEC.frame(CancelRequest(submit.id, reports=True))
