"""Tests of the job of a command line: who starts its processes, and how many there are, on every kind of launcher."""

import ast
import os
from pathlib import Path

import pytest

import megazero
from megazero.errors import TopologyError
from megazero.parallel.job import read_job
from megazero.parallel.launch import Launch

POD = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0.job"}
SKY = {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n10.0.0.6"}
RANK = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("launcher", [POD, SKY])
def test_on_several_nodes_each_starts_its_share(launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", launcher)
    job = read_job(["--lr", "1", "--processes", "2"])
    assert (job.rest, job.processes, job.nodes, job.world_size) == (["--lr", "1"], 2, 3, 6)
    assert job.first_rank == Launch(0, 6, 0, ranks_per_node=(2, 2, 2)) and job.notices == ()
    (notice,) = read_job([]).notices
    assert "this process is alone" in notice and "--processes N" in notice
    # A rank that such a program has started is no launcher, and not alone.
    monkeypatch.setattr(os, "environ", {**launcher, **RANK, "TORCHELASTIC_RUN_ID": "none"})
    job = read_job([])
    assert (job.processes, job.share, job.world_size, job.notices) == (None, None, 6, ())
    assert job.first_rank == job.launch == Launch(5, 6, 1, (2, 2, 2))


def test_on_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert (read_job([]).world_size, read_job([]).notices) == (1, ())
    job = read_job(["--processes=4"])
    assert (job.world_size, job.share, job.first_rank) == (4, None, Launch(0, 4, 0, (4,)))
    monkeypatch.setattr(os, "environ", {**POD, "PET_NPROC_PER_NODE": "8"})
    with pytest.raises(TopologyError, match="PET_NPROC_PER_NODE 8 with --processes 4"):
        read_job(["--processes", "4"])


def test_every_command_of_several_processes_reads_its_job_here() -> None:
    """None reads the launcher's variables, or the flag, by itself."""
    readers = {"split_processes", "several_nodes_notice", "NodeShare", "from_environment"}
    commands = Path(megazero.__file__).parent / "commands"
    for path in commands.glob("*.py"):
        names = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(ast.parse(path.read_text()))}
        assert not names & readers, path.name
        assert ("start_processes" in names) == ("read_job" in names), path.name
