"""The tokenizer of the pair: byte-level BPE that knows every word and number of the problems as one token."""

import itertools
import random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .problems import ANY_WRITER, examples

PAD, END = "<|pad|>", "<|end|>"
MAX_POSITIONS = 512
VOCAB_SIZE = 512
NUM_SAMPLES = 4000


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Learned from a fixed sample of the problems, so it is the same every time."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawn = examples(random.Random(1), ANY_WRITER, (6, 10), is_mixed=False, has_checks=True)
    bpe.train_from_iterator(
        (f"{each.text}\n{each.checks[0].text}" for each in itertools.islice(drawn, NUM_SAMPLES)), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=END, model_max_length=MAX_POSITIONS
    )
