"""Trains a tokenizer that loses nothing: decode(encode(text)) == text for source code as for prose.

bpe, unigram     SentencePiece models.  Normalisation is the identity, white space is kept and may form pieces of its
                 own (indentation), no space is added in front, pieces may span punctuation but not a space, and
                 characters without a piece fall back to bytes.  One character is an exception by the library's
                 format: U+2581 is its sign for a space and reads back as one.
byte-level-bpe   GPT-2's kind and files (megazero/prepare/tokenizer/byte_level_training.py)
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megazero.data.tokenizers import END_OF_TEXT
from megazero.errors import DataError, Problem, raise_problems
from megazero.files import written_aside
from megazero.prepare.tokenizer.byte_level_training import MIN_VOCAB_SIZE, learn_byte_level, write_byte_level
from megazero.prepare.tokenizer.training_text import TrainingText

BYTE_LEVEL = "byte-level-bpe"
MODEL_TYPES = ("bpe", "unigram", BYTE_LEVEL)
# The pieces that every vocabulary starts with: the unknown piece, the end-of-document piece and 256 byte pieces.
NUM_RESERVED_PIECES = 258
# The number of characters passed to the trainer at a time; it drops sentences longer than its own limit in bytes.
PIECE_CHARACTERS = 2000
# The trainer drops sentences with one of these characters, so text is cut at them; they are encoded as bytes.
UNTRAINABLE = str.maketrans({"\t": "\x00"})
SEPARATOR = "\x00"


@dataclass(frozen=True)
class TokenizerRequest:
    """A tokenizer to train: --output (a file, or a folder for byte-level-bpe), --vocab-size (all pieces, special ones
    included), --model-type.
    """

    output: Path
    vocab_size: int
    model_type: str = "bpe"

    def problems(self) -> list[Problem]:
        """Return the problems that can be found before any text is read."""
        found = []
        least = MIN_VOCAB_SIZE if self.model_type == BYTE_LEVEL else NUM_RESERVED_PIECES + 1
        if self.vocab_size < least:
            rule = "counts 256 bytes, the special pieces and at least one learnt piece"
            found.append(Problem(f"--vocab-size {self.vocab_size}", rule, f"{least} or more"))
        if self.model_type == BYTE_LEVEL and self.output.exists() and not self.output.is_dir():
            found.append(Problem(f"--output {self.output}", "is a folder, for vocab.json and merges.txt"))
        if self.model_type != BYTE_LEVEL and self.output.is_dir():
            found.append(Problem(f"--output {self.output}", "is the model's file", f"{self.output / 'text.model'}"))
        return found


def train_tokenizer(request: TokenizerRequest, text: TrainingText) -> None:
    """Learn a model from `text` and write it to `request.output`, whole or not at all; deterministic.

    Raises DataError when the vocabulary does not fit the text.
    """
    raise_problems(DataError, request.problems())
    if request.model_type == BYTE_LEVEL:
        write_byte_level(request.output, learn_byte_level(text, request.vocab_size))
        return
    model = _learn_pieces(request, text)
    with written_aside(request.output) as stream:
        stream.write(model)


def _learn_pieces(request: TokenizerRequest, text: TrainingText) -> bytes:
    """Return a SentencePiece model as the content of its file."""
    from sentencepiece import SentencePieceTrainer  # not needed by the byte-level kind

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(run for part in text.texts for run in cut_runs(part)),
            model_writer=model,
            vocab_size=request.vocab_size,
            model_type=request.model_type,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_by_unicode_script=False,
            split_digits=True,
            byte_fallback=True,
            # Rare characters are left to the byte fallback instead of taking up a piece each.
            character_coverage=0.9999,
            max_sentence_length=16 * PIECE_CHARACTERS,
            unk_id=0,
            eos_id=1,
            eos_piece=END_OF_TEXT,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1]
        given = f"--vocab-size {request.vocab_size} from {text.num_bytes} bytes of text"
        raise DataError(Problem(given, f"SentencePiece can learn it: {reason}")) from error
    return model.getvalue()


def cut_runs(text: str) -> Iterator[str]:
    """Yield runs of whole lines of at most PIECE_CHARACTERS characters, without UNTRAINABLE characters."""
    for part in text.translate(UNTRAINABLE).split(SEPARATOR):
        start = 0
        while start < len(part):
            stop = len(part)
            if stop - start > PIECE_CHARACTERS:
                line_end = part.rfind("\n", start, start + PIECE_CHARACTERS)
                stop = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
            yield part[start:stop]
            start = stop
