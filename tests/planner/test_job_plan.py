"""Tests plans: of a run whose bytes, messages and products can be counted by formulas, and of machines too small."""

import json
import shlex
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from megazero.parallel.nodes import Nodes
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import Plan, make_plan, parts_of
from megazero.planner.machines import MACHINES
from megazero.planner.show import lines
from megazero.planner.trace import Compute, Copy, Message, TraceWait
from megazero.planner.words import read_run

LAYERS, HIDDEN, LENGTH, VOCABULARY, MICRO = 4, 256, 64, 1024, 2
WORDS = shlex.split(
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {LENGTH}"
    f" --vocab-size {VOCABULARY} --micro-batch-size {MICRO} --global-batch-size 16 --train-iters 10 --lr 1e-4"
    " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1 --precision bf16"
    " --recompute-granularity full --save nowhere --offload-optimizer cpu"
)
BLOCK = 512  # bytes, of which every storage takes a multiple
A100 = MACHINES["dgx-a100"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    """Return the plan of a job of 16 ranks on two nodes: tensor 2 x pipeline 2 x data 4."""
    wanted = read_run(WORDS, Nodes((8, 8)))
    return make_plan(DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=True), A100)


def test_ranks_and_parts_are_those_that_differ(plan: Plan) -> None:
    assert [rank.trace.coordinates for rank in plan.ranks] == [{"tp": 0, "pp": p, "dp": 0} for p in (0, 1)]
    assert list(plan.ranks[0].parts) == list(parts_of(plan.job)) == list(plan.ranks[0].trace.parts)
    assert plan.trace.tokens == 16 * LENGTH and plan.trace.micro_batches == 2


def test_states_are_those_of_the_formula(plan: Plan) -> None:
    """Stage 1 on 4 data-parallel ranks: 2 + 2 bytes a parameter on the device, 12 / 4 in host memory."""
    for rank in plan.ranks:
        record = rank.parts["steady step"]
        assert 0 <= record.memory.peaks["parameters"] - 2 * rank.padded_numel < BLOCK * len(rank.parts)
        assert record.memory.peaks["gradients"] >= 2 * rank.padded_numel
        assert record.memory.peaks["master"] == record.memory.peaks["moments"] == 0
        assert sum(record.host.values()) >= 12 * rank.padded_numel // 4


def test_a_save_beside_training_takes_a_copy_of_what_the_rank_saves(plan: Plan) -> None:
    wanted = read_run([*WORDS, "--async-save"], Nodes((8, 8)))
    job = DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=True)
    beside = make_plan(job, A100, parts=("start-up", "first step", "save"))
    for one, other in zip(plan.ranks, beside.ranks, strict=True):
        copied = sum(other.parts["save"].host.values()) - sum(one.parts["save"].host.values())
        tied = VOCABULARY * HIDDEN // 2 if one.trace.coordinates["pp"] else 0  # the first stage saves it
        assert copied == 12 * (one.numel - tied) // 4


def test_a_plan_of_recorded_passes_is_that_of_the_blocks() -> None:
    """No device is there to record what it launches."""
    small = shlex.split(
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --micro-batch-size 1"
        " --train-iters 10 --lr 1e-4 --bf16 --device cuda"
    )
    plans = []
    for more in ([], ["--enable-cuda-graph"]):
        wanted = read_run([*small, *more], Nodes((1,)))
        plans.append(make_plan(DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=True), A100))
    launched, recorded = (plan.ranks[0] for plan in plans)
    assert recorded.trace.parts == launched.trace.parts
    assert [part.memory.peaks for part in recorded.parts.values()] == [
        part.memory.peaks for part in launched.parts.values()
    ]


def test_the_trace_and_the_meter_count_the_same(plan: Plan) -> None:
    for rank in plan.ranks:
        for name in ("first step", "steady step", "evaluation"):
            events = rank.trace.parts[name]
            sent: Counter[tuple[str, str]] = Counter()
            for event in events:
                if isinstance(event, Message) and event.collective not in ("receive", "barrier"):
                    sent[rank.trace.channels[event.channel].axis, event.collective] += event.sent_bytes
                elif isinstance(event, Copy):
                    sent["host", event.way] += event.nbytes
            counted = {
                (axis, collective): count.nbytes
                for axis, row in rank.parts[name].traffic.items()
                for collective, count in row.items()
                if count.nbytes and axis != "file"
            }
            assert {key: nbytes for key, nbytes in sent.items() if nbytes} == counted, (rank.trace.rank, name)


def test_waits_name_earlier_messages_and_copies_of_the_part(plan: Plan) -> None:
    for rank in plan.ranks:
        for events in rank.trace.parts.values():
            waits = [(place, event.number) for place, event in enumerate(events) if isinstance(event, TraceWait)]
            assert all(number < place and isinstance(events[number], Message | Copy) for place, number in waits)
        assert any(isinstance(event, TraceWait) for event in rank.trace.parts["steady step"])


def test_products_are_those_of_the_model(plan: Plan) -> None:
    """A layer has 12 h^2 weights, in halves on two ranks; forward once, recomputed once, backward two products."""
    tokens, own_layers = 2 * MICRO * LENGTH, LAYERS // 2
    one = 2 * tokens * own_layers * 12 * HIDDEN**2 // 2
    head = 2 * tokens * HIDDEN * VOCABULARY // 2
    for rank, with_head in zip(plan.ranks, (False, True), strict=True):
        products: Counter[str] = Counter()
        for event in rank.trace.parts["steady step"]:
            if isinstance(event, Compute) and event.operation.name in ("mm", "addmm", "addmm_"):
                products[event.where.phase] += event.operation.flops
        forward = one + 3 * head * with_head  # the head's loss makes its gradients at once
        assert products == {"forward": forward, "recompute": one, "backward": 2 * one}


def test_the_peak_has_a_place(plan: Plan) -> None:
    rank, part = plan.binding
    record = rank.parts[part]
    assert record.unit and record.line is not None and record.line.file.endswith(".py")
    assert sum(record.memory.at_peak.values()) == record.memory.peak_bytes <= record.needed <= record.reserved


def test_the_page_and_the_json_say_whether_it_fits(plan: Plan) -> None:
    text = "\n".join(lines(plan))
    assert "\nfits: " in text and "between nodes" in text and "peak of rank 0" in text
    found: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    assert found["fits"] is True and found["missing_bytes"] == 0
    assert found["ranks"][0]["parts"]["steady step"]["at_peak"]["parameters"] >= 2 * plan.ranks[0].padded_numel


def test_what_does_not_fit_names_what_binds(plan: Plan) -> None:
    rank, part = plan.binding
    needs = plan.need(rank, part).total
    assert replace(plan, hardware=replace(A100, memory_bytes=needs)).fits
    small = replace(plan, hardware=replace(A100, memory_bytes=needs - 1))
    assert not small.fits and small.missing_bytes == 1
    assert f"does not fit: {part} of rank {rank.trace.rank} needs" in "\n".join(lines(small))
    host = replace(plan, hardware=replace(A100, host_memory_bytes=plan.host_bytes - 1))
    assert not host.fits and "a node's ranks need" in "\n".join(lines(host))
