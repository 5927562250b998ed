"""Tests of a run's inputs: the source of the vocabulary size, the splits that are opened, and conflicts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.configs import make_data
from support.hugging_face_files import write_hugging_face_files
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
    with pytest.raises(DataError, match="comes from a flag, a tokenizer, or the corpus") as caught:
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
    assert dict(quiet.held_out) == {} and quiet.valid is None
    loud = opened(data_path=(described,), split="8,1,1", evaluates=True)
    assert [(name, each.split, each.group) for name, each in loud.held_out.items()] == [
        ("valid", "validation", ""),
        ("test", "test", ""),
    ]


def test_a_test_share_is_optional(described: str) -> None:
    inputs = opened(data_path=(described,), split="9,1,0", evaluates=True)
    assert [*inputs.held_out] == ["valid"] and inputs.held_out["valid"].bytes_per_token is not None


def test_a_split_without_a_share_for_validation_evaluates_nothing_and_says_so(described: str) -> None:
    inputs = opened(data_path=(described,), split="100,0,0", evaluates=True)
    assert dict(inputs.held_out) == {} and inputs.valid is None
    assert inputs.notices == ("validation is not evaluated: --split 100,0,0 has no share for it",)
    assert opened(data_path=(described,), split="100,0,0").notices == ()


def test_a_corpus_of_one_document_trains_and_the_notices_say_what_helps(tmp_path: Path) -> None:
    """No share of a split helps there."""
    prefix = write_corpus(tmp_path / "c", [[[1] * 1000]])
    inputs = opened(data_path=(prefix,), vocab_size=257, evaluates=True)
    assert inputs.train.sample(98).tolist() == [1] * 11 and dict(inputs.held_out) == {}
    for notice, split in zip(inputs.notices, ("validation", "test"), strict=True):
        assert notice.startswith(f"{split} is not evaluated: --split 969,30,1 (the default): ")
        assert "of 1 sequence: train 1, valid 0, test 0" in notice
        for way in ("--text-rule blocks", "--split-documents", "--valid-data-path"):
            assert way in notice


def test_a_split_too_small_for_its_test_part_goes_on_with_a_notice(tmp_path: Path) -> None:
    """The third document is the test's, and too short for a sample; beside another corpus it is left out."""
    prefix = write_corpus(tmp_path / "c", [[[1] * 100], [[2] * 50], [[3] * 10]])
    inputs = opened(data_path=(prefix,), vocab_size=257, evaluates=True, split="1,1,1")
    assert [*inputs.held_out] == ["valid"] and inputs.held_out["valid"].samples.sample(0)[0] == 2
    (notice,) = inputs.notices
    assert (
        "test is not evaluated: --split 1,1,1: test has no sample; of 3 sequences: train 1, valid 1, test 1" in notice
    )
    assert "1 sequence with 10 tokens" in notice and "a sample takes 11 tokens" in notice
    longer = write_corpus(tmp_path / "d", [[[document] * 30] for document in range(3)])
    both = opened(data_path=(prefix, longer), vocab_size=257, evaluates=True, split="1,1,1")
    assert [both.held_out["test"].samples.sample(k)[0] for k in range(4)] == [2] * 4
    assert [notice.partition(":")[0] for notice in both.notices] == ["a corpus is left out of test"]
    with pytest.raises(DataError, match="train has no sample"):
        opened(data_path=(write_corpus(tmp_path / "e", [[[1] * 5]]),), vocab_size=257)


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
        samples = inputs.train if name == "train" else inputs.held_out[name].samples
        count = (len(row) - 1) // 10
        assert {tuple(samples.sample(k)) for k in range(count)} == pieces


def test_bytes_per_token_of_held_out_splits(plain: str, described: str) -> None:
    """Bytes per token are a mean over a split's tokens; here token 0, 1 of 30 in some documents, has no byte."""
    table = [0, *SIDECAR.token_bytes[1:]]
    write_sidecar(described, replace(SIDECAR, token_bytes=table))
    inputs = opened(data_path=(described,), split="10,5,5", evaluates=True)
    for name, documents in (("valid", DOCUMENTS[10:15]), ("test", DOCUMENTS[15:])):
        tokens = [token for document in documents for token in document[0]]
        assert inputs.held_out[name].bytes_per_token == pytest.approx(
            sum(table[token] for token in tokens) / len(tokens)
        )
    unknown = opened(300, data_path=(plain,), split="10,5,5", evaluates=True).held_out
    assert [each.bytes_per_token for each in unknown.values()] == [None, None]


# --- corpora of the splits' own ---------------------------------------------------------------------------------------


def test_own_corpora_are_opened_whole_and_read_where_asked(described: str, plain: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other", [[[150 + token for token in range(40)]]])
    inputs = opened(train_data_path=(described,), valid_data_path=(plain,), test_data_path=(other,), evaluates=True)
    valid, test = (inputs.held_out[name].samples for name in ("valid", "test"))
    assert (inputs.vocab_size, inputs.eod, inputs.held_out["test"].bytes_per_token) == (257, 256, None)
    row = np.concatenate([np.array(document[0]) for document in DOCUMENTS])
    pieces = sorted(tuple(row[start : start + 11]) for start in range(0, 590, 10))
    for samples in (inputs.train, valid):
        assert sorted(tuple(samples.sample(k)) for k in range(59)) == pieces
    assert sorted(int(test.sample(k)[0]) for k in range(3)) == [150, 160, 170]
    assert "test" not in opened(train_data_path=(described,), valid_data_path=(described,), evaluates=True).held_out


def test_own_corpora_tell_bits_per_byte(described: str) -> None:
    inputs = opened(train_data_path=(described,), valid_data_path=(described,), evaluates=True)
    assert inputs.held_out["valid"].bytes_per_token == 1.0


def test_own_corpora_are_checked_even_where_they_are_not_read(described: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.idx"):
        opened(train_data_path=(described,), valid_data_path=(str(tmp_path / "none"),))
    with pytest.raises(DataError, match=r"--train-data-path .*plain"):
        opened(train_data_path=(write_corpus(tmp_path / "plain", DOCUMENTS),))


# --- groups of parts of corpora ---------------------------------------------------------------------------------------


def test_groups_read_their_parts_and_each_is_a_set(described: str, tmp_path: Path) -> None:
    """Parts are cut at sequences; a group's samples are pieces of its parts' text, in the shares of its weights."""
    other = write_corpus(tmp_path / "other", [[[200 + document] * 30] for document in range(40)])
    inputs = opened(
        train_weighted_split_paths=[f"train: 0.25 0:0.5 {described}, 0.75 0:0.93 {other}"],
        valid_weighted_split_paths=[f"both: 1 0.5:0.75 {described}, 1 0.95:1 {other}", f"en: 1 0.5:0.75 {described}"],
        test_weighted_split_paths=[f"last: 1 0.95:1 {described}"],
        evaluates=True,
    )
    assert [(name, each.split, each.group) for name, each in inputs.held_out.items()] == [
        ("valid both", "validation", "both"),
        ("valid en", "validation", "en"),
        ("test last", "test", "last"),
    ]
    assert inputs.valid is inputs.held_out["valid both"].samples and inputs.vocab_size == 257
    rows = [np.concatenate([np.array(document[0]) for document in DOCUMENTS[first:last]]) for first, last in PARTS]
    pieces = [{tuple(row[start : start + 11]) for start in range(0, len(row) - 10, 10)} for row in rows]
    train = [tuple(inputs.train.sample(k)) for k in range(4 * 29)]
    ours = [sample for sample in train if sample[0] < 200]
    assert len(ours) == 29 and {*ours} == pieces[0]
    assert {token for sample in train if sample[0] >= 200 for token in sample} <= {*range(200, 237)}
    for name, expected in (("valid en", pieces[1]), ("test last", pieces[2])):
        samples = inputs.held_out[name].samples
        assert {tuple(samples.sample(k)) for k in range(len(expected))} == expected
    assert inputs.held_out["valid en"].bytes_per_token == 1.0 and inputs.held_out["valid both"].bytes_per_token is None
    both = inputs.held_out["valid both"].samples
    assert sorted(int(both.sample(k)[0] >= 238) for k in range(10)) == [0] * 5 + [1] * 5


PARTS = ((0, 10), (10, 15), (19, 20))


def test_a_part_without_a_sample_is_refused_by_its_group(described: str) -> None:
    train = {"train_weighted_split_paths": [f"t: 1 0:1 {described}"]}
    with pytest.raises(DataError) as caught:
        opened(**train, valid_weighted_split_paths=[f"v: 1 0.99:1 {described}"], evaluates=True)
    (problem,) = caught.value.problems
    assert problem.given.startswith(f"--valid-weighted-split-paths v, 0.99:1 of 20: {described}: 0 sequences")
    quiet = opened(**train, valid_weighted_split_paths=[f"v: 1 0.99:1 {described}"])
    assert dict(quiet.held_out) == {}


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


def test_rearranged_samples_are_of_the_same_text(tmp_path: Path) -> None:
    """Samples of training and of held-out text are rearranged, by the tokenizer of the flags, as a function of k."""
    (tmp_path / "tokenizer").mkdir()
    made = write_hugging_face_files(tmp_path / "tokenizer", "byte-level")
    prefix = write_corpus(tmp_path / "text", [[[*made.encode("the thing is in the bag " * 4).ids, 2]]] * 30)
    settings = {
        **{"data_path": (prefix,), "split": "8,1,1", "tokenizer_type": "HuggingFaceTokenizer", "evaluates": True},
        **{"tokenizer_model": tmp_path / "tokenizer", "fim_data": True, "fim_rate": 1.0, "fim_pad_token": "<unk>"},
        **{"fim_prefix_token": "<s>", "fim_middle_token": "<extra>", "fim_suffix_token": "the"},
    }
    inputs, plain = opened(**settings), opened(**{**settings, "fim_data": False})
    for rearranged, whole in ((inputs.train, plain.train), (inputs.held_out["valid"].samples, plain.valid)):
        assert whole is not None
        rows = [rearranged.sample(k).tolist() for k in range(8)]
        assert rows == [rearranged.sample(k).tolist() for k in range(8)]
        assert all(len(row) == 11 for row in rows) and sum(1 in row for row in rows) == 8
        assert rows != [whole.sample(k).tolist() for k in range(8)]
    assert inputs.held_out["valid"].bytes_per_token is None
    with pytest.raises(DataError) as caught:
        opened(**{**settings, "fim_middle_token": "<mid>", "fim_split_sample": "<file>"})
    flags = [f"--fim-data with --fim-{name}" for name in ("middle-token <mid>", "split-sample <file>")]
    assert [problem.given for problem in caught.value.problems] == flags
    with pytest.raises(DataError, match="--fim-data"):
        opened(300, data_path=(prefix,), fim_data=True)


# --- made-up samples --------------------------------------------------------------------------------------------------


def test_made_up_samples_have_three_streams() -> None:
    inputs = opened(50, mock_data=True, evaluates=True)
    three = [inputs.train, *(each.samples for each in inputs.held_out.values())]
    firsts = [[int(samples.sample(k)[0]) for k in range(20)] for samples in three]
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0]
    assert all(samples.seq_length == 10 for samples in three) and inputs.vocab_size == 50


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
