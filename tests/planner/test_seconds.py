"""Tests the times of jobs whose traces are written by hand, as a dry run records them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.each import each

from megazero.comm.mesh import ACTIVATIONS, GRADIENTS, channel_key, channel_keys
from megazero.pipeline import schedule as module
from megazero.pipeline import timeline
from megazero.pipeline.passes import with_exchanges
from megazero.pipeline.schedule import Action, Kind, Shape
from megazero.planner.curves import constant
from megazero.planner.hardware import Hardware, Link, Matrix
from megazero.planner.seconds import StepTime, step_time
from megazero.planner.trace import (
    Begin,
    Channel,
    Compute,
    Copy,
    Event,
    FileAccess,
    JobTrace,
    Message,
    Operation,
    RankTrace,
    TraceWait,
    Where,
)

FREE = Link(0.0, constant(1e30))
SECOND = Link(1.0, constant(1e30))
MACHINE = Hardware(
    name="of a test",
    source="of a test",
    device="cuda",
    devices_per_node=8,
    memory_bytes=1,
    matrix={"fp32": Matrix(1.0, constant(1.0))},
    kernels={"memory": constant(1.0)},
    links={"inside": SECOND, "across": Link(5.0, constant(1e30)), "host": Link(2.0, constant(1e30)), "disk": SECOND},
)
FORWARD, BACKWARD, UPDATE = (Where(phase, "") for phase in ("forward", "backward", "update"))


def kernel(seconds: int, where: Where = FORWARD, home: Any = "device") -> Compute:
    return Compute(Operation("copy_", (), (), 0, "", seconds, 0), where, home)


def product(seconds: int) -> Compute:
    return Compute(Operation("mm", (), (), seconds, "float32", 0, 0), FORWARD)


def message(channel: str = "dp", collective: str = "all_gather", peer: int | None = None) -> Message:
    return Message(channel, collective, peer, 8, 8, 0, BACKWARD)


DP = Channel("dp", (0, 1), (0, 0))


def job(events: Sequence[Event], **channels: Channel) -> JobTrace:
    rank = RankTrace(0, {"tp": 0, "pp": 0, "dp": 0}, {"dp": DP, **channels}, {"steady step": tuple(events)})
    return JobTrace(2, 1, 1, 10, (rank,))


def timed(trace: JobTrace, machine: Hardware = MACHINE, **options: Any) -> StepTime:
    return step_time(trace, machine, lambda stage: (), **options)


def test_kernels_messages_copies_and_files_have_their_seconds() -> None:
    events = [
        product(3),
        kernel(2),
        message(),
        TraceWait(2, "device"),
        Copy("load", 8, FORWARD),
        TraceWait(4, "device"),
    ]
    found = timed(job([*events, FileAccess("read", 8, FORWARD), TraceWait(6, "host"), kernel(1, UPDATE)]))
    assert found.seconds == 3 + 2 + 1 + 2 + 1 + 1
    (stage,) = found.stages
    assert stage.busy == {"products": 3, "memory": 3}
    assert stage.waits == {"host": 0, "dp": 1, "host link": 2, "files": 1}
    assert found.binding == "products"
    assert sum(found.shares().values()) == pytest.approx(1)


def test_a_message_without_a_wait_ends_before_the_step_does() -> None:
    assert timed(job([kernel(2), message()])).seconds == 3


def test_a_group_on_several_nodes_takes_the_links_between_them() -> None:
    across = Channel("dp", (0, 8), (0, 1))
    found = timed(job([message("far"), TraceWait(0, "device")], far=across))
    assert found.seconds == 5
    assert found.stages[0].waits["dp across nodes"] == 5


def test_gathers_and_reductions_share_the_link_between_nodes_alone() -> None:
    events = [message("gathers"), message("sums", "reduce_scatter"), kernel(2), TraceWait(0, "device")]
    for nodes, seconds in (((0, 1), 5 + 5), ((0, 0), 2)):
        channels = {name: Channel("dp", (0, 1), nodes) for name in ("gathers", "sums")}
        assert timed(job(events, **channels)).seconds == seconds


def test_an_update_in_host_memory_is_the_host_s() -> None:
    events = [kernel(4), kernel(6, UPDATE, "host"), kernel(1)]
    slow_host = replace(MACHINE, kernels={"memory": constant(1.0), "host": constant(0.5)})
    assert timed(job(events), slow_host).seconds == 12 + 1  # 6 bytes at half a byte a second, beside the device's 4
    assert timed(job(events)).seconds == 7


def test_a_late_update_takes_time_only_where_it_is_waited_for() -> None:
    events = [kernel(6, UPDATE, "beside"), kernel(2), TraceWait(0, "host"), kernel(1), kernel(1, UPDATE)]
    for device, seconds in (("cuda", 6 + 2), ("cpu", 6 + 2)):
        found = timed(job(events), replace(MACHINE, device=device))
        assert found.seconds == seconds and found.stages[0].sent == {"late update on the host": 6}
    assert timed(job([kernel(6, UPDATE, "beside"), kernel(2)])).seconds == 6, "none is left behind the step"
    slow_host = replace(MACHINE, kernels={"memory": constant(1.0), "host": constant(0.5)})
    assert timed(job(events), slow_host).seconds == 12 + 2


def test_compiled_blocks_move_fewer_bytes_between_their_products() -> None:
    fusing = replace(MACHINE, fused=0.25)
    events = [product(4), kernel(8), kernel(8, UPDATE)]
    assert timed(job(events), fusing).seconds == 4 + 8 + 8
    assert timed(job(events), fusing, fuses=True).seconds == 4 + 2 + 8


def test_a_host_that_issues_too_slowly_is_what_binds() -> None:
    found = timed(job([kernel(1)] * 10), replace(MACHINE, host_seconds=3.0))
    assert found.seconds == 31
    assert found.binding == "wait: host"


def events_of(actions: Sequence[Action], stage: int, stages: int, seconds: dict[Kind, int]) -> list[Event]:
    """Return the events of a stage's actions, as the recorder writes them, with an update at the end."""
    events: list[Event] = []
    receives: dict[tuple[str, int, int], int] = {}
    ways = {Kind.RECEIVE_ACTIVATION: -1, Kind.SEND_ACTIVATION: 1, Kind.RECEIVE_GRADIENT: 1, Kind.SEND_GRADIENT: -1}
    sends = []
    for action in actions:
        if action.kind in ways:
            is_receive = action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
            way = "f" if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_ACTIVATION) else "b"
            peer = (stage + ways[action.kind]) % stages
            if is_receive:
                receives[way, action.micro_batch, action.chunk] = len(events)
            else:
                sends.append(len(events))
            link = min(stage, peer) if abs(stage - peer) == 1 else stages - 1
            name = channel_key(ACTIVATIONS if way == "f" else GRADIENTS, link, stages)
            events.append(message(name, "receive" if is_receive else "send", peer))
            continue
        way = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.INPUT_GRADIENT: "b"}.get(action.kind, "")
        number = receives.get((way, action.micro_batch, action.chunk))
        events += [] if number is None else [TraceWait(number, "device")]
        events += [Begin(action.kind.value, action.micro_batch, action.chunk), kernel(seconds[action.kind])]
    return [*events, *(TraceWait(number, "device") for number in sends), kernel(3, UPDATE)]


@each(
    ("name", "shape"),
    [
        ("1f1b", Shape(5, 7)),
        ("1f1b", Shape(6, 2)),
        ("gpipe", Shape(5, 3)),
        ("zero-bubble", Shape(6, 8)),
        ("interleaved", Shape(4, 8, 2)),
        ("1f1b", Shape(2, 3)),
        ("1f1b", Shape(3, 3)),
    ],
)
def test_stages_between_do_what_the_middle_one_does_in_their_own_order(name: str, shape: Shape) -> None:
    durations = {Kind.FORWARD: 2, Kind.BACKWARD: 5, Kind.INPUT_GRADIENT: 3, Kind.WEIGHT_GRADIENT: 2}
    stages = shape.num_stages
    actions = [with_exchanges(module.schedule(name, shape, stage), shape, stage) for stage in range(stages)]
    channels = dict.fromkeys(channel_keys(stages), Channel("pp", tuple(range(stages)), (0,) * stages))
    ranks = tuple(
        RankTrace(
            stage,
            {"tp": 0, "pp": stage, "dp": 0},
            channels,
            {"steady step": tuple(events_of(actions[stage], stage, stages, durations))},
        )
        for stage in sorted({0, stages // 2, stages - 1})
    )
    trace = JobTrace(stages, stages, shape.num_micro_batches, 1, ranks)

    def order(stage: int) -> list[tuple[str, int, int]]:
        return [(a.kind.value, a.micro_batch, a.chunk) for a in actions[stage] if a.kind.is_computation]

    expected = timeline.simulate(actions, shape, durations, exchange=1)
    found = step_time(trace, MACHINE, order)
    assert found.seconds == expected.makespan + 3
    m = shape.num_micro_batches * shape.num_chunks
    assert found.parts() == {"forward": 2 * m, "backward": 5 * m, "update": 3}
    assert [stage.busy_seconds for stage in found.stages] == [
        sum(span.end - span.start for span in spans) + 3 for spans in expected.stages
    ]


def test_a_norm_over_all_stages_waits_for_the_last_of_them() -> None:
    world = Channel("world", (0, 1), (0, 0))
    ranks = tuple(
        RankTrace(
            stage,
            {"tp": 0, "pp": stage, "dp": 0},
            {"world": world},
            {"steady step": (kernel(seconds), message("world", "scalars"), TraceWait(1, "device"), kernel(1))},
        )
        for stage, seconds in enumerate((2, 9))
    )
    found = timed(JobTrace(2, 2, 1, 1, ranks))
    assert found.seconds == 9 + 2 + 1  # an all-reduce of two ranks has two hops
    assert found.stages[0].waits["world"] == 7 + 2


def test_processes_that_share_cores_are_faster_while_another_waits() -> None:
    """Two stages, of which one works at a time, on one core: each has all of it."""
    shape = Shape(2, 1)
    actions = [with_exchanges(module.schedule("1f1b", shape, stage), shape, stage) for stage in range(2)]
    channels = dict.fromkeys(channel_keys(2), Channel("pp", (0, 1), (0, 0)))
    durations = {Kind.FORWARD: 10, Kind.BACKWARD: 20}
    ranks = tuple(
        RankTrace(
            stage,
            {"tp": 0, "pp": stage, "dp": 0},
            channels,
            {"steady step": tuple(events_of(actions[stage], stage, 2, durations))},
        )
        for stage in range(2)
    )
    two = replace(MACHINE, device="cpu", devices_per_node=2)
    alone, shared = (timed(JobTrace(2, 2, 1, 1, ranks), machine).seconds for machine in (two, replace(two, at_once=1)))
    # forward, exchange, forward, backward, exchange, backward, update
    assert alone == 10 + 1 + 10 + 20 + 1 + 20 + 3
    assert shared < 0.6 * alone


def test_ranks_of_one_stage_that_wait_for_a_message_leave_no_core_to_one_another() -> None:
    two = replace(MACHINE, device="cpu", devices_per_node=2, at_once=1)
    assert (
        timed(
            job([kernel(2), message(), message(), TraceWait(1, "host"), TraceWait(2, "host"), kernel(1)]), two
        ).seconds
        == 5
    )
