"""Tests that bounds of memory and time are below what dry runs of the same layouts find, and not far below."""

import random
import shlex

import pytest

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.bounds import Bounds, at_best, highest_up_to
from megazero.planner.advice.choices import AdvisedRun, LayoutChoice, choices, legal, read
from megazero.planner.curves import Curve
from megazero.planner.dry.hollow import Operators
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import Plan, make_plan
from megazero.planner.machines import MACHINES
from megazero.planner.predict import forecast_of

PARTS = ("start-up", "first step", "steady step")
MODELS = {
    "GPT-2, dropout": ("dgx2-v100", "--precision fp16"),
    "Llama, few groups": (
        "dgx-h100",
        "--precision bf16 --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
        " --group-query-attention --num-query-groups 2 --hidden-dropout 0 --attention-dropout 0 --optimizer lion"
        " --untie-embeddings-and-output-weights",
    ),
    "frozen, adapters": ("dgx-a100", "--precision bf16 --lora-rank 4 --load weights"),
    "squared ReLU, sums in fp32": (
        "dgx-h100",
        "--precision bf16 --squared-relu --accumulate-allreduce-grads-in-fp32 --clip-grad 0 --optimizer adamw8bit",
    ),
}


def run_of(more: str, world: int) -> AdvisedRun:
    words = (
        "--num-layers 3 --hidden-size 1536 --num-attention-heads 12 --seq-length 384 --vocab-size 5000"
        f" --micro-batch-size 1 --global-batch-size 48 --train-iters 5 --lr 1e-4 --eval-iters 0 {more}"
    )
    return read(shlex.split(words), world)


def planned(
    run: AdvisedRun, choice: LayoutChoice, nodes: Nodes, hardware: str, operators: Operators | None = None
) -> Plan | None:
    wanted = legal(run, choice, nodes)
    if wanted is None:
        return None
    job = DryJob(wanted.config, wanted.vocab_size, nodes, is_gpu=hardware != "cpu")
    return make_plan(job, MACHINES[hardware], parts=PARTS, operators=operators)


@pytest.mark.parametrize("name", MODELS)
def test_bounds_are_below(name: str) -> None:
    hardware, words = MODELS[name]
    machine = MACHINES[hardware]
    nodes = Nodes((machine.devices_per_node,) * 2)
    run = run_of(words, sum(nodes.ranks_per_node))
    bounds = Bounds(run, 5000, machine, nodes)
    drawn = random.Random(name)
    few = [one for one in choices(run, nodes) if 3 * one.micro_batch_size * copies(one, nodes) >= 48]
    tried, operators = 0, Operators()
    while tried < 2:
        choice = drawn.choice(few)
        if (plan := planned(run, choice, nodes, hardware, operators)) is None:
            continue
        tried += 1
        bound, need = bounds.of(choice), plan.need(*plan.binding).total
        seconds = forecast_of(plan).step.seconds
        assert bound.total <= need, (choice, bound, need)
        assert bound.seconds <= seconds, (choice, bound, seconds)


def copies(choice: LayoutChoice, nodes: Nodes) -> int:
    parts = choice.tensor_model_parallel_size * choice.pipeline_model_parallel_size
    return sum(nodes.ranks_per_node) // parts


def test_a_bound_has_most_of_a_large_layout() -> None:
    """What bounds leave out is little where products and states are large."""
    nodes = Nodes((16,))
    run = read(
        shlex.split(
            "--num-layers 3 --hidden-size 8192 --num-attention-heads 64 --seq-length 1024 --vocab-size 5000"
            " --micro-batch-size 8 --global-batch-size 8 --train-iters 5 --lr 1e-4 --eval-iters 0 --precision fp16"
        ),
        16,
    )
    choice = LayoutChoice(16, sequence_parallel=True, micro_batch_size=8)
    plan = planned(run, choice, nodes, "dgx2-v100")
    assert plan is not None
    bound = Bounds(run, 5000, MACHINES["dgx2-v100"], nodes).of(choice)
    assert bound.seconds > 0.85 * forecast_of(plan).step.seconds
    assert bound.total > 0.7 * plan.need(*plan.binding).total


def test_moments_have_the_bytes_of_their_optimizer() -> None:
    """Those in 8 bits have a byte, and a number in fp32 for each block of 256."""
    nodes, machine = Nodes((8,)), MACHINES["dgx-a100"]
    found = {
        name: Bounds(run_of(f"--precision bf16 --optimizer {name}", 8), 5000, machine, nodes).of(LayoutChoice())
        for name in ("adam", "adamw8bit", "lion", "lion8bit", "sgd")
    }
    whole = found["adam"].memory["moments"]
    expected = {"adam": 1.0, "adamw8bit": (1 + 4 / 256) / 4, "lion": 0.5, "lion8bit": (1 + 4 / 256) / 8, "sgd": 0.0}
    assert {name: bound.memory["moments"] / whole for name, bound in found.items()} == pytest.approx(expected, abs=1e-4)


def test_rates_at_best() -> None:
    falling = Curve(((1.0, 2.0), (4.0, 8.0), (16.0, 4.0)))
    assert highest_up_to(falling, 2.0) == pytest.approx(4.0)
    assert highest_up_to(falling, 16.0) == highest_up_to(falling, 1e9) == 8.0
    best = at_best(MACHINES["cpu"])
    assert all(link.latency_seconds == 0.0 and len(link.rates.points) == 1 for link in best.links.values())


def test_parameters_in_parts_are_never_whole() -> None:
    """Not even while they get initial values: the bound of stage 3 is below what a deep model takes."""
    nodes = Nodes((16,))
    run = read(
        shlex.split(
            "--num-layers 10 --hidden-size 4096 --num-attention-heads 32 --seq-length 128 --vocab-size 5000"
            " --micro-batch-size 1 --global-batch-size 16 --train-iters 5 --lr 1e-4 --eval-iters 0 --precision fp16"
        ),
        16,
    )
    choice = LayoutChoice(zero_stage=3, offload_optimizer="cpu", offload_param="cpu")
    plan = planned(run, choice, nodes, "dgx2-v100")
    assert plan is not None
    whole = 2 * sum(rank.numel for rank in plan.ranks)
    bound = Bounds(run, 5000, MACHINES["dgx2-v100"], nodes).of(choice)
    assert bound.total <= plan.need(*plan.binding).total < whole
