"""Compressed files are read whole or refused, for any division into members and any size of reads."""

import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.input_files import SKIPPABLE, gzip_member, packed, small_chunks, zstd_frame

from megazero.errors import DataError
from megazero.prepare.text.inputs import JSON, InputFile, find_inputs
from megazero.prepare.text.streams import FileBlock, read_blocks

PACKED = (".gz", ".zst")
NAMES = {".gz": "gzip", ".zst": "zstd"}
TEXT = "".join(f"línea {number * number}\n" for number in range(14)).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def blocks(path: Path) -> list[FileBlock]:
    (file,) = find_inputs([str(path)], JSON)
    return list(read_blocks(file))


def content(path: Path) -> bytes:
    return b"".join(block.data for block in blocks(path))


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        blocks(path)
    (problem,) = caught.value.problems
    assert problem.given == str(path)
    return problem.rule


@settings(max_examples=60)
@given(
    data=st.binary(max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=5),
    ending=st.sampled_from(["", *PACKED]),
    read_bytes=st.integers(1, 64),
)
def test_members_put_together_are_one_content(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int], ending: str, read_bytes: int
) -> None:
    """Concatenated members, even empty ones, give one content; each block holds its position in the compressed file."""
    made = packed(data, ending, [min(cut, len(data)) for cut in cuts])
    path = write(tmp_path_factory.mktemp("m") / f"a{ending}", made)
    with small_chunks(1 << 20, read_bytes):
        found = blocks(path)
    assert b"".join(block.data for block in found) == data
    positions = [block.position for block in found]
    assert positions == sorted(positions) and all(0 < position <= len(made) for position in positions)


@pytest.mark.parametrize("read_bytes", [1, 3, 1 << 20])
def test_frames_that_stand_for_nothing_are_skipped(tmp_path: Path, read_bytes: int) -> None:
    made = SKIPPABLE + zstd_frame(b"ab") + SKIPPABLE * 2 + zstd_frame(b"") + zstd_frame(b"c") + SKIPPABLE
    with small_chunks(1, read_bytes):
        assert content(write(tmp_path / "a.zst", made)) == b"abc"
        assert content(write(tmp_path / "b.zst", SKIPPABLE)) == b""
        assert "middle" in refusal(write(tmp_path / "c.zst", made[:-1]))


@pytest.mark.parametrize("read_bytes", [1, 50, 1 << 20])
def test_zeros_after_a_gzip_member_are_filling(tmp_path: Path, read_bytes: int) -> None:
    """Any number of zeros after a gzip member is padding, even if they cross from one read block into the next."""
    made = gzip_member(b"ab") + bytes(300) + gzip_member(b"c") + bytes(10_000)
    with small_chunks(1, read_bytes):
        assert content(write(tmp_path / "a.gz", made)) == b"abc"
        refusal(write(tmp_path / "b.gz", bytes(300)))
        refusal(write(tmp_path / "c.zst", zstd_frame(b"ab") + bytes(300)))


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("read_bytes", [7, 1 << 20])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, ending: str, read_bytes: int) -> None:
    whole = packed(TEXT, ending, [100])
    boundary = len(packed(TEXT[:100], ending))
    path = tmp_path / f"a{ending}"
    with small_chunks(1 << 20, read_bytes):
        for size in {*range(len(whole))} - {boundary}:
            path.write_bytes(whole[:size])
            assert f"is an undamaged {NAMES[ending]} file: it " in refusal(path), size
        # A file cut at the end of a member is a valid file of fewer members; the cut cannot be detected.
        path.write_bytes(whole[:boundary])
        assert content(path) == TEXT[:100]


@pytest.mark.parametrize("ending", PACKED)
def test_a_changed_byte_is_refused_or_changes_nothing(tmp_path: Path, ending: str) -> None:
    """A changed byte is refused, or leaves the content as it was, as one in a header's name or time does."""
    whole = packed(TEXT, ending)
    path, refused = tmp_path / f"a{ending}", 0
    for place in range(len(whole)):
        for flip in (0x01, 0x80):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ flip]) + whole[place + 1 :])
            try:
                assert content(path) == TEXT, place
            except DataError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused > 1.7 * len(whole)


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("rubbish", [b"rubbish", b"\x1f", b"\n"])
def test_what_follows_a_member_is_a_member(tmp_path: Path, ending: str, rubbish: bytes) -> None:
    refusal(write(tmp_path / f"a{ending}", packed(TEXT, ending) + rubbish))


def test_other_files_are_not_taken_for_compressed_ones(tmp_path: Path) -> None:
    assert "it is empty" in refusal(write(tmp_path / "a.gz", b""))
    assert "it is empty" in refusal(write(tmp_path / "a.zst", b""))
    assert "undamaged gzip" in refusal(write(tmp_path / "b.gz", zstd_frame(TEXT)))
    assert "undamaged zstd" in refusal(write(tmp_path / "b.zst", gzip_member(TEXT)))
    assert "undamaged gzip" in refusal(write(tmp_path / "c.gz", TEXT))
    assert content(write(tmp_path / "c.txt", b"")) == b""


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl[^$]*must be a readable file: No such file"):
        list(read_blocks(InputFile(str(tmp_path / "a.jsonl"), JSON)))


def test_standard_input_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(write(tmp_path / "a", TEXT), encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        with small_chunks(1, 100):
            found = list(read_blocks(InputFile("-", JSON, is_pipe=True)))
    assert b"".join(block.data for block in found) == TEXT and [len(block.data) for block in found][:2] == [100, 40]
    assert found[-1].position == len(TEXT)


@pytest.mark.parametrize("ending", PACKED)
def test_text_that_packs_well_takes_little_memory(tmp_path: Path, ending: str) -> None:
    """Text that compresses a thousandfold (gzip) or ten thousandfold (Zstandard) is never in memory as a whole."""
    size = 64 << 20
    path = write(tmp_path / f"a{ending}", packed(b"a line of text.\n" * (size // 16), ending))
    (file,) = find_inputs([str(path)], JSON)
    tracemalloc.start()
    assert sum(len(block.data) for block in read_blocks(file)) == size
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / {".gz": 10, ".zst": 2}[ending]
