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
from megazero.data.sidecar import (
    Sidecar,
    load_sidecar,
    loss_mask_prefix,
    read_sidecar,
    recorded_tokenizer,
    sidecar_path,
)
from megazero.data.storage import PLAIN_ACCESS, Access
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError, Problem, raise_problems
from megazero.rules.files import DATA_PATH, DEFAULT_SPLIT
from megazero.units import counted

MEASURED_TOKENS = 1 << 24
_MASK = "--answer-loss-mask"
_WHOLE_SEQUENCES = "--split deals out whole documents, or sequences of --split-documents, one at least to what is read"


class _Corpus(NamedTuple):
    dataset: IndexedDataset
    sidecar: Sidecar | None
    mask: IndexedDataset | None = None


class Corpora:
    """The opened corpora of a run.

    data_path: the values of the flag ("PREFIX", or weights and prefixes).  split: "969,30,1".
    own_paths: the values of the flags of splits' own corpora, by the split's name; they replace the two others.
    masks: "on" requires a mask of every corpus, "auto" opens those that sidecars tell of, "off" none.
    Raises DataError with the problems of every corpus.
    """

    def __init__(
        self,
        data_path: Sequence[str] = (),
        *,
        split: str = DEFAULT_SPLIT,
        own_paths: Mapping[str, Sequence[str]] | None = None,
        access: Access = PLAIN_ACCESS,
        masks: str = "auto",
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
                sidecar = read_sidecar(dataset)
                has_mask = masks == "on" or (masks == "auto" and sidecar is not None and sidecar.loss_mask)
                mask = _open_mask(dataset, access) if has_mask else None
                self._corpora[prefix] = _Corpus(dataset, sidecar, mask)
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
    def masked(self) -> tuple[str, ...]:
        """The prefixes of corpora of which a part of the tokens is learnt."""
        return tuple(prefix for prefix, corpus in self._corpora.items() if corpus.mask is not None)

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
        no token.  Counted over the split's tokens that are learnt, of the first MEASURED_TOKENS of a corpus at most.
        """
        ratios, shares = [], []
        for weighted in self._mixtures[split]:
            dataset, sidecar, mask = self._corpora[weighted.prefix]
            sequences = self._sequences(dataset, split)
            start, stop = dataset.sequence_start(sequences.start), dataset.sequence_start(sequences.stop)
            if sidecar is None or start == stop:
                return None
            ratio = _bytes_per_token(dataset, sidecar, mask, range(start, stop))
            if ratio is None:
                return None
            ratios.append(ratio)
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
            dataset, _, mask = self._corpora[weighted.prefix]
            try:
                source = SampleSource(
                    dataset,
                    sequences=self._sequences(dataset, split),
                    seq_length=seq_length,
                    seed=seed,
                    vocab_size=vocab_size,
                    stream=first_stream + number,
                    mask=mask,
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
            for prefix, (dataset, _, _) in self._corpora.items()
        ]

    def _sequences(self, dataset: IndexedDataset, split: str) -> range:
        if self._split is None:
            return range(dataset.num_sequences)
        return split_sequences(dataset.num_sequences, self._split[1])[SPLIT_NAMES.index(split)]

    def _known_sidecars(self) -> list[tuple[str, Sidecar]]:
        return [(prefix, sidecar) for prefix, (_, sidecar, _) in self._corpora.items() if sidecar]

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


def _open_mask(dataset: IndexedDataset, access: Access) -> IndexedDataset:
    """Open the mask of a corpus; raises DataError if it is missing, or of another shape."""
    try:
        mask = IndexedDataset(loss_mask_prefix(dataset.prefix), access)
    except DataError as error:
        legal = f"{_MASK} off, to learn every token"
        raise DataError(*(Problem(each.given, each.rule, legal) for each in error.problems)) from error
    shapes = [(each.num_documents, each.num_sequences, each.num_tokens) for each in (mask, dataset)]
    if shapes[0] != shapes[1] or mask.dtype != np.uint8:
        given = f"{mask.name}: documents, sequences, tokens {shapes[0]} of {mask.dtype}; the corpus has {shapes[1]}"
        raise DataError(Problem(given, "a mask has a byte for every token", "preprocess again"))
    return mask


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


def _bytes_per_token(
    dataset: IndexedDataset, sidecar: Sidecar, mask: IndexedDataset | None, tokens: range
) -> float | None:
    """Return the mean over the tokens that are learnt; None if there is none."""
    table = np.array(sidecar.token_bytes)
    measured = tokens[:MEASURED_TOKENS]
    total = count = 0
    for first in range(0, len(measured), CHECK_BLOCK):
        block = measured[first : first + CHECK_BLOCK]
        # An id outside the table is an error only when it is read as a sample; here it counts as the last one.
        found = table.take(dataset.tokens(block.start, block.stop), mode="clip")
        if mask is not None:
            found = found[mask.tokens(block.start, block.stop) == 1]
        total, count = total + int(found.sum()), count + len(found)
    return total / count if count else None


def _digest_text(digests: Mapping[str, str]) -> str:
    return "".join(f" {name} {digest[:12]}" for name, digest in digests.items())
