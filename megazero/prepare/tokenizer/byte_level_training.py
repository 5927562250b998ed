"""Trains a byte-level BPE and writes it as GPT-2's two files.

    vocab.json   token to id: the 256 byte symbols in GPT-2's order, then the learnt tokens in the order of learning,
                 and <|endoftext|> as the last id
    merges.txt   the version line, then the pairs in that order

Every byte has a symbol, so decoding restores every text; words are cut as in GPT-2, and no space is put in front.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megazero.data.tokenizers import END_OF_TEXT
from megazero.errors import DataError, Problem
from megazero.files import AsideFile, remove_file
from megazero.prepare.tokenizer.training_text import TrainingText

VOCAB_FILE, MERGE_FILE = "vocab.json", "merges.txt"
# The least number of ids: the bytes, one merge, the end of a text.
MIN_VOCAB_SIZE = 258
_VERSION = "#version: 0.2"


class ByteLevelModel(NamedTuple):
    """A vocabulary: tokens by id, <|endoftext|> last, and pairs in the order in which they are merged."""

    tokens: list[str]
    merges: list[tuple[str, str]]


def learn_byte_level(text: TrainingText, vocab_size: int) -> ByteLevelModel:
    """Learn a vocabulary of `vocab_size` ids, deterministically; raise DataError if there is too little text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=vocab_size - 1,
        # A pair that occurs only once is taken for chance.
        min_frequency=2,
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    # <|endoftext|> is always one id, so no token is learnt from its letters.
    tokenizer.train_from_iterator((part for whole in text.texts for part in whole.split(END_OF_TEXT)), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    if len(tokens) < vocab_size - 1:
        given = f"--vocab-size {vocab_size} from {text.num_bytes} bytes of text"
        rule = f"that many tokens can be learnt: there are {len(tokens) + 1}, more needs more text"
        raise DataError(Problem(given, rule, f"--vocab-size {len(tokens) + 1}"))
    return ByteLevelModel([*tokens, END_OF_TEXT], [(first, second) for first, second in model["merges"]])


def write_byte_level(folder: Path, model: ByteLevelModel) -> None:
    """Write both files into a folder.

    The files are renamed only when both are on the disk, and an old merges.txt is removed first and the new one renamed
    last, so that files of two vocabularies are never there together.
    """
    vocab = {token: number for number, token in enumerate(model.tokens)}
    lines = [_VERSION, *(f"{first} {second}" for first, second in model.merges), ""]
    contents = {VOCAB_FILE: json.dumps(vocab, ensure_ascii=False), MERGE_FILE: "\n".join(lines)}
    with ExitStack() as stack:
        asides = []
        for name, content in contents.items():
            aside = AsideFile(folder / name)
            stack.callback(aside.discard)
            aside.write(content.encode())
            aside.seal()
            asides.append(aside)
        remove_file(folder / MERGE_FILE)
        for aside in asides:
            aside.publish()
