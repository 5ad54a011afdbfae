"""`slipstream chat`: a conversation on the terminal, or through a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from slipstream.cli.flags.flags import with_flags
from slipstream.cli.flags.options import (
    EngineValues,
    ModelArgument,
    SamplingValues,
    SpeculationValues,
    announce,
    chosen_speculation,
    load,
    recommended,
    short_speculation,
)
from slipstream.cli.output.console import Painter, stderr
from slipstream.cli.output.lines import typed_lines
from slipstream.cli.output.loading import loading
from slipstream.cli.output.report import print_summary, summarise
from slipstream.errors import ConfigError, RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.text.jsonl import Message

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM
    from slipstream.engine.outputs import RequestOutput, Update

HELP = "/exit ends the chat, /reset clears the conversation, /stats shows totals; Ctrl-C stops an answer, twice exits"


@dataclass(frozen=True, kw_only=True)
class ChatFlags:
    """A chat."""

    model: ModelArgument = None
    system: str | None = None
    """System message at the start of every conversation."""
    history: bool = True
    """Keep the typed lines in the cache folder, for the arrow keys of later chats."""
    speculation: SpeculationValues
    sampling: SamplingValues
    engine: EngineValues


@with_flags
def chat(flags: ChatFlags) -> None:
    """Chat with a model. The keys and values of the conversation so far are reused, not computed again.

    Reads one message a line; on a terminal lines can be edited, and the arrow keys recall earlier ones. /exit ends the
    chat, /reset clears the conversation, /stats shows totals.
    """
    params = SamplingParams.from_mapping(flags.sampling)
    if params.n > 1:
        raise ConfigError("a chat has one answer a turn; omit --n")
    with loading(flags.model):
        llm = load(flags.model, chosen_speculation(flags.speculation, flags.model), flags.engine)
    if not llm.engine.tokenizer.chat_template:
        raise ConfigError("this model's tokenizer has no chat template; use `slipstream generate --raw`")
    params = recommended(llm, params, flags.sampling)
    params.check_vocabulary(llm.engine.model.vocab_size)
    announce(llm)
    conversation = Conversation(llm, params, flags.system)
    console = stderr()
    if sys.stdin.isatty():
        Painter().legend()
        console.print(HELP)
    for line in typed_lines(flags.history):
        if line == "/exit":
            break
        if line == "/reset":
            conversation.reset()
        elif line == "/stats":
            conversation.print_stats()
        elif line.startswith("/"):
            console.print(f"unknown command {line.split()[0]}: {HELP}")
        elif line:
            conversation.answer(line)


@dataclass
class Conversation:
    """The messages so far, and the finished outputs."""

    llm: LLM
    params: SamplingParams
    system: str | None
    messages: list[Message] = field(default_factory=list)
    _finished: list[RequestOutput] = field(default_factory=list)
    _painter: Painter = field(default_factory=Painter)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, text: str) -> None:
        """Answer one message; an invalid one is reported and dropped."""
        from slipstream.text.prompts import encode_chat

        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            prompt = encode_chat(self.llm.engine.tokenizer, messages)
            output = self._run(prompt)
        except RequestError as error:
            stderr().print(f"error: {error}; /reset clears the conversation")
            return
        answer = output.outputs[0]
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._finished.append(output)
        metrics = answer.metrics
        line = f"[{metrics.num_output_tokens} tokens, {metrics.tokens_per_s:.1f} tokens/s"
        if metrics.num_draft_tokens:
            line += f", α {metrics.acceptance_rate:.2f}, τ {metrics.acceptance_length:.2f}"
        line += f", {metrics.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens reused"
        stderr().print(line + f", {answer.finish_reason}]", markup=False)

    def print_stats(self) -> None:
        """Print a summary of all answers since the start, including cleared conversations."""
        if not self._finished:
            stderr().print("nothing has been answered yet")
            return
        wall_s = sum(output.metrics.total_s for output in self._finished)
        print_summary(
            stderr(), summarise(self._finished, wall_s), short_speculation(self.llm), "prompts included"
        )

    def _run(self, prompt: list[int]) -> RequestOutput:
        """Step the engine until the answer is complete, or interrupted between two steps."""
        engine = self.llm.engine
        name = f"chat-{len(self._finished)}"
        engine.add_request(name, prompt, self.params)
        try:
            with _interrupt_flag() as interrupted:
                output = None
                while output is None:
                    output = self._show(engine.abort(name) if interrupted else engine.step())
                return output
        except BaseException:
            engine.abort(name)
            raise

    def _show(self, updates: Seq[Update]) -> RequestOutput | None:
        """Write the new text; returns the output of the finished request, if it has finished."""
        for update in updates:
            self._painter.write(update.pieces)
            if update.output is not None:
                self._painter.end()
                return update.output
        return None


@contextmanager
def _interrupt_flag() -> Iterator[list[bool]]:
    """A list that gets an item at the first Ctrl-C; the second one raises `KeyboardInterrupt`."""
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
