"""Tests the forecast of jobs that are run dry."""

from dataclasses import replace

import pytest
from support.each import each

from megazero.command_line.parse import parse
from megazero.parallel.nodes import Nodes
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware, Link
from megazero.planner.job_plan import DryRuns, Plan
from megazero.planner.machines import MACHINES
from megazero.planner.predict import forecast_of
from megazero.report.metrics import flops_per_token

_RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --micro-batch-size 1"
    " --global-batch-size 4 --train-iters 10 --lr 1e-4 --eval-iters 0 --mock-data"
)
_PARTS = ("start-up", "first step", "steady step")


@pytest.fixture(scope="module")
def runs() -> DryRuns:
    """Return the dry runs of all tests, which call the same operators."""
    return DryRuns()


def planned(runs: DryRuns, words: str, world: int, machine: Hardware) -> Plan:
    config = parse([*_RUN.split(), *words.split()], world_size=world).config
    job = DryJob(config, 64, Nodes((world,)), is_gpu=machine.device == "cuda")
    return runs.plan(job, machine, parts=_PARTS)


def faster(machine: Hardware, times: float) -> Hardware:
    """Return the machine whose every rate is so many times as high, and every latency as low."""
    links = {name: Link(link.latency_seconds / times, link.rates.times(times)) for name, link in machine.links.items()}
    return replace(
        machine,
        links=links,
        matrix={name: replace(one, rates=one.rates.times(times)) for name, one in machine.matrix.items()},
        kernels={name: curve.times(times) for name, curve in machine.kernels.items()},
        kernel_seconds=machine.kernel_seconds / times,
        host_seconds=machine.host_seconds / times,
        link_wait_seconds=machine.link_wait_seconds / times,
    )


@each(
    ("words", "world", "machine"),
    [
        ("--zero-stage 3", 4, "dgx-a100"),
        ("--zero-stage 1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 4", 8, "dgx2-v100"),
        ("--zero-stage 2 --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", 4, "cpu"),
    ],
)
def test_a_machine_that_is_twice_as_fast_in_everything_takes_half_as_long(
    words: str, world: int, machine: str, runs: DryRuns
) -> None:
    plan = planned(runs, words, world, MACHINES[machine])
    once = forecast_of(plan)
    twice = forecast_of(replace(plan, hardware=faster(plan.hardware, 2.0)))
    assert twice.step.seconds == pytest.approx(once.step.seconds / 2, rel=1e-6)
    assert twice.step.shares() == pytest.approx(once.step.shares(), rel=1e-6)
    assert sum(once.step.shares().values()) == pytest.approx(1, rel=0.02)
    assert once.tokens == 4 * 16
    assert once.total_tokens == 10 * 4 * 16
    config = plan.job.config
    training = replace(config.training, skip_train_iteration_range=("3-4", "8", "10-12"))  # four of the ten steps
    skipping = replace(plan, job=replace(plan.job, config=replace(config, training=training)))
    assert forecast_of(skipping).total_tokens == 6 * 4 * 16
    assert forecast_of(skipping).seconds.value == pytest.approx(0.6 * once.seconds.value)
    assert once.flops == flops_per_token(plan.job.config.model, vocab_size=64)
    assert {"forward", "backward", "update"} <= once.step.parts().keys()


@each(
    ("words", "world"), [("--zero-stage 3", 2), ("--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2", 4)]
)
def test_held_out_steps_slow_every_part_of_a_step_on_a_cpu(words: str, world: int, runs: DryRuns) -> None:
    plan = planned(runs, words, world, replace(MACHINES["cpu"], host_seconds=1e-5))
    before = forecast_of(plan)
    after = forecast_of(replace(plan, hardware=plan.hardware.slowed(1.25)))
    assert after.step.seconds == pytest.approx(1.25 * before.step.seconds, rel=1e-6)
    assert after.step.parts() == pytest.approx({name: 1.25 * part for name, part in before.step.parts().items()})
    assert plan.hardware.slowed(1.25).slowed(1.2).held_out == pytest.approx(1.5)
