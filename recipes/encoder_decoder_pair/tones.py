"""What the Whisper pair learns: a row of tones in noise is written down, how loud each is and how high."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from .plans import Shape

RATE = 16000
"""Samples a second."""
POSITIONS_PER_S = 50
"""Of the encoder's output."""
TONE_S = 0.12
SOUND_S = 4
MOST_TONES, FEWEST_TONES = 33, 25
NUM_MEL_BINS = 40
NOTES = ("c", "cis", "d", "dis", "e", "f", "fis", "g", "gis", "a", "ais", "b")
LOWEST_HZ = 262.0
LOUDNESS = {"soft": 0.15, "plain": 0.4, "loud": 1.0}
NOISE = 0.05
SHARPNESS = 2.0
"""Of the attention across, as training begins."""
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>")
NUM_SOUNDS = 2000
"""How many are made to train on."""


def draw(rng: random.Random) -> tuple[NDArray[np.float32], str]:
    """A sound and what is heard in it."""
    heard = [
        (rng.choice(list(LOUDNESS)), rng.randrange(len(NOTES)))
        for _ in range(rng.randint(FEWEST_TONES, MOST_TONES))
    ]
    at = np.arange(round(TONE_S * RATE)) / RATE
    fades = np.minimum(1, np.minimum(at, at[::-1]) / 0.01)  # no click at either end
    tones = [
        LOUDNESS[loudness] * fades * np.sin(2 * np.pi * LOWEST_HZ * 2 ** (note / 12) * at + rng.random())
        for loudness, note in heard
    ]
    sound = np.concatenate(tones)
    sound += NOISE * np.random.default_rng(rng.getrandbits(32)).standard_normal(len(sound))
    return sound.astype(np.float32), " ".join(f"{loudness} {NOTES[note]}" for loudness, note in heard)


@torch.no_grad()
def align(model: Any) -> None:
    """Begin with a decoder that attends to the tone it will name: its positions are the encoder's of that time, and
    the queries across are its keys. What is heard begins as large as the positions. Without these, nothing is learned
    in hundreds of steps."""
    encoder, decoder = model.get_encoder(), model.get_decoder()
    times = encoder.embed_positions.weight
    for heard in (encoder.conv1, encoder.conv2):
        torch.nn.init.kaiming_normal_(heard.weight)
    for place in range(len(decoder.embed_positions.weight)):
        tone = max(place - 1, 0) // 2  # behind two special tokens, two words a tone
        time = min(round((tone + 0.5) * TONE_S * POSITIONS_PER_S), len(times) - 1)
        decoder.embed_positions.weight[place] = times[time]
    for layer in decoder.layers:
        across = layer.encoder_attn
        heads = [
            torch.linalg.qr(torch.randn(across.embed_dim, across.head_dim))[0].T
            for _ in range(across.num_heads)
        ]
        across.q_proj.weight.copy_(SHARPNESS * torch.cat(heads))
        across.k_proj.weight.copy_(torch.cat(heads))


class Tones:
    """The task, as training and measuring see it."""

    name = "whisper"

    def __init__(self) -> None:
        words = [*LOUDNESS, *NOTES, "<unk>", *SPECIAL]  # Transformers takes what comes behind for times
        cut = Tokenizer(
            models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>")
        )
        cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        self.tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=cut,
            eos_token=SPECIAL[0],
            unk_token="<unk>",
            additional_special_tokens=list(SPECIAL[1:]),
        )
        self.extractor: Any = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, chunk_length=SOUND_S)
        self._sounds: list[tuple[torch.Tensor, list[int]]] = []

    def model(self, shape: Shape) -> Any:
        """A Whisper of fresh weights."""
        end, start, no_times = self.tokenizer.convert_tokens_to_ids(SPECIAL)
        ends = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end}
        model: Any = WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=len(self.tokenizer),
                num_mel_bins=NUM_MEL_BINS,
                max_source_positions=POSITIONS_PER_S * SOUND_S,
                max_target_positions=2 * MOST_TONES + 32,
                d_model=shape.hidden_size,
                encoder_layers=shape.num_encoder_layers,
                decoder_layers=shape.num_decoder_layers,
                encoder_attention_heads=shape.num_heads,
                decoder_attention_heads=shape.num_heads,
                encoder_ffn_dim=shape.intermediate_size,
                decoder_ffn_dim=shape.intermediate_size,
                decoder_start_token_id=start,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                **ends,
            )
        )
        align(model)
        settings: Any = GenerationConfig(**ends, decoder_start_token_id=start)
        settings.no_timestamps_token_id, settings.is_multilingual = no_times, False
        model.generation_config = settings
        return model

    def batch(self, rng: random.Random, size: int) -> dict[str, Any]:
        """What the model is trained on: features, what the decoder reads, and labels with -100 where there is none."""
        if not self._sounds:
            self._sounds = [self._lesson(rng) for _ in range(NUM_SOUNDS)]
        drawn = rng.sample(self._sounds, size)
        longest = max(len(tokens) for _, tokens in drawn)
        read = torch.zeros(size, longest - 1, dtype=torch.int64)
        labels = torch.full((size, longest - 1), -100)
        for row, (_, tokens) in enumerate(drawn):
            read[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            labels[row, 1 : len(tokens) - 1] = torch.tensor(tokens[2:])
        return {
            "input_features": torch.stack([features for features, _ in drawn]),
            "decoder_input_ids": read,
            "labels": labels,
        }

    def _lesson(self, rng: random.Random) -> tuple[torch.Tensor, list[int]]:
        sound, text = draw(rng)
        features = self.extractor(sound, sampling_rate=RATE, return_tensors="pt").input_features[0]
        end, *begin = self.tokenizer.convert_tokens_to_ids(SPECIAL)
        return features, [*begin, *self.tokenizer(text).input_ids, end]

    def held_out(self, count: int) -> list[tuple[Any, str]]:
        """Prompts that were never trained on, with the right texts."""
        rng = random.Random("held out")
        drawn = [draw(rng) for _ in range(count)]
        return [({"audio": (sound, RATE)}, text) for sound, text in drawn]

    def save(self, model: Any, folder: Any) -> None:
        """Write the checkpoint with its tokenizer and its feature extractor."""
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        self.extractor.save_pretrained(folder)
