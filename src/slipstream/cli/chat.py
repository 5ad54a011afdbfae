"""`slipstream chat`: a conversation on the terminal, or through a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.flags.flags import Values, with_flags
from slipstream.cli.flags.options import (
    ENGINE,
    SAMPLING,
    SPECULATION,
    ModelArgument,
    announce,
    chosen_speculation,
    load,
    recommended,
    short_speculation,
    with_model,
)
from slipstream.cli.output.console import Painter, notes
from slipstream.cli.output.lines import typed_lines
from slipstream.cli.output.report import print_summary, summarise
from slipstream.errors import ConfigError, RequestError
from slipstream.jsonl import Message
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.outputs import RequestOutput

HELP = "/exit leaves, /reset forgets the conversation, /stats sums up; Ctrl-C stops an answer, twice leaves"


@with_model
@with_flags(speculation=SPECULATION, sampling=SAMPLING, engine=ENGINE)
def chat(
    model: ModelArgument = None,
    system: Annotated[
        str | None, typer.Option(help="The system message that every conversation begins with.")
    ] = None,
    history: Annotated[
        bool,
        typer.Option(
            help="Keep what is typed on a terminal for the arrow keys of later chats, in the cache folder."
        ),
    ] = True,
    *,
    speculation: Values,
    sampling: Values,
    engine: Values,
) -> None:
    """Talk with a model. The keys and values of the conversation so far are reused, not computed again.

    Reads a message a line; on a terminal it can be edited, and the arrow keys bring back earlier ones. /exit leaves,
    /reset forgets the conversation, /stats sums up.
    """
    params = SamplingParams.from_mapping(sampling)
    if params.n > 1:
        raise ConfigError("a chat has one answer a turn; leave --n at 1")
    llm = load(model, chosen_speculation(speculation, model), engine)
    if not llm.engine.tokenizer.chat_template:
        raise ConfigError("this model's tokenizer has no chat template; use `slipstream generate --raw`")
    params = recommended(llm, params, sampling)
    params.check_vocabulary(llm.engine.model.vocab_size)
    announce(llm)
    conversation = Conversation(llm, params, system)
    console = notes()
    if sys.stdin.isatty():
        Painter().legend()
        console.print(HELP)
    for line in typed_lines(history):
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line == "/stats":
            conversation.print_stats()
        elif line.startswith("/"):
            console.print(f"there is no {line.split()[0]}: {HELP}")
        elif line:
            conversation.answer(line)


@dataclass
class Conversation:
    """What has been said, and what it cost."""

    llm: LLM
    params: SamplingParams
    system: str | None
    messages: list[Message] = field(default_factory=list)
    _finished: list[RequestOutput] = field(default_factory=list)
    _painter: Painter = field(default_factory=Painter)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Back to the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str) -> None:
        """Answer one message; what cannot be answered is reported and forgotten."""
        from slipstream.text.prompts import encode_chat

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = encode_chat(self.llm.engine.tokenizer, asked)
            output = self._run(prompt)
        except RequestError as error:
            notes().print(f"error: {error}; /reset begins anew")
            return
        said = output.outputs[0]
        self.messages = [*asked, {"role": "assistant", "content": said.text}]
        self._finished.append(output)
        metrics = said.metrics
        line = f"[{metrics.num_output_tokens} tokens, {metrics.tokens_per_s:.1f} tokens/s"
        if metrics.num_draft_tokens:
            line += f", α {metrics.acceptance_rate:.2f}, τ {metrics.acceptance_length:.2f}"
        line += f", {metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens reused"
        notes().print(line + f", {said.finish_reason}]", markup=False)

    def print_stats(self) -> None:
        """All answers since the start together, those of forgotten conversations included."""
        if not self._finished:
            notes().print("nothing has been answered yet")
            return
        wall_s = sum(output.metrics.total_s for output in self._finished)
        print_summary(
            notes(), summarise(self._finished, wall_s), short_speculation(self.llm), "prompts included"
        )

    def _run(self, prompt: list[int]) -> RequestOutput:
        """Step the engine until the answer is complete, or is stopped between two steps."""
        engine = self.llm.engine
        name = f"chat-{len(self._finished)}"
        engine.add_request(name, prompt, self.params)
        try:
            with _interrupt_flag() as interrupted:
                while True:
                    updates = engine.abort(name) if interrupted else engine.step()
                    for update in updates:
                        self._painter.write(update.pieces)
                        if update.output is not None:
                            self._painter.end()
                            return update.output
        except BaseException:
            engine.abort(name)
            raise


@contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """A list that is no longer empty after the first Ctrl-C; the second one raises `KeyboardInterrupt`."""
    interrupted: list[bool] = []

    def handle(_number: int, _frame: FrameType | None) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
