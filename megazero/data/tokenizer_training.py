"""Training a SentencePiece tokenizer that loses nothing: decode(encode(text)) == text for source code as for prose.

Normalisation is the identity, white space is kept and may form pieces of its own (indentation), no space is added in
front, pieces may span punctuation but not a space, and characters without a piece fall back to bytes.  One character
is an exception by the library's format: U+2581 is its sign for a space and reads back as one.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from sentencepiece import SentencePieceTrainer

from megazero.data.documents import Chunk, DocumentRules, find_chunks, read_documents
from megazero.data.files import written_aside
from megazero.data.tokenizers import END_OF_TEXT
from megazero.errors import DataError, Problem

MODEL_TYPES = ("bpe", "unigram")
# Bytes every piece vocabulary starts with: the unknown piece, the end-of-document piece and 256 byte pieces.
NUM_RESERVED_PIECES = 258
# Characters handed to the trainer at a time; it forgets what is longer than its own limit in bytes.
PIECE_CHARACTERS = 2000
# The trainer drops whatever contains one of these, so text is cut at them; they are encoded as bytes.
UNTRAINABLE = str.maketrans({"\t": "\x00"})
SEPARATOR = "\x00"


@dataclass(frozen=True)
class TokenizerRequest:
    """What to train: files, --vocab-size (all pieces, special ones included), --model-type, --seed-limit.

    max_bytes: text to learn from, taken evenly from all over the input.
    """

    inputs: tuple[Path, ...]
    output: Path
    vocab_size: int
    rules: DocumentRules = field(default_factory=DocumentRules)
    model_type: str = "bpe"
    max_bytes: int = 4 << 20


class TrainingText(NamedTuple):
    """What a tokenizer learns from: runs of whole lines, and their size."""

    runs: list[str]
    num_bytes: int


def sample_text(paths: Sequence[Path], rules: DocumentRules, max_bytes: int) -> TrainingText:
    """About `max_bytes` bytes of text, the same share of every chunk of the input."""
    chunks = find_chunks(paths, rules)
    share = max_bytes / max(1, sum(chunk.stop - chunk.start for chunk in chunks))
    runs = [run for chunk in chunks for run in _runs(chunk, rules, min(1.0, share))]
    if not runs:
        raise DataError(Problem(f"--input {', '.join(map(str, paths))}", "holds some text to learn from"))
    return TrainingText(runs, sum(len(run.encode()) for run in runs))


def train_tokenizer(request: TokenizerRequest, text: TrainingText) -> None:
    """Learn a model from `text` and write it to `request.output`, atomically; deterministic.

    Raises DataError when the vocabulary does not fit the text.
    """
    if request.vocab_size <= NUM_RESERVED_PIECES:
        raise DataError(
            Problem(f"--vocab-size {request.vocab_size}", "holds 256 bytes, 2 special pieces and what is learnt", "512")
        )
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(text.runs),
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
    with written_aside(request.output) as stream:
        stream.write(model.getvalue())


def _runs(chunk: Chunk, rules: DocumentRules, share: float) -> Iterator[str]:
    left = share * (chunk.stop - chunk.start)
    for document in read_documents(chunk, rules):
        for text in document.texts:
            if left <= 0:
                return
            text = text[: int(left) + 1]
            left -= len(text.encode())
            yield from _cut(text)


def _cut(text: str) -> Iterator[str]:
    """Runs of whole lines of at most PIECE_CHARACTERS characters, without what the trainer cannot take."""
    for part in text.translate(UNTRAINABLE).split(SEPARATOR):
        start = 0
        while start < len(part):
            stop = len(part)
            if stop - start > PIECE_CHARACTERS:
                line_end = part.rfind("\n", start, start + PIECE_CHARACTERS)
                stop = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
            yield part[start:stop]
            start = stop
