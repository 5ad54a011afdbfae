"""Encoder-decoders behind the server: completions of texts, transcriptions of sounds."""

from __future__ import annotations

import io
import wave
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from slipstream import LLM, SamplingParams
from slipstream.errors import RequestError
from slipstream.models.audio import AudioReader, read_sound
from slipstream.serve.api.audio import cut
from slipstream.serve.app import create_app
from slipstream.serve.config import ServeConfig
from slipstream.serve.network.multipart import MAX_FIELDS
from tests.kit.encoder_decoders import RATE, Stock, prompts, save, sound
from tests.kit.threaded_host import ThreadedHost


def wav(samples: Any, rate: int = RATE, width: int = 2, channels: int = 1) -> bytes:
    """The samples, of all channels alike, as a WAV file of so many bytes a number."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        whole = np.round(np.clip(samples, -1, 1) * (2 ** (8 * width - 1) - 1)).astype(np.int64)
        whole = (whole + 128 if width == 1 else whole).repeat(channels)
        file.writeframes(whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return written.getvalue()


def of_bits(bits: int) -> bytes:
    """A WAV file that says that its samples have so many bits."""
    file = bytearray(wav(sound(1), width=4))
    file[34] = bits
    return bytes(file)


@pytest.fixture(scope="module")
def speech_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save("whisper", tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def speech(speech_path: str) -> Iterator[TestClient]:
    llm = LLM(speech_path, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    host = ThreadedHost(llm.engine)
    with TestClient(create_app(host.remote, ServeConfig(), "ears")) as client:
        yield client
    host.close()
    assert llm.engine.integrity() == []


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TestClient]]:
    path = save("t5", tmp_path_factory.mktemp("summaries"))
    llm = LLM(path, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    host = ThreadedHost(llm.engine)
    with TestClient(create_app(host.remote, ServeConfig(), "t5")) as client:
        yield path, client
    host.close()
    assert llm.engine.integrity() == []


def heard(client: TestClient, file: bytes, route: str = "transcriptions", **fields: str) -> Any:
    return client.post(f"/v1/audio/{route}", files={"file": ("a.wav", file, "audio/wav")}, data=fields)


def test_a_completion_is_what_is_made_of_the_prompt(summaries: tuple[str, TestClient]) -> None:
    path, client = summaries
    stock, given = Stock(path), prompts("t5", 4)
    body = {"prompt": given, "max_tokens": 12, "min_tokens": 12, "temperature": 0, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body).json()
    for choice, prompt in zip(answer["choices"], given, strict=True):
        assert choice["token_ids"] == stock.answer(prompt, 12)
    long = " ".join(["w5"] * 500)
    assert client.post("/v1/completions", json={"prompt": long, "max_tokens": 400}).status_code == 200
    streamed = client.post("/v1/completions", json={**body, "prompt": given[1], "stream": True}).text
    assert "[DONE]" in streamed
    for refused in (
        {"prompt": "w5", "echo": True},
        {"prompt": "w5 " * 600},
    ):
        assert client.post("/v1/completions", json=refused).status_code == 400
    chat = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "w5"}]})
    assert chat.status_code == 400
    assert "no chat template" in chat.json()["error"]["message"]
    refused = heard(client, wav(sound(1)))
    assert refused.status_code == 400
    assert "is no speech model" in refused.json()["error"]["message"]


def test_a_transcription_is_what_the_model_says(speech: TestClient, speech_path: str) -> None:
    plain = LLM(speech_path)
    params = SamplingParams(temperature=0, max_tokens=92)
    for number in range(3):
        file = wav(sound(number))
        [said] = plain.generate([{"audio": file, "language": "fr"}], params)
        expected = said.outputs[0].text.strip()
        assert heard(speech, file, language="fr").json() == {"text": expected}
        assert heard(speech, file, language="fr", response_format="text").text == expected + "\n"
        [translated] = plain.generate([{"audio": file, "language": "fr", "task": "translate"}], params)
        answer = heard(speech, file, "translations", language="fr", temperature="0").json()
        assert answer["text"] == translated.outputs[0].text.strip()


def test_the_language_is_found(speech: TestClient, speech_path: str) -> None:
    plain = LLM(speech_path)
    file = wav(sound(2))
    [found] = plain.generate([{"audio": file}], SamplingParams(temperature=0, max_tokens=92))
    answer = heard(speech, file, response_format="verbose_json").json()
    codes = {182: "en", 183: "de", 184: "fr"}
    assert answer["language"] == codes[found.prompt_token_ids[1]]
    assert answer["text"] == found.outputs[0].text.strip()
    assert answer["duration"] == pytest.approx(len(sound(2)) / RATE)


def test_a_long_sound_is_heard_in_parts(speech: TestClient, speech_path: str) -> None:
    quiet = np.zeros(3000, np.float32)
    long = np.concatenate([sound(0), quiet, sound(1)[:9000], quiet])
    reader = AudioReader(speech_path)
    parts = cut(reader.samples(wav(long), 60), reader)
    assert len(parts) == 2
    assert 9000 < len(parts[0]) < 12000, "cut where it is quiet"
    each = [heard(speech, wav(part), language="en").json()["text"] for part in parts]
    assert heard(speech, wav(long), language="en").json()["text"] == " ".join(filter(None, each))


@pytest.mark.parametrize(
    ("file", "fields", "status", "complaint"),
    [
        (b"no sound", {}, 400, "cannot be read as a WAV file"),
        (wav(sound(1))[:30], {}, 400, "cannot be read as a WAV file"),
        (wav(sound(1)[:0]), {}, 400, "audio must be"),
        (
            of_bits(40),
            {},
            400,
            "the audio has 40 bits a sample, and a WAV file of at most 32 is read",
        ),
        (b"no sound", {"language": "xx"}, 400, "language must be one of de, en, fr"),
        (b"no sound", {"seed": "x"}, 400, "seed must be a whole number"),
        (wav(sound(1)), {"language": "xx"}, 400, "language must be one of de, en, fr"),
        (
            wav(sound(1)),
            {"response_format": "srt"},
            400,
            "response_format must be one of json, text, verbose_json",
        ),
        (wav(sound(1)), {"temperature": "hot"}, 400, "temperature must be a number from 0 to 1"),
        (wav(sound(1)), {"model": "other"}, 404, "is not served here"),
        (wav(sound(1)), {"stream": "true"}, 400, "stream is not supported"),
        (wav(sound(1)), {"prompt": "w5", "language": "en"}, 400, "no token for what was said before"),
    ],
)
def test_forms_that_are_refused(
    file: bytes, fields: dict[str, str], status: int, complaint: str, speech: TestClient
) -> None:
    answer = heard(speech, file, **fields)
    assert answer.status_code == status, answer.text
    assert complaint in answer.json()["error"]["message"]


def test_bodies_that_are_no_form(speech: TestClient) -> None:
    route = "/v1/audio/transcriptions"
    assert speech.post(route, json={"file": "a"}).status_code == 415
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (
        b"",
        b"--x",
        b"--x\r\n\r\n--x--",
        b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--",
    ):
        assert speech.post(route, content=body, headers=form).status_code == 400, body
    part = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\n1\r\n'
    assert "twice" in speech.post(route, content=2 * part + b"--x--", headers=form).json()["error"]["message"]
    assert "no file" in speech.post(route, content=part + b"--x--", headers=form).json()["error"]["message"]
    field = b'--x\r\nContent-Disposition: form-data; name="field%d"\r\n\r\n1\r\n'
    for count, complaint in ((MAX_FIELDS, "no file"), (MAX_FIELDS + 1, "at most 64 parts")):
        whole = b"".join(field % number for number in range(count)) + b"--x--"
        assert complaint in speech.post(route, content=whole, headers=form).json()["error"]["message"]
    page = {"Origin": "https://somewhere.else"}
    refused = speech.post(route, files={"file": wav(sound(1))}, headers=page)
    assert refused.status_code == 403
    written = speech.post("/v1/completions", json={"prompt": "w5"})
    assert written.status_code == 400
    assert "/v1/audio/transcriptions" in written.json()["error"]["message"]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [1, 2])
def test_wav_files_are_read(width: int, channels: int) -> None:
    samples, rate = read_sound(wav(sound(1) / 4, 8000, width, channels))
    assert rate == 8000
    assert np.abs(samples - sound(1) / 4).max() <= 2.0 ** (2 - 8 * width)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_sounds_of_other_rates_are_the_same_sound(rate: int, speech_path: str) -> None:
    def tone(at: int) -> Any:
        times = np.arange(at) / at
        return (0.4 * np.sin(2 * np.pi * 440 * times) + 0.2 * np.sin(2 * np.pi * 1330 * times)).astype(
            np.float32
        )

    reader = AudioReader(speech_path)
    made = reader.samples((tone(rate), rate), 60)
    assert len(made) == reader.rate
    with pytest.raises(RequestError, match=r"1\.0 s long, and at most 0\.9 s are heard"):
        reader.samples((tone(rate), rate), 0.9)
    inside = slice(400, -400)
    assert np.abs(made[inside] - tone(reader.rate)[inside]).max() < 2e-3
