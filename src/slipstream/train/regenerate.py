"""The target answers prompts anew: what a draft must learn is what this target says, not what others wrote."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, RequestError
from slipstream.jsonl import Message
from slipstream.provenance import provenance
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.train.answerers import Answerer, TargetAnswer
from slipstream.train.journal import Journal, check_complete
from slipstream.train.options import RegenerateOptions, parse_weights
from slipstream.train.prompts import Script, choose, read_scripts


def check_data(data: Path, options: RegenerateOptions) -> None:
    """Raise what `regenerate` would of the data, before any model is loaded for them."""
    choose(read_scripts(data), options.num_prompts, parse_weights(options.mix, "--mix"), options.seed)


@dataclass
class Tally:
    """How far a run is."""

    num_chosen: int
    num_done: int = 0
    """Conversations in the file, those of earlier runs included."""
    num_skipped: int = 0
    """Conversations whose first prompt cannot be answered, such as one longer than the context."""
    num_tokens: int = 0
    """Answer tokens of this run."""
    num_before: int = 0
    """Conversations that earlier runs had done."""
    why_skipped: str = ""
    """What the first of the skipped was refused for."""
    started_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        spent_s = time.monotonic() - self.started_s
        num_new = self.num_done - self.num_before
        text = f"{self.num_done:,} of {self.num_chosen:,} conversations, {self.num_tokens:,} answer tokens"
        if num_new:
            left_s = (self.num_chosen - self.num_done - self.num_skipped) * spent_s / num_new
            text += f", {self.num_tokens / spent_s:,.0f} tokens/s, {left_s / 60:.0f} min left"
        return text


@dataclass
class _Conversation:
    """One script on its way."""

    script: Script
    params: SamplingParams
    messages: list[Message] = field(default_factory=list)
    answers: list[TargetAnswer] = field(default_factory=list)

    def next_prompt(self) -> list[Message] | None:
        """What is to be answered next; None when everything is."""
        if len(self.answers) == len(self.script.turns):
            return None
        return [*self.messages, *self.script.turns[len(self.answers)]]

    def add(self, answer: TargetAnswer) -> None:
        self.messages += self.script.turns[len(self.answers)]
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)

    def row(self) -> dict[str, Any]:
        """As a line of the output."""
        return {
            "task": self.script.task,
            "source": self.script.source,
            "line": self.script.number,
            "messages": self.messages,
            **_tokens(self.answers),
            "finish_reason": self.answers[-1].finish_reason,
            "finish_reasons": [answer.finish_reason for answer in self.answers],
            "temperature": self.params.temperature,
            "seed": self.params.seed,
        }


def regenerate(
    data: Path,
    output: Path,
    options: RegenerateOptions,
    answerer: Answerer,
    who: Mapping[str, Any],
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Answer the prompts of `data` and write a line a conversation to `output`, as each is done.

    An `output` that is there is gone on with: lines that it holds are not made again. Beside it,
    `output.provenance.json` says what it was made with; `who` names the model there. Raises `RequestError` for data
    that cannot be used, `ConfigError` for an `output` that cannot be written or was made otherwise.
    """
    scripts = choose(
        read_scripts(data), options.num_prompts, parse_weights(options.mix, "--mix"), options.seed
    )
    _keep_provenance(data, output, options, who)
    journal = Journal(output)
    check_complete(journal, {"line", "messages"}, "regenerated conversations")
    done = {row["line"] for row in journal.rows}
    tally = Tally(len(scripts), len(done), num_before=len(done))
    waiting = [(number, script) for number, script in enumerate(scripts) if script.number not in done]
    temperatures = options.temperatures
    under_way: dict[str, _Conversation] = {}
    try:
        waiting.reverse()
        while waiting or under_way:
            while waiting and len(under_way) < answerer.room:
                number, script = waiting.pop()
                params = SamplingParams(
                    temperature=temperatures[number % len(temperatures)],
                    top_p=options.top_p,
                    max_tokens=options.max_tokens,
                    seed=derive_seed(options.seed, script.number),
                )
                under_way[str(script.number)] = _Conversation(script, params)
                _go_on(str(script.number), under_way, answerer, journal, tally)
            for key, answer in answerer.answers():
                under_way[key].add(answer)
                tally.num_tokens += answer.num_tokens
                _go_on(key, under_way, answerer, journal, tally)
            on_progress(tally)
    finally:
        answerer.close()
        journal.close()
    return tally


def _go_on(
    key: str, under_way: dict[str, _Conversation], answerer: Answerer, journal: Journal, tally: Tally
) -> None:
    """Ask the conversation's next prompt, or write it down when nothing more can be asked."""
    conversation = under_way[key]
    prompt = conversation.next_prompt()
    if prompt is not None:
        try:
            answerer.ask(key, prompt, conversation.params)
            return
        except RequestError as error:  # too long, or refused by the template: keep what there is
            tally.why_skipped = tally.why_skipped or f"line {key}: {error}"
    del under_way[key]
    if conversation.answers:
        journal.append(conversation.row())
        tally.num_done += 1
    else:
        tally.num_skipped += 1


def _tokens(answers: Seq[TargetAnswer]) -> dict[str, Any]:
    """The last prompt and answer as the model saw them, and where in them its own tokens stand.

    An earlier answer that the template or the tokenizer writes otherwise than the model did counts as far as both
    agree.
    """
    last = answers[-1]
    if last.prompt_token_ids is None or last.token_ids is None:
        return {}
    token_ids = [*last.prompt_token_ids, *last.token_ids]
    spans: list[list[int]] = []
    for answer in answers:
        assert answer.prompt_token_ids is not None
        assert answer.token_ids is not None
        start = len(answer.prompt_token_ids)
        if token_ids[:start] != answer.prompt_token_ids:
            continue
        length = 0
        for said, seen in zip(answer.token_ids, token_ids[start:], strict=False):
            if said != seen:
                break
            length += 1
        if length:
            spans.append([start, start + length])
    return {"token_ids": token_ids, "answer_spans": spans}


def _keep_provenance(data: Path, output: Path, options: RegenerateOptions, who: Mapping[str, Any]) -> None:
    """Write down what the output is made with; raise `ConfigError` when it was begun with something else."""
    file = output.with_name(output.name + ".provenance.json")
    identity = {
        "data": data.name,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "options": asdict(options),
        **who,
    }
    try:
        if output.exists() and output.stat().st_size:
            before = json.loads(file.read_text(encoding="utf-8"))["made_with"] if file.exists() else {}
            changed = [name for name, value in identity.items() if before.get(name) != value]
            if changed:
                raise ConfigError(
                    f"{str(output)!r} was begun with another {changed[0]}; give that again, or another --output"
                )
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"made_with": identity, "begun": provenance()}, indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from None
