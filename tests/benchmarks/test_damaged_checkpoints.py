"""Tests of the program that resumes damaged runs, and of every kind of damage through the readers alone."""

import json
import random
from pathlib import Path

import pytest
import torch
from damage_table import HARMLESS, KINDS, REFUSED, flip_bit
from damaged_checkpoints import main, passes, verdict
from support.sharded_state import Layout, blank, make_state, write_checkpoint

from megazero.checkpoint.fallback import Taken, restore_first_sound
from megazero.checkpoint.restore import restore
from megazero.comm.local import LocalCommunicator
from megazero.config.run import CheckpointConfig
from megazero.errors import CheckpointError
from megazero.train.saving import check_progress

WORLD, CPU = LocalCommunicator(), torch.device("cpu")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (2, 4):
        write_checkpoint(tmp_path / "root", make_state(step), Layout(), step=step)
    return tmp_path / "root"


def resumed(root: Path) -> Taken:
    taken = restore_first_sound(
        root,
        lambda found: check_progress(found, CheckpointConfig()),
        lambda found: restore(found, blank(Layout().fragments(0, make_state())), control=WORLD),
        lambda _: None,
        control=WORLD,
    )
    assert taken is not None
    return taken


# To make a manifest of a million tensors takes seconds; tests/checkpoint/test_manifest.py has one.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "million" not in kind])
def test_every_kind_is_found_by_a_run_and_by_verify(root: Path, kind: str) -> None:
    KINDS[kind](root)
    assert verdict(root) == ("sound" if kind in HARMLESS else "damaged")
    if kind in REFUSED:
        with pytest.raises(CheckpointError):
            resumed(root)
        return
    taken = resumed(root)
    newest_is_sound = kind in HARMLESS or kind.startswith("`latest`")
    assert taken.checkpoint.step == (4 if newest_is_sound else 2)
    assert taken.is_newest == (kind in HARMLESS)


def test_every_flipped_bit_is_found_by_a_run_and_by_verify(root: Path) -> None:
    originals = {path: path.read_bytes() for path in (root / "step_0000004").iterdir()}
    for number in range(40):
        place = flip_bit(root, random.Random(number))
        assert verdict(root) == "damaged", place
        assert resumed(root).checkpoint.step == 2, place
        for path, content in originals.items():
            path.write_bytes(content)
    assert resumed(root).is_newest


def test_the_program_at_toy_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--records", str(tmp_path / "r.jsonl"), "--flips", "1", "--output", str(tmp_path / "page.md")]
    assert main([*words, "--minutes", "0"]) == 2
    assert main([*words, "--only", "data a FIFO"]) == 0
    (record,) = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert (record["outcome"], record["verified"]) == ("next taken", "damaged") and passes(record)
    assert "| data a FIFO | next taken |" in (tmp_path / "page.md").read_text()
    (tmp_path / "r.jsonl").write_text(json.dumps({**record, "outcome": "! hang"}) + "\n")
    assert main([*words, "--only", "data a FIFO"]) == 1, "a trial that has a record is not repeated"
    assert "Failed: data a FIFO" in capsys.readouterr().out
