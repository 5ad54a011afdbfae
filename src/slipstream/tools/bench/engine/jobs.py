"""A workload's prompts as jobs for an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.assets.workload.prompts import Prompt
from slipstream.engine.closed_loop import BenchJob
from slipstream.engine.engine import Engine
from slipstream.errors import RequestError
from slipstream.sampling.noise import derive_seed
from slipstream.sampling.params import SamplingParams
from slipstream.text.prompts import encode_question


@dataclass(frozen=True)
class JobMaker:
    """Encodes prompts for one engine."""

    engine: Engine
    params: SamplingParams
    """For every answer; each job's own seed is derived from its seed."""
    raw: bool
    """Plain prompts are not wrapped in the chat template."""
    ignore_eos: bool

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.engine.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any length; raises `RequestError` with its file and line."""
        engine = self.engine
        try:
            return encode_question(
                engine.tokenizer, prompt.text, prompt.messages, self.raw, engine.model.vocab_size
            )
        except RequestError as error:
            raise RequestError(f"{prompt.where}: {error}") from None

    def fits(self, prompt: Prompt) -> bool:
        """Whether the context has room for a prompt and its answer."""
        return len(self.token_ids(prompt)) + prompt.max_tokens <= self.engine.max_model_len

    def job(self, number: int, prompt: Prompt) -> BenchJob:
        """The job of that number; raises `RequestError` as `token_ids` does."""
        params = replace(
            self.params,
            max_tokens=prompt.max_tokens,
            ignore_eos=self.ignore_eos,
            seed=derive_seed(self.params.seed or 0, number),
        )
        return BenchJob(number, self.token_ids(prompt), params, prompt.task)
