"""Files that are written aside appear whole or not at all."""

from pathlib import Path

import pytest

from megazero.errors import DataError
from megazero.files import AsideFile, written_aside


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
