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
    split: str = setting("969,30,1", help="shares of training, validation and test documents", unit="any common unit")
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
