"""The words after --input stand for files, folders, patterns or pipes; all problems with them are reported together."""

import io
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.each import each
from support.input_files import objects_of

from megazero.errors import DataError
from megazero.prepare.text.chunks import DocumentRules
from megazero.prepare.text.inputs import JSON, PARQUET, TEXT, InputFile, file_format, find_inputs, pipe_problems

LINE = b'{"text": "x"}\n'


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(LINE)


def names(folder: Path, *words: str, input_format: str | None = None) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in find_inputs([f"{folder}/{w}" for w in words], input_format)]


def told(*words: object, input_format: str | None = None) -> list[str]:
    with pytest.raises(DataError) as caught:
        find_inputs([str(word) for word in words], input_format)
    return [f"{problem.given}: {problem.rule}" for problem in caught.value.problems]


@each(
    ("name", "expected"),
    [
        ("a.jsonl", (JSON, "")),
        ("a.v2.JSON", (JSON, "")),
        ("a.ndjson.gz", (JSON, "gzip")),
        ("x.d/a.txt.ZST", (TEXT, "zstd")),
        ("a.txt", (TEXT, "")),
        ("a.parquet", (PARQUET, "")),
        ("a.parquet.gz", (PARQUET, "gzip")),
        ("a.gz", (None, "gzip")),
        ("a.jsonl.tar", (None, "")),
        ("x.jsonl/a", (None, "")),
        (".jsonl", (None, "")),
        ("a.", (None, "")),
        ("63", (None, "")),
    ],
)
def test_endings_tell_format_and_compression(name: str, expected: tuple[str | None, str]) -> None:
    assert file_format(name) == expected


def test_a_file_is_looked_at(tmp_path: Path) -> None:
    make(tmp_path, "a.jsonl", "b.txt.gz")
    plain, compressed = find_inputs([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.txt.gz"])
    modified = (tmp_path / "a.jsonl").stat().st_mtime_ns
    assert plain == InputFile(f"{tmp_path}/a.jsonl", JSON, "", len(LINE), modified)
    assert plain.is_seekable and not compressed.is_seekable and compressed.compression == "gzip"
    assert not InputFile("a.parquet", PARQUET).is_seekable and not InputFile("-", JSON, is_pipe=True).is_seekable


def test_a_folder_is_all_files_below_it_by_name(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.txt.gz", "d/e.parquet", "x.jsonl/f.ndjson", "README.md", "d/a.bin", "Z.json")
    make(tmp_path, ".hidden.jsonl", ".cache/a.jsonl", "d/.g.jsonl")
    expected = ["Z.json", "a.txt.gz", "b.jsonl", "d/e.parquet", "x.jsonl/f.ndjson"]
    assert names(tmp_path, "") == names(tmp_path, ".") == expected
    assert names(tmp_path, "x.jsonl", "a.txt.gz") == ["x.jsonl/f.ndjson", "a.txt.gz"]
    # In a folder, files without a known ending are skipped even if a format is given: they may be anything.
    assert names(tmp_path, "", input_format=JSON) == expected


def test_links_are_followed_and_each_folder_entered_once(tmp_path: Path) -> None:
    make(tmp_path, "in/a.jsonl", "out/b.jsonl", "out/deep/c.jsonl")
    (tmp_path / "in/b.jsonl").symlink_to(tmp_path / "out/b.jsonl")
    (tmp_path / "in/linked").symlink_to(tmp_path / "out")
    (tmp_path / "out/loop").symlink_to(tmp_path / "in")
    assert names(tmp_path, "in") == ["in/a.jsonl", "in/b.jsonl", "in/linked/b.jsonl", "in/linked/deep/c.jsonl"]


def test_a_link_to_nothing_is_told_wherever_it_lies(tmp_path: Path) -> None:
    """A dangling link is an error: if it were skipped, part of the corpus would be missing unnoticed."""
    make(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "README").symlink_to(tmp_path / "gone")
    (tmp_path / "c.jsonl").symlink_to("c.jsonl")
    for word in ("", "*.jsonl", "**/*.jsonl"):
        missing, circle = told(f"{tmp_path}/{word}")
        assert "b.jsonl: must be a file: No such file" in missing and "Too many levels" in circle
    assert "b.jsonl: must be a file" in told(tmp_path / "b.jsonl")[0]


def test_patterns(tmp_path: Path) -> None:
    make(tmp_path, "b.jsonl", "a.jsonl", "c.txt", "d/b.jsonl", "d/e/a.jsonl", ".h.jsonl", "x.jsonl/y", "ab.jsonl")
    assert names(tmp_path, "*.jsonl") == ["a.jsonl", "ab.jsonl", "b.jsonl"]
    assert names(tmp_path, "?.*") == ["a.jsonl", "b.jsonl", "c.txt"]
    assert names(tmp_path, "[bc].*") == ["b.jsonl", "c.txt"]
    deep = ["a.jsonl", "ab.jsonl", "b.jsonl", "d/b.jsonl", "d/e/a.jsonl"]
    assert names(tmp_path, "**/*.jsonl") == names(tmp_path, "**/**/*.jsonl") == deep
    assert names(tmp_path, "d/**", "c.txt") == ["d/b.jsonl", "d/e/a.jsonl", "c.txt"]
    assert names(tmp_path, "x.jsonl/*", input_format=TEXT) == ["x.jsonl/y"]
    assert "x.jsonl/y: must have a known ending" in told(f"{tmp_path}/x.jsonl/*")[0]
    assert "q*: the pattern matches some file" in told(f"{tmp_path}/q*")[0]


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    make(tmp_path, "a[1].jsonl", "a1.jsonl", "d[1]/b.jsonl")
    assert names(tmp_path, "a[1].jsonl") == ["a[1].jsonl"]
    assert names(tmp_path, "d[1]") == ["d[1]/b.jsonl"]


def test_all_problems_are_told_together(tmp_path: Path) -> None:
    make(tmp_path, "a.csv", "b", "c.parquet.gz", "fine.jsonl", "nothing/a.md")
    found = told(
        tmp_path / "a.csv", tmp_path / "b", tmp_path / "c.parquet.gz", tmp_path / "fine.jsonl", tmp_path / "nothing",
        tmp_path / "none.jsonl", tmp_path / "x*", "/dev/null", "", "a" * 5000, tmp_path / "fine.jsonl/a.txt",
    )  # fmt: skip
    assert [text.split(": ", 1)[1].split(": ")[0] for text in found] == [
        "must have a known ending",
        "must have a known ending",
        "a table compresses its columns itself",
        "some file in the folder has a known ending",
        "must be a file",
        "the pattern matches some file",
        "must be a file",
        "must be a file",
        "must be a file",
        "must be a file",
    ]
    assert names(tmp_path, "a.csv", "b", input_format=JSON) == ["a.csv", "b"]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run the block as the user `nobody` if the tests run as root, because root may read every file."""
    real, effective, saved = os.getresuid()
    if effective == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(real, effective, saved)


def test_what_may_not_be_read_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:  # all users may enter it, unlike tmp_path
        folder = Path(name)
        folder.chmod(0o755)
        make(folder, "a.jsonl", "closed/b.jsonl")
        (folder / "a.jsonl").chmod(0)
        (folder / "closed").chmod(0)
        with as_nobody():
            found = told(folder)
        (folder / "closed").chmod(0o700)
    assert [text.split(": ")[1] for text in found] == ["must be a readable folder", "must be a readable file"]


def test_text_in_an_object_store_is_fetched_first() -> None:
    assert told("s3://bucket/a.jsonl") == ["--input s3://bucket/a.jsonl: text is read from a disk, or from a pipe"]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINE * 2)))
    assert find_inputs(["-"]) == [InputFile("-", JSON, is_pipe=True)]
    assert find_inputs(["-"], TEXT)[0].format == TEXT
    assert [content["text"] for content in objects_of("-")] == ["x", "x"]
    assert "read from its end" in told("-", input_format=PARQUET)[0]
    assert "read once" in told("-", "-")[0]


def test_standard_input_that_nobody_writes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = os.openpty()
    with os.fdopen(terminal) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert "at a terminal" in told("-")[0]
    os.close(controller)
    monkeypatch.setattr(sys, "stdin", None)
    assert "at a terminal" in told("-")[0]


def test_named_pipes(tmp_path: Path) -> None:
    """A named pipe whose ending gives the format is read like a file, but only once."""
    make(tmp_path, "a.jsonl")
    pipe = tmp_path / "b.jsonl"
    os.mkfifo(pipe)
    (file,) = find_inputs([str(pipe)])
    assert file.is_pipe and not file.is_seekable and file.size == 0
    content = LINE.replace(b'"x"', b'"y"') * 3
    writing = threading.Thread(target=pipe.write_bytes, args=(content,), daemon=True)
    writing.start()
    # The pipe is listed after a file, at the end of the total of known sizes.
    read = [content["text"] for content in objects_of(f"{tmp_path}/a.jsonl", str(pipe))]
    assert read == ["x", "y", "y", "y"]
    writing.join()
    assert "read once" in told(pipe, pipe)[0]
    (tmp_path / "b.jsonl").rename(tmp_path / "b.parquet")
    assert "read from its end" in told(tmp_path / "b.parquet")[0]


def test_substituted_processes() -> None:
    reading, writing = os.pipe()
    os.write(writing, LINE * 2)
    os.close(writing)
    word = f"/dev/fd/{reading}"
    assert "must have a known ending" in told(word)[0]
    rules = DocumentRules(input_format=JSON)
    assert [content["text"] for content in objects_of(word, rules=rules)] == ["x", "x"]
    os.close(reading)


def test_pipes_cannot_be_gone_on_with_or_shared_out() -> None:
    files = [InputFile("a.jsonl", JSON), InputFile("-", JSON, is_pipe=True)]
    assert not pipe_problems(files, resumes=False, num_shards=1) and not pipe_problems(
        files[:1], resumes=True, num_shards=2
    )
    resumed, shared = pipe_problems(files, resumes=True, num_shards=2)
    assert "--resume" in resumed.given and "--num-shards" in shared.given
