"""The corpora of a run: --data-path and --split opened, checked against the vocabulary, and handed out as samples.

Opening reads headers, indexes and sidecars and reports what is wrong with all corpora at once, so it can be done before
processes join.  A split is looked at only when samples of it are asked for: an empty test split harms nobody who does
not test.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from megazero.data.blend import BlendedSamples, parse_data_path
from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset
from megazero.data.samples import SPLIT_NAMES, Samples, SampleSource, Split, SplitRanges, parse_split, split_sequences
from megazero.data.sidecar import Sidecar, read_sidecar
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError, Problem

MEASURED_TOKENS = 1 << 24


class Corpora:
    """The opened corpora of a run.

    data_path: what the flag takes ("PREFIX", or weights and prefixes).  split: "969,30,1".
    Raises DataError with the problems of every corpus.
    """

    def __init__(self, data_path: Sequence[str], *, split: str) -> None:
        self._weighted = parse_data_path(data_path)
        self._split_text = split
        self._split: Split = parse_split(split)
        problems: list[Problem] = []
        self._datasets: list[IndexedDataset] = []
        self._sidecars: list[Sidecar | None] = []
        for prefix, _ in self._weighted:
            try:
                dataset = IndexedDataset(prefix)
                self._sidecars.append(read_sidecar(dataset))
                self._datasets.append(dataset)
            except DataError as error:
                problems.extend(error.problems)
        problems.extend(self._disagreements() if not problems else ())
        if problems:
            raise DataError(*problems)

    @property
    def vocab_size(self) -> int | None:
        """Size of the vocabulary the corpora were made with; None when no sidecar tells."""
        return next((sidecar.vocab_size for sidecar in self._sidecars if sidecar), None)

    @property
    def eod(self) -> int | None:
        """The end-of-document id; None when no sidecar tells."""
        return next((sidecar.eod for sidecar in self._sidecars if sidecar), None)

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of text a token stands for, over all corpora as they are; None when a sidecar is missing."""
        known = [sidecar for sidecar in self._sidecars if sidecar]
        tokens = sum(sidecar.tokens for sidecar in known)
        if len(known) < len(self._sidecars) or tokens == 0:
            return None
        return sum(sidecar.text_bytes for sidecar in known) / tokens

    def split_bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text that a token of "train", "valid" or "test" stands for, by the mixture's weights.

        A loss of x nats a token is x / ln 2 / bytes_per_token bits a byte.  None when a sidecar is missing or there is
        no token.  Counted over the split's tokens, the first MEASURED_TOKENS of a corpus at most.
        """
        ratios, shares = [], []
        for weighted, dataset, sidecar in zip(self._weighted, self._datasets, self._sidecars, strict=True):
            sequences = self._ranges(dataset)[SPLIT_NAMES.index(split)]
            start, stop = dataset.sequence_start(sequences.start), dataset.sequence_start(sequences.stop)
            if sidecar is None or start == stop:
                return None
            ratios.append(_bytes_per_token(dataset, sidecar, range(start, stop)))
            shares.append(float(weighted.weight or stop - start))
        return sum(share * ratio for share, ratio in zip(shares, ratios, strict=True)) / sum(shares)

    def vocabulary_problems(self, vocab_size: int, tokenizer: TokenizerSpec | None = None) -> list[Problem]:
        """What speaks against training on these corpora with this vocabulary, and (if given) this tokenizer."""
        digests = tokenizer.digests() if tokenizer else {}
        problems: list[Problem] = []
        for prefix, sidecar in self._known_sidecars():
            if sidecar.vocab_size > vocab_size:
                given = f"{prefix}: made with a vocabulary of {sidecar.vocab_size}; the model has {vocab_size}"
                problems.append(
                    Problem(given, "the model's vocabulary holds the corpus's", f"--vocab-size {sidecar.vocab_size}")
                )
            if tokenizer and (tokenizer.type, digests) != (sidecar.tokenizer_type, dict(sidecar.tokenizer_files)):
                given = f"{prefix}: made with {sidecar.tokenizer_type}{_digest_text(sidecar.tokenizer_files)}"
                rule = f"the run's tokenizer is the one that made the corpus, not {tokenizer.type}"
                problems.append(Problem(given, rule + _digest_text(digests), "the files the corpus was made with"))
        return problems

    def samples(self, split: str, *, seq_length: int, seed: int, vocab_size: int) -> Samples:
        """The samples of "train", "valid" or "test"; raises DataError, with counts, if a corpus has none there."""
        part = SPLIT_NAMES.index(split)
        sources: list[SampleSource] = []
        problems: list[Problem] = []
        for number, dataset in enumerate(self._datasets):
            try:
                source = SampleSource(
                    dataset,
                    sequences=self._ranges(dataset)[part],
                    seq_length=seq_length,
                    seed=seed,
                    vocab_size=vocab_size,
                    stream=part * len(self._datasets) + number,
                )
                sources.append(source)
            except DataError as error:
                problems.extend(self._without_samples(dataset, split, problem) for problem in error.problems)
        if problems:
            raise DataError(*problems)
        return self._mixed(sources)

    def _mixed(self, sources: Sequence[SampleSource]) -> Samples:
        """One source for all; corpora without a weight count by their size."""
        if len(sources) == 1:
            return sources[0]
        pairs = zip(self._weighted, sources, strict=True)
        return BlendedSamples(sources, [weighted.weight or source.samples_per_epoch for weighted, source in pairs])

    def describe(self) -> list[str]:
        """A line for every corpus: counts, and sequences by split."""
        return [
            f"{dataset.prefix}: {dataset.num_documents} documents, {dataset.num_tokens} tokens; sequences "
            + ", ".join(f"{name} {len(part)}" for name, part in self._ranges(dataset)._asdict().items())
            for dataset in self._datasets
        ]

    def _ranges(self, dataset: IndexedDataset) -> SplitRanges:
        return split_sequences(dataset.num_sequences, self._split)

    def _known_sidecars(self) -> list[tuple[str, Sidecar]]:
        pairs = zip(self._weighted, self._sidecars, strict=True)
        return [(weighted.prefix, sidecar) for weighted, sidecar in pairs if sidecar]

    def _disagreements(self) -> list[Problem]:
        """Corpora of one run are made with one tokenizer."""
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
        ranges = self._ranges(dataset)
        counts = ", ".join(f"{name} {len(part)}" for name, part in ranges._asdict().items())
        given = (
            f"--split {self._split_text}: {split} is asked for samples; of {dataset.num_sequences} sequences: {counts}"
        )
        return Problem(f"{given}; {problem.given}", problem.rule, self._legal_split(dataset, split) or problem.legal)

    def _legal_split(self, dataset: IndexedDataset, split: str) -> str:
        """A split that gives every part asked for at least one sequence, if the corpus has enough of them."""
        index, count = SPLIT_NAMES.index(split), dataset.num_sequences
        if count < len(SPLIT_NAMES) or len(self._ranges(dataset)[index]) > 0:
            return ""
        share = max(1, count // 20)
        return f"more documents, or --split {count - 2 * share},{share},{share}"


def _bytes_per_token(dataset: IndexedDataset, sidecar: Sidecar, tokens: range) -> float:
    table = np.array(sidecar.token_bytes)
    measured = tokens[:MEASURED_TOKENS]
    blocks = (measured[first : first + CHECK_BLOCK] for first in range(0, len(measured), CHECK_BLOCK))
    # An id outside the table is refused when it is read as a sample; here it counts as the last one.
    total = sum(int(table.take(dataset.tokens(block.start, block.stop), mode="clip").sum()) for block in blocks)
    return total / len(measured)


def _digest_text(digests: Mapping[str, str]) -> str:
    return "".join(f" {name} {digest[:12]}" for name, digest in digests.items())
