"""Offline generation: a batch of prompts in, their answers out. Shaped as vLLM's `LLM`."""

from __future__ import annotations

import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, Unpack

from tqdm.auto import tqdm

from slipstream.config import SpeculativeConfig, reject_unknown
from slipstream.core.request import RequestOptions
from slipstream.engine.factory import make_engine
from slipstream.engine.outputs import RequestOutput
from slipstream.engine.requests import (
    BatchKeywords,
    ChatKeywords,
    TemplateKeywords,
    UpdateCallback,
    batch_options,
)
from slipstream.errors import ConfigError, RequestError
from slipstream.sampling.params import SamplingParams
from slipstream.text.inputs import as_list, is_token_id
from slipstream.text.prompts import Prompt, encode_chat
from slipstream.vllm_names import CALL, METHODS, split_off

Messages = Seq[dict[str, Any]]
Params = SamplingParams | Seq[SamplingParams] | None
UseTqdm = bool | Callable[..., Any] | None

QUIET_S = 1.0
"""A batch that is done by then shows no bar unless `use_tqdm` is True."""


class LLM:
    """A model with its drafter, for synchronous use.

    `model` is a checkpoint folder or a hub id; None takes the small pair that ships with the package.
    `speculative_config` is a mapping as vLLM's (`{"method": "ngram", "num_speculative_tokens": 4}`), a
    `SpeculativeConfig`, or None for speculation off. Other keywords are the fields of `EngineConfig`.
    Raises `ConfigError` or `ModelError` for what cannot be loaded.

    May be called from several threads: one call runs at a time, the others wait. `AsyncEngine` runs them together.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        speculative_config: Mapping[str, Any] | SpeculativeConfig | None = None,
        **engine_options: Any,
    ) -> None:
        self.engine = make_engine(model, speculative_config, engine_options)
        self._request_ids = itertools.count()
        self._turn = threading.Lock()
        self._holder: int | None = None
        """The thread whose call runs."""

    def generate(
        self,
        prompts: Prompt | Seq[Prompt] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = None,
        options: RequestOptions | Seq[RequestOptions] | None = None,
        on_update: UpdateCallback | None = None,
        **keywords: Unpack[BatchKeywords],
    ) -> list[RequestOutput]:
        """Answer the prompts, texts or token ids, in one batch; the outputs come in the order of the prompts.

        `sampling_params` is one for all or one for each; None is what `get_default_sampling_params` returns.
        `options` are `RequestOptions`, likewise one for all or one for each. `keywords` are their fields and replace
        them: `tenant` (nothing is shared between tenants), `task` (one for all or one for each, a name for the kind
        of request that drafters may go by), `max_draft_tokens` (the most draft tokens a step; 0 turns speculation
        off), `draft_method` (the only one of `auto`'s drafters that may draft), `prediction` (the text that is
        expected, drafted in addition to what the drafter proposes; one for all or one for each), `learn` (False keeps
        nothing for a drafter that learns). vLLM's keywords are accepted at the values that change nothing.

        `on_update` sees every step's new tokens as they are committed. Where it calls `llm.engine.abort`, the output
        holds what there was, with `finish_reason` abort. `use_tqdm` shows a bar, or is what makes one;
        None shows it on a terminal where the batch takes longer than a second and `on_update` is None.
        Raises `RequestError`.
        """
        own = _own_keywords(self.generate, keywords, BatchKeywords)
        if prompts is None:
            raise RequestError("generate needs prompts: a text, token ids, or a list of them")
        with self._alone():
            prompts = self.with_languages(_as_prompts(prompts))
            each = batch_options(len(prompts), options, own)
            return self._run(prompts, sampling_params, each, use_tqdm, on_update)

    def chat(
        self,
        messages: Messages | Seq[Messages] | None = None,
        sampling_params: Params = None,
        *,
        use_tqdm: UseTqdm = None,
        options: RequestOptions | Seq[RequestOptions] | None = None,
        on_update: UpdateCallback | None = None,
        **keywords: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several, each a list of `{"role": ..., "content": ...}`.

        `conversations` is another name for `messages`. A content may be a list of parts of text. `chat_template` is
        used instead of the model's own, with `chat_template_kwargs` as its variables; `continue_final_message` goes on
        with the last message (and needs `add_generation_prompt=False`); `tools` are functions in OpenAI's shape.
        """
        own = _own_keywords(self.chat, keywords, ChatKeywords)
        conversations: Messages | Seq[Messages] | None = own.pop("conversations", None)
        template = {name: own.pop(name) for name in TemplateKeywords.__optional_keys__ & own.keys()}
        variables = template.pop("chat_template_kwargs", None)
        if (messages is None) == (conversations is None):
            raise RequestError("chat needs messages, under this name or as conversations")
        given = conversations if messages is None else messages
        several = given if _are_several(given) else [given]
        with self._alone():
            prompts = [
                encode_chat(self.engine.tokenizer, one, variables, **template)  # type: ignore[arg-type]
                for one in several  # type: ignore[union-attr]
            ]
            each = batch_options(len(prompts), options, own)
            return self._run(prompts, sampling_params, each, use_tqdm, on_update)

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, of Transformers."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters get, as a copy that may be changed."""
        return self.engine.intake.default_params()

    def reset_caches(self) -> None:
        """Drop what finished requests left: retained prefixes, and what the drafter learned from them."""
        with self._alone():
            self.engine.reset_caches()

    def reset_prefix_cache(self) -> bool:
        """vLLM's name for `reset_caches`."""
        self.reset_caches()
        return True

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            raise AttributeError(f"{name} is vLLM's and is not available here; {METHODS[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def with_languages(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts, with the languages that a speech model hears where they say none; `generate` does it too."""
        encoder = self.engine.intake.encoder_prompts
        if encoder is None or encoder.texts.speech is None:
            return prompts
        unknown = [place for place, prompt in enumerate(prompts) if encoder.detects(prompt)]
        if not unknown:
            return prompts
        heard: list[Any] = [prompts[place] for place in unknown]
        asked = [encoder.texts.detecting(prompt["audio"]) for prompt in heard]
        params = [SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=ids) for _, ids in asked]
        options = batch_options(len(asked), None, {})
        outputs = self._run([one for one, _ in asked], params, options, False, None)
        for place, prompt, output in zip(unknown, heard, outputs, strict=True):
            language = encoder.texts.speech.language_of(output.outputs[0].token_ids[0])
            named: Any = {**prompt, "language": language}
            prompts[place] = named
        return prompts

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One call at a time; a call from within another one would deadlock, so it is refused."""
        me = threading.get_ident()
        if self._holder == me:
            raise RequestError(
                "an LLM was called from its own on_update; call it after it has returned, or use AsyncEngine"
            )
        with self._turn:
            self._holder = me
            try:
                yield
            finally:
                self._holder = None

    def _run(
        self,
        prompts: Seq[Prompt],
        sampling_params: Params,
        options: Seq[RequestOptions],
        use_tqdm: UseTqdm,
        on_update: UpdateCallback | None,
    ) -> list[RequestOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.engine.intake.default_params()] * len(prompts)
        if not isinstance(sampling_params, Seq) or isinstance(sampling_params, str):
            raise RequestError(
                f"sampling parameters must be a SamplingParams or a list, got {sampling_params!r}"
            )
        if len(sampling_params) != len(prompts):
            raise RequestError(f"{len(sampling_params)} sampling parameters for {len(prompts)} prompts")
        ids: list[str] = []
        try:
            for prompt, params, one in zip(prompts, sampling_params, options, strict=True):
                request_id = f"offline-{next(self._request_ids)}"
                self.engine.add_request(request_id, prompt, params, one, on_update=on_update)
                ids.append(request_id)
            outputs: dict[str, RequestOutput] = {}
            with _progress(use_tqdm, len(ids), by_default=on_update is None) as advance:
                while any(map(self.engine.is_unfinished, ids)):
                    for update in self.engine.step():
                        if update.output is not None:
                            outputs[update.request_id] = update.output
                            advance()
            if lost := [request_id for request_id in ids if request_id not in outputs]:
                raise RequestError(f"{lost[0]} was aborted outside its callback, so it has no output")
        except BaseException:  # a bad prompt, Ctrl-C: abort what was added
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return [outputs[request_id] for request_id in ids]


@contextmanager
def _progress(use_tqdm: UseTqdm, num_prompts: int, by_default: bool) -> Iterator[Callable[[], object]]:
    """What to call when a prompt is answered: how far a batch is, on standard error.

    `use_tqdm` True shows a bar, False none, and a callable makes it as `tqdm` does. None shows one on a terminal where
    several prompts take longer than `QUIET_S`, if that is wanted `by_default`.
    """
    if use_tqdm is False or (use_tqdm is None and not (by_default and num_prompts > 1)):
        yield lambda: None
        return
    options: dict[str, Any] = {"total": num_prompts, "desc": "Processed prompts", "dynamic_ncols": True}
    if use_tqdm is None:
        options |= {"disable": None, "delay": QUIET_S, "leave": False}
    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(**options) as bar:
        yield bar.update


def _own_keywords(method: Callable[..., Any], given: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """`given` without vLLM's names that change nothing; raises `RequestError` for one that neither the method nor the
    `TypedDict` of `names` has."""
    own, _ = split_off(given, CALL, "argument", RequestError)
    named = set(inspect.signature(method).parameters) - {"keywords"}
    try:
        reject_unknown(own, named | names.__optional_keys__, "argument")
    except ConfigError as error:
        raise RequestError(str(error)) from None
    return own


def _are_several(conversations: Any) -> bool:
    return isinstance(conversations, Seq) and len(conversations) > 0 and isinstance(conversations[0], list)


def _as_prompts(prompts: Any) -> list[Prompt]:
    prompts = as_list(prompts)
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Seq):
        raise RequestError(f"a prompt is a string or a list of token ids, got {prompts!r}")
    if prompts and is_token_id(prompts[0]):
        return [prompts]
    return list(prompts)
