"""Tests of a run's inputs: the source of the vocabulary size, the splits that are opened, and conflicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.configs import make_data
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import write_corpus, write_gpt2_files

from megazero.config.model import ModelConfig
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError
from megazero.train.start.inputs import RunInputs, open_inputs, tokenizer_spec

# 20 documents of 30 tokens below 200; by their sidecar made from bytes: a token is one byte of text, eod none.
DOCUMENTS = [[[(7 * document + token) % 200 for token in range(30)]] for document in range(20)]
SIDECAR = byte_sidecar(documents=20, tokens=600, text_bytes=600)


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """Write a corpus without a sidecar."""
    return write_corpus(tmp_path / "plain", DOCUMENTS)


@pytest.fixture
def described(tmp_path: Path) -> str:
    """Write the same corpus with a sidecar."""
    prefix = write_corpus(tmp_path / "described", DOCUMENTS)
    write_sidecar(prefix, SIDECAR)
    return prefix


def model(vocab_size: int | None = None) -> ModelConfig:
    return ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=10, vocab_size=vocab_size)


def opened(vocab_size: int | None = None, *, evaluates: bool = False, seed: int = 5, **data: Any) -> RunInputs:
    return open_inputs(make_data(**data), model(vocab_size), seed=seed, evaluates=evaluates)


def gpt2_files(folder: Path) -> dict[str, Path]:
    vocab, merges = write_gpt2_files(folder, [("a", "b")])
    return {"vocab_file": Path(vocab), "merge_file": Path(merges)}


# --- the source of the vocabulary -------------------------------------------------------------------------------------


def test_a_flag_counts_most(described: str) -> None:
    assert opened(1000, data_path=(described,)).vocab_size == 1000
    assert opened(1000, data_path=(described,), tokenizer_type="ByteTokenizer").vocab_size == 1000


def test_then_the_corpus_then_the_tokenizer(described: str, plain: str, tmp_path: Path) -> None:
    assert opened(data_path=(described,)).vocab_size == 257
    assert opened(data_path=(plain,), tokenizer_type="ByteTokenizer").vocab_size == 257
    files = gpt2_files(tmp_path)
    assert opened(data_path=(plain,), tokenizer_type="GPT2BPETokenizer", **files).vocab_size == 256 + 1 + 1


def test_nobody_tells(plain: str) -> None:
    with pytest.raises(DataError, match="told by a flag, a tokenizer, or the corpus") as caught:
        opened(data_path=(plain,))
    assert plain in caught.value.problems[0].given
    with pytest.raises(DataError, match="--mock-data"):
        opened(mock_data=True)


def test_who_tells_the_end_of_a_document(described: str, plain: str, tmp_path: Path) -> None:
    assert opened(data_path=(described,)).eod == 256
    assert opened(300, data_path=(plain,)).eod is None
    assert opened(300, data_path=(plain,), tokenizer_type="ByteTokenizer").eod == 256
    assert opened(300, data_path=(plain,), tokenizer_type="GPT2BPETokenizer", **gpt2_files(tmp_path)).eod == 257
    assert opened(300, mock_data=True).eod is None


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_model_smaller_than_the_corpuss_vocabulary(described: str) -> None:
    with pytest.raises(DataError, match="made with a vocabulary of 257; --vocab-size is 256"):
        opened(256, data_path=(described,))


def test_another_tokenizer_and_too_small_a_model_are_told_together(described: str, tmp_path: Path) -> None:
    files = gpt2_files(tmp_path)
    with pytest.raises(DataError) as caught:
        opened(100, data_path=(described,), tokenizer_type="GPT2BPETokenizer", **files)
    assert len(caught.value.problems) == 2
    assert "not GPT2BPETokenizer" in caught.value.problems[1].rule


def test_the_corpuss_own_tokenizer_fits(described: str) -> None:
    assert opened(data_path=(described,), tokenizer_type="ByteTokenizer").vocab_size == 257


def test_corpora_that_are_not_there_are_all_told(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        opened(10, data_path=(str(tmp_path / "one"), str(tmp_path / "two")))
    given = " ".join(problem.given for problem in caught.value.problems)
    assert str(tmp_path / "one") in given and str(tmp_path / "two") in given


def test_a_token_outside_the_vocabulary_is_found_when_it_is_read(plain: str) -> None:
    samples = opened(150, data_path=(plain,), split="1").train
    with pytest.raises(DataError, match="below the vocabulary size 150"):
        for k in range(59):
            samples.sample(k)


# --- splits -----------------------------------------------------------------------------------------------------------


def test_only_what_is_read_is_opened(described: str) -> None:
    quiet = opened(data_path=(described,), split="8,1,1")
    assert quiet.valid is None and quiet.test is None and quiet.bytes_per_token == {}
    loud = opened(data_path=(described,), split="8,1,1", evaluates=True)
    assert loud.valid is not None and loud.test is not None


def test_a_test_share_is_optional(described: str) -> None:
    inputs = opened(data_path=(described,), split="9,1,0", evaluates=True)
    assert inputs.valid is not None and inputs.test is None
    assert set(inputs.bytes_per_token) == {"valid"}


def test_an_empty_validation_split_matters_only_when_it_is_read(described: str) -> None:
    opened(data_path=(described,), split="1")
    with pytest.raises(DataError, match="valid has no sample"):
        opened(data_path=(described,), split="1", evaluates=True)


def test_the_default_split_is_called_the_default(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", DOCUMENTS[:2])
    with pytest.raises(DataError, match=r"--split 969,30,1 \(the default\): valid has no sample"):
        opened(data_path=(prefix,), vocab_size=257, evaluates=True)


def test_a_corpus_of_one_document_is_refused_with_what_helps(tmp_path: Path) -> None:
    """No share of a split helps there."""
    prefix = write_corpus(tmp_path / "c", [[[1] * 1000]])
    with pytest.raises(DataError, match="of 1 sequence: train 1, valid 0, test 0") as caught:
        opened(data_path=(prefix,), vocab_size=257, evaluates=True, split="949,50,1")
    (problem,) = caught.value.problems
    assert "deals out whole documents" in problem.rule
    for way in ("--text-rule blocks", "--split-documents", "--valid-data-path"):
        assert way in problem.legal


def test_a_file_that_is_no_tokenizers_is_reported_before_the_corpus(described: str, tmp_path: Path) -> None:
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(DataError) as caught:
        opened(
            data_path=(described,),
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=tmp_path / "text.model",
        )
    (problem,) = caught.value.problems
    assert problem.given.startswith(f"--tokenizer-model {tmp_path}/text.model: ")
    assert problem.rule == "the file is a SentencePiece model" and "train-tokenizer" in problem.legal


def test_splits_hold_their_own_documents(described: str) -> None:
    """Every sample of a split is a piece of the text of that split's own documents, which are all different."""
    inputs = opened(data_path=(described,), split="10,5,5", evaluates=True)
    places = {"train": (0, 10), "valid": (10, 15), "test": (15, 20)}
    for name, (first, last) in places.items():
        row = np.concatenate([np.array(DOCUMENTS[document][0]) for document in range(first, last)])
        pieces = {tuple(row[start : start + 11]) for start in range(0, len(row) - 10, 10)}
        samples = getattr(inputs, name)
        count = (len(row) - 1) // 10
        assert {tuple(samples.sample(k)) for k in range(count)} == pieces


def test_bytes_per_token_of_held_out_splits(plain: str, described: str) -> None:
    """Bytes per token are a mean over a split's tokens; here token 0, 1 of 30 in some documents, has no byte."""
    table = [0, *SIDECAR.token_bytes[1:]]
    write_sidecar(described, replace(SIDECAR, token_bytes=table))
    inputs = opened(data_path=(described,), split="10,5,5", evaluates=True)
    for name, documents in (("valid", DOCUMENTS[10:15]), ("test", DOCUMENTS[15:])):
        tokens = [token for document in documents for token in document[0]]
        assert inputs.bytes_per_token[name] == pytest.approx(sum(table[token] for token in tokens) / len(tokens))
    assert opened(300, data_path=(plain,), split="10,5,5", evaluates=True).bytes_per_token == {}


# --- corpora of the splits' own ---------------------------------------------------------------------------------------


def test_own_corpora_are_opened_whole_and_read_where_asked(described: str, plain: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [[[150 + token for token in range(40)]]])
    inputs = opened(train_data_path=(described,), valid_data_path=(plain,), test_data_path=(other,), evaluates=True)
    assert inputs.valid is not None and inputs.test is not None
    assert (inputs.vocab_size, inputs.eod, inputs.bytes_per_token) == (257, 256, {})
    row = np.concatenate([np.array(document[0]) for document in DOCUMENTS])
    pieces = sorted(tuple(row[start : start + 11]) for start in range(0, 590, 10))
    for samples in (inputs.train, inputs.valid):
        assert sorted(tuple(samples.sample(k)) for k in range(59)) == pieces
    assert sorted(int(inputs.test.sample(k)[0]) for k in range(3)) == [150, 160, 170]
    assert opened(train_data_path=(described,), valid_data_path=(described,), evaluates=True).test is None


def test_own_corpora_tell_bits_per_byte(described: str) -> None:
    inputs = opened(train_data_path=(described,), valid_data_path=(described,), evaluates=True)
    assert inputs.bytes_per_token == {"valid": 1.0}


def test_own_corpora_are_checked_even_where_they_are_not_read(described: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.idx"):
        opened(train_data_path=(described,), valid_data_path=(str(tmp_path / "none"),))
    with pytest.raises(DataError, match=r"--train-data-path .*plain"):
        opened(train_data_path=(write_corpus(tmp_path / "plain", DOCUMENTS),))


# --- how and what is read ---------------------------------------------------------------------------------------------


def test_skipped_samples_are_those_of_training(described: str) -> None:
    whole = opened(data_path=(described,), split="1,1,1", evaluates=True)
    rest = opened(data_path=(described,), split="1,1,1", evaluates=True, data_skip_samples=("1-2", "5-5"))
    for k, number in enumerate((0, 3, 4, 6, 7)):
        assert rest.train.sample(k).tolist() == whole.train.sample(number).tolist()
    assert whole.valid is not None and rest.valid is not None
    assert [rest.valid.sample(k).tolist() for k in range(9)] == [whole.valid.sample(k).tolist() for k in range(9)]
    made_up, less = opened(50, mock_data=True).train, opened(50, mock_data=True, data_skip_samples=("0-9",)).train
    assert less.sample(0).tolist() == made_up.sample(10).tolist()


def test_maps_and_stores_give_the_same(described: str, tmp_path: Path) -> None:
    def tokens(**data: Any) -> list[list[int]]:
        inputs = opened(split="1", **data)
        assert (inputs.vocab_size, inputs.eod) == (257, 256)
        return [inputs.train.sample(k).tolist() for k in range(70)]

    mapped = tokens(data_path=(described,))
    assert tokens(data_path=(described,), mmap_bin_files=False) == mapped
    assert tokens(data_path=(f"file://{described}",), data_cache_path=tmp_path / "cache") == mapped
    assert [*(tmp_path / "cache").glob("described-*.idx")]


# --- made-up samples --------------------------------------------------------------------------------------------------


def test_made_up_samples_have_three_streams() -> None:
    inputs = opened(50, mock_data=True, evaluates=True)
    assert inputs.valid is not None and inputs.test is not None
    firsts = [[int(samples.sample(k)[0]) for k in range(20)] for samples in (inputs.train, inputs.valid, inputs.test)]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]
    assert all(samples.seq_length == 10 for samples in (inputs.train, inputs.valid, inputs.test))
    assert (inputs.vocab_size, inputs.bytes_per_token) == (50, {})


def test_made_up_samples_take_a_tokenizers_vocabulary() -> None:
    inputs = opened(mock_data=True, tokenizer_type="ByteTokenizer")
    assert (inputs.vocab_size, inputs.eod) == (257, 256)


def test_the_seed_changes_the_order(described: str) -> None:
    sources = [opened(data_path=(described,), seed=seed).train for seed in (5, 6)]
    orders = [[tuple(source.sample(k)) for k in range(5)] for source in sources]
    assert orders[0] != orders[1]


# --- the tokenizer's description --------------------------------------------------------------------------------------


def test_tokenizer_of_a_configuration() -> None:
    assert tokenizer_spec(make_data()) is None
    assert tokenizer_spec(make_data(tokenizer_type="ByteTokenizer")) == TokenizerSpec("ByteTokenizer")
    spec = tokenizer_spec(make_data(tokenizer_type="GPT2BPETokenizer", vocab_file="v.json", merge_file="m.txt"))
    assert spec == TokenizerSpec("GPT2BPETokenizer", vocab_file="v.json", merge_file="m.txt")
    spec = tokenizer_spec(make_data(tokenizer_type="SentencePieceTokenizer", tokenizer_model=Path("t.model")))
    assert spec == TokenizerSpec("SentencePieceTokenizer", tokenizer_model="t.model")
