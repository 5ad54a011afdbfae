"""Regenerates answers with the target, because a draft must learn the target's own answers."""

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
from slipstream.profiling.provenance import provenance
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.text.jsonl import Message
from slipstream.train.answerers import Answerer, TargetAnswer
from slipstream.train.journal import Journal, check_complete
from slipstream.train.options import RegenerateOptions, parse_weights
from slipstream.train.progress import format_rate
from slipstream.train.prompts import PromptScript, choose, read_scripts


def check_data(data: Path, options: RegenerateOptions) -> None:
    """Raise the errors of `regenerate` about the data before a model is loaded."""
    choose(
        read_scripts(data, options.key),
        options.num_prompts,
        parse_weights(options.mix, "--mix"),
        options.seed,
    )


@dataclass
class Tally:
    """Progress of a run."""

    num_chosen: int
    num_done: int = 0
    """Conversations in the output, including those of earlier runs."""
    num_skipped: int = 0
    """Conversations whose first prompt was refused, such as one longer than the context."""
    num_tokens: int = 0
    """Answer tokens of this run."""
    num_before: int = 0
    """Conversations that earlier runs had done."""
    why_skipped: str = ""
    """Error of the first skipped conversation."""
    started_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        spent_s = time.monotonic() - self.started_s
        num_new = self.num_done - self.num_before
        text = f"{self.num_done:,} of {self.num_chosen:,} conversations, {self.num_tokens:,} answer tokens"
        if num_new:
            left_s = (self.num_chosen - self.num_done - self.num_skipped) * spent_s / num_new
            speed = format_rate(self.num_tokens, spent_s)
            text += f", {speed}, {left_s / 60:.0f} min left" if speed else f", {left_s / 60:.0f} min left"
        return text


@dataclass
class _Conversation:
    """One conversation being regenerated."""

    script: PromptScript
    params: SamplingParams
    messages: list[Message] = field(default_factory=list)
    answers: list[TargetAnswer] = field(default_factory=list)

    def next_prompt(self) -> list[Message] | None:
        """The next messages to answer; None when the conversation is complete."""
        if len(self.answers) == len(self.script.turns):
            return None
        return [*self.messages, *self.script.turns[len(self.answers)]]

    def add(self, answer: TargetAnswer) -> None:
        self.messages += self.script.turns[len(self.answers)]
        self.messages.append({"role": "assistant", "content": answer.text})
        self.answers.append(answer)

    def row(self) -> dict[str, Any]:
        """The conversation's line of the output."""
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
    model_identity: Mapping[str, Any],
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Answer the prompts of `data` and write a line a conversation to `output`, as each is done.

    An existing `output` is continued: its conversations are not repeated. `output.provenance.json` next to it records
    the settings, with the model as `model_identity`. Raises `RequestError` for invalid data, and `ConfigError` for an
    `output` that cannot be written or was made with other settings.
    """
    scripts = choose(
        read_scripts(data, options.key),
        options.num_prompts,
        parse_weights(options.mix, "--mix"),
        options.seed,
    )
    _keep_provenance(data, output, options, model_identity)
    journal = Journal(output)
    check_complete(journal, {"line", "messages"}, "regenerated conversations")
    done = {row["line"] for row in journal.rows}
    tally = Tally(len(scripts), len(done), num_before=len(done))
    waiting = [(number, script) for number, script in enumerate(scripts) if script.number not in done]
    temperatures = options.temperatures
    running: dict[str, _Conversation] = {}
    try:
        waiting.reverse()
        while waiting or running:
            while waiting and len(running) < answerer.room:
                number, script = waiting.pop()
                params = SamplingParams(
                    temperature=temperatures[number % len(temperatures)],
                    top_p=options.top_p,
                    max_tokens=options.max_tokens,
                    seed=derive_seed(options.seed, script.number),
                )
                running[str(script.number)] = _Conversation(script, params)
                _advance(str(script.number), running, answerer, journal, tally)
            for key, answer in answerer.answers():
                running[key].add(answer)
                tally.num_tokens += answer.num_tokens
                _advance(key, running, answerer, journal, tally)
            on_progress(tally)
    finally:
        answerer.close()
        journal.close()
    return tally


def _advance(
    key: str, running: dict[str, _Conversation], answerer: Answerer, journal: Journal, tally: Tally
) -> None:
    """Start the conversation's next answer, or write the conversation when it is complete or refused."""
    conversation = running[key]
    prompt = conversation.next_prompt()
    if prompt is not None:
        try:
            answerer.submit(key, prompt, conversation.params)
            return
        except RequestError as error:  # too long, or refused by the template: keep the earlier answers
            tally.why_skipped = tally.why_skipped or f"line {key}: {error}"
    del running[key]
    if conversation.answers:
        journal.append(conversation.row())
        tally.num_done += 1
    else:
        tally.num_skipped += 1


def _tokens(answers: Seq[TargetAnswer]) -> dict[str, Any]:
    """Token ids of the last prompt and answer, and the spans of all answers in them.

    The span of an earlier answer that is tokenised otherwise within the prompt ends at the first difference.
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
        for generated, seen in zip(answer.token_ids, token_ids[start:], strict=False):
            if generated != seen:
                break
            length += 1
        if length:
            spans.append([start, start + length])
    return {"token_ids": token_ids, "answer_spans": spans}


def _settings(identity: Mapping[str, Any]) -> dict[str, Any]:
    """What an output was made with, the options one by one."""
    options: Mapping[str, Any] = identity.get("options", {})
    return {**{name: value for name, value in identity.items() if name != "options"}, **options}


def _keep_provenance(
    data: Path, output: Path, options: RegenerateOptions, model_identity: Mapping[str, Any]
) -> None:
    """Write the provenance file; raises `ConfigError` when the output was begun with other settings."""
    file = output.with_name(output.name + ".provenance.json")
    identity = {
        "data": data.name,
        "data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(),
        "options": asdict(options),
        **model_identity,
    }
    try:
        if output.exists() and output.stat().st_size:
            before = json.loads(file.read_text(encoding="utf-8"))["made_with"] if file.exists() else {}
            were, are = _settings(before), _settings(identity)
            changed = [name for name, value in are.items() if were.get(name) != value]
            if changed:
                raise ConfigError(
                    f"{str(output)!r} was begun with other settings: {', '.join(changed)}; give those again, or "
                    "another --output"
                )
            return
        output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"made_with": identity, "begun": provenance()}, indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {str(file)!r}: {error.strerror}") from None
