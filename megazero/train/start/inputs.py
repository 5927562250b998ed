"""The inputs of a run, opened and checked from its configuration before any process group exists."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.corpora import corpus_words, read_groups, train_words
from megazero.config.model import ModelConfig
from megazero.config.run import DataConfig
from megazero.config.values import as_span
from megazero.data.corpora import Corpora, tokenizer_of_corpora
from megazero.data.fill_in import FillIn, FillInSamples
from megazero.data.mock import MockSamples
from megazero.data.position import changes
from megazero.data.samples import RemainingSamples, Samples, skipping_number
from megazero.data.storage import Access
from megazero.data.tokenizers import FILES, Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import CheckpointError, ConfigError, DataError, Problem, raise_problems
from megazero.rules.files import DEFAULT_SPLIT, weight_of


@dataclass(frozen=True)
class HeldOut:
    """Held-out text that is evaluated by itself.

    split: "validation" or "test".  group: the name of its group of corpora, "" without groups.
    bytes_per_token: the mean over its text; None if it is unknown.
    """

    split: str
    group: str
    samples: Samples
    bytes_per_token: float | None = None


class Placed(NamedTuple):
    """The samples of training from a place in the corpora on.

    place: what a checkpoint stores of it; None for samples that are in no corpus.  notices: lines on what has changed.
    """

    samples: Samples
    place: dict[str, Any] | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunInputs:
    """The samples of training and of the held-out sets that are read, and figures of their text.

    held_out: by name, "valid", "test", or "valid NAME" for a group.  eod: end-of-document id, None if it is unknown.
    unended: corpora that were made without an end-of-document token after every document.
    masked: corpora of which answers alone count in the loss.
    notices: lines on what is left out.
    resumed: a function of the place that a checkpoint stores, and of the samples consumed, that returns the samples of
    training from there on; None: they depend on their number alone.
    """

    train: Samples
    held_out: Mapping[str, HeldOut]
    vocab_size: int
    eod: int | None
    unended: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    resumed: Callable[[Mapping[str, Any] | None, int], Placed] | None = None

    def placed(self, saved: Mapping[str, Any] | None, consumed: int) -> Placed:
        """Return the samples of a run that goes on behind `consumed` samples, with the place that it has stored."""
        return Placed(self.train) if self.resumed is None else self.resumed(saved, consumed)

    @property
    def valid(self) -> Samples | None:
        """The samples of the first validation set; None without one."""
        return next((each.samples for each in self.held_out.values() if each.split == _REPORTED_AS["valid"]), None)


_REPORTED_AS = MappingProxyType({"valid": "validation", "test": "test"})


def open_inputs(data: DataConfig, model: ModelConfig, *, seed: int, evaluates: bool) -> RunInputs:
    """Open the configured corpora, or make mock samples.  Raises DataError with all problems."""
    skipped = [span for span in map(as_span, data.data_skip_samples) if span]
    if not data.mock_data:
        return _corpus_inputs(data, model, seed, evaluates, skipped)
    inputs = _mock_inputs(model, tokenizer_spec(data), seed)
    return replace(inputs, train=RemainingSamples(inputs.train, skipped)) if skipped else inputs


def _corpus_inputs(
    data: DataConfig, model: ModelConfig, seed: int, evaluates: bool, skipped: Sequence[range]
) -> RunInputs:
    tokenizer = tokenizer_spec(data)
    corpora = _open_corpora(data)
    # Loaded first: a file that is no tokenizer's is reported as that, and not as another tokenizer than the corpus's.
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    vocab_size = _vocab_size(data, model, corpora, loaded)
    eod = None if loaded is None else loaded.eod
    raise_problems(DataError, corpora.vocabulary_problems(vocab_size, tokenizer, eod))
    shape = {"seq_length": model.seq_length, "seed": seed, "vocab_size": vocab_size}
    if data.fim_data and corpora.masked:
        rule = "a mask is of the tokens as the corpus has them, and rearranged text has others"
        raise DataError(Problem(f"--fim-data with a mask of {corpora.masked[0]}", rule, "--answer-loss-mask off"))
    fill_in = _fill_in(data, loaded or _recorded(data), seed) if data.fim_data else _unchanged

    def resumed(saved: Mapping[str, Any] | None, consumed: int) -> Placed:
        number = skipping_number(consumed, skipped)
        samples, stretch = corpora.training(saved, number, **shape)
        samples = fill_in(samples, 0)
        remaining = RemainingSamples(samples, skipped) if skipped else samples
        return Placed(remaining, stretch.to_json(), changes(saved, stretch))

    held_out: dict[str, HeldOut] = {}
    notices: list[str] = []
    if evaluates and corpora.is_cut and not any(each.split == "valid" for each in corpora.held_out()):
        notices.append(f"validation is not evaluated: --split {data.split} has no share for it")
    for chosen in corpora.held_out() if evaluates else ():
        samples, missing = corpora.samples_there(chosen.name, **shape)
        # What a share of --split comes to nothing for is left out; corpora that are named for a set are all read.
        raise_problems(DataError, () if corpora.is_cut else missing)
        reported = _REPORTED_AS[chosen.split]
        what = f"{reported} is not evaluated" if samples is None else f"a corpus is left out of {reported}"
        notices += [f"{what}: {each.given}; {each.rule} (legal: {each.legal})" for each in missing]
        if samples is not None:
            # Rearranged text has other tokens than the corpus.
            ratio = None if data.fim_data else corpora.split_bytes_per_token(chosen.name)
            samples = fill_in(samples, 1 + len(held_out))
            held_out[chosen.name] = HeldOut(reported, chosen.group, samples, ratio)
    eod = corpora.eod if eod is None else eod
    train = resumed(None, 0).samples
    return RunInputs(train, held_out, vocab_size, eod, corpora.unended, corpora.masked, tuple(notices), resumed)


def _unchanged(samples: Samples, stream: int) -> Samples:
    return samples


def _recorded(data: DataConfig) -> Tokenizer:
    """Return the tokenizer that the corpora's sidecars name; raise DataError without one."""
    spec = find_tokenizer(data)
    if spec is None:
        rule = "documents are made text and tokens again by a tokenizer, and no corpus's .json names one"
        raise DataError(Problem("--fim-data", rule, "--tokenizer-type ... and its files"))
    return load_tokenizer(spec)


def _fill_in(data: DataConfig, tokenizer: Tokenizer, seed: int) -> Callable[[Samples, int], Samples]:
    """Return a function that rearranges a set's samples; raise DataError for tokens that the tokenizer has not got."""
    names = {
        "--fim-prefix-token": data.fim_prefix_token,
        "--fim-middle-token": data.fim_middle_token,
        "--fim-suffix-token": data.fim_suffix_token,
        "--fim-pad-token": data.fim_pad_token,
        "--fim-eod-token": data.fim_eod_token,
        "--fim-split-sample": data.fim_split_sample,
    }
    ids = {flag: tokenizer.token_id(name) for flag, name in names.items() if name is not None}
    rule = "the tokenizer has a token of this name"
    raise_problems(
        DataError,
        [
            Problem(f"--fim-data with {flag} {names[flag]}", rule, f"{flag} NAME, or a tokenizer with this token")
            for flag, number in ids.items()
            if number is None
        ],
    )
    prefix, middle, suffix, padding = (ids[flag] for flag in list(names)[:4])
    assert prefix is not None and middle is not None and suffix is not None and padding is not None
    eod, split = (ids.get(flag) for flag in list(names)[4:])
    rule_of_run = FillIn(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        fragment_rate=data.fim_rate if data.fim_fragment_rate is None else data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
        prefix=prefix,
        middle=middle,
        suffix=suffix,
        padding=padding,
        eod=tokenizer.eod if eod is None else eod,
        split=split,
    )
    return lambda samples, stream: FillInSamples(samples, rule_of_run, tokenizer, seed=seed, stream=stream)


def _open_corpora(data: DataConfig) -> Corpora:
    access = Access(maps=data.mmap_bin_files, index_folder=data.data_cache_path)
    if data.train_weighted_split_paths:
        groups = {
            "train": read_groups(data.train_weighted_split_paths),
            "valid": read_groups(data.valid_weighted_split_paths),
            "test": read_groups(data.test_weighted_split_paths),
        }
        return Corpora(groups=groups, access=access, masks=data.answer_loss_mask)
    if not data.train_data_path:
        split = data.split or DEFAULT_SPLIT
        return Corpora(data.data_path, split=split, access=access, masks=data.answer_loss_mask)
    own = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    return Corpora(own_paths=own, access=access, masks=data.answer_loss_mask)


def tokenizer_spec(data: DataConfig) -> TokenizerSpec | None:
    """Return the tokenizer of the configuration; None if it has none."""
    if data.tokenizer_type is None:
        return None
    return TokenizerSpec(
        data.tokenizer_type,
        vocab_file=_text(data.vocab_file),
        merge_file=_text(data.merge_file),
        tokenizer_model=_text(data.tokenizer_model),
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
    )


def find_tokenizer(data: DataConfig) -> TokenizerSpec | None:
    """Return the tokenizer of the configuration, else the one that its corpora's sidecars name; None without either."""
    if data.tokenizer_type is not None or data.mock_data:
        return tokenizer_spec(data)
    return tokenizer_of_corpora(word for word in corpus_words(data) if weight_of(word) is None)


def tokenizer_of_run(data: DataConfig, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that `find_tokenizer` finds, for a model of vocab_size ids.

    Raises ConfigError if there is none, CheckpointError if its vocabulary is larger than the model's.
    """
    spec = find_tokenizer(data)
    if spec is None:
        paths = ", ".join(train_words(data)[1:])
        corpora = f"its corpora ({paths}, from this folder) name none whose files are there" if paths else "no corpora"
        given = f"the run's configuration names no tokenizer, and {corpora}"
        raise ConfigError(Problem(given, "text needs one", "--tokenizer-type " + ", ".join(FILES)))
    tokenizer = load_tokenizer(spec)
    if tokenizer.vocab_size > vocab_size:
        given = f"a tokenizer of {tokenizer.vocab_size} ids for a model of {vocab_size}"
        raise CheckpointError(Problem(given, "the tokenizer is the one that the run was trained with"))
    return tokenizer


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _vocab_size(data: DataConfig, model: ModelConfig, corpora: Corpora, tokenizer: Tokenizer | None) -> int:
    """Return the size of the vocabulary from the flag, else from the corpora, else from the tokenizer."""
    given = model.vocab_size or corpora.vocab_size
    if given is not None:
        return given
    if tokenizer is not None:
        return tokenizer.vocab_size
    rule = "the size of the vocabulary comes from a flag, a tokenizer, or the corpus's .json"
    raise DataError(Problem(" ".join(train_words(data)), rule, "--vocab-size N, --tokenizer-type ..."))


def _mock_inputs(model: ModelConfig, tokenizer: TokenizerSpec | None, seed: int) -> RunInputs:
    known = load_tokenizer(tokenizer) if tokenizer else None
    vocab_size = model.vocab_size or (known.vocab_size if known else 0)
    if not vocab_size:
        raise DataError(Problem("--mock-data", "made-up tokens are drawn from a vocabulary", "--vocab-size 50257"))
    train, valid, test = (MockSamples(vocab_size, model.seq_length, seed + stream) for stream in range(3))
    held_out = {"valid": HeldOut("validation", "", valid), "test": HeldOut("test", "", test)}
    return RunInputs(train, held_out, vocab_size, known.eod if known else None)
