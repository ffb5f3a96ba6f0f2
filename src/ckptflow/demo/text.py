"""The demo's text: the corpus that ships with the package, its split, and a tokenizer trained on it."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 3072
"""Most words of the text are one token each, so that even a model trained for a minute writes English words."""

HELD_BACK_FRACTION = 0.05
"""The end of the text, never trained on: the published models are scored on it."""

UNKNOWN, BEGIN, END, PAD = "<unk>", "<s>", "</s>", "<pad>"


def read_paragraphs() -> list[str]:
    """The corpus as paragraphs, each on one line, without the heading and the chapter numbers."""
    text = resources.files("ckptflow.demo").joinpath("corpus.txt").read_text(encoding="utf-8")
    paragraphs = [" ".join(block.split()) for block in text.split("\n\n")]
    return [block for block in paragraphs[1:] if block and not block.startswith("Chapter ")]


def split_text() -> tuple[str, str]:
    """The text to train on and the text held back, one paragraph a line."""
    paragraphs = read_paragraphs()
    first_held_back = round(len(paragraphs) * (1 - HELD_BACK_FRACTION))
    return "\n".join(paragraphs[:first_held_back]), "\n".join(paragraphs[first_held_back:])


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCABULARY_SIZE`` tokens, in the form that transformers saves and loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[UNKNOWN, BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=BEGIN, eos_token=END, pad_token=PAD
    )
