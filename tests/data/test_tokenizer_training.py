"""A trained tokenizer loses nothing and is the same every time."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data import documents, tokenizer_training
from megazero.data.documents import DocumentRules
from megazero.data.tokenizer_training import TokenizerRequest, TrainingText, sample_text, train_tokenizer
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import DataError

SOURCES = [inspect.getsource(module) for module in (documents, tokenizer_training, inspect, pytest.TempPathFactory)]


def learn(folder: Path, vocab_size: int = 600, model_type: str = "bpe", sources: list[str] = SOURCES) -> Path:
    path = folder / "code.txt"
    path.write_text("".join(sources), encoding="utf-8")
    request = TokenizerRequest((path,), folder / "t.model", vocab_size, model_type=model_type)
    train_tokenizer(request, sample_text(request.inputs, request.rules, request.max_bytes))
    return request.output


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = learn(tmp_path_factory.mktemp("model"))
    return load_tokenizer(TokenizerSpec("SentencePieceTokenizer", tokenizer_model=str(model)))


def test_source_code_reads_back(tokenizer: Tokenizer) -> None:
    for text in (
        *SOURCES,
        "\n\n\tif x:\r\n\t\ty = '\\t'\n   \n",
        " a",
        "a ",
        "  ",
        "\n",
        "\0",
        "é∀🎉\u00a0\ufeff\u2028",
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=80, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=30))
def test_any_text_reads_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_is_as_asked_and_code_gets_shorter(tokenizer: Tokenizer) -> None:
    text = SOURCES[0]
    assert tokenizer.vocab_size == 600
    assert tokenizer.eod == 1
    assert len(tokenizer.encode(text)) < len(text.encode()) / 1.8
    assert tokenizer.encode("        ") != tokenizer.encode(" ") * 8  # indentation has pieces of its own


def test_unigram_models_read_back_too(tmp_path: Path) -> None:
    model = learn(tmp_path, 400, "unigram", SOURCES[:2])
    tokenizer = load_tokenizer(TokenizerSpec("SentencePieceTokenizer", tokenizer_model=str(model)))
    assert tokenizer.decode(tokenizer.encode(SOURCES[3])) == SOURCES[3]


def test_training_is_deterministic(tmp_path: Path) -> None:
    assert learn(tmp_path, sources=SOURCES[:1]).read_bytes() == learn(tmp_path, sources=SOURCES[:1]).read_bytes()


def test_the_sample_is_taken_from_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 1000)
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number:04d}\n" for number in range(2000)))
    whole = sample_text([path], DocumentRules(), 10**9)
    assert "".join(whole.runs) == path.read_text()
    tenth = sample_text([path], DocumentRules(), 2000)
    assert 2000 <= tenth.num_bytes <= 2100
    thousands = {run[5] for run in tenth.runs}
    assert thousands == {"0", "1"}


def test_runs_are_whole_lines_without_tabs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\ta line of text\n" * 1000 + "x" * 5000)
    runs = sample_text([path], DocumentRules(), 10**9).runs
    assert "".join(runs) == path.read_text().replace("\t", "")
    assert max(map(len, runs)) <= 2000


@pytest.mark.parametrize("vocab_size", [100, 258, 5000])
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path, vocab_size: int) -> None:
    request = TokenizerRequest((), tmp_path / "t.model", vocab_size)
    with pytest.raises(DataError, match=f"--vocab-size {vocab_size}"):
        train_tokenizer(request, TrainingText(["a few words and no more\n"], 24))
    assert list(tmp_path.iterdir()) == []


def test_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match="holds some text"):
        sample_text([tmp_path / "a.txt"], DocumentRules(), 1000)
