"""Tests the command line of a plan: its own flags, a run without a corpus, and what is refused."""

import shlex
from collections.abc import Sequence

import pytest
from support.each import each

from megazero.errors import UserError
from megazero.parallel.nodes import Nodes
from megazero.planner.words import machine, nodes_of, read_run, split_words

RUN = shlex.split("--preset gpt2-124m --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-4")


def test_own_flags_are_separated_in_both_spellings() -> None:
    words = split_words(["--nodes=2", "--num-layers", "3", "--world_size", "5", "--paper", "--format", "json"])
    assert words.values == {"--nodes": "2", "--world-size": "5", "--format": "json"}
    assert (words.is_paper, words.rest) == (True, ["--num-layers", "3"])
    assert "--paper" not in words.values
    for given in (["--paper", "figure-2"], ["--paper=figure-2"]):
        assert split_words(given)[:3] == ({"--paper": "figure-2"}, True, [])


def test_a_quick_calibration() -> None:
    words = split_words(["--calibrate", "mine.yaml", "--quick"])
    assert words.is_quick and words.values == {"--calibrate": "mine.yaml"} and words.rest == []
    with pytest.raises(UserError, match="it shortens a calibration"):
        split_words(["--quick"])


@each(
    ("values", "per_node"),
    [({}, (8,)), ({"--nodes": "3"}, (8, 8, 8)), ({"--world-size": "20"}, (8, 8, 4)), ({"--world-size": "3"}, (3,))],
)
def test_nodes_of_a_machine(values: dict[str, str], per_node: tuple[int, ...]) -> None:
    assert nodes_of(values, machine({"--hardware": "dgx-a100"})).ranks_per_node == per_node


def test_a_run_without_a_corpus_is_one_on_made_up_tokens() -> None:
    wanted = read_run(RUN, Nodes((8, 8)))
    assert (wanted.config.data.mock_data, wanted.vocab_size) == (True, 50257)


AUTO = ["--recompute-granularity", "full", "--partition-activations", "auto", "--tensor-model-parallel-size", "2"]


def test_what_a_plan_decides_is_left_open() -> None:
    wanted = read_run([*RUN, *AUTO], Nodes((8, 8)))
    assert wanted.config.activations.partition_activations == "auto"


def test_what_a_plan_leaves_out_is_said() -> None:
    (notice,) = read_run([*RUN, "--device", "cuda", "--enable-cuda-graph"], Nodes((1,))).notices
    assert notice.startswith("--enable-cuda-graph: the plan leaves out the memory of recorded passes")


def refusal(words: Sequence[str]) -> str:
    """Return the message that a command line is refused with."""
    with pytest.raises(UserError) as caught:
        own = split_words(words)
        read_run(own.rest, nodes_of(own.values, machine(own.values)))
    return str(caught.value)


@each(
    ("more", "given", "legal"),
    [
        (["--nodes"], "--nodes", "--nodes 16"),
        (["--nodes", "none"], "--nodes none", "--nodes 16"),
        (["--nodes", "2", "--world-size", "16"], "--nodes 2 and --world-size 16", "--nodes N"),
        (["--format", "jsn"], "--format jsn", "json"),
        (["--output", "plan.html"], "--output plan.html", "--format html"),
        (["--what-if", "stage", "--format", "json"], "--what-if stage", "--format html"),
        (["--hardware", "dgx-h200"], "--hardware dgx-h200", "dgx-h100"),
        (["--zero-stage", "4"], "--zero-stage 4", "3"),
        (["--tensor-model-parallel-size", "5"], "--tensor-model-parallel-size 5", "--tensor-model-parallel-size 4"),
    ],
)
def test_wrong_words_are_refused_with_what_is_legal(more: list[str], given: str, legal: str) -> None:
    message = refusal([*RUN, *more])
    assert given in message and legal in message, message
