"""Tests of scripts/launch_node.sh: missing variables are named together, and two nodes started by hand are one job."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import PATIENCE_SECONDS, ROOT, SMALL_RUN, command_line, read_steps
from support.warm_python import warm_python

from megazero.checkpoint.reader import open_checkpoint

SCRIPT = ROOT / "scripts" / "launch_node.sh"


def start(*arguments: str, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    ours = ("NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PROCS_PER_NODE", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    own = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *arguments],
        env={**environment, **own, **variables},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


ALONE = {"NUM_NODES": "1", "NODE_RANK": "0", "MASTER_ADDR": "a"}


@pytest.mark.parametrize(
    ("variables", "messages"),
    [
        ({}, ["NUM_NODES is not set", "NODE_RANK is not set", "MASTER_ADDR is not set"]),
        ({**ALONE, "NODE_RANK": "1"}, ["NODE_RANK=1: nodes count from 0 to NUM_NODES - 1 = 0"]),
        ({**ALONE, "NUM_NODES": "0", "NODE_RANK": "x"}, ["NUM_NODES=0: must be", "NODE_RANK=x: must be"]),
        ({**ALONE, "PROCS_PER_NODE": "-1"}, ["PROCS_PER_NODE=-1: must be a whole number, at least 1"]),
        (
            {**ALONE, "MASTER_PORT": "99999"},
            ["MASTER_PORT=99999: must be a whole number, at least 1 and at most 65535"],
        ),
        ({**ALONE, "MASTER_PORT": "65536"}, ["MASTER_PORT=65536: must be"]),
        ({**ALONE, "PYTHON": "no-python"}, ["no-python is missing"]),
    ],
)
def test_what_is_missing_is_named(variables: dict[str, str], messages: list[str], tmp_path: Path) -> None:
    process = start(cwd=tmp_path, **variables)
    told = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 2
    assert told.pop().startswith("usage: ")
    assert len(told) == len(messages)
    for line, message in zip(told, messages, strict=True):
        assert line.startswith(f"error: {message}")


@pytest.mark.gloo
def test_two_nodes_are_one_job_that_a_signal_to_a_torchrun_stops(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Relative paths are resolved in the caller's folder, wherever the script lies.
    flags = command_line({**SMALL_RUN, "--train-iters": "1000000", "--metrics-file": "steps", "--save": "saved"})
    job = {"NUM_NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PROCS_PER_NODE": "1"}
    nodes = [start(*flags, cwd=tmp_path, NODE_RANK=str(rank), PYTHON=warm_python(), **job) for rank in range(2)]
    try:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while len(read_steps(tmp_path / "steps")) < 3 and time.monotonic() < give_up:
            time.sleep(0.05)
        nodes[1].send_signal(signal.SIGUSR1)
        while not (tmp_path / "saved" / "latest").exists() and time.monotonic() < give_up:
            time.sleep(0.05)
        nodes[0].send_signal(signal.SIGUSR1)  # its torchrun would wait 300 s for the other
        outputs = [node.communicate(timeout=PATIENCE_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [1, 1], outputs  # torchrun's status after a signal is 1
    assert "data 2 x" in outputs[0][0] and f"node 0 of 2: 1 processes, meeting at 127.0.0.1:{port}" in outputs[0][0]
    assert outputs[1][0].startswith("node 1 of 2: ") and len(outputs[1][0].splitlines()) == 1
    last = max(read_steps(tmp_path / "steps"))
    assert f"asked to stop after iteration {last}" in outputs[0][0] and open_checkpoint(tmp_path / "saved").step == last
