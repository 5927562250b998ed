"""The corpus, its split and its tokenizer."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


def _one_is_a_list(value: Any) -> Any:
    """In YAML a single corpus may stand without brackets."""
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where tokens come from; which sample is the k-th depends on the seed and k alone."""

    data_path: Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)] = setting(
        (), help="prefix of a .bin/.idx pair, or a mixture: WEIGHT PREFIX WEIGHT PREFIX ..."
    )
    split: str | None = setting(
        None,
        help="shares of training, validation and test documents of --data-path; 969,30,1 where it is left out",
        unit="any common unit",
    )
    train_data_path: Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)] = setting(
        (), help="a corpus for training alone, used whole, instead of --data-path; takes what --data-path takes"
    )
    valid_data_path: Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)] = setting(
        (), help="the same for evaluation, beside --train-data-path"
    )
    test_data_path: Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)] = setting(
        (), help="the same for the evaluation on test data, beside --train-data-path"
    )
    data_skip_samples: Annotated[tuple[str, ...], BeforeValidator(_one_is_a_list)] = setting(
        (), help="spans A-B of training samples that are passed over, A and B included, counted from 0"
    )
    mmap_bin_files: bool = setting(True, help="map token files into memory; off: read them by system calls")
    data_cache_path: Path | None = setting(
        None, help="folder for the indexes of corpora in object stores (s3://...); without it the user's cache folder"
    )
    mock_data: bool = setting(False, help="train on made-up tokens instead of a corpus; for timings")
    tokenizer_type: Literal["GPT2BPETokenizer", "SentencePieceTokenizer", "ByteTokenizer"] | None = setting(
        None, help="tokenizer that made the corpus; without it, what the corpus's own description says"
    )
    tokenizer_model: Path | None = setting(None, help="SentencePieceTokenizer: model file")
    vocab_file: Path | None = setting(None, help="GPT2BPETokenizer: vocab.json")
    merge_file: Path | None = setting(None, help="GPT2BPETokenizer: merges.txt")
    num_workers: int = setting(
        2, help="steps whose batches are read ahead in the background; 0 reads them when needed", unit="steps", ge=0
    )
    eod_mask_loss: bool = setting(False, help="leave positions that hold the end-of-document token out of the loss")
    reset_position_ids: bool = setting(
        False, help="count positions from 0 in every document of a sample, not from the sample's first token"
    )
    reset_attention_mask: bool = setting(
        False,
        help="attend within documents only; costs a mask of micro_batch_size x seq_length^2 elements of --precision for"
        " every micro-batch in flight, and the kernels that take none (--attention-backend flash)",
    )
