"""Tests the corpora of a run: opening them, splits, vocabulary and mixtures."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import count_up, write_corpus

from megazero.config.corpora import CorpusGroup, read_group
from megazero.data.corpora import Corpora
from megazero.data.sidecar import loss_mask_prefix
from megazero.data.storage import Access
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError

SIDECAR = byte_sidecar(documents=100, tokens=1000, text_bytes=3000, token_bytes=[2] * 100 + [4] * 156 + [0])
DOCUMENTS = count_up(1000, 100)
SHAPE = {"seq_length": 4, "seed": 1, "vocab_size": 5000}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "a", DOCUMENTS)


def inputs(corpora: Corpora, split: str, count: int) -> list[int]:
    samples = corpora.samples(split, **SHAPE)
    return sorted(token for k in range(count) for token in samples.sample(k)[:-1].tolist())


def test_splits_share_no_token(prefix: str) -> None:
    corpora = Corpora([prefix], split="80,15,5")
    assert inputs(corpora, "train", 199) == list(range(796))
    assert inputs(corpora, "valid", 37) == list(range(800, 948))
    assert inputs(corpora, "test", 12) == list(range(950, 998))


def test_an_empty_split_is_refused_with_counts_and_a_legal_one(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", count_up(1900, 190))
    corpora = Corpora([prefix], split="97,3")
    assert corpora.samples("train", **SHAPE).seq_length == 4
    with pytest.raises(DataError) as caught:
        corpora.samples("test", **SHAPE)
    (problem,) = caught.value.problems
    assert "of 190 sequences: train 184, valid 6, test 0" in problem.given
    legal = problem.legal.rsplit(" ", 1)[-1]
    for split in ("train", "valid", "test"):
        assert Corpora([prefix], split=legal).samples(split, **SHAPE)
        assert Corpora([prefix], split="969,30,1").samples(split, **SHAPE), "a document each, whatever the share"


def test_a_split_too_short_for_a_sample_is_refused(prefix: str) -> None:
    with pytest.raises(DataError, match="a sample takes 2001 tokens"):
        Corpora([prefix], split="1").samples("train", seq_length=2000, seed=1, vocab_size=5000)


def test_the_problems_of_all_corpora_come_together(prefix: str, tmp_path: Path) -> None:
    Path(f"{prefix}.bin").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        Corpora([prefix, str(tmp_path / "none")], split="1")
    assert len(caught.value.problems) == 2


def test_mixtures_follow_weights_or_sizes(prefix: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "b", [[[3000 + token for token in range(500)]]])

    def shares(*data_path: str) -> Counter[bool]:
        samples = Corpora(data_path, split="1").samples("train", **SHAPE)
        return Counter(bool(samples.sample(k)[0] >= 3000) for k in range(400))

    assert shares("0.25", prefix, "0.75", other) == {False: 100, True: 300}
    assert abs(shares(prefix, other)[True] - 400 * 124 / (124 + 249)) <= 1


def test_sidecars_tell_vocabulary_and_bytes(prefix: str) -> None:
    assert Corpora([prefix], split="1").vocab_size is None
    assert Corpora([prefix], split="1").bytes_per_token is None
    assert Corpora([prefix], split="1").split_bytes_per_token("train") is None
    write_sidecar(prefix, SIDECAR)
    corpora = Corpora([prefix], split="1")
    assert (corpora.vocab_size, corpora.eod, corpora.bytes_per_token) == (257, 256, 3.0)
    assert corpora.vocabulary_problems(257, TokenizerSpec("ByteTokenizer"), 256) == []
    (problem,) = corpora.vocabulary_problems(257, TokenizerSpec("ByteTokenizer"), 10)
    assert "made with 256 as the end of a document; the tokenizer ends one with 10" in problem.given


def test_bytes_per_token_are_those_of_the_split(prefix: str, tmp_path: Path) -> None:
    """Tokens 0 to 99 stand for 2 bytes, tokens 100 to 255 for 4, and all others for none, as the last id of the sidecar
    does.
    """
    write_sidecar(prefix, SIDECAR)
    corpora = Corpora([prefix], split="5,10,85")
    assert corpora.split_bytes_per_token("train") == 2.0
    assert corpora.split_bytes_per_token("valid") == (50 * 2 + 50 * 4) / 100
    assert corpora.split_bytes_per_token("test") == (106 * 4) / 850
    assert Corpora([prefix], split="1").split_bytes_per_token("valid") is None
    other = write_corpus(tmp_path / "b", [[[0] * 10]] * 100)
    write_sidecar(other, SIDECAR)
    assert Corpora(["1", prefix, "3", other], split="1").split_bytes_per_token("train") == pytest.approx(
        (0.824 * 1 + 2 * 3) / 4
    )


def test_a_wrong_vocabulary_and_a_wrong_tokenizer_are_found_early(prefix: str) -> None:
    write_sidecar(prefix, replace(SIDECAR, tokenizer_type="SentencePieceTokenizer", tokenizer_files={"a": "b" * 64}))
    corpora = Corpora([prefix], split="1")
    problems = corpora.vocabulary_problems(256, TokenizerSpec("ByteTokenizer"))
    assert len(problems) == 2
    assert "made with a vocabulary of 257; --vocab-size is 256" in problems[0].given
    assert "not ByteTokenizer" in problems[1].rule


def test_corpora_of_two_tokenizers_do_not_mix(prefix: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "b", count_up(1000, 100))
    write_sidecar(prefix, SIDECAR)
    write_sidecar(other, SIDECAR)
    assert Corpora([prefix, other], split="1").vocab_size == 257
    write_sidecar(other, replace(SIDECAR, tokenizer_files={"tokenizer_model": "c" * 64}))
    with pytest.raises(DataError, match="made with one tokenizer"):
        Corpora([prefix, other], split="1")


def test_description(prefix: str) -> None:
    (line,) = Corpora([prefix], split="8,1,1").describe()
    assert line == f"{prefix}: 100 documents, 1000 tokens; sequences train 80, valid 10, test 10"


# --- splits with corpora of their own ---------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> dict[str, list[str]]:
    """Return prefixes by split: two corpora of 400 and 200 tokens to train, one of 100 tokens from 1000 on to validate,
    none to test (each has one more token, the last label).
    """
    first = write_corpus(tmp_path / "first", count_up(401, 3))
    second = write_corpus(tmp_path / "second", [[[500 + token for token in range(201)]]])
    held_out = write_corpus(tmp_path / "held_out", [[[1000 + token for token in range(101)]]])
    return {"train": [first, second], "valid": [held_out], "test": []}


def test_a_group_reads_its_parts(prefix: str) -> None:
    """Parts are cut at whole sequences, here of 10 tokens, as Python rounds."""
    groups = {"train": [_group("t: 1 0:0.5 " + prefix)], "valid": [_group(f"v: 1 0.5:0.745 {prefix}")]}
    corpora = Corpora(groups=groups)
    assert [each.name for each in corpora.held_out()] == ["valid v"]
    assert inputs(corpora, "train", 124) == list(range(496))
    assert inputs(corpora, "valid v", 59) == list(range(500, 736))
    (line,) = corpora.describe()
    assert line.endswith("sequences train 50, valid v 24")


def _group(text: str) -> CorpusGroup:
    found = read_group(text)
    assert isinstance(found, CorpusGroup)
    return found


def test_own_corpora_are_used_whole(own: dict[str, list[str]]) -> None:
    corpora = Corpora(own_paths=own)
    assert [each.name for each in corpora.held_out()] == ["valid"]
    assert inputs(corpora, "train", 150) == [*range(400), *range(500, 700)]
    assert inputs(corpora, "valid", 25) == [*range(1000, 1100)]
    assert corpora.describe() == [
        f"{own['train'][0]}: 3 documents, 401 tokens; sequences train 3",
        f"{own['train'][1]}: 1 document, 201 tokens; sequences train 1",
        f"{own['valid'][0]}: 1 document, 101 tokens; sequences valid 1",
    ]


def test_one_corpus_for_two_splits_is_read_in_two_orders(own: dict[str, list[str]]) -> None:
    corpora = Corpora(own_paths={"train": own["train"], "valid": own["train"][:1]})
    firsts = [int(corpora.samples("valid", **SHAPE).sample(k)[0]) for k in range(100)]
    train = Corpora(own_paths={"train": own["train"][:1]}).samples("train", **SHAPE)
    assert sorted(firsts) == [*range(0, 400, 4)]
    assert sum(int(train.sample(k)[0]) == first for k, first in enumerate(firsts)) < 10


def test_own_corpora_bring_vocabulary_and_bytes(own: dict[str, list[str]]) -> None:
    counts = {own["train"][0]: (3, 401), own["train"][1]: (1, 201), own["valid"][0]: (1, 101)}
    for prefix, (documents, tokens) in counts.items():
        write_sidecar(prefix, replace(SIDECAR, documents=documents, sequences=documents, tokens=tokens))
    corpora = Corpora(own_paths=own)
    assert (corpora.vocab_size, corpora.eod) == (257, 256)
    # Tokens of 256 and more have 0 bytes, like the token that ends a document.
    assert corpora.split_bytes_per_token("train") == pytest.approx((200 + 4 * 156) / 401 * 401 / 602)
    assert corpora.split_bytes_per_token("valid") == 0.0
    assert [problem.given for problem in corpora.vocabulary_problems(100)] == [
        f"{prefix}: made with a vocabulary of 257; --vocab-size is 100" for prefix in counts
    ]
    write_sidecar(own["valid"][0], replace(SIDECAR, documents=1, sequences=1, tokens=101, tokenizer_files={"a": "b"}))
    with pytest.raises(DataError, match="made with one tokenizer"):
        Corpora(own_paths=own)


def test_the_problems_of_all_own_corpora_come_together(own: dict[str, list[str]], tmp_path: Path) -> None:
    Path(f"{own['train'][1]}.bin").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        Corpora(own_paths={**own, "test": [str(tmp_path / "none")]})
    assert len(caught.value.problems) == 2


def test_an_own_corpus_too_short_for_a_sample_is_refused_with_its_flag(own: dict[str, list[str]]) -> None:
    with pytest.raises(DataError, match=r"--valid-data-path: .*held_out: 1 sequence with 101 tokens"):
        Corpora(own_paths=own).samples("valid", seq_length=200, seed=1, vocab_size=5000)


def test_a_prefix_named_twice_is_opened_once_and_counts_twice(prefix: str) -> None:
    corpora = Corpora(["1", prefix, "1", prefix], split="1")
    assert len(corpora.describe()) == 1
    firsts = [int(corpora.samples("train", **SHAPE).sample(k)[0]) for k in range(498)]
    assert Counter(Counter(firsts).values()) == {2: 249}
    assert firsts[0::2] != firsts[1::2]


@pytest.mark.parametrize("maps", [True, False])
def test_the_way_of_reading_changes_nothing(prefix: str, maps: bool) -> None:
    assert inputs(Corpora([prefix], split="80,15,5", access=Access(maps=maps)), "valid", 37) == list(range(800, 948))


def test_a_mask_tells_which_tokens_are_learnt(prefix: str, tmp_path: Path) -> None:
    lengths = [len(sequence) for document in DOCUMENTS for sequence in document]
    masked = [[[int(token % 3 == 0) for token in range(length)]] for length in lengths]
    assert sum(lengths) == 1000
    with pytest.raises(DataError, match="loss_mask") as caught:
        Corpora([prefix], split="1", masks="on")
    assert "--answer-loss-mask off" in str(caught.value)
    plain = Corpora([prefix], split="1").samples("train", **SHAPE)
    assert plain.loss_mask(0) is None and Corpora([prefix], split="1").masked == ()
    write_corpus(Path(loss_mask_prefix(prefix)), masked, code=1)
    assert Corpora([prefix], split="1").masked == (), "no sidecar tells of it"
    write_sidecar(prefix, replace(SIDECAR, loss_mask=True))
    corpora = Corpora([prefix], split="1")
    assert corpora.masked == (prefix,) and Corpora([prefix], split="1", masks="off").masked == ()
    source, flat = corpora.samples("train", **SHAPE), np.concatenate([part for doc in masked for part in doc])
    for k in range(50):
        mask, start = source.loss_mask(k), int(source.sample(k)[0])
        assert mask is not None and mask.tolist() == flat[start : start + len(mask)].tolist()
        assert source.sample(k).tolist() == plain.sample(k).tolist()


def test_masks_that_fit_no_corpus_are_refused(prefix: str) -> None:
    write_sidecar(prefix, replace(SIDECAR, loss_mask=True))
    with pytest.raises(DataError, match="must be a file"):
        Corpora([prefix], split="1")
    write_corpus(Path(loss_mask_prefix(prefix)), [[[0, 1, 1]]], code=1)
    with pytest.raises(DataError, match="a byte for every token"):
        Corpora([prefix], split="1")
    write_corpus(Path(loss_mask_prefix(prefix)), [[[2] * len(part) for part in doc] for doc in DOCUMENTS], code=1)
    with pytest.raises(DataError, match="document 2, position 3: 2"):
        Corpora([prefix], split="5,10,85").samples("train", **{**SHAPE, "seq_length": 23}).loss_mask(0)
