"""Opens the corpora of a run, checks them against the vocabulary, and makes samples of them.

Either --data-path names corpora that --split cuts into three, or each split has corpora of its own, read whole
(--train-data-path, --valid-data-path, --test-data-path), or groups of parts of corpora
(--train-weighted-split-paths, ...), of which every held-out one is a set of samples by itself.

Opening reads headers, indexes and sidecars and reports the problems of all corpora at once, so it can be done before
processes join.  A split is checked only when its samples are used: an empty test split is legal in a run without tests.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from megazero.config.corpora import GROUPS, CorpusGroup, WeightedPrefix
from megazero.data.blend import BlendedSamples, parse_data_path
from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset
from megazero.data.position import Part, Stretch, stretch_at
from megazero.data.reading import Reading
from megazero.data.samples import SPLIT_NAMES, Samples, SampleSource, SplitShares, parse_split, split_sequences
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
# The first and last tokens of a part of a corpus by which it is recognised.
KEY_TOKENS = 1024
_MASK = "--answer-loss-mask"
_WHOLE_SEQUENCES = "--split deals out whole documents, or sequences of --split-documents, one at least to what is read"


class _Corpus(NamedTuple):
    dataset: IndexedDataset
    sidecar: Sidecar | None
    mask: IndexedDataset | None = None


class TextSet(NamedTuple):
    """The mixture of one set of samples.

    split: "train", "valid" or "test".  group: the name of a group of corpora, "" for another mixture.
    """

    split: str
    group: str
    mixture: tuple[WeightedPrefix, ...]

    @property
    def name(self) -> str:
        """The name of the set among those of a run: "train", "valid", or "valid NAME" for a group."""
        return self.split if self.split == "train" else f"{self.split} {self.group}".strip()


class Corpora:
    """The opened corpora of a run.

    data_path: the values of the flag ("PREFIX", or weights and prefixes).  split: "969,30,1".
    own_paths: the values of the flags of splits' own corpora, by the split's name; they replace the two others.
    groups: groups of parts of corpora, by the split's name; they replace all others, and --split.
    masks: "on" requires a mask of every corpus, "auto" opens those that sidecars name, "off" none.
    Raises DataError with the problems of every corpus.
    """

    def __init__(
        self,
        data_path: Sequence[str] = (),
        *,
        split: str = DEFAULT_SPLIT,
        own_paths: Mapping[str, Sequence[str]] | None = None,
        groups: Mapping[str, Sequence[CorpusGroup]] | None = None,
        access: Access = PLAIN_ACCESS,
        masks: str = "auto",
    ) -> None:
        self._split: tuple[str, SplitShares] | None = None if own_paths or groups else (split, parse_split(split))
        self._in_groups = bool(groups)
        if groups:
            sets = [TextSet(split, name, parts) for split, found in groups.items() for name, parts in found]
        elif own_paths:
            paths = {name: path for name, path in own_paths.items() if path}
            sets = [TextSet(name, "", parse_data_path(path, own_flag(name))) for name, path in paths.items()]
        else:
            sets = [TextSet(name, "", parse_data_path(data_path)) for name in SPLIT_NAMES]
        self.sets: Mapping[str, TextSet] = {each.name: each for each in sets}
        self._corpora: dict[str, _Corpus] = {}
        problems: list[Problem] = []
        for prefix in dict.fromkeys(weighted.prefix for each in sets for weighted in each.mixture):
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

    def split_bytes_per_token(self, name: str) -> float | None:
        """Return the bytes of text that a token of a set ("train", "valid NAME") stands for, by the mixture's weights.

        A loss of x nats a token is x / ln 2 / bytes_per_token bits a byte.  None when a sidecar is missing or there is
        no token.  Counted over the set's tokens that are learnt, of the first MEASURED_TOKENS of a corpus at most.
        """
        ratios, shares = [], []
        for weighted in self.sets[name].mixture:
            dataset, sidecar, mask = self._corpora[weighted.prefix]
            sequences = self._sequences(self.sets[name], weighted)
            start, stop = dataset.sequence_start(sequences.start), dataset.sequence_start(sequences.stop)
            if sidecar is None or start == stop:
                return None
            ratio = _bytes_per_token(dataset, sidecar, mask, range(start, stop))
            if ratio is None:
                return None
            ratios.append(ratio)
            shares.append(float(weighted.weight or stop - start))
        return sum(share * ratio for share, ratio in zip(shares, ratios, strict=True)) / sum(shares)

    @property
    def is_cut(self) -> bool:
        """True if --split cuts the corpora; False if each set has corpora of its own."""
        return self._split is not None

    def held_out(self) -> list[TextSet]:
        """Return the sets of validation and test: those with a share of the corpora, or corpora of their own."""
        shares = dict(zip(SPLIT_NAMES, self._split[1], strict=True)) if self._split else {}
        return [each for each in self.sets.values() if each.split != "train" and shares.get(each.split, 1)]

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

    def training(
        self, saved: Mapping[str, Any] | None, number: int, *, seq_length: int, seed: int, vocab_size: int
    ) -> tuple[Samples, Stretch]:
        """Return the samples of training and the stretch of the run that sample `number` lies in.

        saved: the stretch of the checkpoint that the run goes on from, None for a new run.  Raises DataError, with
        counts, if a corpus has no sample there.
        """
        chosen = self.sets["train"]
        whole, problems = self._sources(chosen, seq_length=seq_length, seed=seed, vocab_size=vocab_size, readings={})
        raise_problems(DataError, problems)
        keys = self._keys(chosen)
        weights = [Fraction(weighted.weight or source.samples_per_epoch) for weighted, source in whole]
        parts = [
            Part(key, weight, source.num_tokens) for key, weight, (_, source) in zip(keys, weights, whole, strict=True)
        ]
        stretch = stretch_at(number, parts, seq_length, None if saved is None else Stretch.from_json(saved))
        readings = {place: stretch.readings[key] for place, key in enumerate(keys)}
        placed, _ = self._sources(chosen, seq_length=seq_length, seed=seed, vocab_size=vocab_size, readings=readings)
        sources = [source for _, source in placed]
        if len(sources) == 1 and not stretch.start:
            return sources[0], stretch
        return BlendedSamples(sources, weights, start=stretch.start), stretch

    def _keys(self, chosen: TextSet) -> list[str]:
        """Return a key for the part of each corpus, made of its size and of its first and last tokens."""
        keys: list[str] = []
        for weighted in chosen.mixture:
            dataset, sequences = self._corpora[weighted.prefix].dataset, self._sequences(chosen, weighted)
            start, stop = dataset.sequence_start(sequences.start), dataset.sequence_start(sequences.stop)
            digest = hashlib.blake2b(f"{len(sequences)} {stop - start}".encode(), digest_size=8)
            for first, last in ((start, min(start + KEY_TOKENS, stop)), (max(stop - KEY_TOKENS, start), stop)):
                digest.update(dataset.tokens(first, last).astype("<i8").tobytes())
            key = digest.hexdigest()
            again = sum(known.startswith(key) for known in keys)
            keys.append(f"{key}#{again}" if again else key)
        return keys

    def samples(self, name: str, *, seq_length: int, seed: int, vocab_size: int) -> Samples:
        """Return the samples of a set: "train", "valid", "test", or "valid NAME" for a group.

        Raises DataError, with counts, if a corpus has none there.
        """
        found, problems = self.samples_there(name, seq_length=seq_length, seed=seed, vocab_size=vocab_size)
        raise_problems(DataError, problems)
        assert found is not None, "a mixture has a corpus"
        return found

    def samples_there(
        self, name: str, *, seq_length: int, seed: int, vocab_size: int
    ) -> tuple[Samples | None, list[Problem]]:
        """Return the samples of a set without the corpora that have none there, and these corpora's problems."""
        chosen = self.sets[name]
        found, problems = self._sources(chosen, seq_length=seq_length, seed=seed, vocab_size=vocab_size, readings={})
        return (_mixed(found) if found else None), problems

    def _sources(
        self, chosen: TextSet, *, seq_length: int, seed: int, vocab_size: int, readings: Mapping[int, Reading]
    ) -> tuple[list[tuple[WeightedPrefix, SampleSource]], list[Problem]]:
        """Return the corpora of a set that have samples, and the problems of the others.

        readings: where to begin in a corpus, by its number in the mixture.
        """
        # Each split of each corpus has a separate stream, so that their orders differ.
        first_stream = SPLIT_NAMES.index(chosen.split) * max(len(each.mixture) for each in self.sets.values())
        found: list[tuple[WeightedPrefix, SampleSource]] = []
        problems: list[Problem] = []
        for number, weighted in enumerate(chosen.mixture):
            dataset, _, mask = self._corpora[weighted.prefix]
            try:
                source = SampleSource(
                    dataset,
                    sequences=self._sequences(chosen, weighted),
                    seq_length=seq_length,
                    seed=seed,
                    vocab_size=vocab_size,
                    stream=first_stream + number,
                    mask=mask,
                    reading=readings.get(number),
                )
                found.append((weighted, source))
            except DataError as error:
                problems.extend(self._without_samples(dataset, chosen, weighted, problem) for problem in error.problems)
        return found, problems

    def describe(self) -> list[str]:
        """Return a line for every corpus: counts, and sequences by set."""
        return [
            f"{dataset.name}: {counted(dataset.num_documents, 'document')}, {dataset.num_tokens} tokens; sequences "
            + ", ".join(
                f"{each.name} {len(self._sequences(each, weighted))}"
                for each in self.sets.values()
                for weighted in each.mixture
                if weighted.prefix == prefix
            )
            for prefix, (dataset, _, _) in self._corpora.items()
        ]

    def _sequences(self, chosen: TextSet, weighted: WeightedPrefix) -> range:
        """Return the sequences of a corpus that belong to a set."""
        count = self._corpora[weighted.prefix].dataset.num_sequences
        if self._split is not None:
            return split_sequences(count, self._split[1])[SPLIT_NAMES.index(chosen.split)]
        return range(round(weighted.start * count), round(weighted.stop * count))

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

    def _without_samples(
        self, dataset: IndexedDataset, chosen: TextSet, weighted: WeightedPrefix, problem: Problem
    ) -> Problem:
        if self._split is None:
            flag = f"--{GROUPS[chosen.split].replace('_', '-')}" if self._in_groups else own_flag(chosen.split)
            part = f" {chosen.group}, {weighted.start:g}:{weighted.stop:g} of {dataset.num_sequences}" * self._in_groups
            return Problem(f"{flag}{part}: {problem.given}", problem.rule, problem.legal)
        text, shares = self._split
        ranges = split_sequences(dataset.num_sequences, shares)
        counts = ", ".join(f"{name} {len(part)}" for name, part in ranges._asdict().items())
        origin = " (the default)" if text == DEFAULT_SPLIT else ""
        whole = counted(dataset.num_sequences, "sequence")
        given = f"--split {text}{origin}: {chosen.split} has no sample; of {whole}: {counts}"
        if len(ranges[SPLIT_NAMES.index(chosen.split)]) > 0:
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


def _mixed(found: Sequence[tuple[WeightedPrefix, SampleSource]]) -> Samples:
    """Mix the sources; corpora without a weight count by their size."""
    sources = [source for _, source in found]
    if len(sources) == 1:
        return sources[0]
    return BlendedSamples(sources, [weighted.weight or source.samples_per_epoch for weighted, source in found])


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
