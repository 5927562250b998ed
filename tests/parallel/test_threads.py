"""Tests the number of a process's CPU threads: the user's choice, or else a share of the cores."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker
from torch import nn

import megazero
from megazero import operating_system
from megazero.parallel.launch import Launch
from megazero.parallel.threads import cpu_threads, share_cpu_threads, use_cpu_threads

ALONE, ALL_ON_ONE = Launch(0, 1, 0), Launch(1, 4, 1)
UNEVEN = (Launch(0, 6, 0, (4, 2)), Launch(5, 6, 1, (4, 2)))
CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOST = {"zero_stage": 1, "offload_optimizer": "cpu"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the machine have 16 cores, and return the file that limits them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(operating_system, "_QUOTA", tmp_path / "cpu.max")
    return tmp_path / "cpu.max"


@each(
    ("given", "launch", "environment", "expected"),
    [
        (None, ALL_ON_ONE, {}, 4),
        (None, ALL_ON_ONE, TORCHRUN, 4),
        (None, UNEVEN[0], TORCHRUN, 4),
        (None, UNEVEN[1], TORCHRUN, 8),
        (None, Launch(3, 32, 3), TORCHRUN, 1),
        (3, ALL_ON_ONE, TORCHRUN, 3),
        (3, ALONE, {"OMP_NUM_THREADS": "2"}, 3),
        # The user's choice: another number than torchrun's, or any number where torchrun would have written none.
        (None, ALL_ON_ONE, TORCHRUN | {"OMP_NUM_THREADS": "2"}, None),
        (None, ALL_ON_ONE, {"OMP_NUM_THREADS": "1"}, None),
        (None, ALONE, TORCHRUN, None),
        (None, ALONE, {"OMP_NUM_THREADS": "1"}, None),
        # No choice, of a process that has the node for itself.
        (None, ALONE, {}, None),
        (None, Launch(1, 2, 0, (1, 1)), {}, None),
        # srun binds each task to cores of its own, which are not divided again.
        (None, ALL_ON_ONE, {"SLURM_CPUS_PER_TASK": "6"}, 6),
        (None, ALL_ON_ONE, TORCHRUN | {"SLURM_CPUS_PER_TASK": "16"}, 4),
    ],
)
def test_whose_word_counts(
    given: int | None, launch: Launch, environment: dict[str, str], expected: int | None
) -> None:
    assert cpu_threads(given, launch, environment) == expected


@pytest.mark.parametrize(
    ("quota", "expected"), [("600000 100000", 3), ("max 100000", 8), ("50000 100000", 1), ("6400000 100000", 8)]
)
def test_a_container_may_use_less_than_it_sees(sixteen_cores: Path, quota: str, expected: int) -> None:
    sixteen_cores.write_text(quota + "\n")
    assert cpu_threads(None, Launch(0, 2, 0), {}) == expected


@pytest.fixture
def threads() -> Iterator[int]:
    """Return the number of threads, and restore it at the end."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.parametrize(("device", "offloads"), [(CPU, False), (GPU, True)])
def test_they_are_set_and_told(device: torch.device, offloads: bool, threads: int) -> None:
    told = use_cpu_threads(3, ALL_ON_ONE, device, offloads=offloads)
    assert torch.get_num_threads() == 3
    assert told == "CPU threads a process: 3 | cores: 16 | processes on this node: 4"


def test_where_gpus_compute_nothing_is_changed(threads: int) -> None:
    assert use_cpu_threads(threads + 1, ALL_ON_ONE, GPU) == ""
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("environment", "now", "expected"),
    [
        (TORCHRUN, 1, 4),
        (TORCHRUN, 3, 3),  # set by the program, in spite of torchrun's
        (TORCHRUN | {"OMP_NUM_THREADS": "2"}, 2, 2),
        ({}, 16, 4),
        ({}, 3, 3),  # fewer than torch takes by itself
    ],
)
def test_a_program_has_its_share_unless_it_has_chosen(
    environment: dict[str, str], now: int, expected: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(now)
    share_cpu_threads(ALL_ON_ONE)
    assert torch.get_num_threads() == expected


@pytest.mark.parametrize(("settings", "expected"), [({"zero_stage": 1}, 1), (HOST, 8)])
def test_an_engine_that_offloads_computes_with_its_share(
    settings: dict[str, Any], expected: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (TORCHRUN | job).items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)
    config = {"zero": settings, "optimizer": {"type": "AdamW", "lr": 0.1}}
    megazero.initialize(nn.Linear(2, 1), config, mesh=mesh_in_worker(0)).close()
    assert torch.get_num_threads() == expected
