"""`/v1/audio/transcriptions` and `/v1/audio/translations`: what a speech model hears, as text.

A sound that is longer than the model hears at once is cut where it is quiet, and the parts are answered together.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from numpy.typing import NDArray
from starlette.responses import JSONResponse, PlainTextResponse, Response

from slipstream.core.request import RequestOptions
from slipstream.engine.outputs import RequestOutput
from slipstream.models.audio import AudioReader
from slipstream.sampling.noise import draw_seed
from slipstream.sampling.params import SamplingParams
from slipstream.serve.api.errors import LOG_FIELDS, ApiError, invalid
from slipstream.serve.auth import account_of, tenant_of
from slipstream.serve.job import Job
from slipstream.serve.limits import forget_body, read_body
from slipstream.serve.network.multipart import boundary_of, fields_of
from slipstream.serve.service import Service
from slipstream.text.encoder_prompts import EncoderDecoderTexts
from slipstream.text.prompts import AudioPrompt
from slipstream.text.speech import SpeechTexts

_FIELDS = frozenset({"file", "model", "language", "prompt", "response_format", "temperature", "seed"})
_FORMATS = ("json", "text", "verbose_json")
_QUIET_S = 5.0
"""A long sound is cut in the quietest tenth of a second of its last seconds."""
_MAX_PARTS = 240
"""Parts of one sound: two hours of half a minute each."""


def add_routes(app: FastAPI, service: Service) -> None:
    """Add both to the application."""

    @app.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await _answer(request, service, "transcribe")

    @app.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await _answer(request, service, "translate")


async def _answer(request: Request, service: Service, task: str) -> Response:
    """One response; raises `ApiError` for a form that cannot be served."""
    fields = await _form(request, service)
    shape = fields.get("response_format", "json")
    if shape not in _FORMATS:
        raise invalid(
            f"response_format must be one of {', '.join(_FORMATS)}, got {shape!r}", "response_format"
        )
    heard = _Hearing(request, service, fields, task)
    reader = heard.reader
    deadline_s = asyncio.get_running_loop().time() + service.config.request_timeout_s
    with service.admission.admit(1, account_of(request.scope)):
        async with service.until(deadline_s):
            most_s = _MAX_PARTS * reader.seconds
            samples = await asyncio.to_thread(reader.samples, fields["file"], most_s)
        parts = cut(samples, reader)
        if len(parts) > _MAX_PARTS:
            raise invalid(f"the audio is longer than {_MAX_PARTS} parts; split it", "file")
        language = await heard.language(parts[0], deadline_s)
        outputs = await heard.texts(parts, language, deadline_s)
    text = " ".join(filter(None, (output.outputs[0].text.strip() for output in outputs)))
    if shape == "text":
        return PlainTextResponse(text + "\n")
    if shape == "json":
        return JSONResponse({"text": text})
    seconds = len(samples) / reader.rate
    return JSONResponse({"task": task, "language": language or "en", "duration": seconds, "text": text})


async def _form(request: Request, service: Service) -> dict[str, Any]:
    """The fields of the form: texts, and the file's bytes."""
    config = service.config
    try:
        boundary = boundary_of(request.headers.get("content-type", ""))
        origin = request.headers.get("origin")
        if origin is not None and not {origin, "*"} & set(config.cors_origins):
            # A browser sends a form for a web page of any origin, without asking first.
            raise ApiError(
                403, f"pages of {origin!r} may not send forms here; see cors_origins", code="forbidden"
            )
        _speech(service)
        service.admission.check_open()
        service.admission.check_room(account=account_of(request.scope))
    except ApiError:
        await forget_body(request)
        raise
    raw = await read_body(request, config.max_body_bytes, config.body_timeout_s)
    found = fields_of(raw, boundary)
    if "file" not in found:
        raise invalid("the form has no file", "file")
    if unknown := found.keys() - _FIELDS:
        raise invalid(f"{min(unknown)} is not supported; send {', '.join(sorted(_FIELDS))}", min(unknown))
    fields: dict[str, Any] = {"file": found.pop("file")}
    for name, content in found.items():
        try:
            fields[name] = content.decode()
        except UnicodeDecodeError:
            raise invalid(f"{name} is not UTF-8", name) from None
    service.check_model(fields.get("model"))
    return fields


def _speech(service: Service) -> tuple[AudioReader, EncoderDecoderTexts, SpeechTexts]:
    """What reads sounds, and how answers begin; raises `ApiError` for a model of another kind."""
    reader, texts = service.audio_reader, service.info.encoder_texts
    if reader is None or texts is None or texts.speech is None:
        raise invalid(f"{service.model_name!r} is no speech model; serve one, such as Whisper", "model")
    return reader, texts, texts.speech


class _Hearing:
    """The answers of one request."""

    def __init__(self, request: Request, service: Service, fields: dict[str, Any], task: str) -> None:
        """Raises `RequestError` or `ApiError` for fields that the model cannot follow."""
        self._service, self._task = service, task
        self.reader, self._texts, self._speech = _speech(service)
        self._language: str | None = fields.get("language")
        self._detects = self._speech.detects(self._language)
        self._speech.begin(next(iter(self._speech.languages)) if self._detects else self._language, task)
        self._options = RequestOptions(tenant=tenant_of(request.scope, None), task="audio")
        self._log_fields = request.scope[LOG_FIELDS]
        self._seed = _whole(fields["seed"]) if "seed" in fields else draw_seed()
        self._temperature = _number(fields.get("temperature", "0"))
        self._before = self._earlier(fields.get("prompt", ""))

    async def language(self, part: NDArray[np.float32], deadline_s: float) -> str | None:
        """What is spoken, as the request or else the model says; None for a model of one language."""
        if not self._detects:
            return self._language or self._speech.default_language
        asked, tokens = self._texts.detecting((part, self.reader.rate))
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=tokens)
        [output] = await self._run([asked], params, deadline_s)
        return self._speech.language_of(output.outputs[0].token_ids[0])

    async def texts(
        self, parts: list[NDArray[np.float32]], language: str | None, deadline_s: float
    ) -> list[RequestOutput]:
        """What is said in each part."""
        begun = [*self._before, self._texts.start, *self._speech.begin(language, self._task)]
        prompts: list[AudioPrompt] = [
            {"audio": (part, self.reader.rate), "decoder_prompt": begun} for part in parts
        ]
        left = self._service.limits.max_model_len - len(begun)
        params = SamplingParams(temperature=self._temperature, max_tokens=left, seed=self._seed)
        return await self._run(prompts, params, deadline_s)

    async def _run(
        self, prompts: list[AudioPrompt], params: SamplingParams, deadline_s: float
    ) -> list[RequestOutput]:
        job = Job(
            id=f"audio-{uuid.uuid4().hex}",
            prompts=[[] for _ in prompts],
            params=params,
            seeds=(self._seed,) * len(prompts),
            options=self._options,
            log_fields=self._log_fields,
            inputs=prompts,
        )
        outputs: dict[int, RequestOutput] = {}
        async with self._service.answering(job, deadline_s) as updates:
            async for number, update in updates:
                if update.output is not None:
                    outputs[number] = update.output
        return [outputs[number] for number in sorted(outputs)]

    def _earlier(self, text: str) -> list[int]:
        """The tokens of what was said before, as the request's `prompt` says; as many of the last as leave room."""
        if not text.strip():
            return []
        tokenizer = self._service.tokenizer
        mark = tokenizer.convert_tokens_to_ids("<|startofprev|>")
        if mark is None or mark == tokenizer.unk_token_id:
            raise invalid("this model has no token for what was said before; leave prompt out", "prompt")
        most = self._service.limits.max_model_len // 2 - 1
        said = tokenizer(" " + text.strip(), add_special_tokens=False, verbose=False).input_ids
        return [mark, *said[-most:]]


def cut(samples: NDArray[np.float32], reader: AudioReader) -> list[NDArray[np.float32]]:
    """The sound in parts that the model hears at once, each cut where its end is quietest."""
    longest, window = int(reader.seconds * reader.rate), max(reader.rate // 10, 1)
    reach = min(int(_QUIET_S * reader.rate), longest // 2)
    parts = []
    while len(samples) > longest:
        end = samples[longest - reach : longest]
        loudness = np.square(end[: len(end) // window * window].reshape(-1, window)).sum(axis=1)
        at = longest - reach + int(loudness.argmin()) * window + window // 2
        parts.append(samples[:at])
        samples = samples[at:]
    return [*parts, samples]


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise invalid(f"temperature must be a number from 0 to 1, got {text!r}", "temperature")
    return number


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise invalid(f"seed must be a whole number, got {text!r}", "seed") from None
