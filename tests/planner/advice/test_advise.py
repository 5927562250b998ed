"""Tests advice: commands that a start takes, what limits cost, nodes that are gone, layouts that do not fit."""

import json
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.warm_python import RUNS, warm_python

from megazero.errors import ConfigError
from megazero.parallel.nodes import Nodes
from megazero.planner.advice.advise import Advice, advise, remedies, to_json
from megazero.planner.advice.choices import flags, read
from megazero.planner.advice.search import Limit, Search
from megazero.planner.advice.show import lines, remedy
from megazero.planner.job_plan import DryRuns
from megazero.planner.machines import MACHINES
from megazero.planner.words import nodes_left, read_run, split_words

ROOT = str(Path(__file__).resolve().parents[3])
WORDS = (
    "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --seq-length 128 --vocab-size 512 --micro-batch-size 1"
    " --global-batch-size 12 --train-iters 10 --lr 1e-4 --eval-iters 0 --precision bf16"
)
A100 = replace(MACHINES["dgx-a100"], devices_per_node=2)


def search(runs: DryRuns, memory: float = 80e9, words: str = WORDS) -> Search:
    hardware = replace(A100, memory_bytes=round(memory))
    return Search(read(shlex.split(words), 4), 512, hardware, samples=runs)


@pytest.fixture(scope="module")
def runs() -> DryRuns:
    """Return the dry runs of all tests, which try layouts of the same model."""
    return DryRuns()


@pytest.fixture(scope="module")
def advice(runs: DryRuns) -> Advice:
    """Return advice on two nodes of two devices, by few dry runs."""
    return advise(search(runs), [Nodes((2, 2))], limit=Limit(3, 1e9))


def test_commands_are_those_of_the_layouts(advice: Advice) -> None:
    text = list(lines(advice))
    assert max(map(len, text)) <= 100
    commands = "\n".join(text).split("\n# ")[1:]
    assert len(commands) == len(advice.outcome.found) == 3
    for command, found in zip(commands, advice.outcome.found, strict=True):
        words = shlex.split(command.partition("\n")[2].replace("\\\n", " "))
        assert words[:2] == ["megazero", "pretrain"]
        wanted = read_run(words[2:], found.nodes)
        assert wanted.config.training.micro_batch_size == found.choice.micro_batch_size
        assert wanted.config.training.global_batch_size == 12


def test_a_start_takes_a_command(advice: Advice) -> None:
    words = flags(advice.search.run, advice.outcome.found[0].choice)
    command = [warm_python(RUNS), "-m", "megazero", "pretrain", *words, "--processes", "4", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr


def test_limits_have_their_costs(advice: Advice) -> None:
    best = advice.outcome.found[0].measured.seconds
    assert advice.smallest is not None and advice.smallest.nodes.count == 1
    assert all(gain.seconds < 0.99 * best for gain in advice.gains)
    assert advice.outcome.left > 100 and "might be faster" in "\n".join(lines(advice))


def test_the_json_has_all_of_it(advice: Advice) -> None:
    found = json.loads(json.dumps(to_json(advice)))
    assert found["fits"] and len(found["fastest"]) == 3 and found["smallest"]["nodes"] == 1
    first = found["fastest"][0]
    assert first["memory_bytes"] == sum(first["memory"].values()) < 80e9
    assert first["tokens_per_second"] == pytest.approx(12 * 128 / first["step_seconds"])
    assert [row["step_seconds"] for row in found["fastest"]] == sorted(row["step_seconds"] for row in found["fastest"])


def test_nothing_fits_a_device_that_is_full_of_its_context(runs: DryRuns) -> None:
    found = advise(search(runs, 0.5e9), [Nodes((2, 2))])
    text = "\n".join(lines(found))
    assert not found.fits and found.near is None and found.closest is not None
    assert "does not fit: " in text and "most is context, workspaces, communicators" in text
    assert "no layout was found that fits, on these nodes or more" in text


def test_the_nearest_is_a_change_of_one_setting(runs: DryRuns) -> None:
    """The given micro-batch keeps too much; with a smaller one, or recomputed, it fits."""
    wide = WORDS.replace("--micro-batch-size 1", "--micro-batch-size 6").replace(
        "--seq-length 128", "--seq-length 8192"
    )
    own = search(runs, 2.2e9, wide.replace("--global-batch-size 12", "--global-batch-size 24"))
    nodes = Nodes((2, 2))
    given = own.measured(own.run.given, nodes)
    assert given is not None and not given.fits(own.hardware)
    closest, near = remedies(own, own.candidates(nodes), nodes)
    assert closest is None and near is not None and near.choice.changes(own.run.given) == 1
    assert near.measured.fits(own.hardware)
    text = "\n".join(remedy(own, near))
    assert "nearest that fits: 2 nodes of 2 ranks, --" in text


def test_nodes_that_are_gone() -> None:
    values = {"--without-nodes": "2"}
    assert nodes_left(values, Nodes((8,) * 9)) == [Nodes((8,) * count) for count in (7, 6, 5, 4)]
    assert nodes_left({}, Nodes((8, 4))) == [Nodes((8, 4))]
    for given in ("9", "0", "x"):
        with pytest.raises(ConfigError, match="some nodes are gone, and some are left"):
            nodes_left({"--without-nodes": given}, Nodes((8,) * 9))


def test_words_of_advice() -> None:
    words = split_words(["--advise", "--without-nodes", "1", "--lr", "1"])
    assert words.is_advice and words.values == {"--without-nodes": "1"} and words.rest == ["--lr", "1"]
    for given in (
        "--without-nodes 1",
        "--advise --what-if stage --format html",
        "--advise --paper",
        "--advise --calibrate x.yaml",
    ):
        with pytest.raises(ConfigError):
            split_words(given.split())
