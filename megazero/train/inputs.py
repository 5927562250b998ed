"""What a run reads, opened and checked from its configuration before any process group exists."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megazero.config.data import DataConfig
from megazero.config.model import ModelConfig
from megazero.data.corpora import Corpora
from megazero.data.mock import MockSamples
from megazero.data.samples import Samples, parse_split
from megazero.data.tokenizers import TokenizerSpec, load_tokenizer
from megazero.errors import DataError, Problem, raise_problems


@dataclass(frozen=True)
class RunInputs:
    """Samples of the splits that are read (None for the others), and what the model must know of the text.

    eod: end-of-document id, None where nobody tells.
    bytes_per_token: of a held-out split's text; a split is missing where nobody tells.
    """

    train: Samples
    valid: Samples | None
    test: Samples | None
    vocab_size: int
    eod: int | None
    bytes_per_token: Mapping[str, float]


def open_inputs(data: DataConfig, model: ModelConfig, *, seed: int, evaluates: bool) -> RunInputs:
    """Open what --data-path or --mock-data asks for.  Raises DataError with everything that is wrong."""
    tokenizer = tokenizer_spec(data)
    if data.mock_data:
        return _made_up(model, tokenizer, seed)
    corpora = Corpora(data.data_path, split=data.split)
    vocab_size = _vocab_size(data, model, corpora, tokenizer)
    raise_problems(DataError, corpora.vocabulary_problems(vocab_size, tokenizer))
    # A split that is given a share is read, and refused with its counts if the share comes to nothing.
    wanted = {"train": True, "valid": evaluates, "test": evaluates and parse_split(data.split).test > 0}
    found = {
        name: corpora.samples(name, seq_length=model.seq_length, seed=seed, vocab_size=vocab_size)
        for name, is_read in wanted.items()
        if is_read
    }
    eod = corpora.eod if tokenizer is None else load_tokenizer(tokenizer).eod
    ratios = {name: corpora.split_bytes_per_token(name) for name in found if name != "train"}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return RunInputs(found["train"], found.get("valid"), found.get("test"), vocab_size, eod, known)


def tokenizer_spec(data: DataConfig) -> TokenizerSpec | None:
    """The tokenizer the configuration names; None when it names none."""
    if data.tokenizer_type is None:
        return None
    return TokenizerSpec(
        data.tokenizer_type,
        vocab_file=_text(data.vocab_file),
        merge_file=_text(data.merge_file),
        tokenizer_model=_text(data.tokenizer_model),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _vocab_size(data: DataConfig, model: ModelConfig, corpora: Corpora, tokenizer: TokenizerSpec | None) -> int:
    """What the flag says, else what the corpora say, else the tokenizer's."""
    told = model.vocab_size or corpora.vocab_size
    if told is not None:
        return told
    if tokenizer is not None:
        return load_tokenizer(tokenizer).vocab_size
    rule = "the size of the vocabulary is told by a flag, a tokenizer, or the corpus's .json"
    raise DataError(Problem(f"--data-path {' '.join(data.data_path)}", rule, "--vocab-size N, --tokenizer-type ..."))


def _made_up(model: ModelConfig, tokenizer: TokenizerSpec | None, seed: int) -> RunInputs:
    known = load_tokenizer(tokenizer) if tokenizer else None
    vocab_size = model.vocab_size or (known.vocab_size if known else 0)
    if not vocab_size:
        raise DataError(Problem("--mock-data", "made-up tokens are drawn from a vocabulary", "--vocab-size 50257"))
    train, valid, test = (MockSamples(vocab_size, model.seq_length, seed + stream) for stream in range(3))
    return RunInputs(train, valid, test, vocab_size, known.eod if known else None, {})
