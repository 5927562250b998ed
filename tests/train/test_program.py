"""Tests of programs after their command line is parsed; test_pretrain_gpt and test___main__ test whole programs."""

from pathlib import Path

import pytest
from support.launch import set_launcher
from support.small_runs import tiny_run, train_run

from megazero.errors import CheckpointError, TopologyError
from megazero.parallel.launch import Launch
from megazero.train.program import pretrain
from megazero.train.start.check import check

ALONE = Launch(0, 1, 0)


def test_a_checkpoint_is_looked_at_before_ranks_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_run(0, 1, {"train_iters": 2, "save": str(tmp_path)})
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    of_two = Launch(1, 2, 1)
    for settings, kind, told in (({"seed": 9}, CheckpointError, "--seed 9"), ({}, TopologyError, "no MASTER_ADDR")):
        config = tiny_run(load=str(tmp_path), **settings)
        with pytest.raises(kind, match=told):
            pretrain(config, of_two, check(config, of_two))


def test_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_launcher(monkeypatch)
    for settings, status in (({}, 0), ({"exit_interval": 1}, 75), ({"exit_interval": 2}, 0)):
        config = tiny_run(train_iters=2, exit_status_when_stopped=75, **settings)
        assert pretrain(config, ALONE, check(config, ALONE)) == status
    assert "finished 2 iterations" in capsys.readouterr().out
