"""Opens the corpora of a run, checks them against the vocabulary, and makes samples of them.

Either --data-path names corpora that --split cuts into three, or each split has corpora of its own, read whole
(--train-data-path, --valid-data-path, --test-data-path).

Opening reads headers, indexes and sidecars and reports the problems of all corpora at once, so it can be done before
processes join.  A split is checked only when its samples are used: an empty test split is legal in a run without tests.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megazero.data.blend import BlendedSamples, WeightedPrefix, parse_data_path
from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset
from megazero.data.samples import SPLIT_NAMES, Samples, SampleSource, Split, parse_split, split_sequences
from megazero.data.sidecar import Sidecar, load_sidecar, read_sidecar, recorded_tokenizer, sidecar_path
from megazero.data.storage import PLAIN_ACCESS, Access
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError, Problem, raise_problems
from megazero.rules.files import DATA_PATH, DEFAULT_SPLIT
from megazero.units import counted

MEASURED_TOKENS = 1 << 24
_WHOLE_SEQUENCES = "--split deals out whole documents, or sequences of --split-documents, one at least to what is read"


class _Corpus(NamedTuple):
    dataset: IndexedDataset
    sidecar: Sidecar | None


class Corpora:
    """The opened corpora of a run.

    data_path: the values of the flag ("PREFIX", or weights and prefixes).  split: "969,30,1".
    own_paths: the values of the flags of splits' own corpora, by the split's name; they replace the two others.
    Raises DataError with the problems of every corpus.
    """

    def __init__(
        self,
        data_path: Sequence[str] = (),
        *,
        split: str = DEFAULT_SPLIT,
        own_paths: Mapping[str, Sequence[str]] | None = None,
        access: Access = PLAIN_ACCESS,
    ) -> None:
        self._split: tuple[str, Split] | None = None if own_paths else (split, parse_split(split))
        if own_paths:
            paths = {name: path for name, path in own_paths.items() if path}
            self._mixtures = {name: parse_data_path(path, own_flag(name)) for name, path in paths.items()}
        else:
            self._mixtures = dict.fromkeys(SPLIT_NAMES, parse_data_path(data_path))
        self._corpora: dict[str, _Corpus] = {}
        problems: list[Problem] = []
        for prefix in dict.fromkeys(weighted.prefix for mixture in self._mixtures.values() for weighted in mixture):
            try:
                dataset = IndexedDataset(prefix, access)
                self._corpora[prefix] = _Corpus(dataset, read_sidecar(dataset))
            except DataError as error:
                problems.extend(error.problems)
        raise_problems(DataError, problems or self._disagreements())

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary the corpora were made with; None without a sidecar."""
        return next((sidecar.vocab_size for _, sidecar in self._known_sidecars()), None)

    @property
    def eod(self) -> int | None:
        """The end-of-document id; None without a sidecar."""
        return next((sidecar.eod for _, sidecar in self._known_sidecars()), None)

    @property
    def unended(self) -> tuple[str, ...]:
        """The prefixes of corpora that were made without an end-of-document token after every document."""
        return tuple(prefix for prefix, sidecar in self._known_sidecars() if not sidecar.append_eod)

    @property
    def bytes_per_token(self) -> float | None:
        """The bytes of UTF-8 text that a token stands for, over all whole corpora; None when a sidecar is missing."""
        known = [sidecar for _, sidecar in self._known_sidecars()]
        tokens = sum(sidecar.tokens for sidecar in known)
        if len(known) < len(self._corpora) or tokens == 0:
            return None
        return sum(sidecar.text_bytes for sidecar in known) / tokens

    def split_bytes_per_token(self, split: str) -> float | None:
        """Return the bytes of text that a token of "train", "valid" or "test" stands for, by the mixture's weights.

        A loss of x nats a token is x / ln 2 / bytes_per_token bits a byte.  None when a sidecar is missing or there is
        no token.  Counted over the split's tokens, the first MEASURED_TOKENS of a corpus at most.
        """
        ratios, shares = [], []
        for weighted in self._mixtures[split]:
            dataset, sidecar = self._corpora[weighted.prefix]
            sequences = self._sequences(dataset, split)
            start, stop = dataset.sequence_start(sequences.start), dataset.sequence_start(sequences.stop)
            if sidecar is None or start == stop:
                return None
            ratios.append(_bytes_per_token(dataset, sidecar, range(start, stop)))
            shares.append(float(weighted.weight or stop - start))
        return sum(share * ratio for share, ratio in zip(shares, ratios, strict=True)) / sum(shares)

    def is_given(self, split: str) -> bool:
        """Return True if a split has a share of the corpora, or corpora of its own."""
        return bool(self._split[1][SPLIT_NAMES.index(split)]) if self._split else split in self._mixtures

    def vocabulary_problems(
        self, vocab_size: int, tokenizer: TokenizerSpec | None = None, eod: int | None = None
    ) -> list[Problem]:
        """Return the problems of training on these corpora with this vocabulary, and (if given) this tokenizer.

        eod: the tokenizer's end-of-document id.
        """
        digests = tokenizer.digests() if tokenizer else {}
        problems: list[Problem] = []
        for prefix, sidecar in self._known_sidecars():
            if sidecar.vocab_size > vocab_size:
                given = f"{prefix}: made with a vocabulary of {sidecar.vocab_size}; --vocab-size is {vocab_size}"
                problems.append(
                    Problem(given, "the model's vocabulary holds the corpus's", f"--vocab-size {sidecar.vocab_size}")
                )
            if tokenizer and (tokenizer.type, digests) != (sidecar.tokenizer_type, dict(sidecar.tokenizer_files)):
                given = f"{prefix}: made with {sidecar.tokenizer_type}{_digest_text(sidecar.tokenizer_files)}"
                rule = f"the run's tokenizer is the one that made the corpus, not {tokenizer.type}"
                problems.append(Problem(given, rule + _digest_text(digests), "the files the corpus was made with"))
            elif eod is not None and eod != sidecar.eod:
                given = f"{prefix}: made with {sidecar.eod} as the end of a document; the tokenizer ends one with {eod}"
                problems.append(Problem(given, "one id ends documents", "the files the corpus was made with"))
        return problems

    def samples(self, split: str, *, seq_length: int, seed: int, vocab_size: int) -> Samples:
        """Return the samples of "train", "valid" or "test".

        Raises DataError, with counts, if a corpus has none there.
        """
        mixture = self._mixtures[split]
        # Each split of each corpus has a separate stream, so that their orders differ.
        first_stream = SPLIT_NAMES.index(split) * max(map(len, self._mixtures.values()))
        sources: list[SampleSource] = []
        problems: list[Problem] = []
        for number, weighted in enumerate(mixture):
            dataset = self._corpora[weighted.prefix].dataset
            try:
                source = SampleSource(
                    dataset,
                    sequences=self._sequences(dataset, split),
                    seq_length=seq_length,
                    seed=seed,
                    vocab_size=vocab_size,
                    stream=first_stream + number,
                )
                sources.append(source)
            except DataError as error:
                problems.extend(self._without_samples(dataset, split, problem) for problem in error.problems)
        raise_problems(DataError, problems)
        return _mixed(mixture, sources)

    def describe(self) -> list[str]:
        """Return a line for every corpus: counts, and sequences by split."""
        return [
            f"{dataset.name}: {counted(dataset.num_documents, 'document')}, {dataset.num_tokens} tokens; sequences "
            + ", ".join(
                f"{split} {len(self._sequences(dataset, split))}"
                for split, mixture in self._mixtures.items()
                if any(weighted.prefix == prefix for weighted in mixture)
            )
            for prefix, (dataset, _) in self._corpora.items()
        ]

    def _sequences(self, dataset: IndexedDataset, split: str) -> range:
        if self._split is None:
            return range(dataset.num_sequences)
        return split_sequences(dataset.num_sequences, self._split[1])[SPLIT_NAMES.index(split)]

    def _known_sidecars(self) -> list[tuple[str, Sidecar]]:
        return [(prefix, sidecar) for prefix, (_, sidecar) in self._corpora.items() if sidecar]

    def _disagreements(self) -> list[Problem]:
        """Return the problems of corpora that were made with another tokenizer than the first."""
        known = self._known_sidecars()
        return [
            Problem(
                f"{prefix}: made with {sidecar.tokenizer_type}{_digest_text(sidecar.tokenizer_files)}",
                f"all corpora of a run are made with one tokenizer; {known[0][0]} has {known[0][1].tokenizer_type}"
                + _digest_text(known[0][1].tokenizer_files),
            )
            for prefix, sidecar in known[1:]
            if (sidecar.tokenizer_type, sidecar.tokenizer_files)
            != (known[0][1].tokenizer_type, known[0][1].tokenizer_files)
        ]

    def _without_samples(self, dataset: IndexedDataset, split: str, problem: Problem) -> Problem:
        if self._split is None:
            return Problem(f"{own_flag(split)}: {problem.given}", problem.rule, problem.legal)
        text, shares = self._split
        ranges = split_sequences(dataset.num_sequences, shares)
        counts = ", ".join(f"{name} {len(part)}" for name, part in ranges._asdict().items())
        origin = " (the default)" if text == DEFAULT_SPLIT else ""
        whole = counted(dataset.num_sequences, "sequence")
        given = f"--split {text}{origin}: {split} has no sample; of {whole}: {counts}"
        if len(ranges[SPLIT_NAMES.index(split)]) > 0:
            return Problem(f"{given}; {problem.given}", problem.rule, problem.legal)
        return Problem(f"{given}; {dataset.name}", _WHOLE_SEQUENCES, _legal_split(dataset.num_sequences))


def tokenizer_of_corpora(prefixes: Iterable[str]) -> TokenizerSpec | None:
    """Return the tokenizer of the first corpus whose sidecar names one that is still there; None if none does."""
    for prefix in prefixes:
        path = sidecar_path(prefix)
        if not path.is_file():
            continue
        try:
            found = recorded_tokenizer(load_sidecar(path), path.parent)
        except DataError:  # a run that opens the corpus reports it
            continue
        if found is not None:
            return found
    return None


def own_flag(split: str) -> str:
    """Return the flag that names a split's own corpora."""
    return f"--{split}{DATA_PATH[1:]}"


def _mixed(mixture: Sequence[WeightedPrefix], sources: Sequence[SampleSource]) -> Samples:
    """Mix the sources; corpora without a weight count by their size."""
    if len(sources) == 1:
        return sources[0]
    pairs = zip(mixture, sources, strict=True)
    return BlendedSamples(sources, [weighted.weight or source.samples_per_epoch for weighted, source in pairs])


def _legal_split(num_sequences: int) -> str:
    """Return what gives every part of a split a sequence at least."""
    if num_sequences < len(SPLIT_NAMES):
        flags = ", ".join(map(own_flag, SPLIT_NAMES))
        return f"--text-rule blocks or --split-documents N in preprocessing, or a corpus for each part ({flags})"
    share = max(1, num_sequences // 20)
    return f"more documents, or --split {num_sequences - 2 * share},{share},{share}"


def _bytes_per_token(dataset: IndexedDataset, sidecar: Sidecar, tokens: range) -> float:
    table = np.array(sidecar.token_bytes)
    measured = tokens[:MEASURED_TOKENS]
    blocks = (measured[first : first + CHECK_BLOCK] for first in range(0, len(measured), CHECK_BLOCK))
    # An id outside the table is an error only when it is read as a sample; here it counts as the last one.
    total = sum(int(table.take(dataset.tokens(block.start, block.stop), mode="clip").sum()) for block in blocks)
    return total / len(measured)


def _digest_text(digests: Mapping[str, str]) -> str:
    return "".join(f" {name} {digest[:12]}" for name, digest in digests.items())
