"""Tests of the contestants in the benchmark of preprocessing: turns of real commands and the comparison of outputs."""

import json
import sys
from pathlib import Path

import contestants
import pytest
from contestants import OTHER_INDEX, OTHER_TOKENS, SAME, Contestant, Files, Measured, line_up, name_gpt2
from corpus_text import Text
from support.token_files import write_gpt2_files

WRITER = """
import argparse, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from support.token_files import write_corpus
parser = argparse.ArgumentParser()
parser.add_argument("--input", type=Path)
parser.add_argument("--output-prefix")
parser.add_argument("--append-eod", action="store_true")
given = parser.parse_args()
assert given.append_eod
documents = [[list(line)] for line in given.input.read_bytes().splitlines()]
write_corpus(Path(given.output_prefix + "_text_document"), documents)
"""


def files(folder: Path, megatron: Path | None = None) -> Files:
    def text(name: str, number: int) -> Text:
        path = folder / name
        path.write_text("".join(json.dumps({"text": f"word {one}"}) + "\n" for one in range(number)))
        return Text(path, number, path.stat().st_size)

    vocab, merges = write_gpt2_files(folder, [("w", "o")])
    parts = (text("text.jsonl", 9), text("part.jsonl", 4), text("one.jsonl", 1))
    return Files(folder, *parts, Path(vocab), Path(merges), {"bpe": folder / "m.model"}, megatron)


def test_a_turn_counts_compares_and_leaves_nothing(tmp_path: Path) -> None:
    found = files(tmp_path)
    program = tmp_path / "writer.py"
    program.write_text(WRITER.format(tests=str(Path(__file__).parents[1])))
    before = sorted(tmp_path.iterdir())
    contestant = Contestant("a", "text", [sys.executable, str(program)], found.text, found)
    contestant.start()
    contestant.turn()
    assert contestant.first is not None and contestant.first.cpu > 0
    [turn] = contestant.turns
    assert turn.tokens == sum(map(len, found.text.path.read_bytes().splitlines())) and turn.documents == 9
    assert len(turn.digests) == 2 and turn.peak > 1 << 20 and sorted(tmp_path.iterdir()) == before


def test_one_that_prints_its_own_seconds(tmp_path: Path) -> None:
    found = files(tmp_path)
    program = 'print(\'words\'); print(\'{"cpu": 2.0, "wall": 3.0, "tokens": 5}\')'
    contestant = Contestant("a", "text", [sys.executable, "-S", "-c", program], found.text, found, writes=False)
    contestant.start()
    contestant.turn()
    assert contestant.first is None and contestant.turns[0][:2] == (2.0, 3.0)


def test_what_came_out_beside_megazeros() -> None:
    base = Measured(1.0, 1.0, 1, 100, 10, ("bin", "idx"))
    assert base.beside(base) == SAME
    assert base._replace(digests=("bin", "else")).beside(base) == OTHER_INDEX
    assert base._replace(digests=("else", "idx")).beside(base) == OTHER_TOKENS
    assert base._replace(digests=(), tokens=90).beside(base) == SAME  # without ends of documents
    assert base._replace(digests=(), tokens=100).beside(base) == OTHER_TOKENS


def test_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: name != "tiktoken")
    tools = tmp_path / "megatron" / "tools"
    tools.mkdir(parents=True)
    (tools / "preprocess_data.py").touch()
    found = line_up(files(tmp_path, tmp_path / "megatron"), 4)
    assert [one.name for one in found] == [
        "megazero, 1 worker",
        "megazero, 2 workers",
        "megazero, 4 workers",
        "gigatoken alone",
        "gigatoken alone, read",
        "megazero, front",
        "tokenizers alone",
        "Megatron-LM",
        "megazero, SentencePiece BPE",
        "Megatron-LM, SentencePiece BPE",
    ]
    assert [one.kind for one in found if one.is_base] == ["text", "part", "bpe"]
    assert {one.environment.get("PYTHONPATH") for one in found} == {None, str(tmp_path / "megatron")}
    assert "Megatron-LM" not in " ".join(one.name for one in line_up(files(tmp_path), 1))


def test_a_folder_that_megatron_finds(tmp_path: Path) -> None:
    given = files(tmp_path)
    name_gpt2(tmp_path, given.vocab_file, given.merge_file)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "gpt2"))
    assert tokenizer("wo<|endoftext|>").input_ids == [256, 257] and tokenizer.eos_token_id == 257
