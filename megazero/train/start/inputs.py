"""The inputs of a run, opened and checked from its configuration before any process group exists."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megazero.config.model import ModelConfig
from megazero.config.run import DataConfig
from megazero.data.corpora import Corpora, own_flag, tokenizer_of_corpora
from megazero.data.mock import MockSamples
from megazero.data.samples import RemainingSamples, Samples
from megazero.data.storage import Access
from megazero.data.tokenizers import FILES, Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import CheckpointError, ConfigError, DataError, Problem, raise_problems
from megazero.rules.files import DATA_PATH, DEFAULT_SPLIT, span_of_samples, weight_of


@dataclass(frozen=True)
class RunInputs:
    """The samples of the splits that are read (None for the others), and figures of their text.

    eod: end-of-document id, None if it is unknown.
    bytes_per_token: the mean over a held-out split's text; a split is missing if it is unknown.
    unended: corpora that were made without an end-of-document token after every document.
    masked: corpora of which answers alone count in the loss.
    """

    train: Samples
    valid: Samples | None
    test: Samples | None
    vocab_size: int
    eod: int | None
    bytes_per_token: Mapping[str, float]
    unended: tuple[str, ...] = ()
    masked: tuple[str, ...] = ()


def open_inputs(data: DataConfig, model: ModelConfig, *, seed: int, evaluates: bool) -> RunInputs:
    """Open the configured corpora, or make mock samples.  Raises DataError with all problems."""
    tokenizer = tokenizer_spec(data)
    inputs = _mock_inputs(model, tokenizer, seed) if data.mock_data else _corpus_inputs(data, model, seed, evaluates)
    skipped = [span for span in map(span_of_samples, data.data_skip_samples) if span]
    return replace(inputs, train=RemainingSamples(inputs.train, skipped)) if skipped else inputs


def _corpus_inputs(data: DataConfig, model: ModelConfig, seed: int, evaluates: bool) -> RunInputs:
    tokenizer = tokenizer_spec(data)
    corpora = _open_corpora(data)
    # Loaded first: a file that is no tokenizer's is reported as that, and not as another tokenizer than the corpus's.
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    vocab_size = _vocab_size(data, model, corpora, loaded)
    eod = None if loaded is None else loaded.eod
    raise_problems(DataError, corpora.vocabulary_problems(vocab_size, tokenizer, eod))
    # A split that is given a share is read, and refused with its counts if the share comes to nothing.
    wanted = {"train": True, "valid": evaluates, "test": evaluates and corpora.is_given("test")}
    found = {
        name: corpora.samples(name, seq_length=model.seq_length, seed=seed, vocab_size=vocab_size)
        for name, is_read in wanted.items()
        if is_read
    }
    eod = corpora.eod if eod is None else eod
    ratios = {name: corpora.split_bytes_per_token(name) for name in found if name != "train"}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return RunInputs(
        found["train"],
        found.get("valid"),
        found.get("test"),
        vocab_size,
        eod,
        known,
        unended=corpora.unended,
        masked=corpora.masked,
    )


def _open_corpora(data: DataConfig) -> Corpora:
    access = Access(maps=data.mmap_bin_files, index_folder=data.data_cache_path)
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
    words = (*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path)
    return tokenizer_of_corpora(word for word in words if weight_of(word) is None)


def tokenizer_of_run(data: DataConfig, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer that `find_tokenizer` finds, for a model of vocab_size ids.

    Raises ConfigError if there is none, CheckpointError if its vocabulary is larger than the model's.
    """
    spec = find_tokenizer(data)
    if spec is None:
        paths = ", ".join(data.data_path or data.train_data_path)
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
    rule = "the size of the vocabulary is told by a flag, a tokenizer, or the corpus's .json"
    paths = " ".join(data.data_path) or " ".join(data.train_data_path)
    flag = DATA_PATH if data.data_path else own_flag("train")
    raise DataError(Problem(f"{flag} {paths}", rule, "--vocab-size N, --tokenizer-type ..."))


def _mock_inputs(model: ModelConfig, tokenizer: TokenizerSpec | None, seed: int) -> RunInputs:
    known = load_tokenizer(tokenizer) if tokenizer else None
    vocab_size = model.vocab_size or (known.vocab_size if known else 0)
    if not vocab_size:
        raise DataError(Problem("--mock-data", "made-up tokens are drawn from a vocabulary", "--vocab-size 50257"))
    train, valid, test = (MockSamples(vocab_size, model.seq_length, seed + stream) for stream in range(3))
    return RunInputs(train, valid, test, vocab_size, known.eod if known else None, {})
