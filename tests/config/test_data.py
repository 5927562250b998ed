"""Tests of the data settings: corpora, splits and tokenizers."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.configs import make_run

from megazero.config.run import DataConfig


def test_defaults_are_megatrons() -> None:
    data = DataConfig()
    assert (data.split, data.num_workers, data.data_path, data.tokenizer_type) == (None, 2, (), None)


def test_one_corpus_needs_no_brackets_and_a_number_may_be_a_split() -> None:
    data = make_run(data_path="corpus", split=100, vocab_file="vocab.json").data
    assert (data.data_path, data.split, data.vocab_file) == (("corpus",), "100", Path("vocab.json"))
    own = make_run(train_data_path="a", valid_data_path=["b"], data_skip_samples="3-5").data
    assert (own.train_data_path, own.valid_data_path, own.data_skip_samples) == (("a",), ("b",), ("3-5",))
    assert make_run(data_path=[0.7, "a", "0.3", "b"]).data.data_path == ("0.7", "a", "0.3", "b")


@pytest.mark.parametrize(("name", "value"), [("num_workers", -1), ("tokenizer_type", "BertWordPiece")])
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        DataConfig(**{name: value})
