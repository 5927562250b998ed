"""Chunks change no document, compression changes no cut, and all shards together are the whole input."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each
from support.input_files import chunks_of, packed, small_chunks, texts_of

from megazero.prepare.text.chunks import DocumentRules, LineBlock, LineRange, Records, Shard, find_chunks, rule_problems
from megazero.prepare.text.documents import read_documents
from megazero.prepare.text.inputs import JSON, PARQUET, TEXT, InputFile, find_inputs

ENDINGS = ("", ".gz", ".zst")
LINES, FILE, BLOCKS = (DocumentRules(text_rule=rule) for rule in ("lines", "file", "blocks"))


def separated(separator: str) -> DocumentRules:
    return DocumentRules(text_rule="separator", separator=separator)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def in_every_packing(folder: Path, name: str, content: bytes, cuts: list[int]) -> list[Path]:
    cuts = [min(cut, len(content)) for cut in cuts]
    return [write(folder / (name + ending), packed(content, ending, cuts)) for ending in ENDINGS]


@settings(max_examples=60)
@given(
    pieces=st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b" ", b"word", "é".encode(), b"x" * 40]), max_size=40),
    chunk_bytes=st.integers(1, 100),
    read_bytes=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 300), max_size=3),
)
def test_lines_and_files_depend_on_neither_chunks_nor_packing(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], chunk_bytes: int, read_bytes: int, cuts: list[int]
) -> None:
    content = b"".join(pieces)
    expected = [(line.rstrip(b"\r").decode(),) for line in content.split(b"\n") if line.strip()]
    for path in in_every_packing(tmp_path_factory.mktemp("t"), "a.txt", content, cuts):
        with small_chunks(chunk_bytes, read_bytes):
            assert texts_of(path, rules=LINES) == expected
            assert texts_of(path, rules=FILE) == ([(content.decode(),)] if content else [])


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 90), max_size=12),
    ends=st.booleans(),
    chunk_bytes=st.integers(1, 100),
    read_bytes=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 300), max_size=3),
)
def test_packed_files_are_cut_where_plain_ones_are(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    ends: bool,
    chunk_bytes: int,
    read_bytes: int,
    cuts: list[int],
) -> None:
    """Chunks of compressed and plain files have the same ends, so that the blocks of text within them are equal too."""
    content = b"\n".join(b"%d" % (n % 10) * length for n, length in enumerate(lengths)) + b"\n" * ends
    plain, *others = in_every_packing(tmp_path_factory.mktemp("t"), "a.txt", content, cuts)
    with small_chunks(chunk_bytes, read_bytes):
        ranges = chunks_of(plain, rules=BLOCKS)
        assert [chunk.start for chunk in ranges if isinstance(chunk, LineRange)] == [
            *range(0, len(content), chunk_bytes)
        ]
        assert sum(chunk.input_bytes for chunk in ranges) == len(content)
        expected = [list(read_documents(chunk, BLOCKS)) for chunk in ranges]
        for path in others:
            blocks = chunks_of(path, rules=BLOCKS)
            assert [list(read_documents(chunk, BLOCKS)) for chunk in blocks] == [found for found in expected if found]
            assert b"".join(chunk.data for chunk in blocks if isinstance(chunk, LineBlock)) == content
            assert sum(chunk.input_bytes for chunk in blocks) <= path.stat().st_size


def test_blocks_of_packed_text_are_those_of_plain_text(tmp_path: Path) -> None:
    """Blocks of compressed text equal those of plain text, here with the default chunk and read sizes."""
    content = b"".join(b"paragraph %d\n" % number * 30 + b"\n" for number in range(4000))
    plain, *others = in_every_packing(tmp_path, "a.txt", content, [100_000, 1 << 20])
    expected = texts_of(plain, rules=BLOCKS)
    assert "".join(text for (text,) in expected) == content.decode() and len(expected) > 250
    assert all(texts_of(path, rules=BLOCKS) == expected for path in others)


def documents_between(content: bytes, separator: bytes) -> list[tuple[str, ...]]:
    """Return the documents found by trying the separator at every position and continuing after each match."""
    found, begin, place = [], 0, 0
    while place < len(content):
        if content[place : place + len(separator)] == separator:
            found.append(content[begin:place])
            begin = place = place + len(separator)
        else:
            place += 1
    found.append(content[begin:])
    return [(text.decode(),) for text in found if text.strip()]


@settings(max_examples=50)
@given(
    content=st.text(st.sampled_from("aab\n\r é|"), max_size=60),
    separator=st.sampled_from(["aa", "aab", "\n\n", "\n", "\r\n", "é", "|é|", "a\na", "b" * 9]),
    chunk_bytes=st.integers(1, 100),
    read_bytes=st.integers(1, 20),
)
def test_separators_that_overlap_or_lie_between_two_blocks(
    tmp_path_factory: pytest.TempPathFactory, content: str, separator: str, chunk_bytes: int, read_bytes: int
) -> None:
    expected = documents_between(content.encode(), separator.encode())
    for path in in_every_packing(tmp_path_factory.mktemp("t"), "a.txt", content.encode(), [7]):
        with small_chunks(chunk_bytes, read_bytes):
            assert texts_of(path, rules=separated(separator)) == expected


def test_what_lies_between_separators(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "||one\r\n||  \n|| two|||three é||".encode())
    assert texts_of(path, rules=separated("||")) == [("one\r\n",), (" two",), ("|three é",)]
    assert texts_of(path, rules=separated("\r\n")) == [("||one",), ("||  \n|| two|||three é||",)]
    assert texts_of(write(tmp_path / "b.txt", b"aaaaa"), rules=separated("aa")) == [("a",)]
    assert texts_of(write(tmp_path / "c.txt", b""), rules=separated("aa")) == []


def test_separators_alone_fill_no_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"||" * 10_000)
    with small_chunks(1000, 1000):
        chunks = chunks_of(path, rules=separated("||"))
    assert max(len(chunk.rows) for chunk in chunks if isinstance(chunk, Records)) == 500
    assert sum(chunk.input_bytes for chunk in chunks) == 20_000


def test_a_document_of_many_blocks_is_searched_once(tmp_path: Path) -> None:
    """A document of many blocks is searched once: searching it again with every block would scan 50 GB."""
    path = write(tmp_path / "a.txt.zst", packed(b"ab" * (8 << 20) + b"||x", ".zst"))
    sizes = [len(text) for (text,) in texts_of(path, rules=separated("||"))]
    assert sizes == [16 << 20, 1]


def test_a_file_is_one_document_however_long(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"0123456\n" * 10)
    with small_chunks(8):
        assert [chunk.input_bytes for chunk in chunks_of(path, rules=FILE)] == [80]
        assert len(chunks_of(path, rules=LINES)) == 10


def test_an_empty_file_has_no_chunk(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", b"")
    write(tmp_path / "a.jsonl", b"")
    for path in in_every_packing(tmp_path, "b.jsonl", b"", []):
        assert chunks_of(path, rules=DocumentRules()) == []
    assert chunks_of(tmp_path / "a.txt", tmp_path / "a.jsonl", rules=FILE) == []


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return paths of plain, compressed and tiny files and of tables; some, among them the last one, are empty."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path_factory.mktemp("mixed")

    def lines(name: str, count: int) -> bytes:
        return b"".join(b'{"text": "%s %d"}\n' % (name.encode(), number) for number in range(count))

    def table(name: str, count: int) -> Path:
        texts = pyarrow.array([f"{name} {number}" for number in range(count)], pyarrow.string())
        parquet.write_table(pyarrow.table({"text": texts}), folder / name, row_group_size=5)
        return folder / name

    return [
        write(folder / "empty.jsonl", b""),
        write(folder / "a.jsonl", lines("a", 70)),
        write(folder / "b.jsonl.gz", packed(lines("b", 40), ".gz")),
        table("c.parquet", 20),
        write(folder / "d.jsonl", lines("d", 1)),
        write(folder / "e.jsonl.zst", packed(b"", ".zst")),
        table("f.parquet", 0),
        write(folder / "g.txt", b"g one\n\ng two\n"),
        write(folder / "h.jsonl", lines("h", 300)),
        write(folder / "i.txt.zst", packed(b"i one\ni two\n" * 9, ".zst")),
        write(folder / "j.jsonl", b""),
    ]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("rules", [LINES, BLOCKS, FILE, separated("\n")], ids=lambda rules: rules.text_rule)
def test_shards_one_after_the_other_are_the_whole(mixed: list[Path], num_shards: int, rules: DocumentRules) -> None:
    whole = texts_of(*mixed, rules=rules)
    assert len(whole) > 400
    for chunk_bytes in (50, 1000, 1 << 20):
        with small_chunks(chunk_bytes):
            expected = whole if rules is not BLOCKS else texts_of(*mixed, rules=rules)
            shards = [texts_of(*mixed, rules=rules, shard=Shard(n, num_shards)) for n in range(num_shards)]
        assert [text for shard in shards for text in shard] == expected
        assert num_shards == 1 or max(map(len, shards)) < len(whole)


@each("sizes", [[], [0], [0, 0], [5], [0, 5], [5, 0, 0], [1, 1, 1], [0, 0, 100, 3, 0]])
def test_every_file_belongs_to_one_shard(sizes: list[int]) -> None:
    """Each file belongs to exactly one shard, even one of unknown size, such as a pipe, at any place."""
    total = sum(sizes)
    for count in range(1, 10):
        for number in range(len(sizes)):
            place = sum(sizes[:number])
            assert sum(Shard(index, count).owns(place, total) for index in range(count)) == 1


def test_shards_of_one_long_file_are_of_one_size() -> None:
    file = InputFile("a.jsonl", JSON, size=1000 << 20)
    sizes = [len(list(find_chunks([file], DocumentRules(), Shard(n, 7)))) for n in range(7)]
    assert sum(sizes) == 1000 and max(sizes) - min(sizes) <= 1


def test_chunks_of_a_packed_file_take_the_memory_of_one(tmp_path: Path) -> None:
    line = b'{"text": "%s"}\n' % (b"x" * 1000)
    path = write(tmp_path / "a.jsonl.gz", packed(line * 30_000, ".gz"))
    files = find_inputs([str(path)])
    tracemalloc.start()
    sizes = [len(chunk.data) for chunk in find_chunks(files, DocumentRules()) if isinstance(chunk, LineBlock)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) == len(line) * 30_000 and peak < 8 << 20


def test_rules_that_do_not_go_together_are_told_together() -> None:
    files = [InputFile("a.jsonl", JSON), InputFile("b.txt", TEXT), InputFile("c.parquet", PARQUET)]
    assert rule_problems(files, DocumentRules()) == [] == rule_problems(files, separated("x"))
    assert rule_problems([files[0], files[2]], DocumentRules(("a", "b"))) == []
    found = rule_problems(files, DocumentRules(("a", "b", "a"), "lines", "x"))
    assert [problem.given for problem in found] == [
        "--json-keys a b a",
        "--input b.txt with --json-keys a b a",
        "--text-rule lines with --separator",
    ]
    assert found[0].legal == "--json-keys a b"
    (without,) = rule_problems(files, DocumentRules(text_rule="separator"))
    assert without.given == "--text-rule separator without --separator"
