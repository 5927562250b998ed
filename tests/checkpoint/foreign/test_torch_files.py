"""Tests of reading what torch.save writes: the values that torch.load gives, or a message."""

import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each

from megazero.checkpoint.foreign.torch_files import StoredTensor, TorchFile
from megazero.errors import CheckpointError, UserError

BASE = torch.arange(24, dtype=torch.float32)
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def read(path: Path) -> Any:
    return TorchFile(path, inside=path.parent).content


def test_tensors_are_what_torch_loads(tmp_path: Path) -> None:
    marked = torch.ones(3)
    vars(marked)["tensor_model_parallel"] = True  # as Megatron-LM marks its tensors
    value = {
        "plain": BASE,
        "marked": marked,
        "views": [BASE.view(4, 6).T, BASE[3:9], BASE.view(2, 3, 4)[:, 1]],
        "kinds": [torch.arange(-3, 4).abs().to(dtype) for dtype in DTYPES] + [torch.tensor([True, False])],
        "odd": (torch.zeros(0, 3), torch.tensor(2.5)),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = read(saved(tmp_path / "a.pt", value))
    tensors = [found["plain"], found["marked"], *found["views"], *found["kinds"], found["parameter"]]
    expected = [value["plain"], value["marked"], *value["views"], *value["kinds"], value["parameter"].detach()]
    for one, other in zip(tensors, expected, strict=True):
        assert isinstance(one, StoredTensor) and one.dtype == other.dtype
        assert torch.equal(one.read(), other) and one.read().is_contiguous()


def test_a_part_of_a_file(tmp_path: Path) -> None:
    content = b"before" + saved(tmp_path / "a.pt", BASE).read_bytes()
    (tmp_path / "b").write_bytes(content + b"behind")
    found = TorchFile(tmp_path / "b", inside=tmp_path, begin=6, length=len(content) - 6).content
    assert torch.equal(found.read(), BASE)


def rezipped(path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]], *, method: int = 0) -> Path:
    """Write the files within a file of torch.save's anew, changed."""
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in change(content).items():
            archive.writestr(name, data)
    return path


def replaced(path: Path, old: bytes, new: bytes) -> None:
    """Replace bytes that occur once in the pickle, and its checksum."""

    def change(content: dict[str, bytes]) -> dict[str, bytes]:
        (name,) = [name for name in content if name.endswith("data.pkl")]
        assert content[name].count(old) == 1, content[name]
        return {**content, name: content[name].replace(old, new)}

    rezipped(path, change)


def compressed(path: Path) -> None:
    rezipped(path, lambda content: content, method=zipfile.ZIP_DEFLATED)


def without_pickle(path: Path) -> None:
    rezipped(path, lambda content: {name: data for name, data in content.items() if "data.pkl" not in name})


def short_storage(path: Path) -> None:
    rezipped(path, lambda content: {name: data[:8] if "/data/" in name else data for name, data in content.items()})


def far_offset(path: Path) -> None:
    replaced(path, b"QK\x00K\x18", b"QK\x05K\x18")  # offset 5, shape (24,)


def huge_shape(path: Path) -> None:
    replaced(path, b"K\x18\x85q", b"\x8a\x06\0\0\0\0\0\x10\x85q")  # 2^44 elements


def no_stride(path: Path) -> None:
    """Write a shape of 2^44 elements, each of which is the first one."""
    huge_shape(path)
    replaced(path, b"K\x01\x85q", b"K\x00\x85q")


def damaged_number(path: Path) -> None:
    content = path.read_bytes()
    at = content.index(struct.pack("<f", 7.0))
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def in_end(path: Path, offset: int, number: int) -> None:
    """Change a number of 8 bytes in the end of the zip's directory."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\6\6") + offset
    content[at : at + 8] = struct.pack("<Q", number)
    path.write_bytes(content)


def end_far_away(path: Path) -> None:
    in_end(path, 48, 2**62)


def many_entries(path: Path) -> None:
    in_end(path, 32, 2**40)


def overlapping(path: Path) -> None:
    """Let two files of the zip begin at the same place."""
    content = bytearray(path.read_bytes())
    first = content.index(b"PK\1\2")
    second = content.index(b"PK\1\2", first + 4)
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    path.write_bytes(bytes(content))


def older(path: Path) -> None:
    torch.save(BASE, path, _use_new_zipfile_serialization=False)


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


@each(
    ("damage", "message"),
    [
        (compressed, "compressed or encrypted"),
        (without_pickle, "it has one data.pkl"),
        (short_storage, "a storage of 24 elements, which the file hasn't"),
        (far_offset, "each for one place in it"),
        (huge_shape, "each for one place in it"),
        (no_stride, "each for one place in it"),
        (damaged_number, "do not match their checksum"),
        (cut, "truncated, or no zip"),
        (end_far_away, "truncated or damaged"),
        (many_entries, "are read"),
        (overlapping, "overlap|does not begin|is there twice|checksum"),
        (older, "torch before 1.6"),
        (fifo, "not a regular file"),
        (link_out, "leads out of the folder"),
        (lambda path: path.write_bytes(b""), "truncated, or no zip"),
        (lambda path: path.unlink(), "No such file"),
    ],
    ids=lambda case: getattr(case, "__name__", str(case)),
)
def test_damaged_and_hostile_files_end_in_a_message(
    tmp_path_factory: pytest.TempPathFactory, damage: Callable[[Path], None], message: str
) -> None:
    path = saved(tmp_path_factory.mktemp("hostile") / "a.pt", BASE)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        read(path).read()


def test_a_file_that_grows_when_it_is_unpacked_is_not_unpacked(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", BASE)
    zeros = bytes(64 << 20)
    rezipped(path, lambda content: {**content, "archive/data/9": zeros}, method=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read(path)


def test_changed_bytes_anywhere_end_in_a_message(tmp_path: Path) -> None:
    """No byte that is changed makes anything but a user's error."""
    stream = io.BytesIO()
    torch.save({"a": BASE.view(4, 6), "b": [1, "text", (BASE, None)]}, stream)
    sound, generator = stream.getvalue(), random.Random(4)
    path, refused = tmp_path / "a.pt", 0
    for _ in range(600):
        content = bytearray(sound)
        for _ in range(generator.randint(1, 3)):
            content[generator.randrange(len(content))] = generator.randrange(256)
        path.write_bytes(content)
        try:
            found = read(path)
            if isinstance(found, dict) and isinstance(found.get("a"), StoredTensor):
                found["a"].read()
        except UserError:
            refused += 1
    assert refused > 100
