"""Files that are written aside appear whole or not at all, and files of others are read within bounds."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.each import each

from megazero.errors import DataError
from megazero.files import MAX_JSON_DEPTH, AsideFile, parse_json, read_bounded, written_aside


def test_written_aside_replaces_the_file_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a" / "file"
    with written_aside(path) as stream:
        stream.write(b"first")
    with written_aside(path) as stream:
        stream.write(b"second")
        assert path.read_bytes() == b"first"
    assert path.read_bytes() == b"second"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_failing_block_leaves_the_old_file_and_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyError), written_aside(path) as stream:
        stream.write(b"half")
        raise KeyError("planted")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match="must be writable"):
        AsideFile(tmp_path / "file" / "below")


def test_a_folder_under_the_name_is_a_data_error(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    aside = AsideFile(tmp_path / "file")
    with pytest.raises(DataError, match="must be writable"):
        aside.publish()
    aside.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_discard_after_publish_keeps_the_file(tmp_path: Path) -> None:
    aside = AsideFile(tmp_path / "file")
    aside.stream.write(b"x")
    aside.publish()
    aside.discard()
    assert (tmp_path / "file").read_bytes() == b"x"


# --- what others have written ----------------------------------------------------------------------------------------


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10 << 30)


def linked_outside(path: Path) -> None:
    (path.parent.parent / "outside").write_text("{}")
    path.symlink_to("../outside")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (fifo, "not a regular file"),
        (device, "not a regular file"),
        (sparse, "larger than 1.0 MiB"),
        (linked_outside, "leads out of the folder"),
        (loop, "symbolic links"),
        (Path.mkdir, "directory"),
    ],
)
def test_a_reader_ends_soon_whatever_lies_there(tmp_path: Path, make: Callable[[Path], None], rule: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder / "file")
    inside = folder if make is linked_outside else None
    with pytest.raises(OSError, match=rule):
        read_bounded(folder / "file", 1 << 20, inside=inside)


def test_a_link_within_the_folder_and_a_file_of_the_limit_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    (tmp_path / "link").symlink_to("file")
    assert len(read_bounded(tmp_path / "link", 1 << 20, inside=tmp_path)) == 1 << 20


@each(
    "text",
    [
        b"",
        b"\xff\xfe",
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[" * 100 + "]" * 100,
        "9" * 5000,
    ],
    ids=["empty", "no text", "open", "arrays", "objects", "100 levels", "5,000 digits"],
)
def test_json_of_strangers_is_a_value_or_a_value_error(text: bytes | str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_json_of_bounded_depth_is_read() -> None:
    deepest = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert str(parse_json(deepest)) == deepest
    assert parse_json(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
