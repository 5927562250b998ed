"""Tests of the benchmark of encoding alone: libraries give the same number of tokens; reading counts if asked for."""

import json
import time
from pathlib import Path

import encoders
import pytest
from encoders import END, LIBRARIES, main, rate, train
from support.token_files import byte_symbols

TEXTS = [f"def function_{number}(x):\n    return 'é' + {number}\n" for number in range(60)]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("bpe")
    text = folder / "t.jsonl"
    text.write_text("".join(json.dumps({"text": one}) + "\n" for one in [*TEXTS, f"a{END} b", "don't  stop"]))
    return text, *train(text, 400, folder)


def test_a_bpe_of_its_own(bpe: tuple[Path, Path, Path]) -> None:
    vocabulary = json.loads(bpe[1].read_text())
    assert vocabulary[END] == len(vocabulary) - 1 > 300
    assert set(byte_symbols().values()) < set(vocabulary)


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_agree(library: str, bpe: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(library)
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer(BPE.from_file(str(bpe[1]), str(bpe[2])))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    expected = sum(len(tokenizer.encode(json.loads(line)["text"]).ids) for line in bpe[0].read_text().splitlines())
    words = [library, "--input", str(bpe[0]), "--vocab-file", str(bpe[1]), "--merge-file", str(bpe[2])]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tokens"] == expected and said["cpu"] > 0 and said["wall"] > 0


def test_reading_counts_only_when_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(text: Path) -> object:
        for number in range(3):
            time.sleep(0.05)
            yield ["x"] * number

    monkeypatch.setattr(encoders, "blocks", slow)
    alone, read = (rate(len, tmp_path, count_reading=given) for given in (False, True))
    assert alone["tokens"] == read["tokens"] == 3 and alone["wall"] < 0.1 < 0.15 <= read["wall"]
