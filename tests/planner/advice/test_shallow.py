"""Tests that samples of few layers and micro-batches tell what the job itself takes when it is run dry."""

import shlex

import pytest
from support.each import each

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.shallow import PARTS, depths, measure, micro_batches, with_layers
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import DryRuns, make_plan
from megazero.planner.machines import MACHINES
from megazero.planner.predict import forecast_of
from megazero.planner.words import read_run

V100 = MACHINES["dgx2-v100"]


def job_of(words: str, nodes: Nodes, *, wide: bool = False) -> DryJob:
    """Return a job of layers of 50 million elements a rank; of 201 million in 16 parts, whole buckets, if wide."""
    shape = "--hidden-size 8192 --num-attention-heads 64 --tensor-model-parallel-size 16"
    fixed = (
        "--seq-length 1024 --vocab-size 5000 --train-iters 5 --lr 1e-4 --eval-iters 0 --precision fp16"
        " --sequence-parallel "
        + (shape if wide else "--hidden-size 4096 --num-attention-heads 32 --tensor-model-parallel-size 4")
    )
    wanted = read_run(shlex.split(f"{fixed} {words}"), nodes)
    return DryJob(wanted.config, wanted.vocab_size, nodes, is_gpu=True)


@pytest.mark.parametrize(
    ("words", "wide"),
    [
        ("--num-layers 5 --zero-stage 1 --micro-batch-size 2 --global-batch-size 4", True),
        (
            "--num-layers 5 --zero-stage 2 --micro-batch-size 2 --global-batch-size 32 --recompute-granularity full",
            False,
        ),
        (
            "--num-layers 7 --zero-stage 1 --micro-batch-size 2 --global-batch-size 16"
            " --pipeline-model-parallel-size 2 --pipeline-split 4,3",
            False,
        ),
    ],
    ids=["one micro-batch, whole buckets", "four", "a pipeline"],
)
def test_samples_tell_what_the_job_takes(words: str, wide: bool) -> None:
    """A step of one micro-batch is a line over the layers where these are whole buckets; else it is near to one."""
    job = job_of(words, Nodes((16,) * (1 + wide)), wide=wide)
    samples = DryRuns()
    found = measure(job, V100, samples)
    assert found.depth > 1
    plan = make_plan(job, V100, parts=PARTS, operators=samples.operators)
    forecast = forecast_of(plan)
    rank, part = plan.binding
    need = plan.need(rank, part)
    assert found.seconds == pytest.approx(forecast.step.seconds, rel=1e-5 if wide else 0.02)
    # The allocator's segments are no line.
    assert found.total == pytest.approx(need.total, rel=0.02)
    tensors = found.total - found.memory["rounding and fragments"] - need.constants
    assert tensors == pytest.approx(rank.parts[part].memory.peak_bytes, rel=1e-4 if wide else 0.01)
    assert found.mfu == pytest.approx(forecast.mfu.value, rel=0.02)
    assert found.tokens == forecast.tokens
    assert found.seconds_on(V100) == found.seconds


def test_recomputed_layers_are_sampled_beside_their_neighbours() -> None:
    """Slices of checkpoints are copies: a layer's input is alive beside them until the next layer has its own."""
    words = "--num-layers 6 --zero-config C4 --sequence-parallel false --micro-batch-size 8 --global-batch-size 16"
    job = job_of(words, Nodes((16, 16)), wide=True)
    samples = DryRuns()
    found = measure(job, V100, samples)
    plan = make_plan(job, V100, parts=PARTS, operators=samples.operators)
    assert found.depth == 4
    assert found.total == pytest.approx(plan.need(*plan.binding).total, rel=0.03)
    # Samples of one depth serve every other one.
    deeper = measure(job_of(words.replace("layers 6", "layers 60"), Nodes((16, 16)), wide=True), V100, samples)
    assert len(samples.plans) == 2
    again = with_layers(deeper, 6)
    assert (again.memory, again.place, again.seconds, again.mfu) == (
        found.memory,
        found.place,
        found.seconds,
        found.mfu,
    )
    assert deeper.total > 5 * again.total


def test_samples_are_deeper_than_what_many_ranks_gather_ahead() -> None:
    """Of 1,024 data-parallel ranks 2^28 elements are ahead, the largest unit's and those of four more layers."""
    words = "--num-layers 40 --zero-stage 3 --micro-batch-size 1 --global-batch-size 1024"
    nodes = Nodes((16,) * 256)
    found = [depths(job_of(f"{words} {more}", nodes)) for more in ("", "--prefetch-bucket-size 0", "--no-overlap-comm")]
    assert found == [((7,), 33), ((3,), 37), ((3,), 37)]


@each(
    ("words", "split", "more"),
    [
        ("--num-layers 40", (1,), 39),
        ("--num-layers 40 --zero-stage 3", (3,), 37),
        ("--num-layers 40 --recompute-granularity full", (2,), 38),
        ("--num-layers 2", (2,), 0),
        ("--num-layers 41 --pipeline-model-parallel-size 4", (1, 2, 1, 1), 9),
        ("--num-layers 40 --pipeline-model-parallel-size 4 --pipeline-split 10,12,12,6", (5, 7, 7, 1), 5),
        ("--num-layers 40 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5", (1,) * 8, 4),
    ],
)
def test_every_chunk_loses_as_many_layers(words: str, split: tuple[int, ...], more: int) -> None:
    job = job_of(f"{words} --micro-batch-size 1 --global-batch-size 16", Nodes((16,)))
    found = depths(job)
    whole = tuple(layers + found.more for layers in found.split)
    assert sum(whole) == job.config.model.num_layers
    if "virtual" not in words:
        assert (found.split, found.more) == (split, more)
    turn = 2
    assert micro_batches(job.config, 8) == turn and micro_batches(job.config, 1) == 1
