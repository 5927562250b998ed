"""What a run reads: the corpora of its configuration, opened and checked before any process group exists."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import NamedTuple, TypeVar

from megazero.config.data import DataConfig
from megazero.config.model import ModelConfig
from megazero.data.blend import BlendedSamples, WeightedPrefix, parse_data_path
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.mock import MockSamples
from megazero.data.samples import SPLIT_NAMES, Samples, SampleSource, parse_split, split_sequences
from megazero.data.sidecar import Sidecar, read_sidecar
from megazero.data.tokenizers import TokenizerSpec, load_tokenizer
from megazero.errors import DataError, Problem, UserError, raise_problems

T = TypeVar("T")


@dataclass(frozen=True)
class Corpora:
    """Samples of the three splits (None for a split that is empty or not read), and what the model must know.

    bytes_per_token: of the corpora's text, weighted by tokens; None when a corpus has no description.
    """

    train: Samples
    valid: Samples | None
    test: Samples | None
    vocab_size: int
    eod: int | None
    bytes_per_token: float | None


class _Corpus(NamedTuple):
    path: WeightedPrefix
    dataset: IndexedDataset
    sidecar: Sidecar | None


def open_corpora(data: DataConfig, model: ModelConfig, *, seed: int, evaluates: bool) -> Corpora:
    """Open what --data-path names.  Raises DataError with everything that is wrong with any of the corpora."""
    if data.mock_data:
        return _mock(data, model, seed)
    opened = [_collect(partial(_open, path, data)) for path in parse_data_path(data.data_path)]
    raise_problems(DataError, (problem for _, problems in opened for problem in problems))
    corpora = [corpus for corpus, _ in opened if corpus is not None]
    vocab_size = _vocab_size(model.vocab_size, data, corpora)
    read = {"train": True, "valid": evaluates, "test": evaluates and parse_split(data.split).test > 0}
    sources = {
        name: _collect(partial(_mixture, corpora, name, data, model, _Order(seed, vocab_size)))
        for name in SPLIT_NAMES
        if read[name]
    }
    raise_problems(DataError, (problem for _, problems in sources.values() for problem in problems))
    train = sources["train"][0]
    assert train is not None, "a source without problems is there"
    held_out = {name: sources[name][0] if name in sources else None for name in ("valid", "test")}
    eod = corpora[0].sidecar.eod if corpora[0].sidecar else _tokenizer_eod(data)
    return Corpora(train, held_out["valid"], held_out["test"], vocab_size, eod, _bytes_per_token(corpora))


class _Order(NamedTuple):
    seed: int
    vocab_size: int


def _open(path: WeightedPrefix, data: DataConfig) -> _Corpus:
    dataset = IndexedDataset(path.prefix)
    sidecar = read_sidecar(dataset)
    if sidecar is not None:
        raise_problems(DataError, _tokenizer_problems(path.prefix, sidecar, data))
    return _Corpus(path, dataset, sidecar)


def _tokenizer_problems(prefix: str, sidecar: Sidecar, data: DataConfig) -> Iterator[Problem]:
    """The corpus must have been made by the tokenizer the user names, if one is named."""
    spec = tokenizer_spec(data)
    if spec is None:
        return
    if spec.type != sidecar.tokenizer_type:
        rule = f"{prefix} was preprocessed with {sidecar.tokenizer_type}"
        yield Problem(f"--tokenizer-type {spec.type}", rule, f"--tokenizer-type {sidecar.tokenizer_type}")
        return
    for name, digest in spec.digests().items():
        if sidecar.tokenizer_files.get(name, digest) != digest:
            given = f"--{name.replace('_', '-')} {getattr(spec, name)}"
            yield Problem(given, f"{prefix} was preprocessed with another file", "the file it was preprocessed with")


def tokenizer_spec(data: DataConfig) -> TokenizerSpec | None:
    """The tokenizer the configuration names; None when it names none."""
    if data.tokenizer_type is None:
        return None
    files = {name: getattr(data, name) for name in ("vocab_file", "merge_file", "tokenizer_model")}
    return TokenizerSpec(
        data.tokenizer_type, **{name: None if path is None else str(path) for name, path in files.items()}
    )


def _vocab_size(given: int | None, data: DataConfig, corpora: list[_Corpus]) -> int:
    known = {corpus.path.prefix: corpus.sidecar.vocab_size for corpus in corpora if corpus.sidecar}
    if given is None and not known:
        spec = tokenizer_spec(data)
        if spec is not None:
            return load_tokenizer(spec).vocab_size
        rule = "the size of the vocabulary is told by a flag, a tokenizer or the corpus's .json"
        raise DataError(Problem(f"--data-path {corpora[0].path.prefix}", rule, "--vocab-size N"))
    size = max(known.values()) if given is None else given
    raise_problems(
        DataError,
        (
            Problem(
                f"--vocab-size {size}", f"{prefix} has ids below {need}", f"--vocab-size {need}, or no --vocab-size"
            )
            for prefix, need in known.items()
            if size < need
        ),
    )
    return size


def _mixture(corpora: list[_Corpus], split: str, data: DataConfig, model: ModelConfig, order: _Order) -> Samples:
    shares = parse_split(data.split)
    sources = [
        SampleSource(
            corpus.dataset,
            sequences=getattr(split_sequences(corpus.dataset.num_sequences, shares), split),
            seq_length=model.seq_length,
            seed=order.seed,
            vocab_size=order.vocab_size,
            stream=len(SPLIT_NAMES) * number + SPLIT_NAMES.index(split),
        )
        for number, corpus in enumerate(corpora)
    ]
    if len(sources) == 1:
        return sources[0]
    weights = [
        corpus.path.weight or Fraction(source.num_tokens) for corpus, source in zip(corpora, sources, strict=True)
    ]
    return BlendedSamples(sources, weights)


def _bytes_per_token(corpora: list[_Corpus]) -> float | None:
    sidecars = [corpus.sidecar for corpus in corpora if corpus.sidecar]
    tokens = sum(sidecar.tokens for sidecar in sidecars)
    if len(sidecars) < len(corpora) or not tokens:
        return None
    return sum(sidecar.text_bytes for sidecar in sidecars) / tokens or None


def _tokenizer_eod(data: DataConfig) -> int | None:
    spec = tokenizer_spec(data)
    return None if spec is None else load_tokenizer(spec).eod


def _mock(data: DataConfig, model: ModelConfig, seed: int) -> Corpora:
    spec = tokenizer_spec(data)
    vocab_size = load_tokenizer(spec).vocab_size if model.vocab_size is None and spec else model.vocab_size
    assert vocab_size is not None, "the rules ask for a vocabulary"
    train, valid, test = (MockSamples(vocab_size, model.seq_length, seed + stream) for stream in range(3))
    return Corpora(train, valid, test, vocab_size, _tokenizer_eod(data), None)


def _collect(make: Callable[[], T]) -> tuple[T | None, tuple[Problem, ...]]:
    """The value, or what is wrong with it."""
    try:
        return make(), ()
    except UserError as error:
        return None, error.problems
