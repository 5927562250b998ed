"""Tests that all communicators have the interface's methods with the same arguments."""

import inspect

from support.each import each

from megazero.comm.interface import Communicator, CompletedWork
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import MeteredCommunicator
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.wires.forwarding import ForwardingCommunicator
from megazero.comm.wires.quantized import QuantizedGather, QuantizedReduceScatter
from megazero.comm.wires.two_hops import TwoHopCommunicator

CALLS = {name: inspect.signature(call) for name, call in inspect.getmembers(Communicator, inspect.isfunction)}
METHODS = (
    *("all_gather_into", "reduce_scatter_into", "all_to_all_into", "all_reduce", "all_reduce_scalars"),
    *("broadcast", "barrier", "send", "receive_into", "all_gather_coalesced", "reduce_scatter_coalesced"),
)
KINDS = (
    *(LocalCommunicator, ProcessGroupCommunicator, MeteredCommunicator),
    *(ForwardingCommunicator, TwoHopCommunicator, QuantizedGather, QuantizedReduceScatter),
)


def test_the_interface_has_these_methods() -> None:
    assert {name for name in CALLS if not name.startswith("_")} == set(METHODS)


@each("kind", KINDS)
@each("name", METHODS)
def test_every_communicator_takes_the_same_arguments(kind: type, name: str) -> None:
    assert inspect.signature(getattr(kind, name)) == CALLS[name]


def test_what_is_done_needs_no_waiting() -> None:
    done = CompletedWork()
    done.wait()
    done.wait()
