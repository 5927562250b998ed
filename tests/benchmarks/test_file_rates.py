"""Tests of the benchmark of files of model states, at a small size."""

import os
from pathlib import Path

import pytest
import torch
from file_rates import PlainFile, Rates, main

from megazero.memory.block_file import AlignedMemory
from megazero.memory.ledger_interface import NullLedger


def test_the_ratio_is_that_of_single_turns() -> None:
    found = Rates([2e9, 1e9, 8e9], [4e9, 1e9, 2e9])
    assert found.ratio == 1.0
    assert found.cells() == ["2.000", "2.000", "1.00"]


def test_a_plain_file_is_written_and_read_whole(tmp_path: Path) -> None:
    pool = AlignedMemory(is_pinned=False, ledger=NullLedger())
    memory = pool.lease(70_000).random_()
    expected = memory.clone()
    file = PlainFile(tmp_path, memory.nbytes, block_bytes=8192, num_threads=3)
    file.write(memory)
    file.read(memory.zero_())
    file.close()
    assert torch.equal(memory, expected)
    assert os.listdir(tmp_path) == []


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--folder {tmp_path} --mib 1 --queue-depth 1 3 --block-kib 64 --turns 2 --output {tmp_path}/page.md"
    assert main(words.split()) == 0
    page = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out == page
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows[2:]] == [["1", "64 KiB"], ["3", "64 KiB"]]
    assert all(float(cell) >= 0 for row in rows[2:] for cell in row[2:])
    assert os.listdir(tmp_path) == ["page.md"]
