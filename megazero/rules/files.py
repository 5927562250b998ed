"""Rules between settings that name data, tokenizers, checkpoints and reports; `rules.check` tries them.

The rules check only whether named files exist; the readers of the files check their contents.
"""

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from megazero.config.corpora import FORM, GROUPS, group_problems
from megazero.config.nearest import flags, neighbours
from megazero.config.run import DataConfig, RunConfig
from megazero.config.values import as_span
from megazero.errors import Problem

DATA_PATH = "--data-path"
DEFAULT_SPLIT = "969,30,1"


def corpus_is_given_once(config: RunConfig, world_size: int) -> Iterator[Problem]:
    data = config.data
    given = [(flag, words) for flag, words in (*_paths(data).items(), *_groups(data).items()) if words]
    own = [flag for flag, _ in given if flag in _paths(data) and flag != DATA_PATH]
    groups = [flag for flag, _ in given if flag in _groups(data)]
    cut = [f"{DATA_PATH} {' '.join(data.data_path)}"] if data.data_path else []
    ways = [way for way in (cut, own, groups) if way]
    if data.mock_data and given:
        corpora = " ".join(" ".join((flag, *words)) for flag, words in given)
        yield Problem(f"--mock-data and {corpora}", "there is one corpus", "one of the two")
    if len(ways) > 1:
        yield Problem(
            " and ".join(", ".join(way) for way in ways),
            "one corpus is cut by --split, or every split has one of its own, or groups of parts of corpora",
            ", or ".join(f"{', '.join(way)} alone" for way in ways),
        )
    if not data.mock_data and not given:
        yield Problem(
            "neither --data-path nor --mock-data",
            "a run has a corpus",
            "--data-path PREFIX, --mock-data",
        )


def own_corpora_are_whole(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check that training and, if there is any, validation have corpora where one split has its own."""
    own = {flag: words for flag, words in _paths(config.data).items() if flag != DATA_PATH}
    for paths, form in ((own, "PREFIX"), (_groups(config.data), f"{FORM}")):
        train, valid, _ = paths
        given = [flag for flag, words in paths.items() if words]
        if given and not paths[train]:
            yield Problem(f"{', '.join(given)} without {train}", "training has a corpus too", f"{train} {form}")
        if paths[train] and not paths[valid] and config.training.eval_iters:
            yield Problem(
                f"{train} with --eval-iters {config.training.eval_iters}",
                "evaluation needs a corpus of its own where training has one",
                f"{valid} {form}, --eval-iters 0",
            )


def groups_are_read(config: RunConfig, world_size: int) -> Iterator[Problem]:
    for flag, words in _groups(config.data).items():
        yield from group_problems(flag, words)
    train = config.data.train_weighted_split_paths
    if len(train) > 1:
        flag = next(iter(_groups(config.data)))
        yield Problem(f"{flag} with {len(train)} groups", "training has one group of corpora", f"{flag} {FORM}")


def mixture_has_weights(config: RunConfig, world_size: int) -> Iterator[Problem]:
    for flag, paths in _paths(config.data).items():
        weights = [weight_of(word) for word in paths[::2]]
        if all(weight is None for weight in weights):  # prefixes alone count by their sizes
            continue
        if len(paths) % 2 or any(weight is None or weight <= 0 for weight in weights):
            yield Problem(
                f"{flag} {' '.join(paths)}",
                "a mixture is prefixes, or pairs of a positive weight and a prefix",
                f"{flag} PREFIX PREFIX, {flag} 0.7 PREFIX 0.3 PREFIX",
            )


def _paths(data: DataConfig) -> dict[str, tuple[str, ...]]:
    """Return the values of all flags that name corpora, by flag."""
    return {
        DATA_PATH: data.data_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }


def _groups(data: DataConfig) -> dict[str, tuple[str, ...]]:
    """Return the values of all flags that name groups of corpora, by flag: training's, validation's, the test's."""
    return {f"--{name.replace('_', '-')}": getattr(data, name) for name in GROUPS.values()}


def weight_of(text: str) -> float | None:
    """Return the weight that `text` spells, 0.3 or 1/3; 0 for an invalid number (nan, inf, 1/0), None for a word."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / float(denominator if slash else 1)
    except ValueError:
        return None
    except ZeroDivisionError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def split_shares(split: str) -> tuple[float, float, float] | None:
    """Return the shares of (training, validation, test), which add up to 1; None if `split` is not valid."""
    try:
        weights = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        return None
    if len(weights) > 3 or not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
        return None
    train, valid, test = (*weights, 0.0, 0.0)[:3]
    total = sum(weights)
    return train / total, valid / total, test / total


def split_is_shares(config: RunConfig, world_size: int) -> Iterator[Problem]:
    split = config.data.split
    if split is not None and split_shares(split) is None:
        yield Problem(
            f"--split {split}",
            "the split is up to three numbers, not negative and not all 0: training, validation, test",
            f"--split {DEFAULT_SPLIT}",
        )


def training_has_a_share(config: RunConfig, world_size: int) -> Iterator[Problem]:
    split = config.data.split or DEFAULT_SPLIT
    shares = split_shares(split)
    if shares is None or not config.data.data_path:
        return
    if not shares[0]:
        yield Problem(f"--split {split}", "training has a share of the corpus", f"--split {DEFAULT_SPLIT}")


def skipped_spans_ascend(config: RunConfig, world_size: int) -> Iterator[Problem]:
    rule = "a span of samples is A-B, the first and the last one that are passed over, counted from 0"
    legal = "--data-skip-samples 1200-1327"
    spans = ((word, as_span(word)) for word in config.data.data_skip_samples)
    yield from spans_ascend("--data-skip-samples", spans, "sample", 0, rule, legal)


def spans_ascend(
    flag: str, spans: Iterable[tuple[str, range | None]], what: str, first: int, rule: str, legal: str
) -> Iterator[Problem]:
    """Yield the problems of spans of samples or steps, which `what` names and which are counted from `first`.

    spans: what was given, each with the span that it is, or None.  rule, legal: of what is no span.
    """
    before = first - 1
    for word, span in spans:
        if span is None or span.start < first:
            yield Problem(f"{flag} {word}", rule, legal)
            continue
        if span.start <= before:
            yield Problem(
                f"{flag} {word} after {what} {before}",
                f"spans ascend, and no {what} is in two of them",
                f"spans from {before + 1} on, or this one before the others",
            )
        before = max(before, span.stop - 1)


def fill_in_has_text(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.data.fim_data and config.data.mock_data:
        yield Problem("--fim-data with --mock-data", "made-up tokens are no text", "--data-path PREFIX")


def mock_data_has_a_vocabulary(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.data.mock_data and config.model.vocab_size is None and config.data.tokenizer_type is None:
        yield Problem(
            "--mock-data without --vocab-size", "made-up tokens are drawn from a vocabulary", "--vocab-size 50257"
        )


TOKENIZER_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GPT2BPETokenizer", ("vocab_file", "merge_file")),
    ("SentencePieceTokenizer", ("tokenizer_model",)),
    ("ByteTokenizer", ()),
    ("HuggingFaceTokenizer", ("tokenizer_model",)),
    ("TikTokenizer", ("tokenizer_model",)),
)
JSON_FILE = "tokenizer.json"
SAVE_TRIGGER, EXIT_TRIGGER = "save", "exit"  # files in the folder of --trigger-path


def tokenizer_file(path: Path) -> Path:
    """Return the file that a path to a tokenizer means: in a folder of Hugging Face's, the tokenizer's description."""
    return path / JSON_FILE if path.is_dir() else path


def tokenizer_has_its_files(config: RunConfig, world_size: int) -> Iterator[Problem]:
    files: dict[str, Path | None] = {
        "vocab_file": config.data.vocab_file,
        "merge_file": config.data.merge_file,
        "tokenizer_model": config.data.tokenizer_model,
    }
    needed = dict(TOKENIZER_FILES).get(config.data.tokenizer_type or "", ())
    for name in needed:
        if files[name] is None:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                f"--tokenizer-type {config.data.tokenizer_type} without {flag}",
                "it is read from a file",
                f"{flag} FILE",
            )
    for name, path in files.items():
        if path is not None and not tokenizer_file(path).is_file():
            flag = "--" + name.replace("_", "-")
            legal = f"{flag} FILE; megazero train-tokenizer makes one"
            if config.data.tokenizer_type == "HuggingFaceTokenizer":
                legal = f"{flag} FOLDER with {JSON_FILE} and tokenizer_config.json, downloaded from Hugging Face's hub"
            yield Problem(f"{flag} {path}", "the file exists", legal)


CORPUS_RULES = (
    corpus_is_given_once,
    own_corpora_are_whole,
    mixture_has_weights,
    groups_are_read,
    split_is_shares,
    training_has_a_share,
    skipped_spans_ascend,
    fill_in_has_text,
    mock_data_has_a_vocabulary,
    tokenizer_has_its_files,
)


def folders_are_folders(config: RunConfig, world_size: int) -> Iterator[Problem]:
    folders = {
        "--save": config.checkpoint.save,
        "--load": config.checkpoint.load,
        "--tensorboard-dir": config.logging.tensorboard_dir,
        "--ledger-dir": config.logging.ledger_dir,
        "--pipeline-trace-dir": config.logging.pipeline_trace_dir,
    }
    for flag, path in folders.items():
        if path is not None and (path.exists() or path.is_symlink()) and not path.is_dir():
            there = "a file is there" if path.exists() else "a link that leads nowhere is there"
            yield Problem(f"{flag} {path}", f"this names a folder, but {there}", f"{flag} {path}-folder")
    metrics = config.logging.metrics_file
    if metrics is not None and metrics.is_dir():
        yield Problem(
            f"--metrics-file {metrics}",
            "this names a file, but a folder is there",
            f"--metrics-file {metrics}/run.jsonl",
        )


def no_kill_switch_is_there(config: RunConfig, world_size: int) -> Iterator[Problem]:
    switch, triggers = config.training.kill_switch_path, config.training.trigger_path
    if switch is not None and switch.exists():
        yield Problem(f"--kill-switch-path {switch}", "while this file is there no run starts", f"rm {switch}")
    if triggers is not None and (triggers / EXIT_TRIGGER).exists():
        given, legal = f"--trigger-path {triggers}, with the file {EXIT_TRIGGER}", f"rm {triggers / EXIT_TRIGGER}"
        yield Problem(given, "while this file is there no run starts", legal)


def reports_can_be_written(config: RunConfig, world_size: int) -> Iterator[Problem]:
    logging = config.logging
    folders = {
        "--save": config.checkpoint.save,
        "--tensorboard-dir": logging.tensorboard_dir,
        "--ledger-dir": logging.ledger_dir,
        "--pipeline-trace-dir": logging.pipeline_trace_dir,
        "--metrics-file": logging.metrics_file,
    }
    for flag, path in folders.items():
        if path is None or (os.path.exists(path) and path.is_dir() == (flag == "--metrics-file")):
            continue  # `folders_are_folders` refuses the latter
        there = next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
        if there != path and not there.is_dir():
            rule = f"a folder is made for it, but {there} is a file"
        elif not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
            rule = f"{there} must be writable"
        else:
            continue
        yield Problem(f"{flag} {path}", rule, f"{flag} with another path")


def weights_are_loaded_from_a_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.checkpoint.finetune and config.checkpoint.load is None:
        yield Problem("--finetune without --load", "there must be a checkpoint to take from", "--load DIR")


def kept_steps_are_saved(config: RunConfig, world_size: int) -> Iterator[Problem]:
    every, interval = config.checkpoint.keep_every, config.checkpoint.save_interval
    if every is None or interval is None or every % interval == 0:
        return
    yield Problem(
        f"--keep-every {every} with --save-interval {interval}",
        "what stays is among what is saved: keep_every is a multiple of save_interval",
        flags("--keep-every", neighbours(every, interval)),
    )
