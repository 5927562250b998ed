"""Tests of the launch scripts of named models: at full size they break no rule, and small they train."""

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.launch import read_steps
from support.pages import make_commands
from support.source_tree import ROOT
from support.warm_python import warm_python

from megazero.command_line.parse import parse
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.parallel.nodes import Nodes, problems_of_placement
from megazero.rules.run import check
from megazero.train.start.check import topology
from megazero.zero.plan import model_state_bytes, resolve

VOCABULARY = 50_257
# The flags that override a script's at the end, after which it is a tiny run of two processes.
SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --lr 1e-3"
    " --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 2 --train-iters 2 --lr-warmup-iters 1"
    " --eval-iters 0 --log-interval 1 --mock-data --vocab-size 50"
)


class Model(NamedTuple):
    """A script, the nodes and processes a node that it is for, and the model that its paper or name gives."""

    script: str
    nodes: int
    processes: int
    parameters: int
    tensor_parallel: int
    device_gb: int

    @property
    def path(self) -> Path:
        return ROOT / "scripts" / self.script

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes


MODELS = [
    Model("launch/gpt2_124m.sh", 1, 8, 124_439_808, 1, 24),
    Model("launch/gpt2_1.5b.sh", 1, 8, 1_557_611_200, 1, 40),
    Model("slurm/megatron_8.3b_dgx2.sbatch", 32, 16, 8_314_143_744, 8, 32),
    Model("slurm/turing_nlg_17b_dgx2.sbatch", 16, 16, 17_176_845_728, 4, 32),
    Model("slurm/gpt_40b_dgx_a100.sbatch", 8, 8, 40_184_776_704, 8, 40),
    Model("slurm/gpt_100b_dgx2.sbatch", 25, 16, 101_096_718_336, 16, 32),
]
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda model: Path(model.script).stem)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(model: Model, words: list[str], folder: Path, python: str) -> str:
    """Start a script with words at its end on two processes; return its output.  Slurm's programs are stand-ins."""
    make_commands(folder)
    kept = {name: value for name, value in os.environ.items() if name not in ("NUM_NODES", "NODE_RANK", "MASTER_ADDR")}
    own = {"PROCS_PER_NODE": "2", "MASTER_PORT": str(free_port()), "RUN_FOLDER": str(folder / "run"), "PREFLIGHT": "no"}
    path = {"PATH": f"{folder / '.venv' / 'bin'}:{kept['PATH']}", "PYTHON": python, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        ["bash" if model.path.suffix == ".sh" else "sbatch", str(model.path), *words],
        env={**kept, **own, **path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def full_size(model: Model, folder: Path) -> RunConfig:
    """Return the run that the script starts on its own nodes, with made-up data."""
    (folder / "python").write_text('#!/bin/sh\necho ran: "$@"\n')
    (folder / "python").chmod(0o755)
    told = start(model, [f"--mock-data --vocab-size {VOCABULARY}"], folder, str(folder / "python"))
    words = re.findall(r"^ran: .*pretrain_gpt\.py (.*)$", told, re.MULTILINE)[0].split()
    return parse(words, world_size=model.world_size).config


def said_gb(model: Model) -> Iterator[float]:
    """Yield the figures of the script's comment."""
    comment = " ".join(line.removeprefix("# ") for line in model.path.read_text().splitlines() if line.startswith("# "))
    found = re.search(r"by formula ([\d.]+) GB of model states and\b.*? ([\d.]+) GB of activation", comment)
    assert found, comment
    yield from map(float, found.groups())


@each_model
def test_at_full_size_it_is_the_model_and_breaks_no_rule(model: Model, tmp_path: Path) -> None:
    config = full_size(model, tmp_path)
    assert derived.num_parameters(config.model, VOCABULARY) == model.parameters
    assert config.parallel.tensor_model_parallel_size == model.tensor_parallel
    assert check(config, model.world_size) == ()
    nodes = Nodes((model.processes,) * model.nodes)
    assert not list(problems_of_placement(topology(config, model.world_size), nodes, allowed=False))
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", model.path.read_text(), re.MULTILINE))
    if asked:
        assert (int(asked["nodes"]), int(asked["gpus-per-node"])) == (model.nodes, model.processes)
        assert asked["ntasks-per-node"] == asked["gpus-per-node"]
        assert "--min-bandwidth" in model.path.read_text()


@each_model
def test_the_memory_in_its_comment_is_the_formula(model: Model, tmp_path: Path) -> None:
    config = full_size(model, tmp_path)
    degree = model.tensor_parallel
    states = model_state_bytes(
        resolve(config.zero, config.precision), model.parameters // degree, model.world_size // degree
    )
    shape, training = config.model, config.training
    elements = shape.num_layers * training.micro_batch_size * shape.seq_length * shape.hidden_size
    if config.activations.recompute_granularity == "full":  # two bytes an element of a layer's input
        activations = 2 * elements / (degree if config.activations.partition_activations else 1)
    else:
        activations = 34 * elements
    found = tuple(said_gb(model))
    assert found == (round(states.total / 1e9, 1), round(activations / 1e9, 1))
    assert sum(found) < 0.8 * model.device_gb


@pytest.mark.gloo
@each_model
def test_small_it_trains(model: Model, tmp_path: Path) -> None:
    """A flag at the end replaces the script's own, so that a model of any size runs anywhere."""
    metrics = tmp_path / "metrics.jsonl"
    words = [*SMALL.split(), "--metrics-file", str(metrics)]
    if model.path.suffix == ".sh":  # elsewhere the job says where a run is kept
        words += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    start(model, words, tmp_path, warm_python())
    assert list(read_steps(metrics)) == [1, 2] and list((tmp_path / "run").rglob("step_0000002"))


def test_every_script_of_a_model_is_here() -> None:
    found = [*(ROOT / "scripts" / "launch").glob("*.sh"), *(ROOT / "scripts" / "slurm").glob("*_*.sbatch")]
    assert sorted(found) == sorted(model.path for model in MODELS)
