"""Tests messages between stages: they arrive in order, have the agreed shape, and are released once received."""

import weakref

import pytest
import torch
from support.late_communicator import unproven_waits
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.pipeline.exchange import Cut, Exchange, ReceivedInput
from megazero.pipeline.schedule import Action, Kind, Shape
from megazero.pipeline.stage_plan import StagePlan

CUT = Cut((3, 2), torch.float64)


def message(kind: Kind, micro_batch: int, chunk: int) -> Tensor:
    """Return the message that belongs between a global chunk and the next one."""
    letter = 1 if kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION) else 2
    return torch.full(CUT.shape, letter * 1e4 + chunk * 100 + micro_batch, dtype=CUT.dtype)


def run_schedule(rank: int, name: str, shape: Shape) -> int:
    """Run every action of a schedule with messages that identify themselves; return the most sends held at once."""
    mesh = mesh_in_worker(rank, pp=shape.num_stages)
    step = StagePlan(name, shape.num_stages, shape.num_chunks, rank).step(shape.num_micro_batches)
    exchange = Exchange(mesh, CUT, step.receipts)
    sent: list[weakref.ref[Tensor]] = []
    early = unproven_waits(mesh)
    early.clear()
    most = 0
    for action in step.actions:
        if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            exchange.receive(action)
        elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            way = shape.global_chunk(rank, action.chunk) - (action.kind is Kind.SEND_GRADIENT)
            tensor = message(action.kind, action.micro_batch, way)
            exchange.send(action, tensor)
            sent.append(weakref.ref(tensor))
            del tensor
            most = max(most, sum(reference() is not None for reference in sent))
        else:
            _take_input(exchange, action, shape, rank)
    assert early == [], "where a send waits for its receiver, this rank would stand still"
    exchange.finish()
    assert not any(reference() is not None for reference in sent)
    return most


def _take_input(exchange: Exchange, action: Action, shape: Shape, stage: int) -> None:
    here = shape.global_chunk(stage, action.chunk)
    kind, at_the_end = Kind.RECEIVE_ACTIVATION, shape.is_first(stage, action.chunk)
    if action.kind is not Kind.FORWARD:
        kind, at_the_end = Kind.RECEIVE_GRADIENT, shape.is_last(stage, action.chunk)
    if action.kind is Kind.WEIGHT_GRADIENT or at_the_end:
        return
    found = exchange.wait(action._replace(kind=kind))
    way = here - (kind is Kind.RECEIVE_ACTIVATION)
    assert torch.equal(found, message(kind, action.micro_batch, way)), (action, found[0, 0])


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("1f1b", Shape(2, 12)),
        ("1f1b", Shape(4, 9)),
        ("gpipe", Shape(2, 6)),
        ("zero-bubble", Shape(4, 9)),
        ("interleaved", Shape(2, 8, 3)),
        ("interleaved", Shape(4, 8, 2)),
    ],
    ids=str,
)
def test_every_message_comes_where_it_belongs(name: str, shape: Shape) -> None:
    run_ranks(shape.num_stages, run_schedule, name, shape)


@pytest.mark.gloo
def test_sends_are_let_go_while_the_step_goes_on() -> None:
    few, many = (run_ranks(2, run_schedule, "1f1b", Shape(2, number)) for number in (6, 30))
    assert few == many, "what is held doesn't grow with the micro-batches"
    assert max(many) <= 4


def wrong_shape(rank: int) -> None:
    exchange = Exchange(mesh_in_worker(rank, pp=2), CUT, {})
    with pytest.raises(AssertionError, match="the stages have agreed on"):
        exchange.send(Action(Kind.SEND_ACTIVATION, 0), torch.zeros(4, 2, dtype=torch.float64))
    with pytest.raises(AssertionError, match="the stages have agreed on"):
        exchange.send(Action(Kind.SEND_ACTIVATION, 0), torch.zeros(3, 2))


@pytest.mark.gloo
def test_another_shape_is_noticed_by_the_sender() -> None:
    run_ranks(2, wrong_shape)


def test_an_input_gets_its_gradient_and_holds_no_memory_of_its_own() -> None:
    received = ReceivedInput()
    x = torch.tensor([1.0, 2.0])
    memory = weakref.ref(x)
    y = received.enter(x) + 3.0  # an addition, which saves nothing
    del x
    assert memory() is None
    y.backward(torch.tensor([5.0, 7.0]))
    assert received.gradient is not None and received.gradient.tolist() == [5.0, 7.0]


def test_without_a_graph_the_input_is_itself() -> None:
    x = torch.ones(2)
    with torch.no_grad():
        assert ReceivedInput().enter(x) is x
