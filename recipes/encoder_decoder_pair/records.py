"""What the T5 pair learns: a record of one person, its fields in any order, is written out in sentences.

A word of a record is a field with its value; several fields have values of one kind.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from .plans import Shape

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words("Anna Boris Clara David Elena Felix Greta Hugo Irina Jonas Katja Lukas Maria Nora Oskar Paula")
CITIES = _words(
    "Athens Berlin Cairo Dublin Essen Florence Geneva Hanoi Istanbul Jakarta Kyoto Lima Madrid Nairobi"
)
FOODS = _words(
    "apples beans bread carrots cheese dumplings fish honey lentils noodles olives pears rice soup"
)
DRINKS = _words("cider cocoa coffee juice lemonade milk punch tea water wine")
JOBS = _words("baker carpenter doctor farmer gardener judge lawyer nurse painter pilot sailor singer tailor")
NUMBERS = _words("two three four five six seven eight nine ten eleven twelve thirteen")
FIELDS: tuple[tuple[str, list[str], str], ...] = (
    ("name", NAMES, "this is about {} ."),
    ("job", JOBS, "our friend works as {} ."),
    ("before", JOBS, "years ago it was {} ."),
    ("home", CITIES, "home lies near {} ."),
    ("born", CITIES, "mother came from {} ."),
    ("holiday", CITIES, "every summer they visit {} ."),
    ("friend", NAMES, "their best guest was {} ."),
    ("likes", FOODS, "lunch means plenty of {} ."),
    ("drinks", DRINKS, "supper comes with {} ."),
    ("rooms", NUMBERS, "we counted {} rooms ."),
    ("books", NUMBERS, "and shelves hold {} books ."),
)
"""What a field is called, its values, and its sentence."""


def draw(rng: random.Random) -> tuple[str, str]:
    """A record and its text, in which the sentences have the order of `FIELDS`."""
    drawn = [(field, rng.choice(values), said) for field, values, said in FIELDS]
    text = " ".join(said.format(value) for _, value, said in drawn)
    rng.shuffle(drawn)
    return " ".join(f"{field}:{value}" for field, value, _ in drawn), text


def is_held_out(record: str) -> bool:
    """One in ten, which are never trained on."""
    return zlib.crc32(record.encode()) % 10 == 0


class Records:
    """The task, as training and measuring see it."""

    name = "t5"

    def __init__(self) -> None:
        given = [f"{field}:{value}" for field, values, _ in FIELDS for value in values]
        said = [word for _, values, said in FIELDS for word in (*values, *said.format("").split())]
        known = [PAD, END, UNKNOWN, *dict.fromkeys([*given, *said])]
        cut = Tokenizer(
            models.WordLevel({word: place for place, word in enumerate(known)}, unk_token=UNKNOWN)
        )
        cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        cut.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
        self.tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=cut, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
        )

    def model(self, shape: Shape) -> Any:
        """A T5 of fresh weights."""
        ends: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
        return T5ForConditionalGeneration(
            T5Config(
                vocab_size=len(self.tokenizer),
                d_model=shape.hidden_size,
                d_kv=shape.hidden_size // shape.num_heads,
                d_ff=shape.intermediate_size,
                num_layers=shape.num_encoder_layers,
                num_decoder_layers=shape.num_decoder_layers,
                num_heads=shape.num_heads,
                dropout_rate=0.0,
                **ends,
            )
        )

    def batch(self, rng: random.Random, size: int) -> dict[str, Any]:
        """What the model is trained on: tokens, their mask, and labels with -100 where there is none."""
        drawn: list[tuple[str, str]] = []
        while len(drawn) < size:
            record, text = draw(rng)
            if not is_held_out(record):
                drawn.append((record, text))
        given = self.tokenizer([record for record, _ in drawn], padding=True, return_tensors="pt")
        texts = self.tokenizer([text for _, text in drawn], padding=True, return_tensors="pt")
        labels = texts.input_ids.masked_fill(texts.attention_mask == 0, -100)
        return {"input_ids": given.input_ids, "attention_mask": given.attention_mask, "labels": labels}

    def held_out(self, count: int) -> list[tuple[Any, str]]:
        """Prompts that were never trained on, with the right texts."""
        rng, found = random.Random("held out"), list[tuple[Any, str]]()
        while len(found) < count:
            record, text = draw(rng)
            if is_held_out(record):
                found.append((record, text))
        return found

    def save(self, model: Any, folder: Any) -> None:
        """Write the checkpoint with its tokenizer."""
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
