"""Tests how a process's place in its job follows from the launcher's environment, and that nonsense is refused."""

import os

import pytest

from megazero.errors import TopologyError
from megazero.parallel.launch import Launch, NodeShare, several_nodes_notice


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in os.environ:
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") or name.startswith(
            ("SLURM_", "OMPI_", "PMI_", "MPI_", "PET_", "SKYPILOT_")
        ):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def slurm(rank: int, size: int, local: int, per_node: str) -> dict[str, str]:
    """Return the environment variables of a task of srun."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


def open_mpi(rank: int, size: int, local: int, per_node: int) -> dict[str, str]:
    """Return the environment variables of a process of Open MPI's mpirun."""
    figures = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": per_node}
    return {f"OMPI_COMM_WORLD_{name}": str(figure) for name, figure in figures.items()}


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Launch(5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch(1, 2, 0)),
        ({"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}, Launch(0, 1, 0)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Launch(5, 8, 1, (4, 4))),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, Launch(0, 1, 0, (1,))),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "6"}, Launch(5, 8, 5)),
        ({"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launch(5, 6, 1, (2, 2, 2))),
        ({"RANK": "4", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Launch(4, 6, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "16"}, Launch(1, 2, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "two"}, Launch(1, 2, 1)),
        (slurm(5, 6, 1, "2(x3)"), Launch(5, 6, 1, (2, 2, 2))),
        (slurm(9, 10, 1, "8,2"), Launch(9, 10, 1, (8, 2))),
        (slurm(3, 4, 1, ""), Launch(3, 4, 1)),
        (slurm(3, 4, 1, "2(x3)"), Launch(3, 4, 1)),
        (slurm(0, 1, 0, "1"), Launch(0, 1, 0)),
        (open_mpi(3, 4, 1, 2), Launch(3, 4, 1, (2, 2))),
        (open_mpi(2, 4, 1, 2), Launch(2, 4, 1)),  # dealt out to nodes in turns
        ({**slurm(0, 2, 0, "1(x2)"), **open_mpi(3, 4, 1, 2)}, Launch(3, 4, 1, (2, 2))),
        ({**open_mpi(3, 4, 1, 2), "RANK": "0", "WORLD_SIZE": "2"}, Launch(0, 2, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Launch(1, 2, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, Launch(1, 2, 1, (2,))),
        # A batch script itself, which may start four tasks; and torchrun, started once on each of two nodes.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}, Launch(0, 1, 0)),
        (
            {**slurm(1, 2, 0, "1(x2)"), "RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"},
            Launch(7, 8, 3, (4, 4)),
        ),
    ],
)
def test_launch(environment: dict[str, str], launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    assert Launch.from_environment() == launch


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "first"}, "'RANK': 'first'"),
        ({"WORLD_SIZE": "4.0"}, "'WORLD_SIZE': '4.0'"),
        ({"LOCAL_RANK": "0x1"}, "'LOCAL_RANK': '0x1'"),
        ({"RANK": "3"}, "RANK 3, WORLD_SIZE 1"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2, WORLD_SIZE 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK -1, WORLD_SIZE 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK -1"),
        ({**slurm(0, 4, 0, "4"), "SLURM_PROCID": "x"}, "'SLURM_PROCID': 'x'"),
        (slurm(4, 4, 0, "4"), "SLURM_PROCID 4, SLURM_STEP_NUM_TASKS 4"),
        # Tasks that go to the nodes in turn, as srun --distribution=cyclic places them.
        (slurm(1, 4, 0, "2(x2)"), "SLURM_PROCID 1, SLURM_STEP_NUM_TASKS 4, SLURM_LOCALID 0, SLURM_STEP_TASKS_PER_NODE"),
    ],
)
def test_nonsense_from_a_launcher(environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, environment)
    with pytest.raises(TopologyError) as caught:
        Launch.from_environment()
    (problem,) = caught.value.problems
    assert told in problem.given and problem.rule


def test_nodes_of_a_launch() -> None:
    known, unknown = Launch(5, 6, 1, (2, 2, 2)), Launch(5, 6, 1)
    assert (known.node, known.nodes.ranks_per_node) == (2, (2, 2, 2))
    assert (unknown.node, unknown.nodes.ranks_per_node) == (0, (6,))


PODS = {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0.job", "PET_MASTER_PORT": "29400"}
SKY = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (PODS, (3, 2, "job-0.job", 29400)),
        (PODS | {"PET_NPROC_PER_NODE": "8"}, (3, 2, "job-0.job", 29400)),
        (PODS | {"PET_NPROC_PER_NODE": "auto"}, (3, 2, "job-0.job", 29400)),
        (PODS | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
        (PODS | {"TORCHELASTIC_RUN_ID": "none"}, None),
        (SKY, (2, 1, "10.0.0.4", 29500)),
        (SKY | {"MASTER_PORT": "29999"}, (2, 1, "10.0.0.4", 29999)),
    ],
)
def test_the_share_of_a_node(
    variables: dict[str, str], expected: tuple[int, int, str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    share = NodeShare.from_environment(8)
    assert (share and (share.nodes, share.node, share.host, share.port)) == expected
    assert bool(several_nodes_notice()) is (share is not None), "a program without --processes says that it is alone"


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        (PODS | {"PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE 4 with --processes 8"),
        (PODS | {"PET_NNODES": "2:4"}, "must be whole numbers"),
        (PODS | {"PET_NODE_RANK": "3"}, "nodes count from 0"),
        (PODS | {"PET_MASTER_ADDR": ""}, "host ''"),
        (SKY | {"MASTER_PORT": "0"}, "nodes count from 0"),
    ],
)
def test_a_share_that_contradicts_itself(
    variables: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    with pytest.raises(TopologyError, match=complaint):
        NodeShare.from_environment(8)
