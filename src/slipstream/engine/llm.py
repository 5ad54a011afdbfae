"""Offline generation: a batch of prompts in, their answers out. Shaped as vLLM's `LLM`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from slipstream.config import SpeculativeConfig
from slipstream.engine.factory import make_engine
from slipstream.engine.inputs import Prompt, encode_chat
from slipstream.engine.outputs import RequestOutput
from slipstream.engine.requests import UpdateCallback
from slipstream.errors import RequestError
from slipstream.sampling.params import SamplingParams

Messages = Seq[dict[str, Any]]
Params = SamplingParams | Seq[SamplingParams] | None


class LLM:
    """A model with its drafter, for synchronous use.

    `model` is a checkpoint folder or a hub id; None takes the small pair that ships with the package.
    `speculative_config` is a mapping as vLLM's (`{"method": "ngram", "num_speculative_tokens": 4}`), a
    `SpeculativeConfig`, or None for speculation off. Other keywords are the fields of `EngineConfig`.
    Raises `ConfigError` or `ModelError` when something cannot be loaded as asked.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        **engine_options: Any,
    ) -> None:
        self.engine = make_engine(model, speculative_config, engine_options)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: Params = None,
        *,
        tenant: str = "",
        task: str | Seq[str] = "",
        max_draft_tokens: int | None = None,
        draft_method: str | None = None,
        on_update: UpdateCallback | None = None,
    ) -> list[RequestOutput]:
        """Answer the prompts, texts or token ids, in one batch; the outputs come in the order of the prompts.

        `sampling_params` is one for all or one for each, and so is `task`, a name for the kind of request that some
        drafters go by. `max_draft_tokens` bounds the speculation, 0 turns it off; `draft_method` is the only one of
        `auto`'s drafters that may draft.
        `on_update` sees every step's new tokens as they are committed. Where it calls `llm.engine.abort`, the output
        holds what there was, with `finish_reason` abort.
        """
        return self._run(
            _as_list(prompts), sampling_params, tenant, task, max_draft_tokens, draft_method, on_update
        )

    def chat(
        self,
        conversations: Messages | Seq[Messages],
        sampling_params: Params = None,
        *,
        tenant: str = "",
        task: str | Seq[str] = "",
        max_draft_tokens: int | None = None,
        draft_method: str | None = None,
        on_update: UpdateCallback | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, each a list of `{"role": ..., "content": ...}`."""
        several = conversations if _are_several(conversations) else [conversations]
        prompts = [encode_chat(self.engine.tokenizer, messages) for messages in several]  # type: ignore[arg-type]
        return self._run(prompts, sampling_params, tenant, task, max_draft_tokens, draft_method, on_update)

    def reset_caches(self) -> None:
        """Forget what finished requests left behind: retained prefixes, and what the drafter learned from them."""
        self.engine.reset_caches()

    def _run(
        self,
        prompts: Seq[Prompt],
        sampling_params: Params,
        tenant: str,
        task: str | Seq[str],
        max_draft_tokens: int | None,
        draft_method: str | None,
        on_update: UpdateCallback | None,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Seq) or isinstance(sampling_params, str):
            raise RequestError(
                f"sampling parameters must be a SamplingParams or a list, got {sampling_params!r}"
            )
        if len(sampling_params) != len(prompts):
            raise RequestError(f"{len(sampling_params)} sampling parameters for {len(prompts)} prompts")
        tasks = [task] * len(prompts) if isinstance(task, str) else task
        if not isinstance(tasks, Seq) or len(tasks) != len(prompts):
            raise RequestError(
                f"task must be a string, or one for each of {len(prompts)} prompts, got {task!r}"
            )
        ids: list[str] = []
        try:
            for prompt, params, name in zip(prompts, sampling_params, tasks, strict=True):
                request_id = f"offline-{next(self._request_ids)}"
                self.engine.add_request(
                    request_id,
                    prompt,
                    params,
                    tenant=tenant,
                    task=name,
                    max_draft_tokens=max_draft_tokens,
                    draft_method=draft_method,
                    on_update=on_update,
                )
                ids.append(request_id)
            outputs: dict[str, RequestOutput] = {}
            while any(map(self.engine.is_unfinished, ids)):
                for update in self.engine.step():
                    if update.output is not None:
                        outputs[update.request_id] = update.output
            if lost := [request_id for request_id in ids if request_id not in outputs]:
                raise RequestError(f"{lost[0]} was aborted outside its callback, so it has no output")
        except BaseException:  # a bad prompt, Ctrl-C: leave nothing behind
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [outputs[request_id] for request_id in ids]


def _are_several(conversations: Messages | Seq[Messages]) -> bool:
    return isinstance(conversations, Seq) and len(conversations) > 0 and isinstance(conversations[0], list)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Seq):
        raise RequestError(f"a prompt is a string or a list of token ids, got {prompts!r}")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
