"""Checkpoints carry the identity of their run, and only revisions of the same run are replaced."""

import json
import os
from pathlib import Path

import pytest
from support.saved_runs import ONE, OTHER, save_for

from megazero.checkpoint.folders import MANIFEST, list_steps
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.runs import RUN_FILE, RunIdentity, name_of, new_run, read_run, run_of, write_run


def test_a_run_is_found_in_its_checkpoints_and_in_their_root(tmp_path: Path) -> None:
    folder = save_for(tmp_path, 3, ONE)
    assert run_of(folder) == read_run(tmp_path) == ONE
    assert RunIdentity.from_json(open_checkpoint(folder).progress["run"]) == ONE
    assert name_of(ONE) == "run 00000000000000a1 (started 2026-01-02 03:04:05 UTC on node1)"
    assert run_of(save_for(tmp_path / "earlier", 3, None)) is None and read_run(tmp_path / "earlier") is None


def test_runs_have_ids_of_their_own(tmp_path: Path) -> None:
    runs = [new_run() for _ in range(9)]
    assert len({run.id for run in runs}) == 9
    write_run(tmp_path, runs[0])
    assert read_run(tmp_path) == runs[0]


def test_a_revision_replaces_the_same_runs_only(tmp_path: Path) -> None:
    save_for(tmp_path, 4, OTHER)
    save_for(tmp_path, 4, ONE)
    save_for(tmp_path, 4, ONE)
    save_for(tmp_path, 4, None)
    assert [run_of(each.path) for each in list_steps(tmp_path)] == [OTHER, ONE, None]
    assert len({each.revision for each in list_steps(tmp_path)}) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'{"id": "00000000000000a1"}',
        b'{"id": "../../x", "started": "", "host": ""}',
        b'{"id": "00000000000000a1", "started": "now", "host": "a\\u001b[2Jb"}',
        b'{"id": 1, "started": "", "host": ""}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_names_no_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / RUN_FILE).write_bytes(content)
    (tmp_path / MANIFEST).write_bytes(b'{"sha256":"","progress":{"run":' + content)
    assert read_run(tmp_path) is None and run_of(tmp_path) is None


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RUN_FILE)
    os.symlink("/dev/zero", tmp_path / MANIFEST)
    assert read_run(tmp_path) is None and run_of(tmp_path) is None


def test_a_long_manifest_is_not_read_whole(tmp_path: Path) -> None:
    """The run stands at a manifest's beginning, so a table of tensors that is cut off does not hide it."""
    text = json.dumps({"sha256": "", "progress": {"run": ONE.to_json()}, "tensors": ["x" * 80] * 2000})
    (tmp_path / MANIFEST).write_text(text[: 1 << 17])
    assert run_of(tmp_path) == ONE
