"""A trained SentencePiece tokenizer encodes without loss, and training it again gives the same file."""

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import DataError
from megazero.prepare.text import documents
from megazero.prepare.tokenizer import tokenizer_training
from megazero.prepare.tokenizer.tokenizer_training import MODEL_TYPES, TokenizerRequest, cut_runs, train_tokenizer
from megazero.prepare.tokenizer.training_text import TrainingText

pytest.importorskip("sentencepiece")

SOURCES = [inspect.getsource(module) for module in (documents, tokenizer_training, inspect, pytest.TempPathFactory)]


def learn(folder: Path, vocab_size: int = 600, model_type: str = "bpe", sources: list[str] = SOURCES) -> Path:
    request = TokenizerRequest(folder / "t.model", vocab_size, model_type)
    train_tokenizer(request, TrainingText(sources, sum(len(text.encode()) for text in sources)))
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


def test_runs_are_whole_lines_without_tabs() -> None:
    text = "\ta line of text\n" * 1000 + "x" * 5000
    runs = list(cut_runs(text))
    assert "".join(runs) == text.replace("\t", "")
    assert max(map(len, runs)) <= 2000


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("vocab_size", [100, 257, 5000])
def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path: Path, vocab_size: int, model_type: str) -> None:
    request = TokenizerRequest(tmp_path / "t.model", vocab_size, model_type)
    with pytest.raises(DataError, match=f"--vocab-size {vocab_size}"):
        train_tokenizer(request, TrainingText(["a few words and no more\n"], 24))
    assert list(tmp_path.iterdir()) == []


def test_the_least_vocabularies() -> None:
    for model_type, least in (("bpe", 259), ("unigram", 259), ("byte-level-bpe", 258)):
        assert TokenizerRequest(Path("nowhere"), least, model_type).problems() == []
        (problem,) = TokenizerRequest(Path("nowhere"), least - 1, model_type).problems()
        assert problem.legal == f"{least} or more"


def test_an_output_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    text = TrainingText(SOURCES, 1)
    with pytest.raises(DataError, match="is a folder, for vocab"):
        train_tokenizer(TokenizerRequest(tmp_path / "file", 300, "byte-level-bpe"), text)
    with pytest.raises(DataError, match="is the model's file"):
        train_tokenizer(TokenizerRequest(tmp_path, 300), text)


def test_a_byte_level_tokenizer_is_a_folder_that_loads(tmp_path: Path) -> None:
    train_tokenizer(TokenizerRequest(tmp_path / "new" / "t", 300, "byte-level-bpe"), TrainingText(SOURCES, 1))
    files = {"vocab_file": str(tmp_path / "new/t/vocab.json"), "merge_file": str(tmp_path / "new/t/merges.txt")}
    tokenizer = load_tokenizer(TokenizerSpec("GPT2BPETokenizer", **files))
    assert (tokenizer.vocab_size, tokenizer.eod) == (300, 299)
