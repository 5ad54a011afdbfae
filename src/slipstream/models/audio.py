"""Sounds, as the encoder of a speech model reads them: from samples or a file to features."""

from __future__ import annotations

import io
import math
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.errors import ModelError, RequestError
from slipstream.models.quiet import one_line, silenced

_KINDS = "audio must be (samples, sampling rate) or a file: WAV, or what the package soundfile reads"
_BLOCK = 4096
"""Samples that are computed at once."""
_ZEROS = 16
"""Zeros on each side of the filter that changes a sampling rate."""


class AudioReader:
    """Makes features as the checkpoint's own feature extractor does. May be called from any thread."""

    def __init__(self, path: str, revision: str | None = None) -> None:
        """Raises `ModelError` where the checkpoint does not say how."""
        with one_line(f"cannot read how {path!r} hears (preprocessor_config.json)"), silenced():
            from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

            self._extract: Any = WhisperFeatureExtractor.from_pretrained(path, revision=revision or "main")
        if self._extract is None:
            raise ModelError(f"{path!r} does not say how it hears")
        self.rate = int(self._extract.sampling_rate)

    @property
    def seconds(self) -> float:
        """The longest sound."""
        return float(self._extract.chunk_length)

    def features(self, audio: Any) -> NDArray[np.float32]:
        """float32 [bins, frames] of `samples`; raises `RequestError` for what is no sound, or a longer one."""
        samples = self.samples(audio, self.seconds)
        with torch.inference_mode():
            made = self._extract(samples, sampling_rate=self.rate, return_tensors="np")
        return np.ascontiguousarray(made["input_features"][0], np.float32)

    def samples(self, audio: Any, most_s: float) -> NDArray[np.float32]:
        """float32 [samples] at the model's rate, of one channel; raises `RequestError` for what is no sound, or longer
        than `most_s` seconds."""
        if isinstance(audio, str | os.PathLike | bytes):
            audio = read_sound(audio)
        if not isinstance(audio, tuple | list) or len(audio) != 2:
            raise RequestError(_KINDS)
        try:
            samples, rate = np.asarray(audio[0]), float(audio[1])
        except (TypeError, ValueError, OverflowError):
            raise RequestError(_KINDS) from None
        if np.issubdtype(samples.dtype, np.signedinteger):
            samples = samples / -float(np.iinfo(samples.dtype).min)
        if samples.ndim == 2:
            samples = samples.mean(axis=int(samples.shape[0] > samples.shape[1]))
        is_sound = samples.ndim == 1 and samples.size and np.issubdtype(samples.dtype, np.floating)
        if not is_sound or not np.isfinite(samples).all() or not 1000 <= rate <= 200_000:
            raise RequestError(f"{_KINDS}; samples are numbers, of one channel or [channels, samples]")
        if len(samples) > most_s * rate:
            raise RequestError(
                f"the audio is {len(samples) / rate:.1f} s long, and at most {most_s:g} s are heard; split it"
            )
        return resampled(samples.astype(np.float32), round(rate), self.rate)


def read_sound(source: str | os.PathLike[str] | bytes) -> tuple[NDArray[Any], int]:
    """Samples and their rate from a file or its bytes; raises `RequestError` for what cannot be read."""
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise RequestError(f"there is no file {os.fspath(source)!r}; a speech model hears the sound in one")
    opened: Any = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        import soundfile  # type: ignore[import-not-found]
    except ImportError:
        return _read_wave(opened)
    try:
        samples, rate = soundfile.read(opened, dtype="float32", always_2d=True)
    except Exception as error:  # its own errors derive from several
        raise RequestError(f"the audio cannot be read: {error}") from None
    return samples.mean(axis=1), int(rate)


def _read_wave(opened: Any) -> tuple[NDArray[Any], int]:
    """A WAV file of whole numbers, by the standard library."""
    try:
        with wave.open(opened if isinstance(opened, io.BytesIO) else os.fspath(opened), "rb") as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    except (wave.Error, EOFError, OSError) as error:
        raise RequestError(
            f"the audio cannot be read as a WAV file ({error}); install soundfile for other formats"
        ) from None
    if width > 4:
        raise RequestError(f"the audio has {8 * width} bits a sample, and a WAV file of at most 32 is read")
    raw = raw[: len(raw) // (width * channels) * width * channels].reshape(-1, width)
    if width == 1:  # the one width without a sign
        samples = raw[:, 0].astype(np.float32) / 128 - 1
    else:
        wide = np.zeros((len(raw), 4), np.uint8)
        wide[:, 4 - width :] = raw
        samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return samples.reshape(-1, channels).mean(axis=1), rate


def resampled(samples: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The sound at another rate, through a windowed sinc filter below the lower of both Nyquist frequencies."""
    if rate == wanted:
        return samples
    cutoff = min(1.0, wanted / rate)
    reach = math.ceil(_ZEROS / cutoff)
    around = np.arange(-reach, reach + 1)
    padded = np.pad(samples, (reach, reach + 1))
    parts = []
    for begin in range(0, len(samples) * wanted // rate, _BLOCK):
        end = min(begin + _BLOCK, len(samples) * wanted // rate)
        places = np.arange(begin, end) * (rate / wanted)
        first = places.astype(np.int64)[:, None] + around
        offset = first - places[:, None]
        taps = np.sinc(cutoff * offset) * np.cos(np.pi / 2 * offset / (reach + 1)) ** 2
        parts.append((padded[first + reach] * taps).sum(axis=1) * cutoff)
    return np.concatenate(parts or [np.zeros(0)]).astype(np.float32)
