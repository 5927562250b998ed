"""Rules between settings that name data, tokenizers, checkpoints and reports; `rules.check` tries them.

Of the file system only the existence of named files is asked; what is in them is the readers' matter.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from megazero.config.run import RunConfig
from megazero.errors import Problem


def corpus_is_given_once(config: RunConfig, world_size: int) -> Iterator[Problem]:
    paths, mock = config.data.data_path, config.data.mock_data
    if mock and paths:
        yield Problem(f"--mock-data and --data-path {' '.join(paths)}", "there is one corpus", "one of the two")
    if not mock and not paths:
        yield Problem("neither --data-path nor --mock-data", "a run has a corpus", "--data-path PREFIX, --mock-data")


def mixture_has_weights(config: RunConfig, world_size: int) -> Iterator[Problem]:
    paths = config.data.data_path
    weights = [_number(word) for word in paths[::2]]
    if all(weight is None for weight in weights):  # prefixes alone count by their sizes
        return
    if len(paths) % 2 or any(weight is None or weight <= 0 for weight in weights):
        yield Problem(
            f"--data-path {' '.join(paths)}",
            "a mixture is prefixes, or pairs of a positive weight and a prefix",
            "--data-path PREFIX PREFIX, --data-path 0.7 PREFIX 0.3 PREFIX",
        )


def _number(text: str) -> float | None:
    """A weight such as 0.3 or 1/3; 0 for one that is none (nan, inf, 1/0); None for a word."""
    numerator, slash, denominator = text.partition("/")
    try:
        value = float(numerator) / float(denominator if slash else 1)
    except ValueError:
        return None
    except ZeroDivisionError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def split_shares(split: str) -> tuple[float, float, float] | None:
    """Shares of (training, validation, test) that add up to 1; None when `split` doesn't say any."""
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
    if split_shares(config.data.split) is None:
        yield Problem(
            f"--split {config.data.split}",
            "the split is up to three numbers, not negative and not all 0: training, validation, test",
            "--split 969,30,1",
        )


def split_has_what_is_read(config: RunConfig, world_size: int) -> Iterator[Problem]:
    shares = split_shares(config.data.split)
    if shares is None or config.data.mock_data:
        return
    if not shares[0]:
        yield Problem(f"--split {config.data.split}", "training has a share of the corpus", "--split 969,30,1")
    if not shares[1] and config.training.eval_iters:
        yield Problem(
            f"--split {config.data.split} with --eval-iters {config.training.eval_iters}",
            "evaluation needs a share of the corpus, the split's second number",
            "--split 969,30,1, --eval-iters 0",
        )


def mock_data_has_a_vocabulary(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.data.mock_data and config.model.vocab_size is None and config.data.tokenizer_type is None:
        yield Problem(
            "--mock-data without --vocab-size", "made-up tokens are drawn from a vocabulary", "--vocab-size 50257"
        )


TOKENIZER_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GPT2BPETokenizer", ("vocab_file", "merge_file")),
    ("SentencePieceTokenizer", ("tokenizer_model",)),
    ("ByteTokenizer", ()),
)


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
        if path is not None and not path.is_file():
            yield Problem(f"--{name.replace('_', '-')} {path}", "the file exists", "")


CORPUS_RULES = (
    corpus_is_given_once,
    mixture_has_weights,
    split_is_shares,
    split_has_what_is_read,
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
        if path is not None and path.exists() and not path.is_dir():
            yield Problem(f"{flag} {path}", "this names a folder, but a file is there", f"{flag} {path}-folder")
    metrics = config.logging.metrics_file
    if metrics is not None and metrics.is_dir():
        yield Problem(
            f"--metrics-file {metrics}",
            "this names a file, but a folder is there",
            f"--metrics-file {metrics}/run.jsonl",
        )


def saving_has_a_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.checkpoint.save is None:
        rule = "checkpoints need a folder"
        if config.checkpoint.save_interval is not None:
            yield Problem(f"--save-interval {config.checkpoint.save_interval} without --save", rule, "--save DIR")
        if config.checkpoint.no_save_optim:
            yield Problem("--no-save-optim without --save", rule, "--save DIR")


def loading_has_a_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.checkpoint.load is None:
        asked = {
            "--finetune": config.checkpoint.finetune,
            "--no-load-optim": config.checkpoint.no_load_optim,
            "--use-checkpoint-opt-param-scheduler": config.optimizer.use_checkpoint_opt_param_scheduler,
        }
        for flag in (flag for flag, given in asked.items() if given):
            yield Problem(f"{flag} without --load", "there must be a checkpoint to take from", "--load DIR")


def tensorboard_has_a_folder(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.logging.tensorboard_dir is None:
        asked = {
            "--log-timers-to-tensorboard": config.logging.log_timers_to_tensorboard,
            "--log-validation-ppl-to-tensorboard": config.logging.log_validation_ppl_to_tensorboard,
            "--log-memory-to-tensorboard": config.logging.log_memory_to_tensorboard,
        }
        for flag in (flag for flag, given in asked.items() if given):
            yield Problem(f"{flag} without --tensorboard-dir", "TensorBoard needs a folder", "--tensorboard-dir DIR")
